"""The readable forms of quantized base models; finds the quantized weights of a checkpoint, and decodes them."""

import os
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.formats.safetensors_file import TensorInfo
from mindlora.core.json_files import parse_object
from mindlora.core.numerics.dtypes import BFLOAT16, FLOAT8_E4M3, dtype_name, from_float32
from mindlora.core.text import examples
from mindlora.files.base.quantized import bitsandbytes, compressed_tensors, fp8, gptq, modelslim
from mindlora.files.base.quantized.bitsandbytes import STATE
from mindlora.files.base.quantized.modelslim import DESCRIPTION
from mindlora.files.base.quantized.stored import PackedWeight, StoredTensors, held_form, held_rows


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
    "awq": Form("AWQ", gptq.awq_weights),
    "compressed-tensors": Form(
        "compressed-tensors",
        compressed_tensors.weights,
        ("input_scale", "input_zero_point", "output_scale", *_OF_CACHE),
    ),
    "msmodelslim": Form(
        "msModelSlim", modelslim.weights, ("input_scale", "input_offset", "quant_bias", "deq_scale", *_OF_CACHE)
    ),
}


# The keys of config.json for the settings of a quantization. compressed-tensors' first versions used the second.
SETTINGS = ("quantization_config", "compression_config")
# The key that msModelSlim adds, with a value such as "w8a8".
_MODELSLIMS = "quantize"
# The keys of config.json for the dtype of a model: since transformers 5, and before.
_STATED = ("dtype", "torch_dtype")
CONFIG_NOTE = "The config.json that was written does not say quantization_config any more."
# A separate file beside config.json, written by AutoGPTQ and AutoAWQ -> the method, which it does not always state.
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_DTYPES: Dict[str, np.dtype] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": BFLOAT16}
# Dtypes that only quantized weights have.
_CODES = (FLOAT8_E4M3, *map(np.dtype, ("i1", "u1", "<i4")))


class DecodedWeights(NamedTuple):
    """The quantized weights of a checkpoint.

    Attributes:
        weights (dict): Name -> PackedWeight, under the names of unquantized weights.
        left_out (list of str): Tensors that quantize activations.
        dtype (dtype): The dtype of the decoded weights.
        held (frozenset of str): Weights that are read as one of the tensors that hold them in their own bits.
        field (str): That tensor: "codes", "zeros" or "scales".
    """

    weights: Dict[str, PackedWeight]
    left_out: List[str]
    dtype: np.dtype
    held: FrozenSet[str] = frozenset()
    field: str = ""

    @property
    def forms(self) -> List[str]:
        """The forms of the weights, for messages."""
        return list(dict.fromkeys(weight.form for weight in self.weights.values()))

    def info(self, name: str) -> TensorInfo:
        """Returns the dtype and shape of a decoded weight, or of the tensor that holds it."""
        shape, dtype = self.weights[name].shape, self.dtype
        integers = self.weights[name].integers
        if name in self.held and integers is not None:
            shape, dtype = held_form(integers).layout(*shape)[self.field]
        return TensorInfo(dtype, shape, 0, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)

    def read_rows(self, name: str, begin: int, end: int) -> np.ndarray:
        """Returns rows [begin, end) of a weight, decoded in float32 and rounded once, or of the tensor holding it."""
        if name in self.held:
            return held_rows(self.weights[name], self.field, begin, end)
        return from_float32(self.weights[name].rows(begin, end), self.dtype)

    def renamed(self, file_of: Mapping[str, str]) -> Dict[str, str]:
        """Returns name -> file of a checkpoint's tensors, with each weight in the place of its first part."""
        weight_of = {weight.parts[0]: name for name, weight in self.weights.items()}
        gone = {part for weight in self.weights.values() for part in weight.parts[1:]}.union(self.left_out)
        return {weight_of.get(name, name): file for name, file in file_of.items() if name not in gone}

    def notes(self, held: str = "") -> List[str]:
        """Returns notes on the decoded weights, their dtype (``held``, or the rows') and the tensors left out."""
        to = held or dtype_name(self.dtype)
        notes = []
        if self.held:
            forms = dict.fromkeys(self.weights[name].form for name in self.weights if name in self.held)
            notes.append(f"{len(self.held)} weights are held in their own bits: {'; '.join(forms)}.")
        decoded = [weight for name, weight in self.weights.items() if name not in self.held]
        if decoded:
            forms = dict.fromkeys(weight.form for weight in decoded)
            notes.append(f"{len(decoded)} weights are decoded from {'; '.join(forms)} to {to}.")
        if self.left_out:
            notes.append(
                f"Left out, as of quantized activations, which stay in float: {len(self.left_out)} tensors: "
                f"{examples(self.left_out)}."
            )
        return notes


