"""Qwen3-MoE, which MindFormers has as an mcore model alone: Qwen3 with routed experts in every layer."""

import dataclasses

from mindlora.models.architecture import Experts, Names
from mindlora.models.mcore_sizes import GroupedSizes
from mindlora.models.qwen3 import HEAD_NORMS, QWEN3

# Those of MindFormers' Qwen3MoeConfig.
_DEFAULTS = {
    "layers": 24, "heads": 32, "kv_heads": 4, "hidden": 2048, "vocab": 151936, "experts": 128, "expert_inner": 768
}  # fmt: skip
EXPERTS = (
    Experts(Names("mlp.experts.gate_up_proj", "mlp.experts.weight1", "mlp.experts.weight1"), ("gate_proj", "up_proj")),
    Experts(Names("mlp.experts.down_proj", "mlp.experts.weight2", "mlp.experts.weight2"), ("down_proj",)),
)
ROUTER = Names("mlp.gate", "mlp.router", "mlp.router")
# What a router counts while it trains.
COUNTS = ("mlp.router.expert_load", "mlp.router.fi_accu", "mlp.tokens_per_expert")
_SIZES = GroupedSizes(_DEFAULTS, head_norms=HEAD_NORMS, has_experts=True)

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    title="Qwen3-MoE",
    model_types=("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    parameters=(*QWEN3.parameters, Names("mlp.gate.weight", "", "mlp.router.weight")),
    computed=(*QWEN3.computed, *COUNTS),
    linear_sizes=_SIZES.linear,
    parameter_sizes=_SIZES.parameters,
    hugging_face_types=("qwen3_moe",),
    hub_names=r"qwen3-(?!next|vl|omni|asr)[a-z-]*[\d.]+b-a[\d.]+b",
    experts=EXPERTS,
    router=ROUTER,
)
