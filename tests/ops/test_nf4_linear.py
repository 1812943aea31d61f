"""nf4_linear beyond tests/ops/test_contract.py: every code, groups, backwards of unknown sizes, the path picked."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora.core.numerics.nf4 import by_row
from mindlora.ops import Nf4Linear
from tests.ops.contract import GradientOfFirst
from tests.ops.operators import nf4_linear as table
from tests.support.native import assert_near, call, normal, values
from tests.support.op_paths import PATHS


def weight(n, k):
    """The four tensors of a quantized [N, K] weight."""
    return [array for array, _ in table.weight(n, k).values()]


def native(x, parts, out):
    inputs = [(x, "float32"), *zip(parts, ("uint8", "uint8", "float32", "float32"))]
    return call("Nf4Linear", inputs, (len(x), out), "float32")


@pytest.mark.parametrize("tokens", [1, 9])
def test_every_code_and_every_absmax_is_read(isa, reference, tokens):
    # All bytes, all values of absmax, two groups and more, which quantize would produce only by chance.
    codes = np.random.default_rng(0).permutation(np.arange(24 * 512) % 256).astype(np.uint8).reshape(24, 512)
    absmax = (np.arange(24 * 16) * 7 % 256).astype(np.uint8).reshape(24, 16)
    parts = [codes, absmax, np.array([0.01, 0.003], np.float32), np.array([0.1, 2.0], np.float32)]
    for row in range(0, 1024, 64):
        x = np.zeros((tokens, 1024), np.float32)
        x[:, row : row + 64] = normal(tokens, 64)
        assert_near(native(x, parts, 24), reference.nf4_linear(x, *parts), "float32", 200)


@pytest.mark.parametrize("n, k", [(24, 700), (9, 64), (130, 256)])
def test_groups_that_do_not_cross_rows_give_the_same_bits(isa, path, n, k):
    # 11 blocks of a row become groups of one, 4 groups of four; 9 blocks are one group or nine.
    codes, absmax, *of_groups = weight(n, k)
    rows = list(range(n - 1, -1, -2))
    smaller = [by_row(values, *absmax.shape) for values in of_groups]
    picked = [codes[rows], absmax[rows], *(values[rows].reshape(-1) for values in smaller)]
    for tokens in (2, 9):
        x = normal(tokens, k)
        whole = native(x, [codes, absmax, *of_groups], n)
        np.testing.assert_array_equal(native(x, picked, len(rows)), whole[:, rows])
        y = values(Nf4Linear()(*map(Tensor, (x, *picked))))
        np.testing.assert_allclose(y, whole[:, rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [64, 70])
@pytest.mark.parametrize("known", [True, False])
def test_gradients_with_a_number_of_tokens_that_is_not_known(library, graph_mode, monkeypatch, reference, k, known):
    monkeypatch.setenv("MINDLORA_BACKEND", PATHS[0])
    net, parts = GradientOfFirst(Nf4Linear()), weight(33, k)
    net.set_inputs(
        Tensor(shape=[None, k if known else None], dtype=ms.float32),
        *map(Tensor, parts),
        Tensor(shape=[None, 33], dtype=ms.float32),
    )
    for tokens in (3, 31, 0, 1):
        x, dy = normal(tokens, k), normal(tokens, 33, seed=9)
        dx = net(*map(Tensor, (x, *parts, dy)))
        assert_near(values(dx), reference.nf4_linear_grad(dy, *parts, k)[0], "float32", 33)


@pytest.mark.skipif(PATHS[0] != "cpu", reason="tests/ops/test_ascend.py")
def test_the_path_that_is_picked(mode, library, monkeypatch):
    monkeypatch.delenv("MINDLORA_BACKEND", raising=False)
    # In PyNative too: plain operators would decode the whole weight into memory at each call.
    assert Nf4Linear().choice.path == "cpu" and "4-bit weights in one pass" in Nf4Linear().choice.reason
