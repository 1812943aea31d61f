"""An adapter that MindFormers' PyNative Trainer trained, in PEFT on the Qwen3 of transformers: the same logits."""

import json

import numpy as np
import pytest

from tests.support import pynative_runs, tiny_runs
from tests.support.pynative_runs import BRIDGE, LORA, QWEN3, only_with_pynative_trainer

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")


# Rows of the data count up by threes.
INVOCATION = [9, 12]
ADALORA = {"use_adalora": True, "target_r": 2, "tinit": 1, "tfinal": 1}


@only_with_pynative_trainer
@pytest.mark.parametrize(
    "pet_config", [{"use_rslora": True}, {"alora_invocation_tokens": INVOCATION}, ADALORA], ids=str
)
def test_peft_gives_the_same_logits(peer, tmp_path, pet_config):
    pynative_runs.write_data(tmp_path / "rows.mindrecord", rows=16)
    pynative_runs.write_base(tmp_path / "base", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    rest = {
        "architectures": ["Qwen3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    sizes = {name: QWEN3[name] for name in SIZES}
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **sizes, **rest}), encoding="utf-8")
    ids = np.random.default_rng(0).integers(10, tiny_runs.VOCABULARY, (3, tiny_runs.SEQUENCE))
    # Twice, once, and not at all.
    ids[0, 2:4] = ids[0, 7:9] = ids[1, 5:7] = INVOCATION
    ids = ids.tolist()
    config = pynative_runs.bridged(
        "qwen3",
        tmp_path / "rows.mindrecord",
        4,
        checkpoint={"enable_save": False, "load_path": str(tmp_path / "base"), "no_load_optim": True},
        callbacks=[
            {"type": "LoraCheckpoint", "directory": str(tmp_path / "adapters")},
            {"type": "RecordLogits", "ids": ids, "path": str(tmp_path / "ours.npy")},
        ],
        lora_config={**LORA, "target_modules": "linear"},
        pet_config=pet_config,
    )
    run = pynative_runs.launch(config, tmp_path / "run", "--register_path", BRIDGE)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]

    theirs = {}
    for name, adapter in (("base", None), ("adapted", tmp_path / "adapters" / "step_4")):
        peer.logits(model=tmp_path / "hf", ids=ids, path=tmp_path / "theirs.npy", adapter=adapter)
        theirs[name] = np.load(tmp_path / "theirs.npy").reshape(-1, QWEN3["vocab_size"])
    assert np.abs(theirs["adapted"] - theirs["base"]).max() > 0.01
    # The logits of MindFormers 2.0 are rounded as in bfloat16.
    tolerance = 2e-5 if pynative_runs.trainer_version() >= (2, 1) else 2e-2
    np.testing.assert_allclose(np.load(tmp_path / "ours.npy"), theirs["adapted"], rtol=0, atol=tolerance)
