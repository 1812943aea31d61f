"""The sizes of MindFormers' mcore models: those that a YAML sets, of linear cells, and of all parameters."""

import dataclasses
import re
from typing import Any, Dict, List, Mapping, Tuple

from mindlora.models.architectures.architecture import MCORE, Architecture, ParameterSize, dtype_of

# Path of a cell -> (out, in).
Sizes = Dict[str, Tuple[int, int]]
_LAYER = re.compile(r"decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer")
# Hugging Face's name, which MindFormers' configurations use, then the other names that its converters accept.
_KEYS: Dict[str, Tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "heads": ("num_attention_heads", "num_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_query_groups"),
    "head_dim": ("head_dim", "kv_channels"),
    "hidden": ("hidden_size",),
    "inner": ("intermediate_size", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "n_routed_experts", "num_moe_experts", "expert_num"),
    "expert_inner": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "shared_expert_num"),
    "shared_inner": ("moe_shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "expert_layers": ("moe_layer_freq",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "qk_head": ("qk_nope_head_dim", "qk_head_dim"),
    "rotary_head": ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    "v_head": ("v_head_dim",),
    "mla_joined": ("mla_qkv_concat",),
    "chosen": ("num_experts_per_tok", "moe_router_topk", "num_experts_chosen"),
    "norm_eps": ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon"),
    "rope_theta": ("rope_theta", "theta", "rotary_base"),
    "further_layers": ("num_nextn_predict_layers", "mtp_num_layers"),
}
_FIRST_LAYER = "decoder.layers.0"
_ATTENTION = f"{_FIRST_LAYER}.self_attention"
# Defaults of MindFormers' configurations.
_DEFAULTS = {"rope_theta": 10000.0, "chosen": 8}
# Rows of the router's weight, and columns of an expert's output.
_ROUTER, _EXPERT_WEIGHTS = "decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.experts.weight1"


class ModelConfig:
    """The model_config of an mcore model, read under each of the names that MindFormers' config converters accept.

    ``defaults`` holds the value of each size that the YAML does not set, under the names of ``_KEYS``.
    """

    def __init__(self, model_config: dict, defaults: Mapping[str, Any]):
        self._model_config = model_config
        self._defaults = defaults

    def __getitem__(self, size: str) -> Any:
        """Returns a size, such as config["heads"]; a null in the YAML counts, as it does in MindFormers."""
        for key in _KEYS[size]:
            if key in self._model_config:
                return self._model_config[key]
        return self._defaults.get(size)


@dataclasses.dataclass(frozen=True)
class GroupedSizes:
    """Sizes of models with equal layers and grouped-query attention.

    Attributes:
        defaults (mapping): The defaults of MindFormers' configuration of the model, as in
            ModelConfig.
        norms (tuple of str): The ends of the paths of the norms of hidden states in a layer.
        head_norms (tuple of str): The ends of the paths of the norms of single heads.
        norm_dtype (str): The key of model_config that holds the dtype of norms.
        has_bias (bool): Whether q, k and v have biases by default.
        has_experts (bool): Whether each layer has routed experts in the place of a feed-forward network.
    """

    defaults: Mapping[str, Any]
    norms: Tuple[str, ...] = ("input_layernorm", "pre_mlp_layernorm")
    head_norms: Tuple[str, ...] = ()
    norm_dtype: str = "params_dtype"
    has_bias: bool = False
    has_experts: bool = False

    def linear(self, model_config: dict) -> Sizes:
        """Returns path -> (out, in) of the linear cells, without routed experts."""
        config = ModelConfig(model_config, self.defaults)
        hidden = config["hidden"]
        heads = config["heads"]
        head_dim = _head_dim(config)
        key_value = (config["kv_heads"] or heads) * head_dim
        layer = {
            "self_attention.linear_qkv": (heads * head_dim + 2 * key_value, hidden),
            "self_attention.linear_proj": (hidden, heads * head_dim),
        }
        if not self.has_experts:
            layer |= feed_forward_sizes("mlp", config["inner"], config)
        return in_layers([layer] * config["layers"], config)

    def parameters(self, model_config: dict) -> Dict[str, ParameterSize]:
        """Returns name -> ParameterSize of all parameters except routers' counts."""
        config = ModelConfig(model_config, self.defaults)
        linear = self.linear(model_config)
        norms = {**dict.fromkeys(self.norms, config["hidden"]), **dict.fromkeys(self.head_norms, _head_dim(config))}
        sizes = parameter_sizes_of(model_config, linear, norms, self.norm_dtype)
        sizes |= biases_of(model_config, linear, self.has_bias)
        if self.has_experts:
            for layer in layers_of(linear):
                sizes |= expert_sizes(f"{layer}.mlp", config, dtype_of(model_config, "params_dtype"))
        return sizes


