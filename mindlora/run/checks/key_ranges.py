"""The keys of a MindFormers YAML that mindlora reads: one table of what each may hold, and what a YAML has instead."""

import re
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from mindlora.core.fields import COUNT, INDEX, NOT_NEGATIVE, POSITIVE, SHARE, Range
from mindlora.core.overrides import CLOSED_NODES
from mindlora.core.text import shown, suggestion
from mindlora.core.yaml_file import PET, RUN_MODES, TRAINING_MODES, value_at
from mindlora.run.checks.finding import Finding, error

_MODEL = "model.model_config"
_NODE = Range("a node with keys below it, each as 'key: value'", lambda node: True, (Mapping,))
_PATH = Range("a path", lambda path: True, (str,))
_SHAPES = (_NODE, _PATH)
_SCALE = Range(
    "a number above 0",
    lambda scale: "type" in scale if isinstance(scale, Mapping) else scale in POSITIVE,
    (int, float, Mapping),
)
_DEVICE = Range("Ascend or CPU", lambda target: target in ("Ascend", "CPU"), (str,))
_MODE = Range(
    "0 for graph mode or 1 for PyNative mode", lambda mode: mode in (0, 1, "GRAPH_MODE", "PYNATIVE_MODE"), (int, str)
)


class Key(NamedTuple):
    """What a key of a YAML may hold.

    Attributes:
        range (Range): Its values; None if MindFormers alone judges them.
        default: What MindFormers takes where the YAML has no such key.
        training (bool): Whether a run reads it only when it trains.
        other_name (str): The last part of another name of the same key.
        required (bool): Whether it must have a value where it is named.
    """

    range: Optional[Range]
    default: Any = None
    training: bool = False
    other_name: str = ""
    required: bool = False


_NODES = (
    "runner_wrapper.preference",
    *("trainer", "runner_config", "optimizer", "lr_schedule", "runner_wrapper", "context", "parallel"),
    *("parallel_config", "recompute_config", "swap_config", "moe_config", "checkpoint", "train_dataset_task"),
    *("train_dataset", "train_dataset.data_loader", "eval_dataset", "eval_dataset.data_loader", "eval_dataset_task"),
    *("processor", "processor.tokenizer", "model", "model.arch", _MODEL, PET),
)
_PATHS = (
    *("load_checkpoint", "checkpoint.load_path", "pretrained_model_dir", "output_dir", f"{PET}.adapter_path"),
    *("train_dataset.data_loader.dataset_dir", "eval_dataset.data_loader.dataset_dir"),
)
# Nodes that MindFormers reads in training alone.
_TRAINING_NODES = (
    *("recompute_config", "swap_config", "runner_wrapper", "optimizer", "lr_schedule"),
    "train_dataset_task",
)
_TYPED_NODES = ("trainer", "runner_wrapper", "optimizer", "lr_schedule", "train_dataset_task")
KEYS: Dict[str, Key] = {
    **{name: Key(_NODE) for name in _NODES},
    **{name: Key(_PATH) for name in _PATHS},
    "seed": Key(INDEX, 1),
    "micro_batch_interleave_num": Key(COUNT, 1),
    "context.device_target": Key(_DEVICE, "Ascend"),
    "context.mode": Key(_MODE, 0),
    "parallel.parallel_mode": Key(None, 1),
    "parallel_config.data_parallel": Key(COUNT, 1),
    "parallel_config.model_parallel": Key(COUNT, 1),
    "parallel_config.pipeline_stage": Key(COUNT, 1),
    "parallel_config.context_parallel": Key(COUNT, 1),
    "parallel_config.expert_parallel": Key(COUNT, 1),
    "parallel_config.micro_batch_num": Key(COUNT, 1),
    "moe_config.expert_num": Key(COUNT, 1),
    f"{_MODEL}.moe_config.expert_num": Key(COUNT, 1),
    # No model can do without these.
    f"{_MODEL}.seq_length": Key(COUNT, required=True),
    f"{_MODEL}.hidden_size": Key(COUNT, required=True),
    f"{_MODEL}.vocab_size": Key(COUNT, required=True),
    f"{_MODEL}.num_layers": Key(COUNT, other_name="num_hidden_layers", required=True),
    f"{_MODEL}.num_heads": Key(COUNT, other_name="num_attention_heads", required=True),
    f"{_MODEL}.n_kv_heads": Key(COUNT, other_name="num_key_value_heads"),
    f"{_MODEL}.intermediate_size": Key(COUNT, other_name="ffn_hidden_size"),
    f"{_MODEL}.num_blocks": Key(COUNT),
    f"{_MODEL}.block_size": Key(COUNT),
    f"{_MODEL}.num_experts_per_tok": Key(COUNT, other_name="moe_router_topk"),
    "runner_config.epochs": Key(COUNT, 1, training=True, required=True),
    "runner_config.batch_size": Key(COUNT, 1, training=True, required=True),
    "runner_config.gradient_accumulation_steps": Key(COUNT, 1, training=True),
    "runner_config.sink_mode": Key(None, True, training=True),
    "runner_config.sink_size": Key(None, 1, training=True),
    "lr_schedule.learning_rate": Key(NOT_NEGATIVE, training=True),
    "lr_schedule.warmup_ratio": Key(SHARE, training=True),
    "optimizer.learning_rate": Key(NOT_NEGATIVE, training=True),
    "optimizer.weight_decay": Key(NOT_NEGATIVE, training=True),
    "runner_wrapper.max_grad_norm": Key(POSITIVE, training=True),
    "runner_wrapper.scale_sense": Key(_SCALE, training=True),
    "train_dataset.num_parallel_workers": Key(COUNT, training=True),
}
# Arguments of callbacks that are paths.
_CALLBACK_PATHS = ("dataset_dir", "directory")
# YAML 1.1 wants a decimal point and a signed exponent in such a number.
_NUMBER_AS_TEXT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_NUMBERS_REQUIRED = ("lr_schedule.", "optimizer.", "runner_wrapper.")


