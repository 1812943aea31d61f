"""Which modules and parameters the fields of an adapter_config.json select in PEFT, by PEFT's own rule."""

import re
from typing import Any, Collection, Mapping

_ALL_LINEAR = "all-linear"


def selects(selection: Mapping[str, Any], modules: Collection[str], parameters: Collection[str]) -> bool:
    """Returns whether fields of a configuration select these modules and parameters, and name no others.

    ``modules`` are the full paths of adapted modules, ``parameters`` those of adapted stacked weights of experts
    (target_parameters); both under Hugging Face's names. Where there are parameters, each name must be of an adapted
    module: PEFT takes gate_proj for all experts of a model that stacks them.
    """
    targets = selection.get("target_modules") or []
    named = selection.get("target_parameters") or []
    if parameters and (isinstance(targets, str) or not all(_ends_any(modules, name) for name in targets)):
        return False
    if not modules and targets or not all(_ends_any(parameters, name) for name in named):
        return False
    return all(_matches(named, path) for path in parameters) and all(
        _is_target(selection, module) for module in modules
    )


def _is_target(selection: Mapping[str, Any], module: str) -> bool:
    """Returns whether PEFT puts an adapter on a module."""
    if _matches(selection.get("exclude_modules") or [], module):
        return False
    targets = selection.get("target_modules") or []
    if targets == _ALL_LINEAR:
        return not module.endswith(("lm_head", "embed_tokens"))
    # layers_to_transform narrows names down, and neither a regular expression nor a full path.
    if isinstance(targets, str) or module in targets:
        return _matches(targets, module)
    return _matches(targets, module) and _is_in_layers(selection, module)


def _is_in_layers(selection: Mapping[str, Any], module: str) -> bool:
    layers = selection.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = selection.get("layers_pattern") or [r"[^.]*"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module)
        if found:
            return int(found[1]) in (layers if isinstance(layers, list) else [layers])
    return False


def _matches(names: Any, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(_is_or_ends_in(module, name) for name in names)


def _ends_any(paths: Collection[str], name: str) -> bool:
    return any(_is_or_ends_in(path, name) for path in paths)


def _is_or_ends_in(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")
