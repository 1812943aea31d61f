"""The readable forms of quantized base models: each one's name in config.json, and its module."""

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Tuple

from mindlora.files.base.quantized import awq, bitsandbytes, compressed_tensors, fp8, gptq, modelslim
from mindlora.files.base.quantized.stored import PackedWeight, StoredTensors


class Form(NamedTuple):
    """A form of quantized weights.

    Attributes:
        title (str): Its name for users.
        weights (callable): (StoredTensors, settings) -> the PackedWeight of each weight in this form.
        of_activations (tuple of str): Last parts of the names of tensors that quantize activations. They are
            left out: activations stay in float.
    """

    title: str
    weights: Callable[[StoredTensors, Mapping[str, Any]], List[PackedWeight]]
    of_activations: Tuple[str, ...] = ()


# Scales of quantized keys and values, which stay in float too.
_OF_CACHE = ("k_scale", "v_scale", "kv_cache_scale", "kv_cache_offset")
# quant_method of quantization_config -> the form. msModelSlim has its own description file.
FORMS: Dict[str, Form] = {
    "fp8": Form("FP8", fp8.weights, ("activation_scale", "input_scale", *_OF_CACHE)),
    "bitsandbytes": Form("bitsandbytes", bitsandbytes.weights),
    "gptq": Form("GPTQ", gptq.weights),
    "awq": Form("AWQ", awq.weights),
    "compressed-tensors": Form(
        "compressed-tensors",
        compressed_tensors.weights,
        ("input_scale", "input_zero_point", "output_scale", *_OF_CACHE),
    ),
    "msmodelslim": Form(
        "msModelSlim", modelslim.weights, ("input_scale", "input_offset", "quant_bias", "deq_scale", *_OF_CACHE)
    ),
}
