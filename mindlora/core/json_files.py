"""JSON: written in one form, and read strictly."""

import json
from typing import Any, Callable, List, Tuple, Type, Union

from mindlora.core.errors import LoraError


def write_json(path: str, content: Any) -> None:
    """Writes ``content`` to a file as JSON with sorted keys and an indent of 2."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True)


def parse_object(text: Union[str, bytes], source: str, error: Type[LoraError]) -> dict:
    """Parses a JSON object; bytes must be UTF-8. Raises ``error`` for anything else and for a repeated key."""
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        content = json.loads(decoded, object_pairs_hook=refuse_duplicates(source, error))
    except error:
        raise
    except (ValueError, RecursionError) as problem:
        raise error(f"{source} is not JSON: {problem}. Correct it, or copy the file again.") from problem
    if not isinstance(content, dict):
        raise error(
            f"{source} holds a {type(content).__name__} instead of a JSON object. Check that it is the right file, "
            "and copy it again."
        )
    return content


def refuse_duplicates(source: str, error: Type[LoraError]) -> Callable[[List[Tuple[str, Any]]], dict]:
    """Returns an object_pairs_hook for json.loads that raises ``error`` if an object has a key twice."""

    def unique(pairs: List[Tuple[str, Any]]) -> dict:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []
        if twice:
            raise error(f"{source} has {', '.join(twice)} twice, so it is unclear which one counts. Remove one.")
        return dict(pairs)

    return unique
