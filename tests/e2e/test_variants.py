"""Variants of LoRA by one more line of a YAML: what is trained is what the loaded base and the line ask for."""
import re

import mindspore as ms
import numpy as np

from mindlora import adapter_file, load_lora
from tests.e2e.conftest import TRAINING
from tests.e2e.runs import launch, succeeded
from tests.e2e.test_launcher import loss_of, step_losses


def test_dora_starts_from_the_loaded_base_and_trains(data, base, fresh_network, tmp_path):
    variant = ("--model.model_config.pet_config.use_dora", "True", "--load_checkpoint", base)
    stdout = succeeded(launch(tmp_path / "train", "--train_dataset_dir", data.train, *variant, *TRAINING))
    losses = step_losses(stdout)
    assert losses[-1] < losses[0] - 0.3
    folder = tmp_path / "train" / "output" / "lora_checkpoint" / "best"
    adapter, weights = adapter_file.read(str(folder)), ms.load_checkpoint(str(base))
    assert adapter.use_dora
    for path in adapter.paths:
        norms = np.linalg.norm(weights[f"{path}.weight"].asnumpy(), axis=1)
        moved = np.abs(adapter.tensors[path, "magnitude"] - norms)
        # Adam moves a number by its learning rate a step: far less than the norms of any other base are away.
        assert 0 < moved.max() < 0.1
    # Here the adapter is loaded first and the base then.
    stdout = succeeded(launch(tmp_path / "eval", "--run_mode", "eval", "--eval_dataset_dir", data.eval, "--batch_size",
                              "4", *variant, "--model.model_config.pet_config.adapter_path", folder))
    found = float(re.search(r"'PerplexityMetric': {'loss': ([\d.]+)", stdout)[1])
    network = fresh_network(use_dora=True)
    load_lora(network, str(folder))
    assert abs(found - loss_of(network, data.eval_rows)) < 1e-4
