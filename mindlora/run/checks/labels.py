"""Is there anything to learn in the data of a run, and anything to measure in its held-out data: labels that count."""

from typing import Any, Iterator, Mapping, Optional, Sequence

import numpy as np

from mindlora.core.fields import COUNT
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.core.token_ids import ignore_token_id, pad_token_id
from mindlora.core.yaml_file import value_at
from mindlora.run.checks.data_rows import FirstRows, Row, data_of, data_sets, model_of
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.training import callbacks_of

_ADVICE = "Convert the data again with mindlora data, which says how many tokens of it are learned."


def check_labels(config: Mapping[str, Any], first_rows: FirstRows) -> Iterator[Finding]:
    """Yields an error for each data of the run in which nothing counts: no label, and no example of preferences.

    Data that is not there is passed over. As far as the first label that counts, all rows are read.
    """
    model = model_of(config)
    if model.get("seq_length") not in COUNT:
        return
    columns = value_at(config, "train_dataset.input_columns")
    reads_labels = not columns or "labels" in ([columns] if isinstance(columns, str) else columns)
    for where, data, lengths in data_sets(config):
        # Where the run does not read the labels, all tokens count; HeldOutLoss always reads them.
        if data and (reads_labels or where.startswith("callbacks")):
            pad = pad_token_id(model)
            yield from _find(where, mindrecord_files(data), first_rows, max(lengths), ignore_token_id(model), pad)


def check_pynative_labels(config: Mapping[str, Any], first_rows: FirstRows) -> Iterator[Finding]:
    """Yields what check_labels does, for a YAML of the PyNative trainer."""
    model = config.get("model") or {}
    length = model.get("seq_length") or 0
    longest = length + 1 if length in COUNT else 0
    sets = [("train_dataset", data_of({"data_loader": value_at(config, "train_dataset.dataloader")}))]
    for where, callback in callbacks_of(config, "HeldOutLoss"):
        held_out = {"type": "MindDataset", "dataset_dir": callback.get("dataset_dir")}
        sets.append((where, data_of({"data_loader": held_out})))
    for where, data in sets:
        if data:
            yield from _find(where, mindrecord_files(data), first_rows, longest, ignore_token_id(model), None)


def _find(
    where: str, files: Sequence[str], first_rows: FirstRows, longest: int, ignored: int, pad: Optional[int]
) -> Iterator[Finding]:
    for file in files:
        for row in first_rows(file, None):
            if _counts(row, longest, ignored, pad):
                return
    if files:
        yield error(
            where.split(" ")[0],
            f"{where}: no label of {_named(files)} counts in the loss: all are {ignored}, or have nothing before them "
            "that they are predicted from.",
            _ADVICE,
        )


def _counts(row: Row, longest: int, ignored: int, pad: Optional[int]) -> bool:
    """Returns whether a row has anything to learn; True if it has no labels, so that all its tokens count.

    Args:
        row (mapping): The columns of a row.
        longest (int): Tokens of a row in which the first one is predicted from nothing; a shorter row's labels are
            shifted, so that each belongs to the token before it.
        ignored (int): The label that does not count.
        pad (int, optional): The token after which none counts; None if it is not known.
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


def _named(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
