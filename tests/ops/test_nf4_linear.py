"""nf4_linear on every path against its reference: values, gradients, shapes, dtypes."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.core.errors import BackendError
from mindlora.core.numerics.nf4 import by_row
from mindlora.ops import Nf4Linear, Nf4LinearWithBias, nf4_linear, quantize
from tests.support.fewer_cases import each_once, pairs_with
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, tensor, values
from tests.support.op_paths import PATHS

# Up to 8 tokens take one kernel, more take another, with vectors of 16 and 32 tokens and passes of 512.
TOKENS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 33, 512, 513)
SHAPES = [(1, 1), (37, 53), (64, 64), (70, 129), (200, 9)]


def weight(n, k, seed=1):
    """The four tensors of a quantized [N, K] weight; absmax differs from block to block."""
    array = quantize(normal(n, k, seed=seed) * np.linspace(0.5, 1.5, n * k).reshape(n, k).astype(np.float32))
    return [array.codes, array.absmax, array.scales, array.offsets]


def native(name, dtype, x, parts, out, last=None):
    inputs = [(x, dtype), *zip(parts, ("uint8", "uint8", "float32", "float32"))]
    return call(name, inputs + [(last, dtype)] * (last is not None), (len(x), out), dtype)


def tensors(dtype, x, parts, *more):
    return [tensor(x, dtype), *map(Tensor, parts), *(tensor(array, dtype) for array in more)]


class Net(nn.Cell):
    """nf4_linear as a user would call it in a network."""

    def construct(self, x, codes, absmax, scales, offsets, bias):
        return nf4_linear(x, codes, absmax, scales, offsets), nf4_linear(x, codes, absmax, scales, offsets, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k, n", SHAPES)
def test_the_kernel_is_the_reference(isa, reference, k, n, dtype):
    parts, bias = weight(n, k), normal(n, seed=4, dtype=dtype)
    for tokens in TOKENS:
        x = normal(tokens, k, dtype=dtype)
        for given in (None, bias):
            assert_near(
                native("Nf4Linear", dtype, x, parts, n, given), reference.nf4_linear(x, *parts, given), dtype, k + 1
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k, n", SHAPES)
def test_the_gradient_of_the_kernel_is_the_reference(isa, reference, k, n, dtype):
    parts = weight(n, k)
    padded = -(-k // 64) * 64
    for tokens in TOKENS:
        dy = normal(tokens, n, seed=9, dtype=dtype)
        dx, _ = reference.nf4_linear_grad(dy, *parts, padded)
        assert_near(native("Nf4LinearGrad", dtype, dy, parts, padded), dx, dtype, n + 1)
        assert not dx[:, k:].any()
        like = native("Nf4LinearGradLike", dtype, dy, parts, k, np.zeros((tokens, k)))
        assert_near(like, dx[:, :k], dtype, n + 1)


@pytest.mark.parametrize("k, n", [(300, 600), (512, 512), (1000, 267), (64, 2049), (577, 1030)])
def test_the_kernel_where_several_threads_and_tiles_share_the_weight(isa, reference, k, n):
    parts, bias = weight(n, k), normal(n, seed=4)
    for tokens in (1, 2, 5, 9, 70):
        x, dy = normal(tokens, k), normal(tokens, n, seed=9)
        assert_near(
            native("Nf4Linear", "float32", x, parts, n, bias), reference.nf4_linear(x, *parts, bias), "float32", k
        )
        padded = -(-k // 64) * 64
        assert_near(
            native("Nf4LinearGrad", "float32", dy, parts, padded),
            reference.nf4_linear_grad(dy, *parts, padded)[0],
            "float32",
            n,
        )
        assert_near(
            native("Nf4LinearGradLike", "float32", dy, parts, k, x),
            reference.nf4_linear_grad(dy, *parts, k)[0],
            "float32",
            n,
        )


@pytest.mark.parametrize("tokens", [1, 9])
def test_every_code_and_every_absmax_is_read(isa, reference, tokens):
    # All bytes, all values of absmax, two groups and more, which quantize would produce only by chance.
    codes = np.random.default_rng(0).permutation(np.arange(24 * 512) % 256).astype(np.uint8).reshape(24, 512)
    absmax = (np.arange(24 * 16) * 7 % 256).astype(np.uint8).reshape(24, 16)
    parts = [codes, absmax, np.array([0.01, 0.003], np.float32), np.array([0.1, 2.0], np.float32)]
    for row in range(0, 1024, 64):
        x = np.zeros((tokens, 1024), np.float32)
        x[:, row : row + 64] = normal(tokens, 64)
        assert_near(native("Nf4Linear", "float32", x, parts, 24), reference.nf4_linear(x, *parts), "float32", 200)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tokens_through_mindspore(mode, path, reference, dtype):
    net, of = Net(), getattr(ms, dtype)
    net.set_inputs(
        Tensor(shape=[None, None], dtype=of),
        *[Tensor(shape=[None, None], dtype=ms.uint8)] * 2,
        *[Tensor(shape=[None], dtype=ms.float32)] * 2,
        Tensor(shape=[None], dtype=of),
    )
    # The kernel is tested above with all of both.
    for tokens, (k, n) in each_once((31, 1, 3, 512, 8, 0), SHAPES):
        parts = weight(n, k)
        bias = normal(n, seed=4, dtype=dtype)
        x = normal(tokens, k, dtype=dtype)
        plain, biased = net(*tensors(dtype, x, parts, bias))
        assert plain.dtype == biased.dtype == of
        assert_near(values(plain), reference.nf4_linear(x, *parts), dtype, k)
        assert_near(values(biased), reference.nf4_linear(x, *parts, bias), dtype, k + 1)


@pytest.mark.parametrize("n, k", [(24, 700), (9, 64), (130, 256)])
def test_groups_that_do_not_cross_rows_give_the_same_bits(isa, path, n, k):
    # 11 blocks of a row become groups of one, 4 groups of four; 9 blocks are one group or nine.
    codes, absmax, *of_groups = weight(n, k)
    rows = list(range(n - 1, -1, -2))
    smaller = [by_row(values, *absmax.shape) for values in of_groups]
    picked = [codes[rows], absmax[rows], *(values[rows].reshape(-1) for values in smaller)]
    for tokens in (2, 9):
        x = normal(tokens, k)
        whole = native("Nf4Linear", "float32", x, [codes, absmax, *of_groups], n)
        np.testing.assert_array_equal(native("Nf4Linear", "float32", x, picked, len(rows)), whole[:, rows])
        y = values(Nf4Linear()(*tensors("float32", x, picked)))
        np.testing.assert_allclose(y, whole[:, rows], rtol=1e-4, atol=1e-4)


def gradients(kind, inputs, dy):
    return ms.ops.GradOperation(get_all=True, sens_param=True)(kind())(*inputs, dy)


@pytest.mark.parametrize(
    "dtype, tokens, k, n, kind",
    pairs_with([(0, 7, 9), (1, 64, 9), (3, 70, 33), (31, 128, 64)], [Nf4Linear, Nf4LinearWithBias]),
)
def test_gradients_are_those_of_the_reference(mode, path, reference, dtype, tokens, k, n, kind):
    parts, bias = weight(n, k), normal(n, seed=4, dtype=dtype)
    x, dy = normal(tokens, k, dtype=dtype), normal(tokens, n, seed=9, dtype=dtype)
    inputs = tensors(dtype, x, parts, *[bias] * (kind is Nf4LinearWithBias))
    grads = gradients(kind, inputs, tensor(dy, dtype))
    dx, dbias = reference.nf4_linear_grad(dy, *parts, k)
    assert len(grads) == len(inputs) and all(g.dtype == i.dtype and g.shape == i.shape for g, i in zip(grads, inputs))
    assert_near(values(grads[0]), dx, dtype, n)
    assert not any(values(grad).any() for grad in grads[1:5])
    if kind is Nf4LinearWithBias:
        assert_near(values(grads[5]), dbias, dtype, tokens)


class Loss(nn.Cell):
    """sum(nf4_linear * dy)."""

    def construct(self, x, codes, absmax, scales, offsets, bias, dy):
        return (nf4_linear(x, codes, absmax, scales, offsets, bias) * dy).sum()


class Gradient(nn.Cell):
    """dx of Loss."""

    def __init__(self):
        super().__init__()
        self.grad, self.loss = ms.ops.GradOperation(), Loss()

    def construct(self, x, codes, absmax, scales, offsets, bias, dy):
        return self.grad(self.loss)(x, codes, absmax, scales, offsets, bias, dy)


@pytest.mark.parametrize("k", [64, 70])
@pytest.mark.parametrize("known", [True, False])
def test_gradients_with_a_number_of_tokens_that_is_not_known(each_path, reference, k, known):
    net, parts, bias = Gradient(), weight(33, k), normal(33, seed=4)
    net.set_inputs(
        Tensor(shape=[None, k if known else None], dtype=ms.float32),
        *map(Tensor, parts),
        Tensor(bias),
        Tensor(shape=[None, 33], dtype=ms.float32),
    )
    for tokens in (3, 31, 0, 1):
        x, dy = normal(tokens, k), normal(tokens, 33, seed=9)
        dx = net(*tensors("float32", x, parts, bias, dy))
        assert_near(values(dx), reference.nf4_linear_grad(dy, *parts, k)[0], "float32", 33)


def test_gradients_by_finite_differences(each_path, reference):
    x, parts, bias, dy = normal(3, 5).astype(np.float64), weight(4, 5), normal(4, seed=4), normal(3, 4, seed=9)
    grad = values(ms.grad(Loss(), 0)(*tensors("float32", x, parts, bias, dy)))
    for at in np.ndindex(x.shape):
        low, high = x.copy(), x.copy()
        low[at] -= 1e-5
        high[at] += 1e-5
        slope = np.sum((reference.nf4_linear(high, *parts, bias) - reference.nf4_linear(low, *parts, bias)) * dy) / 2e-5
        np.testing.assert_allclose(grad[at], slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tokens", [3, 40])
def test_the_same_again_is_the_same_bit_for_bit(each_path, tokens):
    inputs = tensors("float32", normal(tokens, 300), weight(530, 300), normal(530, seed=4))
    net = Net()
    first = [y.asnumpy() for y in net(*inputs)]
    for _ in range(5):
        for y, before in zip(net(*inputs), first):
            np.testing.assert_array_equal(y.asnumpy(), before)


def test_the_paths_agree(mode, library, monkeypatch):
    results = []
    for path in PATHS:
        monkeypatch.setenv("MINDLORA_BACKEND", path)
        results.append(values(Nf4Linear()(*tensors("float32", normal(9, 200), weight(70, 200)))))
    for result in results[1:]:
        assert_near(result, results[0].astype(np.float64), "float32", 200)


@pytest.mark.skipif(PATHS[0] != "cpu", reason="tests/ops/test_ascend.py")
def test_the_path_that_is_picked(mode, library, monkeypatch):
    monkeypatch.delenv("MINDLORA_BACKEND", raising=False)
    # In PyNative too: plain operators would decode the whole weight into memory at each call.
    assert Nf4Linear().choice.path == "cpu" and "4-bit weights in one pass" in Nf4Linear().choice.reason


@pytest.mark.parametrize(
    "at, dtype, message",
    [
        (0, ms.int32, "x is Int32: it must be Float32, Float16 or BFloat16."),
        (1, ms.int32, "codes is Int32: it must be UInt8."),
        (2, ms.float32, "absmax is Float32: it must be UInt8."),
        (3, ms.float16, "scales is Float16: it must be Float32."),
        (4, ms.float16, "offsets is Float16: it must be Float32."),
        (5, ms.float16, "bias is Float16 and x is Float32: cast them to one dtype."),
    ],
)
def test_refused_dtypes(each_path, at, dtype, message):
    inputs = tensors("float32", normal(5, 7), weight(9, 7), normal(9))
    inputs[at] = inputs[at].astype(dtype)
    with pytest.raises(BackendError) as error:
        Net()(*inputs)
    assert str(error.value).startswith(f"nf4_linear ({each_path}): {message}")


@pytest.mark.skipif(PATHS[0] != "cpu", reason="MatMul refuses x in words of its own")
@pytest.mark.parametrize(
    "at, shape, message",
    [
        (0, (5, 65), "the number of blocks of a row is 2 in one input and 1 in another."),
        (0, (7,), "x has 1 dimensions: it must have 2."),
        (1, (9, 64), "the number of blocks of a row is 2 in one"),
        (1, (8, 32), "N is 8 in one input and 9 in another."),
        (3, (4,), "the number of groups is 1 in one input and 4 in another."),
        (4, (2,), "the number of groups is 1 in one input and 2 in another."),
        (5, (8,), "N is 9 in one input and 8 in another."),
    ],
)
def test_refused_shapes(library, graph_mode, monkeypatch, at, shape, message):
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    inputs = tensors("float32", normal(5, 7), weight(9, 7), normal(9))
    inputs[at] = Tensor(np.zeros(shape, np.uint8 if at in (1, 2) else np.float32))
    with refused_by_kernel(r"mindlora nf4_linear: " + message.replace(".", "[.]")):
        for y in Net()(*inputs):
            y.asnumpy()
