"""paged_attention beyond tests/ops/test_contract.py: long contexts, angles, the cache, cells in both modes."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora.ops.paged_attention import PagedAttention
from tests.ops.operators.paged_attention import LENGTHS, MIXED
from tests.support.attention_batches import Sequences, angles, run, run_and_write
from tests.support.native import DTYPES, ROUNDING, assert_near, call, rounded, tensor, values


def check(reference, inputs, dtype="float32"):
    """The weights sum to 1, so the error does not grow with the context; it does with the scores, and so with D."""
    caches = run_and_write(inputs, dtype)
    wanted = reference.paged_attention(*inputs)
    assert_near(caches.pop(), wanted, dtype, 8)
    # The reference has written to its inputs.
    for cache, wanted in zip(caches, inputs[5:7]):
        np.testing.assert_array_equal(cache, wanted)


@pytest.mark.parametrize("shape", [(2, 1, 40, 16), (1, 4, 64, 16)], ids=str)
def test_contexts_of_several_pieces(isa, reference, shape):
    *heads, block_size = shape
    sequences = Sequences([1100, 512, 513, 700], *heads)
    parts = [(0, 1099, 1100), (1, 500, 512), (2, 510, 513), (3, 400, 700)]
    check(reference, sequences.batch(parts, block_size, unused=0))


@pytest.mark.parametrize("table_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_are_turned_and_values_are_not(isa, reference, dtype, table_dtype):
    inputs = Sequences(LENGTHS, 2, 2, 40, dtype).batch(MIXED, 8, unused=0)
    tables = [rounded(table, table_dtype) for table in angles(range(len(inputs[0])), 40)]
    # What the kernel keeps of turned numbers has its dtype.
    kept = [*(rounded(reference.turned(x, *tables), dtype) for x in inputs[:2]), *inputs[2:]]
    wanted = reference.paged_attention(*kept)
    arrays = [(array, "int32" if array.dtype == np.int32 else dtype) for array in inputs]
    arrays[3:5] = [(table, table_dtype) for table in tables]
    *_, key_cache, value_cache, y = call("PagedAttention", arrays, inputs[0].shape, dtype, in_place=7)
    assert_near(key_cache, kept[5], dtype, 2)
    np.testing.assert_array_equal(value_cache, kept[6])
    # A turned number may be rounded the other way.
    np.testing.assert_allclose(y, wanted, atol=40 * ROUNDING[dtype])


def test_what_is_not_part_of_a_sequence_is_not_looked_at(isa, reference):
    sequences = Sequences(LENGTHS, 2, 2, 40)
    clean = sequences.run(MIXED, 8, unused=0)
    np.testing.assert_array_equal(sequences.run(MIXED, 8, unused=np.nan), clean)
    # Nor are the tokens after a row in its own sequence, whatever they hold.
    for array in (sequences.key, sequences.value):
        array[0][50:] = np.nan
    assert np.isfinite(clean).all()
    rows = sequences.run(MIXED, 8)
    np.testing.assert_array_equal(rows[:50], clean[:50])
    assert np.isnan(rows[50:70]).all()
    np.testing.assert_array_equal(rows[70:], clean[70:])


def test_large_scores_neither_overflow_nor_vanish(isa, reference):
    sequences = Sequences([130, 40], 2, 1, 40)
    for rows in (*sequences.query, *sequences.key):
        rows *= 30
    inputs = sequences.batch([(0, 0, 130), (1, 39, 40)], 8, unused=0)
    # Scores of thousands in float32 are known to 1e-3 or so, and with them the weights.
    np.testing.assert_allclose(run(inputs), reference.paged_attention(*inputs), atol=5e-3)


def test_a_step_is_read_by_the_next_from_the_cache(isa, reference):
    sequences = Sequences([40], 2, 2, 40)
    cos, sin = angles(range(40), 40)
    first, second = (sequences.batch([(0, *part)], 8, unused=0) for part in ((0, 29), (29, 40)))
    first[3:5], second[3:5] = (cos[:29], sin[:29]), (cos[29:], sin[29:])
    # Both steps have the same blocks.
    first[5:8] = second[5:8]
    second[5:7] = run_and_write(first)[:2]
    whole = sequences.batch([(0, 0, 40)], 8, unused=0)
    whole[3:5] = cos, sin
    assert_near(run(second), reference.paged_attention(*whole)[29:], "float32", 8)


def test_sequences_without_tokens_and_an_empty_step(library, reference):
    inputs = Sequences(LENGTHS, 2, 1, 16).batch(MIXED, 8, unused=0)
    wanted = run(inputs)
    tables = np.insert(inputs[7], [1, 6], -7, axis=0)
    contexts, queries = np.insert(inputs[8], [1, 6], [99, -3]), np.insert(inputs[9], [1, 6], 0)
    np.testing.assert_array_equal(run([*inputs[:7], tables, contexts, queries]), wanted)
    empty = [array[:0] for array in inputs[:5]]
    assert run([*empty, *inputs[5:7], tables[:1], contexts[:1], queries[1:2]]).shape == (0, 32)


class Attention(nn.Cell):
    """A layer's attention, with a cache of its own."""

    def __init__(self, shape, dtype="float32"):
        super().__init__()
        self.key_cache = Parameter(tensor(np.zeros(shape), dtype), name="key_cache")
        self.value_cache = Parameter(tensor(np.zeros(shape), dtype), name="value_cache")
        self.attend = PagedAttention()

    def construct(self, query, key, value, cos, sin, tables, contexts, queries):
        return self.attend(query, key, value, cos, sin, self.key_cache, self.value_cache, tables, contexts, queries)


def served(net, sequences, steps, table):
    """Yields the output of each step, which continues the one sequence to a number of tokens."""
    cos, sin = angles(range(steps[-1]), sequences.size)
    done = 0
    for end in steps:
        parts = (sequences.query, sequences.key, sequences.value)
        rows = [tensor(part[0][None, done:end], sequences.dtype) for part in parts]
        turns = Tensor(cos[done:end]), Tensor(sin[done:end])
        yield net(*rows, *turns, Tensor(table[None]), Tensor(np.int32([end])), Tensor(np.int32([end - done])))
        done = end


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_prompt_in_pieces_and_then_token_by_token(mode, reference, library, dtype, dynamic):
    sequences, table = Sequences([31], 2, 2, 40, dtype), np.int32([4, 0, 7, 2, -1])
    net = Attention((9, 8, 2, 40), dtype)
    if dynamic:
        rows = [Tensor(shape=[1, None, width], dtype=getattr(ms, dtype)) for width in (160, 80, 80)]
        turns = [Tensor(shape=[None, 40], dtype=ms.float32) for _ in range(2)]
        numbers = [Tensor(shape=shape, dtype=ms.int32) for shape in ([None, None], [None], [None])]
        net.set_inputs(*rows, *turns, *numbers)
    steps = (12, 29, 30, 31) if dynamic else (29, 30, 31)
    outputs = list(served(net, sequences, steps, table))
    assert all(y.dtype == getattr(ms, dtype) and y.shape[0] == 1 for y in outputs)
    y = np.concatenate([values(y)[0] for y in outputs])
    inputs = sequences.batch([(0, 0, 31)], 8, unused=0)
    tables = angles(range(31), 40)
    kept = [*(rounded(reference.turned(x, *tables), dtype) for x in inputs[:2]), *inputs[2:]]
    np.testing.assert_allclose(y, reference.paged_attention(*kept), atol=40 * ROUNDING[dtype])
