"""Numbers of a YAML that MindFormers reads only after it has read the data or built the network. Imports neither."""

import math
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional, Tuple

from mindlora.common.text import shown
from mindlora.common.yaml_file import value_at


class _Kind(NamedTuple):
    """What a number must be."""

    types: Tuple[type, ...]
    suits: Callable[[Any], bool]
    words: str


_COUNT = _Kind((int,), lambda value: value >= 1, "a whole number of at least 1")
_INDEX = _Kind((int,), lambda value: value >= 0, "a whole number of at least 0")
_NOT_NEGATIVE = _Kind((int, float), lambda value: 0 <= value < math.inf, "a number of at least 0")
_POSITIVE = _Kind((int, float), lambda value: 0 < value < math.inf, "a number above 0")
_SHARE = _Kind((int, float), lambda value: 0 <= value <= 1, "a number from 0 to 1")

_MODEL = "model.model_config"
# Counts that no model can do without, each with all its names; and what no training can.
_SIZES = (
    ("seq_length",),
    ("hidden_size",),
    ("vocab_size",),
    ("num_layers", "num_hidden_layers"),
    ("num_heads", "num_attention_heads"),
)
_RUN = "runner_config"
_COUNTS_OF_TRAINING = (("epochs",), ("batch_size",))
_OPTIONAL_SIZES = ("n_kv_heads", "num_key_value_heads", "intermediate_size", "ffn_hidden_size")
# Read in each run, and the others when it trains.
_ALWAYS = {"seed": _INDEX, **{f"{_MODEL}.{name}": _COUNT for name in _OPTIONAL_SIZES}}
_TRAINING = {
    "lr_schedule.learning_rate": _NOT_NEGATIVE,
    "lr_schedule.warmup_ratio": _SHARE,
    "optimizer.learning_rate": _NOT_NEGATIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "runner_wrapper.max_grad_norm": _POSITIVE,
    "runner_wrapper.scale_sense": _POSITIVE,
    "train_dataset.num_parallel_workers": _COUNT,
}


def number_mistakes(config: Mapping[str, Any], training: bool) -> Iterator[str]:
    """Yields a sentence for each number that is none, or that is out of range.

    Args:
        config (mapping): The content of the YAML. Keys that it does not have are MindFormers' to fill in.
        training (bool): Whether the run trains.
    """
    for key, kind in {**_ALWAYS, **(_TRAINING if training else {})}.items():
        yield from _mistake(key, value_at(config, key), kind)
    for node, counts in ((_MODEL, _SIZES), (_RUN, _COUNTS_OF_TRAINING if training else ())):
        for names in counts:
            yield from _count_mistakes(node, value_at(config, node) or {}, names)


def _count_mistakes(key: str, node: Mapping[str, Any], names: Tuple[str, ...]) -> Iterator[str]:
    """Yields what is wrong in a count that must have a value if it is there, under one of its names."""
    found = {name: node[name] for name in names if name in node}
    given = {name: value for name, value in found.items() if value is not None}
    if found and not given:
        yield f"{key}.{next(iter(found))} has no value, but it must be {_COUNT.words}."
    for name, value in given.items():
        yield from _mistake(f"{key}.{name}", value, _COUNT)


def _mistake(key: str, value: Any, kind: _Kind) -> Iterator[str]:
    # scale_sense may be a node.
    if value is None or (isinstance(value, Mapping) and "type" in value):
        return
    if isinstance(value, bool) or not isinstance(value, kind.types) or not kind.suits(value):
        yield f"{key} is {shown(value)}, but it must be {kind.words}.{_advice(value)}"


def _advice(value: Any) -> str:
    return f" Write it without quotes: {number}." if (number := _as_number(value)) is not None else ""


def _as_number(value: Any) -> Optional[str]:
    """Returns a text that is a number as YAML reads it, or None."""
    try:
        return str(float(value) if set(value) & set(".eE") else int(value)) if isinstance(value, str) else None
    except ValueError:
        return None
