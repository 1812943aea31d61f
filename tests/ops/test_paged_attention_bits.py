"""A row of paged_attention has the same bits alone, in any batch, from any blocks, in any pieces, on any threads."""

import numpy as np
import pytest

from tests.support.attention_batches import Sequences

# (kv_heads, group, D)
HEADS = [(4, 1, 64), (2, 2, 40), (1, 8, 128), (5, 1, 16), (1, 7, 24)]
LENGTHS = [600, 70, 33]


@pytest.fixture(params=HEADS, ids=str)
def sequences(request):
    return Sequences(LENGTHS, *request.param)


def whole(sequences, which):
    """All rows of one sequence as one prompt, alone."""
    return sequences.run([(which, 0, LENGTHS[which])], 16)


def test_in_a_batch_as_alone(isa, sequences):
    alone = [whole(sequences, which) for which in range(3)]
    y = sequences.run([(2, 0, 33), (0, 0, 600), (1, 0, 70)], 16, seed=1)
    np.testing.assert_array_equal(y, np.concatenate([alone[2], alone[0], alone[1]]))


def test_from_blocks_of_any_size_in_any_order(isa, sequences):
    wanted = whole(sequences, 1)
    for block_size, seed in ((1, 1), (8, 2), (16, 3), (128, 4)):
        np.testing.assert_array_equal(sequences.run([(1, 0, 70)], block_size, seed=seed), wanted)


@pytest.mark.parametrize("pieces", [(1, 2, 20, 37, 70), (64, 65, 70), (5, 69, 70)], ids=str)
def test_in_any_pieces(isa, sequences, pieces):
    wanted, rows = whole(sequences, 1), []
    for first, end in zip((0, *pieces), pieces):
        rows.append(sequences.run([(0, 598, 600), (1, first, end)], 8)[2:])
    np.testing.assert_array_equal(np.concatenate(rows), wanted)


def test_token_by_token_after_a_long_context(isa, sequences):
    wanted = whole(sequences, 0)
    for position in (510, 511, 512, 513, 599):
        row = sequences.run([(0, position, position + 1)], 16)
        np.testing.assert_array_equal(row[0], wanted[position])
        together = sequences.run([(1, 69, 70), (0, position, position + 1), (2, 0, 33)], 16)
        np.testing.assert_array_equal(together[1], wanted[position])


@pytest.mark.parametrize("parts", [[(0, 599, 600)], [(0, 0, 600), (1, 69, 70), (2, 30, 33)]], ids=["decode", "mixed"])
def test_on_any_number_of_threads(isa, threads, sequences, parts):
    outputs = []
    for count in (1, 2, 7):
        threads(count)
        outputs.append(sequences.run(parts, 16))
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])
