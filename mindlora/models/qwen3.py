"""Qwen3, which MindFormers has as an mcore model alone. Its cells are the Llama's, with norms on q and k."""

import dataclasses
from typing import Dict, List, Tuple

from mindlora.models.architecture import Names, ParameterSize
from mindlora.models.llama import LLAMA
from mindlora.models.mcore_config import ModelConfig
from mindlora.models.mcore_parameters import biases_of, parameter_sizes_of

Sizes = Dict[str, Tuple[int, int]]
# Those of MindFormers' Qwen3Config.
DEFAULTS = {
    "layers": 32, "heads": 32, "kv_heads": 32, "head_dim": 128, "hidden": 4096, "inner": 22016, "vocab": 151936
}  # fmt: skip
# The state of dropouts, which MindFormers 1.8 keeps as parameters.
DROPOUT_STATE = ("dropout.seed", "dropout.offset")
NORMS = (
    Names("self_attn.q_norm.weight", "", "self_attention.q_layernorm.weight"),
    Names("self_attn.k_norm.weight", "", "self_attention.k_layernorm.weight"),
)


def attention_sizes(config: ModelConfig) -> Sizes:
    """Returns end of a path -> (out, in) of the linear cells of the attention in a layer."""
    hidden, heads = config["hidden"], config["heads"]
    head_dim = config["head_dim"] or hidden // heads
    key_value = (config["kv_heads"] or heads) * head_dim
    return {
        "self_attention.linear_qkv": (heads * head_dim + 2 * key_value, hidden),
        "self_attention.linear_proj": (hidden, heads * head_dim),
    }


def linear_sizes(model_config: dict) -> Sizes:
    """Returns path -> (out, in) of the linear cells that MindFormers' Qwen3ForCausalLM has under ``model_config``."""
    return dense_sizes(ModelConfig(model_config, DEFAULTS))


def dense_sizes(config: ModelConfig) -> Sizes:
    """Returns path -> (out, in) of the linear cells of an mcore model without experts."""
    hidden, inner = config["hidden"], config["inner"]
    feed_forward = {"mlp.linear_fc1": (2 * inner, hidden), "mlp.linear_fc2": (hidden, inner)}
    return in_layers([{**attention_sizes(config), **feed_forward}] * config["layers"], config)


def in_layers(layers: List[Sizes], config: ModelConfig) -> Sizes:
    """Returns path -> (out, in) of a model's linear cells, given those of each layer."""
    sizes = {
        f"decoder.layers.{number}.{end}": size for number, cells in enumerate(layers) for end, size in cells.items()
    }
    return {**sizes, "output_layer": (config["vocab"], config["hidden"])}


def parameter_sizes(model_config: dict) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of all parameters of MindFormers' Qwen3ForCausalLM under ``model_config``."""
    return sizes_of_parameters(model_config, ModelConfig(model_config, DEFAULTS), linear_sizes(model_config))


def sizes_of_parameters(model_config: dict, config: ModelConfig, linear: Sizes) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of linear cells, norms, embedding and output head of a Qwen3 or a Qwen3-MoE.

    Args:
        model_config (dict): The node of a MindFormers YAML.
        config (ModelConfig): The same, with the model's defaults.
        linear (dict): Path -> (out, in) of its linear cells.
    """
    hidden, head_dim = config["hidden"], config["head_dim"] or config["hidden"] // config["heads"]
    norms = {"input_layernorm": hidden, "pre_mlp_layernorm": hidden}
    norms |= {"self_attention.q_layernorm": head_dim, "self_attention.k_layernorm": head_dim}
    sizes = parameter_sizes_of(model_config, linear, norms)
    return {**sizes, **biases_of(model_config, linear, False)}


QWEN3 = dataclasses.replace(
    LLAMA,
    title="Qwen3",
    model_types=("Qwen3ForCausalLM", "Qwen3Config"),
    parameters=(*LLAMA.parameters, *NORMS),
    computed=(*LLAMA.computed, *DROPOUT_STATE),
    linear_sizes=linear_sizes,
    parameter_sizes=parameter_sizes,
    hugging_face_types=("qwen3",),
    hub_names=r"qwen3-(?!next|vl|omni|asr)[a-z-]*[\d.]+b(?!-a[\d.]+b)",
    legacy=False,
)
