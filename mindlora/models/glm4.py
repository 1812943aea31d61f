"""GLM4, which MindFormers has as an mcore model for prediction alone: its names and sizes.

Hugging Face joins gate and up too, one after the other, so the cell is one and the same everywhere.
"""

import dataclasses
from typing import Dict

from mindlora.models.architecture import Names, ParameterSize
from mindlora.models.llama import ATTENTION, LLAMA, W_QKV
from mindlora.models.mcore_config import ModelConfig
from mindlora.models.mcore_parameters import biases_of, parameter_sizes_of
from mindlora.models.qwen3 import Sizes, dense_sizes

# Those of MindFormers' Glm4Config.
_DEFAULTS = {
    "layers": 40, "heads": 32, "kv_heads": 2, "head_dim": 128, "hidden": 4096, "inner": 13696, "vocab": 151552
}  # fmt: skip


def linear_sizes(model_config: dict) -> Sizes:
    """Returns path -> (out, in) of the linear cells that MindFormers' Glm4ForCausalLM has under ``model_config``."""
    return dense_sizes(ModelConfig(model_config, _DEFAULTS))


def parameter_sizes(model_config: dict) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of all parameters of MindFormers' Glm4ForCausalLM under ``model_config``."""
    linear = linear_sizes(model_config)
    hidden = linear["output_layer"][1]
    norms = ("input_layernorm", "post_self_attn_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    sizes = parameter_sizes_of(model_config, linear, dict.fromkeys(norms, hidden), "layernorm_compute_dtype")
    return {**sizes, **biases_of(model_config, linear, True)}


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
    parameter_sizes=parameter_sizes,
    hugging_face_types=("glm4",),
    hub_names=r"glm-(4|z1)-.*0414",
    legacy=False,
    trains=False,
)
