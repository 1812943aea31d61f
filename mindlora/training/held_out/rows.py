"""Rows of held-out data: in batches that the devices can divide, and cut for MindFormers' own evaluation."""

import copy
from typing import Any, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import mindspore as ms
import numpy as np
from mindformers.dataset.dataloader.build_dataloader import build_dataset_loader
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn

from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.data.mindrecord import first_rows
from mindlora.run.yaml_run import YamlRun
from mindlora.training.log import logger

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


# MindFormers' evaluation of rows that ``mindlora data`` writes, which have one token more than it takes


CUT_ROWS = "RowsForEvaluation"


def cut_rows_for_eval(config: MindFormerConfig) -> None:
    """Cuts the last token of rows of seq_length + 1 tokens, which MindFormers' evaluation does not take.

    The ``type`` of eval_dataset's data_loader in the YAML is changed where needed.
    """
    length = config.model.model_config.get("seq_length")
    data = YamlRun(config).eval_data
    if not data or (config.run_mode != "eval" and not config.do_eval):
        return
    files = mindrecord_files(data)
    row = next(first_rows(files[0], 1), None) if files else None
    if row is not None and "input_ids" in row and len(row["input_ids"]) == (length or 0) + 1:
        config.eval_dataset.data_loader.type = CUT_ROWS
        config.eval_dataset.data_loader.length = length
        logger.info(
            "The rows of eval_dataset have %d tokens, as training takes them: the last one of each is not judged here. "
            "HeldOutLoss judges it.",
            length + 1,
        )


@MindFormerRegister.register(MindFormerModuleType.DATASET_LOADER, alias=CUT_ROWS)
def rows_for_evaluation(
    column_names: List[str],
    length: int,
    dataset_dir: Optional[str] = None,
    dataset_files: Optional[List[str]] = None,
    num_shards: Optional[int] = None,
    shard_id: Optional[int] = None,
    shuffle: Optional[bool] = None,
    num_samples: Optional[int] = None,
    **_: Any,
) -> ms.dataset.MindDataset:
    """Returns a MindDataset with the first ``length`` elements of each row of MindRecord files or a folder of them."""
    rows = ms.dataset.MindDataset(
        mindrecord_files(dataset_dir or dataset_files or []),
        columns_list=column_names,
        num_shards=num_shards,
        shard_id=shard_id,
        shuffle=shuffle,
        num_samples=num_samples,
    )
    for column in column_names:
        rows = rows.map(lambda values: values[:length], input_columns=[column])
    return rows
