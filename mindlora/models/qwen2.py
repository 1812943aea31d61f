"""Qwen2 as an mcore model, which MindFormers has for prediction alone.

Its legacy Qwen2 is LlamaForCausalLM with qkv_has_bias: True, so llama.py describes it: the biases of q, k and v are
wq.bias, wk.bias and wv.bias (or w_qkv.bias).
"""

import dataclasses
from typing import Dict

from mindlora.models.architecture import ParameterSize
from mindlora.models.llama import LLAMA
from mindlora.models.mcore_config import ModelConfig
from mindlora.models.mcore_parameters import biases_of, parameter_sizes_of
from mindlora.models.qwen3 import DEFAULTS, Sizes, dense_sizes

# Those of MindFormers' Qwen2Config, which has no head_dim.
_DEFAULTS = {**DEFAULTS, "head_dim": None}


def linear_sizes(model_config: dict) -> Sizes:
    """Returns path -> (out, in) of the linear cells that MindFormers' Qwen2ForCausalLM has under ``model_config``."""
    return dense_sizes(ModelConfig(model_config, _DEFAULTS))


def parameter_sizes(model_config: dict) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of all parameters of MindFormers' Qwen2ForCausalLM under ``model_config``."""
    linear = linear_sizes(model_config)
    hidden = linear["output_layer"][1]
    norms = {"input_layernorm": hidden, "pre_mlp_layernorm": hidden}
    sizes = parameter_sizes_of(model_config, linear, norms, "layernorm_compute_dtype")
    return {**sizes, **biases_of(model_config, linear, False)}


QWEN2 = dataclasses.replace(
    LLAMA,
    title="Qwen2 (mcore)",
    model_types=("Qwen2ForCausalLM", "Qwen2Config"),
    linear_sizes=linear_sizes,
    parameter_sizes=parameter_sizes,
    hugging_face_types=(),
    trains=False,
)
