"""The linear cells that a configuration selects: by a regex on paths or module names, by suffixes, or all-linear."""

import itertools
import logging
import re
from typing import Callable, Collection, Dict, Hashable, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

from mindlora.core.errors import TargetError
from mindlora.core.text import listed
from mindlora.models import names

logger = logging.getLogger("mindlora")

ALL_LINEAR = "all-linear"
Selector = Union[str, Sequence[str]]
Value = TypeVar("Value")
_Matcher = Callable[[str], bool]
_LAYER = re.compile(r"^(?:.*\.)?([^.\d]+)\.(\d+)\.(.+)$")
Hashed = TypeVar("Hashed", bound=Hashable)


def select_targets(
    linear_paths: Sequence[str],
    target_modules: Optional[Selector],
    exclude_modules: Optional[Selector] = None,
    other_cells: Optional[Mapping[str, str]] = None,
    layers: Optional[Union[int, Sequence[int]]] = None,
    warn: bool = True,
    not_linear: Collection[str] = (),
) -> List[str]:
    """Returns, in order, the paths of the cells that get an adapter, of ``linear_paths``, all cells that can have one.

    Args:
        target_modules, exclude_modules (str or list): As in LoraConfig, as is layers_to_transform, ``layers``.
        other_cells (dict): Full path -> class name of all other cells, for errors about a name that matches no linear
            cell.
        warn (bool): Whether to warn of alternatives of a regex that match nothing.
        not_linear (collection of str): Paths in ``linear_paths`` that are not linear cells: embeddings, convolutions
            and experts, which "all-linear" leaves out, as PEFT's does.

    Raises:
        TargetError: Nothing is selected, no cell of a given layer is selected, an item of a list selects nothing, or
            only some parts of a joined cell (w_qkv, w_gate_hidden) are selected.
    """
    if target_modules is None:
        raise TargetError(
            "target_modules is missing: name the linear cells that get an adapter, "
            "for instance '.*wq|.*wk|.*wv|.*wo' or 'all-linear'." + _candidates(linear_paths)
        )
    if target_modules == ALL_LINEAR:
        linear_paths = [path for path in linear_paths if path not in not_linear]
    if not linear_paths:
        raise TargetError(
            "The network holds no linear cell (nn.Dense, mint.nn.Linear or MindFormers' Linear) to put LoRA on: pass "
            "one that does."
        )
    excluded = set()
    if exclude_modules is not None:
        excluded = set(_matching(linear_paths, exclude_modules, "exclude_modules", other_cells or {}))
    chosen = _matching(linear_paths, target_modules, "target_modules", other_cells or {}, warn)
    selected = [path for path in chosen if path not in excluded]
    if not selected:
        raise TargetError(
            f"exclude_modules {exclude_modules!r} excludes all {len(chosen)} cells that "
            f"target_modules {target_modules!r} selects: {listed(chosen)}. Exclude fewer of them."
        )
    return selected if layers is None else _in_layers(selected, layers)


def select_parameters(
    paths: Sequence[str],
    target_parameters: Sequence[str],
    exclude_modules: Optional[Selector] = None,
    layers: Optional[Union[int, Sequence[int]]] = None,
) -> List[str]:
    """Returns, in order, the full paths of the stacked experts' weights that get an adapter.

    The other arguments are LoraConfig's. Raises TargetError if a name matches no stacked weight, or nothing is left.
    """
    matchers = {name: _suffix_matcher(name) for name in target_parameters}
    unmatched = [name for name, matches in matchers.items() if not any(map(matches, paths))]
    if unmatched:
        raise TargetError(
            f"target_parameters names {', '.join(map(repr, unmatched))}, which matches no stacked weight of experts. "
            f"Such weights of this network: {listed(paths) or 'none'}. Name linear cells in target_modules."
        )
    is_target = _any_of(matchers.values())
    # Some of exclude_modules may be for other cells, so it need not match anything.
    is_excluded = _any_of(() if exclude_modules is None else [_matcher(exclude_modules)])
    chosen = [path for path in paths if is_target(path) and not is_excluded(path)]
    if not chosen:
        raise TargetError(
            f"exclude_modules {exclude_modules!r} excludes all that target_parameters selects. Leave some of them out."
        )
    return chosen if layers is None else _in_layers(chosen, layers)


