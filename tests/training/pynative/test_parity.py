"""mindlora's adapters under MindFormers' PyNative Trainer, beside MindFormers' own LoRA."""

import numpy as np
import pytest

from tests.support import pynative_runs
from tests.support.pynative_runs import BRIDGE, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
FILLED = [{"type": "FillWeights"}]
# Tokens that go to all experts: where two experts are nearly as likely, rounding would send a token to another one.
TO_ALL_EXPERTS = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4}


@pytest.fixture
def routed_to_all(monkeypatch):
    monkeypatch.setitem(pynative_runs.MODELS, "deepseek_v3", {**pynative_runs.MODELS["deepseek_v3"], **TO_ALL_EXPERTS})


@pytest.mark.parametrize("model", pynative_runs.MODELS)
@pytest.mark.usefixtures("routed_to_all")
@shows("lora", "qwen3", "deepseek_v3", trainer="pynative")
def test_losses_are_those_of_mindformers_lora(model, tmp_path):
    data = tmp_path / "rows.mindrecord"
    pynative_runs.write_data(data)
    # MindFormers' own LoRA is on routed experts from 2.1 on.
    has_experts = model == "deepseek_v3" and pynative_runs.trainer_version() >= (2, 1)
    changes = {"lora_config": pynative_runs.LORA_WITH_EXPERTS} if has_experts else {}
    config = pynative_runs.tiny_config(model, data, steps=20, callbacks=FILLED, **changes)

    theirs = pynative_runs.launch(config, tmp_path / "theirs")
    # The loss in pieces rounds otherwise, and attention in float16 makes more of it (see test_loss_in_pieces).
    whole = {"pet_config": {"loss_in_pieces": False}}
    bridged = pynative_runs.bridged(model, data, steps=20, callbacks=FILLED, **changes, **whole)
    ours = pynative_runs.launch(bridged, tmp_path / "ours", "--register_path", BRIDGE)

    assert (theirs.returncode, ours.returncode) == (0, 0), theirs.stderr[-2000:] + ours.stderr[-2000:]
    assert "LoRA by mindlora" in ours.stdout + ours.stderr and "LoRA by mindlora" not in theirs.stdout + theirs.stderr
    expected, found = (pynative_runs.losses(tmp_path / name) for name in ("theirs", "ours"))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    expected, found = (pynative_runs.trained(tmp_path / name) for name in ("theirs", "ours"))
    assert found.keys() == expected.keys() and has_experts == any("weight2_lora_b" in name for name in found)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
