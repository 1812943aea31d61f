"""PEFT's adapter folder: its tensors under Hugging Face's names, and adapter_config.json; KaSA, and stacked experts.

KaSA's folders have W' x + scale B diag(s) A x, where W' lacks the r smallest singular values of W. s [r] is
<module>.lora_diag. It is multiplied into B, so what remains is a pair for a changed base, as PiSSA's is. (Wang et al.,
KaSA: Knowledge-Aware Singular-Value Adaptation of Large Language Models, 2024)

With LoRA on parameters (target_parameters), PEFT adapts the stacked experts of a layer. A module whose parameter is
adapted is wrapped, and wrapped again for its next parameter, in the order in which it declares them. With gate_up_proj
and down_proj, the second one's tensors are at <experts>.lora_A.weight and the first one's at
<experts>.base_layer.lora_A.weight. The experts' A are joined by rows, [experts * r, in], and their B by columns,
[out, r * experts], where the columns of one expert are r * experts + expert.
"""

import dataclasses
import os
import re
from collections import Counter
from typing import Dict, Iterable, List, Optional, Tuple, Union

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import (
    AdapterError,
    AdapterFormatError,
    MissingTensorsError,
    ShapeMismatchError,
    UnexpectedTensorsError,
)
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.json_files import write_json
from mindlora.core.numerics import initializers
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.pair_shapes import EMBEDDING, flatten_experts, unflatten_experts
from mindlora.core.text import listed
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft_config as peft_selection
from mindlora.files.adapters.dialects import peft_tuners
from mindlora.files.adapters.dialects.dialect import Dialect, File, Keys, unknown_tensors
from mindlora.files.adapters.dialects.peft_config import PeftConfig
from mindlora.files.adapters.expert_pairs import STACKED, stacked_paths
from mindlora.models import names
from mindlora.models.architectures import architecture, diffusion
from mindlora.models.architectures.joined_rows import PartAfterPart, RowsInTurn, join_rows, split_rows
from mindlora.models.variants.registry import PARTS, SHARED_PARTS
from mindlora.models.variants.variant import PartKey

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
    (re.compile(r"\.(lora_embedding_[AB])\.(?!weight$)[^.]+$"), r".\1"),
    (re.compile(r"\.(lora_magnitude_vector)\.[^.]+(?:\.weight)?$"), r".\1"),
    (re.compile(r"\.modules_to_save\.[^.]+\.(weight|bias)$"), r".\1"),
    (re.compile(r"^(base_model\.vera_[AB])\.[^.]+$"), r"\1"),
    *((re.compile(rf"({re.escape(part.peft)})\.(?!weight$)[^.]+$"), r"\1") for part in PARTS.values() if part.size),
)
# Megatron's cells, as MindSpeed-LLM trains them, have mcore's names.
_MEGATRON = (f"{PREFIX}decoder.layers.", f"{PREFIX}output_layer.")
# PEFT adds both to modules_to_save of every classifier, and a model has one of them.
_CLASSIFIERS = ("classifier", "score")
_DIAGONAL, _B = ".lora_diag", ".lora_B.weight"
_WRAPPED = ".base_layer"


