"""multi_lora_delta on every path against its reference: ranks in one pool, popularity of adapters, skipped rows."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.core.errors import BackendError
from mindlora.ops import multi_lora_delta
from mindlora.ops.multi_lora_delta import MultiLoraDelta
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, tensor, values
from tests.support.op_paths import PATHS
from tests.support.pooled_adapters import KINDS, MAX_RANK, SLOTS, TRUE_RANKS, pooled, popularity

K, N = 37, 53


def case(tokens, kind, dtype="float32", k=K, n=N, ranks=TRUE_RANKS, max_rank=MAX_RANK):
    """The six inputs."""
    return [
        normal(tokens, n, seed=1, dtype=dtype),
        normal(tokens, k, seed=2, dtype=dtype),
        *pooled(k + n, ranks, max_rank, dtype),
        popularity(kind, tokens, len(ranks)),
    ]


def native(dtype, inputs):
    dtypes = [dtype, dtype, dtype, "int32", "float32", "int32"]
    return call("MultiLoraDelta", list(zip(inputs, dtypes)), inputs[0].shape, dtype)


def tensors(dtype, inputs):
    return [tensor(array, dtype) for array in inputs[:3]] + [Tensor(array) for array in inputs[3:]]


TERMS = MAX_RANK * K**0.5


class Net(nn.Cell):
    """multi_lora_delta as a user would call it in a network."""

    def construct(self, y0, x, pool, ranks, scales, indices):
        return multi_lora_delta(y0, x, pool, ranks, scales, indices)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_the_reference(isa, reference, dtype, kind):
    for tokens in (0, 1, 3, 8, 31, 512):
        inputs = case(tokens, kind, dtype)
        assert_near(native(dtype, inputs), reference.multi_lora_delta(*inputs), dtype, TERMS)


@pytest.mark.parametrize("pool", ["float16", "bfloat16"])
def test_a_pool_of_16_bits_is_widened_as_it_is_read(isa, reference, pool):
    inputs = case(31, "uniform")
    inputs[2] = pooled(K + N, dtype=pool)[0]
    dtypes = ["float32", "float32", pool, "int32", "float32", "int32"]
    found = call("MultiLoraDelta", list(zip(inputs, dtypes)), inputs[0].shape, "float32")
    assert_near(found, reference.multi_lora_delta(*inputs), "float32", TERMS)


@pytest.mark.parametrize("rank", [1, 7, 8, 9, 13, 16, 64, 128, 256])
@pytest.mark.parametrize("k, n", [(1, 1), (15, 17), (64, 130)])
def test_the_kernel_at_every_rank_and_at_the_edges_of_its_vectors(isa, reference, rank, k, n):
    inputs = case(9, "distinct", "float32", k, n, np.int32([rank, 1, max(1, rank - 1)]), rank)
    assert_near(native("float32", inputs), reference.multi_lora_delta(*inputs), "float32", 1 + rank * k**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_through_mindspore(mode, path, reference, dtype):
    net, (_, _, pool, ranks, scales, _) = Net(), case(1, "none", dtype)
    of = {name: getattr(ms, name) for name in (dtype, "int32", "float32")}
    net.set_inputs(
        Tensor(shape=[None, N], dtype=of[dtype]),
        Tensor(shape=[None, K], dtype=of[dtype]),
        tensor(pool, dtype),
        Tensor(ranks),
        Tensor(scales),
        Tensor(shape=[None], dtype=ms.int32),
    )
    # The kernel is tested above with all of both. Without 0 tokens there: after them, MindSpore's own operators give
    # wrong sums for the shapes that follow.
    fewer = (1, 3) if (path, mode) == ("composed", ms.GRAPH_MODE) else (0, 1, 3)
    patterns = [(kind, 31) for kind in KINDS] + [("skipped", tokens) for tokens in fewer]
    for kind, tokens in patterns:
        inputs = case(tokens, kind, dtype)
        y = net(*tensors(dtype, inputs))
        assert y.dtype == of[dtype]
        assert_near(values(y), reference.multi_lora_delta(*inputs), dtype, TERMS)


def test_fixed_shapes(each_path, reference):
    inputs = case(9, "skipped")
    assert_near(values(Net()(*tensors("float32", inputs))), reference.multi_lora_delta(*inputs), "float32", TERMS)


@pytest.mark.parametrize("shape", [(1, 5), (2, 1, 3)])
def test_all_axes_of_x_but_the_last_are_tokens(each_path, reference, shape):
    y0, x, *pool, indices = case(int(np.prod(shape)), "uniform")
    expected = reference.multi_lora_delta(y0, x, *pool, indices).reshape(*shape, N)
    y = Net()(*tensors("float32", [y0, x.reshape(*shape, K), *pool, indices]))
    assert_near(values(y), expected, "float32", TERMS)


def test_indices_after_the_tokens_are_not_looked_at(each_path, reference):
    """A server keeps one Parameter, as long as its largest step; tokens come and go."""
    net, (y0, x, *pool, indices) = Net(), case(5, "uniform")
    longer = np.append(indices, np.int32([SLOTS, 10**9, -1]))
    shapes = [Tensor(shape=[None, N], dtype=ms.float32), Tensor(shape=[1, None, K], dtype=ms.float32)]
    net.set_inputs(*shapes, *tensors("float32", [y0, x, *pool, longer])[2:])
    for tokens in (5, 1, 3):
        inputs = [y0[:tokens], x[None, :tokens], *pool, longer]
        expected = reference.multi_lora_delta(y0[:tokens], x[:tokens], *pool, indices[:tokens])
        assert_near(values(net(*tensors("float32", inputs)))[0], expected, "float32", TERMS)


def test_rows_without_an_adapter_stay_bit_for_bit(each_path):
    inputs = case(31, "skipped")
    y = values(Net()(*tensors("float32", inputs)))
    skipped = inputs[5] < 0
    empty = ~skipped & (TRUE_RANKS[np.maximum(inputs[5], 0)] == 0)
    assert skipped.any() and empty.any()
    np.testing.assert_array_equal(y[skipped | empty], inputs[0][skipped | empty])
    # Every other adapter has a nonzero scale, so it must change its rows.
    assert (y != inputs[0])[~(skipped | empty)].any(axis=1).all()


def test_each_row_depends_on_its_own_adapter_alone(each_path):
    inputs = case(8, "distinct")
    before = values(Net()(*tensors("float32", inputs)))
    inputs[2][4, :64] *= 2
    after = values(Net()(*tensors("float32", inputs)))
    assert ((before != after).any(axis=1) == (inputs[5] == 4)).all()


def test_the_same_again_is_the_same_bit_for_bit(each_path):
    inputs = tensors("float32", case(200, "zipf"))
    net = Net()
    first = net(*inputs).asnumpy()
    for _ in range(5):
        np.testing.assert_array_equal(net(*inputs).asnumpy(), first)


def test_an_index_beyond_the_pool_is_never_silent(mode, path, monkeypatch):
    inputs = case(4, "distinct")
    inputs[5][2] = SLOTS
    if path == "cpu":
        with refused_by_kernel(r"mindlora multi_lora_delta: row 2 asks for slot 7 of 7\."):
            Net()(*tensors("float32", inputs)).asnumpy()
    else:
        y = values(Net()(*tensors("float32", inputs)))
        assert (np.isnan(y).all(axis=1) == [False, False, True, False]).all()


@pytest.mark.skipif(PATHS[0] != "cpu", reason="a kernel on an NPU cannot raise")
def test_a_rank_beyond_the_pool_is_refused(library, pynative_mode, monkeypatch):
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    inputs = case(4, "identical")
    inputs[3] = np.int32([1, 1, MAX_RANK + 1, 1, 1, 1, 1])
    with refused_by_kernel(r"multi_lora_delta: rank 65 of slot 2 is not 0 to 64\."):
        Net()(*tensors("float32", inputs)).asnumpy()


@pytest.mark.usefixtures("pynative_mode")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_the_reference(path, reference, dtype):
    inputs = case(11, "skipped", dtype)
    dy = normal(11, N, seed=5, dtype=dtype)
    gradient = ms.ops.GradOperation(get_all=True, sens_param=True)(MultiLoraDelta())
    found = gradient(*tensors(dtype, inputs), tensor(dy, dtype))
    expected = reference.multi_lora_delta_grad(dy, *inputs[1:])
    for given, gradient, want in zip(inputs[:3], found, expected):
        assert gradient.dtype == getattr(ms, dtype) and gradient.shape == given.shape
        assert_near(values(gradient), want, dtype, TERMS)
    # Where nothing is used, the pool holds NaN.
    unused = np.arange(MAX_RANK) >= TRUE_RANKS[:, None]
    assert not values(found[2])[unused].any()
    assert_near(values(found[4]), expected[3], "float32", TERMS * N**0.5)


def test_gradients_by_finite_differences(each_path, reference):
    inputs = case(5, "skipped", k=4, n=3, ranks=np.int32([2, 0, 1]), max_rank=2)
    inputs = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in inputs]
    dy = normal(5, 3, seed=5)

    def loss(*arrays):
        return np.sum(reference.multi_lora_delta(*arrays) * dy)

    single = [array.astype(np.float32) if array.dtype.kind == "f" else array for array in inputs]
    gradient = ms.ops.GradOperation(get_all=True, sens_param=True)(MultiLoraDelta())
    found = gradient(*map(Tensor, single), Tensor(dy))
    for i in (0, 1, 2, 4):
        for at in np.ndindex(inputs[i].shape):
            low, high = ([array.copy() for array in inputs] for _ in range(2))
            low[i][at] -= 1e-5
            high[i][at] += 1e-5
            slope = (loss(*high) - loss(*low)) / 2e-5
            np.testing.assert_allclose(values(found[i])[at], slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "at, dtype, message",
    [
        (1, ms.float16, "x is Float16 and y0 is Float32: cast them to one dtype."),
        (2, ms.int32, "pool is Int32: it must be Float32, Float16 or BFloat16."),
        (3, ms.int64, "ranks is Int64: it must be Int32."),
        (4, ms.float16, "scales is Float16: it must be Float32."),
        (5, ms.int64, "indices is Int64: it must be Int32."),
    ],
)
def test_refused_dtypes(each_path, at, dtype, message):
    inputs = tensors("float32", case(4, "distinct"))
    inputs[at] = inputs[at].astype(dtype)
    with pytest.raises(BackendError) as error:
        Net()(*inputs)
    assert str(error.value).startswith(f"multi_lora_delta ({each_path}): {message}")


@pytest.mark.parametrize(
    "at, shape, message",
    [
        (1, (5, K), "the number of tokens is 4 in one input and 5 in another."),
        (2, (SLOTS, MAX_RANK, K + N - 1), "K [+] N is 90 in one input and 89 in another."),
        (2, (SLOTS, 257, K + N), "rank is 257: it must be 1 to 256."),
        (2, (MAX_RANK, K + N), "pool has 2 dimensions: it must have 3."),
        (4, (SLOTS - 1,), "the number of slots is 7 in one input and 6 in another."),
    ],
)
def test_refused_shapes(library, graph_mode, monkeypatch, at, shape, message):
    monkeypatch.setenv("MINDLORA_BACKEND", PATHS[0])
    inputs = tensors("float32", case(4, "distinct"))
    inputs[at] = Tensor(np.zeros(shape, np.float32))
    with refused_by_kernel(r"mindlora multi_lora_delta: " + message.replace(".", "[.]")):
        Net()(*inputs).asnumpy()
