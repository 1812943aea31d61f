"""From inputs to MindRecord, for every kind of examples: read, tokenize, mix, hold out, write, report."""

import contextlib
import dataclasses
import itertools
import math
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import DataError
from mindlora.core.fields import IGNORE_TOKEN_ID
from mindlora.data import tokenizers
from mindlora.data.conversion import (
    DataReport,
    Encoded,
    Examples,
    RowFormat,
    UnusableRow,
    all_parts,
    check_seq_length,
    describe_skipped,
    progress,
)
from mindlora.data.mindrecord import check_mindrecord_output, replace_mindrecord, write_rows
from mindlora.data.packing import Boundary, best_fit, find_boundary, pack, packed_columns
from mindlora.data.sources import Row, Source, read_inputs

# Statistics of the examples' lengths and of the padding in rows, and their histogram.


@dataclasses.dataclass(frozen=True)
class LengthStatistics:
    """Statistics of the examples' lengths and of the share of padding in rows.

    Attributes:
        lengths (numpy.ndarray): Tokens of each example, int64 [examples].
        row_length (int): Tokens of a row, seq_length + 1.
        counted (int): Tokens that count in the loss.
        packed_rows (int or None): Rows that the examples fill when they are packed; None if they cannot be.
    """

    lengths: np.ndarray
    row_length: int
    counted: int
    packed_rows: Optional[int]

    @property
    def padding(self) -> float:
        """Share of positions that are padding with one example per row."""
        return 1 - self.lengths.sum() / (len(self.lengths) * self.row_length)

    @property
    def packed_padding(self) -> Optional[float]:
        """Share of positions that are padding when the examples are packed, including padding between examples."""
        return None if self.packed_rows is None else 1 - self.lengths.sum() / (self.packed_rows * self.row_length)

    def __str__(self):
        lengths = self.lengths
        total = lengths.sum()
        lines = [
            f"lengths of {len(lengths)} examples: min {lengths.min()}, median {np.median(lengths):g}, "
            f"mean {lengths.mean():.1f}, 95th percentile {np.percentile(lengths, 95):.0f}, max {lengths.max()} tokens",
            f"counted in the loss: {self.counted} of {total} tokens ({self.counted / total:.1%})",
            f"padding with one example in a row: {self.padding:.1%} of {len(lengths)} rows",
        ]
        if self.packed_rows is None:
            lines.append("padding with packed rows: these examples cannot be packed, and --pack says why")
        else:
            lines.append(f"padding with packed rows: {self.packed_padding:.1%} of {self.packed_rows} rows")
        return "\n".join(lines)


def length_statistics(examples: Sequence[Encoded], seq_length: int, boundary: Optional[Boundary]) -> LengthStatistics:
    """Returns the length statistics of one or more examples; ``boundary`` is None if they cannot be packed."""
    lengths = np.array([len(row.tokens) for row in examples])
    packed_rows = None
    if boundary is not None:
        packed_rows = len(best_fit([boundary.size(length) for length in lengths], boundary.capacity(seq_length)))
    # No position predicts the first token of an example.
    counted = sum(int(row.learned[1:].sum()) for row in examples)
    return LengthStatistics(lengths, seq_length + 1, counted, packed_rows)


def check_histogram(path: str) -> None:
    """Raises DataError unless ``path`` names a PNG file and matplotlib, which draws it, is installed."""
    if not path.endswith(".png"):
        raise DataError(f"The histogram {path} must end in .png.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DataError(
            "A histogram needs matplotlib, which is not installed: pip install 'mindlora[plot]', or give --stats "
            "without a file."
        ) from error


