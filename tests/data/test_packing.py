"""Packing: no example is split, lost or changed, rows are full, and the file says how it is packed."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore.dataset import MindDataset

from mindlora.core.errors import DataError
from mindlora.data.alpaca import convert_alpaca
from mindlora.data.conversion import Encoded
from mindlora.data.packing import Boundary, best_fit, example_ends, find_boundary, pack, packed_columns
from tests.support.instruction_rows import BOS, CHINESE, ENGLISH, EOS, PAD, as_json

OF_ITS_OWN, PADDING = Boundary(BOS, is_padding=False), Boundary(PAD, is_padding=True)


def encoded(*tokens, prompt=1):
    """An example whose first tokens are the prompt."""
    return Encoded(np.array(tokens, np.int32), np.arange(len(tokens)) >= prompt)


def random_examples(rng, count, longest, first=BOS):
    """Examples of 2 to ``longest`` tokens, with what is learned at random and the first token too in places."""
    lengths = rng.integers(2, longest + 1, count)
    tokens = [np.r_[first, rng.integers(4, 60, length - 2), EOS].astype(np.int32) for length in lengths]
    return [Encoded(row, rng.random(len(row)) < 0.5) for row in tokens]


# Best fit, against first principles


@functools.lru_cache(maxsize=None)
def fewest_bins(sizes, capacity):
    """The fewest bins for sorted sizes, by trying every set of items that can share a bin with the first."""
    if not sizes:
        return 0
    first, rest = sizes[0], sizes[1:]
    found = len(sizes)
    for chosen in range(1 << len(rest)):
        taken = [size for i, size in enumerate(rest) if chosen >> i & 1]
        if first + sum(taken) <= capacity:
            left = tuple(size for i, size in enumerate(rest) if not chosen >> i & 1)
            found = min(found, 1 + fewest_bins(left, capacity))
    return found


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 12).flatmap(lambda top: st.tuples(st.lists(st.integers(1, top), max_size=7), st.just(top))))
def test_best_fit_needs_hardly_more_bins_than_the_fewest(case):
    sizes, capacity = case
    bins = best_fit(sizes, capacity)
    assert sorted(item for found in bins for item in found) == list(range(len(sizes)))
    assert all(0 < sum(sizes[item] for item in found) <= capacity for found in bins)
    assert len(bins) <= 11 / 9 * fewest_bins(tuple(sorted(sizes, reverse=True)), capacity) + 1


def test_an_item_goes_into_the_fullest_bin_with_room():
    # After 6 and 5, bins have room for 4 and 5; the 4 belongs into the first, so that the last 5 finds room.
    assert best_fit([5, 4, 6, 5], 10) == [[2, 1], [0, 3]]
    # The 2 has room in both bins, more in the first; the second is the fuller one.
    assert best_fit([2, 6, 10, 7], 15) == [[2], [3, 1, 0]]


def test_best_fit_against_trying_every_bin(n=400, capacity=64):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, capacity + 1, n).tolist()
    rooms, expected = [], []
    for item in sorted(range(n), key=lambda item: -sizes[item]):
        fitting = [number for number, room in enumerate(rooms) if room >= sizes[item]]
        if not fitting:
            fitting = [len(rooms)]
            rooms.append(capacity)
            expected.append([])
        best = min(fitting, key=lambda number: (rooms[number], number))
        rooms[best] -= sizes[item]
        expected[best].append(item)
    assert best_fit(sizes, capacity) == expected


# The boundary


def test_bos_is_the_boundary_if_it_begins_each_example_and_occurs_nowhere_else():
    examples = [encoded(BOS, 7, 8, EOS), encoded(BOS, 9, EOS)]
    assert find_boundary(examples, BOS, PAD) == OF_ITS_OWN
    assert find_boundary(examples, None, PAD) == PADDING
    assert find_boundary([*examples, encoded(7, 8, EOS)], BOS, PAD) == PADDING
    assert find_boundary([*examples, encoded(BOS, 8, BOS, 9, EOS)], BOS, PAD) == PADDING


def test_padding_that_examples_have_inside_cannot_separate_them():
    # A tokenizer without a pad token pads with eos, which also ends each turn of a chat.
    single, several = encoded(7, 8, EOS), encoded(7, EOS, 8, EOS)
    assert find_boundary([single], None, EOS) == Boundary(EOS, is_padding=True)
    with pytest.raises(DataError, match=rf"padding \(id {EOS}\) would separate them, but 1 of 2 have it inside"):
        find_boundary([single, several], None, EOS)
    # With a boundary of their own they need no padding.
    assert find_boundary([encoded(BOS, 7, EOS, 8, EOS)], BOS, EOS) == OF_ITS_OWN


# Rows


@pytest.mark.parametrize("boundary", [OF_ITS_OWN, PADDING], ids=["bos", "padding"])
@pytest.mark.parametrize("seq_length", [16, 23])
def test_rows_hold_every_example_whole(boundary, seq_length):
    rng = np.random.default_rng(seq_length)
    examples = random_examples(rng, 60, seq_length + 1, first=7 if boundary.is_padding else BOS)
    examples.append(encoded(*([BOS] + [5] * seq_length)))  # as long as a row
    rows = pack(examples, boundary, seq_length, seed=3)
    found = []
    for row in rows:
        assert row.tokens.dtype == np.int32 and len(row.tokens) == len(row.learned) <= seq_length + 1
        starts = np.flatnonzero(row.tokens == boundary.token)
        cuts = np.r_[-1, starts] + 1 if boundary.is_padding else starts
        assert not row.learned[cuts].any() and not row.learned[row.tokens == PAD].any()
        pieces = zip(np.split(row.tokens, cuts[1:]), np.split(row.learned, cuts[1:]))
        found += [(tokens[tokens != PAD].tolist(), learned[tokens != PAD].tolist()) for tokens, learned in pieces]
    # What is learned of an example stays, except for its first token, which nothing predicts.
    expected = [(row.tokens.tolist(), [False, *row.learned[1:].tolist()]) for row in examples]
    assert sorted(found) == sorted(expected)
    tokens = sum(len(row.tokens) for row in examples)
    assert len(rows) < 11 / 9 * (tokens / (seq_length + 1) + 60 / seq_length) + 2


def test_rows_are_in_an_order_drawn_by_seed():
    examples = random_examples(np.random.default_rng(0), 40, 17)
    first, again, other = (pack(examples, OF_ITS_OWN, 16, seed) for seed in (1, 1, 2))
    as_lists = [[row.tokens.tolist() for row in rows] for rows in (first, again, other)]
    assert as_lists[0] == as_lists[1] != as_lists[2]
    assert sorted(as_lists[0]) == sorted(as_lists[2])
    assert [len(row) for row in as_lists[0]] != sorted(map(len, as_lists[0]), reverse=True)


# Columns


def test_columns_say_where_examples_end():
    # MindFormers reads actual_seq_len as cumulative ends, filled up with the length of the sequence.
    bos = [encoded(BOS, 7, EOS, BOS, 8, 9, EOS), encoded(BOS, 7, 7, EOS)]
    padding = [encoded(7, EOS, PAD, 8, 9, EOS), encoded(7, 7, EOS)]
    assert [example_ends(row, OF_ITS_OWN, 8).tolist() for row in bos] == [[3, 8], [8]]
    # The padding belongs to what precedes it, so that no token sees it.
    assert [example_ends(row, PADDING, 8).tolist() for row in padding] == [[3, 8], [8]]
    # The model does not see the last token of a full row.
    assert example_ends(bos[0], OF_ITS_OWN, 6).tolist() == [3, 6]
    columns = [row.columns(8, PAD) for row in bos]
    made = list(packed_columns(bos, columns, OF_ITS_OWN, actual_seq_len=8))
    assert [row["actual_seq_len"].tolist() for row in made] == [[3, 8], [8, 8]]
    assert [row["boundary"].tolist() for row in made] == [[BOS], [BOS]]
    for plain, row in zip(columns, made):
        assert (row["input_ids"] == plain["input_ids"]).all() and (row["labels"] == plain["labels"]).all()
        assert all(column.dtype == np.int32 for column in row.values())
    assert set(next(packed_columns(bos, columns, OF_ITS_OWN))) == {"input_ids", "labels", "boundary"}


# Whole files


def test_a_file_says_that_it_is_packed(tmp_path, tokenizer):
    records = [{"instruction": "i" * number, "input": "", "output": f"answer {number}"} for number in range(1, 31)]
    source = as_json(tmp_path / "in.json", records)
    options = {"template": "plain", "holdout": 0.3, "pack": True, "actual_seq_len": True}
    report = convert_alpaca(source, str(tmp_path / "x.mindrecord"), tokenizer, 64, **options)
    plain = convert_alpaca(source, str(tmp_path / "y.mindrecord"), tokenizer, 64, template="plain", holdout=0.3)
    assert report.rows < plain.rows / 2 and report.held_out_rows < plain.held_out_rows / 2
    assert f"{report.rows} packed rows of 65 tokens" in str(report)
    assert report.packed_boundary == BOS and f"packed_boundary: {BOS}" in str(report)
    assert plain.packed_boundary is None and "pack" not in str(plain)
    assert (report.tokens, report.trained_tokens, report.longest) == (plain.tokens, plain.trained_tokens, plain.longest)
    for packed, single in ((report.output, plain.output), (report.held_out, plain.held_out)):
        rows, examples = read(packed), read(single)
        assert {row["boundary"].tolist() == [BOS] for row in rows} == {True}
        assert {row["actual_seq_len"][-1] for row in rows} == {64}
        # The same examples in the same file, and the same labels that count, but for their order.
        starts = sum((row["input_ids"] == BOS).sum() for row in rows)
        assert starts == len(examples)
        assert counted(rows) == counted(examples)
    assert sum(map(len, map(counted, (read(report.output), read(report.held_out))))) == report.trained_tokens


def read(path):
    """Returns all columns of all rows of a MindRecord."""
    return list(MindDataset(str(path), shuffle=False).create_dict_iterator(num_epochs=1, output_numpy=True))


def counted(rows):
    """Returns the labels that count, sorted."""
    return sorted(np.concatenate([row["labels"][1:][row["labels"][1:] != -100] for row in rows]).tolist())


def test_settings_that_cannot_be_meant(tmp_path, tokenizer):
    source = as_json(tmp_path / "in.json", [ENGLISH, CHINESE])
    with pytest.raises(DataError, match="actual_seq_len says where .* set pack too"):
        convert_alpaca(source, str(tmp_path / "x.mindrecord"), tokenizer, 400, actual_seq_len=True)
    assert not (tmp_path / "x.mindrecord").exists()
