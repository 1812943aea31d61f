"""Checks that the checkpoints of a run of the PyNative trainer exist and belong to the model and the adapter."""

import math
import os
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from mindlora.core.errors import LoraError
from mindlora.core.formats import step_folder
from mindlora.core.numerics import initializers
from mindlora.core.text import examples, shown
from mindlora.files.adapters.dialects import peft_config
from mindlora.files.adapters.dialects.pynative import MANIFEST
from mindlora.files.base.mcore_view import BIAS, MCORE_BIAS, with_end
from mindlora.models.architectures.classifiers import is_of_head
from mindlora.models.description import Description
from mindlora.models.variants.registry import LORA, PYNATIVE_INITIAL, PYNATIVE_STACKED, VARIANTS
from mindlora.run.checks.finding import Finding, error, warning
from mindlora.run.checks.pynative_adapter import variant_of

_LOAD = "checkpoint.load_path"
_BASE = "checkpoint.base_load_path"
_A_ENDINGS = (".lora_a", "_lora_a")
_ENDINGS = (*_A_ENDINGS, ".lora_b", "_lora_b")
_INITIAL = tuple(PYNATIVE_INITIAL.values())
_STACKED = tuple(PYNATIVE_STACKED.values())

# Name of a tensor -> its shape.
Shapes = Dict[str, Tuple[int, ...]]


def check_checkpoint(
    config: Mapping[str, Any],
    network: Optional[Description],
    selected: Optional[List[str]],
    version: Optional[Tuple[int, int]],
) -> Iterator[Finding]:
    """Yields faults of load_path and base_load_path of a YAML with a lora_config.

    Args:
        config (mapping): The content of the YAML.
        network (Description): Its model; None if it is unknown.
        selected (list of str): Paths of the cells that get LoRA; None if they are unknown.
        version (tuple of int): MindFormers' version; None if it is unknown.
    """
    checkpoint = config.get("checkpoint") or {}
    paths = {key: str(checkpoint.get(key.rpartition(".")[2]) or "") for key in (_LOAD, _BASE)}
    if checkpoint.get("save_trainable_only") and not paths[_BASE]:
        found = "save_trainable_only saves an adapter without its base, and base_load_path must say which one that is."
        yield error(_BASE, found)
    if not any(paths.values()):
        unset = ", and MindFormers 2.0 leaves the weights under LoRA as the memory was" if version == (2, 0) else ""
        yield warning(_LOAD, f"No checkpoint is loaded: the base under LoRA is random{unset}.", f"Set {_LOAD}.")
        return
    named = {key: path for key, path in paths.items() if path}
    absent = [
        key for key, path in named.items() if not (os.listdir(path) if os.path.isdir(path) else os.path.exists(path))
    ]
    for key in absent:
        found = f"{paths[key]} is empty or not there, and the run would go on with random weights."
        yield error(key, found, "Correct the path.")
    if absent:
        return
    try:
        of_another_form: List[Finding] = []
        for key in filter(paths.get, paths):
            of_another_form += _check_form(key, paths[key])
        if of_another_form:
            yield from of_another_form
            return
        stored: Shapes = {}
        for path in filter(None, paths.values()):
            stored |= _shapes_at(path)
        if paths[_LOAD]:
            folder = step_folder.last_step(paths[_LOAD])
            yield from _check_step(checkpoint, folder, paths[_BASE])
            yield from _check_adapter(config, stored, selected, folder)
        if network:
            quantizes = bool((config.get("pet_config") or {}).get("quantize_base"))
            yield from _check_base(network, stored, quantizes)
    except LoraError as refusal:
        yield error(_LOAD, str(refusal))


def _check_form(key: str, path: str) -> Iterator[Finding]:
    if not os.path.isdir(path):
        yield error(key, f"{path} is a file, but the trainer loads a folder.", "Name the folder that it is in.")
        return
    folder = step_folder.last_step(path)
    if any(name.endswith(("model.safetensors", "model.safetensors.index.json")) for name in os.listdir(folder)):
        yield warning(
            key,
            f"{folder} is in Hugging Face's form, of which the trainer loads no Qwen3 and no DeepSeek-V3.",
            f"Convert it: mindlora base convert {folder} base --to pynative",
        )


def _shapes_at(path: str) -> Shapes:
    """Returns the shapes of the model's tensors in a checkpoint, under mcore's names."""
    with step_folder.StepFolder(step_folder.last_step(path)) as step:
        return {with_end(name, BIAS, MCORE_BIAS): info.shape for name, info in step.tensors.items()}


