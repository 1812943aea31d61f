"""paged_attention against its reference: shapes, dtypes, instruction sets, long contexts, cells in both modes."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindlora.ops.kv_cache_write import KvCacheWrite
from mindlora.ops.paged_attention import PagedAttention
from tests.support.attention_batches import Sequences, run
from tests.support.native import DTYPES, assert_near, tensor, values

# (kv_heads, group, D, block_size)
SHAPES = [
    (1, 1, 16, 1),
    (2, 1, 40, 8),
    (5, 1, 64, 16),
    (2, 2, 64, 8),
    (3, 2, 40, 16),
    (1, 8, 128, 16),
    (2, 8, 16, 8),
    (1, 20, 40, 16),
    (2, 7, 10, 3),
]
LENGTHS = [70, 33, 1, 64, 65, 17]
# A prompt, a token after a context, a prompt of one token, a piece of a prompt, its end, few tokens.
MIXED = [(0, 0, 70), (1, 32, 33), (2, 0, 1), (3, 16, 48), (4, 48, 65), (5, 12, 17)]


def check(reference, inputs, dtype="float32"):
    """The weights sum to 1, so the error does not grow with the context; it does with the scores, and so with D."""
    wanted = reference.paged_attention(*inputs)
    assert_near(run(inputs, dtype), wanted, dtype, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_pieces_and_single_tokens_in_one_batch(isa, reference, shape, dtype):
    *heads, block_size = shape
    check(reference, Sequences(LENGTHS, *heads, dtype).batch(MIXED, block_size, unused=0), dtype)


@pytest.mark.parametrize("shape", [(2, 1, 40, 16), (1, 4, 64, 16)], ids=str)
def test_contexts_of_several_pieces(isa, reference, shape):
    *heads, block_size = shape
    sequences = Sequences([1100, 512, 513, 700], *heads)
    parts = [(0, 1099, 1100), (1, 500, 512), (2, 510, 513), (3, 400, 700)]
    check(reference, sequences.batch(parts, block_size, unused=0))


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


def test_sequences_without_tokens_and_an_empty_step(library, reference):
    inputs = Sequences(LENGTHS, 2, 1, 16).batch(MIXED, 8, unused=0)
    wanted = run(inputs)
    tables = np.insert(inputs[3], [1, 6], -7, axis=0)
    contexts, queries = np.insert(inputs[4], [1, 6], [99, -3]), np.insert(inputs[5], [1, 6], 0)
    np.testing.assert_array_equal(run([*inputs[:3], tables, contexts, queries]), wanted)
    assert run([inputs[0][:0], *inputs[1:3], tables[:1], contexts[:1], queries[1:2]]).shape == (0, 32)


class Attention(nn.Cell):
    """What a layer of a network does with a cache: write to it, then read it."""

    def __init__(self, shape, dtype="float32"):
        super().__init__()
        self.key_cache = Parameter(tensor(np.zeros(shape), dtype), name="key_cache")
        self.value_cache = Parameter(tensor(np.zeros(shape), dtype), name="value_cache")
        self.write, self.attend, self.depend = KvCacheWrite(), PagedAttention(), ops.Depend()

    def construct(self, query, key, value, slots, tables, contexts, queries):
        written = self.write(key, value, self.key_cache, self.value_cache, slots)
        query = self.depend(query, written)
        return self.attend(query, self.key_cache, self.value_cache, tables, contexts, queries)


def served(net, sequences, steps, table, block_size):
    """Yields the output of each step, which continues the one sequence to a number of tokens."""
    done = 0
    for end in steps:
        positions = np.arange(done, end)
        slots = table[positions // block_size] * block_size + positions % block_size
        parts = (sequences.query, sequences.key, sequences.value)
        rows = [tensor(part[0][None, done:end], sequences.dtype) for part in parts]
        yield net(
            *rows, Tensor(slots, ms.int32), Tensor(table[None]), Tensor(np.int32([end])), Tensor(np.int32([end - done]))
        )
        done = end


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_prompt_in_pieces_and_then_token_by_token(mode, reference, library, dtype, dynamic):
    sequences, table = Sequences([31], 2, 2, 40, dtype), np.int32([4, 0, 7, 2, -1])
    net = Attention((9, 8, 2, 40), dtype)
    if dynamic:
        of = getattr(ms, dtype)
        rows = [Tensor(shape=[1, None, width], dtype=of) for width in (160, 80, 80)]
        net.set_inputs(
            *rows, *[Tensor(shape=shape, dtype=ms.int32) for shape in ([None], [None, None], [None], [None])]
        )
    steps = (12, 29, 30, 31) if dynamic else (29, 30, 31)
    outputs = list(served(net, sequences, steps, table, 8))
    assert all(y.dtype == getattr(ms, dtype) and y.shape[0] == 1 for y in outputs)
    y = np.concatenate([values(y)[0] for y in outputs])
    assert_near(y, reference.paged_attention(*sequences.batch([(0, 0, 31)], 8, unused=0)), dtype, 8)