def setting(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key in the table; where the YAML has none, the one that MindFormers takes."""
    value = value_at(config, key)
    return KEYS[key].default if value is None else value


def named_items(items: Optional[List[Any]]) -> Iterator[Tuple[str, Any]]:
    """Yields (what a message calls it, the item) of a list: its type, or its number if it has none.

    Numbers of callbacks are not always those of the file, because MindFormers adds one before the others.
    """
    types = [item.get("type") if isinstance(item, Mapping) else None for item in items or []]
    for number, (kind, item) in enumerate(zip(types, items or [])):
        count = types.count(kind)
        which = f" ({types[: number + 1].count(kind)} of {count})" if count > 1 else ""
        yield f"{kind}{which}" if isinstance(kind, str) else str(number), item


def check_shape(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each node, list or path that is of another kind."""
    for key, rule in KEYS.items():
        if rule.range is not None and rule.range in _SHAPES:
            yield from _check_value(key, value_at(config, key), rule.range)
    for key in ("callbacks", "eval_callbacks"):
        yield from _check_list(key, config.get(key))


def check_keys(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields a finding for each value that is of another type or out of range. The YAML must have the right shape."""
    texts = list(_check_texts(config))
    yield from texts
    told = {finding.key for finding in texts}
    training = config.get("run_mode") in TRAINING_MODES
    for key, rule in KEYS.items():
        if rule.range is None or rule.range in _SHAPES or rule.training and not training:
            continue
        names = [key] + ([f"{key.rpartition('.')[0]}.{rule.other_name}"] if rule.other_name else [])
        if rule.required:
            yield from _check_empty(config, names, rule.range)
        for name in names:
            if name not in told:
                yield from _check_value(name, value_at(config, name), rule.range)


def check_run_mode(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error unless MindFormers knows run_mode."""
    run_mode = config.get("run_mode")
    if not isinstance(run_mode, str) or run_mode not in RUN_MODES:
        hint = suggestion(str(run_mode), list(RUN_MODES))
        yield error("run_mode", f"run_mode is {run_mode!r}, which is not known.{hint}")


def check_names(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each key that MindFormers refuses in a node all keys of which it knows, and for each node
    that lacks the type of what is built. MindFormers has not read the YAML; its nodes must be of the right kind.
    """
    unread = set() if config.get("run_mode") in TRAINING_MODES else set(_TRAINING_NODES)
    unread |= {"moe_config"} if config.get("use_legacy") is False else set()
    for node, allowed in CLOSED_NODES.items():
        names = (value_at(config, node) or {}) if node and node not in unread else ()
        for name in names:
            if name not in allowed:
                yield error(f"{node}.{name}", f"{name!r} is not a key of {node}.{suggestion(str(name), list(allowed))}")
    for node in _TYPED_NODES:
        if node not in unread and value_at(config, node) and not value_at(config, f"{node}.type"):
            yield error(node, f"{node} has no type, so MindFormers does not know what to build.")


def _check_value(key: str, value: Any, range_: Range) -> Iterator[Finding]:
    if value is not None and value not in range_:
        number = _as_number(value) if int in range_.types else None
        advice = f"Write it without quotes: {number}." if number is not None else ""
        yield error(key, f"{key} is {shown(value)}, but it must be {range_.words}.", advice)


def _as_number(value: Any) -> Optional[str]:
    """Returns a text that is a number as YAML reads it, or None."""
    try:
        return str(float(value) if set(value) & set(".eE") else int(value)) if isinstance(value, str) else None
    except ValueError:
        return None


def _check_empty(config: Mapping[str, Any], names: List[str], range_: Range) -> Iterator[Finding]:
    """Yields an error for a key that is there, under one of its names, and has no value under any."""
    node = value_at(config, names[0].rpartition(".")[0]) or {}
    named = [name for name in names if name.rpartition(".")[2] in node]
    if named and all(value_at(config, name) is None for name in named):
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
            yield from _check_value(f"{where}: {path}", item.get(path), _PATH)


def _check_texts(node: Any, key: str = "") -> Iterator[Finding]:
    """Yields the numbers that YAML reads as text."""
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
