"""Cells of MindFormers' legacy Llama with fused operators, which train on a CPU."""

import math
from typing import Any, Tuple

from mindformers.models.llama.llama_layer import LlamaRMSNorm
from mindformers.models.llama.llama_transformer import LLamaAttention
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.ops.backend import choose
from mindlora.ops.masked_attention import MaskedAttention
from mindlora.ops.rms_norm import RmsNorm
from mindlora.ops.rotary_embedding import RotaryEmbedding

_OPERATORS = ("rms_norm", "rotary_embedding", "masked_attention")


class CpuRMSNorm(LlamaRMSNorm):
    """MindFormers' RMSNorm by one operator, which keeps x alone for its backward."""

    def construct(self, x: Tensor) -> Tensor:
        return self.fused(x, self.cast(self.weight, x.dtype), self.fused_eps)


class CpuAttention(LLamaAttention):
    """MindFormers' attention by three operators, which keep queries, keys and values and no scores."""

    def construct(self, x: Tensor, freqs_cis: Tuple[Tensor, ...], mask: Tensor, *_: Any, **__: Any) -> Tensor:
        query, key, value = self._projected(x)
        cos = self.reshape(freqs_cis[0], (-1, self.head_dim))
        sin = self.reshape(freqs_cis[1], (-1, self.head_dim))
        query, key = self._heads(self.rotary(query, cos, sin)), self._heads(self.rotary(key, cos, sin))
        context = self.fused(query, key, self._heads(value), mask, self.scale)
        output = self.wo(self.reshape(context, x.shape[:-1] + (self.hidden_size,)))
        return self.cast(output, x.dtype)

    def _projected(self, x):
        """Queries, keys and values, [batch, tokens, heads * head_dim]."""
        if self.qkv_concat:
            # A key's head after those of its queries, and then the value's.
            groups = self.reshape(self.w_qkv(x), (-1, self.n_kv_head, (self.n_rep + 2) * self.head_dim))
            query, key, value = self.split_qkv(groups, (self.n_rep * self.head_dim, self.head_dim, self.head_dim), 2)
        else:
            query, key, value = self.wq(x), self.wk(x), self.wv(x)
        rows = (-1, self.seq_length if self.rmsnorm_compute_2d else x.shape[1])
        return (
            self.reshape(self.cast(query, self.dtype), rows + (self.hidden_size,)),
            self.reshape(self.cast(key, self.dtype), rows + (self.kv_dim,)),
            self.reshape(self.cast(value, self.dtype), rows + (self.kv_dim,)),
        )

    def _heads(self, x):
        """[batch, tokens, heads, head_dim] of [batch, tokens, heads * head_dim]."""
        return self.reshape(x, x.shape[:2] + (x.shape[2] // self.head_dim, self.head_dim))


def fused_problem() -> str:
    """Returns why the fused operators cannot be used here, or ""."""
    return next((choice.reason for choice in map(choose, _OPERATORS) if choice.path != "cpu"), "")


def fuse(cell: nn.Cell) -> bool:
    """Makes a Llama's norm or attention use fused operators, in place; returns False for any other cell."""
    # A cell's parameters and settings stay, and whether it is recomputed, when its class changes.
    if type(cell) is LlamaRMSNorm and cell.self_define:
        cell.fused, cell.fused_eps = RmsNorm(), Tensor([cell.eps], mstype.float32)
        cell.__class__ = CpuRMSNorm
    elif type(cell) is LLamaAttention and _has_plain_attention(cell):
        cell.rotary, cell.fused = RotaryEmbedding(), MaskedAttention()
        cell.scale = Tensor([1 / math.sqrt(cell.head_dim)], mstype.float32)
        cell.__class__ = CpuAttention
    else:
        return False
    return True


def _has_plain_attention(cell):
    """Whether an attention computes in float32, without a cache and without MindSpore's fused attention."""
    is_float32 = cell.dtype == cell.softmax_dtype == mstype.float32
    return is_float32 and not cell.use_flash_attention and not cell.use_past
