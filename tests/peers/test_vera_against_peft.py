"""VeRA's shared projection, against PEFT's random matrices for the same key."""

import json
import shutil

import numpy as np
import pytest

from mindlora import LoraConfig, apply_lora
from mindlora.core.errors import AdapterFormatError
from mindlora.core.numerics.initializers import vera_projection
from mindlora.files.adapters import files as adapter_files
from tests.support.peers import cases
from tests.support.peers.peer import arrays


@pytest.mark.parametrize("name, in_channels, out_channels", [("vera", 48, 32), ("vera-grouped", 32, 48)])
def test_matrices_equal_pefts_bit_for_bit(name, in_channels, out_channels, made):
    """A and B of the widest cells: w2 has 48 inputs in the plain model, w3 has 48 outputs in the other."""
    found = arrays(made.adapters[name] / cases.WEIGHTS)
    key = cases.ADAPTERS[name]["config"].get("projection_prng_key", 0)
    for array, matrix in zip(vera_projection(key, 6, in_channels, out_channels), "AB"):
        np.testing.assert_array_equal(array, found[f"base_model.vera_{matrix}"])


def test_a_network_draws_what_peft_draws(made, make_network):
    network = make_network("plain")
    apply_lora(
        network, LoraConfig(target_modules=["wq", "wv", "w2"], lora_rank=6, use_vera=True, projection_prng_key=7)
    )
    found = arrays(made.adapters["vera"] / cases.WEIGHTS)
    parameters = {p.name: p.asnumpy() for p in network.get_parameters()}
    for matrix in "AB":
        np.testing.assert_array_equal(
            parameters[f"mindpet_delta_lora_vera_{matrix.lower()}"], found[f"base_model.vera_{matrix}"]
        )


def test_vectors_without_matrices_are_refused(made, tmp_path):
    folder = tmp_path / "vera"
    shutil.copytree(made.adapters["vera"], folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "save_projection": False}))
    with pytest.raises(AdapterFormatError, match="save_projection is False, so VeRA's matrices A and B are not in"):
        adapter_files.read(str(folder))
