"""paged_attention: what is tested of it. Batches and cells are in tests/ops/test_paged_attention.py."""

from mindlora.ops.paged_attention import PagedAttention
from tests.ops.contract import Operator, named
from tests.support.attention_batches import NAMES, Sequences

LENGTHS = (70, 33, 1, 64, 65, 17)
# (sequence, first, end): a prompt, a token after a context, a prompt of one token, a piece of a prompt, its end, few
# tokens.
MIXED = ((0, 0, 70), (1, 32, 33), (2, 0, 1), (3, 16, 48), (4, 48, 65), (5, 12, 17))
# Two sequences, of which this step has 12 tokens and 1, in 7 blocks of 8.
TWO = (2, 2, 16, 8, (12, 20), ((0, 0, 12), (1, 19, 20)))
ODD_HEADS = {
    **{"query": (13, 60), "key": (13, 30), "value": (13, 30), "cos": (13, 15), "sin": (13, 15)},
    **{"key_cache": (7, 8, 2, 15), "value_cache": (7, 8, 2, 15)},
}
PART = "they are part of the context."


def inputs(dtype, kv_heads, group, size, block_size, lengths=LENGTHS, parts=MIXED):
    batch = Sequences(lengths, kv_heads, group, size, dtype).batch(parts, block_size, unused=0)
    return named(NAMES, batch, [dtype] * 7 + ["int32"] * 3)


PAGED_ATTENTION = Operator(
    name="paged_attention",
    inputs=inputs,
    # The weights sum to 1, so the error does not grow with the context; it does with the scores, and so with D.
    terms=lambda *size: 8,
    function="PagedAttention",
    # (heads of keys, heads of queries on each, D, tokens of a block)
    sizes=(
        *((1, 1, 16, 1), (2, 1, 40, 8), (5, 1, 64, 16), (2, 2, 64, 8), (3, 2, 40, 16), (1, 8, 128, 16)),
        *((2, 8, 16, 8), (1, 20, 40, 16), (2, 7, 10, 3)),
    ),
    threaded=(2, 2, 40, 8, (70, 33, 64), ((0, 0, 70), (1, 32, 33), (2, 16, 64))),
    in_place=7,
    cell=PagedAttention,
    refused_size=TWO,
    alike=(("query", "key", "value", "key_cache", "value_cache"), ("cos", "sin")),
    refused_shapes=(
        ({"query": (64,)}, "query has 1 dimensions: it must have 2 or 3."),
        ({"query": (13, 72)}, "query has 72 numbers a token: it must be a multiple of kv_heads * D = 2 * 16."),
        ({"query": (13, 0)}, "query has 0 numbers a token: it must be a multiple of kv_heads * D = 2 * 16."),
        ({"key": (1, 1, 13, 32)}, "key has 4 dimensions: it must have 2 or 3."),
        ({"key": (12, 32)}, "the number of tokens is 13 in one input and 12 in another."),
        ({"key": (13, 16)}, "kv_heads * D is 16 in one input and 32 in another."),
        ({"value": (14, 32)}, "the number of tokens is 13 in one input and 14 in another."),
        ({"value": (13, 64)}, "kv_heads * D is 64 in one input and 32 in another."),
        ({"cos": (13,)}, "cos has 1 dimensions: it must have 2."),
        ({"cos": (12, 16)}, "the number of tokens is 13 in one input and 12 in another."),
        ({"sin": (13, 8)}, "D is 8 in one input and 16 in another."),
        ({"key_cache": (7, 8, 32)}, "key_cache has 3 dimensions: it must have 4."),
        (ODD_HEADS, "D is 15 in key_cache: it must be even and at least 2."),
        ({"value_cache": (7, 4, 2, 16)}, "block_size is 8 in one input and 4 in another."),
        ({"value_cache": (7, 8, 2, 8)}, "D is 16 in one input and 8 in another."),
        ({"block_tables": (8,)}, "block_tables has 1 dimensions: it must have 2."),
        ({"block_tables": (3, 4)}, "the number of sequences is 3 in one input and 2 in another."),
        ({"context_lengths": (2, 1)}, "context_lengths has 2 dimensions: it must have 1."),
        ({"query_lengths": (3,)}, "the number of sequences is 2 in one input and 3 in another."),
    ),
    refused_values=(
        ("context_lengths", 1, 33, "context_lengths has 33 for sequence 1: block_tables has room for 32."),
        ("context_lengths", 0, 11, f"context_lengths has 11 for sequence 0, which has 12 tokens in this step: {PART}"),
        ("query_lengths", 0, -1, "query_lengths has -1 for sequence 0: it must be 0 or more."),
        ("query_lengths", 0, 11, "query_lengths sum to 12: query has 13 tokens."),
        ("query_lengths", 1, 3, "query_lengths sum to 15: query has 13 tokens."),
        ("block_tables", (1, 2), 7, "block_tables has block 7 at 2 for sequence 1: the cache has 7."),
        ("block_tables", (0, 1), -1, "block_tables has block -1 at 1 for sequence 0: the cache has 7."),
    ),
)
FORMS = (PAGED_ATTENTION,)
