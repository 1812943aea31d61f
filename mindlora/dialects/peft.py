"""PEFT's adapter folder: adapter_config.json and adapter_model.safetensors under Hugging Face names."""
import json
from typing import Dict, Optional, Tuple

from mindlora import names
from mindlora.errors import AdapterFormatError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = {"A": ".lora_A.weight", "B": ".lora_B.weight"}


def tensor_key(path: str, half: str) -> str:
    """Returns the key of half "A" or "B" of the adapter at ``path`` (MindFormers' names)."""
    return _PREFIX + names.to_hugging_face(path) + _SUFFIXES[half]


def parse_key(key: str) -> Optional[Tuple[str, str]]:
    """Returns (path under MindFormers' names, "A" or "B") for a key of PEFT's, or None for any other."""
    if not key.startswith(_PREFIX):
        return None
    for half, suffix in _SUFFIXES.items():
        if key.endswith(suffix):
            return names.to_mindformers(key[len(_PREFIX):-len(suffix)]), half
    return None


def adapter_config(rank: int, alpha: float, dropout: float, target_modules, base_model: Optional[str]) -> Dict:
    """Returns the content of adapter_config.json: the subset of fields that PEFT has kept stable.

    Args:
        rank (int): LoRA rank r.
        alpha (float): lora_alpha.
        dropout (float): lora_dropout.
        target_modules (iterable of str): Names of the adapted cells under MindFormers' names, bare or full paths.
        base_model (str): Name or path of the base model under Hugging Face, or None.

    Returns:
        dict.
    """
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(target_modules),
        "task_type": "CAUSAL_LM",
    }


def read_rank_and_alpha(path: str) -> Tuple[int, float]:
    """Returns (r, lora_alpha) of an adapter_config.json.

    Raises:
        AdapterFormatError: The file is missing, is not a JSON object, lacks one of the two, or declares another
            scale than lora_alpha / r.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError as error:
        raise AdapterFormatError(f"{path} is missing: an adapter folder holds it beside {WEIGHTS_FILE}.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AdapterFormatError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise AdapterFormatError(f"{path} holds a {type(content).__name__} and not a JSON object.")
    for field in ("r", "lora_alpha"):
        if isinstance(content.get(field), bool) or not isinstance(content.get(field), (int, float)) \
                or content[field] <= 0:
            raise AdapterFormatError(f"{path}: {field} is {content.get(field)!r}, it must be a number above 0.")
    for field in ("use_rslora", "alpha_pattern"):
        if content.get(field):
            raise AdapterFormatError(f"{path}: {field} is {content[field]!r}, so the scale is not lora_alpha / r in "
                                     "every cell, which is not supported: its effect would be scaled wrongly.")
    return int(content["r"]), float(content["lora_alpha"])