def select_quantized(linear_paths: Sequence[str], exclude: Optional[Selector] = None) -> List[str]:
    """Returns, in order, the paths of the weights that quantize_base quantizes: no output heads, none in ``exclude``.

    ``linear_paths`` has those of stacked weights of experts too; ``exclude`` has the forms of target_modules. Raises
    TargetError if an item of ``exclude`` matches nothing, or nothing is left.
    """
    left_out = set() if exclude is None else set(_matching(linear_paths, exclude, "quantize_exclude", {}))
    selected = [path for path in linear_paths if not names.is_output_head(path) and path not in left_out]
    if not selected:
        raise TargetError(
            "quantize_base finds no linear cell to quantize: output heads are never quantized, and "
            f"quantize_exclude is {exclude!r}." + _candidates(linear_paths)
        )
    return selected


def _in_layers(paths: List[str], layers: Union[int, Sequence[int]]) -> List[str]:
    """Returns the paths whose first number is one of ``layers``."""
    chosen_layers = {layers} if isinstance(layers, int) else set(layers)
    numbers = {path: names.layer_of(path) for path in paths}
    unused = sorted(chosen_layers.difference(numbers.values()))
    if unused:
        raise TargetError(
            f"layers_to_transform names {', '.join(map(str, unused))}, where target_modules selects "
            f"nothing. Choose layers of its cells: {listed(paths)}."
        )
    return [path for path in paths if numbers[path] in chosen_layers]


def _matching(
    linear_paths: Sequence[str], spec: Selector, field: str, other_cells: Mapping[str, str], warn: bool = True
) -> List[str]:
    """Returns the paths that ``spec``, the value of ``field``, matches; each of its alternatives must match one."""
    if spec == ALL_LINEAR:
        selected = [path for path in linear_paths if not names.is_output_head(path) and not names.is_router(path)]
        if not selected:
            raise TargetError(
                f"{field} 'all-linear' leaves output heads out, and the network has no other linear "
                "cell." + _candidates(linear_paths)
            )
        return selected
    if isinstance(spec, str):
        alternatives = {text: _regex_matcher(text) for text in _split_alternatives(spec)}
    else:
        alternatives = {item: _suffix_matcher(item) for item in spec}
    parts = {path: names.joined_parts(legacy) for path, legacy in names.canonical(linear_paths).items()}
    matches_spec = _matcher(spec)
    selected = [path for path in linear_paths if _selects(matches_spec, path, parts[path], field)]
    if not selected:
        raise TargetError(
            f"{field} {spec!r} matches no linear cell."
            + _near_misses(alternatives, other_cells)
            + _candidates(linear_paths)
        )
    reachable = [*linear_paths, *itertools.chain.from_iterable(parts.values())]
    unmatched = {text: matches for text, matches in alternatives.items() if not any(map(matches, reachable))}
    if unmatched:
        message = (
            f"{field} {spec!r}: {', '.join(repr(text) for text in unmatched)} matches no linear cell."
            + _near_misses(unmatched, other_cells)
            + _candidates(linear_paths)
        )
        if not isinstance(spec, str):
            raise TargetError(message)
        # One regex is often written for several models, so an alternative without a match is only a warning.
        if warn:
            logger.warning("%s The other alternatives match %d cells: remove this one.", message, len(selected))
    return selected


