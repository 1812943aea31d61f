"""What a YAML may say of gradient_exchange, and which ranks make a machine."""

import pytest

from mindlora.errors import ConfigError
from mindlora.training.exchange import ExchangeSettings, FlatLayout, Ranks, exchange_settings, make_exchange
from mindlora.training.exchange.two_level import machine_groups


def test_a_name_or_a_node():
    assert exchange_settings("float16") == ExchangeSettings("float16")
    node = {"type": "quantized", "bits": 4, "local_size": 4, "check_every": 0}
    assert exchange_settings(node) == ExchangeSettings("quantized", 4, 0, 4)


@pytest.mark.parametrize(
    "setting, message",
    [
        ("topk", "is of type 'topk', but it must be one of dense, float16, quantized."),
        (0.05, "is 0.05, but it must be one of dense, float16, quantized, or a node with a type."),
        ({"type": "quantized", "ratio": 0.1}, "has no key 'ratio'; it has type, local_size"),
        ({"type": "float16", "bits": 4}, ": bits belongs to type quantized, and the type is 'float16'."),
        ({"bits": 4}, ": bits belongs to type quantized, and the type is None."),
        ({"type": "quantized", "bits": 5}, ": bits is 5, but it must be 4, 6 or 8."),
        ({"type": "dense", "local_size": 0}, ": local_size is 0: it must be a whole number of at least 1."),
        ({"type": "dense", "check_every": 2.5}, ": check_every is 2.5: it"),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    with pytest.raises(ConfigError) as raised:
        exchange_settings(setting)
    assert str(raised.value).startswith("gradient_exchange" + message if message[0] == ":" else "gradient_exchange ")
    assert message in str(raised.value)


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
