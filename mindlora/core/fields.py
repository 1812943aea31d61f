"""Checks of configuration fields: each raises ConfigError with the field, its value and what it must be."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Callable, Iterable, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.text import suggestion

# The tokens that do not count in a model's loss, from its configuration or by MindFormers' defaults.

# MindFormers' own defaults, the same for all models that it trains.
IGNORE_TOKEN_ID = -100
PAD_TOKEN_ID = 0


def ignore_token_id(config: Any) -> int:
    """Returns the label that does not count in the loss.

    Args:
        config (PretrainedConfig or mapping): The configuration of a model, or its node in a YAML. Configurations of
            mcore models lack the key unless a YAML sets it.
    """
    return _value(config, "ignore_token_id", IGNORE_TOKEN_ID)


def pad_token_id(config: Any) -> int:
    """Returns the padding token, which does not count in the loss; ``config`` is as in ``ignore_token_id``."""
    return _value(config, "pad_token_id", PAD_TOKEN_ID)


def _value(config: Any, name: str, default: int) -> int:
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return default if value is None else value


_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}


# The dtypes in which linear cells on a CPU multiply, whatever dtype they compute in.
PRODUCT_DTYPES = ("float32", "bfloat16")


def check_product_dtype(value: Any) -> None:
    """Raises ConfigError unless product_dtype is one of PRODUCT_DTYPES."""
    if value not in PRODUCT_DTYPES:
        raise ConfigError(f"product_dtype is {value!r}: it must be one of {', '.join(PRODUCT_DTYPES)}.")


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a field may hold; ``value in range`` is False for a bool.

    Attributes:
        words (str): What the number must be, for messages.
        holds (callable): Whether a number of the right type is in the range.
        types (tuple of type): int, float or both.
    """

    words: str
    holds: Callable[[Any], bool]
    types: Tuple[type, ...] = (int, float)

    def __contains__(self, value: object) -> bool:
        return not isinstance(value, bool) and isinstance(value, self.types) and self.holds(value)


def whole_numbers(least: int) -> Range:
    """Returns the range of whole numbers of at least ``least``."""
    return Range(f"a whole number of at least {least}", lambda value: value >= least, (int,))


def numbers(least: float) -> Range:
    """Returns the range of finite numbers of at least ``least``."""
    return Range(f"a number of at least {least}", lambda value: least <= value < math.inf)


COUNT = whole_numbers(1)
INDEX = whole_numbers(0)
NOT_NEGATIVE = numbers(0)
POSITIVE = Range("a number above 0", lambda value: 0 < value < math.inf)
SHARE = Range("a number from 0 to 1", lambda value: 0 <= value <= 1)
FRACTION = Range("a number above 0 and below 1", lambda value: 0 < value < 1, (float,))
FACTOR = Range("a number above 0 and at most 1", lambda value: 0 < value <= 1)


def dtype_name(value: Any, field: str) -> str:
    """Returns float32, float16 or bfloat16 for a dtype or one of its names."""
    name = _DTYPES.get(str(value).lower())
    if name is None:
        raise ConfigError(f"{field} is {value!r}: it must be one of float32, float16, bfloat16.")
    return name


def check_flag(value: Any, field: str) -> None:
    """Checks that ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{field} is {value!r}: it must be True or False.")


def check_number(value: Any, field: str, range_: Range) -> None:
    """Checks that ``value`` is in the range."""
    if value not in range_:
        raise ConfigError(f"{field} is {value!r}: it must be {range_.words}.")


def check_names(value: Any, field: str) -> None:
    """Checks that ``value`` is None or a list of names."""
    if value is None:
        return
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(f"{field} is {value!r}: it must be a non-empty list of names.")
    for item in value:
        if not isinstance(item, str) or not item:
            raise ConfigError(f"{field} holds {item!r}: each item must be a name.")


def check_keys(node: Mapping, kind: type, field: str) -> None:
    """Raises ConfigError if a node has a key that is not a field of the dataclass ``kind``."""
    keys = [each.name for each in dataclasses.fields(kind)]
    for key in node:
        if key not in keys:
            raise ConfigError(f"{field} has no key {key!r}.{suggestion(str(key), keys)}")


def check_patterns(value: Any, field: str) -> None:
    """Checks that ``value`` is None, a regular expression or a list of names."""
    if not isinstance(value, str):
        check_names(value, field)
        return
    if not value:
        raise ConfigError(f"{field} is an empty string: name at least one linear cell.")
    try:
        re.compile(value)
    except re.error as error:
        raise ConfigError(
            f"{field} is {value!r}, which is not a regular expression: {error}. Write, for example, .*wq."
        ) from error


def check_values_by_pattern(value: Any, field: str, check_value: Callable[[Any, str], None]) -> None:
    """Checks that ``value`` is None, or maps regular expressions to values that ``check_value`` accepts."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ConfigError(f"{field} is {value!r}: it must map regular expressions on paths to values.")
    for expression, item in value.items():
        try:
            re.compile(expression)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"{field} holds {expression!r}, which is not a regular expression: {error}. Correct the expression."
            ) from error
        check_value(item, f"{field}[{expression!r}]")


def check_indices(value: Any, field: str, expected: str) -> None:
    """Checks that ``value`` is None, an integer of at least 0 or a list of them; ``expected`` says this in words."""
    if value is None:
        return
    items = value if isinstance(value, (list, tuple)) else [value]
    if not items:
        raise ConfigError(f"{field} is an empty list: name at least one layer, or leave it out for all.")
    for item in items:
        check_number(item, field, dataclasses.replace(INDEX, words=expected))


def settle_dependents(config: Any, flag: str, defaults: Mapping) -> None:
    """Sets fields of ``flag`` alone to their defaults where they are None; without ``flag``, they must be None."""
    for field, default in defaults.items():
        value = getattr(config, field)
        if not getattr(config, flag) and value is not None:
            raise ConfigError(
                f"{field} is {value!r}, but {flag} is not set, so it has no effect. Set {flag}: True, or remove it."
            )
        if getattr(config, flag) and value is None:
            setattr(config, field, default)


def refuse_fields(config: Any, flag: str, fields: Iterable[str], method: str) -> None:
    """Checks that none of ``fields`` is set together with ``flag``, whose ``method`` does not have them."""
    for field in fields:
        if getattr(config, field):
            raise ConfigError(
                f"{flag} is True and {field} is {getattr(config, field)!r}, which {method} does not have. "
                "Leave one of them out."
            )
