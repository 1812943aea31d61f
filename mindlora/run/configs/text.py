"""The content of a YAML as text: nodes indented by two, comments at their keys, shared nodes as anchors."""

import re
from typing import Any, Dict, List, Mapping, Sequence

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
