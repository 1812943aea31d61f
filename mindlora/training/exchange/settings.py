"""gradient_exchange, as a YAML gives it, and the exchange that is made from it."""

from dataclasses import dataclass, fields
from typing import Any, Mapping, Optional, Union

from mindlora.common.fields import COUNT, INDEX, check_number
from mindlora.errors import ConfigError
from mindlora.training.exchange.exchange import DenseExchange, Exchange, FlatLayout, Float16Exchange
from mindlora.training.exchange.quantized import QuantizedExchange, fits
from mindlora.training.exchange.ranks import Ranks
from mindlora.training.exchange.two_level import TwoLevelExchange, machine_groups, part_size

TYPES = ("dense", "float16", "quantized")
_BITS = (4, 6, 8)


@dataclass(frozen=True)
class ExchangeSettings:
    """How data-parallel processes exchange gradients.

    Args:
        type (str): "dense" (float32), "float16", or "quantized" (whole numbers of few bits). Default: "dense".
        local_size (int): Ranks of each machine; 1 compresses between all ranks. Default: None, as many as run on this
            machine, or 1 if all of them do.
        check_every (int): Steps between two comparisons of the ranks' adapters; 0 for none. Default: 100.
        bits (int): With quantized, the bits of a number: 4, 6 or 8. Default: 6.

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
            raise ConfigError(f"gradient_exchange has no key {key!r}; it has {', '.join(keys)}.")
        if key == "bits" and setting.get("type") != "quantized":
            raise ConfigError(
                f"gradient_exchange: bits belongs to type quantized, and the type is {setting.get('type')!r}."
            )
    return ExchangeSettings(**setting)


def make_exchange(settings: ExchangeSettings, layout: FlatLayout, ranks: Ranks, on_this_machine: int) -> Exchange:
    """Returns the exchange of one of several ranks; every rank must call it, since it may make groups.

    ``ranks`` are all of them. Raises ConfigError if local_size does not divide them into machines.
    """
    local_size = settings.local_size or (on_this_machine if on_this_machine < ranks.count else 1)
    if ranks.count % local_size or local_size == ranks.count:
        raise ConfigError(
            f"gradient_exchange: local_size is {local_size}, and {ranks.count} ranks do not make two or more machines "
            "of that size. Set it to the number of ranks on each machine, or to 1."
        )
    if local_size == 1:
        return _one_level(settings, layout.size, ranks)
    within, between = machine_groups(ranks, local_size)
    part = part_size(layout.size, within)
    return TwoLevelExchange(layout.size, within, _one_level(settings, part, between))


def _one_level(settings, size, ranks):
    if settings.type == "quantized":
        if not fits(settings.bits, ranks.count):
            raise ConfigError(
                f"gradient_exchange: {ranks.count} ranks cannot add up numbers of {settings.bits} bits. Set bits to 6 "
                "or 8, or local_size to the ranks of a machine, so that fewer exchange with each other."
            )
        return QuantizedExchange(size, ranks, settings.bits)
    return {"dense": DenseExchange, "float16": Float16Exchange}[settings.type](size, ranks)
