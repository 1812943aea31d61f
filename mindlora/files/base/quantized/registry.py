"""The forms of quantized base models that can be read: what a config.json calls each, and the module that knows it."""

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Tuple

from mindlora.files.base.quantized import bitsandbytes, fp8
from mindlora.files.base.quantized.stored import PackedWeight, StoredTensors


class Form(NamedTuple):
    """A form of quantized weights.

    Attributes:
        title (str): What users call it.
        weights (callable): (StoredTensors, settings) -> the PackedWeight of each weight in this form.
        of_activations (tuple of str): Last parts of the names of tensors by which activations are quantized. They are
            left out: activations stay in float.
    """

    title: str
    weights: Callable[[StoredTensors, Mapping[str, Any]], List[PackedWeight]]
    of_activations: Tuple[str, ...] = ()


# quant_method of quantization_config -> the form.
FORMS: Dict[str, Form] = {
    "fp8": Form("FP8", fp8.weights, ("activation_scale", "input_scale", "k_scale", "v_scale")),
    "bitsandbytes": Form("bitsandbytes", bitsandbytes.weights),
}
