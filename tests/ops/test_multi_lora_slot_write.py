"""multi_lora_slot_write on every path against its reference, and together with the operator that reads the pool."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora.core.errors import BackendError
from mindlora.ops import multi_lora_delta, multi_lora_slot_write, pack_adapter
from tests.support.native import DTYPES, call, normal, refused_by_kernel, tensor, values
from tests.support.op_paths import PATHS

SLOTS, MAX_RANK, K, N = 4, 16, 7, 9


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
        return [values(self.pool), self.ranks.asnumpy(), self.scales.asnumpy()]


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
@pytest.mark.parametrize("rank", [1, 13, 16])
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
def test_the_kernel_writes_the_rows_of_the_adapter_and_no_more(reference, dtype):
    pool = normal(SLOTS, MAX_RANK, K + N, dtype=dtype)
    ranks, scales, packed = np.int32([1, 2, 0, 16]), np.float32([1, 2, 3, 4]), normal(13, K + N, seed=1, dtype=dtype)
    expected = [pool.copy(), ranks.copy(), scales.copy()]
    reference.multi_lora_slot_write(*expected, 2, packed, 0.5)
    inputs = [
        (pool, dtype),
        (ranks, "int32"),
        (scales, "float32"),
        (np.int32([2]), "int32"),
        (packed, dtype),
        (np.float32(0.5), "float32"),
    ]
    *written, out = call("MultiLoraSlotWrite", inputs, (1,), "int32", in_place=3)
    for actual, wanted in zip(written, expected):
        np.testing.assert_array_equal(actual, wanted)
    assert out[0] == 2


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


def test_wrong_slots_ranks_and_dtypes_are_refused(library, monkeypatch, mode):
    monkeypatch.setenv("MINDLORA_BACKEND", PATHS[0])
    start = r"mindlora multi_lora_slot_write: "
    half = Tensor(0.5, ms.float32)
    # A kernel on an NPU cannot raise, and a graph takes 3 s to fail.
    numbers = (SLOTS, -1) if mode == ms.PYNATIVE_MODE else (SLOTS,)
    for number in numbers if PATHS[0] == "cpu" else ():
        with refused_by_kernel(start + f"slot is {number}: the pool has 4[.]"):
            Pool()(slot(number), Tensor(normal(3, K + N)), half).asnumpy()
    with refused_by_kernel(start + "rank is 17: the pool takes 1 to 16[.]"):
        Pool()(slot(0), Tensor(normal(17, K + N)), half).asnumpy()
    with refused_by_kernel(start + "K [+] N is 16 in one input and 15 in another[.]"):
        Pool()(slot(0), Tensor(normal(3, K + N - 1)), half).asnumpy()
    with pytest.raises(BackendError, match="^multi_lora_slot_write .*: packed is Float16 and pool is Float32"):
        Pool()(slot(0), Tensor(normal(3, K + N), ms.float16), half)
