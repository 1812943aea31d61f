"""The pools of a served network: an adapter copied into a slot of all of them, in one graph."""

from typing import Mapping

import numpy as np
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.nn.multi_lora_dense import MultiLoRADense
from mindlora.nn.tensors import to_tensor
from mindlora.ops.multi_lora_slot_write import MultiLoraSlotWrite
from mindlora.serving.packed_adapter import PackedAdapter


class SlotPools:
    """Writes adapters into the slots of a network's pools; used by one thread, between two steps.

    Args:
        cells (mapping): Adapter path -> MultiLoRADense.
        dtype (numpy.dtype): That of the pools.
    """

    def __init__(self, cells: Mapping[str, MultiLoRADense], dtype: np.dtype):
        self._paths = list(cells)
        self._write = _WriteAll(list(cells.values()))
        # What a cell gets that the adapter leaves as it is: one row that adds nothing.
        self._nothing = [to_tensor(np.zeros((1, cell.lora_pool.shape[2]), dtype)) for cell in cells.values()]

    def write(self, slot: int, packed: PackedAdapter) -> None:
        """Makes a slot hold an adapter, and nothing of the one that was there before.

        Args:
            slot (int): The slot.
            packed (PackedAdapter): The adapter.
        """
        blocks = [packed.blocks.get(path) for path in self._paths]
        rows = [to_tensor(block.rows) if block else nothing for block, nothing in zip(blocks, self._nothing)]
        scales = [block.scale if block else 0.0 for block in blocks]
        self._write(Tensor(np.array([slot], np.int32)), Tensor(np.array(scales, np.float32)), *rows)

    def warm_up(self) -> None:
        """Compiles the graph, and leaves every slot empty."""
        nothing = Tensor(np.zeros(len(self._paths), np.float32))
        self._write(Tensor(np.zeros(1, np.int32)), nothing, *self._nothing)


class _WriteAll(nn.Cell):
    """All cells' writes in one graph; blocks may have any number of rows."""

    def __init__(self, cells):
        super().__init__(auto_prefix=False)
        self.cells_with_pools = nn.CellList(cells, auto_prefix=False)
        self.write = MultiLoraSlotWrite()
        # As in ServedStep: always the same graph.
        self.phase = "prefill"
        self.set_inputs(
            Tensor(shape=[1], dtype=mstype.int32),
            Tensor(shape=[len(cells)], dtype=mstype.float32),
            *(Tensor(shape=[None, cell.lora_pool.shape[2]], dtype=cell.dtype) for cell in cells),
        )

    def construct(self, slot: Tensor, scales: Tensor, *blocks: Tensor) -> Tensor:
        for index, cell in enumerate(self.cells_with_pools):
            scale = scales[index : index + 1]
            self.write(cell.lora_pool, cell.lora_ranks, cell.lora_scales, slot, blocks[index], scale)
        return slot
