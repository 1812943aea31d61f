"""DecoderSizes: what a network must know to compute an mcore model, from the model's record and a YAML."""

import dataclasses
from typing import Any, Dict

from mindlora.models.architectures.architecture import MCORE, Architecture
from mindlora.models.architectures.mcore_sizes import ModelConfig, layers_of

_LAYER = "decoder.layers.0"
_ATTENTION = f"{_LAYER}.self_attention"
# Those of MindFormers' configurations.
_DEFAULTS = {"rope_theta": 10000.0, "chosen": 8}
# Rows of the router's weight, and columns of what an expert gives back.
_ROUTER, _EXPERT_WEIGHTS = "decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.experts.weight1"


@dataclasses.dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a model whose layers are alike: attention in groups of heads, then a gated feed-forward network.

    Attributes:
        inner (int): Width of the feed-forward network, or of each expert.
        experts, chosen (int): Routed experts of a layer, and how many of them a token goes to; 0 without.
        sums_to_one (bool): Whether the weights of those are made to sum to 1.
        has_bias (bool): Whether q, k and v have biases.
        has_head_norms (bool): Whether the heads of q and k go through norms.
        rotary (int): Elements of a head that are turned by its position, from its beginning on.
        interleaved (bool): Whether neighbours among them are turned together.
        has_output_norms (bool): Whether what attention and feed-forward network give goes through norms.
        joins_gate_up (bool): Whether gate and up are one cell, the rows of gate before those of up.
        tied (bool): Whether the output head is the embedding.
    """

    layers: int
    vocabulary: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    has_bias: bool
    has_head_norms: bool
    tied: bool
    experts: int = 0
    chosen: int = 0
    sums_to_one: bool = False
    rotary: int = 0
    interleaved: bool = False
    has_output_norms: bool = False
    joins_gate_up: bool = False


def decoder_sizes(architecture: Architecture, model_config: Dict[str, Any]) -> DecoderSizes:
    """Returns the sizes of the mcore model that ``model_config`` of a YAML describes."""
    config = ModelConfig(model_config, {**_DEFAULTS, "norm_eps": architecture.norm_eps})
    linear = architecture.linear_sizes(model_config)
    parameters = architecture.parameter_sizes(model_config)
    joined, output = linear[f"{_ATTENTION}.linear_qkv"], linear[f"{_ATTENTION}.linear_proj"]
    attention = architecture.attention(model_config, {"w_qkv": joined, "wo": output})
    head_dim = attention.output // attention.heads
    vocabulary, hidden = linear["output_layer"]
    experts: Dict[str, Any] = {}
    if _ROUTER in parameters:
        inner = parameters[_EXPERT_WEIGHTS].shape[1] // 2
        experts = {
            "experts": parameters[_ROUTER].shape[0],
            "chosen": int(config["chosen"]),
            # A softmax over the chosen alone gives what the softmax over all does, made to sum to 1.
            "sums_to_one": bool(model_config.get("norm_topk_prob") or not model_config.get("moe_router_pre_softmax")),
        }
    else:
        inner = linear["decoder.layers.0.mlp.linear_fc2"][1]
    factor = model_config.get("partial_rotary_factor", architecture.rotary.factor)
    return DecoderSizes(
        layers=len(layers_of(linear)),
        vocabulary=vocabulary,
        hidden=hidden,
        inner=inner,
        heads=attention.heads,
        kv_heads=attention.keys // head_dim,
        head_dim=head_dim,
        norm_eps=float(config["norm_eps"]),
        rope_theta=float(config["rope_theta"]),
        has_bias=f"{_ATTENTION}.linear_qkv.bias" in parameters,
        has_head_norms=f"{_ATTENTION}.q_layernorm.weight" in parameters,
        tied=architecture.head_weight(MCORE) not in parameters,
        rotary=int(head_dim * factor),
        interleaved=architecture.rotary.interleaved,
        has_output_norms=f"{_LAYER}.post_mlp_layernorm.weight" in parameters,
        joins_gate_up=architecture.in_hugging_face(f"{_LAYER}.mlp.linear_fc1"),
        **experts,
    )