class Peft(Dialect):
    """PEFT's folder, which vLLM and others serve too."""

    name = "PEFT"
    form = "peft"
    world = architecture.HF
    holds_modules = True
    weights = (WEIGHTS_FILE, PICKLE_FILE)

    def matches(self, file: File) -> bool:
        return any(map(parse_key, file.keys))

    def read(self, file: File) -> Adapter:
        return super().read(without_diagonals(file))

    def sort(self, file: File) -> Keys:
        part_keys: Dict[str, PartKey] = {}
        saved_modules: Dict[str, str] = {}
        token_rows: Dict[str, str] = {}
        unknown = []
        for key in file.keys:
            part_key = parse_key(key)
            parameter = parse_saved_module_key(key)
            embedding = parse_token_rows_key(key)
            if part_key:
                part_keys[key] = part_key
            elif parameter:
                saved_modules[key] = parameter
            elif embedding:
                token_rows[key] = embedding
            else:
                unknown.append(key)
        if unknown:
            file.extras.refuse(unknown_tensors(unknown, file))
        return Keys(part_keys, saved_modules, token_rows)

    def parts_of(self, key: str, part_key: PartKey, array: np.ndarray) -> Dict[PartKey, np.ndarray]:
        return {part_key: _turned(part_key[1], array)}

    def is_embedding(self, key: str, path: str) -> bool:
        return saved_key(key).endswith(tuple(EMBEDDING.peft.values()))

    def complete(self, adapter: Adapter, file: File) -> None:
        part_keys = [parse_key(key) for key in file.keys if key.startswith(_MEGATRON)]
        for path in dict.fromkeys(part_key[0] for part_key in part_keys if part_key):
            reorder_megatron_rows(adapter, path)

    def configure(self, adapter: Adapter, config: PeftConfig, file: File) -> None:
        """Applies adapter_config.json to an adapter, and checks its pairs and saved modules against it.

        Raises AdapterError if a tensor is missing, unexpected or of another rank, or biases of the base were trained.
        """
        source = file.source
        restore_stacks(adapter, config, source)
        adapter.check_pairs(source, {path: config.rank_of(path) for path in adapter.paths})
        adapter.alphas = {path: config.alpha_of(path) for path in adapter.paths}
        adapter.selection = dict(config.selection)
        adapter.peft_fields = dict(config.kept)
        adapter.initializer = config.initializer
        adapter.invocation_tokens = config.invocation_tokens
        _take_token_rows(adapter, config, source)
        _check_saved_modules(adapter, config, source)
        biases = [name for name in adapter.saved_modules if name.endswith(".bias")]
        if config.bias != "none" and biases:
            message = (
                f"{source}: bias is {config.bias!r}, so biases of the base were trained ({listed(biases)}), which is "
                "not supported: it must be 'none'."
            )
            file.extras.refuse(AdapterFormatError(message))

    def write(self, adapter: Adapter, path: str) -> None:
        joined = [cell for cell in adapter.paths if names.joined_parts(cell) and not names.in_hugging_face(cell)]
        if joined:
            raise AdapterError(
                f"PEFT has no joined modules such as {listed(joined)}. Split them first: give the model's n_kv_heads "
                "and head size."
            )
        tensors = {}
        for (cell, part), array in flattened_stacks(adapter, adapter.stored_tensors()).items():
            tensors[tensor_key(cell, part, cell in adapter.embeddings)] = _turned(part, array)
        for name, array in adapter.saved_modules.items():
            tensors[saved_module_key(name, adapter.paths)] = array
        for cell, (_, rows) in adapter.token_rows.items():
            tensors[token_rows_key(cell)] = rows
        # The AutoModel for which the adapter was trained has no other names.
        prefix = PREFIX + adapter.bare_prefix
        tensors = {
            PREFIX + key[len(prefix) :] if key.startswith(prefix) else key: array for key, array in tensors.items()
        }
        with atomic.replace_folder(path) as folder:
            write_arrays(os.path.join(folder, WEIGHTS_FILE), tensors, adapter_metadata.peft_header(adapter))
            write_json(os.path.join(folder, CONFIG_FILE), adapter_config(adapter))


def _turned(part: str, array: np.ndarray) -> np.ndarray:
    """Converts a part between mindlora's layout and PEFT's, in either direction."""
    return np.ascontiguousarray(array.T) if part in PARTS and PARTS[part].turned else array


def tensor_key(path: str, part: str, embeds: bool = False) -> str:
    """Returns the key of a part of the cell at ``path`` (MindFormers' name), which may be an embedding."""
    if part in SHARED_PARTS:
        return SHARED_PARTS[part].peft
    return PREFIX + names.to_hugging_face(path) + {**_SUFFIXES, **(EMBEDDING.peft if embeds else {})}[part]


def parse_key(key: str) -> Optional[PartKey]:
    """Returns (path under MindFormers' names, part) for a key of PEFT, or None for other keys."""
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
    """Returns the key under which PEFT saves a tensor: without the adapter's name, if the key has it."""
    for pattern, written in _NAMED:
        key = pattern.sub(written, key)
    return key


