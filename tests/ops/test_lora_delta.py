"""lora_delta on every path against its reference: values, gradients, shapes, dtypes."""

import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora.core.errors import BackendError
from mindlora.ops import LoraDelta, lora_delta
from tests.support.fewer_cases import each_once
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, rounded, tensor, values
from tests.support.op_paths import PATHS

RANKS = (1, 8, 13, 16, 64, 128, 256)
TOKENS = (0, 1, 3, 8, 31, 512)
ODD = [(1, 1), (37, 53), (70, 129)]


def arrays(tokens, k, n, rank, dtype="float32"):
    """y0, x, A and B whose delta has elements of about 1."""
    b = normal(n, rank, seed=4, dtype=dtype)
    return [
        normal(tokens, n, seed=1, dtype=dtype),
        normal(tokens, k, seed=2, dtype=dtype),
        normal(rank, k, seed=3, dtype=dtype),
        b,
    ]


def native(dtype, y0, x, a, b, scale):
    return call(
        "LoraDelta", [(y0, dtype), (x, dtype), (a, dtype), (b, dtype), (np.float32(scale), "float32")], y0.shape, dtype
    )


def terms(x, a):
    """The size of the sums: K products, then r products of sums of size sqrt(K)."""
    return 1 + len(a) * x.shape[1] ** 0.5


