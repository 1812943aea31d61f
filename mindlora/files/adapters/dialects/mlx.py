"""mlx-lm's adapter folder: adapters.safetensors under Hugging Face's names, with A [in, r] and B [r, out].

The weight changes by scale (A B)^T, so lora_alpha is scale times the rank. Older versions had an alpha in
lora_parameters too, and multiplied scale by alpha / rank.
"""

import json
import os
import re
from typing import Any, Dict, Optional, Tuple

from mindlora.core.errors import AdapterFormatError, MissingTensorsError, RankMismatchError, UnexpectedTensorsError
from mindlora.core.numerics.pair_shapes import Shape, turned
from mindlora.core.text import listed, shown
from mindlora.files.adapters.adapter import ALPHA, Adapter
from mindlora.files.adapters.dialects import mindformers
from mindlora.files.adapters.dialects.dialect import Dialect, File, Keys
from mindlora.files.adapters.dialects.peft_config import is_of_mlx
from mindlora.models import names
from mindlora.models.variants.dora import DORA
from mindlora.models.variants.variant import PartKey

_CONFIG_FILE = "adapter_config.json"
_NUMBERS = ("rank", "scale", "alpha")
_ENDINGS = {".lora_a": "A", ".lora_b": "B", ".m": DORA.row_norms}


class Mlx(Dialect):
    """The folder, or its file alone, whose names and shapes distinguish it from MindFormers' slora."""

    name = "mlx-lm"
    weights = ("adapters.safetensors",)

    def matches(self, file: File) -> bool:
        if config_beside(file.path) is not None:
            return bool(file.keys)
        return mindformers.detect(file.keys) is mindformers.SLORA and _is_transposed_slora(file)

    def sort(self, file: File) -> Keys:
        part_keys = {}
        unknown = []
        for key in file.keys:
            part_key = parse_key(key)
            if part_key:
                part_keys[key] = part_key
            else:
                unknown.append(key)
        if unknown:
            raise UnexpectedTensorsError(
                f"{file.path} holds tensors that mlx-lm trained in full: {listed(sorted(unknown))}. Only LoRA and DoRA "
                "can be read; fuse the model with mlx_lm.fuse."
            )
        return Keys(part_keys)

    def complete(self, adapter: Adapter, file: File) -> None:
        content = config_beside(file.path)
        if content is None:
            transpose(adapter, file.path)
        else:
            configure(adapter, content, file.path)


def config_beside(weights: str) -> Optional[Dict[str, Any]]:
    """Returns mlx-lm's configuration beside a file of tensors, or None without one."""
    path = os.path.join(os.path.dirname(weights), _CONFIG_FILE)
    if not re.search(r"(^|_)adapters\.safetensors$", os.path.basename(weights)) or not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (ValueError, RecursionError):
        return None
    return content if is_of_mlx(content) else None


def parse_key(key: str) -> Optional[PartKey]:
    """Returns (path under MindFormers' names, part) for a key of mlx-lm's, or None for any other."""
    for ending, part in _ENDINGS.items():
        path = key[: -len(ending)]
        if path and key.endswith(ending):
            return names.to_mindformers(path), part
    return None


def configure(adapter: Adapter, content: Dict[str, Any], source: str) -> None:
    """Transposes an adapter's matrices to Adapter's layout, and sets the settings of mlx-lm's configuration.

    Raises AdapterError if a setting is missing, invalid or contradicts the tensors, or layers are stacks of experts.
    """
    if content.get("fine_tune_type", "lora") not in ("lora", "dora"):
        raise AdapterFormatError(
            f"{source}: fine_tune_type is {shown(content['fine_tune_type'])}, so there is no LoRA in it. Fuse the "
            "model with mlx_lm.fuse."
        )
    rank, scale, dropout = _parameters(content, source)
    transpose(adapter, source)
    adapter.check_pairs(source)
    wrong = [path for path in adapter.paths if adapter.rank(path) != rank]
    if wrong:
        raise RankMismatchError(
            f"{source}: the configuration says rank {rank}, but the tensors have {adapter.rank(wrong[0])}, at "
            f"{listed(wrong)}. Use the configuration that was saved with the tensors."
        )
    if content.get("fine_tune_type") == "dora" and adapter.variant is not DORA:
        raise MissingTensorsError(
            f"{source}: fine_tune_type is 'dora', but the file holds no magnitudes (.m). Copy or save the adapter "
            "again."
        )
    adapter.alphas = dict.fromkeys(adapter.paths, scale * rank)
    adapter.dropout = dropout
    model = content.get("model")
    adapter.base_model = model if isinstance(model, str) else None


def transpose(adapter: Adapter, source: str) -> None:
    """Transposes mlx-lm's matrices to A [r, in] and B [out, r]; raises AdapterFormatError for stacks of experts."""
    tensors = {}
    stacks = []
    for key, array in adapter.tensors.items():
        matrix = turned(array)
        if matrix is None:
            stacks.append(key[0])
        else:
            tensors[key] = matrix
    if stacks:
        raise AdapterFormatError(
            f"{source} holds adapters of stacked experts, which are not read in mlx-lm's form: {listed(stacks)}. Fuse "
            "the model with mlx_lm.fuse."
        )
    adapter.tensors = tensors


def _is_transposed_slora(file: File) -> bool:
    """Returns whether a file of ``...lora_a`` without configuration is mlx-lm's and not MindFormers' slora's.

    The names decide. Where both could have them, the shapes of all pairs decide; if both
    still can be, it raises AdapterFormatError.
    """
    if file.path.endswith(".ckpt"):
        return False
    pairs: Dict[str, Dict[str, Shape]] = {}
    for key in file.keys:
        part_key = mindformers.parse_key(key, mindformers.SLORA)
        if part_key is None:
            continue
        stem = re.sub(r"\.?lora_[ab]$", "", key)
        if names.to_mindformers(stem) == stem:
            return False
        path, part = part_key
        pairs.setdefault(path, {})[part] = file.fetch(key).shape
    shapes = [(pair.get("A", ()), pair.get("B", ())) for pair in pairs.values()]
    matrices = [(a, b) for a, b in shapes if len(a) == len(b) == 2]
    can_be_mlx = all(a[1] == b[0] for a, b in matrices)
    can_be_slora = all(a[0] == b[1] for a, b in matrices)
    if can_be_mlx == can_be_slora:
        raise AdapterFormatError(
            f"{file.path} can be mlx-lm's (A [in, r]) or MindFormers' slora's (A [r, in]): names and shapes fit both. "
            "Put the adapter_config.json that it was saved with beside it."
        )
    return can_be_mlx


def _parameters(content: Dict[str, Any], source: str) -> Tuple[int, float, float]:
    """Returns rank, scale and dropout."""
    parameters = content.get("lora_parameters")
    settings: Dict[str, Any] = parameters if isinstance(parameters, dict) else {}
    dropout = settings.get("dropout", 0.0)
    numbers = {field: settings.get(field, settings.get("rank") if field == "alpha" else None) for field in _NUMBERS}
    for field, value in numbers.items():
        if value not in ALPHA:
            raise AdapterFormatError(
                f"{source}: lora_parameters.{field} of mlx-lm's configuration is {shown(value)}; it must be a number "
                "above 0."
            )
    if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise AdapterFormatError(
            f"{source}: lora_parameters.dropout of mlx-lm's configuration is {shown(dropout)}; it must be in [0, 1)."
        )
    rank, scale, alpha = (float(number or 0) for number in numbers.values())
    return int(rank), scale * (alpha / rank), float(dropout)
