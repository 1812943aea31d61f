"""From the rows of all inputs to tokens: sort out what cannot be used, load or train the tokenizer, encode."""

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from mindlora.data.conversion import Encoded, describe_skipped
from mindlora.data.examples import Examples, UnusableRow
from mindlora.data.progress import progress
from mindlora.data.rows import Row
from mindlora.data.settings import Settings
from mindlora.data.sources import Source
from mindlora.errors import DataError


class Tokenized(NamedTuple):
    """The rows of all inputs as tokens.

    Attributes:
        inputs (list of list of Encoded): For each input, its rows that can be used; there is at least one.
        truncated (list of str): Locations of the rows that were cut.
        skipped (dict): Reason -> locations of the rows left out.
        notes (list of str): What the user should know.
    """

    inputs: List[List[Encoded]]
    truncated: List[str]
    skipped: Dict[str, List[str]]
    notes: List[str]


def tokenize(
    sources: Sequence[Source], examples: Examples, tokenizer: Any, settings: Settings
) -> Tuple[Tokenized, Any]:
    """Returns the tokens and the tokenizer.

    Args:
        sources (sequence of Source): What was read; the records of its rows become what ``examples`` parses.
        examples (Examples): The kind.
        tokenizer (str or tokenizer): A path for load_tokenizer, or a tokenizer that it returned.
        settings (Settings): seq_length, truncate, strict and what is said of the tokenizer count here.

    Raises:
        DataError: No row of an input is usable, or ``strict`` is True and a row is not usable.
        TokenizerError: The tokenizer cannot be loaded, used or trained.
        CheckpointError: The base cannot be read.
    """
    result = Tokenized([], [], {}, [note for source in sources for note in source.notes])
    parsed = [_parse(source.rows, examples, result.skipped) for source in sources]
    _check_usable(sources, parsed, result.skipped, settings.strict)
    texts = (examples.text(row.record) for rows in parsed for row in rows)
    loaded, notes = settings.vocabulary(tokenizer).load(texts, examples.chat_template)
    result.notes.extend(notes)
    examples.prepare(loaded)
    for rows in parsed:
        result.inputs.append(_encode(rows, examples, loaded, settings, result))
    _check_usable(sources, result.inputs, result.skipped, settings.strict)
    result.notes.extend(examples.notes())
    return result, loaded


def _parse(rows, examples, skipped):
    good = []
    for row in rows:
        try:
            good.append(Row(row.location, examples.parse(row.record)))
        except UnusableRow as problem:
            skipped.setdefault(str(problem), []).append(row.location)
    return good


def _check_usable(sources, inputs, skipped, strict):
    problems = "; ".join(describe_skipped(skipped))
    if any(problem.startswith("more than ") for problem in skipped):
        problems += ". Raise seq_length (--seq-length), or let rows be cut (--truncate)."
    for source, good in zip(sources, inputs):
        if not good:
            raise DataError(f"{source.path} has no row that can be used. {problems}")
    if skipped and strict:
        paths = ", ".join(source.path for source in sources)
        raise DataError(f"{paths} has rows that cannot be used, and strict allows none. {problems}")


def _encode(rows, examples, tokenizer, settings, result):
    """Returns the rows as tokens; what was cut or left out is entered into ``result``."""
    encoded, limit = [], settings.seq_length + 1
    for row in progress(rows, "tokenizing"):
        try:
            example = examples.encode(row.record, tokenizer)
            if len(example.tokens) > limit:
                if not settings.truncate:
                    raise UnusableRow(f"more than {limit} tokens")
                example = examples.cut(example, limit)
                result.truncated.append(row.location)
            encoded.append(example)
        except UnusableRow as problem:
            result.skipped.setdefault(str(problem), []).append(row.location)
    return encoded
