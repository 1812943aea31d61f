"""ExchangeSettings: how data-parallel processes exchange gradients, from a YAML's gradient_exchange."""

from dataclasses import dataclass, fields
from typing import Any, Mapping, Optional, Union

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, INDEX, check_number

TYPES = ("dense", "float16", "quantized")
_BITS = (4, 6, 8)


@dataclass(frozen=True)
class ExchangeSettings:
    """Settings of the gradient exchange between data-parallel processes.

    Args:
        type (str): "dense" (float32), "float16", or "quantized" (integers of few bits). Default: "dense".
        local_size (int): Ranks of each machine; 1 compresses between all ranks. Default: None, the number of ranks on
            this machine, or 1 if all of them run on it.
        check_every (int): Steps between two comparisons of the ranks' adapters; 0 for none. Default: 100.
        bits (int): Bits of a number with quantized: 4, 6 or 8. Default: 6.

    Raises:
        ConfigError: A value is out of range.
    """

    type: str = "dense"
    local_size: Optional[int] = None
    check_every: int = 100
    bits: int = 6

    def __post_init__(self):
        if self.type not in TYPES:
            raise ConfigError(f"gradient_exchange is of type {self.type!r}, but it must be one of {', '.join(TYPES)}.")
        if self.bits not in _BITS:
            raise ConfigError(f"gradient_exchange: bits is {self.bits!r}, but it must be 4, 6 or 8.")
        check_number(self.check_every, "gradient_exchange: check_every", INDEX)
        if self.local_size is not None:
            check_number(self.local_size, "gradient_exchange: local_size", COUNT)


def exchange_settings(setting: Union[str, Mapping[str, Any]]) -> ExchangeSettings:
    """Returns the settings of a YAML's ``gradient_exchange``: a type, or a node with the fields of ExchangeSettings.

    Raises ConfigError if it is neither, a key is unknown or belongs to another type, or a value is out of range.
    """
    if isinstance(setting, str):
        return ExchangeSettings(setting)
    if not isinstance(setting, Mapping):
        raise ConfigError(
            f"gradient_exchange is {setting!r}, but it must be one of {', '.join(TYPES)}, or a node with a type."
        )
    keys = [field.name for field in fields(ExchangeSettings)]
    for key in setting:
        if key not in keys:
            raise ConfigError(f"gradient_exchange has no key {key!r}: use {', '.join(keys)}.")
        if key == "bits" and setting.get("type") != "quantized":
            raise ConfigError(
                f"gradient_exchange: bits belongs to type quantized, but the type is {setting.get('type')!r}. Leave "
                "bits out."
            )
    return ExchangeSettings(**setting)