def _head_dim(config: ModelConfig) -> int:
    return config["head_dim"] or config["hidden"] // config["heads"]


def feed_forward_sizes(holder: str, inner: int, config: ModelConfig) -> Sizes:
    """Returns path -> (out, in) of the linear cells of the feed-forward network in ``holder``, ``inner`` wide."""
    hidden = config["hidden"]
    return {f"{holder}.linear_fc1": (2 * inner, hidden), f"{holder}.linear_fc2": (hidden, inner)}


def expert_sizes(holder: str, config: ModelConfig, dtype: str) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of the router and the stacked experts that the cell at path ``holder`` holds."""
    hidden = config["hidden"]
    experts = config["experts"]
    inner = config["expert_inner"]
    shapes = {"router.weight": (experts, hidden)}
    shapes |= {"experts.weight1": (experts * hidden, 2 * inner), "experts.weight2": (experts * inner, hidden)}
    return {f"{holder}.{end}": ParameterSize(shape, dtype) for end, shape in shapes.items()}


def in_layers(layers: List[Sizes], config: ModelConfig) -> Sizes:
    """Returns path -> (out, in) of a model's linear cells, given the cells of each layer."""
    sizes: Sizes = {}
    for number, cells in enumerate(layers):
        sizes |= {f"decoder.layers.{number}.{end}": size for end, size in cells.items()}
    return {**sizes, "output_layer": (config["vocab"], config["hidden"])}


def parameter_sizes_of(
    model_config: dict,
    linear: Mapping[str, Tuple[int, int]],
    norms: Mapping[str, int],
    norm_dtype: str = "params_dtype",
    ties: bool = True,
) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of linear cells, norms, embedding and output head.

    Args:
        linear (dict): Path -> (out, in) of the model's linear cells.
        norms (dict): End of a path -> size of each norm in a layer.
        norm_dtype (str): The key of ``model_config`` that holds the dtype of norms.
        ties (bool): Whether the model obeys tie_word_embeddings.
    """
    dtype = dtype_of(model_config, "params_dtype")
    norm = dtype_of(model_config, norm_dtype)
    table = linear["output_layer"]
    sizes = {"embedding.word_embeddings.weight": ParameterSize(table, dtype)}
    for layer in layers_of(linear):
        sizes |= {f"{layer}.{name}.weight": ParameterSize((size,), norm) for name, size in norms.items()}
    sizes["decoder.final_layernorm.weight"] = ParameterSize(table[1:], norm)
    tied = ties and bool(model_config.get("tie_word_embeddings"))
    for path, size in linear.items():
        if path != "output_layer" or not tied:
            sizes[f"{path}.weight"] = ParameterSize(size, dtype)
    return sizes


def biases_of(model_config: dict, linear: Mapping[str, Tuple[int, int]], default: bool) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of the biases of linear cells, of which ``linear`` is path -> (out, in).

    ``default`` says whether q, k and v have biases unless the YAML sets it.
    """
    every_cell = model_config.get("add_bias_linear")
    stated = (model_config[key] for key in ("qkv_has_bias", "attention_bias", "add_qkv_bias") if key in model_config)
    attention = next(stated, default)
    dtype = dtype_of(model_config, "params_dtype")
    return {
        f"{path}.bias": ParameterSize(size[:1], dtype)
        for path, size in linear.items()
        if path != "output_layer" and (every_cell or attention and path.endswith("linear_qkv"))
    }


def layers_of(linear: Mapping[str, object]) -> Tuple[str, ...]:
    """Returns the paths of the layers that have linear cells."""
    return tuple(dict.fromkeys(match.group() for match in map(_LAYER.match, linear) if match))


@dataclasses.dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a model with equal layers: grouped-query attention, then a gated feed-forward network.

    Attributes:
        inner (int): Width of the feed-forward network, or of each expert.
        experts, chosen (int): Routed experts of a layer, and the number that a token is sent to; 0 without experts.
        sums_to_one (bool): Whether the weights of the chosen experts are normalized to sum to 1.
        has_bias (bool): Whether q, k and v have biases.
        has_head_norms (bool): Whether the heads of q and k go through norms.
        rotary (int): Leading elements of a head that positions rotate.
        interleaved (bool): Whether neighbours among them form a pair.
        has_output_norms (bool): Whether the outputs of attention and feed-forward network go through norms.
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
            # A softmax over the chosen alone equals the softmax over all, normalized to sum to 1.
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
        has_output_norms=f"{_FIRST_LAYER}.post_mlp_layernorm.weight" in parameters,
        joins_gate_up=architecture.in_hugging_face(f"{_FIRST_LAYER}.mlp.linear_fc1"),
        **experts,
    )
