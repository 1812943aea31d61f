"""The pools of a served network: what their cells are called, and an adapter copied into a slot of all of them."""

from typing import Dict, Mapping

import numpy as np
from mindspore import Tensor

from mindlora.nn.multi_lora_dense import MultiLoRADense
from mindlora.ops.multi_lora_slot_write import MultiLoraSlotWrite


class SlotPools:
    """Writes adapters into the slots of a network's pools; used by one thread, between two steps.

    Args:
        cells (dict): Adapter path -> MultiLoRADense.
    """

    def __init__(self, cells: Mapping[str, MultiLoRADense]):
        self._cells = dict(cells)
        self._write = MultiLoraSlotWrite()
        # The slots in which a cell holds an adapter: the others need not be emptied.
        self._used: Dict[str, set] = {path: set() for path in cells}

    def write(self, slot: int, blocks: Mapping[str, tuple]) -> None:
        """Makes a slot hold an adapter and nothing of the one before.

        Args:
            slot (int): The slot.
            blocks (mapping): Path -> (array [r, K + N] of the pool's dtype, scale); a cell that is not in it gets
                rank 0.
        """
        for path, cell in self._cells.items():
            if path in blocks:
                array, scale = blocks[path]
                self._write(
                    cell.lora_pool,
                    cell.lora_ranks,
                    cell.lora_scales,
                    Tensor(np.array([slot], np.int32)),
                    Tensor(array),
                    Tensor(np.array([scale], np.float32)),
                )
                self._used[path].add(slot)
            elif slot in self._used[path]:
                ranks = cell.lora_ranks.asnumpy().copy()
                ranks[slot] = 0
                cell.lora_ranks.set_data(Tensor(ranks))
                self._used[path].discard(slot)
