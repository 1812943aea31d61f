"""Checks of rl.structured_outputs in a YAML."""

from typing import Any, Mapping, Sequence

from mindlora.core.errors import ConfigError
from mindlora.core.text import suggestion

# vLLM's keys; exactly one of them defines the constraint.
KINDS = ("json", "json_object", "regex", "choice", "grammar")
# The key that names a column of the prompts' rows, each with such a node.
COLUMN = "column"
ADVICE = (
    "Write one of {json: schema.json}, {json_object: True}, {regex: '[a-z]+'}, {choice: [yes, no]} and {grammar: ...}"
)


def check_structured_outputs(node: Any) -> None:
    """Raises ConfigError unless rl.structured_outputs is a node with one key that constrains answers."""
    problem = problem_of(node, (*KINDS, COLUMN))
    if problem:
        raise ConfigError(f"rl.structured_outputs {problem}. {ADVICE}, or {{column: NAME}}.")
    if COLUMN in node and (not isinstance(node[COLUMN], str) or not node[COLUMN]):
        raise ConfigError(f"rl.structured_outputs: column is {node[COLUMN]!r}. Write the name of a column.")


def problem_of(node: Any, kinds: Sequence[str]) -> str:
    """Returns the fault of a node that must have one of these keys, or ""."""
    if not isinstance(node, Mapping):
        return f"is {node!r}"
    unknown = next((key for key in node if key not in kinds), None)
    if unknown is not None:
        return f"has no key {unknown!r}.{suggestion(str(unknown), list(kinds)).rstrip('.')}"
    return "" if len(node) == 1 else f"has {len(node)} keys"
