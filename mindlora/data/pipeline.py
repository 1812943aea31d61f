"""The way from inputs to MindRecord that every kind of examples takes: read, tokenize, mix, hold out, write, report."""

import contextlib
from typing import Any, List, Sequence, Tuple, Union

import numpy as np

from mindlora.common import atomic
from mindlora.data import histogram, tokenizers
from mindlora.data.conversion import DataReport, Encoded, RowFormat
from mindlora.data.examples import Examples
from mindlora.data.mindrecord import replace_mindrecord, write_rows
from mindlora.data.mixing import check_weights, mix
from mindlora.data.packing import find_boundary, pack, packed_columns
from mindlora.data.settings import Settings, check_arguments, held_out_name
from mindlora.data.sources import read_inputs
from mindlora.data.statistics import length_statistics
from mindlora.data.tokenizing import tokenize
from mindlora.errors import DataError


def convert_examples(
    examples: Examples, inputs: Union[str, Sequence[str]], output_path: str, tokenizer: Any, settings: Settings
) -> DataReport:
    """Writes the MindRecord of one kind of examples. Everything is checked before the first byte is written.

    Args:
        examples (Examples): The kind.
        inputs (str or sequence of str): See read_inputs.
        output_path (str): Must end in .mindrecord; an index is written beside it, as NAME.mindrecord.db.
        tokenizer (str or tokenizer): A path for load_tokenizer, or a tokenizer that it returned.
        settings (Settings): The rest.

    Returns:
        DataReport.

    Raises:
        DataError: An input, a setting or an output path is wrong; no row is usable; or ``strict`` is True and a row is
            not usable.
        TokenizerError: The tokenizer cannot be loaded, used or trained.
    """
    check_arguments(output_path, tokenizer, settings)
    inputs = [inputs] if isinstance(inputs, str) else list(inputs)
    check_weights(settings.weights, len(inputs))
    sources = read_inputs(inputs, examples.layout, settings.columns, settings.split)
    tokenized, loaded = tokenize(sources, examples, tokenizer, settings)
    mixed = mix(tokenized.inputs, settings.weights, settings.seed)
    encoded = [example for part in mixed for example in part]
    row_format = RowFormat(loaded, settings.seq_length, settings.ignore_token_id)
    boundary = _boundary(encoded, loaded) if settings.pack else None
    columns = _row_maker(row_format, boundary, settings)
    statistics = _statistics(encoded, loaded, settings)
    kept, held_out = hold_out(encoded, settings.holdout, settings.seed)
    held_out_path = held_out_name(output_path) if held_out else None
    # What is entered first is moved into place last: the output exists only when everything else does.
    with contextlib.ExitStack() as outputs:
        counts = [
            write_rows(columns(part), outputs.enter_context(replace_mindrecord(path))) if path else 0
            for path, part in ((output_path, kept), (held_out_path, held_out))
        ]
        settings.vocabulary(tokenizer).save(loaded)
    return row_format.report(
        encoded,
        output_path,
        tokenized.notes,
        rows=counts[0],
        held_out=held_out_path,
        held_out_rows=counts[1],
        skipped=tokenized.skipped,
        truncated=tokenized.truncated,
        inputs={path: [len(used), len(usable)] for path, used, usable in zip(inputs, mixed, tokenized.inputs)},
        packed_boundary=boundary and boundary.token,
        statistics=statistics,
    )


def _boundary(examples, tokenizer):
    special = tokenizers.special_ids(tokenizer)
    return find_boundary(examples, special.bos, special.pad)


def _row_maker(row_format, boundary, settings):
    """Returns what makes the columns of rows from some of the examples: one in each row, or packed."""
    if boundary is None:
        return row_format.columns

    def packed(part):
        rows = pack(part, boundary, settings.seq_length, settings.seed)
        return packed_columns(
            rows, row_format.columns(rows), boundary, settings.seq_length if settings.actual_seq_len else None
        )

    return packed


def _statistics(examples, tokenizer, settings):
    """Returns the statistics of the examples and draws their histogram, as the settings ask for them."""
    if not settings.stats:
        return None
    boundary = None
    with contextlib.suppress(DataError):
        boundary = _boundary(examples, tokenizer)
    statistics = length_statistics(examples, settings.seq_length, boundary)
    if isinstance(settings.stats, str):
        with atomic.replace_file(settings.stats) as path:
            histogram.draw_lengths(statistics, path)
    return statistics


def hold_out(encoded: List[Encoded], share: float, seed: int) -> Tuple[List[Encoded], List[Encoded]]:
    """Returns the examples to train on and those held out, both in their first order.

    Raises:
        DataError: There is one example, which cannot be divided.
    """
    if not share:
        return encoded, []
    if len(encoded) < 2:
        raise DataError("holdout needs at least two usable rows, and there is one.")
    count = min(max(round(len(encoded) * share), 1), len(encoded) - 1)
    drawn = set(np.random.default_rng(seed).permutation(len(encoded))[:count].tolist())
    parts: Tuple[List[Encoded], List[Encoded]] = ([], [])
    for number, row in enumerate(encoded):
        parts[number in drawn].append(row)
    return parts
