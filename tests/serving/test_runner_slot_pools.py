"""SlotPools: a slot of all cells' pools holds one adapter, and nothing of the one before."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora.core.numerics.dtypes import from_float32, to_float32
from mindlora.network.serving.multi_lora_dense import MultiLoRADense
from mindlora.serving.build import _NUMPY as NUMPY
from mindlora.serving.packed_adapter import Block, PackedAdapter
from mindlora.serving.runner import SlotPools
from tests.support.compilations import compilations
from tests.support.native import values
from tests.support.networks import normal

SIZES = {"first": (7, 5), "second": (5, 9), "third": (3, 3)}
SLOTS, MAX_RANK = 3, 6


def made(dtype=ms.float32):
    """Returns cells with pools, and their SlotPools."""
    of_tokens = Parameter(Tensor(np.zeros(4, np.int32)), name="slots_of_tokens")
    cells = {
        path: MultiLoRADense.from_cell(nn.Dense(*size, dtype=dtype), path, SLOTS, MAX_RANK, of_tokens)
        for path, size in SIZES.items()
    }
    return cells, SlotPools(cells, NUMPY[str(dtype)])


def packed(ranks, dtype=ms.float32, seed=0):
    """Returns an adapter with ranks by path."""
    blocks = {
        path: Block(from_float32(normal(rank, sum(SIZES[path]), seed=seed), NUMPY[str(dtype)]), 0.5 + rank)
        for path, rank in ranks.items()
    }
    return PackedAdapter("", blocks, 0, max(ranks.values()))


def update(cell, slot):
    """Returns what a slot adds to the weight: scale B A."""
    rows = values(cell.lora_pool)[slot, : int(cell.lora_ranks.asnumpy()[slot])]
    a, b = rows[:, : cell.in_channels], rows[:, cell.in_channels :].T
    return cell.lora_scales.asnumpy()[slot] * (b @ a)


def expected(adapter, path):
    if path not in adapter.blocks:
        return np.zeros(SIZES[path][::-1])
    rows, scale = to_float32(adapter.blocks[path].rows), adapter.blocks[path].scale
    return scale * (rows[:, SIZES[path][0] :].T @ rows[:, : SIZES[path][0]])


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16, ms.bfloat16], ids=str)
def test_a_slot_holds_the_adapter_that_was_written_last(library, graph_mode, dtype):
    cells, pools = made(dtype)
    held = {}
    # From all cells to some, from large ranks to small ones, to and fro.
    turns = [
        (1, {"first": 6, "second": 2, "third": 1}),
        (0, {"second": 3}),
        (1, {"third": 4}),
        (1, {"first": 1, "second": 6}),
        (2, {"first": 5, "third": 6}),
    ]
    for seed, (slot, ranks) in enumerate(turns):
        held[slot] = packed(ranks, dtype, seed)
        pools.write(slot, held[slot])
        for number, adapter in held.items():
            for path, cell in cells.items():
                np.testing.assert_allclose(update(cell, number), expected(adapter, path), rtol=1e-5, atol=1e-6)


def test_warming_up_leaves_every_slot_without_an_effect(library, graph_mode):
    cells, pools = made()
    pools.warm_up()
    assert not any(update(cell, slot).any() for cell in cells.values() for slot in range(SLOTS))


def test_one_graph_is_compiled_whatever_the_ranks(library, graph_mode, monkeypatch):
    compiled, (_, pools) = compilations(monkeypatch), made()
    pools.warm_up()
    assert len(compiled) == 1
    for rank in (1, 4, 6):
        pools.write(0, packed({"first": rank, "second": 7 - rank}))
    assert len(compiled) == 1


def test_gains_are_those_of_the_adapter_that_was_written_last(library, graph_mode):
    cells, pools = made()
    gains = {path: normal(wide, seed=7) for path, (_, wide) in SIZES.items() if path != "third"}
    plain = packed({"first": 2, "third": 1})
    blocks = {path: packed({path: 1}).blocks[path]._replace(gain=gain) for path, gain in gains.items()}
    dora = PackedAdapter("", blocks, 0, 1)
    for slot, adapter, gained in ((2, dora, {2}), (0, plain, {2}), (1, dora, {1, 2}), (2, plain, {1})):
        pools.write(slot, adapter)
        assert pools.gained == gained
        for path, cell in cells.items():
            expected = np.zeros((SLOTS + 1, SIZES[path][1]), np.float32)
            if path in gains:
                expected[list(gained)] = gains[path]
            np.testing.assert_array_equal(cell.lora_gains.asnumpy(), expected)
