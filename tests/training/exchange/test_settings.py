"""What a YAML may say of gradient_exchange."""

import pytest

from mindlora.core.errors import ConfigError
from mindlora.training.exchange.settings import ExchangeSettings, exchange_settings


def test_a_name_or_a_node():
    assert exchange_settings("float16") == ExchangeSettings("float16")
    node = {"type": "quantized", "bits": 4, "local_size": 4, "check_every": 0}
    assert exchange_settings(node) == ExchangeSettings("quantized", 4, 0, 4)


@pytest.mark.parametrize(
    "setting, message",
    [
        ("topk", "is of type 'topk', but it must be one of dense, float16, quantized."),
        (0.05, "is 0.05, but it must be one of dense, float16, quantized, or a node with a type."),
        ({"type": "quantized", "ratio": 0.1}, "has no key 'ratio': use type, local_size"),
        ({"type": "float16", "bits": 4}, ": bits belongs to type quantized, but the type is 'float16'."),
        ({"bits": 4}, ": bits belongs to type quantized, but the type is None."),
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
