"""MindFormers' PyNative Trainer runs here, with LoRA of its own: what the tests of this folder stand on."""

import pytest

from tests.support import pynative_runs
from tests.support.pynative_runs import only_with_pynative_trainer


@only_with_pynative_trainer
@pytest.mark.parametrize("model", pynative_runs.MODELS)
def test_mindformers_lora_trains_three_steps(model, tmp_path):
    data = tmp_path / "rows.mindrecord"
    pynative_runs.write_data(data, rows=4)

    # MindFormers 2.0 leaves the base under its LoRA as it was allocated where no checkpoint is loaded.
    config = pynative_runs.tiny_config(model, data, steps=3, callbacks=[{"type": "FillWeights"}])
    run = pynative_runs.launch(config, tmp_path / "run")

    assert run.returncode == 0, run.stderr[-3000:]
    losses = pynative_runs.losses(tmp_path / "run")
    assert losses[0] > losses[1] > losses[2] > 0
    trained = pynative_runs.trained(tmp_path / "run")
    cells = {name.rpartition(".")[0] for name in trained}
    assert "decoder.layers.1.self_attention.linear_qkv" in cells and "decoder.layers.0.mlp.linear_fc1" in cells
    assert {name.rpartition(".")[2] for name in trained} == {"lora_a", "lora_b"}
    assert all(values.any() for values in trained.values())
