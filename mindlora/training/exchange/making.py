"""The exchange that gradient_exchange of a YAML asks for."""

from mindlora.core.errors import ConfigError
from mindlora.training.exchange.exchange import DenseExchange, Exchange, FlatLayout, Float16Exchange
from mindlora.training.exchange.quantized import QuantizedExchange, fits
from mindlora.training.exchange.ranks import Ranks
from mindlora.training.exchange.settings import ExchangeSettings
from mindlora.training.exchange.two_level import TwoLevelExchange, machine_groups, part_size


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
