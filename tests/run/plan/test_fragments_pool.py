"""MindSpore's memory pool, simulated: which hole a tensor gets, how large blocks are, and what they have held."""

import random

import pytest

from mindlora.run.plan.fragments import MemoryPool
from mindlora.run.plan.units import GIB

MIB = 2**20


@pytest.mark.parametrize("size, block", [(MIB, 2), (2 * GIB, 2), (2 * GIB + 1, 4), (5 * GIB, 8)])
def test_a_block_is_two_gib_doubled_until_the_tensor_fits(size, block):
    pool = MemoryPool()
    first = pool.take(size)
    rest = pool.take(block * GIB - first.size) if first.size < block * GIB else first
    assert rest.block == first.block == 0 and pool.take(512).block == 1


def test_a_tensor_gets_the_smallest_hole_that_it_fits_into():
    pool = MemoryPool()
    pieces = [pool.take(size * MIB) for size in (300, 1, 100, 1, 200, 1)]
    for number in (0, 2, 4):
        pool.give_back(pieces[number])
    assert pool.take(150 * MIB).begin == pieces[4].begin
    assert pool.take(60 * MIB).begin == pieces[2].begin


def test_of_equal_holes_the_one_in_the_newest_block_is_taken():
    pool = MemoryPool()
    pieces = [pool.take(2 * GIB) for _ in range(3)]
    for piece in pieces:
        pool.give_back(piece)
    assert [pool.take(2 * GIB).block for _ in range(3)] == [2, 1, 0]


def test_holes_beside_each_other_become_one():
    pool = MemoryPool()
    pieces = [pool.take(512 * MIB) for _ in range(4)]
    for number in (0, 2, 1):
        pool.give_back(pieces[number])
    joined = pool.take(1536 * MIB)
    assert (joined.block, joined.begin) == (0, 0)


def test_the_actual_peak_is_how_far_blocks_were_reached_and_the_used_peak_what_was_held_at_a_time():
    pool = MemoryPool()
    pool.give_back(pool.take(GIB))
    # No hole of the first block holds it.
    pool.give_back(pool.take(3 * GIB))
    assert (pool.used, pool.used_peak, pool.actual_peak) == (0, 3 * GIB, 4 * GIB)


def test_parameters_have_a_block_of_one_gib_in_which_nothing_else_lies():
    pool = MemoryPool()
    pool.keep(GIB // 2)
    assert (pool.take(MIB).block, pool.take(MIB).begin) == (0, MIB)
    # The first does not fit beside the other parameter, the second does.
    pool.keep(GIB)
    pool.keep(GIB // 2)
    assert pool.take(GIB - 2 * MIB).block == 0 and pool.take(512).block == 1
    assert (pool.used, pool.actual_peak) == (3 * GIB + 512, 3 * GIB + 512)


def test_sizes_are_multiples_of_512_bytes():
    pool = MemoryPool()
    assert pool.take(1).size == 512 and pool.take(513).begin == 512


def test_pieces_never_overlap_and_nothing_is_lost():
    numbers = random.Random(0)
    pool = MemoryPool()
    held = []
    for _ in range(2000):
        if held and numbers.random() < 0.5:
            pool.give_back(held.pop(numbers.randrange(len(held))))
        else:
            held.append(pool.take(numbers.randrange(1, 900 * MIB)))
        assert pool.used == sum(piece.size for piece in held) <= pool.used_peak <= pool.actual_peak
        taken = sorted(held)
        for first, second in zip(taken, taken[1:]):
            assert first.block < second.block or first.begin + first.size <= second.begin
    for piece in held:
        pool.give_back(piece)
    before = pool.actual_peak
    # All holes are joined again: each block gives its whole.
    blocks = {pool.take(2 * GIB).block for _ in range(3)}
    assert len(blocks) == 3 and pool.actual_peak >= before
