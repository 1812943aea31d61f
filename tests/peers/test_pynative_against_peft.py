"""An adapter that MindFormers' PyNative Trainer trained, in PEFT on the Qwen3 of transformers: the same logits."""

import json

import numpy as np
import pytest

from mindlora.data.mindrecord import write_mindrecord
from tests.support import pynative_runs, tiny_runs
from tests.support.pynative_runs import BRIDGE, LORA, QWEN3, only_with_pynative_trainer

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")


# Rows of the data count up by threes.
INVOCATION = [9, 12]
ADALORA = {"use_adalora": True, "target_r": 2, "tinit": 1, "tfinal": 1}


IDS = np.random.default_rng(0).integers(10, tiny_runs.VOCABULARY, (3, tiny_runs.SEQUENCE))
# Twice, once, and not at all.
IDS[0, 2:4] = IDS[0, 7:9] = IDS[1, 5:7] = INVOCATION
LABELS = 3
# What is called a token to ignore is a label that no row has: a CPU takes none that is out of range.
CLASSIFIER = {"architectures": "Qwen3ForTokenClassification", "num_labels": LABELS, "ignore_token_id": LABELS - 1}
# The logits of MindFormers 2.0 are rounded as in bfloat16.
TOLERANCE = 2e-5 if pynative_runs.has_pynative_trainer() and pynative_runs.trainer_version() >= (2, 1) else 2e-2


def trained(folder, pet_config, **model):
    """Trains on folder/rows.mindrecord, with a base in folder/hf for transformers; returns the logits of IDS."""
    pynative_runs.write_base(folder / "base", folder / "hf")
    path = folder / "hf" / "config.json"
    rest = {
        "architectures": ["Qwen3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    sizes = {name: QWEN3[name] for name in SIZES}
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **sizes, **rest}), encoding="utf-8")
    config = pynative_runs.bridged(
        "qwen3",
        folder / "rows.mindrecord",
        4,
        checkpoint={"enable_save": False, "load_path": str(folder / "base"), "no_load_optim": True},
        callbacks=[
            {"type": "LoraCheckpoint", "directory": str(folder / "adapters")},
            {"type": "RecordLogits", "ids": IDS.tolist(), "path": str(folder / "ours.npy")},
        ],
        lora_config={**LORA, "target_modules": "linear"},
        pet_config=pet_config,
    )
    config["model"].update(model)
    run = pynative_runs.launch(config, folder / "run", "--register_path", BRIDGE)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    return np.load(folder / "ours.npy")


@only_with_pynative_trainer
@pytest.mark.parametrize(
    "pet_config",
    [{"use_rslora": True}, {"alora_invocation_tokens": INVOCATION}, {"lora_init": "mica"}, ADALORA],
    ids=str,
)
def test_peft_gives_the_same_logits(peer, tmp_path, pet_config):
    pynative_runs.write_data(tmp_path / "rows.mindrecord", rows=16)
    ours = trained(tmp_path, pet_config)
    theirs = {}
    for name, adapter in (("base", None), ("adapted", tmp_path / "adapters" / "step_4")):
        peer.logits(model=tmp_path / "hf", ids=IDS.tolist(), path=tmp_path / "theirs.npy", adapter=adapter)
        theirs[name] = np.load(tmp_path / "theirs.npy").reshape(-1, QWEN3["vocab_size"])
    assert np.abs(theirs["adapted"] - theirs["base"]).max() > 0.01
    np.testing.assert_allclose(ours, theirs["adapted"], rtol=0, atol=TOLERANCE)


@only_with_pynative_trainer
def test_peft_gives_the_scores_of_a_classifier(peer, tmp_path):
    tokens, _ = pynative_runs.counting_rows(16)
    rows = ({"input_ids": row, "labels": (row % (LABELS - 1)).astype(np.int32)} for row in tokens)
    write_mindrecord(rows, str(tmp_path / "rows.mindrecord"))
    ours = trained(tmp_path, {}, **CLASSIFIER)
    asked = {"adapter": tmp_path / "adapters" / "step_4", "task": "TOKEN_CLS", "labels": LABELS}
    peer.classifier_logits(model=tmp_path / "hf", ids=IDS.tolist(), path=tmp_path / "theirs.npy", **asked)
    theirs = np.load(tmp_path / "theirs.npy").reshape(-1, LABELS)
    assert np.abs(theirs).max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
