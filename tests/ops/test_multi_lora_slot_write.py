"""multi_lora_slot_write beyond tests/ops/test_contract.py: what a cell writes, and the operator that reads the pool."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora.core.errors import BackendError
from mindlora.ops import multi_lora_delta, multi_lora_slot_write, pack_adapter
from tests.ops.operators.multi_lora_slot_write import MAX_RANK, SLOTS, K, N
from tests.support.native import DTYPES, normal, tensor, values


class Pool(nn.Cell):
    """A pool, a write to it, and rows computed before and after that write in one graph."""

    def __init__(self, dtype="float32"):
        super().__init__()
        self.pool = Parameter(tensor(normal(SLOTS, MAX_RANK, K + N, dtype=dtype), dtype), name="pool")
        self.ranks = Parameter(Tensor(np.int32([1, 2, 0, 16])), name="ranks")
        self.scales = Parameter(Tensor(np.float32([1, 2, 3, 4])), name="scales")

    def construct(self, slot, packed, scale):
        return multi_lora_slot_write(self.pool, self.ranks, self.scales, slot, packed, scale)

    def state(self):
        # Copies: asnumpy() may be the memory of the Parameter itself.
        return [values(self.pool).copy(), self.ranks.asnumpy().copy(), self.scales.asnumpy().copy()]


class WriteBetween(nn.Cell):
    """multi_lora_delta, a write, multi_lora_delta."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def construct(self, y0, x, indices, slot, packed, scale):
        p = self.pool
        before = multi_lora_delta(y0, x, p.pool, p.ranks, p.scales, indices)
        p(slot, packed, scale)
        return before, multi_lora_delta(y0, x, p.pool, p.ranks, p.scales, indices)


def slot(number):
    return Tensor([number], ms.int32)


def assert_state(pool, expected):
    """Compares the pool except for the rows beyond the true ranks, which are never read."""
    state = pool.state()
    np.testing.assert_array_equal(state[1], expected[1])
    np.testing.assert_array_equal(state[2], expected[2])
    for block, wanted, rank in zip(state[0], expected[0], expected[1]):
        np.testing.assert_array_equal(block[:rank], wanted[:rank])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [13, 16])
def test_the_slot_and_nothing_else_is_written(mode, path, reference, dtype, rank):
    pool = Pool(dtype)
    if (path, dtype) == ("composed", "bfloat16"):
        with pytest.raises(BackendError, match=r"^multi_lora_slot_write \(composed\): pool is BFloat16, which Mind"):
            pool(slot(0), tensor(normal(rank, K + N), dtype), Tensor(1, ms.float32))
        return
    expected = pool.state()
    for number, scale in ((1, 0.5), (SLOTS - 1, -2.0), (0, 0.25)):
        packed = normal(rank, K + N, seed=number, dtype=dtype)
        reference.multi_lora_slot_write(*expected, number, packed, scale)
        assert values(pool(slot(number), tensor(packed, dtype), Tensor(scale, ms.float32)))[0] == number
        assert_state(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_adapter(mode, reference, dtype):
    a, b = normal(3, K, dtype=dtype), normal(N, 3, dtype=dtype)
    packed = pack_adapter(tensor(a, dtype), tensor(b, dtype))
    assert packed.dtype == getattr(ms, dtype)
    np.testing.assert_array_equal(values(packed), reference.pack_adapter(a, b))


def test_what_was_written_is_what_is_computed_with(each_path):
    pool = Pool()
    net = WriteBetween(pool)
    y0, x = normal(4, N, seed=1), normal(4, K, seed=2)
    for number in (2, 1):
        a, b = normal(13, K, seed=10 + number), normal(N, 13, seed=20 + number)
        packed = pack_adapter(Tensor(a), Tensor(b))
        before, after = net(
            Tensor(y0), Tensor(x), Tensor(np.int32([0, 1, 2, 3])), slot(number), packed, Tensor(0.5, ms.float32)
        )
        before, after = values(before), values(after)
        assert ((before != after).any(axis=1) == (np.arange(4) == number)).all()
        np.testing.assert_allclose(after[number], y0[number] + 0.5 * (x[number] @ a.T) @ b.T, rtol=1e-4, atol=1e-4)
