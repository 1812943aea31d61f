"""lora_linear on every path against its reference: values, gradients, shapes, dtypes."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.core.errors import BackendError
from mindlora.ops import LoraLinear, LoraLinearWithBias, lora_linear
from tests.support.fewer_cases import each_once, pairs_with
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, tensor, values
from tests.support.op_paths import PATHS

RANKS = (1, 8, 13, 16, 64, 128, 256)
# Up to 4 tokens take one kernel, more take another, in panels of 8 or 16 and passes of 64.
TOKENS = (0, 1, 3, 8, 31, 130)
SCALE = 0.5


def arrays(tokens, k, n, rank, dtype="float32"):
    """x, W, A, B and bias."""
    return [
        normal(*shape, seed=seed, dtype=dtype)
        for seed, shape in enumerate([(tokens, k), (n, k), (rank, k), (n, rank), (n,)])
    ]


def native(dtype, x, w, a, b, bias=None):
    inputs = [(x, dtype), (w, dtype), (a, dtype), (b, dtype), (np.float32(SCALE), "float32")]
    return call("LoraLinear", inputs + [(bias, dtype)] * (bias is not None), (len(x), len(w)), dtype)


def terms(x, a):
    return 1 + x.shape[1] + len(a) * x.shape[1] ** 0.5


class Net(nn.Cell):
    """lora_linear as a user would call it in a network."""

    def construct(self, x, w, a, b, bias):
        return lora_linear(x, w, a, b, SCALE), lora_linear(x, w, a, b, SCALE, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", RANKS)
def test_the_kernel_is_the_reference(isa, reference, rank, dtype):
    for tokens in TOKENS:
        for k, n in [(1, 1), (37, 53), (70, 129)] if tokens < 130 else [(37, 53)]:
            x, w, a, b, bias = arrays(tokens, k, n, rank, dtype)
            for given in (None, bias):
                assert_near(
                    native(dtype, x, w, a, b, given),
                    reference.lora_linear(x, w, a, b, SCALE, given),
                    dtype,
                    terms(x, a),
                )


def test_a_layer_without_outputs(isa):
    for tokens in (1, 5):
        x, w, a, b, _ = arrays(tokens, 8, 0, 4)
        assert native("float32", x, w, a, b, None).shape == (tokens, 0)


@pytest.mark.parametrize("k, n", [(300, 260), (256, 256), (1000, 67), (64, 1025)])
def test_the_kernel_where_several_threads_share_the_rows(isa, reference, k, n):
    for tokens in (1, 2, 4, 5, 9):
        x, w, a, b, bias = arrays(tokens, k, n, 15)
        assert_near(
            native("float32", x, w, a, b, bias), reference.lora_linear(x, w, a, b, SCALE, bias), "float32", terms(x, a)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_and_number_of_tokens_through_mindspore(mode, path, reference, dtype):
    net = Net()
    of = getattr(ms, dtype)
    net.set_inputs(*[Tensor(shape=[None, None], dtype=of)] * 4, Tensor(shape=[None], dtype=of))
    # The kernel is tested above with all of both. Here each rank has two numbers of tokens.
    for rank, tokens in each_once(RANKS * 2, TOKENS):
        x, w, a, b, bias = arrays(tokens, 37, 53, rank, dtype)
        plain, biased = net(*[tensor(array, dtype) for array in (x, w, a, b, bias)])
        assert plain.dtype == biased.dtype == of
        assert_near(values(plain), reference.lora_linear(x, w, a, b, SCALE), dtype, terms(x, a))
        assert_near(values(biased), reference.lora_linear(x, w, a, b, SCALE, bias), dtype, terms(x, a))


@pytest.mark.parametrize("scale", [0.0, -1.5])
def test_scale(each_path, reference, scale):
    x, w, a, b, _ = arrays(3, 7, 9, 2)
    y = lora_linear(*map(Tensor, (x, w, a, b)), scale)
    assert_near(values(y), reference.lora_linear(x, w, a, b, scale), "float32", terms(x, a))
    assert np.allclose(values(y), x @ w.T, atol=1e-4) == (scale == 0)


@pytest.mark.parametrize(
    "dtype, tokens, rank, kind", pairs_with([(1, 1), (3, 13), (31, 16)], [LoraLinear, LoraLinearWithBias])
)
def test_gradients_are_those_of_the_reference(mode, path, reference, dtype, tokens, rank, kind):
    x, w, a, b, bias = arrays(tokens, 7, 9, rank, dtype)
    dy = normal(tokens, 9, seed=9, dtype=dtype)
    inputs = [tensor(array, dtype) for array in (x, w, a, b)] + [Tensor(SCALE, ms.float32)]
    inputs += [tensor(bias, dtype)] * (kind is LoraLinearWithBias)
    grads = ms.ops.GradOperation(get_all=True, sens_param=True)(kind())(*inputs, tensor(dy, dtype))
    dx, da, db, dbias = reference.lora_linear_grad(dy, x, w, a, b, SCALE)
    assert len(grads) == len(inputs) and all(g.dtype == i.dtype and g.shape == i.shape for g, i in zip(grads, inputs))
    for grad, want in zip((grads[2], grads[3]), (da, db)):
        assert_near(values(grad), want, dtype, 10 * rank + tokens)
    # The two parts of dx are rounded to the dtype before they are added.
    np.testing.assert_allclose(
        values(grads[0]),
        dx,
        rtol=2e-2 if dtype == "bfloat16" else 2e-3,
        atol=max(1e-4, {"float32": 0, "float16": 2e-3, "bfloat16": 2e-2}[dtype] * np.abs(dx).max()),
    )
    assert not values(grads[1]).any()
    dscale = np.sum((dy.astype(np.float64) @ b) * (x.astype(np.float64) @ a.T))
    np.testing.assert_allclose(values(grads[4]), dscale, rtol=1e-4, atol=1e-3)
    if kind is LoraLinearWithBias:
        assert_near(values(grads[5]), dbias, dtype, tokens)


class Loss(nn.Cell):
    """sum(lora_linear * dy)."""

    def construct(self, x, w, a, b, bias, dy):
        return (lora_linear(x, w, a, b, SCALE, bias) * dy).sum()


def test_gradients_by_finite_differences(each_path, reference):
    inputs, dy = [array.astype(np.float64) for array in arrays(3, 4, 5, 2)], normal(3, 5, seed=9)
    grads = ms.grad(Loss(), (0, 2, 3, 4))(*[Tensor(i, ms.float32) for i in inputs], Tensor(dy))
    for i, grad in zip((0, 2, 3, 4), grads):
        for at in np.ndindex(inputs[i].shape):
            low, high = ([array.copy() for array in inputs] for _ in range(2))
            low[i][at] -= 1e-5
            high[i][at] += 1e-5
            x, w, a, b, bias = high
            slope = np.sum(reference.lora_linear(x, w, a, b, SCALE, bias) * dy)
            x, w, a, b, bias = low
            slope = (slope - np.sum(reference.lora_linear(x, w, a, b, SCALE, bias) * dy)) / 2e-5
            np.testing.assert_allclose(values(grad)[at], slope, rtol=1e-3, atol=1e-4)


def test_the_same_again_is_the_same_bit_for_bit(each_path):
    inputs = [Tensor(array) for array in arrays(9, 300, 530, 16)]
    net = Net()
    first = [y.asnumpy() for y in net(*inputs)]
    for _ in range(5):
        for y, before in zip(net(*inputs), first):
            np.testing.assert_array_equal(y.asnumpy(), before)


@pytest.mark.parametrize("at, name", [(1, "W"), (2, "A"), (3, "B"), (4, "bias")])
def test_refused_dtypes(each_path, at, name):
    inputs = [Tensor(array) for array in arrays(5, 7, 9, 3)]
    inputs[at] = inputs[at].astype(ms.float16)
    with pytest.raises(BackendError) as error:
        Net()(*inputs)
    assert str(error.value).startswith(f"lora_linear ({each_path}): {name} is Float16 and x is Float32: cast")


@pytest.mark.parametrize(
    "at, shape, message",
    [
        (1, (9, 8), "K is 7 in one input and 8 in another."),
        (3, (8, 3), "N is 9 in one input and 8 in another."),
        (3, (9, 4), "the rank is 3 in one input and 4 in another."),
        (0, (7,), "x has 1 dimensions: it must have 2."),
        (4, (8,), "N is 9 in one input and 8 in another."),
    ],
)
def test_refused_shapes(library, graph_mode, monkeypatch, at, shape, message):
    monkeypatch.setenv("MINDLORA_BACKEND", PATHS[0])
    inputs = [Tensor(array) for array in arrays(5, 7, 9, 3)]
    inputs[at] = Tensor(np.zeros(shape, np.float32))
    with refused_by_kernel(r"mindlora lora_linear: " + message.replace(".", "[.]")):
        net = Net()
        for y in net(*inputs):
            y.asnumpy()
