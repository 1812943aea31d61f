"""Several adapters in one run on a mixture of experts, on its routed experts too: each learns what it learns alone."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.training.report.history import read_history
from tests.support import tiny_runs
from tests.support.mcore_networks import tiny_config
from tests.support.what_runs import showing

STEPS = 8
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS = {
    "large": {"lora_rank": 6, "seed": 1, "target_modules": ["linear_proj"], "target_parameters": EXPERTS[1:]},
    "other": {"lora_alpha": 9, "seed": 2, "learning_rate": 3.0e-2, "target_parameters": EXPERTS},
}
PET = {"lora_rank": 3, "lora_alpha": 6, "target_modules": "all-linear", "lora_dropout": 0.0}

of_models = pytest.mark.parametrize("model", showing("several", "experts"), indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request):
    return request.param


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Output folders: "both" of a run with both adapters, and "other" of one with the second alone."""
    folder = tmp_path_factory.mktemp("several")
    tiny_runs.write_data(folder / "data.mindrecord", 16)
    tiny_runs.write_data(folder / "held_out.mindrecord", 6, seed=1)
    start(folder, model, "both", {**PET, "adapters": [{"name": name, **own} for name, own in ADAPTERS.items()]})
    own = dict(ADAPTERS["other"])
    rate = own.pop("learning_rate")
    start(folder, model, "other", {**PET, **own}, rate)
    return folder


def start(folder, model, name, pet, rate=1e-2):
    callbacks = [
        {"type": "HeldOutLoss", "dataset_dir": str(folder / "held_out.mindrecord"), "every_steps": 4, "batch_size": 2},
        {"type": "LoraCheckpoint", "save_steps": 4, "keep_last": 2},
    ]
    config = tiny_config(str(folder / "data.mindrecord"), 4, callbacks, pet, model)
    config["runner_config"]["gradient_accumulation_steps"] = 2
    config["lr_schedule"]["learning_rate"] = rate
    result = tiny_runs.launch(config, folder / name)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@of_models
def test_the_adapters_are_compared_on_one_page(folder):
    comparison = json.loads((folder / "both" / "comparison.json").read_text(encoding="utf-8"))
    assert all(name in json.dumps(comparison) for name in ADAPTERS) and (folder / "both" / "comparison.html").exists()


@of_models
def test_an_adapter_learns_what_it_learns_alone(folder):
    """The second one, whose tokens and values are behind the first one's, of a rank below the largest."""
    outputs = folder / "both" / "other", folder / "other"
    together, alone = (read_history(str(output)) for output in outputs)
    for series in ("loss", "held_out_loss"):
        found, expected = (history.series(series)[1] for history in (together, alone))
        assert len(expected) == (STEPS if series == "loss" else 2) and expected[-1] < expected[0] - 1e-3
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    states = [
        load_file(output / "lora_checkpoint" / f"step_{STEPS}" / "adapter_model.safetensors") for output in outputs
    ]
    assert states[0].keys() == states[1].keys() and states[0]
    for key, array in states[1].items():
        # Adam makes a step of its full length of a gradient near zero too, whatever its last bits are.
        share = 5e-4 if "experts" in key else 2e-5
        np.testing.assert_allclose(states[0][key], array, rtol=0, atol=share * np.abs(array).max(), err_msg=key)
