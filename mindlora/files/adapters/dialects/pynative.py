"""The folders of MindFormers 2's PyNative trainer: joined names, one rank and one scale, and a manifest.

A folder holds one step. The manifest beside the tensors is MindFormers 2.1's and states the settings of the
adapter, as does the file that mindlora writes there in training; without both, lora_alpha is unknown. A and B of
experts are stored as [experts, in, r] and [experts, r, out].
"""

import dataclasses
import itertools
import logging
import os
import re
from typing import Any, Dict, Iterable, List, Optional

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import (
    AdapterFormatError,
    ConfigError,
    MissingTensorsError,
    RankMismatchError,
    ShapeMismatchError,
)
from mindlora.core.formats import step_folder
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.json_files import write_json
from mindlora.core.numerics.dtypes import scaled
from mindlora.core.numerics.pair_shapes import is_expert_stack, transposed_experts
from mindlora.core.text import shown
from mindlora.files.adapters import initial_pairs
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters.adapter import ALPHA, Adapter
from mindlora.files.adapters.dialects import mcore, peft_config
from mindlora.files.adapters.dialects.dialect import File
from mindlora.files.adapters.dialects.mindformers import PYNATIVE, MindFormers, parse_expert_key, sort, tensor_key
from mindlora.models.architectures import architecture
from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.registry import PYNATIVE_INITIAL, PYNATIVE_PARAMETERS, STORED
from mindlora.models.variants.variant import PartKey

logger = logging.getLogger("mindlora")

MANIFEST = "mindformers_adapter_config.json"
WEIGHTS_FILE = step_folder.file_name(0, 1)
# The settings of a saved adapter; pet_config repeats those of lora_config unchanged.
_OF_LORA_CONFIG = ("lora_rank", "lora_alpha", "lora_dropout")
_OF_PET_CONFIG = (
    *("use_rslora", "rank_pattern", "alpha_pattern", "projection_prng_key", "alora_invocation_tokens"),
    *(variant.field for variant in STORED),
)


class PyNative(MindFormers):
    """The folder of one step."""

    form = "pynative"
    world = architecture.MCORE
    stacks_experts = True
    weights = (WEIGHTS_FILE,)

    def __init__(self) -> None:
        super().__init__(PYNATIVE)

    def weights_in(self, folder: str, names: List[str]) -> Optional[str]:
        files = step_folder.model_files(names)
        if not files or not (MANIFEST in names or step_folder.is_step(names)):
            return None
        whole = len(files) == 1 and step_folder.METADATA not in names and step_folder.is_whole(files[0])
        return files[0] if whole else ""

    def parts_of(self, key: str, part_key: PartKey, array: np.ndarray) -> Dict[PartKey, np.ndarray]:
        if not parse_expert_key(key):
            return {part_key: array}
        if not is_expert_stack(array):
            raise ShapeMismatchError(
                f"{key} is {list(array.shape)}: A of all experts must be [experts, in, r] and B [experts, r, out]. "
                "Save the adapter again."
            )
        return {part_key: transposed_experts(array)}

    def read(self, file: File) -> Adapter:
        adapter = super().read(file)
        # Only mindlora adds zeros, and its files state lora_alpha.
        if file.metadata.get("alphas"):
            mcore.without_zeros(adapter)
        _append_initial_pairs(adapter, file)
        return adapter

    def complete(self, adapter: Adapter, file: File) -> None:
        folder = file.path if os.path.isdir(file.path) else os.path.dirname(file.path)
        manifest, run = (os.path.join(folder, name) for name in (MANIFEST, step_folder.RUN))
        if os.path.lexists(manifest):
            adapter.check_pairs(file.source)
            _take_settings(adapter, manifest, file)
        elif os.path.lexists(run):
            adapter.check_pairs(file.source)
            _take_settings_of_run(adapter, run, file)

    def prepared(self, adapter: Adapter) -> Adapter:
        return _whole_alpha(mcore.one_rank(adapter))

    def write(self, adapter: Adapter, path: str) -> None:
        self.refuse_single_experts(adapter)
        adapter = self.prepared(adapter)
        paths = mcore.mcore_paths(adapter)
        tensors = {}
        for (cell, half), array in adapter.tensors.items():
            if adapter.layout(cell).stacked:
                tensors[f"{paths[cell]}_lora_{half.lower()}"] = transposed_experts(array)
            else:
                tensors[tensor_key(paths[cell], half, PYNATIVE)] = array
        with atomic.replace_folder(path) as folder:
            write_arrays(os.path.join(folder, WEIGHTS_FILE), tensors, adapter_metadata.header(adapter))
            write_json(os.path.join(folder, step_folder.COMMON), step_folder.NEW_RUN)
            write_json(os.path.join(folder, MANIFEST), _manifest(adapter, paths.values()))


