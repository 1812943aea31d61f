"""paged_attention: causal attention over keys and values in the blocks of a cache, for serving on a CPU."""

import mindspore as ms
from mindspore import Parameter, Tensor

from mindlora.ops.operator_cell import OperatorCell, check_dtypes, check_fixed_dtypes

_NAMES = ("query", "key_cache", "value_cache")
_INDEX_NAMES = ("block_tables", "context_lengths", "query_lengths")
_INDEX_DTYPES = (ms.int32, ms.int32, ms.int32)


class PagedAttention(OperatorCell):
    r"""softmax(q K^T / sqrt(D)) V for each row and head, over the positions of its sequence up to its own.

    Row i of a sequence with q rows in this step and context c is at position c - q + i: one batch mixes prompts, pieces
    of prompts (q > 1) and single tokens (q = 1). It takes the place of MindSpore's PagedAttention, which has no kernel
    for a CPU. It has no gradient.

    A row gives the same bits whatever else is in the batch, wherever its blocks are, into whatever pieces its prompt
    was cut, and on any number of threads (with one instruction set).

    Inputs:
        - **query** (Tensor) - Shape [T, heads * D] or [1, T, heads * D]; float32, float16 or bfloat16. The rows of a
          sequence are together and in order. Sums are in float32.
        - **key_cache** (Parameter) - Shape [blocks, block_size, kv_heads, D], dtype of query; heads is a multiple of
          kv_heads. The keys of this step are in it already: see KvCacheWrite.
        - **value_cache** (Parameter) - The same.
        - **block_tables** (Tensor) - Shape [B, max_blocks], int32: the blocks of each sequence. Entries after its
          context are not looked at.
        - **context_lengths** (Tensor) - Shape [B], int32: tokens of each sequence, those of this step included.
        - **query_lengths** (Tensor) - Shape [B], int32: tokens of each sequence in this step; their sum is T. With 0,
          a sequence is not looked at.

    Outputs:
        Tensor of the shape and dtype of query.

    Raises:
        BackendError: The device is not a CPU, the library is not built, or a dtype is not supported.
        RuntimeError: A shape, length or block is wrong (raised by the kernel, which names it).

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023; Dao,
    FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, 2023.
    """

    op = "paged_attention"
    inputs = 6

    def construct(
        self,
        query: Tensor,
        key_cache: Parameter,
        value_cache: Parameter,
        block_tables: Tensor,
        context_lengths: Tensor,
        query_lengths: Tensor,
    ) -> Tensor:
        check_dtypes(self.op, self.path, _NAMES, (query.dtype, key_cache.dtype, value_cache.dtype))
        check_fixed_dtypes(
            self.op,
            self.path,
            _INDEX_NAMES,
            (block_tables.dtype, context_lengths.dtype, query_lengths.dtype),
            _INDEX_DTYPES,
        )
        return self.kernel(query, key_cache, value_cache, block_tables, context_lengths, query_lengths)
