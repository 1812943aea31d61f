"""Do the rows of the data suit the model: their length, their tokens, their padding."""

import math
import os
from typing import Dict, Iterator, List, Optional, Sequence

import numpy as np
from mindformers.tools.register import MindFormerConfig

from mindlora.checks.mcore import is_mcore
from mindlora.common.run_modes import TRAINING_MODES
from mindlora.common.yaml_file import value_at
from mindlora.models import registry
from mindlora.plugin.mindrecords import BOUNDARY, Data, data_of, files_of, first_rows, row_count

# Rows of a file that are looked at: a file of millions would take minutes.
_ROWS = 200
# A row that ends in fewer equal tokens which do not count may be none that was padded.
_PADDED = 4
_IGNORED = -100


def data_mistakes(config: MindFormerConfig) -> Iterator[str]:
    """Yields a sentence for each way in which the rows of the run's data do not suit its model.

    Args:
        config (MindFormerConfig): The whole YAML. Data that is not there is passed over (check_files names it, and
            HeldOutLoss its own), and so is data that is no MindRecord.
    """
    model = config.model.model_config
    length = model.get("seq_length")
    if not isinstance(length, int):
        return
    training, lengths = config.run_mode in TRAINING_MODES, _lengths(config, length)
    if training:
        yield from _mistakes("train_dataset", data_of(config.train_dataset), model, lengths)
        yield from _batch_mistakes(config, data_of(config.train_dataset))
        if _takes_shifted_labels(config):
            yield from _unshifted(data_of(config.train_dataset))
    if config.run_mode == "eval" or (training and config.do_eval):
        evaluated = lengths if _takes_shifted_labels(config) else (length, length + 1)
        yield from _mistakes("eval_dataset", data_of(config.eval_dataset), model, evaluated)
    for number, callback in enumerate(config.callbacks or []) if training else ():
        if callback.get("type") == "HeldOutLoss" and callback.get("dataset_dir"):
            where, data = f"callbacks.{number} (HeldOutLoss)", callback["dataset_dir"]
            if os.path.exists(data):
                yield from _mistakes(where, data, model, lengths)
                if not files_of(data):
                    yield f"{where}: dataset_dir is {data}, a folder with no file in it that ends in .mindrecord."


def _lengths(config: MindFormerConfig, length: int) -> Sequence[int]:
    """Returns how many tokens the rows that a model of this seq_length trains on may have."""
    if _takes_shifted_labels(config):
        # Those of MindFormers' glm4_preprocess.py lack one.
        return length - 1, length
    # The other legacy models predict each token of a row of N + 1 from those before it.
    sliced = config.model.model_config.get("input_sliced_sig") or is_mcore(config)
    return (length, length + 1) if sliced else (length + 1,)


def _takes_shifted_labels(config: MindFormerConfig) -> bool:
    architecture = registry.by_model_type(value_at(config, "model.arch.type"))
    return architecture is not None and architecture.takes_shifted_labels


def _unshifted(data: Optional[Data]) -> Iterator[str]:
    """Yields that each label is the token at its own place, from which a model learns to repeat its input."""
    rows = [row for row in _rows_of(data, "input_ids", "labels") if len(row["labels"]) == len(row["input_ids"])]
    counted = [(row, row["labels"] != _IGNORED) for row in rows]
    pairs = [(row["labels"][mask], row["input_ids"][mask]) for row, mask in counted if mask.any()]
    if pairs and all(np.array_equal(labels, tokens) for labels, tokens in pairs):
        yield (
            "train_dataset: each label is the token at its own place, and a ChatGLM learns the labels as they are: it "
            "would learn to repeat its input. Shift the labels by one, as MindFormers' glm4_preprocess.py does; "
            "mindlora data writes rows for the other models."
        )


