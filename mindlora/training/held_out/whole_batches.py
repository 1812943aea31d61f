"""Rows that callbacks give to a network themselves, outside the train step, in batches that the devices can divide."""

import copy
from typing import Any, Iterator, Mapping, Tuple, Union

import mindspore as ms
import numpy as np
from mindformers.dataset.dataloader.build_dataloader import build_dataset_loader
from mindformers.tools.register import MindFormerConfig
from mindspore import Tensor, nn

Arrays = Tuple[np.ndarray, np.ndarray]
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


def loaded_rows(loader: Mapping[str, Any]) -> Arrays:
    """Returns the rows that a loader of MindFormers makes, of a node like train_dataset.data_loader.

    They are input_ids and labels, of any integers, [rows, N].
    """
    # MindFormers takes keys out of the node.
    rows = build_dataset_loader(MindFormerConfig(**copy.deepcopy(dict(loader)))).project(["input_ids", "labels"])
    columns = zip(*rows.create_tuple_iterator(num_epochs=1, output_numpy=True))
    input_ids, labels = map(np.stack, columns)
    return input_ids, labels


def labeled_batches(
    data: Union[str, Arrays], batch_size: int, ignored: int, parts: int = 1
) -> Iterator[Tuple[Tensor, Tensor]]:
    """Yields rows in batches, the last one perhaps smaller: input_ids and labels, int32 [rows, N].

    Args:
        data (str or tuple of array): A MindRecord with integer columns input_ids and labels, or what loaded_rows
            returned.
        batch_size (int): Rows of the data in a batch.
        ignored (int): The label that counts nowhere.
        parts (int): What divides the number of rows: rows without a label that counts fill a batch up. Default: 1.
    """
    columns = ["input_ids", "labels"]
    if isinstance(data, str):
        dataset = ms.dataset.MindDataset(data, columns_list=columns, shuffle=False)
    else:
        dataset = ms.dataset.NumpySlicesDataset(data, columns, shuffle=False)
    batches = dataset.batch(batch_size).create_tuple_iterator(num_epochs=1, output_numpy=True)
    for input_ids, labels in batches:
        missing = missing_rows(len(labels), parts)
        if missing:
            input_ids = np.concatenate((input_ids, input_ids[-1:].repeat(missing, 0)))
            labels = np.concatenate((labels, np.full((missing, *labels.shape[1:]), ignored, labels.dtype)))
        yield Tensor(input_ids.astype(np.int32)), Tensor(labels.astype(np.int32))
