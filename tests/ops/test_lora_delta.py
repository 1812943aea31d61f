"""lora_delta beyond tests/ops/test_contract.py: scales, parameters that train, views, copies, rounding, NaN, ranks."""

import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora.ops import LoraDelta, lora_delta
from tests.ops.operators.lora_delta import LORA_DELTA
from tests.support.native import assert_near, call, normal, refused_by_kernel, rounded, values
from tests.support.op_paths import PATHS


def arrays(*size):
    """y0, x, A and B."""
    return [array for array, _ in LORA_DELTA.inputs("float32", *size).values()][:4]


def native(dtype, y0, x, a, b, scale):
    inputs = [(y0, dtype), (x, dtype), (a, dtype), (b, dtype), (np.float32(scale), "float32")]
    return call("LoraDelta", inputs, y0.shape, dtype)


class Net(nn.Cell):
    """lora_delta as a user would call it in a network."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def construct(self, y0, x, a, b):
        return lora_delta(y0, x, a, b, self.scale)


@pytest.mark.parametrize("scale", [0.0, 1.0, -1.5, 1e-3])
def test_scale(each_path, reference, scale):
    y0, x, a, b = arrays(5, 7, 9, 3)
    y = values(Net(scale)(*map(Tensor, (y0, x, a, b))))
    assert_near(y, reference.lora_delta(y0, x, a, b, scale), "float32", 50)
    assert (y == y0).all() == (scale == 0)


def test_a_scale_in_a_tensor(each_path, reference):
    y0, x, a, b = arrays(5, 7, 9, 3)
    for shape in ((), (1,)):
        y = lora_delta(*map(Tensor, (y0, x, a, b)), Tensor(np.full(shape, 0.5, np.float32)))
        assert_near(values(y), reference.lora_delta(y0, x, a, b, 0.5), "float32", 50)


def test_the_number_of_dimensions_may_be_unknown(each_path, reference):
    net, inputs = Net(0.5), arrays(4, 7, 9, 3)
    net.set_inputs(*[Tensor(shape=None, dtype=ms.float32)] * 4)
    assert_near(values(net(*map(Tensor, inputs))), reference.lora_delta(*inputs, 0.5), "float32", 50)


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


def test_parameters_train_and_a_cell_with_the_operator_can_be_copied(each_path, reference):
    net, x, scale = copy.deepcopy(Layer(7, 9, 3)), normal(4, 7, seed=2), Tensor(0.5, ms.float32)

    def total_of(x, scale):
        return net(x, scale).sum()

    train = ms.value_and_grad(total_of, 0, net.trainable_params())
    w, a, b = (p.asnumpy() for p in net.get_parameters())
    _, (of_x, (of_a, of_b)) = train(Tensor(x), scale)
    _, dx, da, db, _ = reference.lora_delta_grad(np.ones((4, 9)), x, a, b, 0.5)
    for gradient, wanted in ((of_x, dx + np.ones((4, 9)) @ w), (of_a, da), (of_b, db)):
        assert_near(values(gradient), wanted, "float32", 100)


def test_an_input_may_be_the_view_of_another(each_path, reference):
    y0, x, a, b = arrays(6, 8, 9, 4)
    wide = np.concatenate([x, x], axis=1)
    y = Net(0.5)(Tensor(y0), Tensor(wide)[:, 8:], Tensor(np.ascontiguousarray(a.T)).T, Tensor(b))
    assert_near(values(y), reference.lora_delta(y0, x, a, b, 0.5), "float32", 50)


def test_non_finite_values_pass_through(isa):
    y0, x, a, b = arrays(5, 7, 9, 3)
    y0[0, 1], x[2, 3], x[3, 1] = np.nan, np.inf, np.nan
    y = native("float32", y0, x, a, b, 0.5)
    finite = np.ones((5, 9), bool)
    finite[2:4], finite[0, 1] = False, False
    np.testing.assert_array_equal(np.isfinite(y), finite)


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


@pytest.mark.parametrize("scale", [0.0, 0.25, 0.5, 0.75, -0.5])
def test_every_float16_is_read_and_rounded_to_nearest_ties_to_even(isa, scale):
    # One row for each sign and exponent; the delta is a part of the step between its numbers.
    numbers = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(64, 1024)
    steps = np.float32([[2.0 ** (max(exponent, 1) - 25)] for _ in "+-" for exponent in range(32)])
    steps[[31, 63]] = 0  # infinity and NaN
    one = np.ones((1024, 1), np.float32)
    inputs = [(numbers, "float16"), (steps, "float16"), (one[:1], "float16"), (one, "float16")]
    y = call("LoraDelta", [*inputs, (np.float32(scale), "float32")], numbers.shape, "float16")
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = (numbers.astype(np.float32) + np.float32(scale) * steps).astype(np.float16)
    np.testing.assert_array_equal(y, wanted.astype(np.float32))


def test_shapes_that_are_only_known_at_run_time_are_refused_too(library, graph_mode, monkeypatch):
    monkeypatch.setenv("MINDLORA_BACKEND", PATHS[0])
    net = Net(1.0)
    net.set_inputs(*[Tensor(shape=[None, None], dtype=ms.float32)] * 4)
    with refused_by_kernel("mindlora lora_delta: rank is 257: it must be 1 to 256[.]"):
        net(*map(Tensor, arrays(5, 7, 9, 257))).asnumpy()


def test_a_rank_above_256_is_composed(mode, monkeypatch, reference):
    monkeypatch.setenv("MINDLORA_BACKEND", "composed")
    y0, x, a, b = arrays(5, 7, 9, 300)
    assert_near(values(Net(0.5)(*map(Tensor, (y0, x, a, b)))), reference.lora_delta(y0, x, a, b, 0.5), "float32", 2000)
