"""The way from rows to MindRecord that every kind of examples takes: check, tokenize, hold out, write, report."""

import abc
import contextlib
import dataclasses
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from mindlora.common import atomic
from mindlora.data import histogram, tokenizers
from mindlora.data.conversion import IGNORE_TOKEN_ID, DataReport, Encoded, RowFormat, check_seq_length, describe_skipped
from mindlora.data.instruction_rows import Row
from mindlora.data.mindrecord import check_mindrecord_output, replace_mindrecord, write_rows
from mindlora.data.packing import find_boundary, pack, packed_columns
from mindlora.data.progress import progress
from mindlora.data.statistics import length_statistics
from mindlora.errors import DataError


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a conversion of examples is told, whatever their kind.

    Attributes:
        seq_length (int): seq_length of the model; an example has at most one token more.
        holdout (float): Share of the usable examples to write to X-heldout.mindrecord instead, drawn by ``seed``.
        seed (int): What is drawn depends on it and on the number of examples alone. It also orders packed rows.
        truncate (bool): Cut what is too long (see Examples.cut) instead of skipping it.
        strict (bool): Fail if any row cannot be used.
        train_vocab_size (int, optional): Train a tokenizer of this size on the usable rows (see train_tokenizer) and
            save it at ``tokenizer``, which must then be a path.
        ignore_token_id (int): ignore_token_id of the model.
        pack (bool): Put many examples into a row (see mindlora.data.packing).
        actual_seq_len (bool): Add the column actual_seq_len to packed rows, for flash attention on Ascend.
        stats (bool or str): Report on the lengths of the examples; a path also draws their histogram, as a PNG.
        overwrite (bool): Replace what exists at the output paths.
    """

    seq_length: int
    holdout: float = 0.0
    seed: int = 0
    truncate: bool = False
    strict: bool = False
    train_vocab_size: Optional[int] = None
    ignore_token_id: int = IGNORE_TOKEN_ID
    pack: bool = False
    actual_seq_len: bool = False
    stats: Union[bool, str] = False
    overwrite: bool = False

    def check(self) -> None:
        """Raises DataError if a value cannot be meant."""
        check_seq_length(self.seq_length)
        if not 0 <= self.holdout < 1:
            raise DataError(f"holdout is {self.holdout}: it must be a share of the rows, at least 0 and below 1.")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise DataError(f"seed is {self.seed!r}: it must be a whole number of at least 0.")
        if self.actual_seq_len and not self.pack:
            raise DataError("actual_seq_len is set and pack is not: it says where the examples of a packed row end.")
        if isinstance(self.stats, str):
            histogram.check_output(self.stats)


class Examples(abc.ABC):
    """A kind of examples: what makes tokens of a row."""

    @abc.abstractmethod
    def problem(self, record: Any) -> Optional[str]:
        """Returns why a record cannot be used, in words that group rows with the same problem, or None if it can."""

    @abc.abstractmethod
    def text(self, record: Any) -> str:
        """Returns what a tokenizer is trained on."""

    def prepare(self, tokenizer: Any) -> None:  # noqa: B027 (most kinds have nothing to prepare)
        """Takes the tokenizer that ``encode`` will use; raises TokenizerError if it cannot."""

    @abc.abstractmethod
    def encode(self, record: Any, tokenizer: Any) -> Encoded:
        """Returns the tokens of a record without a problem; raises UnusableRow if they show one."""

    @abc.abstractmethod
    def cut(self, encoded: Encoded, limit: int) -> Encoded:
        """Returns the first ``limit`` tokens at most; raises UnusableRow if nothing to learn would remain."""


class UnusableRow(Exception):
    """Why a row cannot be used, in words that group rows with the same problem."""


class Tokenized(NamedTuple):
    """Rows as tokens.

    Attributes:
        encoded (list of Encoded): One for each row that can be used.
        truncated (list of str): Locations of the rows that were cut.
        skipped (dict): Reason -> locations of the rows left out.
    """

    encoded: List[Encoded]
    truncated: List[str]
    skipped: Dict[str, List[str]]


def convert_examples(
    examples: Examples, rows: Iterable[Row], source: str, output_path: str, tokenizer: Any, settings: Settings
) -> DataReport:
    """Writes the MindRecord of one kind of examples. Everything is checked before the first byte is written.

    Args:
        examples (Examples): The kind.
        rows (iterable of Row): What was read.
        source (str): Where it was read, for messages.
        output_path (str): Must end in .mindrecord; an index is written beside it, as NAME.mindrecord.db.
        tokenizer (str or tokenizer): A path for load_tokenizer, or a tokenizer that it returned.
        settings (Settings): The rest.

    Returns:
        DataReport.

    Raises:
        DataError: No row is usable, or ``strict`` is True and a row is not usable.
        TokenizerError: The tokenizer cannot be loaded, used or trained.
    """
    good, skipped = _sort_rows(rows, examples)
    _check_usable(source, good, skipped, settings.strict)
    loaded, notes = _load_or_train(tokenizer, good, examples, settings.train_vocab_size)
    examples.prepare(loaded)
    tokenized = _tokenize(good, examples, loaded, settings)
    skipped.update(tokenized.skipped)
    _check_usable(source, tokenized.encoded, skipped, settings.strict)
    row_format = RowFormat(loaded, settings.seq_length, settings.ignore_token_id)
    columns = _row_maker(tokenized.encoded, row_format, settings)
    statistics = _statistics(tokenized.encoded, loaded, settings)
    kept, held_out = hold_out(tokenized.encoded, settings.holdout, settings.seed)
    held_out_path = held_out_name(output_path) if held_out else None
    # What is entered first is moved into place last: the output exists only when everything else does.
    with contextlib.ExitStack() as outputs:
        counts = [
            write_rows(columns(part), outputs.enter_context(replace_mindrecord(path))) if path else 0
            for path, part in ((output_path, kept), (held_out_path, held_out))
        ]
        if settings.train_vocab_size is not None:
            tokenizers.save_tokenizer(loaded, tokenizer)
    return row_format.report(
        tokenized.encoded,
        output_path,
        notes,
        rows=counts[0],
        held_out=held_out_path,
        held_out_rows=counts[1],
        skipped=skipped,
        truncated=tokenized.truncated,
        packed=settings.pack,
        statistics=statistics,
    )


def _row_maker(examples, row_format, settings):
    """Returns what makes the columns of rows from some of the examples: one in each row, or packed."""
    if not settings.pack:
        return row_format.columns
    special = tokenizers.special_ids(row_format.tokenizer)
    boundary = find_boundary(examples, special.bos, special.pad)

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
    special, boundary = tokenizers.special_ids(tokenizer), None
    with contextlib.suppress(DataError):
        boundary = find_boundary(examples, special.bos, special.pad)
    statistics = length_statistics(examples, settings.seq_length, boundary)
    if isinstance(settings.stats, str):
        with atomic.replace_file(settings.stats) as path:
            histogram.draw_lengths(statistics, path)
    return statistics


def check_arguments(output_path: str, tokenizer: Any, settings: Settings) -> None:
    """Raises DataError or TokenizerError if a setting is wrong or something must not be written where it should be."""
    settings.check()
    for path in [output_path] + ([held_out_name(output_path)] if settings.holdout else []):
        check_mindrecord_output(path, settings.overwrite)
    if settings.train_vocab_size is not None:
        if not isinstance(tokenizer, str):
            raise DataError(
                "train_vocab_size asks for a new tokenizer: give the path to save it at, not a loaded tokenizer."
            )
        tokenizers.check_tokenizer_output(tokenizer, settings.overwrite)


def held_out_name(output_path: str) -> str:
    """Returns where the examples that are held out go."""
    return output_path[: -len(".mindrecord")] + "-heldout.mindrecord"


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


def _sort_rows(rows, examples):
    """Returns the usable rows, and {problem: locations} of the others."""
    good, skipped = [], {}
    for row in rows:
        problem = examples.problem(row.record)
        if problem:
            skipped.setdefault(problem, []).append(row.location)
        else:
            good.append(row)
    return good, skipped


def _check_usable(source, good, skipped, strict):
    problems = "; ".join(describe_skipped(skipped))
    if not good:
        raise DataError(f"{source} has no row that can be used. {problems}")
    if skipped and strict:
        raise DataError(f"{source} has rows that cannot be used, and strict allows none. {problems}")


def _load_or_train(tokenizer, rows, examples, vocab_size):
    """Returns the tokenizer, trained on ``rows`` if there is a vocab_size, and notes on it for the report."""
    if vocab_size is None:
        return tokenizers.load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer, []
    trained = tokenizers.fit_tokenizer((examples.text(row.record) for row in rows), vocab_size)
    notes = [f"{tokenizer}: a tokenizer of {len(trained)} tokens, trained on these rows"]
    if len(trained) < vocab_size:
        notes.append(f"it is smaller than the {vocab_size} tokens asked for, because no other pair occurs twice")
    return trained, notes


def _tokenize(rows, examples, tokenizer, settings):
    result = Tokenized([], [], {})
    limit = settings.seq_length + 1
    for row in progress(rows, "tokenizing"):
        try:
            encoded = examples.encode(row.record, tokenizer)
            if len(encoded.tokens) > limit:
                if not settings.truncate:
                    raise UnusableRow(f"more than {limit} tokens")
                encoded = examples.cut(encoded, limit)
                result.truncated.append(row.location)
            result.encoded.append(encoded)
        except UnusableRow as problem:
            result.skipped.setdefault(str(problem), []).append(row.location)
    return result
