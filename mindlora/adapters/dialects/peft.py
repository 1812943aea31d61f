"""PEFT's adapter folder: the keys of its tensors, under Hugging Face names, and the adapter_config.json it writes."""

import re
from collections import Counter
from typing import Dict, Iterable, List, Optional, Union

from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects import peft_vera
from mindlora.adapters.expert_pairs import stacked_paths
from mindlora.config.variants.registry import PARTS, SHARED_PARTS
from mindlora.config.variants.variant import PartKey
from mindlora.models import diffusion, names
from mindlora.numerics.pair_layouts import EMBEDDING

NAME = "PEFT"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
PREFIX = "base_model.model."
_SUFFIXES = {name: part.peft for name, part in PARTS.items()}
_PARTS_BY_SUFFIX = {suffix: part for suffixes in (_SUFFIXES, EMBEDDING.peft) for part, suffix in suffixes.items()}
_SHARED_PARTS_BY_KEY = {part.peft: name for name, part in SHARED_PARTS.items()}
# In the key of an adapted module's own weight, which PEFT saves for embeddings and output heads.
_BASE_LAYER = ".base_layer."
# PEFT's trainable_token_indices.
_TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
# Keys of a running PEFT model have the adapter's name in them, which PEFT leaves out when it saves.
_NAMED = (
    (re.compile(r"\.(lora_[AB])\.[^.]+\.weight$"), r".\1.weight"),
    (re.compile(r"\.(lora_embedding_[AB]|vera_lambda_[bd])\.(?!weight$)[^.]+$"), r".\1"),
    (re.compile(r"\.(lora_magnitude_vector)\.[^.]+(?:\.weight)?$"), r".\1"),
    (re.compile(r"\.modules_to_save\.[^.]+\.(weight|bias)$"), r".\1"),
    (re.compile(r"^(base_model\.vera_[AB])\.[^.]+$"), r"\1"),
)


def tensor_key(path: str, part: str, embeds: bool = False) -> str:
    """Returns the key of a part of the cell at ``path`` (MindFormers' name), which may be an embedding."""
    if part in SHARED_PARTS:
        return SHARED_PARTS[part].peft
    return PREFIX + names.to_hugging_face(path) + {**_SUFFIXES, **(EMBEDDING.peft if embeds else {})}[part]


def parse_key(key: str) -> Optional[PartKey]:
    """Returns (path under MindFormers' names, part) for a key of PEFT's, or None for any other."""
    key = saved_key(key)
    if key in _SHARED_PARTS_BY_KEY:
        return "", _SHARED_PARTS_BY_KEY[key]
    if not key.startswith(PREFIX):
        return None
    for suffix, part in _PARTS_BY_SUFFIX.items():
        if key.endswith(suffix):
            return names.to_mindformers(key[len(PREFIX) : -len(suffix)]), part
    return None


def saved_key(key: str) -> str:
    """Returns the key that PEFT saves a tensor under, for one with the adapter's name in it; any other is unchanged."""
    for pattern, written in _NAMED:
        key = pattern.sub(written, key)
    return key


def is_megatron_key(key: str) -> bool:
    """Tells whether a key of PEFT's belongs to a cell of Megatron, whose names are mcore's."""
    return key.startswith((f"{PREFIX}decoder.layers.", f"{PREFIX}output_layer."))


def is_embedding_key(key: str) -> bool:
    """Tells whether a key of PEFT's belongs to an embedding."""
    return saved_key(key).endswith(tuple(EMBEDDING.peft.values()))


def saved_module_key(name: str, adapted: Iterable[str]) -> str:
    """Returns the key of a parameter of modules_to_save.

    Args:
        name (str): The parameter under MindFormers' names.
        adapted (list of str): Paths of the adapted cells.
    """
    name = names.parameter_to_hugging_face(name) or name
    path, _, leaf = name.rpartition(".")
    return f"{PREFIX}{path}{_BASE_LAYER if names.to_mindformers(path) in adapted else '.'}{leaf}"


