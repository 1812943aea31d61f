"""Do the rows of the data suit the model: their length, their tokens, their padding."""

import os
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from mindlora.core.fields import COUNT
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.core.run_modes import TRAINING_MODES
from mindlora.core.token_ids import IGNORE_TOKEN_ID, ignore_token_id
from mindlora.core.yaml_file import PET, value_at
from mindlora.run.checks.finding import Finding, error, warning
from mindlora.run.checks.invocation import check_invocation_in_rows
from mindlora.run.checks.mcore import is_mcore, model_config_of
from mindlora.run.checks.model import architecture_of
from mindlora.run.checks.training import callbacks_of

Data = Union[str, Sequence[str]]
Row = Dict[str, np.ndarray]
# Returns the first rows of a MindRecord, at most so many; with None all. Only MindSpore can read them.
FirstRows = Callable[[str, Optional[int]], Iterator[Row]]
# The column in which packed rows say which token begins an example.
BOUNDARY = "boundary"
# seq_length of an mcore model whose YAML does not say it.
_MCORE_LENGTH = 4096
# So many rows of a file are looked at: a file of millions would take minutes.
_ROWS = 200
# A row that ends in fewer equal tokens which do not count may be none that was padded.
_PADDED = 4


def data_of(dataset: Optional[Mapping[str, Any]]) -> Optional[Data]:
    """Returns the MindRecords that a dataset node names, or None if they cannot be read yet."""
    loader = (dataset or {}).get("data_loader") or {}
    data = loader.get("dataset_dir") or loader.get("dataset_files")
    if loader.get("type") != "MindDataset" or not data:
        return None
    return data if all(map(os.path.exists, [data] if isinstance(data, str) else data)) else None


def check_rows(config: Mapping[str, Any], first_rows: FirstRows) -> Iterator[Finding]:
    """Yields a finding for each way in which the rows of the run's data do not suit its model.

    Data that is not there is passed over (check_files names it), and so is data that is no MindRecord. ``first_rows``
    reads the first rows of a MindRecord.
    """
    model = model_of(config)
    if model.get("seq_length") not in COUNT:
        return
    train = data_of(config.get("train_dataset"))
    if config.get("run_mode") in TRAINING_MODES:
        yield from _check_columns(config, train, first_rows)
        yield from _check_labels(config, train, first_rows)
        for where, callback in callbacks_of(config, "HeldOutLoss"):
            folder = callback.get("dataset_dir")
            if folder and os.path.isdir(folder) and not mindrecord_files(folder):
                yield error(
                    where, f"{where}: dataset_dir is {folder}, a folder with no file in it that ends in .mindrecord."
                )
    for where, data, lengths in data_sets(config):
        rows = _rows_of(data, first_rows)
        if rows:
            yield from _check_set(where, rows, lengths, model)
            yield from check_invocation_in_rows(where, rows, model, ignore_token_id(model))


def data_sets(config: Mapping[str, Any]) -> Iterator[Tuple[str, Optional[Data], Sequence[int]]]:
    """Yields where the YAML names data that the run reads, the data, and how many tokens a row may have.

    The data is None where it cannot be read yet. seq_length of the model must be in range.
    """
    training = config.get("run_mode") in TRAINING_MODES
    lengths = row_lengths(config)
    if training:
        yield "train_dataset", data_of(config.get("train_dataset")), lengths
        for number, adapter in enumerate(value_at(config, f"{PET}.adapters") or ()):
            own = adapter.get("data") if isinstance(adapter, Mapping) else None
            if isinstance(own, str) and os.path.exists(own):
                yield f"{PET}.adapters[{number}].data", own, lengths
    if config.get("run_mode") == "eval" or (training and config.get("do_eval")):
        length = model_of(config)["seq_length"]
        evaluated = lengths if _takes_shifted_labels(config) else (length, length + 1)
        yield "eval_dataset", data_of(config.get("eval_dataset")), evaluated
    for where, callback in callbacks_of(config, "HeldOutLoss") if training else ():
        held_out = callback.get("dataset_dir")
        if held_out and os.path.exists(held_out):
            yield where, held_out, lengths


def files_of_run(config: Mapping[str, Any]) -> Iterator[Tuple[str, List[str]]]:
    """Yields (where the YAML names them, MindRecords) of the data that a training run learns from or is judged by."""
    named = [("train_dataset", data_of(config.get("train_dataset")))]
    for where, callback in callbacks_of(config, "HeldOutLoss"):
        folder = callback.get("dataset_dir")
        named.append((where, folder if folder and os.path.exists(folder) else None))
    for where, data in named:
        files = mindrecord_files(data) if data else []
        if files:
            yield where, files


