"""rl.structured_outputs in a YAML: what it may say."""

from typing import Any, Mapping, Sequence

from mindlora.core.errors import ConfigError
from mindlora.core.text import suggestion

# vLLM's names, each of which alone says what an answer must be.
KINDS = ("json", "json_object", "regex", "choice", "grammar")
# The key of the run's node that names a column of the prompts' rows with such a node for each.
COLUMN = "column"
ADVICE = (
    "Write one of {json: schema.json}, {json_object: True}, {regex: '[a-z]+'}, {choice: [yes, no]} and {grammar: ...}"
)


def check_structured_outputs(node: Any) -> None:
    """Raises ConfigError if rl.structured_outputs is not a node with one key that says what answers must be."""
    problem = problem_of(node, (*KINDS, COLUMN))
    if problem:
        raise ConfigError(f"rl.structured_outputs {problem}. {ADVICE}, or {{column: NAME}}.")
    if COLUMN in node and (not isinstance(node[COLUMN], str) or not node[COLUMN]):
        raise ConfigError(f"rl.structured_outputs: column is {node[COLUMN]!r}. Write the name of a column.")


def problem_of(node: Any, kinds: Sequence[str]) -> str:
    """Returns what is wrong with a node that is to have one of these keys, or ""."""
    if not isinstance(node, Mapping):
        return f"is {node!r}"
    unknown = next((key for key in node if key not in kinds), None)
    if unknown is not None:
        return f"has no key {unknown!r}.{suggestion(str(unknown), list(kinds)).rstrip('.')}"
    return "" if len(node) == 1 else f"has {len(node)} keys"
