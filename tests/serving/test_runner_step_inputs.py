"""The arrays of a step, against a loop over its tokens."""

import dataclasses
import random

import numpy as np
import pytest

from mindlora.serving.request import Lease, Part
from mindlora.serving.runner import step_inputs
from tests.support.served_requests import request


def part(tokens, start, count, blocks, slot=None):
    one = request(tokens)
    one.blocks = blocks
    one.lease = None if slot is None else Lease("a", slot, 1)
    return Part(one, start, count)


def by_loop(parts, size, width):
    """The same arrays, one token at a time."""
    names = ("tokens", "positions", "slots", "slot_mapping", "last", "context_lengths", "query_lengths")
    arrays = {name: [] for name in names}
    for one in parts:
        for position in range(one.start, one.start + one.count):
            arrays["tokens"].append(one.request.tokens[position])
            arrays["positions"].append(position)
            arrays["slots"].append(one.request.lease.slot if one.request.lease else -1)
            arrays["slot_mapping"].append(one.request.blocks[position // size] * size + position % size)
        arrays["context_lengths"].append(one.start + one.count)
        arrays["query_lengths"].append(one.count)
        if one.start + one.count == len(one.request.tokens):
            arrays["last"].append(len(arrays["tokens"]) - 1)
    arrays["block_tables"] = [one.request.blocks + [-1] * (width - len(one.request.blocks)) for one in parts]
    return arrays


def test_a_chunk_beside_a_next_token():
    inputs = step_inputs([part([5, 6, 7], 2, 1, [4, 1], slot=3), part([1, 2, 3, 4, 5, 6], 2, 3, [0, 2, 3])], 2, 4)
    assert inputs.tokens.tolist() == [7, 3, 4, 5]
    assert inputs.positions.tolist() == [2, 2, 3, 4]
    assert inputs.slots.tolist() == [3, -1, -1, -1]
    assert inputs.context_lengths.tolist() == [3, 5]
    assert inputs.query_lengths.tolist() == [1, 3]
    assert inputs.block_tables.tolist() == [[4, 1, -1, -1], [0, 2, 3, -1]]
    assert inputs.slot_mapping.tolist() == [2, 4, 5, 6]
    assert inputs.last.tolist() == [0], "the second part does not reach its prompt's end"


@pytest.mark.parametrize("seed", range(20))
def test_as_a_loop_over_tokens(seed):
    rng = random.Random(seed)
    size, width, parts = rng.choice([1, 3, 16]), 40, []
    for _ in range(rng.randint(1, 9)):
        length = rng.randint(1, 40)
        start = rng.choice([0, length - 1, rng.randrange(length)])
        count = rng.choice([1, length - start])
        blocks = rng.sample(range(1000), -(-(start + count) // size))
        tokens = [rng.randrange(1 << 20) for _ in range(length)]
        parts.append(part(tokens, start, count, blocks, rng.choice([None, 0, 7])))
    inputs = step_inputs(parts, size, width)
    for name, expected in by_loop(parts, size, width).items():
        array = getattr(inputs, name)
        assert array.dtype == np.int32 and array.tolist() == expected, name


def test_a_step_decodes_if_each_request_has_one_token_that_samples():
    last, middle = part([5, 6, 7], 2, 1, [4, 1]), part([5, 6, 7], 1, 1, [4, 1])
    assert step_inputs([last, last], 2, 4).decodes
    assert not step_inputs([last, middle], 2, 4).decodes
    assert not step_inputs([last, part([5, 6, 7], 1, 2, [4, 1])], 2, 4).decodes


def test_a_step_is_filled_up_with_its_last_token():
    parts = [part([5, 6, 7], 2, 1, [4, 1], slot=3), part([1, 2, 3, 4], 3, 1, [0, 2])]
    expected = step_inputs([*parts, parts[1], parts[1]], 2, 4)
    found = step_inputs(parts, 2, 4).filled_up(4)
    for field in dataclasses.fields(found):
        array = getattr(found, field.name)
        assert array.dtype == np.int32, field.name
        np.testing.assert_array_equal(array, getattr(expected, field.name), field.name)