def draw_lengths(statistics: LengthStatistics, path: str) -> None:
    """Draws, as a PNG, a histogram of the examples' lengths and the contents of the rows before and after packing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=110, width_ratios=(2, 1))
    _draw_histogram(left, statistics)
    _draw_shares(right, statistics)
    figure.tight_layout()
    figure.savefig(path, format="png")
    pyplot.close(figure)


def _draw_histogram(axes, statistics):
    lengths = statistics.lengths
    # Each bin covers a whole number of tokens; there are as many as are easy to distinguish.
    width = max(1, -(-int(lengths.max() - lengths.min() + 1) // 60))
    axes.hist(lengths, np.arange(lengths.min(), lengths.max() + width + 1, width) - 0.5, color="tab:blue", alpha=0.8)
    for name, value, style in (
        ("median", np.median(lengths), "-"),
        ("95th percentile", np.percentile(lengths, 95), "--"),
        ("a row", statistics.row_length, ":"),
    ):
        axes.axvline(value, color="black", linestyle=style, linewidth=1, label=f"{name}: {value:.0f}")
    axes.set_xlabel("tokens of an example")
    axes.set_ylabel("examples")
    axes.set_title(f"{len(lengths)} examples")
    axes.legend()


def _draw_shares(axes, statistics):
    shares = {"one example\nin a row": statistics.padding}
    if statistics.packed_padding is not None:
        shares["packed"] = statistics.packed_padding
    names = [f"{name}:\n{share:.1%} padding" for name, share in shares.items()]
    padding = np.array(list(shares.values()))
    axes.bar(names, 1 - padding, color="tab:blue", alpha=0.8)
    axes.bar(names, padding, bottom=1 - padding, color="lightgray")
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, 1)
    axes.set_title("share of the rows (gray: padding)")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a conversion of examples, whatever their kind.

    Attributes:
        seq_length (int): seq_length of the model; an example has at most one token more.
        columns (sequence of dict): Field -> its column in the input; one for all inputs, or one for each. None: the
            columns have the names of the fields.
        split (str, optional): The split to read of a dataset that Hugging Face's datasets saved.
        weights (sequence of float, optional): One weight for each input (see drawn_counts). None: all rows of all
            inputs.
        holdout (float): Share of the usable examples to write to X-heldout.mindrecord instead, drawn by ``seed``.
        seed (int): The draws depend only on the seed and the number of examples. It also orders packed rows.
        truncate (bool): Cut examples that are too long (see Examples.cut) instead of skipping them.
        strict (bool): Fail if any row cannot be used.
        train_vocab_size (int, optional): Train a tokenizer of this size on the usable rows (see train_tokenizer) and
            save it at ``tokenizer``, which must then be a path.
        train_texts (sequence of str): Files of plain text to train the tokenizer on, in addition to the rows.
        base (str, optional): The base that is trained on the rows, to compare vocabularies (see Vocabulary).
        ignore_token_id (int): ignore_token_id of the model.
        pack (bool): Put many examples into a row (see mindlora.data.packing).
        actual_seq_len (bool): Add the column actual_seq_len to packed rows, for flash attention on Ascend.
        stats (bool or str): Report on the lengths of the examples; a path also draws their histogram, as a PNG.
        overwrite (bool): Replace what exists at the output paths.
    """

    seq_length: int
    columns: Sequence[Mapping[str, str]] = ()
    split: Optional[str] = None
    weights: Optional[Sequence[float]] = None
    holdout: float = 0.0
    seed: int = 0
    truncate: bool = False
    strict: bool = False
    train_vocab_size: Optional[int] = None
    train_texts: Sequence[str] = ()
    base: Optional[str] = None
    ignore_token_id: int = IGNORE_TOKEN_ID
    pack: bool = False
    actual_seq_len: bool = False
    stats: Union[bool, str] = False
    overwrite: bool = False

    def vocabulary(self, tokenizer: Any) -> tokenizers.Vocabulary:
        """Returns the Vocabulary that these settings describe, for a tokenizer."""
        return tokenizers.Vocabulary(tokenizer, self.train_vocab_size, self.train_texts, self.base)


def _check_arguments(output_path: str, tokenizer: Any, settings: Settings) -> None:
    """Raises DataError or TokenizerError if a setting is wrong or an output path cannot be written."""
    check_seq_length(settings.seq_length)
    if not 0 <= settings.holdout < 1:
        raise DataError(f"holdout is {settings.holdout}: it must be a share of the rows, at least 0 and below 1.")
    if not isinstance(settings.seed, int) or settings.seed < 0:
        raise DataError(f"seed is {settings.seed!r}: it must be a whole number of at least 0.")
    if settings.actual_seq_len and not settings.pack:
        raise DataError("actual_seq_len says where the examples of a packed row end: set pack too (--pack).")
    if isinstance(settings.stats, str):
        check_histogram(settings.stats)
    check_mindrecord_output(output_path, settings.overwrite)
    if settings.holdout:
        check_mindrecord_output(held_out_name(output_path), settings.overwrite)
    settings.vocabulary(tokenizer).check(settings.overwrite)


def held_out_name(output_path: str) -> str:
    """Returns the path of the held-out examples."""
    return output_path[: -len(".mindrecord")] + "-heldout.mindrecord"