def labels_left_out(config: MindFormerConfig) -> Iterator[str]:
    """Yields a sentence if the data says which tokens count in the loss, and the run does not read it.

    Args:
        config (MindFormerConfig): The whole YAML.
    """
    if config.run_mode not in TRAINING_MODES:
        return
    data, wanted = data_of(config.train_dataset), (config.train_dataset or {}).get("input_columns")
    if not data or not wanted or "labels" in ([wanted] if isinstance(wanted, str) else wanted):
        return
    # Before check_files, the data need not be there.
    files = [file for file in files_of(data)[:1] if os.path.isfile(file)]
    if files and any(_IGNORED in row["labels"] for row in _rows_of(data, "labels")):
        yield (
            f"train_dataset.input_columns leaves out labels, by which {files[0]} says which tokens count in "
            "the loss: now all do, prompts too. Write input_columns: ['input_ids', 'labels']."
        )


def _rows_of(data: Optional[Data], *columns: str) -> List[Dict[str, np.ndarray]]:
    """Returns the first rows of the data that have these columns."""
    files = files_of(data) if data else []
    return [row for row in first_rows(files[0], _ROWS) if row.keys() >= set(columns)] if files else []


def _mistakes(where: str, data: Optional[Data], model: dict, lengths: Sequence[int]) -> Iterator[str]:
    rows = _rows_of(data, "input_ids")
    if not rows:
        return
    found = len(rows[0]["input_ids"])
    if found not in lengths:
        length = model["seq_length"]
        more = lengths[-1] - length
        convert = f", or convert the data with --seq-length {length}" if more else ""
        yield (
            f"{where}: the rows have {found} tokens, and model_config.seq_length {length} needs "
            f"{' or '.join(map(str, lengths))}. Set seq_length: {found - more}{convert}."
        )
    largest, vocabulary = max(int(row["input_ids"].max()) for row in rows), model.get("vocab_size")
    if isinstance(vocabulary, int) and largest >= vocabulary:
        yield (
            f"{where}: the rows hold token {largest}, and model_config.vocab_size is {vocabulary}: the data was "
            "converted with the tokenizer of another model, or vocab_size is not this model's."
        )
    padding, declared = _padding(rows, model.get("ignore_token_id", _IGNORED)), model.get("pad_token_id")
    if isinstance(declared, int) and padding not in (None, declared):
        yield (
            f"{where}: the rows are padded with token {padding}, and model_config.pad_token_id is {declared}. Set it "
            f"to {padding}."
        )


def _batch_mistakes(config: MindFormerConfig, data: Optional[Data]) -> Iterator[str]:
    """Yields why the files make no batch: columns that they do not have, or too few rows for one."""
    dataset, files = config.train_dataset, files_of(data) if data else []
    row = next(first_rows(files[0], 1), None) if files else None
    if row is None:
        return
    wanted = dataset.get("input_columns") or []
    missing = [name for name in ([wanted] if isinstance(wanted, str) else wanted) if name not in row]
    if missing:
        yield (
            f"train_dataset.input_columns names {' and '.join(map(str, missing))}, and {files[0]} has: "
            f"{', '.join(sorted(row))}."
        )
    batch, steps = config.runner_config.batch_size, config.runner_config.gradient_accumulation_steps or 1
    if not isinstance(batch, int) or not isinstance(steps, int) or not dataset.get("drop_remainder", True):
        return
    found = min(_rows_up_to(batch * steps, files), dataset.data_loader.get("num_samples") or math.inf)
    if found < batch * steps:
        yield (
            f"train_dataset has {found} rows, and a step needs {batch * steps} (runner_config.batch_size {batch}, "
            f"gradient_accumulation_steps {steps}). Lower batch_size, or give more data."
        )


def _rows_up_to(enough: int, files: Sequence[str]) -> int:
    """Returns how many rows the files have; once there are enough, the other files, perhaps thousands, stay closed."""
    found = 0
    for file in files:
        found += row_count(file)
        if found >= enough:
            break
    return found


def _padding(rows: List[Dict[str, np.ndarray]], ignored: int) -> Optional[int]:
    """Returns the token that rows end in where nothing counts, or None if no row is padded."""
    for row in rows:
        tokens, labels = row["input_ids"], row.get("labels")
        # set_boundary looks at packed rows, where another padding may do no harm.
        if labels is None or len(labels) != len(tokens) or BOUNDARY in row:
            return None
        end = tokens[-_PADDED:]
        if (end == end[0]).all() and (labels[-_PADDED:] == ignored).all():
            return int(end[0])
    return None
