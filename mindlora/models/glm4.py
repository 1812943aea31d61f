"""GLM4, which MindFormers has as an mcore model for prediction alone: its names and no more.

Hugging Face joins gate and up too, one after the other, so the cell is one and the same everywhere.
"""

import dataclasses

from mindlora.models.architecture import Names
from mindlora.models.llama import ATTENTION, LLAMA, W_QKV
from mindlora.models.mcore_config import ModelConfig
from mindlora.models.qwen3 import Sizes, dense_sizes

# Those of MindFormers' Glm4Config.
_DEFAULTS = {
    "layers": 40, "heads": 32, "kv_heads": 2, "head_dim": 128, "hidden": 4096, "inner": 13696, "vocab": 151552
}  # fmt: skip


def linear_sizes(model_config: dict) -> Sizes:
    """Returns path -> (out, in) of the linear cells that MindFormers' Glm4ForCausalLM has under ``model_config``."""
    return dense_sizes(ModelConfig(model_config, _DEFAULTS))


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
    linear_sizes=linear_sizes,
    parameter_sizes=None,
    hugging_face_types=("glm4",),
    hub_names=r"glm-(4|z1)-.*0414",
    legacy=False,
    trains=False,
)