def decoded_weights(
    stored: StoredTensors, config: Mapping[str, Any], folder: str, is_folder: bool, dtype: Optional[np.dtype]
) -> Optional[DecodedWeights]:
    """Returns the quantized weights of a checkpoint, or None if it has none.

    Args:
        stored (StoredTensors): All tensors of the checkpoint.
        config (mapping): The content of config.json.
        folder (str): The checkpoint's folder.
        is_folder (bool): Whether the checkpoint is the whole folder, which config.json then describes.
        dtype (dtype): The dtype of decoded weights; None for the dtype in config.json, or float32.

    Raises CheckpointError if their form is unknown, or one of their tensors is missing or wrong.
    """
    settings = _settings(stored, config, folder)
    has_codes = any(info.dtype in _CODES for info in stored.tensors.values())
    # A file of another form may lie beside the folder's own.
    if settings is None or not is_folder and not has_codes:
        return None
    form = _form_of(settings, stored.path)
    weights = form.weights(stored, settings)
    if not weights and not is_folder:
        return None
    if not weights:
        raise CheckpointError(
            f"{os.path.join(folder, 'config.json')} says that the weights are in {form.title}, and {stored.path} holds "
            f"none of them: {examples(stored.tensors)}. Copy the model again, or remove quantization_config if the "
            "weights are in float."
        )
    parts = {part for weight in weights for part in weight.parts}
    twice = [weight for weight in weights if weight.name in stored.tensors and weight.name not in weight.parts]
    if twice:
        raise CheckpointError(
            f"{stored.path} holds {twice[0].name}, and {twice[0].parts[0]}, which decodes to it. Copy the model again."
        )
    left_out = [name for name in stored.tensors if name not in parts and name.endswith(form.of_activations)]
    surplus = [
        name
        for name, info in stored.tensors.items()
        if name not in parts and name not in left_out and info.dtype in _CODES
    ]
    if surplus:
        raise CheckpointError(
            f"{stored.path} is in {form.title} and holds {examples(surplus)} as "
            f"{dtype_name(stored.tensors[surplus[0]].dtype)}, which are not of any weight of it. Copy the model again."
        )
    return DecodedWeights({weight.name: weight for weight in weights}, left_out, dtype or _stated_dtype(config))


def decoded_config(config: Mapping[str, Any], dtype: np.dtype) -> Dict[str, Any]:
    """Returns the content of config.json for weights decoded to ``dtype``, without the settings of quantization."""
    content = {key: value for key, value in config.items() if key not in (*SETTINGS, _MODELSLIMS)}
    content.update({key: dtype_name(dtype) for key in _STATED if key in config})
    return content


def _settings(stored: StoredTensors, config: Mapping[str, Any], folder: str) -> Optional[Mapping[str, Any]]:
    """Returns the settings of the quantization, with quant_method; None without any."""
    described = [name for name in sorted(os.listdir(folder)) if name.startswith(DESCRIPTION) and name.endswith(".json")]
    if described:
        return {**_read(os.path.join(folder, described[0])), "quant_method": "msmodelslim"}
    for key in SETTINGS:
        settings = config.get(key)
        if settings is None:
            continue
        if not isinstance(settings, dict):
            raise CheckpointError(f"{folder}/config.json: {key} is {settings!r}, not an object. Copy it again.")
        return settings
    for name, method in _OWN_FILES.items():
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return {"quant_method": method, **_read(path)}
    if any(info.dtype == FLOAT8_E4M3 for info in stored.tensors.values()):
        return {"quant_method": "fp8"}
    if any(STATE in name for name in stored.tensors):
        return {"quant_method": "bitsandbytes"}
    return None


def _read(path: str) -> Dict[str, Any]:
    with open(path, "rb") as file:
        return parse_object(file.read(), path, CheckpointError)


def _form_of(settings: Mapping[str, Any], path: str) -> Form:
    method = settings.get("quant_method")
    # transformers named no method when bitsandbytes' was the only one.
    if method is None and any(settings.get(key) is True for key in ("load_in_4bit", "load_in_8bit")):
        method = "bitsandbytes"
    form = FORMS.get(str(method))
    if form is None:
        known = ", ".join(f"{name} ({form.title})" for name, form in FORMS.items())
        raise CheckpointError(
            f"{path} is quantized by quant_method {method!r}, which cannot be read: {known} can. Take the original "
            "model, or save it in bfloat16 with transformers (dequantize, save_pretrained)."
        )
    return form


def _stated_dtype(config: Mapping[str, Any]) -> np.dtype:
    stated = next((config[key] for key in _STATED if key in config), None)
    return _DTYPES.get(str(stated), np.dtype("<f4"))
