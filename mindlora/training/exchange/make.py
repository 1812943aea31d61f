"""From settings to the exchange of one rank."""

from typing import Callable, List, Optional, Tuple

from mindspore.communication import create_group

from mindlora.errors import ConfigError
from mindlora.training.exchange.dense import DenseExchange
from mindlora.training.exchange.exchange import Exchange
from mindlora.training.exchange.float16 import Float16Exchange
from mindlora.training.exchange.layout import FlatLayout, Span
from mindlora.training.exchange.protection import protected_names
from mindlora.training.exchange.quantized import QuantizedExchange, fits
from mindlora.training.exchange.ranks import Ranks
from mindlora.training.exchange.settings import ExchangeSettings
from mindlora.training.exchange.stages import density_stages
from mindlora.training.exchange.top_k import TopKExchange
from mindlora.training.exchange.two_level import TwoLevelExchange, part_size


def make_exchange(settings: ExchangeSettings, layout: FlatLayout, ranks: Ranks, on_this_machine: int) -> Exchange:
    """Returns the exchange of one of several ranks; every rank must call it, since it may make groups.

    Args:
        settings (ExchangeSettings): What to build.
        layout (FlatLayout): The layout of the gradients.
        ranks (Ranks): All ranks.
        on_this_machine (int): How many of them run on this machine.

    Raises:
        ConfigError: local_size does not divide the ranks into machines, or protect is wrong.
    """
    protected: List[Span] = []
    if settings.type == "top_k" and settings.density < 1:
        protected = layout.spans(protected_names(layout.names, settings.protect))
    local_size = settings.local_size or (on_this_machine if on_this_machine < ranks.count else 1)
    if ranks.count % local_size or local_size == ranks.count:
        raise ConfigError(
            f"gradient_exchange: local_size is {local_size}, and {ranks.count} ranks do not make two or more machines "
            "of that size. Set it to the number of ranks on each machine, or to 1."
        )
    if local_size == 1:
        return _one_level(settings, layout.size, ranks, protected)
    within, between = machine_groups(ranks, local_size)
    part = part_size(layout.size, within)
    own = clipped(protected, within.rank * part, part)
    return TwoLevelExchange(layout.size, within, _one_level(settings, part, between, own))


def machine_groups(
    ranks: Ranks, local_size: int, make_group: Optional[Callable[[str, List[int]], None]] = None
) -> Tuple[Ranks, Ranks]:
    """Returns the ranks of this rank's machine, and those with the same number on every machine.

    Args:
        ranks (Ranks): All ranks; those of a machine follow each other.
        local_size (int): Ranks of each machine.
        make_group (callable): Called with (name, ranks) for both. Default: None, MindSpore's create_group.
    """
    machine, number = divmod(ranks.rank, local_size)
    machines = ranks.count // local_size
    names = f"exchange_machine_{machine}", f"exchange_number_{number}"
    members = (
        [machine * local_size + i for i in range(local_size)],
        [number + i * local_size for i in range(machines)],
    )
    for name, group in zip(names, members):
        (make_group or create_group)(name, group)
    return Ranks(number, local_size, names[0]), Ranks(machine, machines, names[1])


def clipped(spans: List[Span], start: int, size: int) -> List[Span]:
    """Returns what lies of ``spans`` in a part of the vector, counted from the part's start."""
    moved = [(max(0, begin - start), min(size, end - start)) for begin, end in spans]
    return [(begin, end) for begin, end in moved if begin < end]


def _one_level(settings, size, ranks, protected):
    if settings.type == "top_k":
        return TopKExchange(size, ranks, density_stages(settings.density, settings.warmup_steps), protected)
    if settings.type == "quantized":
        if not fits(settings.bits, ranks.count):
            raise ConfigError(
                f"gradient_exchange: {ranks.count} ranks cannot add up numbers of {settings.bits} bits. Set bits to 6 "
                "or 8, or local_size to the ranks of a machine, so that fewer exchange with each other."
            )
        return QuantizedExchange(size, ranks, settings.bits)
    return {"dense": DenseExchange, "float16": Float16Exchange}[settings.type](size, ranks)
