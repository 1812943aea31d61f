"""Checks that the rows of the data suit the model: their length, their tokens, their padding."""

import os
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.fields import COUNT, IGNORE_TOKEN_ID, ignore_token_id, pad_token_id
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.core.text import shown
from mindlora.core.yaml_file import value_at
from mindlora.run.checks.finding import Finding, error, warning
from mindlora.run.checks.invocation import check_invocation_in_rows
from mindlora.run.yaml_run import Data, YamlRun, data_of

# Rows that MindFormers' own loaders pack on reading: the settings that keep examples apart.

_LOADER = "train_dataset.data_loader"
_PACKING_LOADERS = ("HFDataLoader", "CommonDataLoader")
_PACKER = "PackingHandler"
_SHORTEST = 2048


def check_packing(run: YamlRun) -> Iterator[Finding]:
    """Yields the settings that MindFormers refuses with a packing loader, and a warning if examples see each other."""
    yield from _check_length(run)
    kind = run.at(f"{_LOADER}.type")
    handlers = run.at(f"{_LOADER}.handler")
    named = [one.get("type") for one in handlers if isinstance(one, Mapping)] if isinstance(handlers, list) else []
    packs = kind in _PACKING_LOADERS and _PACKER in named
    if not run.trains or not (packs or kind == "BlendedMegatronDatasetDataLoader"):
        return
    sliced = run.model_config.get("input_sliced_sig")
    if not sliced and not run.is_mcore:
        yield error(
            "model.model_config.input_sliced_sig",
            f"{_LOADER}.type is {kind}, whose labels are shifted already, and model_config.input_sliced_sig is "
            f"{shown(sliced)}.",
            "Set it to True.",
        )
    # Without the key, MindFormers takes all columns.
    if packs and run.columns and not {"attention_mask", "actual_seq_len"} & set(run.columns):
        ends = bool(run.at(f"{_LOADER}.create_compressed_eod_mask"))
        column = "actual_seq_len" if ends else "attention_mask"
        more = "" if ends else ", or set create_compressed_eod_mask: True and add actual_seq_len"
        yield warning(
            "train_dataset.input_columns",
            f"{_LOADER} packs examples ({_PACKER}), and train_dataset.input_columns lacks the column that keeps them "
            f"apart, so the examples of a row see each other: {', '.join(map(str, run.columns))}.",
            f"Add {column} to input_columns and construct_args_key, and its part to parallel.dataset_strategy{more}.",
        )


def _check_length(run: YamlRun) -> Iterator[Finding]:
    """Yields an error if rows are too short for the compressed mask of flash attention."""
    keys = ["model.model_config.use_attn_mask_compression"]
    if run.is_mcore:
        keys += ["model.model_config.use_eod_attn_mask_compression", f"{_LOADER}.create_compressed_eod_mask"]
    compressing = [key for key in keys if run.at(key)]
    length = run.model_config.get("seq_length")
    if compressing and isinstance(length, int) and length < _SHORTEST and run.trains:
        yield error(
            compressing[0],
            f"{compressing[0]} is True and model_config.seq_length is {length}: MindFormers compresses masks of at "
            f"least {_SHORTEST} tokens.",
            f"Set {compressing[0].rpartition('.')[2]}: False, or seq_length: {_SHORTEST}.",
        )


Row = Dict[str, np.ndarray]
# Returns the first rows of a MindRecord, at most the given number; all with None. Only MindSpore can read them.
FirstRows = Callable[[str, Optional[int]], Iterator[Row]]
# The column of packed rows that names the token with which examples begin.
BOUNDARY = "boundary"
# The default seq_length of an mcore model.
_MCORE_LENGTH = 4096
# How many rows of a file are checked: a file of millions would take minutes.
_ROWS = 200
# A row that ends in fewer equal, uncounted tokens may not be padded.
_PADDED = 4


def check_rows(run: YamlRun, first_rows: FirstRows) -> Iterator[Finding]:
    """Yields a finding for each way in which the rows of the run's data do not suit its model.

    It skips data that does not exist (check_files names it) or is not a MindRecord. ``first_rows`` reads the first
    rows of a MindRecord.
    """
    model = model_of(run)
    if model.get("seq_length") not in COUNT:
        return
    if run.trains:
        yield from _check_columns(run, first_rows)
        yield from _check_labels(run, first_rows)
        for where, folder in run.held_out_data:
            if os.path.isdir(folder) and not mindrecord_files(folder):
                yield error(
                    where, f"{where}: dataset_dir is {folder}, a folder with no file in it that ends in .mindrecord."
                )
    for where, data, lengths in data_sets(run):
        rows = _rows_of(data, first_rows)
        if rows:
            yield from _check_set(where, rows, lengths, model)
            yield from check_invocation_in_rows(where, rows, model, ignore_token_id(model))


