"""HeadDivergences against NumPy in float64: values and gradients, whole pieces and parts, heads with adapters."""

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindlora.network.cells.divergences import HeadDivergences
from tests.support.divergences import divergences
from tests.support.finite_differences import finite_differences

CHANNELS, VOCABULARY, PIECE, TOKENS = 5, 11, 4, 9
# MindSpore's exponentials on a CPU are off by up to 1e-5 of their values, and a gradient is a difference of two.
RANK, TEACHER_RANK = 2, 3
TRAINED = ("hidden", "low_rank", "b")


class Network(nn.Cell):
    """The sum of the divergences, each times its factor; student and teacher are parameters."""

    def __init__(self, arrays, beta, adapted, dtype):
        super().__init__()
        self.arrays = [
            Parameter(Tensor(array, dtype), name=name, requires_grad=name in TRAINED) for name, array in arrays.items()
        ]
        for parameter in self.arrays:
            setattr(self, parameter.name, parameter)
        self.divergences = HeadDivergences(dtype, beta, adapted, PIECE)

    def construct(self, labels, factors):
        student = (self.hidden, self.low_rank, self.weight, self.b)
        teacher = (self.teacher_hidden, self.teacher_low_rank, self.teacher_b)
        found = self.divergences(*student, *teacher, labels)
        return (found * factors).sum(), found


class Gradients(nn.Cell):
    """(divergences, gradients) of a Network."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network
        self.both = ops.value_and_grad(network, None, ParameterTuple(network.trainable_params()), has_aux=True)

    def construct(self, labels, factors):
        (_, found), gradients = self.both(labels, factors)
        return found, gradients


def sample(adapted, seed=0):
    """Student and teacher, labels of which some do not count, and factors."""
    rng = np.random.default_rng(seed)
    rank, teacher_rank = (RANK, TEACHER_RANK) if adapted else (1, 1)
    shapes = {
        "hidden": (TOKENS, CHANNELS),
        "low_rank": (TOKENS, rank),
        "weight": (VOCABULARY, CHANNELS),
        "b": (VOCABULARY, rank),
        "teacher_hidden": (TOKENS, CHANNELS),
        "teacher_low_rank": (TOKENS, teacher_rank),
        "teacher_b": (VOCABULARY, teacher_rank),
    }
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if not adapted:
        for name in ("low_rank", "b", "teacher_low_rank", "teacher_b"):
            arrays[name][:] = 0
    labels = rng.integers(0, VOCABULARY, TOKENS).astype(np.int32)
    labels[[2, 6]] = -100, VOCABULARY
    return arrays, labels, rng.random(TOKENS)


def oracle(arrays, labels, factors, beta):
    """Divergences, and the gradients of their weighted sum with respect to hidden, low_rank and b."""
    one = {name: array.astype(np.float64) for name, array in arrays.items()}
    student = one["hidden"] @ one["weight"].T + one["low_rank"] @ one["b"].T
    teacher = one["teacher_hidden"] @ one["weight"].T + one["teacher_low_rank"] @ one["teacher_b"].T
    found, of_logits = divergences(student, teacher, beta)
    counted = (labels >= 0) & (labels < VOCABULARY)
    of_logits = of_logits * (factors * counted)[:, None]
    return found * counted, of_logits @ one["weight"], of_logits @ one["b"], of_logits.T @ one["low_rank"]


@functools.lru_cache(maxsize=None)
def gradients_of(mode, beta, adapted, dtype):
    """Gradients in a mode, compiled once."""
    return Gradients(Network(sample(adapted)[0], beta, adapted, dtype)).set_train()


def compared(arrays, labels, factors, beta, adapted, rtol=2e-5, dtype=ms.float32):
    """Asserts that divergences and gradients are those of the oracle, and returns them."""
    step = gradients_of(ms.get_context("mode"), beta, adapted, dtype)
    for parameter in step.network.arrays:
        parameter.set_data(Tensor(arrays[parameter.name], dtype))
    found, gradients = step(Tensor(labels), Tensor(factors, ms.float32))
    found = [found.asnumpy(), *(gradient.float().asnumpy() for gradient in gradients)]
    for array, expected in zip(found, oracle(arrays, labels, factors, beta), strict=True):
        np.testing.assert_allclose(array, expected, rtol=0, atol=rtol * max(np.abs(expected).max(), 1e-3))
    return found


@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
def test_divergences_and_gradients(graph_mode, beta, adapted):
    found, of_hidden, *_ = compared(*sample(adapted), beta, adapted)
    assert not found[[2, 6]].any() and not of_hidden[[2, 6]].any()
    assert found[0] > 0.01


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
def test_pynative_computes_the_same(pynative_mode, adapted):
    compared(*sample(adapted), 0.3, adapted)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_the_gradient_is_that_of_the_divergence(beta):
    rng = np.random.default_rng(4)
    student, teacher = rng.normal(size=(2, VOCABULARY)), rng.normal(size=(2, VOCABULARY))
    _, found = divergences(student, teacher, beta)
    slopes = finite_differences(lambda: divergences(student, teacher, beta)[0].sum(), student)
    np.testing.assert_allclose(found, slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_a_student_that_is_its_teacher_is_no_way_from_it(graph_mode, beta):
    arrays, labels, factors = sample(True)
    arrays["teacher_hidden"] = arrays["hidden"]
    arrays["teacher_low_rank"] = np.pad(arrays["low_rank"], ((0, 0), (0, 1)))
    arrays["teacher_b"] = np.pad(arrays["b"], ((0, 0), (0, 1)))
    for array in compared(arrays, labels, factors, beta, True, rtol=5e-4):
        assert np.abs(array).max() < 1e-6


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_huge_logits_are_finite(graph_mode, beta):
    arrays, labels, factors = sample(False)
    arrays["hidden"] = arrays["hidden"] * 1e3
    step = gradients_of(ms.get_context("mode"), beta, False, ms.float32)
    for parameter in step.network.arrays:
        parameter.set_data(Tensor(arrays[parameter.name]))
    found, gradients = step(Tensor(labels), Tensor(factors, ms.float32))
    assert np.isfinite(found.asnumpy()).all() and np.isfinite(gradients[0].asnumpy()).all()


def test_16_bits(graph_mode):
    arrays, labels, factors = sample(True)
    arrays = {name: array.astype(np.float16) for name, array in arrays.items()}
    compared(arrays, labels, factors, 0.3, True, rtol=5e-3, dtype=ms.float16)
