"""Keys of a YAML set from the command line: --a.b.c value, where a part may name an item of a list."""

from typing import Any, Iterator, List, Sequence, Tuple

from mindformers.tools.register import MindFormerConfig
from mindformers.tools.utils import parse_value

from mindlora.common.text import suggestion
from mindlora.errors import ConfigError

# MindFormers knows every key of these nodes, and fills in those that the YAML leaves out.
_CLOSED_NODES = ("runner_config", "parallel_config", "recompute_config", "swap_config", "moe_config")


def pairs(words: Sequence[str]) -> Iterator[Tuple[str, Any]]:
    """Yields (dotted key, value) from ``--a.b.c value`` and ``--a.b.c=value``.

    Raises:
        ConfigError: The words are not such pairs.
    """
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if len(split) % 2:
        raise ConfigError(f"Overrides must be pairs of --a.b.c and a value, but these are not: {' '.join(words)}.")
    for key, text in zip(split[::2], split[1::2]):
        if not key.startswith("--"):
            raise ConfigError(f"Expected a key that starts with --, but got {key!r}: quote a value that has spaces.")
        yield key[2:], _value(text)


def set_key(config: MindFormerConfig, key: str, value: Any, source: str, create: bool = False) -> None:
    """Sets the value at a dotted key, whose parents must exist.

    Args:
        config (MindFormerConfig): The whole YAML; changed in place.
        key (str): For instance runner_config.epochs; an item of a list is named by its number, counted from 0, or by
            its ``type``.
        value: The value.
        source (str): What error messages begin with.
        create (bool): Whether a key that MindFormers does not know may be made. Default: False.

    Raises:
        ConfigError: There is no such key.
    """
    *parents, leaf = key.split(".")
    node: Any = config
    for depth, parent in enumerate(parents):
        where = ".".join(parents[:depth]) or "the YAML"
        node = _item(node, parent, where, source) if isinstance(node, list) else _child(node, parent, where, source)
    parent = ".".join(parents)
    if not isinstance(node, dict):
        raise ConfigError(f"{source}: {parent} is {node!r} and has no keys.")
    if not parents and not create and leaf not in node:
        raise ConfigError(f"{source}: '{leaf}' is not a key of the YAML, which has: {', '.join(sorted(node))}.")
    if parent in _CLOSED_NODES and not create and leaf not in node:
        raise ConfigError(f"{source}: '{leaf}' is not a key of {parent}.{suggestion(leaf, list(node))}")
    node[leaf] = value


def _child(node: Any, name: str, where: str, source: str) -> Any:
    if not isinstance(node, dict) or node.get(name) is None:
        known = ", ".join(sorted(map(str, node))) if isinstance(node, dict) else "nothing"
        raise ConfigError(f"{source}: '{name}' is not a key of {where}, which has: {known}.")
    return node[name]


def _item(items: List[Any], name: str, where: str, source: str) -> Any:
    """Returns the item of a list with this number or ``type``."""
    types = [item.get("type") if isinstance(item, dict) else item for item in items]
    if name.isdigit():
        if int(name) < len(items):
            return items[int(name)]
    elif types.count(name) == 1:
        return items[types.index(name)]
    elif name in types:
        numbers = [str(number) for number, found in enumerate(types) if found == name]
        raise ConfigError(f"{source}: {where} has {name} at {' and '.join(numbers)}: name one by its number.")
    listed = ", ".join(f"{number} {found}" for number, found in enumerate(types)) or "nothing"
    raise ConfigError(f"{source}: '{name}' is not an item of {where}, which has: {listed}.")


def _value(text: str) -> Any:
    """Reads a value with MindFormers' parse_value, which fails on whole numbers such as 0.0; these become floats."""
    try:
        return parse_value(text)
    except ValueError:
        return float(text)
