"""multi_lora_linear beyond tests/ops/test_contract.py: bits of a token, threads, widened weights, axes, indices."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora.errors import BackendError
from mindlora.ops import MultiLoraLinear, MultiLoraLinearWithBias
from tests.ops.operators.multi_lora_delta import K, N
from tests.ops.operators.multi_lora_linear import WITH_BIAS
from tests.support.native import DTYPES, assert_near, call, normal, values
from tests.support.op_paths import PATHS
from tests.support.pooled_adapters import MAX_RANK, SLOTS, TRUE_RANKS, pooled


def case(tokens, kind, dtype="float32", k=K, n=N):
    """The seven inputs."""
    return [array for array, _ in WITH_BIAS.inputs(dtype, tokens, kind, k, n).values()]


def native(dtype, inputs):
    """What the kernel computes; without a bias it is given six inputs."""
    dtypes = [dtype, dtype, dtype, "int32", "float32", "int32", dtype]
    shape = (*inputs[0].shape[:-1], len(inputs[1]))
    return call("MultiLoraLinear", list(zip(inputs, dtypes)), shape, dtype)


def networks():
    """Cells without and with a bias, by the number of their inputs."""
    return {cell.inputs: cell() for cell in (MultiLoraLinear, MultiLoraLinearWithBias)}


def assert_both(nets, reference, inputs):
    """Asserts that the results without and with bias are those of the reference."""
    for count, net in nets.items():
        expected = reference.multi_lora_linear(*inputs[:count])
        assert_near(values(net(*map(Tensor, inputs[:count]))), expected, "float32", 1 + K + MAX_RANK * K**0.5)


@pytest.fixture
def threads(library):
    """Returns a function that sets how many threads a kernel has."""
    before = library.omp_get_max_threads()
    yield library.omp_set_num_threads
    library.omp_set_num_threads(before)


# The second is large enough for several threads.
SIZES = pytest.mark.parametrize("k, n", [(37, 53), (1061, 530)])


@pytest.mark.parametrize("pool", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
def test_weights_and_pools_of_16_bits_are_widened_as_they_are_read(isa, reference, weight, pool):
    dtypes = ["float32", weight, pool, "int32", "float32", "int32", "float32"]
    for tokens in (1, 17):
        # More than one part of K that a block of rows takes, and an odd end.
        inputs = case(tokens, "uniform", k=1061)
        inputs[1] = normal(N, 1061, seed=2, dtype=weight)
        inputs[2] = pooled(1061 + N, TRUE_RANKS, MAX_RANK, pool)[0]
        found = call("MultiLoraLinear", list(zip(inputs, dtypes)), (tokens, N), "float32")
        assert_near(found, reference.multi_lora_linear(*inputs), "float32", 1 + 1061 + MAX_RANK * 1061**0.5)


@SIZES
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(isa, threads, reference, dtype, k, n):
    for tokens in (1, 5, 13):
        inputs = case(tokens, "uniform", dtype, k, n)
        threads(1)
        alone = native(dtype, inputs)
        assert_near(alone, reference.multi_lora_linear(*inputs), dtype, 1 + k + MAX_RANK * k**0.5)
        for count in (2, 3, 7):
            threads(count)
            np.testing.assert_array_equal(native(dtype, inputs), alone)


@SIZES
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_batch(isa, dtype, k, n):
    x, *others, indices, bias = case(23, "uniform", dtype, k, n)
    indices[::5] = -1
    together = native(dtype, [x, *others, indices, bias])
    order = np.random.default_rng(0).permutation(23)
    np.testing.assert_array_equal(native(dtype, [x[order], *others, indices[order], bias]), together[order])
    for start, end in ((0, 1), (7, 8), (3, 9), (10, 23)):
        rows = slice(start, end)
        np.testing.assert_array_equal(native(dtype, [x[rows], *others, indices[rows], bias]), together[rows])


def test_a_token_of_the_base_has_the_bits_that_it_has_without_any_adapter(isa):
    x, *others, indices, bias = case(12, "skipped", k=300, n=260)
    mixed = native("float32", [x, *others, indices, bias])
    base = native("float32", [x, *others, np.full(12, -1, np.int32), bias])
    plain = (indices < 0) | (TRUE_RANKS[np.maximum(indices, 0)] == 0)
    assert plain.any() and not plain.all()
    np.testing.assert_array_equal(mixed[plain], base[plain])
    assert (mixed != base)[~plain].any(axis=1).all()


@pytest.mark.parametrize("shape", [(9,), (2, 1, 3), ()])
def test_fixed_shapes_of_any_number_of_axes(each_path, reference, shape):
    x, *others = case(int(np.prod(shape)), "skipped")
    inputs = [x.reshape(*shape, K), *others]
    assert_both(networks(), reference, inputs)


def test_indices_after_the_tokens_are_not_looked_at(each_path, reference):
    """A server keeps one Parameter, as long as its largest step; tokens come and go."""
    (x, *others, indices, bias), nets = case(5, "uniform"), networks()
    longer = np.append(indices, np.int32([SLOTS, 10**9, -1]))
    for count, net in nets.items():
        net.set_inputs(Tensor(shape=[None, 1, K], dtype=ms.float32), *map(Tensor, [*others, longer, bias][: count - 1]))
    for tokens in (5, 1, 3):
        assert_both(nets, reference, [x[:tokens, None], *others, longer, bias])


def test_no_tokens(each_path):
    # Not in the table's sizes: after them, MindSpore's own operators give wrong sums in the same graph.
    for count, net in networks().items():
        assert net(*map(Tensor, case(0, "uniform")[:count])).shape == (0, N)


def test_a_row_with_an_index_beyond_the_pool_is_nan_where_no_error_can_be_raised(pynative_mode, monkeypatch, library):
    # A kernel on a CPU refuses it: see the table.
    monkeypatch.setenv("MINDLORA_BACKEND", PATHS[-1])
    inputs = case(4, "distinct")
    inputs[5][2] = SLOTS
    for count, net in networks().items():
        y = values(net(*map(Tensor, inputs[:count])))
        assert (np.isnan(y).all(axis=1) == [False, False, True, False]).all()


@pytest.mark.parametrize("kind", [MultiLoraLinear, MultiLoraLinearWithBias])
def test_a_gradient_is_refused(each_path, kind):
    inputs = map(Tensor, case(4, "distinct")[: kind.inputs])
    with pytest.raises(BackendError, match="multi_lora_linear has no gradient"):
        ms.grad(kind(), 0)(*inputs)
