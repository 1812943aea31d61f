"""The leaf cells of MindFormers' attention that have no CPU kernel, in operators of ours.

MindFormers' network stays as it is; where it runs on a CPU, four cells per layer are replaced from outside. On Ascend
nothing is replaced.
"""

from typing import Any, Iterable, Optional, Tuple

from mindspore import Parameter, Tensor, nn, ops

from mindlora.ops.kv_cache_write import KvCacheWrite
from mindlora.ops.paged_attention import PagedAttention
from mindlora.ops.rotary_embedding import RotaryEmbedding


class CpuRotaryEmbedding(nn.Cell):
    """In place of MindFormers' InferRotaryEmbedding: turns query and key by their positions."""

    def __init__(self):
        super().__init__()
        self.rotary, self.reshape = RotaryEmbedding(), ops.Reshape()

    def construct(
        self, query: Tensor, key: Tensor, freqs_cis: Tuple[Tensor, Tensor, Tensor], batch_valid_length: Tensor
    ) -> Tuple[Tensor, Tensor]:
        cos, sin, _ = freqs_cis
        return self._turned(query, cos, sin), self._turned(key, cos, sin)

    def _turned(self, x, cos, sin):
        shape = x.shape
        return self.reshape(self.rotary(self.reshape(x, (-1, shape[-1])), cos, sin), shape)


class CpuCacheWrite(nn.Cell):
    """In place of ReshapeAndCache: writes keys and values to the cache."""

    def __init__(self):
        super().__init__()
        self.write, self.reshape = KvCacheWrite(), ops.Reshape()

    def construct(
        self, key: Tensor, value: Tensor, key_cache: Parameter, value_cache: Parameter, slot_mapping: Tensor
    ) -> Tensor:
        flat = (-1, key.shape[-1])
        return self.write(self.reshape(key, flat), self.reshape(value, flat), key_cache, value_cache, slot_mapping)


class CpuPagedAttention(nn.Cell):
    """In place of PagedAttention: decode steps, and chunks of prompts beside them.

    It knows from the lengths what is causal, so the mask that MindFormers gives is not looked at.
    """

    def __init__(self):
        super().__init__()
        self.attention, self.reshape = PagedAttention(), ops.Reshape()

    def construct(
        self,
        query: Tensor,
        key_cache: Parameter,
        value_cache: Parameter,
        block_tables: Tensor,
        context_lengths: Tensor,
        antiquant_scale: Any = None,
        antiquant_offset: Any = None,
        attn_mask: Any = None,
        query_lengths: Optional[Tensor] = None,
    ) -> Tensor:
        if query_lengths is None:
            query_lengths = ops.ones_like(context_lengths)
        shape = query.shape
        flat = self.reshape(query, (-1, shape[-1]))
        y = self.attention(flat, key_cache, value_cache, block_tables, context_lengths, query_lengths)
        return self.reshape(y, shape)


def use_cpu_attention(attentions: Iterable[nn.Cell]) -> None:
    """Replaces the leaf cells of MindFormers' InferAttention cells that have no CPU kernel.

    Args:
        attentions (iterable of nn.Cell): The InferAttention of each layer, changed in place.
    """
    for attention in attentions:
        attention.rotary_embedding = CpuRotaryEmbedding()
        manager = attention.paged_attention_mgr
        manager.reshape_and_cache = CpuCacheWrite()
        manager.paged_attention = CpuPagedAttention()