def _check_step(checkpoint: Mapping[str, Any], folder: str, base: str) -> Iterator[Finding]:
    """Yields a finding for each file that the trainer needs besides the tensors of load_path."""
    names = os.listdir(folder)
    if step_folder.COMMON not in names:
        found = f"{folder} has no {step_folder.COMMON}, which the trainer reads beside a checkpoint."
        yield error(_LOAD, found, "Copy the folder again, or write it with mindlora base convert --to pynative.")
    if not checkpoint.get("no_load_optim") and not any("opt-" in name for name in names):
        found = f"{folder} has no state of the optimizer, which a resumed run loads."
        yield error("checkpoint.no_load_optim", found, "Set checkpoint.no_load_optim: True to begin with its weights.")
    if MANIFEST in names and not base:
        found = f"{folder} is an adapter without its base, which base_load_path must name."
        yield error(_BASE, found, "MindFormers 2.0 has no such key: copy the adapter into the folder of its base.")


def _check_adapter(
    config: Mapping[str, Any], stored: Shapes, selected: Optional[List[str]], folder: str
) -> Iterator[Finding]:
    """Yields differences between the adapter in a checkpoint and the YAML's."""
    lora = config["lora_config"]
    parts = {name: shape for name, shape in stored.items() if name.endswith(_ENDINGS) and not name.endswith(_INITIAL)}
    if not parts:
        return
    if any(name.endswith(_STACKED) for name in parts) or (config.get("pet_config") or {}).get("adapters"):
        yield from _check_several(config, parts, selected, folder)
        return
    other = list(_check_same_variant(config, parts, folder))
    if other:
        yield from other
        return
    yield from _check_beginning(config, any(name.endswith(_INITIAL) for name in stored), folder)
    rank = lora.get("lora_rank", 8)
    # A is [r, in], or [experts, in, r] for experts.
    ranks = {shape[0 if len(shape) == 2 else -1] for name, shape in parts.items() if name.endswith(_A_ENDINGS)}
    others = sorted(ranks - {rank})
    if others and not (config.get("pet_config") or {}).get("rank_pattern"):
        found = f"{folder} holds an adapter of rank {', '.join(map(str, others))}, but lora_rank is {rank}."
        yield error("lora_config.lora_rank", found, f"Set lora_rank: {others[0]}.")
    yield from _check_same_scale(config, folder)
    if selected is not None:
        yield from _check_same_cells({name.rpartition(".")[0] for name in parts}, set(selected), folder)


def _check_several(
    config: Mapping[str, Any], parts: Shapes, selected: Optional[List[str]], folder: str
) -> Iterator[Finding]:
    """Yields differences between the adapters in a checkpoint and the YAML's, if either has several."""
    key = "pet_config.adapters"
    asked = (config.get("pet_config") or {}).get("adapters")
    stacked = {name: shape for name, shape in parts.items() if name.endswith(_STACKED)}
    if len(stacked) < len(parts):
        found = f"{folder} holds one adapter, and pet_config.adapters names {len(asked or ())}."
        yield error(key, found, "Load a base without an adapter, or remove adapters.")
        return
    there = next(iter(stacked.values()))[0]
    if not asked:
        found = f"{folder} holds {there} adapters that trained in one run, but pet_config has no adapters."
        yield error(key, found, "Set those of that run, or begin with the folder of one of them in adapter_path.")
        return
    if len(asked) != there:
        found = f"{folder} holds {there} adapters, and pet_config.adapters names {len(asked)}."
        yield error(key, found, "Name those of that run, in their order.")
        return
    record = os.path.join(folder, step_folder.RUN)
    content = peft_config.json_object(record) if os.path.isfile(record) else {}
    saved = (content.get("pet_config") or {}).get("adapters")
    if saved is not None and saved != [dict(node) for node in asked]:
        found = f"{folder} was saved by a run with other adapters, {shown(saved)}, than these, {shown(asked)}."
        yield error(key, found, "Name those of that run, in their order and with their settings.")
    if selected is not None:
        yield from _check_same_cells({name.rpartition(".")[0] for name in stacked}, set(selected), folder)


def _check_same_variant(config: Mapping[str, Any], parts: Shapes, folder: str) -> Iterator[Finding]:
    """Yields an error if the adapter in a checkpoint is another variant of LoRA than the YAML's."""
    pet_config = config.get("pet_config") or {}
    here = variant_of(pet_config)
    names = {name.rpartition(".")[2] for name in parts}
    # Unlike files of adapters, a checkpoint also holds the parts of AdaLoRA.
    there = next((variant for variant in VARIANTS if not names.isdisjoint(_pynative_names(variant))), LORA)
    if there is not here:
        variant, advice = (here, "Remove it") if there is LORA else (there, f"Set {there.field}: True")
        found = f"{folder} holds an adapter of {there.name}, but this run trains {here.name}: it would be left out."
        yield error(f"pet_config.{variant.field}", found, f"{advice}, or load a base without an adapter.")


def _pynative_names(variant):
    return {part.pynative for part in variant.parts}


