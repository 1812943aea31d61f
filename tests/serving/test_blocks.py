"""Blocks of the cache: given, shared, kept, and never shown to those whose text they do not hold."""

import random

import pytest

from mindlora.serving.blocks import BlockPool


def filled(pool, tokens, salt=None):
    """Returns the blocks of a request that computed ``tokens``, the full ones filled."""
    size = pool.block_size
    blocks = pool.allocate(-(-len(tokens) // size))
    for i in range(len(tokens) // size):
        blocks[i] = pool.fill(blocks[i], blocks[i - 1] if i else None, salt, tokens[i * size : (i + 1) * size])
    return blocks


def counts(pool):
    return pool.blocks_free, pool.blocks_cached, pool.num_blocks - pool.blocks_available


def test_blocks_are_given_once_and_come_back():
    pool = BlockPool(4, 2)
    first, second = pool.allocate(3), pool.allocate()
    assert sorted(first + second) == [0, 1, 2, 3]
    assert counts(pool) == (0, 0, 4)
    with pytest.raises(IndexError, match="1 blocks were asked for, and 0 are available"):
        pool.allocate()
    pool.free(first)
    assert counts(pool) == (3, 0, 1) and pool.blocks_available == 3
    assert sorted(pool.allocate(3)) == sorted(first)


def test_a_full_block_stays_and_is_found_by_the_same_beginning():
    pool = BlockPool(8, 2)
    blocks = filled(pool, [1, 2, 3, 4, 5])
    pool.free(blocks)
    assert counts(pool) == (6, 2, 0), "the third block was not full"
    assert pool.find(None, [1, 2, 3, 4, 9]) == blocks[:2]
    assert pool.find(None, [1, 2, 9, 9, 9]) == blocks[:1]
    assert pool.find(None, [3, 4, 5]) == []
    assert pool.find(None, [9, 2, 3, 4, 5]) == []


@pytest.mark.parametrize("length, found", [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 2)])
def test_the_last_token_is_never_found_as_it_must_be_computed(length, found):
    pool = BlockPool(8, 2)
    blocks = filled(pool, [1, 2, 3, 4])
    assert pool.find(None, [1, 2, 3, 4, 5, 6, 7][:length]) == blocks[:found]


@pytest.mark.parametrize("other", [None, ("a", 2), ("b", 1), "a"])
def test_blocks_are_found_with_their_own_salt_alone(other):
    pool = BlockPool(8, 2)
    blocks = filled(pool, [1, 2, 3, 4], salt=("a", 1))
    assert pool.find(other, [1, 2, 3, 4, 5]) == []
    assert pool.find(("a", 1), [1, 2, 3, 4, 5]) == blocks


def test_a_collision_of_hashes_finds_nothing():
    class Colliding(int):
        def __hash__(self):
            return 7

    pool = BlockPool(8, 2)
    filled(pool, [Colliding(1), Colliding(2)])
    assert hash((Colliding(3), Colliding(4))) == hash((Colliding(1), Colliding(2)))
    assert pool.find(None, [Colliding(3), Colliding(4), 5]) == []
    assert len(pool.find(None, [Colliding(1), Colliding(2), 5])) == 1


def test_a_block_that_is_shared_comes_back_when_its_last_user_has_gone():
    pool = BlockPool(4, 2)
    first = filled(pool, [1, 2, 3])
    found = pool.find(None, [1, 2, 9])
    pool.share(found)
    assert found == first[:1] and pool.users(found[0]) == 2 and pool.hits == 1
    pool.free(first)
    assert counts(pool) == (3, 0, 1)
    pool.free(found)
    assert counts(pool) == (3, 1, 0)


def test_the_same_text_computed_twice_is_kept_once():
    pool = BlockPool(4, 2)
    first, second = pool.allocate(), pool.allocate()
    assert pool.fill(first[0], None, None, [1, 2]) == first[0]
    assert pool.fill(second[0], None, None, [1, 2]) == first[0]
    assert pool.users(first[0]) == 2 and counts(pool) == (3, 0, 1)


def test_the_content_that_was_used_least_recently_is_given_up_first_and_the_end_of_a_text_before_its_beginning():
    pool = BlockPool(4, 1)
    old, new = filled(pool, [1, 2]), filled(pool, [7, 8])
    pool.free(old)
    pool.free(new)
    pool.share(pool.find(None, [1, 0]))
    pool.free(old[:1])  # now [1] was used last
    order = []
    while pool.blocks_cached:
        before = [pool.find(None, text) for text in ([1, 2, 0], [7, 8, 0])]
        pool.allocate(1 + pool.blocks_free)
        after = [pool.find(None, text) for text in ([1, 2, 0], [7, 8, 0])]
        order += [set(b) - set(a) for b, a in zip(before, after) if a != b]
    assert order == [{old[1]}, {new[1]}, {new[0]}, {old[0]}]
    assert pool.evictions == 4


def test_free_blocks_are_given_before_any_content_is_given_up():
    pool = BlockPool(4, 2)
    blocks = filled(pool, [1, 2])
    pool.free(blocks)
    pool.allocate(3)
    assert pool.evictions == 0 and pool.find(None, [1, 2, 3]) == blocks


def test_contents_without_users_are_forgotten_and_those_in_use_stay():
    pool = BlockPool(3, 2)
    used, unused = pool.allocate(), pool.allocate()
    pool.fill(used[0], None, "s", [1, 2])
    pool.fill(unused[0], None, "s", [3, 4])
    pool.free(unused)
    pool.forget()
    assert (pool.blocks_free, pool.blocks_cached, pool.evictions) == (2, 0, 0)
    assert pool.find("s", [3, 4, 5]) == [] and pool.find("s", [1, 2, 5]) == used


def test_a_beginning_that_was_given_up_and_computed_again_does_not_lead_to_what_followed_another_text():
    pool = BlockPool(2, 1)
    pool.free(filled(pool, [1, 2]))
    pool.free(filled(pool, [3, 4]))  # in the blocks of [1, 2]
    pool.free(filled(pool, [1]))
    assert len(pool.find(None, [1, 4, 0])) == 1 and len(pool.find(None, [1, 2, 0])) == 1


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_is_what_was_computed(seed):
    """A pool of few blocks against a dictionary of what each block holds, over random texts of few letters."""
    rng, pool, holds, live = random.Random(seed), BlockPool(12, 2), {}, []
    for _ in range(400):
        tokens, salt = [rng.randrange(2) for _ in range(rng.randrange(1, 9))], rng.randrange(2)
        if live and (rng.random() < 0.5 or pool.blocks_available < 5):
            pool.free(live.pop(rng.randrange(len(live))))
            continue
        found = pool.find(salt, tokens)
        pool.share(found)
        for i, block in enumerate(found):
            assert holds[block] == (salt, tokens[: 2 * i + 2])
        blocks = found + pool.allocate(-(-len(tokens) // 2) - len(found))
        for i in range(len(found), len(tokens) // 2):
            holds[blocks[i]] = (salt, tokens[: 2 * i + 2])
            blocks[i] = pool.fill(blocks[i], blocks[i - 1] if i else None, salt, tokens[2 * i : 2 * i + 2])
        live.append(blocks)
        users = [sum(block in blocks for blocks in live) for block in range(12)]
        assert [pool.users(block) for block in range(12)] == users
        assert counts(pool)[2] == sum(count > 0 for count in users)
        assert pool.blocks_free + pool.blocks_cached == pool.blocks_available
    assert pool.hits > 50 and pool.evictions > 50
