"""Several adapters that learn from preferences in one run of the PyNative Trainer: each learns what it learns alone."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.data.mindrecord import write_mindrecord
from tests.support import pynative_runs, tiny_runs
from tests.support.pynative_runs import LORA, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, ROWS = 3, 4
LOSSES = {"dpo": {"loss": "dpo", "beta": 0.5}, "kto": {"loss": "kto", "beta": 0.4, "desirable_weight": 1.3}}
MARKS = {"dpo": "pairs", "kto": "judgments"}
# Name -> what the adapter has of its own.
ADAPTERS = {"plain": {"seed": 1}, "large": {"seed": 2, "lora_rank": 6, "lora_alpha": 9, "learning_rate": 6.0e-3}}

# Loss -> the adapters that train alone too.
ALONE = {"dpo": ("plain", "large"), "kto": ("large",)}


def write(path, seed, marks):
    """Writes rows of two answers of different lengths to one prompt."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(2 * ROWS):
        tokens = rng.integers(4, tiny_runs.VOCABULARY, (2, tiny_runs.SEQUENCE + 1)).astype(np.int32)
        answers = np.full_like(tokens, -1)
        for answer in range(2):
            answers[answer, 4 : 6 + rng.integers(1, 8)] = answer
        labels = np.where(answers < 0, -100, tokens).astype(np.int32)
        mark = np.array([1 if marks == "pairs" else (-1) ** number], np.int32)
        rows.append({"input_ids": tokens, "labels": labels, "answers": answers, marks: mark})
    write_mindrecord(iter(rows), str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several_preferences")
    pynative_runs.write_base(folder / "base", folder / "hf")
    for loss, marks in MARKS.items():
        write(folder / f"{loss}.mindrecord", 4, marks)
    write(folder / "own.mindrecord", 5, "pairs")
    return folder


def configuration(folder, name, loss, data, **changes):
    """Returns the YAML of a run; a step has two micro-batches, some of whose gradients are clipped."""
    callbacks = [
        {"type": "RunReport", "directory": str(folder / name)},
        {"type": "LoraCheckpoint", "save_steps": STEPS, "directory": str(folder / name)},
        {"type": "HeldOutLoss", "dataset_dir": str(folder / f"{loss}.mindrecord"), "batch_size": 3},
    ]
    config = pynative_runs.tiny_config("qwen3", folder / f"{data}.mindrecord", STEPS)
    config["train_dataset"]["dataloader"]["column_names"] = ["input_ids", "labels", "answers", MARKS[loss]]
    config["training"].update(local_batch_size=2, max_norm=0.2)
    config["lr_scheduler"]["learning_rate"] = changes.pop("learning_rate", 3.0e-3)
    checkpoint = {"load_path": str(folder / "base"), "no_load_optim": True, "enable_save": False}
    return {**config, "callbacks": callbacks, "checkpoint": checkpoint, "preference": LOSSES[loss], **changes}


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what refused it, or None."""
    own_data = {"plain": "dpo", "large": "own"}
    configs = {}
    for loss in LOSSES:
        data = own_data if loss == "dpo" else dict.fromkeys(ADAPTERS, loss)
        nodes = [{"name": name, **own} for name, own in ADAPTERS.items()]
        if loss == "dpo":
            nodes[1]["data"] = str(folder / "own.mindrecord")
        configs[loss] = configuration(folder, loss, loss, loss, pet_config={"adapters": nodes})
        for name in ALONE[loss]:
            own = dict(ADAPTERS[name])
            lora = {**LORA, **{key: own.pop(key) for key in ("lora_rank", "lora_alpha") if key in own}}
            rate = {"learning_rate": own.pop("learning_rate")} if "learning_rate" in own else {}
            alone = f"{loss}_{name}"
            configs[alone] = configuration(folder, alone, loss, data[name], pet_config=own, lora_config=lora, **rate)
    return dict(zip(configs, pynative_runs.series(list(configs.values()), folder)))


def records(folder, key):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


KEYS = ("loss", "tokens", "reward_margin", "kl", "held_out_loss", "held_out_reward_accuracy", "held_out_kl")


@pytest.mark.parametrize("loss, name", [(loss, name) for loss, names in ALONE.items() for name in names])
@shows("several", "qwen3", trainer="pynative")
@shows("preference", "qwen3", trainer="pynative")
def test_an_adapter_learns_what_it_learns_alone(folder, messages, loss, name):
    assert messages[loss] is messages[f"{loss}_{name}"] is None
    together, alone = folder / loss / name, folder / f"{loss}_{name}"
    for key in KEYS:
        expected = records(alone, key)
        assert len(expected) == (1 if key.startswith("held_out") else STEPS)
        # A mean of distances of either sign, whose model rounds to float16.
        tolerance = 1e-4 if key.endswith("kl") else 1e-6
        np.testing.assert_allclose(records(together, key), expected, rtol=1e-4, atol=tolerance, err_msg=key)
    losses = records(together, "loss")
    assert len(set(losses)) == STEPS
    adapter = load_file(together / "lora_checkpoint" / f"step_{STEPS}" / "adapter_model.safetensors")
    for key, array in load_file(alone / f"step_{STEPS}" / "adapter_model.safetensors").items():
        difference = np.abs(adapter[key] - array)
        assert difference.mean() < 1e-5 and difference.max() < 1e-2 * np.abs(array).max(), key
