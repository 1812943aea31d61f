"""gradient_exchange, as a YAML gives it: a name, or a node with a type and what the type takes."""

from dataclasses import dataclass, fields
from typing import Any, Mapping, Optional, Sequence, Union

from mindlora.errors import ConfigError

TYPES = ("dense", "float16", "quantized", "top_k")
# Keys that one type alone takes.
_ONLY = {**dict.fromkeys(("density", "warmup_steps", "protect"), "top_k"), "bits": "quantized"}
_BITS = (4, 6, 8)


@dataclass(frozen=True)
class ExchangeSettings:
    """How data-parallel processes exchange gradients.

    Args:
        type (str): "dense" (all elements in float32), "float16", "quantized" (whole numbers of few bits), or "top_k"
            (the largest elements alone). Default: "dense".
        density (float): With top_k, the share of the elements that is sent, in (0, 1]. Default: 0.05.
        warmup_steps (int): With top_k, steps in which the density falls from 1 to ``density``. Default: 50.
        protect (list of str): With top_k, regular expressions for the whole names of parameters that are always sent.
            Default: None, those of the first and the last layer that have an adapter, and of modules_to_save.
        local_size (int): Ranks of each machine; 1 compresses between all ranks. Default: None, as many as run on this
            machine, or 1 if all of them do.
        check_every (int): Steps between two comparisons of the ranks' adapters; 0 for none. Default: 100.
        bits (int): With quantized, the bits of a number: 4, 6 or 8. Default: 6.

    Raises:
        ConfigError: A value is out of range.
    """

    type: str = "dense"
    density: float = 0.05
    warmup_steps: int = 50
    protect: Optional[Sequence[str]] = None
    local_size: Optional[int] = None
    check_every: int = 100
    bits: int = 6

    def __post_init__(self):
        if self.type not in TYPES:
            raise ConfigError(f"gradient_exchange is of type {self.type!r}, but it must be one of {', '.join(TYPES)}.")
        if self.bits not in _BITS:
            raise ConfigError(f"gradient_exchange: bits is {self.bits!r}, but it must be 4, 6 or 8.")
        if not _is_number(self.density) or not 0 < self.density <= 1:
            raise ConfigError(
                f"gradient_exchange: density is {self.density!r}, but it must be a number above 0 and up to 1."
            )
        for name, least in (("warmup_steps", 0), ("local_size", 1), ("check_every", 0)):
            value = getattr(self, name)
            if (value is None and name == "local_size") or (_is_number(value) and value == int(value) >= least):
                continue
            raise ConfigError(
                f"gradient_exchange: {name} is {value!r}, but it must be a whole number of at least {least}."
            )
        if self.protect is not None and not _are_texts(self.protect):
            raise ConfigError(
                f"gradient_exchange: protect is {self.protect!r}, but it must be a list of regular expressions."
            )


def exchange_settings(setting: Union[str, Mapping[str, Any]]) -> ExchangeSettings:
    """Returns the settings of a YAML's ``gradient_exchange``.

    Args:
        setting (str or dict): A type, or a node with the fields of ExchangeSettings.

    Raises:
        ConfigError: It is neither, a key is unknown or belongs to another type, or a value is out of range.
    """
    if isinstance(setting, str):
        return ExchangeSettings(setting)
    if not isinstance(setting, Mapping):
        raise ConfigError(
            f"gradient_exchange is {setting!r}, but it must be one of {', '.join(TYPES)}, or a node with a type."
        )
    known = [field.name for field in fields(ExchangeSettings)]
    for key in setting:
        if key not in known:
            raise ConfigError(f"gradient_exchange has no key {key!r}; it has {', '.join(known)}.")
        if key in _ONLY and setting.get("type") != _ONLY[key]:
            raise ConfigError(
                f"gradient_exchange: {key} belongs to type {_ONLY[key]}, and the type is {setting.get('type')!r}."
            )
    return ExchangeSettings(**setting)


def _are_texts(value):
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)
