"""Cells that replace those of MindFormers' mcore models whose operators have no CPU kernel."""

from typing import Optional, Tuple

import mindspore as ms
from mindformers.parallel_core.training_graph.activation import FusedSwiGlu, SwiGlu
from mindformers.parallel_core.training_graph.base_models.common.embeddings.rotary_pos_embedding import (
    RotaryEmbedding as RotaryTable,
)
from mindformers.parallel_core.training_graph.base_models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding as YarnTable,
)
from mindformers.parallel_core.training_graph.tensor_parallel.layers import VocabParallelEmbedding
from mindformers.parallel_core.training_graph.transformer.attention import SelfAttention, SelfAttentionContiguous
from mindformers.parallel_core.training_graph.transformer.flash_attention import FlashAttention
from mindformers.parallel_core.training_graph.transformer.mlp import MLP
from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindformers.parallel_core.training_graph.transformer.multi_latent_attention import MultiLatentAttention
from mindformers.parallel_core.training_graph.transformer.norm import FusedRMSNorm
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.network.cells.broadcasting import SwapHeads
from mindlora.network.cells.experts import grouped_matmul
from mindlora.network.cells.routed_experts import RoutedExperts
from mindlora.ops.masked_attention import MaskedAttention
from mindlora.ops.rms_norm import RmsNorm
from mindlora.ops.rotary_embedding import RotaryEmbedding

# The score of a key that a query does not see; masked_attention gives it no weight.
_UNSEEN = -10000.0


class Lookup(nn.Cell):
    """Looks up rows of a table by number, with a gradient that a CPU can compute."""

    def construct(self, ids: Tensor, table: Tensor) -> Tensor:
        return ops.gather(table, ids, 0)


class CpuFusedRMSNorm(FusedRMSNorm):
    """MindFormers' FusedRMSNorm with mindlora's operator, which keeps only x for its backward."""

    def construct(self, x: Tensor) -> Tensor:
        weight = self.cast(self.weight, self.compute_type)
        return self.cast(self.fused(self.cast(x, self.compute_type), weight, self.fused_eps), x.dtype)


