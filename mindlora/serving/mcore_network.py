"""The network that serves Qwen3, Qwen3-MoE and GLM4, since MindFormers' own inference of them takes no adapters.

mcore_operators has the parts that differ between Ascend and a CPU. Cells and parameters have Hugging Face's
names, with q, k, v, gate and up apart: adapters in joined pairs are split. A network that shares the weights of one
in training has them joined in the same way.
"""

import dataclasses
import types
from typing import Any, Mapping, NamedTuple, Optional, Tuple, Type, cast

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters

from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import HF, Architecture
from mindlora.models.architectures.mcore_sizes import DecoderSizes, decoder_sizes
from mindlora.network.serving.multi_lora_dense import JoinsLinears
from mindlora.ops.frozen_linear import FrozenRows
from mindlora.run.checks.finding import refuse
from mindlora.run.checks.mcore import check_served
from mindlora.run.yaml_run import YamlRun
from mindlora.serving.mcore_operators import (
    Dtypes,
    cached_attention,
    dtypes_of,
    largest,
    on_cpu,
    positions_of,
    rms_norm,
)
from mindlora.serving.settings import EngineSettings
from mindlora.serving.stacked_experts import StackedExperts, TransposedExperts


class JoinedRows(NamedTuple):
    """The order of rows in the joined weights of the network in training whose weights a served one shares.

    Attributes:
        by_head (bool): Whether linear_qkv has the rows of q, k and v for each key-value head; else those of all heads
            of q come first, then k's, then v's.
        alternates (bool): Whether the rows of gate and up alternate in linear_fc1; else gate's come first.
    """

    by_head: bool
    alternates: bool

    @classmethod
    def of(cls, model_config: Mapping[str, Any]) -> "JoinedRows":
        """Returns the row orders of the mcore model that the model_config of a YAML describes."""
        return cls(
            by_head=not model_config.get("use_contiguous_weight_layout_attention"),
            alternates=model_config.get("use_interleaved_weight_layout_mlp") is not False,
        )


def build_mcore(
    model_config: Mapping[str, Any], settings: EngineSettings, rows: Optional[JoinedRows] = None
) -> nn.Cell:
    """Builds the network of an mcore YAML with a paged key-value cache, for the device of the context.

    On a CPU it computes in float32, and the weights of linear cells are held in params_dtype; on Ascend it computes in
    compute_dtype. Its parameters have no values until load_base fills them, or, with ``rows``, until it gets those
    of a network in training. Raises ConfigError for models that are not served.
    """
    context = {"device_target": ms.get_context("device_target")}
    run = YamlRun({"use_legacy": False, "context": context, "model": {"model_config": model_config}})
    refuse(check_served(run))
    architecture = cast(Architecture, registry.by_model_type(run.family))
    sizes = decoder_sizes(architecture, dict(model_config))
    if rows is not None:
        # Training always takes the softmax before it chooses experts (TopKRouter of MindFormers).
        sizes = dataclasses.replace(sizes, sums_to_one=bool(model_config.get("norm_topk_prob")))
    with no_init_parameters():
        network = McoreNetwork(sizes, settings, dtypes_of(dict(model_config)), rows)
    network.config.eos_token_id = model_config.get("eos_token_id")
    return network.set_train(False)


class McoreNetwork(nn.Cell):
    """A decoder and its output head, whose weight is the embedding's table if they are tied.

    Attributes:
        config: vocab_size, num_heads, n_kv_heads and eos_token_id, as MindFormers' networks have them.
        parameter_names (str): The naming of its parameters, for load_base.
    """

    parameter_names = HF

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtypes: Dtypes, rows: Optional[JoinedRows]):
        super().__init__()
        self.config = types.SimpleNamespace(
            vocab_size=sizes.vocabulary, num_heads=sizes.heads, n_kv_heads=sizes.kv_heads, eos_token_id=None
        )
        self.model = Decoder(sizes, settings, dtypes, rows)
        self.lm_head = _linear(sizes.hidden, sizes.vocabulary, dtypes)
        if sizes.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def add_flags_custom(self, is_first_iteration: bool) -> None:
        """MindFormers' networks distinguish prompts from decoding by it; this one distinguishes them by its inputs."""


class Decoder(nn.Cell):
    """Tokens to hidden states, over a cache: what ServedStep calls, with MindFormers' names of the inputs.

    Inputs:
        - The arrays of StepInputs, with **tokens** of shape [1, T] or [T, 1]. The mask is not read, since it follows
          from the positions.

    Outputs:
        Tensor [T, hidden], of the dtype in which the network computes.
    """

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtypes: Dtypes, rows: Optional[JoinedRows]):
        super().__init__()
        self.embed_tokens = Embedding(sizes.vocabulary, sizes.hidden, dtypes)
        self.layers = nn.CellList([DecoderLayer(sizes, settings, dtypes, rows) for _ in range(sizes.layers)])
        self.norm = Norm(sizes.hidden, sizes.norm_eps, dtypes)
        self.positions = positions_of(sizes, settings, dtypes)

    def construct(
        self,
        tokens: Tensor,
        batch_valid_length: Tensor,
        block_tables: Tensor,
        slot_mapping: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        q_seq_lens: Optional[Tensor] = None,
        seq_range: Optional[Tensor] = None,
    ) -> Tensor:
        positions = self.positions(batch_valid_length, q_seq_lens, block_tables, slot_mapping, seq_range)
        hidden = self.embed_tokens(ops.reshape(tokens, (-1,)))
        for layer in self.layers:
            hidden = layer(hidden, positions)
        return self.norm(hidden)


