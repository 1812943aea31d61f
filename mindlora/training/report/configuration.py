"""The configurations of runs as tables: all keys, those set to other values than the defaults, those that differ."""

import dataclasses
import json
from typing import Any, Dict, List, Mapping, Optional, Sequence


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of a configuration, such as ``optimizer.betas``; the last two are None if the default is not known."""

    key: str
    value: str
    default: Optional[str]
    changed: Optional[bool]


def flat(configuration: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns {dotted key: value}. A callback's name stands in the key in place of its number in the list."""
    leaves: Dict[str, Any] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                visit(f"{path}.{key}" if path else str(key), item)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                place = f"{path}.{item.get('type', number)}"
                place = f"{place}[{number}]" if place in named else place
                named.add(place)
                visit(place, {key: entry for key, entry in item.items() if key != "type"} or "listed")
        else:
            leaves[path] = value

    named: set = set()
    visit("", configuration)
    return leaves


def settings(run: Mapping[str, Any]) -> List[Setting]:
    """Returns every key of a configuration, from the record "run" of a history."""
    defaults = run.get("defaults") or {}
    return [
        Setting(
            key,
            text(value),
            text(defaults[key]) if key in defaults else None,
            text(value) != text(defaults[key]) if key in defaults else None,
        )
        for key, value in flat(run.get("configuration") or {}).items()
    ]


def differing(runs: Sequence[Mapping[str, Any]]) -> List[tuple]:
    """Returns (key, texts) of each key that does not have the same value in all runs; "-" where a run lacks it."""
    flats = [flat(run.get("configuration") or {}) for run in runs]
    rows = []
    for key in dict.fromkeys(key for leaves in flats for key in leaves):
        texts = [text(leaves[key]) if key in leaves else "-" for leaves in flats]
        if len(set(texts)) > 1:
            rows.append((key, texts))
    return rows


def text(value: Any) -> str:
    """Returns a value as a reader of a YAML knows it; a float that is a whole number as that number."""
    if isinstance(value, str):
        return value or "''"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return json.dumps(value, ensure_ascii=False)
