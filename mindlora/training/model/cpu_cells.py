"""Cells for a CPU that replace MindFormers' chains of operators, or operators that keep much memory or large tables."""

import math
from typing import Any, Tuple

import mindspore as ms
from mindformers.core.loss.loss import CrossEntropyLoss, _NLLLoss
from mindformers.models.llama.llama_layer import LlamaRMSNorm, LlamaSiLU
from mindformers.models.llama.llama_transformer import LLamaAttention
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.network.cells.broadcasting import BroadcastAdd, BroadcastMul, BroadcastSub, Softmax, SwapHeads
from mindlora.ops.backend import choose
from mindlora.ops.masked_attention import MaskedAttention
from mindlora.ops.rms_norm import RmsNorm
from mindlora.ops.rotary_embedding import RotaryEmbedding
from mindlora.training.log import logger

# Cells of MindFormers' legacy Llama with fused operators, for training on a CPU.

_OPERATORS = ("rms_norm", "rotary_embedding", "masked_attention")


class CpuRMSNorm(LlamaRMSNorm):
    """MindFormers' RMSNorm as one operator, which keeps only x for its backward."""

    def construct(self, x: Tensor) -> Tensor:
        return self.fused(x, self.cast(self.weight, x.dtype), self.fused_eps)


class CpuAttention(LLamaAttention):
    """MindFormers' attention as three operators, which keep queries, keys and values but no scores."""

    def construct(self, x: Tensor, freqs_cis: Tuple[Tensor, ...], mask: Tensor, *_: Any, **__: Any) -> Tensor:
        query, key, value = self._projected(x)
        cos = self.reshape(freqs_cis[0], (-1, self.head_dim))
        sin = self.reshape(freqs_cis[1], (-1, self.head_dim))
        query, key = self._heads(self._turned(query, cos, sin)), self._heads(self._turned(key, cos, sin))
        context = self.fused(query, key, self._heads(value), mask, self.scale)
        output = self.wo(self.reshape(context, x.shape[:-1] + (self.hidden_size,)))
        return self.cast(output, x.dtype)

    def _turned(self, x, cos, sin):
        """Returns rotated queries or keys; the angles are shared by all rows, or one set for each row."""
        return self.reshape(self.rotary(self.reshape(x, (-1, cos.shape[0], x.shape[2])), cos, sin), x.shape)

    def _projected(self, x):
        """Returns queries, keys and values, [batch, tokens, heads * head_dim] each."""
        if self.qkv_concat:
            # Each key head comes after the heads of its queries, and then the value head.
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
    """Makes a Llama's norm or attention use fused operators, in place; returns False for other cells."""
    # Changing a cell's class keeps its parameters and settings, including recomputation.
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
    """Returns whether an attention computes in float32, without a cache and without MindSpore's fused attention."""
    is_float32 = cell.dtype == cell.softmax_dtype == mstype.float32
    return is_float32 and not cell.use_flash_attention and not cell.use_past


class CpuNLLLoss(_NLLLoss):
    """MindFormers' _NLLLoss, whose gradient broadcasts without a table."""

    def bprop(self, log_softmax_result, one_hot_label, out, dout):
        logits = ops.exp(log_softmax_result) - one_hot_label
        return logits * ops.broadcast_to(ops.expand_dims(dout, -1), logits.shape), ops.zeros_like(one_hot_label)


class CpuSiLU(nn.Cell):
    """y = x sigmoid(x), dx = dy (s + y - y s) with s = sigmoid(x), which is computed only in the backward.

    MindSpore's gradient computes s from x alone, and therefore already in the forward, and keeps it until the backward.

    Args:
        silu (ops.Primitive): MindSpore's operator for the forward.
    """

    def __init__(self, silu: ops.Primitive):
        super().__init__()
        self.silu = silu

    def construct(self, x: Tensor) -> Tensor:
        return self.silu(x)

    def bprop(self, x, out, dout):
        sigmoid = ops.sigmoid(ops.depend(x, dout))
        return (dout * (sigmoid + out - out * sigmoid),)


def use_cpu_cells(network: nn.Cell) -> None:
    """Replaces operators of a legacy MindFormers network, in place, where it trains on a CPU in graph mode.

    The network's results stay the same, up to the order of sums. A Llama gets mindlora's fused operators, if their
    library exists; other cells get operators without tables (mindlora.network.cells.broadcasting).
    """
    if ms.get_context("device_target") != "CPU" or ms.get_context("mode") != ms.GRAPH_MODE:
        return
    problem = fused_problem()
    if problem:
        logger.warning(
            "Norms and attention will take more memory and time than they need: %s. Build the library of the CPU "
            "operators with `python -m mindlora.ops.build`.",
            problem,
        )
    for _, cell in list(network.cells_and_names()):
        if isinstance(cell, LlamaSiLU):
            cell.silu = CpuSiLU(cell.silu)
        elif problem or not fuse(cell):
            _avoid_tables(cell)


def _avoid_tables(cell):
    if getattr(cell, "self_define", False) and hasattr(cell, "rms_norm"):
        cell.mul, cell.mul2 = BroadcastMul(), BroadcastMul()
    elif hasattr(cell, "apply_rotary_emb") and not cell.use_flash_attention:
        cell.transpose, cell.merger_head_transpose = SwapHeads(), SwapHeads()
        cell.add, cell.softmax = BroadcastAdd(), Softmax()
        rotary = cell.apply_rotary_emb
        rotary.mul, rotary.mul_inc, rotary.mul_with_batch_freqs = BroadcastMul(), BroadcastMul(), BroadcastMul()
    elif isinstance(cell, CrossEntropyLoss):
        cell._log_softmax.sub = BroadcastSub()
        cell._nllloss = CpuNLLLoss()
