"""Qwen3, which MindFormers has as an mcore model alone. Its cells are the Llama's, with norms on q and k."""

import dataclasses

from mindlora.models.architecture import Names
from mindlora.models.llama import LLAMA
from mindlora.models.mcore_sizes import GroupedSizes

# Those of MindFormers' Qwen3Config.
DEFAULTS = {
    "layers": 32, "heads": 32, "kv_heads": 32, "head_dim": 128, "hidden": 4096, "inner": 22016, "vocab": 151936
}  # fmt: skip
HEAD_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")
# The state of dropouts, which MindFormers 1.8 keeps as parameters.
DROPOUT_STATE = ("dropout.seed", "dropout.offset")
_SIZES = GroupedSizes(DEFAULTS, head_norms=HEAD_NORMS)

QWEN3 = dataclasses.replace(
    LLAMA,
    title="Qwen3",
    model_types=("Qwen3ForCausalLM", "Qwen3Config"),
    parameters=(
        *LLAMA.parameters,
        Names("self_attn.q_norm.weight", "", "self_attention.q_layernorm.weight"),
        Names("self_attn.k_norm.weight", "", "self_attention.k_layernorm.weight"),
    ),
    computed=(*LLAMA.computed, *DROPOUT_STATE),
    linear_sizes=_SIZES.linear,
    parameter_sizes=_SIZES.parameters,
    hugging_face_types=("qwen3",),
    hub_names=r"qwen3-(?!next|vl|omni|asr)[a-z-]*[\d.]+b(?!-a[\d.]+b)",
    legacy=False,
)
