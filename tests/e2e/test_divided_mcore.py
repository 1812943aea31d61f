"""mcore models divided between two processes train as in one, and their adapters are saved and go on as one."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.files.adapters.convert import Heads
from mindlora.files.adapters.sharding.gather import gather_adapter
from mindlora.files.adapters.sharding.run_settings import RunSettings, heads_of
from tests.support import divided_heads, divided_mcore
from tests.support.divided_mcore import GOES_ON, MODELS, SAVED, STEPS
from tests.support.mcore_networks import TINY
from tests.support.ranks import run_ranks
from tests.support.what_runs import shows

# What two devices have parts of, and what is whole on each.
PARTS = {"linear_qkv": "b", "linear_fc1": "b", "output_layer": "b", "linear_proj": "a", "linear_fc2": "a"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one process has trained and what two ranks have: folders, and the logs of the two."""
    alone, divided = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("divided")
    run_ranks(1, alone, divided_mcore.__file__, alone, alone, *MODELS)
    for axis in ("model_parallel", "expert_parallel"):
        # MindFormers keeps the layout of the first model of a process for all others; the ranks' logs go on.
        names = [name for name, (divided_by, *_) in MODELS.items() if divided_by == axis]
        logs = run_ranks(2, divided, divided_mcore.__file__, divided, alone, *names)
    return alone, divided, logs


@shows("lora", "qwen3", "qwen3_moe", place="processes")
@shows("saved_modules", "qwen3", place="processes")
@shows("experts", "qwen3_moe", place="processes")
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_weights_are_those_of_one_process(runs, name):
    alone, divided, _ = runs
    trained, parts = divided_heads.assert_same(alone, divided, name, SAVED if name == GOES_ON else 0)
    assert parts == {key for key in trained if is_divided(key, name)}


def is_divided(key, name):
    """Returns whether two devices have a part each of what was trained."""
    *_, cell, part = key.split(".")
    if "MoE" in name:
        return "experts" in key
    return part == "weight" or PARTS[cell] == part[-1]


def test_no_rank_has_made_the_logits_of_all_tokens(runs):
    for log in runs[2]:
        assert log.count("Head and loss: 40 tokens at a time") == len(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_adapter_that_rank_0_has_saved_is_that_of_one_process(runs, name, tmp_path):
    alone, divided, _ = runs
    ours = divided / name / "0" / f"step_{STEPS - SAVED if name == GOES_ON else STEPS}"
    theirs = alone / name / "0" / f"step_{STEPS}"
    found, expected = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert (found[key].shape, found[key].dtype) == (array.shape, array.dtype)
        np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-6 * np.abs(array).max(), err_msg=key)
    assert config_of(ours) == config_of(theirs)
    settings = RunSettings(heads=heads_of({**TINY, "model_type": "qwen3"}, Heads()))
    gather_adapter(str(divided / name / "slices"), str(tmp_path / "gathered"), settings=settings)
    gathered = load_file(tmp_path / "gathered" / "adapter_model.safetensors")
    assert gathered.keys() == found.keys()
    assert all(np.array_equal(array, found[key]) for key, array in gathered.items())


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