class CpuFlashAttention(FlashAttention):
    """MindFormers' FlashAttention with mindlora's operator, in float32. No scores are kept.

    Inputs:
        - **query**, **key**, **value** (Tensor) - Shape [tokens, batch, heads, size of a head]; value heads may be
          smaller than key heads.
        - **attention_mask** (Tensor) - Shape [batch, 1, tokens, tokens]: 0 where a query sees a key, else 1.

    Outputs:
        Tensor of shape [tokens, batch, heads * size of a head of value].
    """

    def construct(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        tokens, batch, heads, size = query.shape
        value_size = value.shape[3]
        if value_size < size:
            # Not ops.pad: on a CPU, its gradient in a graph (MindSpore 2.9) differs from call to call.
            zeros = ops.zeros(value.shape[:3] + (size - value_size,), value.dtype)
            value = ops.concat((value, zeros), -1)
        mask = ops.cast(attention_mask, mstype.float32) * _UNSEEN
        context = self.fused(self._rows_first(query), self._rows_first(key), self._rows_first(value), mask, self.scale)
        context = self.swap(context.reshape((1, batch, tokens, heads * size)), (0, 2, 1, 3))
        if value_size < size:
            context = context.reshape((tokens, batch, heads, size))[:, :, :, :value_size]
        return context.reshape((tokens, batch, heads * value_size))

    def _rows_first(self, x):
        """[batch, tokens, heads, size] of [tokens, batch, heads, size], in float32."""
        tokens, batch, heads, size = x.shape
        x = ops.cast(x, mstype.float32).reshape((1, tokens, batch, heads * size))
        return self.swap(x, (0, 2, 1, 3)).reshape((batch, tokens, heads, size))


class CpuSelfAttention(SelfAttention):
    """MindFormers' attention in float32; MindFormers itself rounds q, k and v to 16 bits for Ascend's kernel."""

    def construct(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        key_value_states: Optional[Tensor] = None,
        rotary_pos_emb: Optional[Tuple[Tensor, float]] = None,
        prefix_keys_values: Optional[Tensor] = None,
        actual_seq_len: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        tokens, batch, _ = hidden_states.shape
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        query = query.reshape((tokens, batch, self.num_heads, self.head_dim))
        key = key.reshape((tokens, batch, self.kv_num_heads, self.head_dim))
        value = value.reshape((tokens, batch, self.kv_num_heads, self.head_dim))
        query, key = self._apply_rotary_pos_emb(query, key, rotary_pos_emb)
        context = self.core_attention(query, key, value, attention_mask)
        output, bias = self.linear_proj(self.cast(context, self.compute_dtype))
        return self.cast(output, hidden_states.dtype), bias


class CpuSelfAttentionContiguous(SelfAttentionContiguous):
    """CpuSelfAttention with a joined weight that has the rows of q before those of k and v."""

    construct = CpuSelfAttention.construct


class CpuRotary(nn.Cell):
    """MindFormers' ApplyRotaryPosEmb with mindlora's operator, for heads that are rotated completely.

    Args:
        plain (ApplyRotaryPosEmb): MindFormers' cell, for all other cases.
    """

    def __init__(self, plain: nn.Cell):
        super().__init__()
        self.plain = plain
        self.fused = RotaryEmbedding()

    def construct(self, x: Tensor, freqs: Tuple[Tensor, float]) -> Tensor:
        angles, scale = freqs
        tokens, batch, heads, size = x.shape
        if angles.shape[3] != size:
            return self.plain(x, freqs)
        angles = angles.reshape((-1, size)) * scale
        # With one table for all rows, the rows are side by side, like heads.
        turned = self.fused(x.reshape((angles.shape[0], -1)), ops.cos(angles), ops.sin(angles))
        return turned.reshape(x.shape)


class Outer(nn.Cell):
    """x y^T of two vectors."""

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return ops.expand_dims(x, 1) * ops.expand_dims(y, 0)


class Pieces(nn.Cell):
    """The pieces of x of the given sizes along an axis, as MindSpore's SplitWithSize returns them."""

    def construct(self, x: Tensor, sizes: Tuple[int, ...], dim: int = 0) -> Tuple[Tensor, ...]:
        pieces, begin = (), 0
        for size in sizes:
            pieces += (ops.narrow(x, dim, begin, size),)
            begin += size
        return pieces


class CpuFFNGroupedGEMM(FFNGroupedGEMM):
    """MindFormers' routed experts with mindlora's matrix products."""

    def experts_forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, w1: Tensor, w2: Tensor
    ) -> Tensor:
        x = permuted_local_hidden_states.reshape((-1, self.hidden_size))
        x = self.grouped_matmul([x], [w1], None, None, None, None, None, tokens_per_expert)[0]
        x = self.swiglu(x, -1).reshape((-1, self.moe_ffn_hidden_size))
        return self.grouped_matmul([x], [w2], None, None, None, None, None, tokens_per_expert)[0]


class Dispatcher(nn.Cell):
    """MindFormers' dispatcher of tokens to experts on one device: sorts tokens by expert, and back.

    Args:
        experts (int): Number of experts.
    """

    def __init__(self, experts: int):
        super().__init__()
        self.experts = experts
        self.sort = ops.Sort()

    def token_permutation(
        self, tokens: Tensor, probs: Tensor, routing_map: Tensor, num_tokens_per_expert: Optional[Tensor] = None
    ) -> Tuple[Tensor, Tensor, Tuple[Tensor, Tensor]]:
        """Sends each token to its experts.

        Args:
            tokens (Tensor): Shape [1, tokens, hidden].
            probs (Tensor): Shape [1, tokens, experts of a token].
            routing_map (Tensor): int32, of the same shape: the experts of each token.
            num_tokens_per_expert (Tensor): Not used.

        Returns:
            (rows [tokens * experts of a token, hidden], sorted by expert, int64 [experts] with the row after each
            expert's last, the context for token_unpermutation).
        """
        count, hidden = tokens.shape[1:]
        chosen = ops.cast(routing_map, mstype.int32).reshape((-1,))
        rows = chosen.shape[0]
        # The rows of an expert stay in order, whatever kernel sorts. The keys are integers: float32 holds them up to
        # 2^24.
        _, order = self.sort(chosen * rows + ops.cast(ops.arange(rows), mstype.int32))
        _, place = self.sort(order)
        ends = chosen.expand_dims(0) <= ops.arange(self.experts).expand_dims(1)
        groups = ops.cast(ops.cast(ends, mstype.float32).sum(1), mstype.int64)
        x = ops.gather(tokens.reshape((count, hidden)), order // (rows // count), 0)
        return x, groups, (place, probs)

    def token_unpermutation(self, tokens: Tensor, context: Tuple[Tensor, Tensor]) -> Tensor:
        """Returns each token's sum of its experts' outputs, weighted by probs: [1, tokens, hidden]."""
        place, probs = context
        y = ops.gather(tokens.reshape((place.shape[0], -1)), place, 0).reshape(probs.shape + (-1,))
        return (y * ops.cast(probs, y.dtype).expand_dims(3)).sum(2)


class Swiglu(nn.Cell):
    """silu(gate) up of the halves [gate, up] of x along an axis, as MindSpore's Swiglu."""

    def construct(self, x: Tensor, dim: int = -1) -> Tensor:
        half = x.shape[dim] // 2
        return ops.silu(ops.narrow(x, dim, 0, half)) * ops.narrow(x, dim, half, half)


class TopK(nn.Cell):
    """The k largest elements along the last axis, and their indices, as MindSpore's TopkExt."""

    def __init__(self):
        super().__init__()
        self.topk = ops.TopK()

    def construct(self, x: Tensor, k: int) -> Tuple[Tensor, Tensor]:
        return self.topk(x, k)


def use_mcore_cpu_cells(network: nn.Cell) -> None:
    """Replaces cells and operators of an mcore model, in place, where it trains on a CPU.

    The network's results stay the same, up to rounding: attention is in float32, whereas MindFormers rounds queries,
    keys and values to float16 for Ascend's kernel.

    Args:
        network (nn.Cell): A model of MindFormers' training graph, with adapters or without.

    Raises:
        BackendError: The library of mindlora's CPU operators is not there.
    """
    if ms.get_context("device_target") != "CPU":
        return
    for _, cell in list(network.cells_and_names()):
        _replace(cell)


def _replace(cell):
    # A cell's parameters and settings stay, and whether it is recomputed, when its class changes.
    if isinstance(cell, VocabParallelEmbedding):
        # An existing cell may hold a table in 16 bits.
        if not isinstance(cell.embedding_morph, nn.Cell):
            cell.embedding_morph = Lookup()
    elif type(cell) is FusedRMSNorm:
        cell.fused, cell.fused_eps = RmsNorm(), Tensor([cell.eps], mstype.float32)
        cell.__class__ = CpuFusedRMSNorm
    elif type(cell) is FlashAttention:
        cell.fused, cell.swap = MaskedAttention(), SwapHeads()
        cell.scale = Tensor([cell.flash_attention.scale_value], mstype.float32)
        cell.__class__ = CpuFlashAttention
    elif type(cell) in _ATTENTION:
        cell.split_qkv, cell.apply_rotary_pos_emb = Pieces(), CpuRotary(cell.apply_rotary_pos_emb)
        cell.__class__ = _ATTENTION[type(cell)]
    elif isinstance(cell, (RotaryTable, YarnTable)):
        cell.outer, cell.outer_for_eod = Outer(), Outer()
    elif isinstance(cell, (MLP, SwiGlu)):
        cell.split = Pieces()
    elif isinstance(cell, FusedSwiGlu):
        cell.swiglu = Swiglu()
    elif isinstance(cell, MultiLatentAttention):
        cell.split, cell.split_3d = Pieces(), Pieces()
    elif isinstance(cell, TopKRouter):
        cell.topk, cell.afb_topk, cell.tc_topk = TopK(), TopK(), TopK()
    elif type(cell) is FFNGroupedGEMM:
        cell.token_dispatcher, cell.swiglu = Dispatcher(cell.num_local_experts), Swiglu()
        cell.grouped_matmul = grouped_matmul()
        cell.__class__ = CpuFFNGroupedGEMM
    elif isinstance(cell, RoutedExperts):
        cell.token_dispatcher, cell.swiglu = Dispatcher(cell.weight1.experts), Swiglu()


_ATTENTION = {SelfAttention: CpuSelfAttention, SelfAttentionContiguous: CpuSelfAttentionContiguous}
