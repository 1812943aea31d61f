"""A base that is loaded, LoraCheckpoint's PEFT folders, and a run that goes on, under MindFormers' PyNative Trainer."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.base.convert import convert_base
from mindlora.base.merge import merge_checkpoint
from tests.support import pynative_runs
from tests.support.pynative_runs import BRIDGE, LORA, only_with_pynative_trainer

pytestmark = only_with_pynative_trainer
STEPS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the bases hf and base, a run of four steps, whole, and resumed, which repeats its last two."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=16)
    pynative_runs.write_base(folder / "base", folder / "hf")
    saved = {"enable_save": True, "save_path": str(folder / "saved"), "save_interleaved_steps": 2}
    config = pynative_runs.bridged("qwen3", folder / "rows.mindrecord", STEPS)
    for name, checkpoint in (
        ("whole", {**saved, "load_path": str(folder / "base"), "no_load_optim": True}),
        ("resumed", {"enable_save": False, "load_path": str(folder / "saved" / "iteration_00000002")}),
    ):
        saving = {"type": "LoraCheckpoint", "save_steps": 2, "directory": str(folder / f"{name}_adapters")}
        run = pynative_runs.launch(
            {**config, "checkpoint": checkpoint, "callbacks": [saving], "pet_config": {"lora_rank": 4}},
            folder / name,
            "--register_path",
            BRIDGE,
        )
        assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    return folder


def test_a_resumed_run_is_the_rest_of_the_whole_one(runs):
    whole, resumed = (pynative_runs.losses(runs / name) for name in ("whole", "resumed"))
    assert resumed == whole[2:] and len(whole) == STEPS
    whole, resumed = (pynative_runs.trained(runs / name) for name in ("whole", "resumed"))
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)


def test_a_folder_for_peft_holds_what_was_trained(runs):
    folder = runs / "whole_adapters" / f"step_{STEPS}"
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["r"], settings["lora_alpha"]) == (LORA["lora_rank"], LORA["lora_alpha"])
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"} <= set(settings["target_modules"])
    again = load_file(runs / "resumed_adapters" / f"step_{STEPS}" / "adapter_model.safetensors")
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        np.testing.assert_array_equal(again[name], tensor)


def test_merged_into_the_base_it_is_the_trained_model(runs):
    """The delta that Hugging Face's base gets is scale B A, cell by cell, once it is in MindFormers' names again."""
    adapter, merged = runs / "whole_adapters" / f"step_{STEPS}", runs / "merged"
    merge_checkpoint(str(runs / "hf"), str(adapter), str(merged))
    convert_base(str(merged), str(runs / "merged.safetensors"), None, "mcore")
    before, after = load_file(runs / "base" / pynative_runs.BASE_FILE), load_file(runs / "merged.safetensors")
    trained = pynative_runs.trained(runs / "whole")
    cells = sorted(name[: -len(".lora_a")] for name in trained if name.endswith(".lora_a"))
    assert len(cells) == 8
    scale = LORA["lora_alpha"] / LORA["lora_rank"]
    for cell in cells:
        delta = scale * trained[f"{cell}.lora_b"] @ trained[f"{cell}.lora_a"]
        assert np.abs(delta).max() > 1e-3
        np.testing.assert_allclose(after[f"{cell}.weight"] - before[f"{cell}.weight"], delta, atol=1e-6)
