"""VeRA from a YAML: trained, saved in PEFT's format and evaluated from its adapter."""

import json

import numpy as np

from mindlora import load_lora
from mindlora.core.numerics.initializers import vera_projection
from mindlora.files.adapters import files as adapter_files
from tests.e2e.conftest import TRAINING
from tests.support.runs import evaluated, launch, loss_of, step_losses, succeeded
from tests.support.what_runs import shows

PET = "--model.model_config.pet_config."
# Ten times LoRA's learning rate, as in the paper.
VERA = (
    PET + "use_vera",
    "True",
    PET + "lora_rank",
    "32",
    PET + "lora_alpha",
    "32",
    PET + "d_initial",
    "1.0",
    PET + "projection_prng_key",
    "5",
)


@shows("vera", "llama")
def test_vera_trains_and_its_adapter_is_peft_s(data, base, fresh_network, tmp_path):
    stdout = succeeded(
        launch(tmp_path / "train", "--train_dataset_dir", data.train, "--load_checkpoint", base, *VERA, *TRAINING)
    )
    losses = step_losses(stdout)
    assert losses[-1] < losses[0] - 0.1
    folder = tmp_path / "train" / "output" / "lora_checkpoint" / "best"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["projection_prng_key"]) == ("VERA", 32, 5)
    adapter = adapter_files.read(str(folder))
    # Each path uses a part of A, which is as wide as w2 needs, and of B, which has as many rows as w1 and w3 need.
    a, b = (max((adapter.tensors[path, half] for path in adapter.paths), key=np.size) for half in "AB")
    for array, expected in zip((a, b), vera_projection(5, 32, a.shape[1], b.shape[0])):
        np.testing.assert_array_equal(array, expected)
    assert all(adapter.tensors[path, "lambda_b"].any() for path in adapter.paths)
    found = evaluated(tmp_path / "eval", data.eval, base, folder, *VERA)
    network = fresh_network(use_vera=True, lora_rank=32, lora_alpha=32)
    load_lora(network, str(folder))
    assert abs(found - loss_of(network, data.eval_rows)) < 1e-4