class DecoderLayer(nn.Cell):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)); both summands may go through norms."""

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtypes: Dtypes, rows: Optional[JoinedRows]):
        super().__init__()
        self.input_layernorm = Norm(sizes.hidden, sizes.norm_eps, dtypes)
        if rows is None:
            self.self_attn = Attention(sizes, settings, dtypes)
        else:
            self.self_attn = JoinedAttention(sizes, settings, dtypes, rows.by_head)
        self.post_attention_layernorm = Norm(sizes.hidden, sizes.norm_eps, dtypes)
        self.mlp = _feed_forward(sizes, dtypes, rows)
        self.has_output_norms = sizes.has_output_norms
        if self.has_output_norms:
            self.post_self_attn_layernorm = Norm(sizes.hidden, sizes.norm_eps, dtypes)
            self.post_mlp_layernorm = Norm(sizes.hidden, sizes.norm_eps, dtypes)

    def construct(self, x, positions):
        attended = self.self_attn(self.input_layernorm(x), positions)
        hidden = x + (self.post_self_attn_layernorm(attended) if self.has_output_norms else attended)
        fed = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + (self.post_mlp_layernorm(fed) if self.has_output_norms else fed)


def _feed_forward(sizes: DecoderSizes, dtypes: Dtypes, rows: Optional[JoinedRows]) -> nn.Cell:
    if sizes.experts:
        return RoutedFeedForward(sizes, dtypes, StackedExperts if rows is None else TransposedExperts)
    if rows is not None:
        return JoinedFeedForward(sizes.hidden, sizes.inner, dtypes, rows.alternates)
    kind = JoinedFeedForward if sizes.joins_gate_up else FeedForward
    return kind(sizes.hidden, sizes.inner, dtypes)


class CachedAttention(JoinsLinears):
    """Causal attention over the cache, with optional norms of the heads of q and k.

    A subclass computes q, k and v.

    Attributes:
        n_kv_head, head_dim (int): By them adapters on linear_qkv are split for q, k and v.
    """

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtypes: Dtypes):
        super().__init__()
        self.n_kv_head, self.head_dim = sizes.kv_heads, sizes.head_dim
        self.o_proj = _linear(sizes.heads * sizes.head_dim, sizes.hidden, dtypes)
        self.has_norms = sizes.has_head_norms
        if self.has_norms:
            self.q_norm = Norm(sizes.head_dim, sizes.norm_eps, dtypes)
            self.k_norm = Norm(sizes.head_dim, sizes.norm_eps, dtypes)
        self.attention = cached_attention(sizes, settings, dtypes.compute)
        self.reshape = ops.Reshape()

    def construct(self, x: Tensor, positions: Tuple) -> Tensor:
        query, key, value = self.projected(x)
        if self.has_norms:
            query, key = self._by_head(query, self.q_norm), self._by_head(key, self.k_norm)
        return self.o_proj(self.attention(query, key, value, positions))

    def _by_head(self, x, norm):
        return self.reshape(norm(self.reshape(x, (-1, self.head_dim))), x.shape)


class Attention(CachedAttention):
    """CachedAttention with separate cells for q, k and v, and optional biases."""

    joined = ("q_proj", "k_proj", "v_proj")

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtypes: Dtypes):
        super().__init__(sizes, settings, dtypes)
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = _linear(sizes.hidden, queries, dtypes, sizes.has_bias)
        self.k_proj = _linear(sizes.hidden, keys, dtypes, sizes.has_bias)
        self.v_proj = _linear(sizes.hidden, keys, dtypes, sizes.has_bias)

    def projected(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, [T, heads * head_dim] each."""
        return self.together(x) if self.joins else (self.q_proj(x), self.k_proj(x), self.v_proj(x))


