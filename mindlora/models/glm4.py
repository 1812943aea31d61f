"""GLM4, which MindFormers has as an mcore model for prediction alone: its names and sizes.

Hugging Face joins gate and up too, one after the other, so the cell is one and the same everywhere.
"""

import dataclasses

from mindlora.models.architecture import Names
from mindlora.models.llama import ATTENTION, LLAMA, W_QKV
from mindlora.models.mcore_sizes import GroupedSizes

# Those of MindFormers' Glm4Config.
_DEFAULTS = {
    "layers": 40, "heads": 32, "kv_heads": 2, "head_dim": 128, "hidden": 4096, "inner": 13696, "vocab": 151552
}  # fmt: skip
_SIZES = GroupedSizes(
    _DEFAULTS,
    norms=("input_layernorm", "post_self_attn_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    norm_dtype="layernorm_compute_dtype",
    has_bias=True,
)

GLM4 = dataclasses.replace(
    LLAMA,
    title="GLM4",
    model_types=("Glm4ForCausalLM", "Glm4Config"),
    cells=(
        *ATTENTION,
        Names("mlp.gate_up_proj", "feed_forward.w_gate_up", "mlp.linear_fc1"),
        Names("mlp.down_proj", "feed_forward.w2", "mlp.linear_fc2"),
    ),
    joined=(W_QKV,),
    linear_sizes=_SIZES.linear,
    parameter_sizes=_SIZES.parameters,
    hugging_face_types=("glm4",),
    from_hugging_face=None,
    hub_names=r"glm-(4|z1)-.*0414",
    legacy=False,
    trains=False,
)
