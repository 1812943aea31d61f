"""Adapters on the Linear of MindFormers' PyNative models give what they give on nn.Dense, by Tensor.backward()."""

import numpy as np
import pytest

from tests.support import pynative_runs
from tests.support.pynative_variants import VARIANTS

pytestmark = pynative_runs.only_with_pynative_trainer


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """What tests.support.pynative_variants writes: variant/cell/what -> array."""
    path = tmp_path_factory.mktemp("cells") / "computed.npz"
    run = pynative_runs.python(["-m", "tests.support.pynative_variants", path], path.parent)
    assert run.returncode == 0, run.stderr[-3000:]
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients_are_those_on_nn_dense(computed, variant):
    check_like_nn_dense(computed, variant, "linear")


@pytest.mark.parametrize("variant", ["lora", "rslora", "freeze_a"])
def test_those_of_a_sharded_cell_are_too(computed, variant):
    check_like_nn_dense(computed, variant, "sharded")


def check_like_nn_dense(computed, variant, where):
    results = {key: array for key, array in computed.items() if key.startswith(f"{variant}/{where}/")}
    assert f"{variant}/{where}/x" in results and len(results) >= 3
    for key, array in results.items():
        expected = computed[key.replace(f"/{where}/", "/dense/")]
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max(), err_msg=key)


def test_mindformers_takes_every_part_for_an_adapters(computed):
    endings = (".lora_a", ".lora_b", "_lora_a", "_lora_b")
    names = [str(name) for key, name in computed.items() if "/linear_name/" in key]
    assert len(names) == 26 and all(f".{name}".endswith(endings) for name in names)