def _append_initial_pairs(adapter: Adapter, file: File) -> None:
    """Converts an adapter whose lora_init changed the base in its folder to one for the original base.

    Raises MissingTensorsError or ShapeMismatchError if a pair has no initial pair, or one of another rank.
    """
    stored: Dict[PartKey, str] = {}
    for key, (path, half) in sort(file.keys, PYNATIVE).items():
        if half in PYNATIVE_INITIAL:
            stored[path, half] = key.removesuffix(PYNATIVE_PARAMETERS[half]) + PYNATIVE_INITIAL[half]
    if not set(stored.values()) & set(file.keys):
        return
    for path in adapter.paths:
        initial = []
        for half in PYNATIVE_INITIAL:
            key = stored[path, half]
            if key not in file.keys:
                raise MissingTensorsError(f"{file.source} lacks {key}, half of an initial pair. Copy the folder again.")
            initial.append(file.fetch(key))
            if initial[-1].shape != adapter.tensors[path, half].shape:
                raise ShapeMismatchError(
                    f"{file.source}: {key} is {list(initial[-1].shape)}, but the trained one is "
                    f"{list(adapter.tensors[path, half].shape)}. Copy the folder again."
                )
        initial_pairs.append(adapter, path, *initial)


def target_regex(paths: Iterable[str]) -> str:
    """Returns a target_modules of lora_config that selects exactly the cells at these paths of parameters.

    The trainer searches for it in the path of each cell, which begins with "model.". Once a cell matches, MindFormers
    2.0 looks for its later siblings under that cell's path, without "model.", so both forms of a path match.
    """
    # Layer -> its cells, and then cells -> the layers that have exactly these.
    cells_of: Dict[str, List[str]] = {}
    alone = []
    for path in paths:
        path = re.sub(r"\.weight[12]$", "", path)
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(\w+)", path)
        if match is None:
            alone.append(re.escape(path))
            continue
        cell = rf"{re.escape(match[2])}\.(linear_\w+\.)?{match[3]}"
        if cell not in cells_of.setdefault(match[1], []):
            cells_of[match[1]].append(cell)
    layers_with: Dict[str, List[str]] = {}
    for layer, cells in cells_of.items():
        layers_with.setdefault("|".join(sorted(cells)), []).append(layer)
    groups = [rf"decoder\.layers\.({'|'.join(layers)})\.({cells})" for cells, layers in layers_with.items()]
    return rf"^(model\.)?({'|'.join(itertools.chain(groups, dict.fromkeys(alone)))})$"


def _whole_alpha(adapter: Adapter) -> Adapter:
    """Returns an adapter of one rank and scale with lora_alpha as a whole number and B rescaled to match."""
    alpha = next(iter(adapter.alphas.values()))
    whole = max(1, round(alpha))
    if whole == alpha:
        return adapter
    tensors = {key: scaled(array, alpha / whole) if key[1] == "B" else array for key, array in adapter.tensors.items()}
    return dataclasses.replace(adapter, tensors=tensors, alphas=dict.fromkeys(adapter.paths, float(whole)))


def _manifest(adapter: Adapter, paths: Iterable[str]) -> Dict[str, Any]:
    """Returns the manifest of an adapter of one rank and scale, with which MindFormers 2.1 loads it onto its base."""
    return {
        "format": "mindformers_pynative_lora_adapter_v1",
        "base_load_path": adapter.base_model or "",
        # MindFormers' fingerprint needs the files of the base, which are unknown here: it then warns and continues.
        "base_fingerprint": None,
        "lora_config": {
            "target_modules": target_regex(paths),
            "exclude_layers": None,
            "lora_rank": adapter.rank(adapter.paths[0]),
            "lora_alpha": int(next(iter(adapter.alphas.values()))),
            "lora_dropout": float(adapter.dropout),
            "lora_a_std": 0.01,
            "lora_b_std": 0.0,
        },
        "global_step": 0,
        "consumed_samples": 0,
    }


