"""MindFormers' network on a CPU: replaces cells without a CPU kernel, or with many operators, from outside.

On Ascend nothing is replaced.
"""

from typing import Any, Tuple

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.network.serving.multi_lora_dense import JoinsLinears
from mindlora.network.tree import replace_children
from mindlora.ops.frozen_linear import FrozenGather
from mindlora.ops.paged_attention import PagedAttention
from mindlora.ops.rms_norm import RmsNorm


class CpuLlamaAttention(JoinsLinears):
    """Replaces MindFormers' LLamaAttention with separate linear cells for queries, keys and values."""

    joined = ("wq", "wk", "wv")

    def __init__(self, attention: nn.Cell):
        super().__init__(auto_prefix=False)
        self.wq, self.wk, self.wv, self.wo = attention.wq, attention.wk, attention.wv, attention.wo
        self.infer_attention = attention.infer_attention
        self.dtype = attention.dtype
        self.cast = ops.Cast()

    def construct(
        self,
        x: Tensor,
        freqs_cis: Tuple[Tensor, Tensor, Tensor],
        mask: Any = None,
        batch_valid_length: Any = None,
        block_tables: Any = None,
        slot_mapping: Any = None,
        prefix_keys_values: Any = None,
        q_seq_lens: Any = None,
        kv_mask: Any = None,
        seq_chunk: Any = None,
        actual_seq_len: Any = None,
    ) -> Tensor:
        query, key, value = self.together(x) if self.joins else (self.wq(x), self.wk(x), self.wv(x))
        output = self.infer_attention(
            self.cast(query, self.dtype),
            self.cast(key, self.dtype),
            self.cast(value, self.dtype),
            batch_valid_length,
            block_tables,
            slot_mapping,
            freqs_cis,
            mask,
            prefix_keys_values=prefix_keys_values,
            q_seq_lens=q_seq_lens,
        )
        return self.cast(self.wo(output), x.dtype)


class CpuLlamaFeedForward(JoinsLinears):
    """Replaces MindFormers' LlamaFeedForward, whose w1 has the activation: y = w2(w1(x) * w3(x))."""

    joined = ("w1", "w3")

    def __init__(self, feed_forward: nn.Cell):
        super().__init__(auto_prefix=False)
        self.w1, self.w2, self.w3 = feed_forward.w1, feed_forward.w2, feed_forward.w3
        self.dtype = feed_forward.dtype
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        x = self.cast(x, self.dtype)
        gate, hidden = self.together(x) if self.joins else (self.w1(x), self.w3(x))
        return self.w2(hidden * gate)


class CpuAttention(nn.Cell):
    """Replaces MindFormers' InferAttention, whose cache it uses: decode steps together with chunks of prompts.

    Lengths and blocks determine what is causal and where keys and values go, so neither the mask nor the slots that
    MindFormers gives are used.
    """

    def __init__(self, attention: nn.Cell):
        super().__init__()
        self.paged_attention_mgr = attention.paged_attention_mgr
        self.attention = PagedAttention()

    def initialize_cache(self) -> None:
        """Initializes the cache. In PyNative a cell's first call would do so, but nothing calls the cache manager."""
        for parameter in self.paged_attention_mgr.get_parameters():
            parameter.init_data()

    def construct(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context_lengths: Tensor,
        block_tables: Tensor,
        slot_mapping: Tensor,
        freqs_cis: Tuple[Tensor, Tensor, Tensor],
        attn_mask: Any = None,
        prefix_keys_values: Any = None,
        q_seq_lens: Any = None,
    ) -> Tensor:
        cos, sin, _ = freqs_cis
        cache = self.paged_attention_mgr
        return self.attention(
            query, key, value, cos, sin, cache.key_cache, cache.value_cache, block_tables, context_lengths, q_seq_lens
        )


class CpuRmsNorm(nn.Cell):
    """Replaces the forward of MindFormers' LlamaRMSNorm, whose weight it uses: one operator instead of six."""

    def __init__(self, norm: nn.Cell):
        super().__init__()
        self.weight = norm.weight
        self.norm = RmsNorm()
        self.cast = ops.Cast()
        self.eps = Tensor([norm.eps], mstype.float32)

    def construct(self, x: Tensor) -> Tensor:
        return self.cast(self.norm(self.cast(x, self.weight.dtype), self.weight, self.eps), x.dtype)


class CpuSplit(nn.Cell):
    """Replaces SplitWithSize, which MindSpore 2.7 lacks for CPUs: the parts of a joined cell's output."""

    def construct(self, x: Tensor, sizes: Tuple[int, ...], axis: int) -> Tuple[Tensor, ...]:
        parts = ()
        start = 0
        for size in sizes:
            parts += (ops.narrow(x, axis, start, size),)
            start += size
        return parts


def use_cpu_operators(network: nn.Cell) -> None:
    """Replaces cells of a MindFormers network that has a paged cache, in place."""
    from mindformers.models.llama.llama_layer import LlamaEmbedding, LlamaFeedForward
    from mindformers.models.llama.llama_transformer import LLamaAttention

    replaced = {}
    for _, cell in list(network.cells_and_names()):
        if hasattr(cell, "infer_attention"):
            cell.infer_attention = CpuAttention(cell.infer_attention)
        elif hasattr(cell, "rms_norm"):
            name = cell.weight.name
            cell.rms_norm = CpuRmsNorm(cell)
            cell.weight.name = name  # a cell that is assigned to another renames its parameters
        elif type(cell) is LlamaEmbedding and cell.embedding_weight.dtype != mstype.float32:
            cell.gather = FrozenGather()
        if hasattr(cell, "w_qkv"):
            cell.split_qkv = CpuSplit()
        elif hasattr(cell, "w_gate_hidden"):
            cell.split = CpuSplit()
        elif type(cell) is LLamaAttention:
            replaced[id(cell)] = CpuLlamaAttention(cell)
        elif type(cell) is LlamaFeedForward and not cell.use_fused_swiglu:
            replaced[id(cell)] = CpuLlamaFeedForward(cell)
    replace_children(network, replaced)