def model_of(config: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns the keys of the model: of an mcore model also those of the folder that describes it."""
    return {"seq_length": _MCORE_LENGTH, **model_config_of(config)} if is_mcore(config) else model_config_of(config)


def row_lengths(config: Mapping[str, Any]) -> Sequence[int]:
    """Returns how many tokens the rows that the model trains on may have."""
    model = model_of(config)
    length = model["seq_length"]
    if _takes_shifted_labels(config):
        # Those of MindFormers' glm4_preprocess.py lack one.
        return length - 1, length
    # The other legacy models predict each token of a row of N + 1 from those before it.
    sliced = model.get("input_sliced_sig") or is_mcore(config)
    return (length, length + 1) if sliced else (length + 1,)


def _takes_shifted_labels(config: Mapping[str, Any]) -> bool:
    architecture = architecture_of(config)
    return architecture is not None and architecture.takes_shifted_labels


def _rows_of(data: Optional[Data], first_rows: FirstRows, *columns: str) -> List[Row]:
    """Returns the first rows of the data that have these columns besides the tokens."""
    files = mindrecord_files(data) if data else []
    if not files:
        return []
    rows: List[Row] = []
    for row in first_rows(files[0], _ROWS):
        if row.keys() >= {"input_ids", *columns}:
            rows += _rows_of_model(row)
    return rows


def _rows_of_model(row: Row) -> List[Row]:
    """Returns the rows that the model gets of one of the data: several of a preference that is not packed."""
    if row["input_ids"].ndim == 1:
        return [row]
    rows: List[Row] = []
    for number in range(len(row["input_ids"])):
        rows.append({name: row[name][number] for name in ("input_ids", "labels") if name in row})
    return rows


def _check_set(where: str, rows: List[Row], lengths: Sequence[int], model: Mapping[str, Any]) -> Iterator[Finding]:
    key = where.split(" ")[0]
    length = model["seq_length"]
    width = len(rows[0]["input_ids"])
    if width not in lengths:
        more = lengths[-1] - length
        convert = f", or convert the data with --seq-length {length}" if more else ""
        yield error(
            key,
            f"{where}: the rows have {width} tokens, and model_config.seq_length {length} needs "
            f"{' or '.join(map(str, lengths))}.",
            f"Set seq_length: {width - more}{convert}.",
        )
    largest = max(int(row["input_ids"].max()) for row in rows)
    vocabulary = model.get("vocab_size")
    if isinstance(vocabulary, int) and largest >= vocabulary:
        yield error(
            key,
            f"{where}: the rows hold token {largest}, and model_config.vocab_size is {vocabulary}: the data was "
            "converted with the tokenizer of another model, or vocab_size is not this model's.",
        )
    padding = _padding(rows, ignore_token_id(model))
    declared = model.get("pad_token_id")
    if isinstance(declared, int) and padding not in (None, declared):
        yield error(
            key,
            f"{where}: the rows are padded with token {padding}, and model_config.pad_token_id is {declared}.",
            f"Set it to {padding}.",
        )


def _check_labels(config: Mapping[str, Any], data: Optional[Data], first_rows: FirstRows) -> Iterator[Finding]:
    """Yields what is wrong with the labels of training data: they are not shifted where they must be, or not read."""
    rows = _rows_of(data, first_rows, "labels")
    columns = value_at(config, "train_dataset.input_columns")
    left_out = columns and "labels" not in ([columns] if isinstance(columns, str) else columns)
    if data and left_out and any(IGNORE_TOKEN_ID in row["labels"] for row in rows):
        yield warning(
            "train_dataset.input_columns",
            f"train_dataset.input_columns leaves out labels, by which {mindrecord_files(data)[0]} says which tokens "
            "count in the loss: now all do, prompts too.",
            "Write input_columns: ['input_ids', 'labels'].",
        )
    if _takes_shifted_labels(config) and _are_unshifted(rows):
        yield error(
            "train_dataset",
            "train_dataset: each label is the token at its own place, and a ChatGLM learns the labels as they are: it "
            "would learn to repeat its input.",
            "Shift the labels by one, as MindFormers' glm4_preprocess.py does; mindlora data writes rows for the other "
            "models.",
        )


def _are_unshifted(rows: List[Row]) -> bool:
    """Returns whether each label that counts is the token at its own place."""
    counted = 0
    for row in rows:
        if len(row["labels"]) == len(row["input_ids"]):
            mask = row["labels"] != IGNORE_TOKEN_ID
            if not np.array_equal(row["labels"][mask], row["input_ids"][mask]):
                return False
            counted += int(mask.sum())
    return counted > 0


def _check_columns(config: Mapping[str, Any], data: Optional[Data], first_rows: FirstRows) -> Iterator[Finding]:
    """Yields an error if train_dataset names columns that the files do not have."""
    dataset = config.get("train_dataset") or {}
    files = mindrecord_files(data) if data else []
    row = next(first_rows(files[0], 1), None) if files else None
    if row is None:
        return
    columns = dataset.get("input_columns") or []
    missing = [name for name in ([columns] if isinstance(columns, str) else columns) if name not in row]
    if missing:
        yield error(
            "train_dataset.input_columns",
            f"train_dataset.input_columns names {' and '.join(map(str, missing))}, and {files[0]} has: "
            f"{', '.join(sorted(row))}.",
            "Name columns that it has.",
        )


def _padding(rows: List[Row], ignored: int) -> Optional[int]:
    """Returns the token that rows end in where nothing counts, or None if no row is padded."""
    for row in rows:
        tokens = row["input_ids"]
        labels = row.get("labels")
        # set_boundary looks at packed rows, where another padding may do no harm.
        if labels is None or len(labels) != len(tokens) or BOUNDARY in row:
            return None
        end = tokens[-_PADDED:]
        if (end == end[0]).all() and (labels[-_PADDED:] == ignored).all():
            return int(end[0])
    return None