class Net(nn.Cell):
    """lora_delta as a user would call it in a network."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def construct(self, y0, x, a, b):
        return lora_delta(y0, x, a, b, self.scale)


def dynamic(net, dtype):
    """Lets every dimension of the four inputs of a network vary."""
    net.set_inputs(*[Tensor(shape=[None, None], dtype=getattr(ms, dtype))] * 4)
    return net


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", RANKS)
def test_the_kernel_is_the_reference(isa, reference, rank, dtype):
    for tokens in TOKENS:
        for k, n in ODD if tokens < 512 else ODD[1:2]:
            y0, x, a, b = arrays(tokens, k, n, rank, dtype)
            assert_near(native(dtype, y0, x, a, b, 0.5), reference.lora_delta(y0, x, a, b, 0.5), dtype, terms(x, a))


@pytest.mark.parametrize("k, n", [(15, 17), (16, 16), (17, 15), (64, 64), (8, 65), (127, 63), (128, 128)])
def test_the_kernel_at_the_edges_of_its_vectors(isa, reference, k, n):
    for tokens in (1, 2, 4, 5, 16, 17, 63, 65, 130):
        y0, x, a, b = arrays(tokens, k, n, 15)
        assert_near(native("float32", y0, x, a, b, -2), reference.lora_delta(y0, x, a, b, -2), "float32", terms(x, a))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_and_number_of_tokens_through_mindspore(mode, path, reference, dtype):
    net = dynamic(Net(0.5), dtype)
    # The kernel is tested above with all of both. Here each rank has two numbers of tokens.
    for rank, tokens in each_once(RANKS * 2, TOKENS):
        y0, x, a, b = arrays(tokens, 37, 53, rank, dtype)
        y = net(*[tensor(array, dtype) for array in (y0, x, a, b)])
        assert y.dtype == getattr(ms, dtype)
        assert_near(values(y), reference.lora_delta(y0, x, a, b, 0.5), dtype, terms(x, a))


@pytest.mark.parametrize("scale", [0.0, 1.0, -1.5, 1e-3])
def test_scale(each_path, reference, scale):
    y0, x, a, b = arrays(5, 7, 9, 3)
    y = values(Net(scale)(*map(Tensor, (y0, x, a, b))))
    assert_near(y, reference.lora_delta(y0, x, a, b, scale), "float32", terms(x, a))
    assert (y == y0).all() == (scale == 0)


def test_a_scale_in_a_tensor(each_path, reference):
    y0, x, a, b = arrays(5, 7, 9, 3)
    for shape in ((), (1,)):
        y = lora_delta(*map(Tensor, (y0, x, a, b)), Tensor(np.full(shape, 0.5, np.float32)))
        assert_near(values(y), reference.lora_delta(y0, x, a, b, 0.5), "float32", terms(x, a))


class WithScale(nn.Cell):
    """sum(lora_delta * dy), for gradients with respect to every input."""

    def __init__(self):
        super().__init__()
        self.delta = LoraDelta()

    def construct(self, y0, x, a, b, scale, dy):
        return (self.delta(y0, x, a, b, scale) * dy).astype(ms.float32).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, rank", [(1, 1), (3, 13), (31, 16)])
def test_gradients_are_those_of_the_reference(mode, path, reference, dtype, tokens, rank):
    y0, x, a, b = arrays(tokens, 7, 9, rank, dtype)
    dy = normal(tokens, 9, seed=5, dtype=dtype)
    # dy is the sensitivity, because a CPU has no bfloat16 product with dy.
    grads = ms.ops.GradOperation(get_all=True, sens_param=True)(LoraDelta())(
        *[tensor(array, dtype) for array in (y0, x, a, b)], Tensor([0.5], ms.float32), tensor(dy, dtype)
    )
    expected = reference.lora_delta_grad(dy, x, a, b, 0.5)
    for grad, want, given in zip(grads, expected, (y0, x, a, b)):
        assert grad.dtype == getattr(ms, dtype) and grad.shape == given.shape
        assert_near(values(grad), want, dtype, 10 * rank + tokens)
    assert grads[4].shape == (1,)
    np.testing.assert_allclose(values(grads[4])[0], expected[4], rtol=1e-4, atol=1e-4)


def test_gradients_by_finite_differences(each_path, reference):
    y0, x, a, b = (array.astype(np.float64) for array in arrays(3, 4, 5, 2))
    inputs, dy = [y0, x, a, b, np.array([0.7])], normal(3, 5, seed=5)

    def loss(*values_):
        return np.sum(reference.lora_delta(*values_) * dy)

    grads = ms.grad(WithScale(), (0, 1, 2, 3, 4))(*[Tensor(i, ms.float32) for i in inputs], Tensor(dy))
    for i, grad in enumerate(grads):
        for at in np.ndindex(inputs[i].shape):
            low, high = ([array.copy() for array in inputs] for _ in range(2))
            low[i][at] -= 1e-5
            high[i][at] += 1e-5
            slope = (loss(*high) - loss(*low)) / 2e-5
            np.testing.assert_allclose(values(grad)[at], slope, rtol=1e-3, atol=1e-4)


class Layer(nn.Cell):
    """A frozen weight, and A and B to train, as in LoRADense."""

    def __init__(self, k, n, rank):
        super().__init__()
        self.w = Parameter(Tensor(normal(n, k, seed=6)), name="w", requires_grad=False)
        self.a = Parameter(Tensor(normal(rank, k, seed=3)), name="a")
        self.b = Parameter(Tensor(normal(n, rank, seed=4)), name="b")
        self.delta = LoraDelta()

    def construct(self, x, scale):
        return self.delta(ms.ops.MatMul(transpose_b=True)(x, self.w), x, self.a, self.b, scale)


@pytest.mark.parametrize("vary", ["nothing", "tokens", "rank of the tensor"])
def test_parameters_train_and_shapes_may_vary(each_path, reference, vary):
    net = Layer(7, 9, 3)
    shape = {"tokens": [None, 7], "rank of the tensor": None}
    if vary != "nothing":
        net.set_inputs(Tensor(shape=shape[vary], dtype=ms.float32), Tensor(0.5, ms.float32))

    def total_of(x, scale):
        return net(x, scale).sum()

    train = ms.value_and_grad(total_of, 0, net.trainable_params())
    for tokens in (4, 1, 6):
        x = normal(tokens, 7, seed=2)
        w, a, b = (p.asnumpy() for p in net.get_parameters())
        expected = reference.lora_delta(x @ w.T, x, a, b, 0.5)
        assert_near(values(net(Tensor(x), Tensor(0.5, ms.float32))), expected, "float32", 50)
        total, (of_x, of_parameters) = train(Tensor(x), Tensor(0.5, ms.float32))
        _, dx, da, db, _ = reference.lora_delta_grad(np.ones((tokens, 9)), x, a, b, 0.5)
        np.testing.assert_allclose(total.asnumpy(), expected.sum(), rtol=1e-4, atol=1e-3)
        assert_near(values(of_x), dx + np.ones((tokens, 9)) @ w, "float32", 100)
        assert [p.name for p in net.trainable_params()] == ["a", "b"]
        assert_near(values(of_parameters[0]), da, "float32", 100)
        assert_near(values(of_parameters[1]), db, "float32", 100)


def test_the_same_again_is_the_same_bit_for_bit(each_path):
    inputs = [Tensor(array) for array in arrays(200, 37, 53, 16)]
    net = Net(0.5)
    first = net(*inputs).asnumpy()
    for _ in range(5):
        np.testing.assert_array_equal(net(*inputs).asnumpy(), first)


def test_an_input_may_be_the_view_of_another(each_path, reference):
    y0, x, a, b = arrays(6, 8, 9, 4)
    wide = np.concatenate([x, x], axis=1)
    y = Net(0.5)(Tensor(y0), Tensor(wide)[:, 8:], Tensor(np.ascontiguousarray(a.T)).T, Tensor(b))
    assert_near(values(y), reference.lora_delta(y0, x, a, b, 0.5), "float32", terms(x, a))


def test_a_cell_with_the_operator_can_be_copied(each_path):
    net = Layer(7, 9, 3)
    x, scale = Tensor(normal(4, 7)), Tensor(0.5, ms.float32)
    np.testing.assert_array_equal(copy.deepcopy(net)(x, scale).asnumpy(), net(x, scale).asnumpy())


def test_non_finite_values_pass_through(isa):
    y0, x, a, b = arrays(5, 7, 9, 3)
    y0[0, 1], x[2, 3], x[3, 1] = np.nan, np.inf, np.nan
    y = native("float32", y0, x, a, b, 0.5)
    assert (
        np.isfinite(y)
        == np.array([[row not in (2, 3) and (row, column) != (0, 1) for column in range(9)] for row in range(5)])
    ).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_round_to_the_nearest_even_and_keep_nan_and_infinity(isa, dtype):
    # Rank 1, A = 0: y is y0 through the conversions, over every pattern of bits.
    bits = np.arange(2**16, dtype=np.uint16)
    y0 = (
        bits.view(np.float16).astype(np.float32)
        if dtype == "float16"
        else (bits.astype(np.uint32) << 16).view(np.float32)
    )
    y0 = y0.reshape(16, -1)
    one = np.ones((16, 1), np.float32)
    y = native(dtype, y0, one, np.zeros((1, 1), np.float32), np.ones((y0.shape[1], 1), np.float32), 1.0)
    # -0 + 0 is 0.
    np.testing.assert_array_equal(y, np.where(y0 == 0, 0, y0))
    # Sums that lie between two numbers: the exact sum, rounded by NumPy.
    big, small = normal(16, 512, seed=1, dtype=dtype) * 8, normal(1, 512, seed=2, dtype=dtype) / 64
    big, small = rounded(big, dtype), rounded(small, dtype)
    y = native(dtype, big, one, np.ones((1, 1), np.float32), np.ascontiguousarray(small.T), 1.0)
    np.testing.assert_array_equal(y, rounded(big + small, dtype))


def test_float16_overflows_to_infinity_and_underflows_to_subnormals(isa):
    y0 = np.float32([[65504, 65504, -65504, 0, 0, 0]])
    b = np.float32([[15.99], [16], [-16], [3e-8], [2.0**-25], [6e-8]])
    b = b.astype(np.float16).astype(np.float32)
    y = native("float16", y0, np.ones((1, 1), np.float32), np.ones((1, 1), np.float32), b, 1.0)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y, (y0 + b.T).astype(np.float16).astype(np.float32))


def test_refused_dtypes(each_path):
    y0, x, a, b = map(Tensor, arrays(5, 7, 9, 3))
    with pytest.raises(BackendError) as error:
        Net(1.0)(y0, x, a.astype(ms.float16), b)
    assert str(error.value).startswith(f"lora_delta ({each_path}): A is Float16 and y0 is Float32: cast them to")
    with pytest.raises(BackendError) as error:
        Net(1.0)(*(i.astype(ms.float64) for i in (y0, x, a, b)))
    assert str(error.value).startswith(f"lora_delta ({each_path}): y0 is Float64: it must be Float32, Float16 or")


@pytest.mark.parametrize(
    "case, message",
    [
        ((5, 7, 9, 257, 257), "rank is 257: it must be 1 to 256."),
        ((5, 7, 9, 3, 4), "the rank is 3 in one input and 4 in another."),
        ((5, 8, 9, 3, 3), "K is 8 in one input and 7 in another."),
        ((5, 7, 8, 3, 3), "N is 9 in one input and 8 in another."),
        ((4, 7, 9, 3, 3), "the number of tokens is 5 in one input and 4 in another."),
    ],
)
def test_refused_shapes(library, graph_mode, monkeypatch, case, message):
    refuse(monkeypatch, Net(1.0), case, message)


def test_shapes_that_are_only_known_at_run_time_are_refused_too(library, graph_mode, monkeypatch):
    refuse(monkeypatch, dynamic(Net(1.0), "float32"), (5, 7, 9, 257, 257), "rank is 257: it must be 1 to 256.")


def refuse(monkeypatch, net, case, message):
    """Asserts that the kernel says ``message`` of (tokens of x, K of x, N of B, rank of A, rank of B)."""
    monkeypatch.setenv("MINDLORA_BACKEND", PATHS[0])
    tokens, k, n, rank, rank_of_b = case
    with refused_by_kernel("mindlora lora_delta: " + message.replace(".", "[.]")):
        net(*map(Tensor, (normal(5, 9), normal(tokens, k), normal(rank, 7), normal(n, rank_of_b)))).asnumpy()


def test_a_rank_above_256_is_composed(mode, monkeypatch, reference):
    monkeypatch.setenv("MINDLORA_BACKEND", "composed")
    y0, x, a, b = arrays(5, 7, 9, 300)
    assert_near(
        values(Net(0.5)(*map(Tensor, (y0, x, a, b)))), reference.lora_delta(y0, x, a, b, 0.5), "float32", terms(x, a)
    )