def convert_examples(
    examples: Examples,
    inputs: Union[str, Sequence[str]],
    output_path: str,
    tokenizer: Any,
    settings: Settings,
    pack_rows: Callable[..., List[Encoded]] = pack,
) -> DataReport:
    """Checks everything, then writes the MindRecord of one kind of examples (see convert_alpaca).

    ``pack_rows`` puts many examples into a row, as mindlora.data.packing.pack does.
    """
    _check_arguments(output_path, tokenizer, settings)
    inputs = [inputs] if isinstance(inputs, str) else list(inputs)
    _check_weights(settings.weights, len(inputs))
    sources = read_inputs(inputs, examples.layout, settings.columns, settings.split)
    tokenized, loaded = _tokenize(sources, examples, tokenizer, settings)
    mixed = mix(tokenized.inputs, settings.weights, settings.seed)
    encoded = list(itertools.chain(*mixed))
    with _naming(tokenized.skipped):
        boundary = _boundary(encoded, loaded) if settings.pack else None
        kept, held_out = _hold_out(encoded, settings.holdout, settings.seed)
    row_format = RowFormat(loaded, settings.seq_length, settings.ignore_token_id)
    columns = _row_maker(row_format, boundary, settings, pack_rows)
    statistics = _statistics(encoded, loaded, settings)
    held_out_path = held_out_name(output_path) if held_out else None
    parts = {output_path: kept}
    if held_out_path:
        parts[held_out_path] = held_out
    # The context entered first moves its file into place last: the output exists only when everything else does.
    with contextlib.ExitStack() as outputs:
        counts = {}
        for path, part in parts.items():
            counts[path] = write_rows(columns(part), outputs.enter_context(replace_mindrecord(path)))
        settings.vocabulary(tokenizer).save(loaded)
    return row_format.report(
        encoded,
        output_path,
        counts[output_path],
        tokenized.notes,
        held_out=held_out_path,
        held_out_rows=counts[held_out_path] if held_out_path else 0,
        skipped=tokenized.skipped,
        truncated=tokenized.truncated,
        cut_at=examples.cut_at,
        inputs={path: [len(used), len(usable)] for path, used, usable in zip(inputs, mixed, tokenized.inputs)},
        packed_boundary=boundary and boundary.token,
        statistics=statistics,
    )


class _Tokenized(NamedTuple):
    """The tokens of all rows, by input; the locations of rows that were cut or skipped; and notes for the user."""

    inputs: List[List[Encoded]]
    truncated: List[str]
    skipped: Dict[str, List[str]]
    notes: List[str]


def _tokenize(sources: Sequence[Source], examples: Examples, tokenizer: Any, settings: Settings):
    """Returns the tokens of the usable rows, and the tokenizer."""
    result = _Tokenized([], [], {}, [])
    for source in sources:
        result.notes.extend(source.notes)
    parsed = [_parse(source.rows, examples, result.skipped) for source in sources]
    _check_usable(sources, parsed, result.skipped, settings.strict)
    texts = (examples.text(row.record) for row in itertools.chain(*parsed))
    loaded, notes = settings.vocabulary(tokenizer).load(texts, examples.chat_template)
    result.notes.extend(notes)
    examples.prepare(loaded)
    for rows in parsed:
        result.inputs.append(_encode(rows, examples, loaded, settings, result))
    _check_usable(sources, result.inputs, result.skipped, settings.strict)
    result.notes.extend(examples.notes())
    return result, loaded


def _parse(rows, examples, skipped):
    usable = []
    for row in rows:
        try:
            usable.append(Row(row.location, examples.parse(row.record)))
        except UnusableRow as problem:
            skipped.setdefault(str(problem), []).append(row.location)
    return usable


def _check_usable(sources, inputs, skipped, strict):
    problems = "; ".join(describe_skipped(skipped))
    advice = "Correct these rows."
    if any(problem.startswith("more than ") for problem in skipped):
        advice = "Raise seq_length (--seq-length), or let rows be cut (--truncate)."
    for source, usable in zip(sources, inputs):
        if not usable:
            raise DataError(f"{source.path} has no row that can be used. {problems}. {advice}")
    if skipped and strict:
        paths = ", ".join(source.path for source in sources)
        raise DataError(f"{paths} has rows that cannot be used, and strict allows none. {problems}. {advice}")


