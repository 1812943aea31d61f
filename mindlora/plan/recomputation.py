"""recompute_config: which layers are computed again in the backward, and which operators of the others."""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from mindlora.common.yaml_file import value_at
from mindlora.errors import ConfigError
from mindlora.plan.division import Division

# What select_recompute: True means in MindFormers' legacy models.
_SELECTED = (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")


class Recomputation(NamedTuple):
    """What is computed again in the backward.

    Attributes:
        layers (frozenset of int): Layers of which only the input is kept.
        operators (dict): A pattern of a path below a layer -> the other layers in which it is computed again.
    """

    layers: "frozenset[int]"
    operators: Dict[str, "frozenset[int]"]

    def skips(self, layer: int, path: str) -> bool:
        """Tells whether what the operator at ``path`` below a layer makes is computed again, and not kept."""
        return any(layer in layers and _matches(pattern, path) for pattern, layers in self.operators.items())


def read_recomputation(config: Dict[str, Any], division: Division, count: int) -> Recomputation:
    """Returns what a YAML's recompute_config asks for.

    Args:
        config (dict): The YAML.
        division (Division): How its layers are divided.
        count (int): Number of layers.

    Raises:
        ConfigError: A value is neither True, False nor a list that suits the stages of the pipeline.
    """
    by_index = bool(value_at(config, "swap_config.swap"))
    layers = _layers(value_at(config, "recompute_config.recompute"), "recompute", division, count, by_index)
    key = "select_recompute"
    value = value_at(config, f"recompute_config.{key}")
    if isinstance(value, dict):
        chosen = {
            pattern: _layers(own, f"{key}.{pattern}", division, count, by_index) for pattern, own in value.items()
        }
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        chosen = {pattern: set(range(count)) for pattern in value}
    else:
        chosen = dict.fromkeys(_SELECTED, _layers(value, key, division, count, by_index))
    return Recomputation(
        frozenset(layers), {pattern: frozenset(own - layers) for pattern, own in chosen.items() if own - layers}
    )


def _layers(value: Any, key: str, division: Division, count: int, by_index: bool) -> Set[int]:
    if value is None or isinstance(value, bool):
        return set(range(count)) if value else set()
    if by_index and _are_numbers(value):
        return {layer for layer in value if 0 <= layer < count}
    rows = _by_stage(value)
    if rows is None or len(rows) != division.pipeline:
        raise ConfigError(
            f"recompute_config: {key} is {value!r}: it must be True, False, or a list with the number of layers to "
            f"recompute in each of the {division.pipeline} stages of the pipeline."
        )
    found: Set[int] = set()
    for stage, number in enumerate(rows):
        own = division.layers(count, stage)
        found |= set(own if number is True else own[: int(number)])
    return found


def _by_stage(value: Any) -> Optional[List[Any]]:
    """Returns how many layers each stage recomputes; with interleaving, the sums over its chunks."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if _are_numbers(value):
        return list(value)
    if all(isinstance(row, (list, tuple)) and _are_numbers(row) and len(row) == len(value[0]) for row in value):
        return [sum(int(number) for number in column) for column in zip(*value)]
    return None


def _are_numbers(values: Sequence[Any]) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, int) and value >= 0 for value in values)


def _matches(pattern: str, path: str) -> bool:
    """Tells whether each part of a pattern matches a part of ``path`` from its beginning, as MindFormers compares."""
    parts: Tuple[str, ...] = tuple(re.split(r"\\?\.(?![*+?])", pattern))
    names = path.split(".")
    return len(parts) <= len(names) and all(re.fullmatch(part, name) for part, name in zip(parts, names))
