"""Adapters on the routed experts of MindFormers' PyNative models, against dense NumPy."""

import subprocess
import sys

import numpy as np
import pytest

from mindlora.core.numerics.nf4 import dequantize, quantize
from tests.support import pynative_experts as program
from tests.support import pynative_runs
from tests.support.pynative_experts import ADAPTED, ALPHA, EXPERTS, HIDDEN, INNER, QUANTIZED, RANK

pytestmark = pynative_runs.only_with_pynative_trainer
ALL = {**ADAPTED, **QUANTIZED}


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """What tests.support.pynative_experts writes: adapted weights/what -> array."""
    path = tmp_path_factory.mktemp("experts") / "computed.npz"
    command = [sys.executable, "-m", "tests.support.pynative_experts", str(path)]
    run = subprocess.run(
        command, cwd=path.parent, env=pynative_runs.environment(), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    with np.load(path) as arrays:
        return dict(arrays)


def parts_of(computed, begin):
    return {key[len(begin) :]: array for key, array in computed.items() if key.startswith(begin)}


def dense(values):
    """The oracle: each token through each of its experts, in float64."""
    values = {name: array.astype(np.float64) for name, array in values.items()}
    weights = []
    for leaf in ("weight1", "weight2"):
        name = f"experts.{leaf}"
        weight = values[name]
        if f"{name}_absmax" in values:
            whole = program.values_of(name, program.WEIGHTS[name])
            weight = dequantize(quantize(whole.reshape(-1, whole.shape[2]))).reshape(whole.shape)
        if f"experts.{leaf}_lora_a" in values:
            a, b = (values[f"experts.{leaf}_lora_{half}"] for half in "ab")
            weight = weight + ALPHA / RANK * a @ b
        weights.append(weight)
    tokens, probabilities, chosen, _ = program.inputs()
    outputs = []
    for token, shares, experts in zip(tokens.reshape(-1, HIDDEN).astype(np.float64), probabilities, chosen):
        gate, up = np.split(np.einsum("i,eio->eo", token, weights[0][experts]), 2, axis=1)
        inner = gate / (1 + np.exp(-gate)) * up
        outputs.append(np.einsum("e,ei,eio->o", shares, inner, weights[1][experts]))
    return np.stack(outputs)


@pytest.mark.parametrize("name", ALL)
def test_the_output_is_that_of_dense_experts(computed, name):
    expected = dense(parts_of(computed, f"{name}/value/"))
    np.testing.assert_allclose(computed[f"{name}/output"], expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ADAPTED)
def test_merged_they_are_plain_experts_with_the_same_output(computed, name):
    expected = computed[f"{name}/output"]
    np.testing.assert_allclose(computed[f"{name}/merged"], expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ALL)
def test_gradients_by_backward_are_those_of_value_and_grad(computed, name):
    backward, expected = (parts_of(computed, f"{name}/{way}/") for way in ("backward", "value_and_grad"))
    assert len(backward) == 1 + 2 * len(ALL[name]) and backward.keys() == expected.keys()
    for key, array in backward.items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)
        assert array.any()


def test_names_and_shapes_are_mindformers(computed):
    """MindFormers tells adapters by the ends of these names, and how to shard them by the axes."""
    shapes = {name: array.shape for name, array in parts_of(computed, "both/initial/").items()}
    assert shapes == {
        "experts.weight1_lora_a": (EXPERTS, HIDDEN, RANK),
        "experts.weight1_lora_b": (EXPERTS, RANK, 2 * INNER),
        "experts.weight2_lora_a": (EXPERTS, INNER, RANK),
        "experts.weight2_lora_b": (EXPERTS, RANK, HIDDEN),
    }


def test_a_begins_as_on_linear_cells_and_b_at_zero(computed):
    initial = parts_of(computed, "both/initial/")
    for leaf, inputs in (("weight1", HIDDEN), ("weight2", INNER)):
        a = np.abs(initial[f"experts.{leaf}_lora_a"])
        # Kaiming's uniform values: up to one over the root of the number of inputs.
        assert 0.7 < a.max() * np.sqrt(inputs) <= 1 and not initial[f"experts.{leaf}_lora_b"].any()
