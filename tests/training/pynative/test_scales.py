"""What an adapter is of and how it is scaled, under MindFormers' PyNative Trainer: against the base with it merged."""

import json

import pytest

from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from tests.support import pynative_runs
from tests.support.pynative_runs import LORA, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS = 3
FROZEN = {"type": "ConstantWarmUpLR", "learning_rate": 0.0, "warmup_steps": 0}
PATTERNS = {"rank_pattern": {".*linear_fc2": 2}, "alpha_pattern": {".*linear_proj": 3}, "layers_to_transform": [1]}
SECOND_LAYER = {**LORA, "exclude_layers": r"layers\.0"}
WITH_EMBEDDING = {**LORA, "target_modules": "word_embeddings|linear_proj|output_layer"}
# Name -> pet_config, lora_config, and the feature that the run shows.
RUNS = {
    "stabilized": ({"use_rslora": True, **PATTERNS}, SECOND_LAYER, "rslora"),
    "frozen_a": ({"freeze_lora_a": True}, LORA, "lora_fa"),
    "embedding": ({"seed": 1}, WITH_EMBEDDING, "embedding"),
}


def configuration(folder, name, base, **changes):
    callbacks = [
        {"type": "LoraCheckpoint", "save_steps": STEPS, "directory": str(folder / f"{name}_peft")},
        {"type": "HeldOutLoss", "dataset_dir": str(folder / "rows.mindrecord"), "every_steps": 1, "batch_size": 4},
        {"type": "RecordLosses", "directory": str(folder / name)},
        {"type": "RunReport", "directory": str(folder / name)},
    ]
    checkpoint = {"enable_save": False, "load_path": str(folder / base), "no_load_optim": True}
    config = pynative_runs.tiny_config("qwen3", folder / "rows.mindrecord", STEPS)
    return {**config, "callbacks": callbacks, "checkpoint": checkpoint, **changes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base, the runs, and one of each base with the adapter merged."""
    folder = tmp_path_factory.mktemp("scales")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=4)
    pynative_runs.write_base(folder / "base", folder / "hf")
    configs = [
        configuration(folder, name, "base", pet_config=pet_config, lora_config=lora_config)
        for name, (pet_config, lora_config, _) in RUNS.items()
    ]
    assert pynative_runs.series(configs, folder) == [None] * len(RUNS)
    configs = []
    for name in RUNS:
        merged = folder / f"{name}_merged"
        merge_checkpoint(str(folder / "hf"), str(folder / f"{name}_peft" / f"step_{STEPS}"), str(merged))
        convert_base(str(merged), str(folder / f"{name}_base"), None, "pynative")
        configs.append(configuration(folder, f"{name}_judge", f"{name}_base", lr_scheduler=FROZEN))
    assert pynative_runs.series(configs, folder) == [None] * len(RUNS)
    return folder


def held_out(folder, name):
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["held_out_loss"] for record in map(json.loads, lines) if "held_out_loss" in record]


SHOWN = [pytest.param(name, marks=shows(feature, "qwen3", trainer="pynative")) for name, (*_, feature) in RUNS.items()]


@pytest.mark.parametrize("name", SHOWN)
def test_the_base_with_the_adapter_merged_is_the_model_that_was_trained(folder, name):
    losses, (expected, *_) = held_out(folder, name), held_out(folder, f"{name}_judge")
    assert losses[-1] == pytest.approx(expected, rel=2e-5) and losses[-1] < losses[0] - 1e-3


def test_ranks_are_those_of_the_patterns_and_a_frozen_a_stays(folder):
    trained = pynative_runs.trained(folder / "stabilized")
    ranks = {name: array.shape[0] for name, array in trained.items() if name.endswith("lora_a")}
    assert all("layers.1." in name for name in ranks) and len(ranks) == 4
    assert {rank for name, rank in ranks.items() if "linear_fc2" in name} == {2}
    assert {rank for name, rank in ranks.items() if "linear_fc2" not in name} == {LORA["lora_rank"]}
    assert all(name.endswith("lora_b") for name in pynative_runs.trained(folder / "frozen_a"))


def test_the_embedding_has_an_adapter_that_trains(folder):
    trained = pynative_runs.trained(folder / "embedding")
    assert trained["embedding.word_embeddings.lora_a"].shape[0] == LORA["lora_rank"]
    assert trained["embedding.word_embeddings.lora_b"].any() and "output_layer.lora_b" in trained
