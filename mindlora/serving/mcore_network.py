"""The network by which Qwen3, Qwen3-MoE and GLM4 are served on a CPU, where MindFormers' mcore cells do not run.

Cells and parameters have Hugging Face's names, with q, k, v, gate and up apart: adapters in joined pairs are split.
"""

import types
from typing import Any, Mapping, Optional, Tuple, cast

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters

from mindlora.checks.finding import refuse
from mindlora.checks.mcore import check_served, family_of
from mindlora.models import registry
from mindlora.models.architecture import HF, Architecture, dtype_of
from mindlora.models.decoder_sizes import DecoderSizes, decoder_sizes
from mindlora.nn.linears_together import JoinsLinears
from mindlora.ops.paged_attention import PagedAttention
from mindlora.ops.rms_norm import RmsNorm
from mindlora.serving.settings import EngineSettings
from mindlora.serving.stacked_experts import StackedExperts


def build_mcore(model_config: Mapping[str, Any], settings: EngineSettings) -> nn.Cell:
    """Builds the network of an mcore YAML with a paged key-value cache, for a CPU.

    It computes in float32; the weights of linear cells are held in params_dtype. Its parameters have no values until
    load_base fills them. Raises ConfigError if it is not one that is served.
    """
    yaml = {"use_legacy": False, "context": {"device_target": "CPU"}, "model": {"model_config": model_config}}
    refuse(check_served(yaml))
    architecture = cast(Architecture, registry.by_model_type(family_of(yaml)))
    sizes = decoder_sizes(architecture, dict(model_config))
    dtype = getattr(mstype, dtype_of(dict(model_config), "params_dtype"))
    with no_init_parameters():
        network = McoreNetwork(sizes, settings, dtype)
    network.config.eos_token_id = model_config.get("eos_token_id")
    return network.set_train(False)


class McoreNetwork(nn.Cell):
    """A decoder and its output head, whose weight is the embedding's table where these are tied.

    Attributes:
        config: vocab_size, num_heads, n_kv_heads and eos_token_id, as MindFormers' networks have them.
        parameter_names (str): Whose names the parameters have, for load_base.
    """

    parameter_names = HF

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtype: mstype.Type):
        super().__init__()
        self.config = types.SimpleNamespace(
            vocab_size=sizes.vocabulary, num_heads=sizes.heads, n_kv_heads=sizes.kv_heads, eos_token_id=None
        )
        self.model = Decoder(sizes, settings, dtype)
        self.lm_head = _linear(sizes.hidden, sizes.vocabulary, dtype)
        if sizes.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def add_flags_custom(self, is_first_iteration: bool) -> None:
        """MindFormers' networks tell prompts and decoding apart by it; to this one they are the same."""


class Decoder(nn.Cell):
    """Tokens to hidden states, over a cache: what ServedStep calls, with MindFormers' names of the inputs.

    Inputs:
        - The arrays of StepInputs, with **tokens** of shape [1, T]. The mask and the slots of the cache are not
          looked at: they follow from lengths and blocks.

    Outputs:
        Tensor [1, T, hidden], float32.
    """

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtype: mstype.Type):
        super().__init__()
        self.embed_tokens = Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.CellList([DecoderLayer(sizes, settings, dtype) for _ in range(sizes.layers)])
        self.norm = Norm(sizes.hidden, sizes.norm_eps)
        cos, sin = _rotary_tables(settings.seq_length, sizes)
        self.cos, self.sin = Tensor(cos), Tensor(sin)
        self.gather = ops.Gather()

    def construct(
        self,
        tokens: Tensor,
        batch_valid_length: Tensor,
        block_tables: Tensor,
        slot_mapping: Optional[Tensor],
        attention_mask: Optional[Tensor],
        q_seq_lens: Tensor,
        seq_range: Tensor,
    ) -> Tensor:
        rotary = self.gather(self.cos, seq_range, 0), self.gather(self.sin, seq_range, 0)
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, rotary, batch_valid_length, q_seq_lens, block_tables)
        return self.norm(hidden)


