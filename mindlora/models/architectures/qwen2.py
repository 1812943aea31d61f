"""Qwen2 as an mcore model, which MindFormers has for prediction alone.

Its legacy Qwen2 is LlamaForCausalLM with qkv_has_bias: True, so llama.py describes it: the biases of q, k and v are
wq.bias, wk.bias and wv.bias (or w_qkv.bias).
"""

import dataclasses

from mindlora.models.architectures.llama import LLAMA
from mindlora.models.architectures.mcore_sizes import GroupedSizes
from mindlora.models.architectures.qwen3 import DEFAULTS

# Defaults of MindFormers' Qwen2Config, which has no head_dim.
_SIZES = GroupedSizes({**DEFAULTS, "head_dim": None}, norm_dtype="layernorm_compute_dtype")

QWEN2 = dataclasses.replace(
    LLAMA,
    title="Qwen2 (mcore)",
    model_types=("Qwen2ForCausalLM", "Qwen2Config"),
    linear_sizes=_SIZES.linear,
    parameter_sizes=_SIZES.parameters,
    hugging_face_types=(),
    from_hugging_face=None,
    trains=False,
    instead="Qwen2 trains with use_legacy: True, as LlamaForCausalLM with qkv_has_bias: True.",
    served=True,
)