def data_sets(run: YamlRun) -> Iterator[Tuple[str, Optional[Data], Sequence[int]]]:
    """Yields (key in the YAML, data, allowed tokens per row) for the data that the run reads.

    The data is None if it cannot be read yet. The model's seq_length must be in range.
    """
    lengths = row_lengths(run)
    if run.trains:
        yield "train_dataset", run.train_data, lengths
        for where, own in run.data_of_adapters:
            yield where, own, lengths
    if run.evaluates:
        length = model_of(run)["seq_length"]
        evaluated = lengths if run.takes_shifted_labels else (length, length + 1)
        yield "eval_dataset", run.eval_data, evaluated
    for where, held_out in run.held_out_data if run.trains else ():
        yield where, held_out, lengths


def files_of_run(run: YamlRun) -> Iterator[Tuple[str, List[str]]]:
    """Yields (key in the YAML, MindRecords) for the data of training and held-out loss."""
    for where, data in [("train_dataset", run.train_data), *run.held_out_data]:
        files = mindrecord_files(data) if data else []
        if files:
            yield where, files


def pynative_files(config: Mapping[str, Any]) -> Iterator[Tuple[str, List[str]]]:
    """Yields the same as files_of_run for a YAML of the PyNative trainer."""
    for where, data in _pynative_data(config):
        files = mindrecord_files(data) if data else []
        if files:
            yield where, files


def _pynative_data(config: Mapping[str, Any]) -> List[Tuple[str, Optional[Data]]]:
    train_data = data_of({"data_loader": value_at(config, "train_dataset.dataloader")})
    return [("train_dataset", train_data), *YamlRun(config).held_out_data]


def model_of(run: YamlRun) -> Dict[str, Any]:
    """Returns the keys of the model; for an mcore model, including those of the folder that describes it."""
    return {"seq_length": _MCORE_LENGTH, **run.model} if run.is_mcore else run.model


def row_lengths(run: YamlRun) -> Sequence[int]:
    """Returns the allowed numbers of tokens in the model's training rows."""
    length = model_of(run)["seq_length"]
    if run.takes_shifted_labels:
        # Rows of MindFormers' glm4_preprocess.py lack one.
        return length - 1, length
    # The other legacy models, and losses of preferences, predict each token of a row of N + 1 from those before it.
    sliced = run.model.get("input_sliced_sig") or run.is_mcore
    return (length, length + 1) if sliced and run.preference is None else (length + 1,)


def _rows_of(data: Optional[Data], first_rows: FirstRows, *columns: str) -> List[Row]:
    """Returns the first rows of the data, with these columns besides the tokens."""
    files = mindrecord_files(data) if data else []
    if not files:
        return []
    rows: List[Row] = []
    for row in first_rows(files[0], _ROWS):
        if row.keys() >= {"input_ids", *columns}:
            rows += _rows_of_model(row)
    return rows


def _rows_of_model(row: Row) -> List[Row]:
    """Returns the model's rows for a row of the data: several for an unpacked preference."""
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
            f"{where}: the rows are padded with token {padding}, but model_config.pad_token_id is {declared}.",
            f"Set it to {padding}.",
        )


def _check_labels(run: YamlRun, first_rows: FirstRows) -> Iterator[Finding]:
    """Yields faults in the labels of training data: labels that must be shifted and are not, or are not read."""
    data = run.train_data
    rows = _rows_of(data, first_rows, "labels")
    if data and run.columns and "labels" not in run.columns and any(IGNORE_TOKEN_ID in row["labels"] for row in rows):
        yield warning(
            "train_dataset.input_columns",
            f"train_dataset.input_columns leaves out labels, by which {mindrecord_files(data)[0]} says which tokens "
            "count in the loss: now all do, prompts too.",
            "Write input_columns: ['input_ids', 'labels'].",
        )
    if run.takes_shifted_labels and _are_unshifted(rows):
        yield error(
            "train_dataset",
            "train_dataset: each label is the token at its own place, and a ChatGLM learns the labels as they are: it "
            "would learn to repeat its input.",
            "Shift the labels by one, as MindFormers' glm4_preprocess.py does; mindlora data writes rows for the other "
            "models.",
        )


def _are_unshifted(rows: List[Row]) -> bool:
    """Returns whether each counted label is the token at its own place."""
    counted = 0
    for row in rows:
        if len(row["labels"]) == len(row["input_ids"]):
            mask = row["labels"] != IGNORE_TOKEN_ID
            if not np.array_equal(row["labels"][mask], row["input_ids"][mask]):
                return False
            counted += int(mask.sum())
    return counted > 0


