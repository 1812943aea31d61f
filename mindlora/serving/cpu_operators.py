"""Leaf cells of MindFormers' network that have no CPU kernel, or one of many operators, in operators of ours.

MindFormers' network stays as it is; where it runs on a CPU, these cells are replaced from outside. On Ascend nothing
is replaced.
"""

from typing import Any, Tuple

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.ops.kv_cache_write import KvCacheWrite
from mindlora.ops.paged_attention import PagedAttention
from mindlora.ops.rms_norm import RmsNorm
from mindlora.ops.rotary_embedding import RotaryEmbedding


class CpuRotaryEmbedding(nn.Cell):
    """In place of MindFormers' InferRotaryEmbedding: turns query and key by their positions."""

    def __init__(self):
        super().__init__()
        self.rotary = RotaryEmbedding()

    def construct(
        self, query: Tensor, key: Tensor, freqs_cis: Tuple[Tensor, Tensor, Tensor], batch_valid_length: Tensor
    ) -> Tuple[Tensor, Tensor]:
        cos, sin, _ = freqs_cis
        return self.rotary(query, cos, sin), self.rotary(key, cos, sin)


class CpuPagedAttention(nn.Cell):
    """In place of PagedAttention: decode steps, and chunks of prompts beside them.

    It knows from the lengths what is causal, so the mask that MindFormers gives is not looked at.
    """

    def __init__(self):
        super().__init__()
        self.attention = PagedAttention()

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
        query_lengths: Any = None,
    ) -> Tensor:
        return self.attention(query, key_cache, value_cache, block_tables, context_lengths, query_lengths)


class CpuRmsNorm(nn.Cell):
    """In place of the forward of MindFormers' LlamaRMSNorm: six operators in one.

    Args:
        norm (nn.Cell): The LlamaRMSNorm, whose weight it uses.
    """

    def __init__(self, norm: nn.Cell):
        super().__init__()
        self.weight, self.norm, self.cast = norm.weight, RmsNorm(), ops.Cast()
        self.eps = Tensor([norm.eps], mstype.float32)

    def construct(self, x: Tensor) -> Tensor:
        return self.cast(self.norm(self.cast(x, self.weight.dtype), self.weight, self.eps), x.dtype)


class CpuSplit(nn.Cell):
    """In place of SplitWithSize, which MindSpore 2.7 does not have for CPUs: parts of a joined cell's output."""

    def construct(self, x: Tensor, sizes: Tuple[int, ...], axis: int) -> Tuple[Tensor, ...]:
        parts, start = (), 0
        for size in sizes:
            parts += (ops.narrow(x, axis, start, size),)
            start += size
        return parts


def use_cpu_operators(network: nn.Cell) -> None:
    """Replaces leaf cells of a MindFormers network that has a paged cache.

    Args:
        network (nn.Cell): The network, changed in place.
    """
    for _, cell in list(network.cells_and_names()):
        if hasattr(cell, "paged_attention_mgr"):
            cell.rotary_embedding = CpuRotaryEmbedding()
            cell.paged_attention_mgr.reshape_and_cache = KvCacheWrite()
            cell.paged_attention_mgr.paged_attention = CpuPagedAttention()
        elif hasattr(cell, "rms_norm"):
            name = cell.weight.name
            cell.rms_norm = CpuRmsNorm(cell)
            cell.weight.name = name  # a cell that is put into another gives its parameters new names
        if hasattr(cell, "w_qkv"):
            cell.split_qkv = CpuSplit()
        elif hasattr(cell, "w_gate_hidden"):
            cell.split = CpuSplit()