def _take_settings_of_run(adapter: Adapter, record: str, file: File) -> None:
    """Sets an adapter's settings from the record of the mindlora run that saved it, step_folder.RUN.

    Raises:
        AdapterFormatError: The record does not hold the settings of an adapter.
        RankMismatchError: They have another rank than the tensors.
    """
    content = peft_config.json_object(record)
    lora, pet_config = content.get("lora_config"), content.get("pet_config") or {}
    if not isinstance(lora, dict) or not isinstance(pet_config, dict):
        raise AdapterFormatError(f"{record} lacks the lora_config of the run that saved it. Copy the folder again.")
    settings = {name: lora[name] for name in _OF_LORA_CONFIG if name in lora}
    settings |= {name: pet_config[name] for name in _OF_PET_CONFIG if pet_config.get(name) is not None}
    if adapter.variant.no_scale:
        settings.pop("lora_alpha", None)
    try:
        config = LoraConfig(**settings)
    except ConfigError as error:
        raise AdapterFormatError(f"{record}: {error} Copy the folder again.") from error
    if config.variant is not adapter.variant:
        raise AdapterFormatError(
            f"{record} is of a run of {config.variant.name}, and {file.path} holds {adapter.variant.name}. Give the "
            "file that was saved with these tensors."
        )
    if pet_config.get("modules_to_save"):
        logger.warning(
            "The run that saved %s trained modules_to_save %s too. They are a part of the base in that folder and are "
            "not read with the adapter. Use the PEFT folder that LoraCheckpoint wrote: it holds them.",
            file.path,
            shown(pet_config["modules_to_save"]),
        )
    adapter.dropout = float(config.lora_dropout)
    adapter.projection_key = config.projection_prng_key or 0
    peft_config.check_invocation(config.alora_invocation_tokens, record, file.extras)
    adapter.invocation_tokens = tuple(config.alora_invocation_tokens or ())
    if adapter.variant.no_scale:
        return
    adapter.use_rslora = config.use_rslora
    for path, cell in _cells(file).items():
        expected = config.for_cell(cell)
        if expected.lora_rank != adapter.rank(path):
            raise RankMismatchError(
                f"{record}: the rank of {cell} is {expected.lora_rank}, but its tensors have {adapter.rank(path)}. "
                "Give the file that was saved with these tensors."
            )
        adapter.alphas[path] = float(expected.lora_alpha)


def _cells(file: File) -> Dict[str, str]:
    """Returns path of a pair -> path of its cell in the trainer's model, against which patterns are matched."""
    cells = {}
    for key, (path, _) in sort(file.keys, PYNATIVE).items():
        expert = parse_expert_key(key)
        cells[path] = f"model.{expert[0] if expert else key.rpartition('.')[0]}"
    return cells


def _take_settings(adapter: Adapter, manifest: str, file: File) -> None:
    """Sets an adapter's settings from its manifest, whose rank must be the tensors' rank.

    Raises:
        AdapterFormatError: lora_alpha is not a number above 0, or differs from mindlora's metadata.
        RankMismatchError: lora_rank is not the rank of the tensors.
    """
    content = peft_config.json_object(manifest)
    settings = content.get("lora_config")
    settings = settings if isinstance(settings, dict) else {}
    alpha: Any = settings.get("lora_alpha")
    if alpha not in ALPHA:
        raise AdapterFormatError(f"{manifest}: lora_config.lora_alpha is {shown(alpha)}; it must be a number above 0.")
    other = [value for value in file.metadata.get("alphas", {}).values() if value != alpha]
    if other:
        raise AdapterFormatError(
            f"{manifest}: lora_config.lora_alpha is {shown(alpha)}, and {file.path} says {other[0]:g}. Set "
            "the one that was changed back to the other."
        )
    rank = settings.get("lora_rank")
    for path in adapter.paths:
        if rank is not None and rank != adapter.rank(path):
            raise RankMismatchError(
                f"{manifest}: lora_config.lora_rank is {shown(rank)}, but {path} has rank {adapter.rank(path)}. Give "
                "the manifest that was saved with these tensors."
            )
    # MindFormers writes a lora_alpha even for MiSS, which has no scale.
    if not adapter.variant.no_scale:
        adapter.alphas = dict.fromkeys(adapter.paths, float(alpha))
    dropout = settings.get("lora_dropout", 0.0)
    if dropout in peft_config.DROPOUT:
        adapter.dropout = float(dropout)
    base = content.get("base_load_path")
    adapter.base_model = base if isinstance(base, str) and base else None
