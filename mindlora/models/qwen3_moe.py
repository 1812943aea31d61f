"""Qwen3-MoE, which MindFormers has as an mcore model alone: Qwen3 with routed experts in every layer."""

import dataclasses
from typing import Dict

from mindlora.models.architecture import Experts, Names, ParameterSize
from mindlora.models.mcore_config import ModelConfig
from mindlora.models.mcore_parameters import dtype_of, layers_of
from mindlora.models.qwen3 import QWEN3, Sizes, attention_sizes, in_layers, sizes_of_parameters

# Those of MindFormers' Qwen3MoeConfig.
DEFAULTS = {
    "layers": 24, "heads": 32, "kv_heads": 4, "hidden": 2048, "vocab": 151936, "experts": 128, "expert_inner": 768
}  # fmt: skip
EXPERTS = (
    Experts(Names("mlp.experts.gate_up_proj", "mlp.experts.weight1", "mlp.experts.weight1"), ("gate_proj", "up_proj")),
    Experts(Names("mlp.experts.down_proj", "mlp.experts.weight2", "mlp.experts.weight2"), ("down_proj",)),
)
ROUTER = Names("mlp.gate", "mlp.router", "mlp.router")
# What a router counts while it trains.
COUNTS = ("mlp.router.expert_load", "mlp.router.fi_accu")


def linear_sizes(model_config: dict) -> Sizes:
    """Returns path -> (out, in) of the linear cells of MindFormers' Qwen3MoeForCausalLM; routed experts are none."""
    config = ModelConfig(model_config, DEFAULTS)
    return in_layers([attention_sizes(config)] * config["layers"], config)


def parameter_sizes(model_config: dict) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of all parameters of MindFormers' Qwen3MoeForCausalLM but a router's counts."""
    config = ModelConfig(model_config, DEFAULTS)
    linear = linear_sizes(model_config)
    sizes = sizes_of_parameters(model_config, config, linear)
    for layer in layers_of(linear):
        sizes |= expert_sizes(f"{layer}.mlp", config, dtype_of(model_config, "params_dtype"))
    return sizes


def expert_sizes(holder: str, config: ModelConfig, dtype: str) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of a layer's router and stacked experts.

    Args:
        holder (str): Path of the cell that holds them.
        config (ModelConfig): The model's configuration.
        dtype (str): Their dtype.
    """
    hidden, experts, inner = config["hidden"], config["experts"], config["expert_inner"]
    shapes = {"router.weight": (experts, hidden)}
    shapes |= {"experts.weight1": (experts * hidden, 2 * inner), "experts.weight2": (experts * inner, hidden)}
    return {f"{holder}.{end}": ParameterSize(shape, dtype) for end, shape in shapes.items()}


QWEN3_MOE = dataclasses.replace(
    QWEN3,
    title="Qwen3-MoE",
    model_types=("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    parameters=(*QWEN3.parameters, Names("mlp.gate.weight", "", "mlp.router.weight")),
    computed=(*QWEN3.computed, *COUNTS),
    linear_sizes=linear_sizes,
    parameter_sizes=parameter_sizes,
    hugging_face_types=("qwen3_moe",),
    hub_names=r"qwen3-(?!next|vl|omni|asr)[a-z-]*[\d.]+b-a[\d.]+b",
    experts=EXPERTS,
    router=ROUTER,
)