def saved_module_key(name: str, adapted: Iterable[str]) -> str:
    """Returns the key of a parameter of modules_to_save; ``adapted`` are the paths of the adapted cells."""
    name = names.parameter_to_hugging_face(name) or name
    path, _, leaf = name.rpartition(".")
    return f"{PREFIX}{path}{_BASE_LAYER if names.to_mindformers(path) in adapted else '.'}{leaf}"


def token_rows_key(path: str) -> str:
    """Returns the key of the trained rows of the embedding at ``path`` (MindFormers' name)."""
    return PREFIX + names.to_hugging_face(path) + _TOKEN_ROWS


def parse_token_rows_key(key: str) -> Optional[str]:
    """Returns the path of the embedding (MindFormers' name) whose trained rows a key holds, or None for other keys."""
    is_token_rows = key.startswith(PREFIX) and key.endswith(_TOKEN_ROWS)
    return names.to_mindformers(key[len(PREFIX) : -len(_TOKEN_ROWS)]) if is_token_rows else None


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

    The most frequent rank and lora_alpha become r and lora_alpha; others go into rank_pattern and alpha_pattern under
    the modules' full paths. Without a selection, or with one that no longer matches the tensors, such as
    after experts were stacked, target_modules holds the full path of each adapted module.
    """
    modules = {path: names.to_hugging_face(path).removeprefix(adapter.bare_prefix) for path in adapter.paths}
    patterns = {path: _pattern(module, modules.values()) for path, module in modules.items()}
    ranks = {path: adapter.rank(path) for path in modules}
    alphas = {path: _plain_number(adapter.alphas[path]) for path in modules}
    stacked = stacked_paths(adapter)
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    # A cell outside a network has no path.
    plain = sorted(module for path, module in modules.items() if module and path not in stacked)
    parameters = sorted(modules[path] for path in stacked)
    is_selected = peft_selection.selects(adapter.selection, plain, parameters)
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
        "target_modules": plain,
        "use_rslora": adapter.use_rslora,
        **({"target_parameters": parameters} if stacked else {}),
        **({"alora_invocation_tokens": list(adapter.invocation_tokens)} if adapter.invocation_tokens else {}),
        **(adapter.selection if is_selected else {}),
    }
    return peft_tuners.of_lora(config, adapter)


def is_of_module(name: str, module: str) -> bool:
    """Returns whether a parameter (MindFormers' name) belongs to a module that ``module`` of modules_to_save names.

    PEFT compares the ends of paths as text, not part by part, so "norm" also names input_layernorm. A named module may
    hold others: "mlp" is all of an MLP.
    """
    parts = _module_of(name).split(".")
    return any(".".join(parts[:end]).endswith(module) for end in range(1, len(parts) + 1))


def _modules_to_save(adapter: Adapter) -> Optional[List[str]]:
    """Returns the modules of the saved parameters, without adapted modules whose own weight was saved."""
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


def reorder_megatron_rows(adapter: Adapter, path: str) -> None:
    """Reorders the rows of the pair of Megatron's linear_fc1 to MindFormers' order; other pairs stay as they are.

    Megatron has all rows of gate before those of up, and MindFormers alternates them. The rows of linear_qkv are the
    same in both. Raises ShapeMismatchError if the rows cannot be divided into two parts.
    """
    if not names.joined_parts(path) or not isinstance(names.joined_cell(path).layout, RowsInTurn):
        return
    for part in ("B", *adapter.variant.row_parts):
        rows = adapter.tensors.get((path, part))
        if rows is None:
            continue
        sizes = PartAfterPart().sizes(len(rows))
        if not sizes:
            raise ShapeMismatchError(
                f"{part} of {path} has {len(rows)} rows; it must have an even number, those of gate and of up."
            )
        adapter.tensors[path, part] = join_rows(split_rows(rows, sizes), len(rows) // 2)


def _take_token_rows(adapter: Adapter, config: PeftConfig, path: str) -> None:
    """Joins the rows of embeddings in the file and their indices in the configuration."""
    token_rows: Dict[str, Tuple[np.ndarray, np.ndarray]] = {}
    for module, indices in config.token_rows.items():
        cells = [cell for cell in adapter.token_rows if f".{names.to_hugging_face(cell)}".endswith(f".{module}")]
        for cell in cells:
            _, rows = adapter.token_rows[cell]
            if len(rows.shape) != 2 or len(rows) != len(indices):
                raise ShapeMismatchError(
                    f"{path}: trainable_token_indices names {len(indices)} rows of {module}, but the file holds "
                    f"{list(rows.shape)} for it. Save the adapter with PEFT again."
                )
            token_rows[cell] = np.asarray(indices, np.int64), rows
        # PEFT saves the rows of tied embeddings once.
        is_tied = any(other != module and same == indices for other, same in config.token_rows.items())
        if not cells and not is_tied:
            raise MissingTensorsError(
                f"{path}: trainable_token_indices names rows of {module}, but the file holds none of it. Save the "
                "adapter with PEFT again."
            )
    undeclared = sorted(set(adapter.token_rows) - set(token_rows))
    if undeclared:
        raise UnexpectedTensorsError(
            f"{path} holds rows of {listed(undeclared)}, of which trainable_token_indices says nothing. Save the "
            "adapter with PEFT again."
        )
    adapter.token_rows = token_rows


def _check_saved_modules(adapter: Adapter, config: PeftConfig, path: str) -> None:
    """Checks that the file holds the modules of modules_to_save, and no other module's tensors."""
    declared = config.modules_to_save
    present = set()
    undeclared = []
    adapted = set(adapter.paths)
    for name in adapter.saved_modules:
        modules = [module for module in declared if is_of_module(name, module)]
        present.update(modules)
        is_bias = config.bias != "none" and name.endswith(".bias")
        # PEFT saves the weights of adapted modules, embeddings and heads without naming them.
        cell = name.rpartition(".")[0]
        unnamed = cell in adapted or names.is_embedding(cell) or names.is_output_head(cell)
        if not (modules or is_bias or unnamed):
            undeclared.append(name)
    has_classifier = not present.isdisjoint(_CLASSIFIERS)
    for module in declared:
        if module not in present and not (has_classifier and module in _CLASSIFIERS):
            raise MissingTensorsError(
                f"{path}: modules_to_save names {module!r}, but the file holds no tensor of it. Copy or save the "
                "adapter again, or remove the module from modules_to_save."
            )
    if undeclared:
        raise UnexpectedTensorsError(
            f"{path} holds tensors that are neither LoRA's nor of modules_to_save: {listed(sorted(undeclared))}. "
            "Remove them, or name their modules in modules_to_save."
        )


def without_diagonals(file: File) -> File:
    """Returns a file of KaSA with each module's lora_diag multiplied into its B, in float32; other files unchanged.

    Raises:
        UnexpectedTensorsError: A module has only one of lora_diag and B.
        ShapeMismatchError: lora_diag does not have a number for each column of B.
    """
    if file.config is None or file.config.initializer != initializers.KASA:
        return file
    modules = [key[: -len(_DIAGONAL)] for key in file.keys if key.endswith(_DIAGONAL)]
    adapted = [key[: -len(_B)] for key in file.keys if key.endswith(_B)]
    odd = sorted(set(modules).symmetric_difference(adapted))
    if odd:
        raise UnexpectedTensorsError(
            f"{file.path} holds one of lora_diag and lora_B of {odd[0]} alone. Save the adapter with PEFT again."
        )
    diagonals: Dict[str, str] = {module + _B: module + _DIAGONAL for module in modules}

    def fetch(key: str) -> np.ndarray:
        array = file.fetch(key)
        if key not in diagonals:
            return array
        diagonal = file.fetch(diagonals[key])
        if len(array.shape) != 2 or diagonal.shape != array.shape[1:]:
            raise ShapeMismatchError(
                f"{file.path}: {diagonals[key]} is {list(diagonal.shape)}, and {key} {list(array.shape)}; it must have "
                "a number for each column. Save the adapter with PEFT again."
            )
        return to_float32(array) * to_float32(diagonal)

    keys = [key for key in file.keys if not key.endswith(_DIAGONAL)]
    return dataclasses.replace(file, keys=keys, fetch=fetch)


def flattened_stacks(adapter: Adapter, tensors: Dict[PartKey, np.ndarray]) -> Dict[PartKey, np.ndarray]:
    """Returns ``tensors`` with stacked pairs in PEFT's layout: under the paths of their modules, as matrices."""
    modules = module_paths(stacked_paths(adapter))
    return {
        (modules.get(path, path), part): flatten_experts(part, array) if path in modules else array
        for (path, part), array in tensors.items()
    }


def restore_stacks(adapter: Adapter, config: PeftConfig, source: str) -> None:
    """Stacks the pairs of an adapter read from PEFT's form where its configuration says so.

    Raises AdapterFormatError if a module's tensors do not belong to the parameters that target_parameters names, and
    ShapeMismatchError if they do not divide into experts of the configured rank.
    """
    targets = config.selection.get("target_parameters")
    if not isinstance(targets, list):
        return
    modules: Dict[str, List[str]] = {}
    for path in adapter.paths:
        module = path
        while module.endswith(_WRAPPED):
            module = module[: -len(_WRAPPED)]
        modules.setdefault(module, []).append(path)
    for module, paths in modules.items():
        parameters = _parameters_of(module, targets)
        if parameters is None:
            continue
        wrapped = [module + _WRAPPED * depth for depth in reversed(range(len(parameters)))]
        if sorted(paths) != sorted(wrapped):
            raise AdapterFormatError(
                f"{source}: target_parameters names {listed(parameters)}, for which the file would hold pairs at "
                f"{listed(wrapped)}, and it holds {listed(sorted(paths))}. Save the adapter with PEFT again."
            )
        for parameter, path in zip(parameters, wrapped):
            _unflatten(adapter, path, names.to_mindformers(parameter), config.rank_of(parameter), source)


def module_paths(paths: List[str]) -> Dict[str, str]:
    """Returns path of a stacked pair -> path of PEFT's module around its weight, under Hugging Face's names.

    Raises AdapterError if a module has several adapted parameters whose order of declaration is unknown.
    """
    by_module: Dict[str, Dict[str, str]] = {}
    for path in paths:
        module, _, parameter = names.to_hugging_face(path).rpartition(".")
        by_module.setdefault(module, {})[parameter] = path
    wrapped = {}
    for module, parameters in by_module.items():
        unknown = [f"{module}.{parameter}" for parameter in parameters if parameter not in STACKED]
        if unknown and len(parameters) > 1:
            raise AdapterError(
                f"PEFT's form holds the pairs of {listed(f'{module}.{name}' for name in parameters)} in the order in "
                f"which the module declares them, but that is not known for {listed(unknown)}. Write format "
                "'mindformers'."
            )
        ordered = [name for name in STACKED if name in parameters] or list(parameters)
        for depth, parameter in enumerate(reversed(ordered)):
            wrapped[parameters[parameter]] = module + _WRAPPED * depth
    return wrapped


def _parameters_of(module: str, targets: List[str]) -> Optional[List[str]]:
    """Returns the parameters of ``module`` that ``targets`` names, in the order of declaration; None if it has none.

    A parameter called weight belongs to a linear cell, whose pair is like any other.
    """
    leaves = list(dict.fromkeys(target.rpartition(".")[2] for target in targets))
    ordered = [leaf for leaf in STACKED if leaf in leaves] + [leaf for leaf in leaves if leaf not in STACKED]
    parameters = [f"{module}.{leaf}" for leaf in ordered if leaf != "weight"]
    # A name alone refers to experts; otherwise it would match every module.
    named = [target for target in targets if "." in target or module.endswith("experts")]
    ends = tuple(f".{target}" for target in named)
    return [path for path in parameters if f".{path}".endswith(ends)] or None


def _unflatten(adapter: Adapter, path: str, stacked: str, rank: int, source: str) -> None:
    """Builds the stacked pair at ``stacked`` from the matrices at ``path``."""
    flat = {half: adapter.tensors.pop((path, half), None) for half in "AB"}
    for half, array in flat.items():
        if array is None:
            continue
        stack = unflatten_experts(half, array, rank)
        if stack is None:
            raise ShapeMismatchError(
                f"{source}: {half} of {stacked} is {list(array.shape)}, which does not divide into experts of rank "
                f"{rank}. Check r and rank_pattern in the configuration."
            )
        adapter.tensors[stacked, half] = stack
