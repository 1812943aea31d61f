"""Reads a MindFormers YAML and the files that it names as base_config, and writes one, without MindFormers."""

import os
import re
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import yaml

from mindlora.core.errors import ConfigError
from mindlora.core.text import shown

# Values of run_mode and of parallel.parallel_mode in a MindFormers YAML.

TRAINING_MODES = ("train", "finetune")
RUN_MODES = (*TRAINING_MODES, "eval", "predict")
# The values of parallel_mode with which MindSpore rewrites the graph: it can divide cells and parameters.
SHARDING_MODES = (1, 2, "SEMI_AUTO_PARALLEL", "AUTO_PARALLEL")
# The values with which each cell declares how it is divided.
SEMI_AUTOMATIC = (1, "SEMI_AUTO_PARALLEL")


PET = "model.model_config.pet_config"


def read_yaml(path: str) -> dict:
    """Returns the content of a complete MindFormers YAML, merged over its base_config files.

    Raises ConfigError if a file cannot be read or is not YAML, or there is no model.model_config.
    """
    config = read_merged(path)
    if not isinstance(value_at(config, "model.model_config"), dict):
        raise ConfigError(f"{path} has no model.model_config: give a complete MindFormers YAML.")
    return config


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value at a dotted key, or None if there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def merged(base: Mapping[str, Any], config: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns ``base`` with the values of ``config`` over its own, node by node."""
    return {
        **base,
        **{
            key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
            for key, value in config.items()
        },
    }


def read_merged(path: str, above: Tuple[str, ...] = ()) -> Dict[str, Any]:
    """Returns the content of a YAML, merged over its base_config files as MindFormers merges them.

    ``above`` are the files whose base_config led here. Raises ConfigError if a file cannot be read, is not YAML, or
    names itself.
    """
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Correct the path or its permissions.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}. Correct that line.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} has no keys: give a MindFormers YAML.")
    bases = config.pop("base_config", None) or []
    content = {}
    above = (*above, os.path.realpath(path))
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"{path}: base_config is {shown(bases)}, but it must be the path of a YAML, or a list of them."
        )
    for base in (os.path.join(os.path.dirname(path), base) for base in bases):
        if os.path.realpath(base) in above:
            raise ConfigError(f"{path}: base_config leads back to {base}. Remove it from one of the files.")
        content.update(read_merged(base, above))
    return merged(content, config)


# The content of a YAML as text: nodes indented by two, comments at their keys, shared nodes as anchors


# Text that YAML reads as a string without quotes.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NOT_TEXT = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


def yaml_text(header: Sequence[str], content: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Returns the text of a YAML.

    Args:
        header (list of str): Lines of the comment at its beginning.
        content (dict): Its nodes. A node that occurs twice, as the same object, is written once and referred to again.
        comments (dict): Dotted key -> its comment: beside a value, or above a node with keys.
    """
    head = [f"# {line}".rstrip() for line in header]
    return "\n".join([*head, *_Writer(content, comments).lines]) + "\n"


class _Writer:
    """Writes the lines of a YAML."""

    def __init__(self, content: Mapping[str, Any], comments: Mapping[str, str]):
        self._comments = comments
        self._shared = _shared(content)
        self._anchors: Dict[int, str] = {}
        self.lines: List[str] = []
        self._write(content, "", "")

    def _write(self, node: Mapping[str, Any], path: str, indent: str) -> None:
        for key, value in node.items():
            comment = self._comments.get(f"{path}{key}")
            beside = f"  # {comment}" if comment else ""
            if id(value) in self._anchors:
                self.lines.append(f"{indent}{key}: *{self._anchors[id(value)]}{beside}")
            elif isinstance(value, Mapping) and value:
                self._begin(key, value, indent, comment)
                self._write(value, f"{path}{key}.", f"{indent}  ")
            elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
                self.lines.append(f"{indent}{key}:")
                for item in value:
                    self._write_item(item, f"{path}{key}.", f"{indent}  ")
            else:
                self.lines.append(f"{indent}{key}: {_scalar(value)}{beside}")

    def _begin(self, key, node, indent, comment) -> None:
        if comment:
            self.lines.append(f"{indent}# {comment}")
        anchor = ""
        if id(node) in self._shared:
            self._anchors[id(node)] = key
            anchor = f" &{key}"
        self.lines.append(f"{indent}{key}:{anchor}")

    def _write_item(self, item, path, indent) -> None:
        first = len(self.lines)
        self._write(item, f"{path}{item.get('type')}.", f"{indent}  ")
        self.lines[first] = f"{indent}- {self.lines[first].lstrip()}"


def _scalar(value: Any) -> str:
    """Returns a value on one line."""
    if value is None:
        return "null"
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        # Without a point, YAML 1.1 reads 1e-05 as a text.
        return repr(value).replace("e", ".0e")
    if isinstance(value, str):
        is_plain = _PLAIN.match(value) and value.lower() not in _NOT_TEXT
        return value if is_plain else "'" + value.replace("'", "''") + "'"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_scalar, value))}]"
    return str(value)


def _shared(content: Mapping[str, Any]) -> List[int]:
    """Returns the ids of the nodes that are in ``content`` more than once."""
    seen: List[int] = []
    twice: List[int] = []
    rest: List[Any] = [content]
    while rest:
        node = rest.pop()
        if not isinstance(node, Mapping) or not node:
            continue
        if id(node) in seen:
            twice.append(id(node))
        else:
            seen.append(id(node))
            rest += node.values()
    return twice
