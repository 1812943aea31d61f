"""Rows that callbacks give to a network themselves, outside the train step, in batches that the devices can divide."""

from typing import Iterator, Tuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

_DIVIDING_MODES = ("semi_auto_parallel", "auto_parallel")


def parts_of_batch(network: nn.Cell) -> int:
    """Returns into how many parts the devices divide the rows of a batch: 1, except in the semi-automatic modes.

    ``network`` is a MindFormers model, whose configuration has the parallel_config of the run.
    """
    if ms.get_auto_parallel_context("parallel_mode") not in _DIVIDING_MODES:
        return 1
    parallel = getattr(network.config, "parallel_config", None)
    return getattr(parallel, "data_parallel", None) or 1


def missing_rows(rows: int, parts: int) -> int:
    """Returns how many rows a batch lacks until ``parts`` devices can divide it."""
    return -rows % parts


def labeled_batches(dataset_dir: str, batch_size: int, ignored: int, parts: int = 1) -> Iterator[Tuple[Tensor, Tensor]]:
    """Yields the rows of a MindRecord in batches, the last one perhaps smaller: input_ids and labels, int32 [rows, N].

    Args:
        dataset_dir (str): The MindRecord, with integer columns input_ids and labels.
        batch_size (int): Rows of the data in a batch.
        ignored (int): The label that counts nowhere.
        parts (int): What divides the number of rows: rows without a label that counts fill a batch up. Default: 1.
    """
    dataset = ms.dataset.MindDataset(dataset_dir, columns_list=["input_ids", "labels"], shuffle=False)
    batches = dataset.batch(batch_size).create_tuple_iterator(num_epochs=1, output_numpy=True)
    for input_ids, labels in batches:
        missing = missing_rows(len(labels), parts)
        if missing:
            input_ids = np.concatenate((input_ids, input_ids[-1:].repeat(missing, 0)))
            labels = np.concatenate((labels, np.full((missing, *labels.shape[1:]), ignored, labels.dtype)))
        yield Tensor(input_ids.astype(np.int32)), Tensor(labels.astype(np.int32))
