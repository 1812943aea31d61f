"""DoRA, VeRA and MiSS under MindFormers' PyNative Trainer, beside plain LoRA from the same base."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.core.numerics.initializers import vera_projection
from mindlora.files.adapters.convert import Heads, convert_adapter
from tests.support import pynative_runs
from tests.support.pynative_runs import BRIDGE, LORA, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS = 4
PROJECTION = "decoder.layers.1.self_attention.linear_proj"
RUNS = {
    "lora": {"lora_rank": 4},
    "dora": {"use_dora": True},
    "miss": {"use_miss": True},
    "dora_resumed": {"use_dora": True},
    "vera": {"use_vera": True},
    "vera_resumed": {"use_vera": True},
}
# Their files can hold VeRA's vectors.
NOT_JOINED = {**LORA, "target_modules": r"linear_(proj|fc2)$"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the bases hf and base, and the RUNS: four steps each, the resumed one the last two of DoRA's."""
    folder = tmp_path_factory.mktemp("variants")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=16)
    pynative_runs.write_base(folder / "base", folder / "hf")
    for name, pet_config in RUNS.items():
        variant, _, resumed = name.partition("_")
        path = folder / f"{variant}_saved" / "iteration_00000002" if resumed else folder / "base"
        checkpoint = {"load_path": str(path), "no_load_optim": not resumed}
        saved = {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": 2}
        config = pynative_runs.bridged("qwen3", folder / "rows.mindrecord", STEPS)
        config["checkpoint"] = {**saved, **checkpoint}
        if variant == "vera":
            config["lora_config"] = NOT_JOINED
        config["callbacks"] = [{"type": "LoraCheckpoint", "save_steps": 2, "directory": str(folder / f"{name}_peft")}]
        run = pynative_runs.launch({**config, "pet_config": pet_config}, folder / name, "--register_path", BRIDGE)
        assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    return folder


SHOWN = [pytest.param(name, marks=shows(name, "qwen3", trainer="pynative")) for name in ("dora", "miss", "vera")]


@pytest.mark.parametrize("name", SHOWN)
def test_it_begins_as_the_base_and_learns(runs, name):
    losses, plain = (pynative_runs.losses(runs / run) for run in (name, "lora"))
    np.testing.assert_allclose(losses[0], plain[0], rtol=1e-6)
    assert losses[-1] < losses[0] and losses[1:] != plain[1:]


def test_a_magnitude_begins_as_the_norms_of_the_base_and_trains(runs):
    base = load_file(runs / "base" / pynative_runs.BASE_FILE)
    trained = pynative_runs.trained(runs / "dora")
    magnitude = trained[f"{PROJECTION}.magnitude_lora_b"]
    norms = np.linalg.norm(base[f"{PROJECTION}.weight"], axis=1)
    # AdamW moves each number by at most the learning rate in a step, 0.01.
    assert 1e-3 < np.abs(magnitude - norms).max() < 0.011 * STEPS


@pytest.mark.parametrize("variant", ["dora", "vera"])
def test_a_resumed_run_goes_on_with_its_magnitudes_and_projection(runs, variant):
    whole, resumed = (pynative_runs.losses(runs / name) for name in (variant, f"{variant}_resumed"))
    assert resumed == whole[2:]
    whole, resumed = (pynative_runs.trained(runs / name) for name in (variant, f"{variant}_resumed"))
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)


def test_vera_has_pefts_projection_and_its_vectors_in_a_folder(runs):
    tensors = load_file(runs / "vera_peft" / f"step_{STEPS}" / "adapter_model.safetensors")
    # As wide as the widest of the cells: linear_proj takes 48 columns, linear_fc2 40.
    a, b = vera_projection(0, LORA["lora_rank"], 48, 32)
    np.testing.assert_array_equal(tensors["base_model.vera_A"], a)
    np.testing.assert_array_equal(tensors["base_model.vera_B"], b)
    trained = pynative_runs.trained(runs / "vera")
    assert len(trained) == 8
    np.testing.assert_array_equal(
        tensors["base_model.model.model.layers.1.self_attn.o_proj.vera_lambda_b"],
        trained[f"{PROJECTION}.lambda_b_lora_b"],
    )


@pytest.mark.parametrize(
    "name, setting", [("dora", ("use_dora", True)), ("miss", ("peft_type", "MISS")), ("vera", ("peft_type", "VERA"))]
)
def test_mindformers_folder_is_the_same_adapter_as_the_one_for_peft(runs, name, setting):
    peft, converted = runs / f"{name}_peft" / f"step_{STEPS}", runs / f"{name}_converted"
    step = runs / f"{name}_saved" / f"iteration_{STEPS:08d}"
    convert_adapter(str(step), str(converted), "peft", heads=Heads(4, 2, 12))

    settings = json.loads((converted / "adapter_config.json").read_text(encoding="utf-8"))
    assert setting in settings.items()
    tensors, expected = (load_file(folder / "adapter_model.safetensors") for folder in (converted, peft))
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[key], expected[key]) for key in expected)
