"""Packing of many complete examples into a row; the model must keep them apart (mindlora.training.step.packing).

An example begins at each boundary token. Every row of a packed MindRecord names that token in the column ``boundary``,
int32 [1], so that a run can detect packed data; MindFormers reads only the columns in input_columns.
"""

import bisect
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np

from mindlora.core.errors import DataError
from mindlora.data.conversion import Encoded


class Boundary(NamedTuple):
    """The token at which an example of a packed row begins.

    With ``is_padding``, it is a padding token put before each example except the first of a row. Otherwise, every
    example, including the first, begins with it already.
    """

    token: int
    is_padding: bool

    def size(self, length: int) -> int:
        """Returns the tokens that an example of ``length`` tokens takes up in a row of ``capacity``."""
        return length + self.is_padding

    def capacity(self, seq_length: int) -> int:
        """Returns the sum of sizes that fits in seq_length + 1 tokens; the first example needs no padding before it."""
        return seq_length + 1 + self.is_padding


def find_boundary(examples: Sequence[Encoded], bos: Optional[int], pad: int) -> Boundary:
    """Returns bos if every example begins with it and has it nowhere else, otherwise padding.

    Raises DataError if an example has padding before its last token, since padding could then not mark a boundary.
    ``examples`` are all examples to be packed, in all files.
    """
    if bos is not None and all(row.tokens[0] == bos and not (row.tokens[1:] == bos).any() for row in examples):
        return Boundary(bos, is_padding=False)
    # As the last token, padding does no harm: it marks the boundary one token early, and nothing after it is learned.
    padded = sum((row.tokens[:-1] == pad).any() for row in examples)
    if padded:
        raise DataError(
            f"The examples cannot be packed: padding (id {pad}) would separate them, but {padded} of {len(examples)} "
            "have it inside. Give the tokenizer a padding token of its own (pad_token in its tokenizer_config.json), "
            "or convert without --pack."
        )
    return Boundary(pad, is_padding=True)


def best_fit(sizes: Sequence[int], capacity: int) -> List[List[int]]:
    """Packs items into few bins by best-fit decreasing: at most 11/9 of the fewest possible bins, plus 1.

    From the largest item to the smallest, each goes into the fullest bin that still has room for it (Johnson et al.,
    1974). Returns the positions in ``sizes``, each at most ``capacity``, of the items in each bin.
    """
    bins: List[List[int]] = []
    free: List[tuple] = []  # (room, bin) of each bin that is not full, sorted
    for item in np.argsort(-np.asarray(sizes), kind="stable").tolist():
        fullest = bisect.bisect_left(free, (sizes[item],))
        if fullest == len(free):
            free.append((capacity, len(bins)))
            bins.append([])
        room, number = free.pop(fullest)
        bins[number].append(item)
        if room > sizes[item]:
            bisect.insort(free, (room - sizes[item], number))
    return bins


def pack(examples: Sequence[Encoded], boundary: Boundary, seq_length: int, seed: int = 0) -> List[Encoded]:
    """Returns rows of at most seq_length + 1 tokens that hold all examples, none split, in an order drawn by ``seed``.

    The first token of an example is not learned, because the token before it belongs to another example.
    """
    sizes = [boundary.size(len(row.tokens)) for row in examples]
    rows = best_fit(sizes, boundary.capacity(seq_length))
    order = np.random.default_rng(seed).permutation(len(rows))
    packed = []
    for number in order:
        packed.append(join([examples[item] for item in rows[number]], boundary))
    return packed


def join(examples: Sequence[Encoded], boundary: Boundary) -> Encoded:
    """Joins examples into one row."""
    gap = np.full(int(boundary.is_padding), boundary.token, np.int32)
    tokens = []
    learned = []
    for number, row in enumerate(examples):
        before = gap if number else gap[:0]
        tokens += [before, row.tokens]
        learned += [np.zeros(len(before) + 1, bool), row.learned[1:]]
    return Encoded(np.concatenate(tokens), np.concatenate(learned))


def example_ends(row: Encoded, boundary: Boundary, seq_length: int) -> np.ndarray:
    """Returns the ends of a packed row's examples among the seq_length tokens that the model sees: int32 [examples].

    The ends increase. Padding counts as part of the preceding example, so the last end is seq_length. MindFormers calls
    these ends actual_seq_len.
    """
    starts = np.flatnonzero(row.tokens == boundary.token)
    ends = starts + 1 if boundary.is_padding else starts[1:]
    return np.append(ends[ends < seq_length], seq_length).astype(np.int32)


def packed_columns(
    rows: Sequence[Encoded],
    columns: Iterable[Dict[str, np.ndarray]],
    boundary: Boundary,
    actual_seq_len: Optional[int] = None,
) -> Iterator[Dict[str, np.ndarray]]:
    """Yields the columns of packed rows, including those that describe the packing.

    The column ``boundary``, int32 [1], is the boundary's token. If ``actual_seq_len``, the model's seq_length, is
    given, a column of that name holds the ends of the examples (see example_ends), filled up with seq_length to one
    length in all rows.
    """
    ends = [] if actual_seq_len is None else [example_ends(row, boundary, actual_seq_len) for row in rows]
    longest = max(map(len, ends), default=0)
    for number, row in enumerate(columns):
        row = {**row, "boundary": np.array([boundary.token], np.int32)}
        if actual_seq_len is not None:
            filling = (0, longest - len(ends[number]))
            row["actual_seq_len"] = np.pad(ends[number], filling, constant_values=actual_seq_len)
        yield row
