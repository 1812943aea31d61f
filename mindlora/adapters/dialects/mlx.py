"""mlx-lm's adapter folder: adapters.safetensors under Hugging Face's names, with A [in, r] and B [r, out].

The weight changes by scale (A B)^T, so lora_alpha is scale times the rank. Older versions had an alpha in
lora_parameters too, and multiplied scale by alpha / rank.
"""

import json
import os
import re
from typing import Any, Dict, Iterable, List, Optional, Tuple

from mindlora.adapters.adapter import Adapter, is_alpha
from mindlora.common.text import listed, shown
from mindlora.config.variants.dora import DORA
from mindlora.config.variants.variant import PartKey
from mindlora.errors import AdapterFormatError, MissingTensorsError, RankMismatchError, UnexpectedTensorsError
from mindlora.models import names
from mindlora.numerics.pair_layouts import turned

NAME = "mlx-lm"
WEIGHTS_FILE = "adapters.safetensors"
_CONFIG_FILE = "adapter_config.json"
_MARKS = ("fine_tune_type", "lora_parameters", "num_layers", "lora_layers")
_NUMBERS = ("rank", "scale", "alpha")
_ENDINGS = {".lora_a": "A", ".lora_b": "B", ".m": DORA.row_norms}


def is_config(content: object) -> bool:
    """Tells whether the content of an adapter_config.json is mlx-lm's."""
    return isinstance(content, dict) and "peft_type" not in content and sum(mark in content for mark in _MARKS) >= 2


def config_beside(weights: str) -> Optional[Dict[str, Any]]:
    """Returns mlx-lm's configuration beside a file of tensors, or None if there is none of its own."""
    path = os.path.join(os.path.dirname(weights), _CONFIG_FILE)
    if not re.search(r"(^|_)adapters\.safetensors$", os.path.basename(weights)) or not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (ValueError, RecursionError):
        return None
    return content if is_config(content) else None


def parse_key(key: str) -> Optional[PartKey]:
    """Returns (path under MindFormers' names, part) for a key of mlx-lm's, or None for any other."""
    found = ((key[: -len(ending)], part) for ending, part in _ENDINGS.items() if key.endswith(ending))
    return next(((names.to_mindformers(path), part) for path, part in found if path), None)


def sort(keys: Iterable[str], path: str) -> Dict[str, PartKey]:
    """Returns key -> PartKey of a file that mlx-lm's configuration describes.

    Raises:
        UnexpectedTensorsError: The file holds tensors that are not of adapters.
    """
    found = {key: parse_key(key) for key in keys}
    unknown = sorted(key for key, part_key in found.items() if not part_key)
    if unknown:
        raise UnexpectedTensorsError(
            f"{path} holds tensors that mlx-lm trained in full: {listed(unknown)}. Only LoRA and DoRA can be read; "
            "fuse the model with mlx_lm.fuse."
        )
    return {key: part_key for key, part_key in found.items() if part_key}


def complete(adapter: Adapter, content: Dict[str, Any], source: str) -> None:
    """Turns an adapter's matrices as Adapter has them, and gives it the settings of mlx-lm's configuration.

    Args:
        adapter (Adapter): Changed in place.
        content (dict): The configuration.
        source (str): The folder, for messages.

    Raises:
        AdapterFormatError: A setting is missing or invalid, or the layers are stacks of experts.
        RankMismatchError: The tensors have another rank than the configuration says.
        MissingTensorsError: DoRA was trained, and there are no magnitudes.
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
            f"{source}: the configuration says rank {rank}, and the tensors have {adapter.rank(wrong[0])}, at "
            f"{listed(wrong)}."
        )
    if content.get("fine_tune_type") == "dora" and not adapter.use_dora:
        raise MissingTensorsError(f"{source}: fine_tune_type is 'dora', and the file holds no magnitudes (.m).")
    adapter.alphas, adapter.dropout = dict.fromkeys(adapter.paths, scale * rank), dropout
    model = content.get("model")
    adapter.base_model = model if isinstance(model, str) else None


def transpose(adapter: Adapter, source: str) -> None:
    """Turns matrices in mlx-lm's orientation into A [r, in] and B [out, r].

    Raises:
        AdapterFormatError: Some are stacks of experts.
    """
    found = {key: turned(array) for key, array in adapter.tensors.items()}
    stacks = [path for (path, _), array in found.items() if array is None]
    if stacks:
        raise AdapterFormatError(
            f"{source} holds adapters of stacked experts, which are not read in mlx-lm's form: {listed(stacks)}. Fuse "
            "the model with mlx_lm.fuse."
        )
    adapter.tensors = {key: array for key, array in found.items() if array is not None}


def is_transposed(pairs: Dict[str, Dict[str, Tuple[int, ...]]]) -> Optional[bool]:
    """Tells from the shapes of all pairs whether they are mlx-lm's (True), the transposes of these (False), or either.

    Args:
        pairs (dict): path -> {"A": shape, "B": shape}.
    """
    matrices: List[Tuple[Tuple[int, ...], Tuple[int, ...]]] = [
        (pair["A"], pair["B"]) for pair in pairs.values() if len(pair.get("A", ())) == len(pair.get("B", ())) == 2
    ]
    mlx = all(a[1] == b[0] for a, b in matrices)
    ours = all(a[0] == b[1] for a, b in matrices)
    return None if mlx == ours else mlx


def _parameters(content: Dict[str, Any], source: str) -> Tuple[int, float, float]:
    """Returns rank, scale and dropout."""
    found = content.get("lora_parameters")
    settings: Dict[str, Any] = found if isinstance(found, dict) else {}
    dropout = settings.get("dropout", 0.0)
    numbers = {field: settings.get(field, settings.get("rank") if field == "alpha" else None) for field in _NUMBERS}
    for field, value in numbers.items():
        if not is_alpha(value):
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