def _check_columns(run: YamlRun, first_rows: FirstRows) -> Iterator[Finding]:
    """Yields an error if train_dataset names columns that the files lack."""
    files = mindrecord_files(run.train_data) if run.train_data else []
    row = next(first_rows(files[0], 1), None) if files else None
    if row is None:
        return
    missing = [name for name in run.columns or () if name not in row]
    if missing:
        yield error(
            "train_dataset.input_columns",
            f"train_dataset.input_columns names {' and '.join(map(str, missing))}, but {files[0]} has: "
            f"{', '.join(sorted(row))}.",
            "Name columns that it has.",
        )


def _padding(rows: List[Row], ignored: int) -> Optional[int]:
    """Returns the token in which rows end without counted labels, or None if no row is padded."""
    for row in rows:
        tokens = row["input_ids"]
        labels = row.get("labels")
        # set_boundary checks packed rows, where another padding may do no harm.
        if labels is None or len(labels) != len(tokens) or BOUNDARY in row:
            return None
        end = tokens[-_PADDED:]
        if (end == end[0]).all() and (labels[-_PADDED:] == ignored).all():
            return int(end[0])
    return None


# Checks that training data and held-out data have counted labels.

_ADVICE = "Convert the data again with mindlora data, which says how many tokens of it are learned."


def check_labels(run: YamlRun, first_rows: FirstRows) -> Iterator[Finding]:
    """Yields an error for each dataset of the run without any counted label or example of preferences.

    It skips data that does not exist. All rows up to the first counted label are read.
    """
    model = model_of(run)
    if model.get("seq_length") not in COUNT:
        return
    reads_labels = not run.columns or "labels" in run.columns
    for where, data, lengths in data_sets(run):
        # If the run does not read the labels, all tokens count; HeldOutLoss always reads them.
        if data and (reads_labels or where.startswith("callbacks")):
            pad = pad_token_id(model)
            yield from _find(where, mindrecord_files(data), first_rows, max(lengths), ignore_token_id(model), pad)


def check_pynative_labels(config: Mapping[str, Any], first_rows: FirstRows) -> Iterator[Finding]:
    """Yields check_rows' findings on labels and invocation tokens, for a YAML of the PyNative trainer."""
    model = config.get("model") or {}
    length = model.get("seq_length") or 0
    longest = length + 1 if length in COUNT else 0
    for where, data in _pynative_data(config):
        if data:
            ignored = ignore_token_id(model)
            yield from _find(where, mindrecord_files(data), first_rows, longest, ignored, None)
            if longest:
                rows = [_unshifted(row, length, ignored) for row in _rows_of(data, first_rows)]
                of_model = {**model, "pet_config": config.get("pet_config")}
                yield from check_invocation_in_rows(
                    where, rows, of_model, ignored, "pet_config.alora_invocation_tokens"
                )


def _unshifted(row: Row, length: int, ignored: int) -> Row:
    """Returns a row with each label at the place of its token."""
    if "labels" not in row or len(row["input_ids"]) != length:
        return row
    return {**row, "labels": np.concatenate([[ignored], row["labels"][:-1]])}


def _find(
    where: str, files: Sequence[str], first_rows: FirstRows, longest: int, ignored: int, pad: Optional[int]
) -> Iterator[Finding]:
    for file in files:
        for row in first_rows(file, None):
            if _counts(row, longest, ignored, pad):
                return
    if files:
        named = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        yield error(
            where.split(" ")[0],
            f"{where}: no label of {named} counts in the loss: all are {ignored}, or have nothing before them "
            "that they are predicted from.",
            _ADVICE,
        )


def _counts(row: Row, longest: int, ignored: int, pad: Optional[int]) -> bool:
    """Returns whether a row has counted labels; True if it has no labels, so that all its tokens count.

    Args:
        row (mapping): The columns of a row.
        longest (int): Tokens of a row in which the first one is predicted from nothing; a shorter row's labels are
            shifted, so that each belongs to the token before it.
        ignored (int): The label that does not count.
        pad (int, optional): The token after which none counts; None if it is unknown.
    """
    if "labels" not in row or "input_ids" not in row:
        return True
    if "answers" in row:
        examples = row.get("pairs", row.get("judgments"))
        return bool((row["answers"] >= 0).any()) and (examples is None or bool(np.any(examples)))
    tokens, labels = row["input_ids"], row["labels"]
    if tokens.shape != labels.shape:
        return True
    if tokens.shape[-1] == longest:
        tokens, labels = tokens[..., :-1], labels[..., 1:]
    counted = labels != ignored
    return bool((counted if pad is None else counted & (tokens != pad)).any())