class DecoderLayer(nn.Cell):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)); both sums may take norms of what is added."""

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtype: mstype.Type):
        super().__init__()
        self.input_layernorm = Norm(sizes.hidden, sizes.norm_eps)
        self.self_attn = Attention(sizes, settings, dtype)
        self.post_attention_layernorm = Norm(sizes.hidden, sizes.norm_eps)
        self.mlp = _feed_forward(sizes, dtype)
        self.has_output_norms = sizes.has_output_norms
        if self.has_output_norms:
            self.post_self_attn_layernorm = Norm(sizes.hidden, sizes.norm_eps)
            self.post_mlp_layernorm = Norm(sizes.hidden, sizes.norm_eps)

    def construct(self, x, rotary, context_lengths, query_lengths, block_tables):
        attended = self.self_attn(self.input_layernorm(x), rotary, context_lengths, query_lengths, block_tables)
        hidden = x + (self.post_self_attn_layernorm(attended) if self.has_output_norms else attended)
        fed = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + (self.post_mlp_layernorm(fed) if self.has_output_norms else fed)


def _feed_forward(sizes: DecoderSizes, dtype: mstype.Type) -> nn.Cell:
    if sizes.experts:
        return RoutedFeedForward(sizes, dtype)
    kind = JoinedFeedForward if sizes.joins_gate_up else FeedForward
    return kind(sizes.hidden, sizes.inner, dtype)


class Attention(JoinsLinears):
    """Causal attention over the cache, with biases on q, k and v and with norms of the heads of q and k if asked for.

    Attributes:
        n_kv_head, head_dim (int): By them adapters on linear_qkv are split for q, k and v.
    """

    joined = ("q_proj", "k_proj", "v_proj")

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtype: mstype.Type):
        super().__init__()
        self.n_kv_head, self.head_dim = sizes.kv_heads, sizes.head_dim
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = _linear(sizes.hidden, queries, dtype, sizes.has_bias)
        self.k_proj = _linear(sizes.hidden, keys, dtype, sizes.has_bias)
        self.v_proj = _linear(sizes.hidden, keys, dtype, sizes.has_bias)
        self.o_proj = _linear(queries, sizes.hidden, dtype)
        self.has_norms = sizes.has_head_norms
        if self.has_norms:
            self.q_norm = Norm(sizes.head_dim, sizes.norm_eps)
            self.k_norm = Norm(sizes.head_dim, sizes.norm_eps)
        self.order = _rotary_order(sizes)
        cache = [settings.block_count, settings.block_size, sizes.kv_heads, sizes.head_dim]
        self.key_cache, self.value_cache = (
            Parameter(initializer("zeros", cache, mstype.float32), name=name, requires_grad=False)
            for name in ("key_cache", "value_cache")
        )
        self.attention = PagedAttention()
        self.reshape = ops.Reshape()

    def construct(self, x, rotary, context_lengths, query_lengths, block_tables):
        cos, sin = rotary
        query, key, value = self.together(x) if self.joins else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        if self.has_norms:
            query, key = self._by_head(query, self.q_norm), self._by_head(key, self.k_norm)
        if self.order is not None:
            query, key = self._by_head(query, self._ordered), self._by_head(key, self._ordered)
        output = self.attention(
            query, key, value, cos, sin, self.key_cache, self.value_cache, block_tables, context_lengths, query_lengths
        )
        return self.o_proj(output)

    def _by_head(self, x, change):
        return self.reshape(change(self.reshape(x, (-1, self.head_dim))), x.shape)

    def _ordered(self, heads):
        return ops.gather(heads, self.order, 1)


class FeedForward(JoinsLinears):
    """y = down(silu(gate(x)) * up(x))."""

    joined = ("gate_proj", "up_proj")

    def __init__(self, hidden: int, inner: int, dtype: mstype.Type):
        super().__init__()
        self.gate_proj = _linear(hidden, inner, dtype)
        self.up_proj = _linear(hidden, inner, dtype)
        self.down_proj = _linear(inner, hidden, dtype)
        self.silu = nn.SiLU()

    def construct(self, x: Tensor) -> Tensor:
        gate, up = self.together(x) if self.joins else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.silu(gate) * up)


class JoinedFeedForward(nn.Cell):
    """FeedForward with one cell for gate and up, whose rows follow each other."""

    def __init__(self, hidden: int, inner: int, dtype: mstype.Type):
        super().__init__()
        self.inner = inner
        self.gate_up_proj = _linear(hidden, 2 * inner, dtype)
        self.down_proj = _linear(inner, hidden, dtype)
        self.silu = nn.SiLU()

    def construct(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        gate, up = ops.narrow(both, -1, 0, self.inner), ops.narrow(both, -1, self.inner, self.inner)
        return self.down_proj(self.silu(gate) * up)


class RoutedFeedForward(nn.Cell):
    """y = sum_j p_j expert_j(x) over the experts j to which the router gives the largest probabilities p_j."""

    def __init__(self, sizes: DecoderSizes, dtype: mstype.Type):
        super().__init__()
        self.hidden, self.chosen, self.sums_to_one = sizes.hidden, sizes.chosen, sizes.sums_to_one
        self.gate = Router(sizes.experts, sizes.hidden)
        self.experts = StackedExperts(sizes.experts, sizes.hidden, sizes.inner, dtype)
        self.softmax = ops.Softmax(-1)
        self.top = ops.TopK(sorted=True)

    def construct(self, x: Tensor) -> Tensor:
        probabilities = self.softmax(self.gate(ops.reshape(x, (-1, self.hidden))))
        weights, chosen = self.top(probabilities, self.chosen)
        if self.sums_to_one:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return self.experts(x, chosen, weights)


class Router(nn.Cell):
    """x W^T, the logits of all experts for each token."""

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.weight = _weight(experts, hidden)
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


class Embedding(nn.Cell):
    """The rows of a table [vocabulary, hidden]."""

    def __init__(self, vocabulary: int, hidden: int):
        super().__init__()
        self.weight = _weight(vocabulary, hidden)
        self.gather = ops.Gather()

    def construct(self, tokens: Tensor) -> Tensor:
        return self.gather(self.weight, tokens, 0)


class Norm(nn.Cell):
    """RmsNorm with a weight of its own."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = _weight(size)
        self.eps = Tensor([eps], mstype.float32)
        self.norm = RmsNorm()

    def construct(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


def _linear(in_channels: int, out_channels: int, dtype: mstype.Type, has_bias: bool = False) -> nn.Dense:
    cell = nn.Dense(in_channels, out_channels, has_bias=has_bias, dtype=dtype)
    # In which it computes, whatever its weight is held in.
    cell.dtype = mstype.float32
    return cell


def _weight(*shape: int) -> Parameter:
    return Parameter(initializer("zeros", list(shape), mstype.float32), name="weight", requires_grad=False)


def _rotary_order(sizes: DecoderSizes) -> Optional[Tensor]:
    """Returns the order of a head's elements in which element i and i + head_dim / 2 are turned together.

    None where they are so already. In queries and keys alike, the order changes no score.
    """
    turned, half = sizes.rotary, sizes.head_dim // 2
    if turned == sizes.head_dim and not sizes.interleaved:
        return None
    pairs = np.arange(turned).reshape((-1, 2) if sizes.interleaved else (2, -1))
    first, second = pairs.T if sizes.interleaved else pairs
    rest = np.arange(turned, sizes.head_dim)
    kept = half - turned // 2
    return Tensor(np.concatenate([first, rest[:kept], second, rest[kept:]]).astype(np.int32))


def _rotary_tables(positions: int, sizes: DecoderSizes) -> Tuple[np.ndarray, np.ndarray]:
    """Returns cosine and sine [positions, head_dim] of the angles, each half of a head the same; 0 is not turned."""
    frequencies = np.zeros(sizes.head_dim // 2, np.float32)
    turned = np.arange(0, sizes.rotary, 2, dtype=np.float32)
    frequencies[: len(turned)] = sizes.rope_theta ** -(turned / sizes.rotary)
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies)
    angles = np.concatenate([angles, angles], axis=1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
