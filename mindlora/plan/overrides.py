"""What a command line puts in the place of a YAML's values: --a.b.c VALUE."""

import copy
from typing import Any, Dict, Sequence

import yaml

from mindlora.errors import ConfigError

_FLAGS = {"device_target": "context.device_target", "use_parallel": "use_parallel", "device_id": "context.device_id"}


def apply_overrides(config: Dict[str, Any], words: Sequence[str]) -> Dict[str, Any]:
    """Returns a YAML's content with other values.

    Args:
        config (dict): The content.
        words (list of str): ``--a.b.c VALUE`` or ``--a.b.c=VALUE``, one after the other; a value is read as YAML.

    Raises:
        ConfigError: A value is missing or is not YAML, or a key leads through something that has no keys.
    """
    changed = copy.deepcopy(config)
    rest = list(words)
    while rest:
        key, separator, text = rest.pop(0).partition("=")
        if not separator:
            if not rest:
                raise ConfigError(f"{key} has no value. Write {key} VALUE.")
            text = rest.pop(0)
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{key} is {text!r}, which is not YAML: {' '.join(str(error).split())}.") from error
        _set(changed, _FLAGS.get(key.lstrip("-"), key.lstrip("-")), value)
    return changed


def _set(config: Dict[str, Any], key: str, value: Any) -> None:
    node: Any = config
    *parents, leaf = key.split(".")
    for name in parents:
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            raise ConfigError(f"--{key} leads through {name}, which is {node!r} in the YAML and has no keys.")
    node[leaf] = value