def _check_beginning(config: Mapping[str, Any], changed: bool, folder: str) -> Iterator[Finding]:
    """Yields why a run cannot begin with the adapter in a checkpoint; ``changed`` says whether it changed its base."""
    pet_config = config.get("pet_config") or {}
    adapter_path, lora_init = pet_config.get("adapter_path"), pet_config.get("lora_init")
    if adapter_path and (config.get("checkpoint") or {}).get("no_load_optim"):
        yield error(
            "pet_config.adapter_path",
            f"adapter_path is {adapter_path}, and {folder} holds an adapter too.",
            "Remove adapter_path to begin with the one in the folder, or load a base without an adapter.",
        )
    changes = initializers.changes_base(str(lora_init))
    if changed and not changes:
        found = f"lora_init is {shown(lora_init)}, and that of {folder}, pissa or olora, has changed its base."
        yield error("pet_config.lora_init", found, "Set lora_init to that of the run.")
    elif changes and not changed:
        yield error(
            "pet_config.lora_init",
            f"lora_init {lora_init} changes the base before training, and {folder} holds an adapter of another one.",
            "Remove lora_init to go on with that adapter, or load a base without an adapter.",
        )


def _check_same_scale(config: Mapping[str, Any], folder: str) -> Iterator[Finding]:
    """Yields settings of the adapter's updates that differ from those of its training."""
    here = _updates(config)
    # A manifest belongs to an adapter with scale lora_alpha / lora_rank.
    records = [os.path.join(folder, name) for name in (step_folder.RUN, MANIFEST)]
    record = next(filter(os.path.isfile, records), None)
    if record is None:
        found = f"{folder} does not say with which lora_alpha its adapter was trained; this run takes "
        yield warning("lora_config.lora_alpha", f"{found}{here['lora_alpha']}.", "Check that it is the same.")
        return
    for key, value in _updates(peft_config.json_object(record)).items():
        if value != here[key]:
            yield warning(
                f"{'lora' if key == 'lora_alpha' else 'pet'}_config.{key}",
                f"The adapter in {folder} was trained with {key} {shown(value)}, but {key} is {shown(here[key])}: all "
                "its updates change with it.",
                f"Set {key}: {value}.",
            )


def _updates(config: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns the settings of an adapter's scale and of where it acts, from a YAML or a saved copy."""
    lora = config.get("lora_config")
    pet_config = config.get("pet_config") or {}
    return {
        "lora_alpha": lora.get("lora_alpha", 16) if isinstance(lora, Mapping) else None,
        "use_rslora": bool(pet_config.get("use_rslora")),
        "rank_pattern": pet_config.get("rank_pattern") or {},
        "alpha_pattern": pet_config.get("alpha_pattern") or {},
        "alora_invocation_tokens": list(pet_config.get("alora_invocation_tokens") or ()),
    }


def _check_same_cells(stored: Set[str], selected: Set[str], folder: str) -> Iterator[Finding]:
    key = "lora_config.target_modules"
    new, lost = sorted(selected - stored), sorted(stored - selected)
    if new:
        found = f"{folder} has no A and B for {examples(new)}, which begin anew."
        yield warning(key, found, "Take the target_modules that the adapter was trained with, unless that is meant.")
    if lost:
        found = f"{folder} holds A and B for {examples(lost)}, which target_modules does not select: they are left out."
        yield error(key, found, "Take the target_modules that the adapter was trained with.")


def _check_base(network: Description, stored: Shapes, quantizes: bool) -> Iterator[Finding]:
    """Yields the weights of the model that the checkpoints lack or have in another shape.

    A run that quantizes the base also takes one in 4 bits, the form in which it saves it.
    """
    is_base = not any(name.endswith(_ENDINGS) for name in stored)
    # A new adapter of a classifier has a new head.
    missing = [name for name in network.parameters if name not in stored and not (is_base and is_of_head(name))]
    if missing:
        found = f"The checkpoint lacks {examples(missing)}: these weights would be random."
        yield error(_LOAD, found, "Name the base of this model, or correct the sizes in model.")
    packed = [name for name in network.parameters if f"{name}_absmax" in stored]
    if packed and not quantizes:
        found = f"The checkpoint has {examples(packed)} in 4 bits, but the model has them in float."
        yield error(_LOAD, found, "Set pet_config.quantize_base: nf4, or load a base in float.")
        return
    for name, size in network.parameters.items():
        if name in packed:
            continue
        # The weights of experts have one more axis in the trainer's files.
        if name in stored and math.prod(stored[name]) != math.prod(size.shape):
            shapes = f"{list(stored[name])}, but the model has it of {list(size.shape)}"
            found = f"The checkpoint has {name} of shape {shapes}."
            yield error(_LOAD, found, "Correct the sizes in model.")
            return
