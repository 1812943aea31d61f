"""paged_attention: writes new keys and values to the blocks of a cache and attends to it, for serving on a CPU."""

import mindspore as ms
from mindspore import Parameter, Tensor

from mindlora.ops.operator_cell import OperatorCell, check_dtypes, check_fixed_dtypes

_NAMES = ("query", "key", "value", "key_cache", "value_cache")
_INDEX_NAMES = ("block_tables", "context_lengths", "query_lengths")
_INDEX_DTYPES = (ms.int32, ms.int32, ms.int32)


class PagedAttention(OperatorCell):
    r"""softmax(q K^T / sqrt(D)) V for each row and head, over its sequence's positions up to its own.

    With R_p(x) = x * cos_p + rotate_half(x) * sin_p for each head, as in RotaryEmbedding, q is R_p(query). K and V are
    the sequence's entries in the cache: first R_p(key) and value are written to the places that block_tables has for
    position p. Row i of a sequence with q rows in this step and context c is at position c - q + i: one batch mixes
    prompts, pieces of prompts (q > 1) and single tokens (q = 1). On an NPU these are MindSpore's ApplyRotaryPosEmb,
    ReshapeAndCache and PagedAttention, which have no kernel for a CPU. It has no gradient.

    A row gives the same bits regardless of the rest of the batch, the places of its blocks, the pieces into which its
    prompt was cut, and the number of threads (with one instruction set).

    Inputs:
        - **query** (Tensor) - Shape [T, heads * D] or [1, T, heads * D]; float32, float16 or bfloat16. The rows of a
          sequence are together and in order. Sums are in float32.
        - **key** (Tensor) - Shape [T, kv_heads * D] or [1, T, kv_heads * D], dtype of query; heads is a multiple of
          kv_heads.
        - **value** (Tensor) - Shape and dtype of key.
        - **cos** (Tensor) - Shape [T, D], of the position of each row; float32, float16 or bfloat16.
        - **sin** (Tensor) - Shape and dtype of cos.
        - **key_cache** (Parameter) - Shape [blocks, block_size, kv_heads, D], dtype of query. Written in place, as is
          value_cache: they must be Parameters.
        - **value_cache** (Parameter) - Shape and dtype of key_cache.
        - **block_tables** (Tensor) - Shape [B, max_blocks], int32: the blocks of each sequence. Entries after its
          context are not looked at.
        - **context_lengths** (Tensor) - Shape [B], int32: tokens of each sequence, including this step's.
        - **query_lengths** (Tensor) - Shape [B], int32: tokens of each sequence in this step; their sum is T. With 0,
          a sequence is not looked at.

    Outputs:
        Tensor of the shape and dtype of query.

    Raises:
        BackendError: The device is not a CPU, the library is not built, or a dtype is not supported.
        RuntimeError: A shape, length or block is wrong (raised by the kernel, which names it). Then nothing is written.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023; Dao,
    FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, 2023; Su et al., RoFormer:
    Enhanced Transformer with Rotary Position Embedding, 2021.
    """

    op = "paged_attention"
    inputs = 10
    writes = True

    def construct(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Parameter,
        value_cache: Parameter,
        block_tables: Tensor,
        context_lengths: Tensor,
        query_lengths: Tensor,
    ) -> Tensor:
        check_dtypes(
            self.op, self.path, _NAMES, (query.dtype, key.dtype, value.dtype, key_cache.dtype, value_cache.dtype)
        )
        check_dtypes(self.op, self.path, ("cos", "sin"), (cos.dtype, sin.dtype))
        check_fixed_dtypes(
            self.op,
            self.path,
            _INDEX_NAMES,
            (block_tables.dtype, context_lengths.dtype, query_lengths.dtype),
            _INDEX_DTYPES,
        )
        return self.kernel(
            query, key, value, cos, sin, key_cache, value_cache, block_tables, context_lengths, query_lengths
        )