class JoinedAttention(CachedAttention):
    """CachedAttention with one cell for q, k and v, as in a network in training.

    Args:
        by_head (bool): As in JoinedRows.
    """

    joined = ()

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtypes: Dtypes, by_head: bool):
        super().__init__(sizes, settings, dtypes)
        self.queries, self.keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.groups = sizes.kv_heads if by_head else 1
        self.linear_qkv = _linear(sizes.hidden, self.queries + 2 * self.keys, dtypes, sizes.has_bias)

    def join_linears(self) -> None:
        """Does nothing, as they are already one cell."""

    def projected(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, [T, heads * head_dim] each."""
        rows = self.reshape(self.linear_qkv(x), (-1, self.groups, (self.queries + 2 * self.keys) // self.groups))
        query = ops.narrow(rows, 2, 0, self.queries // self.groups)
        key = ops.narrow(rows, 2, self.queries // self.groups, self.keys // self.groups)
        value = ops.narrow(rows, 2, (self.queries + self.keys) // self.groups, self.keys // self.groups)
        return (
            self.reshape(query, (-1, self.queries)),
            self.reshape(key, (-1, self.keys)),
            self.reshape(value, (-1, self.keys)),
        )


class FeedForward(JoinsLinears):
    """y = down(silu(gate(x)) * up(x))."""

    joined = ("gate_proj", "up_proj")

    def __init__(self, hidden: int, inner: int, dtypes: Dtypes):
        super().__init__()
        self.gate_proj = _linear(hidden, inner, dtypes)
        self.up_proj = _linear(hidden, inner, dtypes)
        self.down_proj = _linear(inner, hidden, dtypes)
        self.silu = nn.SiLU()

    def construct(self, x: Tensor) -> Tensor:
        gate, up = self.together(x) if self.joins else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.silu(gate) * up)


class JoinedFeedForward(nn.Cell):
    """FeedForward with one cell for gate and up, whose rows follow one another or alternate."""

    def __init__(self, hidden: int, inner: int, dtypes: Dtypes, alternates: bool = False):
        super().__init__()
        self.inner = inner
        self.alternates = alternates
        self.gate_up_proj = _linear(hidden, 2 * inner, dtypes)
        self.down_proj = _linear(inner, hidden, dtypes)
        self.silu = nn.SiLU()

    def construct(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        if self.alternates:
            pairs = ops.reshape(both, (-1, self.inner, 2))
            gate, up = ops.narrow(pairs, 2, 0, 1), ops.narrow(pairs, 2, 1, 1)
            gate, up = ops.reshape(gate, (-1, self.inner)), ops.reshape(up, (-1, self.inner))
            return self.down_proj(self.silu(gate) * up)
        gate, up = ops.narrow(both, -1, 0, self.inner), ops.narrow(both, -1, self.inner, self.inner)
        return self.down_proj(self.silu(gate) * up)


class RoutedFeedForward(nn.Cell):
    """y = sum_j p_j expert_j(x) over the experts j to which the router gives the largest probabilities p_j."""

    def __init__(self, sizes: DecoderSizes, dtypes: Dtypes, kind: Type[StackedExperts]):
        super().__init__()
        self.sums_to_one = sizes.sums_to_one
        self.gate = Router(sizes.experts, sizes.hidden)
        self.experts = kind(sizes.experts, sizes.hidden, sizes.inner, dtypes)
        self.softmax = ops.Softmax(-1)
        self.largest = largest(sizes.chosen)

    def construct(self, x: Tensor) -> Tensor:
        weights, chosen = self.largest(self.softmax(self.gate(x)))
        if self.sums_to_one:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return self.experts(x, chosen, weights)


class Router(nn.Cell):
    """x W^T, the logits of all experts for each token, in float32 for any dtype of the network."""

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.weight = _weight(mstype.float32, experts, hidden)
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, x: Tensor) -> Tensor:
        # A network in training holds the weight as it was loaded.
        return self.product(ops.cast(x, mstype.float32), ops.cast(self.weight, mstype.float32))


class Embedding(nn.Cell):
    """The rows of a table [vocabulary, hidden]."""

    def __init__(self, vocabulary: int, hidden: int, dtypes: Dtypes):
        super().__init__()
        self.weight = _weight(dtypes.table, vocabulary, hidden)
        self.dtype = dtypes.compute
        self.gather = ops.Gather()
        # On a CPU, MindSpore has no operator for the rows of a 16-bit table; training may share one too.
        self.held_rows = FrozenRows() if on_cpu() else None

    def construct(self, tokens: Tensor) -> Tensor:
        if self.held_rows is not None and self.weight.dtype != self.dtype:
            return self.held_rows(tokens, self.weight)
        return ops.cast(self.gather(self.weight, tokens, 0), self.dtype)


class Norm(nn.Cell):
    """rms_norm with its own weight."""

    def __init__(self, size: int, eps: float, dtypes: Dtypes):
        super().__init__()
        self.weight = _weight(dtypes.norm, size)
        self.norm = rms_norm(eps)

    def construct(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight)


def _linear(in_channels: int, out_channels: int, dtypes: Dtypes, has_bias: bool = False) -> nn.Dense:
    cell = nn.Dense(in_channels, out_channels, has_bias=has_bias, dtype=dtypes.linear)
    # The dtype in which it computes, whatever dtype holds its weight.
    cell.dtype = dtypes.compute
    if has_bias and not on_cpu():
        # As in MindFormers' Linear. BiasAdd would be compiled when it first runs.
        cell.bias_add = ops.Add()
    return cell


def _weight(dtype: mstype.Type, *shape: int) -> Parameter:
    return Parameter(initializer("zeros", list(shape), dtype), name="weight", requires_grad=False)
