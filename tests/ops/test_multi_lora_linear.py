"""multi_lora_linear on every path against its reference: mixed ranks, popularity of adapters, batches, threads."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.core.errors import BackendError
from mindlora.ops import MultiLoraLinear, MultiLoraLinearWithBias
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, tensor, values
from tests.support.op_paths import PATHS
from tests.support.pooled_adapters import KINDS, MAX_RANK, SLOTS, TRUE_RANKS, pooled, popularity

K, N = 37, 53
TERMS = 1 + K + MAX_RANK * K**0.5


def case(tokens, kind, dtype="float32", k=K, n=N, ranks=TRUE_RANKS, max_rank=MAX_RANK):
    """The seven inputs."""
    return [
        normal(tokens, k, seed=1, dtype=dtype),
        normal(n, k, seed=2, dtype=dtype),
        *pooled(k + n, ranks, max_rank, dtype),
        popularity(kind, tokens, len(ranks)),
        normal(n, seed=4, dtype=dtype),
    ]


def native(dtype, inputs):
    """What the kernel computes; without a bias it is given six inputs."""
    dtypes = [dtype, dtype, dtype, "int32", "float32", "int32", dtype]
    shape = (*inputs[0].shape[:-1], len(inputs[1]))
    return call("MultiLoraLinear", list(zip(inputs, dtypes)), shape, dtype)


def tensors(dtype, inputs):
    return [tensor(array, dtype if array.dtype == np.float32 else "int32") for array in inputs[:4]] + [
        Tensor(inputs[4]),
        Tensor(inputs[5]),
        *(tensor(array, dtype) for array in inputs[6:]),
    ]


class Net(nn.Cell):
    """multi_lora_linear as a user would call it in a network."""

    def __init__(self):
        super().__init__()
        self.linear, self.with_bias = MultiLoraLinear(), MultiLoraLinearWithBias()

    def construct(self, x, w, pool, ranks, scales, indices, bias):
        return (
            self.linear(x, w, pool, ranks, scales, indices),
            self.with_bias(x, w, pool, ranks, scales, indices, bias),
        )


def assert_both(results, reference, inputs, dtype="float32", terms=TERMS):
    """Asserts that the results without and with bias are those of the reference."""
    for y, count in zip(results, (6, 7)):
        assert_near(values(y), reference.multi_lora_linear(*inputs[:count]), dtype, terms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_the_reference(isa, reference, dtype, kind):
    for tokens in (0, 1, 3, 8, 13, 31, 200):
        inputs = case(tokens, kind, dtype)
        for count in (6, 7):
            expected = reference.multi_lora_linear(*inputs[:count])
            assert_near(native(dtype, inputs[:count]), expected, dtype, TERMS)


def test_a_layer_without_outputs(isa):
    x, _, pool, *rest = case(3, "zipf", "float32")[:6]
    k = x.shape[1]
    assert native("float32", [x, np.zeros((0, k), np.float32), pool[:, :, :k], *rest]).shape == (3, 0)


@pytest.mark.parametrize("rank", [1, 7, 8, 9, 13, 16, 64, 128, 256])
@pytest.mark.parametrize("k, n", [(1, 1), (15, 17), (64, 130), (70, 1025)])
def test_the_kernel_at_every_rank_and_at_the_edges_of_its_vectors(isa, reference, rank, k, n):
    inputs = case(9, "distinct", "float32", k, n, np.int32([rank, 0, max(1, rank - 1)]), rank)
    expected = reference.multi_lora_linear(*inputs)
    assert_near(native("float32", inputs), expected, "float32", 1 + k + rank * k**0.5)


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
    for tokens in (1, 7, 17):
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_through_mindspore(mode, path, reference, dtype):
    net, (_, w, pool, ranks, scales, _, bias) = Net(), case(1, "none", dtype)
    fixed = tensors(dtype, [w[:0], w, pool, ranks, scales, ranks, bias])
    net.set_inputs(
        Tensor(shape=[None, K], dtype=getattr(ms, dtype)), *fixed[1:5], Tensor(shape=[None], dtype=ms.int32), fixed[6]
    )
    # The kernel is tested above with all of both. Without 0 tokens there: after them, MindSpore's own operators give
    # wrong sums for the shapes that follow.
    fewer = (1, 3) if (path, mode) == ("composed", ms.GRAPH_MODE) else (0, 1, 3)
    patterns = [(kind, 31) for kind in ("distinct", "skewed", "skipped", "none")]
    patterns += [("skipped", tokens) for tokens in fewer]
    for kind, tokens in patterns:
        inputs = case(tokens, kind, dtype)
        results = net(*tensors(dtype, inputs))
        assert all(y.dtype == getattr(ms, dtype) for y in results)
        assert_both(results, reference, inputs, dtype)


@pytest.mark.parametrize("shape", [(9,), (2, 1, 3), ()])
def test_fixed_shapes_of_any_number_of_axes(each_path, reference, shape):
    x, *others = case(int(np.prod(shape)), "skipped")
    inputs = [x.reshape(*shape, K), *others]
    results = Net()(*tensors("float32", inputs))
    assert all(y.shape == (*shape, N) for y in results)
    assert_both(results, reference, inputs)


def test_indices_after_the_tokens_are_not_looked_at(each_path, reference):
    """A server keeps one Parameter, as long as its largest step; tokens come and go."""
    net, (x, *others, indices, bias) = Net(), case(5, "uniform")
    longer = np.append(indices, np.int32([SLOTS, 10**9, -1]))
    net.set_inputs(Tensor(shape=[None, 1, K], dtype=ms.float32), *tensors("float32", [x, *others, longer, bias])[1:])
    for tokens in (5, 1, 3):
        inputs = [x[:tokens, None], *others, longer, bias]
        assert_both(net(*tensors("float32", inputs)), reference, inputs)


def test_the_same_again_is_the_same_bit_for_bit(each_path):
    inputs, net = tensors("float32", case(9, "zipf", k=300, n=530)), Net()
    first = [y.asnumpy() for y in net(*inputs)]
    for _ in range(5):
        for y, before in zip(net(*inputs), first):
            np.testing.assert_array_equal(y.asnumpy(), before)


def test_an_index_beyond_the_pool_is_never_silent(mode, path):
    inputs = case(4, "distinct")
    inputs[5][2] = SLOTS
    if path == "cpu":
        with refused_by_kernel(r"mindlora multi_lora_linear: row 2 asks for slot 7 of 7\."):
            MultiLoraLinear()(*tensors("float32", inputs)[:6]).asnumpy()
    else:
        for y in Net()(*tensors("float32", inputs)):
            assert (np.isnan(values(y)).all(axis=1) == [False, False, True, False]).all()


@pytest.mark.skipif(PATHS[0] != "cpu", reason="there is no kernel for an NPU")
@pytest.mark.parametrize("rank", [MAX_RANK + 1, -1])
def test_a_rank_beyond_the_pool_is_refused(library, pynative_mode, monkeypatch, rank):  # a graph takes 3 s to fail
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    inputs = case(4, "identical")
    inputs[3] = np.int32([1, 1, rank, 1, 1, 1, 1])
    with refused_by_kernel(rf"multi_lora_linear: rank {rank} of slot 2 is not 0 to 64\."):
        Net()(*tensors("float32", inputs))[0].asnumpy()


@pytest.mark.parametrize("kind", [MultiLoraLinear, MultiLoraLinearWithBias])
def test_a_gradient_is_refused(each_path, kind):
    inputs = tensors("float32", case(4, "distinct"))[: kind.inputs]
    with pytest.raises(BackendError, match="multi_lora_linear has no gradient"):
        ms.grad(kind(), 0)(*inputs)


@pytest.mark.parametrize(
    "at, dtype, message",
    [
        (1, ms.int32, "W is Int32: it must be Float32, Float16 or BFloat16."),
        (2, ms.int32, "pool is Int32: it must be Float32, Float16 or BFloat16."),
        (3, ms.int64, "ranks is Int64: it must be Int32."),
        (4, ms.float16, "scales is Float16: it must be Float32."),
        (5, ms.int64, "indices is Int64: it must be Int32."),
        (6, ms.float16, "bias is Float16 and x is Float32: cast them to one dtype."),
    ],
)
def test_refused_dtypes(each_path, at, dtype, message):
    inputs = tensors("float32", case(4, "distinct"))
    inputs[at] = inputs[at].astype(dtype)
    with pytest.raises(BackendError) as error:
        Net()(*inputs)
    assert str(error.value).startswith(f"multi_lora_linear ({each_path}): {message}")


@pytest.mark.skipif(PATHS[0] != "cpu", reason="there is no kernel for an NPU")
@pytest.mark.parametrize(
    "at, shape, message",
    [
        (0, (4, K + 1), "K is 38 in one input and 37 in another."),
        (1, (N, K, 1), "W has 3 dimensions: it must have 2."),
        (2, (SLOTS, MAX_RANK, K + N - 1), "K [+] N is 90 in one input and 89 in another."),
        (2, (SLOTS, 257, K + N), "rank is 257: it must be 1 to 256."),
        (2, (MAX_RANK, K + N), "pool has 2 dimensions: it must have 3."),
        (4, (SLOTS - 1,), "the number of slots is 7 in one input and 6 in another."),
        (6, (N + 1,), "N is 53 in one input and 54 in another."),
        (6, (N, 1), "bias has 2 dimensions: it must have 1."),
    ],
)
def test_refused_shapes(library, pynative_mode, monkeypatch, at, shape, message):
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    inputs = tensors("float32", case(4, "distinct"))
    inputs[at] = Tensor(np.zeros(shape, np.float32))
    with refused_by_kernel(r"mindlora multi_lora_linear: " + message.replace(".", "[.]")):
        Net()(*inputs)[1].asnumpy()


@pytest.mark.skipif(PATHS[0] != "cpu", reason="there is no kernel for an NPU")
def test_fewer_indices_than_tokens_are_refused(library, graph_mode, monkeypatch):
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    inputs = tensors("float32", case(4, "distinct"))
    inputs[5] = Tensor(np.int32([0, 1, 2]))
    with refused_by_kernel("mindlora multi_lora_linear: "):
        Net()(*inputs)[0].asnumpy()
