"""The held-out losses of several adapters, measured in one pass over the data."""

import math
from typing import Any, Dict, Tuple

import numpy as np
from mindspore import Tensor

from mindlora.network.graph_cache import CompiledOnce
from mindlora.training.held_out.cells import HeldOutLossCell
from mindlora.training.held_out.whole_batches import labeled_batches
from mindlora.training.several.train_step import RowsOfAdapters


class HeldOutRows(CompiledOnce):
    """The held-out loss of each row under each of K adapters.

    Args:
        cell (HeldOutLossCell): Of the network with the adapters, with ``by_row``.
        adapters (int): K.

    Inputs:
        - **input_ids**, **labels** (Tensor) - int32 [rows, N + 1], as for HeldOutLossCell.

    Outputs:
        Tuple of two tensors float32 [K, rows]: the sum of the losses of each row, and how many labels count in it.
    """

    def __init__(self, cell: HeldOutLossCell, adapters: int):
        super().__init__(auto_prefix=False)
        self.ignore_token_id = cell.ignore_token_id
        self.network = RowsOfAdapters(cell, adapters)
        self.adapters = adapters

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        losses, counts = self.network(input_ids, labels)
        return losses.reshape((self.adapters, -1)), counts.reshape((self.adapters, -1))


class HeldOutOfAdapters:
    """Measures the held-out loss of all adapters when that of one is asked for, once in each step.

    Args:
        cell, adapters: As for HeldOutRows.

    Attributes:
        rows (dict): Path of the data -> (losses [K, rows], counts [rows]) of its rows, as measured in this step.
        best (dict): Path of the data -> adapter -> (losses [rows], counts [rows], step) where its loss was least.
    """

    def __init__(self, cell: HeldOutLossCell, adapters: int):
        self.cell = HeldOutRows(cell, adapters)
        self.rows: Dict[str, Tuple[np.ndarray, np.ndarray]] = {}
        self.best: Dict[str, Dict[int, Tuple[np.ndarray, np.ndarray, int]]] = {}
        self.step = 0

    def begin(self, step: int) -> None:
        """Begins a step: what is asked for next is measured anew."""
        self.rows = {}
        self.step = step

    def loss(self, adapter: int, dataset_dir: str, batch_size: int) -> float:
        """Returns the mean loss, in nats per label, of an adapter on a MindRecord; NaN if no label counts."""
        if dataset_dir not in self.rows:
            self.rows[dataset_dir] = self._measure(dataset_dir, batch_size)
        losses, counts = self.rows[dataset_dir]
        if not counts.sum():
            return math.nan
        best = self.best.setdefault(dataset_dir, {})
        if adapter not in best or losses[adapter].sum() < best[adapter][0].sum():
            best[adapter] = losses[adapter], counts, self.step
        return float(losses[adapter].sum() / counts.sum())

    def state_of(self, adapter: int) -> Dict[str, Any]:
        """Returns what a resumed run needs of an adapter, as JSON values: path of the data -> its part of ``best``."""
        best = {path: each[adapter] for path, each in self.best.items() if adapter in each}
        return {path: [losses.tolist(), counts.tolist(), step] for path, (losses, counts, step) in best.items()}

    def restore(self, adapter: int, state: Dict[str, Any]) -> None:
        """Takes over what ``state_of`` returned."""
        for path, (losses, counts, step) in state.items():
            self.best.setdefault(path, {})[adapter] = np.array(losses), np.array(counts), step

    def _measure(self, dataset_dir, batch_size):
        losses, counts = [], []
        self.cell.set_train(False)
        for rows, input_ids, labels in labeled_batches(dataset_dir, batch_size, self.cell.ignore_token_id):
            sums = self.cell(input_ids, labels)
            losses.append(sums[0].asnumpy()[:, :rows].astype(np.float64))
            counts.append(sums[1].asnumpy()[0, :rows].astype(np.float64))
        self.cell.set_train(True)
        return np.concatenate(losses, 1), np.concatenate(counts)
