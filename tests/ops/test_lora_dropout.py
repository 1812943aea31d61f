"""lora_dropout on every path against its reference, and lora_delta with it: values, statistics, gradients, dtypes."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.core.errors import BackendError
from mindlora.ops.lora_dropout import LoraDeltaWithDropout, LoraDropout, lora_dropout
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, rounded, tensor, values

SHAPES = [(0, 3), (1, 1), (3, 37), (31, 130), (512, 64)]


def native(x, seed, rate, dtype="float32"):
    return call(
        "LoraDropout",
        [(x, dtype), (np.array([seed]), "int32"), (np.array([rate], np.float32), "float32")],
        x.shape,
        dtype,
    )


def inputs(seed, rate):
    return Tensor([seed], ms.int32), Tensor([rate], ms.float32)


class Net(nn.Cell):
    """lora_dropout as a user would call it in a network."""

    def construct(self, x, seed, rate):
        return lora_dropout(x, seed, rate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_is_the_reference(isa, reference, shape, dtype):
    x = normal(*shape, dtype=dtype)
    for seed in (0, 7, -1, 2**31 - 1):
        for rate in (0.0, 0.05, 0.5, 0.999):
            assert_near(native(x, seed, rate, dtype), reference.lora_dropout(x, seed, rate), dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_path_drops_what_the_reference_drops(mode, path, reference, dtype):
    x = normal(31, 130, dtype=dtype)
    for seed, rate in ((-5, 0.3), (12345, 0.05)):
        y = values(Net()(tensor(x, dtype), *inputs(seed, rate)))
        assert_near(y, reference.lora_dropout(x, seed, rate), dtype, 4)


def test_the_share_is_right_and_neighbours_rows_columns_and_seeds_are_independent(reference):
    tokens, channels, rate = 1000, 512, 0.1
    kept = reference.kept(tokens, channels, 3, rate)
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 5 * deviation / kept.size**0.5
    for axis, count in ((0, tokens), (1, channels)):
        assert abs(kept.mean(axis=axis) - (1 - rate)).max() < 5.5 * deviation / count**0.5
    others = [kept[1:, :], kept[:, 1:], kept[2:, :], kept[:, 64:]]
    others += [reference.kept(tokens, channels, seed, rate) for seed in (4, 3 + 2**20, -3, 0x9E3779B1 + 3 - 2**32)]
    for other in others:
        same = kept[: other.shape[0], : other.shape[1]]
        assert abs(np.corrcoef(same.ravel(), other.ravel())[0, 1]) < 5 / other.size**0.5


def test_what_is_dropped_is_zero_even_if_it_was_not_finite(each_path, reference):
    kept = reference.kept(8, 16, 1, 0.5)
    x = np.where(kept, 1, np.inf).astype(np.float32)
    np.testing.assert_array_equal(values(Net()(Tensor(x), *inputs(1, 0.5))), np.where(kept, 2, 0))


def test_the_gradient_is_the_same_mask(each_path, reference):
    def total(x, weights, seed, rate):
        return (net(x, seed, rate) * weights).sum()

    net, x, weights = LoraDropout(), normal(9, 21), normal(9, 21, seed=1)
    dx = ms.grad(total)(Tensor(x), Tensor(weights), *inputs(11, 0.4))
    assert_near(values(dx), reference.lora_dropout(weights, 11, 0.4), "float32", 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lora_delta_over_it_and_its_gradients(each_path, reference, dtype):
    tokens, k, n, rank, scale, seed, rate = 13, 37, 21, 5, 1.7, 99, 0.25
    y0, x, a, b = (
        normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(tokens, n), (tokens, k), (rank, k), (n, rank)])
    )
    dy = normal(tokens, n, seed=7, dtype=dtype)

    def total(y0, x, a, b, scale, dy, seed, rate):
        return (ms.ops.cast(net(y0, x, a, b, scale, seed, rate), ms.float32) * ms.ops.cast(dy, ms.float32)).sum()

    net = LoraDeltaWithDropout()
    tensors = [tensor(array, dtype) for array in (y0, x, a, b)]
    dropped = rounded(reference.lora_dropout(x, seed, rate), dtype).astype(np.float64)
    y = net(*tensors, Tensor([scale], ms.float32), *inputs(seed, rate))
    terms = 40
    assert_near(values(y), y0 + (dropped @ a.T * scale) @ b.T, dtype, terms)
    found = ms.grad(total, (0, 1, 2, 3, 4))(
        *tensors, Tensor([scale], ms.float32), tensor(dy, dtype), *inputs(seed, rate)
    )
    d_low = dy @ b * scale
    expected = [
        dy,
        reference.lora_dropout(d_low @ a, seed, rate),
        d_low.T @ dropped,
        dy.T @ (dropped @ a.T * scale),
        np.array([np.sum((dy @ b) * (dropped @ a.T))]),
    ]
    for gradient, wanted in zip(found, expected):
        # What goes into the second dropout of dx is rounded too.
        np.testing.assert_allclose(
            values(gradient),
            wanted,
            rtol=0,
            atol={"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype] * max(1, np.abs(wanted).max()),
        )


def test_any_number_of_tokens_in_one_graph(path, reference, graph_mode):
    net = Net()
    net.set_inputs(Tensor(shape=[None, 37], dtype=ms.float32), *inputs(0, 0.1))
    for tokens in (3, 1, 40):
        x = normal(tokens, 37)
        assert_near(values(net(Tensor(x), *inputs(8, 0.1))), reference.lora_dropout(x, 8, 0.1), "float32", 4)


def test_wrong_dtypes_and_rates_are_refused(mode, monkeypatch, library):
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    x, (seed, rate) = Tensor(normal(2, 3)), inputs(1, 0.1)
    with pytest.raises(BackendError, match=r"lora_dropout \(cpu\): x is Float64"):
        Net()(x.astype(ms.float64), seed, rate)
    with pytest.raises(BackendError, match=r"lora_dropout \(cpu\): seed is Int64: it must be Int32"):
        Net()(x, seed.astype(ms.int64), rate)
    with refused_by_kernel(r"rate is 1\.0+: it must be in \[0, 1\)"):
        Net()(x, seed, Tensor([1.0], ms.float32)).asnumpy()
