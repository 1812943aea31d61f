"""PEFT's adapter folder: the keys of its tensors, under Hugging Face names, and the adapter_config.json it writes."""

from collections import Counter
from typing import Dict, List, Optional

from mindlora.adapters.adapter import Adapter, PartKey
from mindlora.adapters.dialects import peft_vera
from mindlora.models import names

NAME = "PEFT"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
_SUFFIXES = {"A": ".lora_A.weight", "B": ".lora_B.weight", "magnitude": ".lora_magnitude_vector", **peft_vera.SUFFIXES}
_EMBEDDING_SUFFIXES = {"A": ".lora_embedding_A", "B": ".lora_embedding_B"}
# Where an adapted module's own weight was saved besides, as PEFT does for embeddings and output heads.
_BASE_LAYER = ".base_layer."


def tensor_key(path: str, part: str, embeds: bool = False) -> str:
    """Returns the key of a part of the adapter at ``path`` (MindFormers' names), which may be an embedding's."""
    for key, place in peft_vera.SHARED_KEYS.items():
        if place == (path, part):
            return key
    return _PREFIX + names.to_hugging_face(path) + (_EMBEDDING_SUFFIXES if embeds else _SUFFIXES)[part]


def parse_key(key: str) -> Optional[PartKey]:
    """Returns (path under MindFormers' names, part) for a key of PEFT's, or None for any other."""
    if key in peft_vera.SHARED_KEYS:
        return peft_vera.SHARED_KEYS[key]
    if not key.startswith(_PREFIX):
        return None
    for part, suffix in (*_SUFFIXES.items(), *_EMBEDDING_SUFFIXES.items()):
        if key.endswith(suffix):
            return names.to_mindformers(key[len(_PREFIX) : -len(suffix)]), part
    return None


def is_embedding_key(key: str) -> bool:
    """Tells whether a key of PEFT's is of an embedding."""
    return key.endswith(tuple(_EMBEDDING_SUFFIXES.values()))


def saved_module_key(name: str, adapted: List[str]) -> str:
    """Returns the key of a parameter that was trained whole (MindFormers' name)."""
    name = names.parameter_to_hugging_face(name) or name
    path, _, leaf = name.rpartition(".")
    return f"{_PREFIX}{path}{_BASE_LAYER if names.to_mindformers(path) in adapted else '.'}{leaf}"


def parse_saved_module_key(key: str) -> Optional[str]:
    """Returns the MindFormers name of a parameter that was saved whole, or None for a key of another kind."""
    if not key.startswith(_PREFIX) or not key.endswith((".weight", ".bias")) or ".lora_" in key:
        return None
    name = key[len(_PREFIX) :].replace(_BASE_LAYER, ".")
    return names.parameter_to_mindformers(name) or name


def adapter_config(adapter: Adapter) -> Dict:
    """Returns the content of adapter_config.json: the subset of fields that PEFT has kept stable.

    Args:
        adapter (Adapter): Its most frequent rank and lora_alpha become r and lora_alpha; other ones stand in
            rank_pattern and alpha_pattern under the modules' full names. Where it has no selection, target_modules
            holds the full name of each adapted module.

    Returns:
        dict.
    """
    modules = {path: names.to_hugging_face(path) for path in adapter.paths}
    patterns = {path: _pattern(name, modules.values()) for path, name in modules.items()}
    ranks = {path: adapter.rank(path) for path in modules}
    alphas = {path: _plain(adapter.alphas[path]) for path in modules}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    config = {
        "alpha_pattern": {patterns[path]: value for path, value in alphas.items() if value != alpha},
        "base_model_name_or_path": adapter.base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "modules_to_save": _modules_to_save(adapter),
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {patterns[path]: value for path, value in ranks.items() if value != rank},
        # A bare cell has no name.
        "target_modules": sorted(filter(None, modules.values())),
        "task_type": "CAUSAL_LM",
        "use_dora": adapter.use_dora,
        "use_rslora": adapter.use_rslora,
        **adapter.selection,
    }
    return peft_vera.of_lora(config, adapter.projection_key) if adapter.use_vera else config


def is_of_module(name: str, module: str) -> bool:
    """Tells whether a parameter (MindFormers' name) is of a module that ``module`` of modules_to_save names.

    PEFT compares the ends of names and not their parts: "norm" is input_layernorm too.
    """
    return _module_of(name).endswith(module)


def _modules_to_save(adapter) -> Optional[List[str]]:
    """Returns the names of the modules that were trained whole; the base's weight of an adapted module is none."""
    adapted = set(adapter.paths)
    return (
        sorted({_module_of(name) for name in adapter.saved_modules if name.rpartition(".")[0] not in adapted}) or None
    )


def _module_of(name) -> str:
    return (names.parameter_to_hugging_face(name) or name).rpartition(".")[0]


def _pattern(name, modules) -> str:
    """Returns what matches ``name`` and none of the other modules; PEFT matches ends of names."""
    return "^" + name if any(other.endswith("." + name) for other in modules) else name


def _plain(alpha):
    return int(alpha) if float(alpha).is_integer() else alpha
