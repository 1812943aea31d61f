"""Checks the kinds of a YAML's nodes and the ranges of its values by the table of keys."""

import re
from typing import Any, Iterator, List, Mapping, Optional

from mindlora.core.fields import Range
from mindlora.core.overrides import CLOSED_NODES
from mindlora.core.text import shown, suggestion
from mindlora.core.yaml_file import RUN_MODES
from mindlora.run.checks.finding import Finding, error
from mindlora.run.keys import KEYS, PATH, SHAPES
from mindlora.run.yaml_run import YamlRun, named_items

# Nodes that MindFormers reads only in training.
_TRAINING_NODES = (
    *("recompute_config", "swap_config", "runner_wrapper", "optimizer", "lr_schedule"),
    "train_dataset_task",
)
_TYPED_NODES = ("trainer", "runner_wrapper", "optimizer", "lr_schedule", "train_dataset_task")
# Arguments of callbacks that are paths.
_CALLBACK_PATHS = ("dataset_dir", "directory")
# YAML 1.1 requires a decimal point and a signed exponent in such a number.
_NUMBER_AS_TEXT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_NUMBERS_REQUIRED = ("lr_schedule.", "optimizer.", "runner_wrapper.")


def check_shape(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each node, list or path of the wrong kind."""
    for key, rule in KEYS.items():
        if rule.range is not None and rule.range in SHAPES:
            yield from _check_value(key, run.at(key), rule.range)
    for key in ("callbacks", "eval_callbacks"):
        yield from _check_list(key, run.at(key))


def check_keys(run: YamlRun) -> Iterator[Finding]:
    """Yields a finding for each value of the wrong type or out of range. The YAML must have the right shape."""
    texts = list(_check_texts(run.config))
    yield from texts
    told = {finding.key for finding in texts}
    for key, rule in KEYS.items():
        if rule.range is None or rule.range in SHAPES or rule.training and not run.trains:
            continue
        names = [key] + ([f"{key.rpartition('.')[0]}.{rule.other_name}"] if rule.other_name else [])
        if rule.required:
            yield from _check_empty(run, names, rule.range)
        for name in names:
            if name not in told:
                yield from _check_value(name, run.at(name), rule.range)


def check_run_mode(run: YamlRun) -> Iterator[Finding]:
    """Yields an error unless MindFormers knows run_mode."""
    run_mode = run.mode
    if not isinstance(run_mode, str) or run_mode not in RUN_MODES:
        hint = suggestion(str(run_mode), list(RUN_MODES))
        yield error("run_mode", f"run_mode is {run_mode!r}, which is not known.{hint}")


def check_names(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each key that MindFormers refuses in a node with fixed keys, and for each node that lacks
    the type of the object to build. MindFormers has not read the YAML; its nodes must have the right kind.
    """
    unread = set() if run.trains else set(_TRAINING_NODES)
    unread |= {"moe_config"} if run.is_mcore else set()
    unread |= {"train_dataset_task"} if run.at("runner_wrapper.rl") is not None else set()
    for node, allowed in CLOSED_NODES.items():
        names = (run.at(node) or {}) if node and node not in unread else ()
        for name in names:
            if name not in allowed:
                yield error(f"{node}.{name}", f"{name!r} is not a key of {node}.{suggestion(str(name), list(allowed))}")
    for node in _TYPED_NODES:
        if node not in unread and run.at(node) and not run.at(f"{node}.type"):
            yield error(node, f"{node} has no type, so MindFormers does not know what to build.")


def _check_value(key: str, value: Any, range_: Range) -> Iterator[Finding]:
    if value is not None and value not in range_:
        number = _as_number(value) if int in range_.types else None
        advice = f"Write it without quotes: {number}." if number is not None else ""
        yield error(key, f"{key} is {shown(value)}, but it must be {range_.words}.", advice)


def _as_number(value: Any) -> Optional[str]:
    """Returns the number in YAML's spelling for a text that means one, or None."""
    try:
        return str(float(value) if set(value) & set(".eE") else int(value)) if isinstance(value, str) else None
    except ValueError:
        return None


def _check_empty(run: YamlRun, names: List[str], range_: Range) -> Iterator[Finding]:
    """Yields an error for a key that is present, under one of its names, and has no value under any."""
    node = run.at(names[0].rpartition(".")[0]) or {}
    named = [name for name in names if name.rpartition(".")[2] in node]
    if named and all(run.at(name) is None for name in named):
        yield error(named[0], f"{named[0]} has no value, but it must be {range_.words}.")


def _check_list(key: str, items: Any) -> Iterator[Finding]:
    if items is None:
        return
    if not isinstance(items, list):
        yield error(key, f"{key} is {shown(items)}, but it must be a list: a line '- type: ...' for each item.")
        return
    for name, item in named_items(items):
        where = f"{key}.{name}"
        if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
            yield error(
                where, f"{where} is {shown(item)}, which has no type: write '- type: ...' and its settings below it."
            )
            continue
        for path in _CALLBACK_PATHS:
            yield from _check_value(f"{where}: {path}", item.get(path), PATH)


def _check_texts(node: Any, key: str = "") -> Iterator[Finding]:
    """Yields a finding for each number that YAML reads as text."""
    if isinstance(node, (dict, list)):
        for part, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _check_texts(value, f"{key}.{part}".lstrip("."))
    elif isinstance(node, str) and _NUMBER_AS_TEXT.fullmatch(node):
        mantissa, exponent = re.split("[eE]", node)
        yield Finding(
            "error" if key.startswith(_NUMBERS_REQUIRED) else "warning",
            key,
            f"YAML reads {node} as text, because it lacks a decimal point or a sign in its exponent.",
            f"Write {float(mantissa)}e{int(exponent):+d}.",
        )