def _encode(rows, examples, tokenizer, settings, result):
    """Returns the rows as tokens, and records rows that were cut or skipped in ``result``."""
    encoded = []
    limit = settings.seq_length + 1
    for row in progress(rows, "tokenizing"):
        try:
            example = examples.encode(row.record, tokenizer)
            if examples.length(example) > limit:
                if not settings.truncate:
                    raise UnusableRow(f"more than {limit} tokens")
                example = examples.cut(example, limit)
                result.truncated.append(row.location)
            encoded.append(example)
        except UnusableRow as problem:
            result.skipped.setdefault(str(problem), []).append(row.location)
    with _naming(result.skipped):
        return examples.complete(encoded)


@contextlib.contextmanager
def _naming(skipped: Dict[str, List[str]]) -> Iterator[None]:
    """Adds the unusable rows to an error about the others, since the error may not occur with them."""
    try:
        yield
    except DataError as error:
        if not skipped:
            raise
        raise DataError(
            f"{error} Correct also the rows that cannot be used: {'; '.join(describe_skipped(skipped))}."
        ) from error


def _check_weights(weights: Union[Sequence[float], None], inputs: int) -> None:
    """Raises DataError unless there are no weights, or one above 0 for each input."""
    if weights is None:
        return
    if len(weights) != inputs:
        raise DataError(f"{inputs} inputs have {len(weights)} weights: give each input one weight.")
    wrong = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if wrong:
        raise DataError(f"A weight of an input is {wrong[0]}: it must be a number above 0, such as 0.7.")


def drawn_counts(sizes: Sequence[int], weights: Sequence[float]) -> List[int]:
    """Returns how many examples each input contributes, in proportion to the weights and as many as possible.

    With w_i = weight_i / (sum of weights), input i contributes w_i N examples, rounded but at least 1, for the largest
    N at which no input needs more examples than it has: N = min_i(size_i / w_i). So one input is used completely, the
    others in part, and no example is repeated.
    """
    least = min(size / weight for size, weight in zip(sizes, weights))
    return [min(max(round(least * weight), 1), size) for size, weight in zip(sizes, weights)]


def mix(inputs: Sequence[List[Encoded]], weights: Union[Sequence[float], None], seed: int) -> List[List[Encoded]]:
    """Returns the drawn examples of each input in their original order; without weights, all of them."""
    if weights is None:
        return list(inputs)
    counts = drawn_counts([len(examples) for examples in inputs], weights)
    mixed = []
    for number, (examples, count) in enumerate(zip(inputs, counts), 1):
        drawn = sorted(_drawn(len(examples), count, (seed, number)))
        mixed.append([examples[index] for index in drawn])
    return mixed


def _boundary(examples, tokenizer):
    special = tokenizers.special_ids(tokenizer)
    return find_boundary(all_parts(examples), special.bos, special.pad)


def _row_maker(row_format, boundary, settings, pack_rows):
    """Returns a function that makes the columns of rows from examples: one example per row, or packed."""
    if boundary is None:
        return row_format.columns

    def packed(part):
        rows = pack_rows(part, boundary, settings.seq_length, settings.seed)
        return packed_columns(
            rows, row_format.columns(rows), boundary, settings.seq_length if settings.actual_seq_len else None
        )

    return packed


def _statistics(examples, tokenizer, settings):
    """Returns the examples' length statistics and draws their histogram, if the settings request them."""
    if not settings.stats:
        return None
    boundary = None
    with contextlib.suppress(DataError):
        boundary = _boundary(examples, tokenizer)
    statistics = length_statistics(all_parts(examples), settings.seq_length, boundary)
    if isinstance(settings.stats, str):
        with atomic.replace_file(settings.stats) as path:
            draw_lengths(statistics, path)
    return statistics


def _hold_out(encoded: List[Encoded], share: float, seed: int) -> Tuple[List[Encoded], List[Encoded]]:
    """Returns the training examples and the held-out examples, both in their original order."""
    if not share:
        return encoded, []
    if len(encoded) < 2:
        raise DataError("holdout needs at least two usable rows, but there is one.")
    count = min(max(round(len(encoded) * share), 1), len(encoded) - 1)
    drawn = _drawn(len(encoded), count, seed)
    kept = [example for number, example in enumerate(encoded) if number not in drawn]
    return kept, [example for number, example in enumerate(encoded) if number in drawn]


def _drawn(size, count, seed):
    """Returns the indices of ``count`` of ``size`` examples, drawn without repetition."""
    return set(np.random.default_rng(seed).permutation(size)[:count].tolist())
