"""Batches that the devices can divide, for rows that callbacks feed to a network outside the train step."""

import copy
from typing import Any, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import mindspore as ms
import numpy as np
from mindformers.dataset.dataloader.build_dataloader import build_dataset_loader
from mindformers.tools.register import MindFormerConfig
from mindspore import Tensor, nn

Arrays = Tuple[np.ndarray, np.ndarray]
_DIVIDING_MODES = ("semi_auto_parallel", "auto_parallel")


def parts_of_batch(network: nn.Cell) -> int:
    """Returns the number of parts into which devices divide a batch's rows: 1, except in the semi-automatic modes.

    ``network`` is a MindFormers model, whose configuration has the parallel_config of the run.
    """
    if ms.get_auto_parallel_context("parallel_mode") not in _DIVIDING_MODES:
        return 1
    parallel = getattr(network.config, "parallel_config", None)
    return getattr(parallel, "data_parallel", None) or 1


def missing_rows(rows: int, parts: int) -> int:
    """Returns the number of rows to add so that ``parts`` devices can divide the batch."""
    return -rows % parts


def loaded_rows(loader: Mapping[str, Any]) -> Arrays:
    """Returns the rows that MindFormers' loader makes from a node like train_dataset.data_loader.

    They are input_ids and labels, of any integer dtype, [rows, N].
    """
    # MindFormers removes keys from the node.
    rows = build_dataset_loader(MindFormerConfig(**copy.deepcopy(dict(loader)))).project(["input_ids", "labels"])
    columns = zip(*rows.create_tuple_iterator(num_epochs=1, output_numpy=True))
    input_ids, labels = map(np.stack, columns)
    return input_ids, labels


def labeled_batches(
    data: Union[str, Arrays], batch_size: int, ignored: int, parts: int = 1
) -> Iterator[Tuple[int, Tensor, Tensor]]:
    """Yields batches: the number of rows from the data, input_ids and labels, int32 [rows, N].

    Args:
        data (str or tuple of array): A MindRecord with integer columns input_ids and labels, or the result of
            loaded_rows.
        batch_size (int): Rows of the data in a batch.
        ignored (int): The label that never counts; filler rows have no other label.
        parts (int): A divisor of the number of rows. Default: 1.
    """
    columns = ["input_ids", "labels"]
    if isinstance(data, str):
        dataset = ms.dataset.MindDataset(data, columns_list=columns, shuffle=False)
    else:
        dataset = ms.dataset.NumpySlicesDataset(data, columns, shuffle=False)
    for rows, (input_ids, labels) in filled_batches(dataset, batch_size, (None, ignored), parts):
        yield rows, input_ids, labels


def filled_batches(
    dataset: ms.dataset.Dataset, batch_size: int, absent: Sequence[Optional[int]], parts: int = 1
) -> Iterator[Tuple[int, List[Tensor]]]:
    """Yields batches: the number of rows from the data, and the columns, int32 [rows, ...].

    The last batch is filled up to the size of the others: MindSpore compiles a graph for each size.

    Args:
        dataset (Dataset): Rows of integers.
        batch_size (int): Rows of the data in a batch.
        absent (sequence of int): For each column, the value in filler rows; None to copy the last row.
        parts (int): A divisor of the number of rows. Default: 1.
    """
    size = 0
    for columns in dataset.batch(batch_size).create_tuple_iterator(num_epochs=1, output_numpy=True):
        rows = len(columns[0])
        size = max(size, rows + missing_rows(rows, parts))
        filled = [_filled(column, size - rows, value) for column, value in zip(columns, absent)]
        yield rows, [Tensor(column.astype(np.int32)) for column in filled]


def _filled(column, missing, value):
    if not missing:
        return column
    last = column[-1:] if value is None else np.full_like(column[-1:], value)
    return np.concatenate((column, last.repeat(missing, 0)))
