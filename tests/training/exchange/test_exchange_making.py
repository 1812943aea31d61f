"""The exchange of a YAML's gradient_exchange: which ranks make a machine."""

import pytest

from mindlora.core.errors import ConfigError
from mindlora.training.exchange.exchange import FlatLayout, Ranks, machine_groups, make_exchange
from mindlora.training.exchange.settings import ExchangeSettings


def test_machines_of_ranks_that_follow_each_other():
    made = {}
    within, between = machine_groups(Ranks(4, 6), 3, made.__setitem__)
    assert (within.rank, within.count, made[within.group]) == (1, 3, [3, 4, 5])
    assert (between.rank, between.count, made[between.group]) == (1, 2, [1, 4])


@pytest.mark.parametrize("local_size", [3, 4, 8])
def test_ranks_that_make_no_machines(local_size):
    message = f"^gradient_exchange: local_size is {local_size}, and 4 ranks do not make two or more machines"
    with pytest.raises(ConfigError, match=message):
        make_exchange(ExchangeSettings(local_size=local_size), FlatLayout([]), Ranks(0, 4), 4)