def _selects(matches: _Matcher, path: str, parts: Sequence[str], field: str) -> bool:
    """Returns whether a spec selects the cell at ``path``; a joined cell's name or all its ``parts`` must match."""
    if matches(path):
        return True
    hit = [part for part in parts if matches(part)]
    if hit and len(hit) < len(parts):
        mcore = names.is_mcore(path)
        leaves = {part: (names.to_hugging_face(part) if mcore else part).rpartition(".")[2] for part in parts}
        missing = [leaves[part] for part in parts if part not in hit]
        apart = "" if mcore else ", or build the model with qkv_concat: False"
        raise TargetError(
            f"{field} names {', '.join(leaves[part] for part in hit)}, but here {path} holds "
            f"{', '.join(leaves.values())} in "
            f"one cell. Name {path.rpartition('.')[2]}, or {', '.join(missing)} as well{apart}."
        )
    return bool(hit)


def _regex_matcher(pattern: str) -> _Matcher:
    """Matches a full path, as PEFT does, or the beginning of a module name, as MindFormers does."""
    compiled = re.compile(pattern)

    def matches(path: str) -> bool:
        return any(compiled.fullmatch(name) or compiled.match(name.rpartition(".")[2]) for name in _spellings(path))

    return matches


def _spellings(path: str) -> List[str]:
    """Returns every path that may name the cell at ``path``: of a stacked weight of experts, also their module's."""
    aliases = list(names.aliases(path))
    modules = (name.rpartition(".")[0] for name in aliases)
    return aliases + [module for module in modules if module.rpartition(".")[2] == "experts"]


def _matcher(spec: Selector) -> _Matcher:
    return _regex_matcher(spec) if isinstance(spec, str) else _any_of([_suffix_matcher(item) for item in spec])


def _any_of(matchers: Collection[_Matcher]) -> _Matcher:
    def matches(path: str) -> bool:
        return any(matcher(path) for matcher in matchers)

    return matches


def _suffix_matcher(suffix: str) -> _Matcher:
    def matches(path: str) -> bool:
        return any(name == suffix or name.endswith("." + suffix) for name in _spellings(path))

    return matches


def _split_alternatives(pattern: str) -> List[str]:
    """Splits a regex at each | outside brackets, unless one of the pieces would not be a regex by itself."""
    pieces: List[str] = []
    depth = 0
    in_class = escaped = False
    piece = ""
    for char in pattern:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            pieces.append(piece)
            piece = ""
            continue
        piece += char
    pieces.append(piece)
    try:
        for piece in pieces:
            re.compile(piece)
    except re.error:
        # For instance (w)q|\1k, where the second piece refers to the first, or []|], where ] is in the class.
        return [pattern]
    return pieces


def _near_misses(alternatives: Mapping[str, _Matcher], other_cells: Mapping[str, str]) -> str:
    """Returns a sentence about a cell of another kind that one of the alternatives matches, or ""."""
    for text, matches in alternatives.items():
        hits = [path for path in other_cells if path and matches(path)]
        if hits:
            return f" {text!r} does match {hits[0]}, but that is a {other_cells[hits[0]]} and not a linear cell."
    return ""


def _candidates(linear_paths: Sequence[str]) -> str:
    return f" Choose from the network's linear cells: {listed(linear_paths)}."


def pattern_value(pattern: Optional[Mapping[str, Value]], path: str, default: Value) -> Value:
    """Returns the value of the first regular expression in ``pattern`` that matches ``path`` or its end after a dot.

    The Hugging Face name of ``path`` is tried too.
    """
    for expression, value in (pattern or {}).items():
        if any(re.match(rf"(.*\.)?({expression})$", name) for name in names.aliases(path)):
            return value
    return default


def kind_of_path(path: str) -> str:
    """Returns the part of a path that the cells of all layers share: the path behind the layer's number."""
    layer = _LAYER.match(path)
    return layer[3] if layer else path


def patterns_of(values: Mapping[str, Hashed]) -> Dict[str, Tuple[str, ...]]:
    """Returns expression -> the paths that it names, for each kind of cells and each value that some of them have.

    Args:
        values (mapping): Path of each adapted cell of a network -> its value.
    """
    by_value: Dict[Tuple[str, Hashed], List[str]] = {}
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
