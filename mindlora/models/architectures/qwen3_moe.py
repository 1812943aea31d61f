"""Qwen3-MoE, which MindFormers has as an mcore model alone: Qwen3 with routed experts in every layer."""

import dataclasses
from typing import Any, Dict

from mindlora.models.architectures import qwen3
from mindlora.models.architectures.architecture import Experts, Names
from mindlora.models.architectures.hugging_face import HuggingFaceConfig
from mindlora.models.architectures.mcore_sizes import GroupedSizes
from mindlora.models.architectures.qwen3 import HEAD_NORMS, QWEN3

# Defaults of MindFormers' Qwen3MoeConfig.
_DEFAULTS = {
    "layers": 24, "heads": 32, "kv_heads": 4, "hidden": 2048, "vocab": 151936, "experts": 128, "expert_inner": 768
}  # fmt: skip
EXPERTS = (
    Experts(Names("mlp.experts.gate_up_proj", "mlp.experts.weight1", "mlp.experts.weight1"), ("gate_proj", "up_proj")),
    Experts(Names("mlp.experts.down_proj", "mlp.experts.weight2", "mlp.experts.weight2"), ("down_proj",)),
)
ROUTER = Names("mlp.gate", "mlp.router", "mlp.router")
# The experts are chosen by a softmax over all of them, as in transformers' models.
EXPERTS_BY_SOFTMAX = {
    "moe_grouped_gemm": True,
    "moe_router_pre_softmax": True,
    "routed_scaling_factor": 1.0,
    "router_dense_type": "float32",
    "moe_aux_loss_coeff": 0.0,
}
# A router's counts in training.
COUNTS = ("mlp.router.expert_load", "mlp.router.fi_accu", "mlp.tokens_per_expert")
_SIZES = GroupedSizes(_DEFAULTS, head_norms=HEAD_NORMS, has_experts=True)


def from_hugging_face(config: HuggingFaceConfig) -> Dict[str, Any]:
    """Returns the model_config of MindFormers' Qwen3MoeForCausalLM; as Architecture.from_hugging_face."""
    config.require("decoder_sparse_step", 1, "every layer of MindFormers' Qwen3-MoE has experts")
    config.require("mlp_only_layers", [], "every layer of MindFormers' Qwen3-MoE has experts")
    return {
        **qwen3.from_hugging_face(config),
        "model_type": "qwen3_moe",
        "architectures": "Qwen3MoeForCausalLM",
        # transformers 5 calls it num_local_experts.
        "num_experts": config.count("num_experts", config.get("num_local_experts")),
        "num_experts_per_tok": config.count("num_experts_per_tok"),
        "moe_intermediate_size": config.count("moe_intermediate_size"),
        "norm_topk_prob": config.flag("norm_topk_prob"),
        **EXPERTS_BY_SOFTMAX,
    }


QWEN3_MOE = dataclasses.replace(
    QWEN3,
    title="Qwen3-MoE",
    model_types=("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    parameters=(*QWEN3.parameters, Names("mlp.gate.weight", "", "mlp.router.weight")),
    computed=(*QWEN3.computed, *COUNTS),
    linear_sizes=_SIZES.linear,
    parameter_sizes=_SIZES.parameters,
    hugging_face_types=("qwen3_moe",),
    from_hugging_face=from_hugging_face,
    hub_names=r"qwen3-(?!next|vl|omni|asr)[a-z-]*[\d.]+b-a[\d.]+b",
    experts=EXPERTS,
    router=ROUTER,
    served=True,
)