def token_rows_key(path: str) -> str:
    """Returns the key of the trained rows of the embedding at ``path`` (MindFormers' name)."""
    return PREFIX + names.to_hugging_face(path) + _TOKEN_ROWS


def parse_token_rows_key(key: str) -> Optional[str]:
    """Returns the path of the embedding (MindFormers' name) whose trained rows a key is of, or None for any other."""
    known = key.startswith(PREFIX) and key.endswith(_TOKEN_ROWS)
    return names.to_mindformers(key[len(PREFIX) : -len(_TOKEN_ROWS)]) if known else None


def parse_saved_module_key(key: str) -> Optional[str]:
    """Returns the MindFormers name of a parameter of modules_to_save, or None for a key of another kind."""
    key = saved_key(key)
    of_module = key.endswith((".weight", ".bias")) or names.is_balance(key)
    if not key.startswith(PREFIX) or not of_module or ".lora_" in key:
        return None
    name = key[len(PREFIX) :].replace(_BASE_LAYER, ".")
    return names.parameter_to_mindformers(name) or name


def adapter_config(adapter: Adapter) -> Dict:
    """Returns the content of adapter_config.json: the subset of fields that PEFT has kept stable.

    Args:
        adapter (Adapter): Its most frequent rank and lora_alpha become r and lora_alpha; others go into rank_pattern
            and alpha_pattern under the modules' full paths. If it has no selection, target_modules holds the full path
            of each adapted module.

    Returns:
        dict.
    """
    modules = {path: names.to_hugging_face(path) for path in adapter.paths}
    patterns = {path: _pattern(module, modules.values()) for path, module in modules.items()}
    ranks = {path: adapter.rank(path) for path in modules}
    alphas = {path: _plain_number(adapter.alphas[path]) for path in modules}
    stacked = stacked_paths(adapter)
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    config = {
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": _modules_to_save(adapter),
        # PEFT would look for generate() in a UNet.
        "task_type": None if any(map(diffusion.part_of, modules.values())) else "CAUSAL_LM",
        **adapter.peft_fields,
        "alpha_pattern": {patterns[path]: value for path, value in alphas.items() if value != alpha},
        "base_model_name_or_path": adapter.base_model,
        "bias": "none",
        "init_lora_weights": True,
        "lora_alpha": alpha,
        # PEFT loads nothing with a dropout on parameters.
        "lora_dropout": 0.0 if stacked else adapter.dropout,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {patterns[path]: value for path, value in ranks.items() if value != rank},
        # A cell outside a network has no path.
        "target_modules": sorted(module for path, module in modules.items() if module and path not in stacked),
        "use_dora": adapter.use_dora,
        "use_rslora": adapter.use_rslora,
        **({"target_parameters": sorted(modules[path] for path in stacked)} if stacked else {}),
        **adapter.selection,
    }
    return peft_vera.of_lora(config, adapter.projection_key) if adapter.use_vera else config


def is_of_module(name: str, module: str) -> bool:
    """Tells whether a parameter (MindFormers' name) belongs to a module that ``module`` of modules_to_save names.

    PEFT compares the ends of paths as text, not part by part, so "norm" also names input_layernorm. A module that is
    named may hold others: "mlp" is all of an MLP.
    """
    parts = _module_of(name).split(".")
    return any(".".join(parts[:end]).endswith(module) for end in range(1, len(parts) + 1))


def _modules_to_save(adapter: Adapter) -> Optional[List[str]]:
    """Returns the modules of the saved parameters; an adapted module, whose own weight was saved, is not among them."""
    adapted = set(adapter.paths)
    return (
        sorted({_module_of(name) for name in adapter.saved_modules if name.rpartition(".")[0] not in adapted}) or None
    )


def _module_of(name: str) -> str:
    return (names.parameter_to_hugging_face(name) or name).rpartition(".")[0]


def _pattern(module: str, modules: Iterable[str]) -> str:
    """Returns a pattern that matches ``module`` and no other module; PEFT matches the ends of paths."""
    return "^" + module if any(other.endswith("." + module) for other in modules) else module


def _plain_number(alpha: float) -> Union[int, float]:
    return int(alpha) if float(alpha).is_integer() else alpha
