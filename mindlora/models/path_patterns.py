"""Expressions for rank_pattern and alpha_pattern that name cells of some kinds and layers, and no others."""

import re
from typing import Dict, Hashable, List, Mapping, Tuple, TypeVar

from mindlora.models.target_modules import pattern_value

_LAYER = re.compile(r"^(?:.*\.)?([^.\d]+)\.(\d+)\.(.+)$")
Value = TypeVar("Value", bound=Hashable)


def kind_of_path(path: str) -> str:
    """Returns what cells of all layers have in common: the path behind the layer's number."""
    layer = _LAYER.match(path)
    return layer[3] if layer else path


def patterns_of(values: Mapping[str, Value]) -> Dict[str, Tuple[str, ...]]:
    """Returns expression -> the paths that it names, for each kind of cells and each value that some of them have.

    Args:
        values (mapping): Path of each adapted cell of a network -> what is to be set for it.
    """
    by_value: Dict[Tuple[str, Value], List[str]] = {}
    kinds: Dict[str, List[str]] = {}
    for path, value in values.items():
        by_value.setdefault((kind_of_path(path), value), []).append(path)
        kinds.setdefault(kind_of_path(path), []).append(path)
    patterns = {}
    for (kind, _), paths in by_value.items():
        pattern = re.escape(kind) if paths == kinds[kind] else _of_layers(paths)
        if [path for path in values if pattern_value({pattern: True}, path, False)] != paths:
            pattern = "|".join(f"^{re.escape(path)}" for path in paths)
        patterns[pattern] = tuple(paths)
    return patterns


def _of_layers(paths: List[str]) -> str:
    """Returns an expression for cells of some layers, such as ``layers\\.(0|2)\\.attention\\.wq``."""
    layers = [layer for layer in map(_LAYER.match, paths) if layer]
    if not layers:
        return re.escape(paths[0])
    numbers = "|".join(layer[2] for layer in layers)
    numbers = f"({numbers})" if len(layers) > 1 else numbers
    return rf"{layers[0][1]}\.{numbers}\.{re.escape(layers[0][3])}"
