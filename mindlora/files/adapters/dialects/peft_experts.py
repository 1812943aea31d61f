"""PEFT's form of LoRA on parameters (target_parameters), in which it adapts the stacked experts of a layer.

A module whose parameter is adapted is wrapped, and wrapped again for its next parameter, in the order in which it
declares them. So of gate_up_proj and down_proj, the last one's tensors are at <experts>.lora_A.weight and the first
one's at <experts>.base_layer.lora_A.weight. The experts' A are joined by rows, [experts * r, in], and their B by
columns, [out, r * experts], where the columns of one expert are r * experts + expert.
"""

from typing import Dict, List, Optional

import numpy as np

from mindlora.core.errors import AdapterError, AdapterFormatError, ShapeMismatchError
from mindlora.core.numerics.pair_shapes import flatten_experts, unflatten_experts
from mindlora.core.text import listed
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects.peft_config import PeftConfig
from mindlora.files.adapters.expert_pairs import STACKED, stacked_paths
from mindlora.models import names
from mindlora.models.variants.variant import PartKey

_WRAPPED = ".base_layer"


def flattened(adapter: Adapter, tensors: Dict[PartKey, np.ndarray]) -> Dict[PartKey, np.ndarray]:
    """Returns ``tensors`` with stacked pairs as PEFT has them: under the paths of their modules, and as matrices."""
    modules = module_paths(stacked_paths(adapter))
    return {
        (modules.get(path, path), part): flatten_experts(part, array) if path in modules else array
        for (path, part), array in tensors.items()
    }


def restore(adapter: Adapter, config: PeftConfig, source: str) -> None:
    """Turns the pairs of an adapter that was read from PEFT's form into stacked ones, where config says that they are.

    Raises AdapterFormatError if a module's tensors are not those of the parameters that target_parameters names, and
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

    Raises AdapterError if a module has several adapted parameters whose order of declaration is not known.
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
                f"which the module declares them, and that is not known of {listed(unknown)}. Write format "
                "'mindformers'."
            )
        ordered = [name for name in STACKED if name in parameters] or list(parameters)
        for depth, parameter in enumerate(reversed(ordered)):
            wrapped[parameters[parameter]] = module + _WRAPPED * depth
    return wrapped


def _parameters_of(module: str, targets: List[str]) -> Optional[List[str]]:
    """Returns the parameters of ``module`` that ``targets`` names, in the order of declaration; None if it has none.

    A parameter called weight is a linear cell's, whose pair is like any other.
    """
    leaves = list(dict.fromkeys(target.rpartition(".")[2] for target in targets))
    ordered = [leaf for leaf in STACKED if leaf in leaves] + [leaf for leaf in leaves if leaf not in STACKED]
    parameters = [f"{module}.{leaf}" for leaf in ordered if leaf != "weight"]
    # A name by itself is of experts, or it would be of every module.
    named = [target for target in targets if "." in target or module.endswith("experts")]
    ends = tuple(f".{target}" for target in named)
    return [path for path in parameters if f".{path}".endswith(ends)] or None


def _unflatten(adapter: Adapter, path: str, stacked: str, rank: int, source: str) -> None:
    """Makes a stacked pair at ``stacked`` of the matrices at ``path``."""
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
