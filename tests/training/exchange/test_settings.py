"""What a YAML may say of gradient_exchange, the stages of the density, and what is protected."""

import pytest

from mindlora.errors import ConfigError
from mindlora.training.exchange import ExchangeSettings, FlatLayout, Ranks, exchange_settings, make_exchange
from mindlora.training.exchange.top_k import density_stages, pieces, protected_names
from mindlora.training.exchange.two_level import clipped, machine_groups

LORA = [f"model.layers.{layer}.wq.mindpet_delta_lora_{part}" for layer in range(2, 6) for part in "ab"]


def test_a_name_or_a_node():
    assert exchange_settings("float16") == ExchangeSettings("float16")
    node = {"type": "top_k", "density": 0.01, "protect": [".*wq.*"], "local_size": 4, "check_every": 0}
    assert exchange_settings(node) == ExchangeSettings("top_k", 0.01, 50, [".*wq.*"], 4, 0)


@pytest.mark.parametrize(
    "setting, message",
    [
        ("topk", "is of type 'topk', but it must be one of dense, float16, quantized, top_k."),
        (0.05, "is 0.05, but it must be one of dense, float16, quantized, top_k, or a node with a type."),
        ({"type": "top_k", "ratio": 0.1}, "has no key 'ratio'; it has type, density"),
        ({"type": "top_k", "bits": 4}, ": bits belongs to type quantized, and the type is 'top_k'."),
        ({"type": "quantized", "bits": 5}, ": bits is 5, but it must be 4, 6 or 8."),
        ({"type": "float16", "density": 0.1}, ": density belongs to type top_k, and the type is 'float16'."),
        ({"density": 0.1}, ": density belongs to type top_k, and the type is None."),
        ({"type": "top_k", "density": 0}, ": density is 0: it must be a number above 0 and at most 1."),
        ({"type": "top_k", "density": 1.5}, ": density is 1.5: it"),
        ({"type": "top_k", "density": "5%"}, ": density is '5%': it"),
        ({"type": "top_k", "density": float("nan")}, ": density is nan: it"),
        ({"type": "top_k", "warmup_steps": -1}, ": warmup_steps is -1: it must be a whole number of at least 0."),
        ({"type": "dense", "local_size": 0}, ": local_size is 0: it must be a whole number of at least 1."),
        ({"type": "dense", "check_every": 2.5}, ": check_every is 2.5: it"),
        ({"type": "top_k", "protect": ".*"}, ": protect is '.*', but it must be a list of regular expressions."),
        ({"type": "top_k", "protect": [3]}, ": protect is [3], but it"),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    with pytest.raises(ConfigError) as raised:
        exchange_settings(setting)
    assert str(raised.value).startswith("gradient_exchange" + message if message[0] == ":" else "gradient_exchange ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "density, steps, stages",
    [
        (0.05, 50, [(0, 1.0), (16, 0.25), (33, 0.0625), (50, 0.05)]),
        (0.25, 10, [(0, 1.0), (10, 0.25)]),
        (0.05, 0, [(0, 0.05)]),
        (1, 50, [(0, 1)]),
        (0.9, 2, [(0, 1.0), (2, 0.9)]),
    ],
)
def test_stages_of_the_density(density, steps, stages):
    assert density_stages(density, steps) == stages


def test_a_warmup_shorter_than_its_stages():
    starts = [start for start, _ in density_stages(0.001, 2)]
    assert starts == sorted(set(starts)) and starts[0] == 0 and starts[-1] == 2


def test_protected_by_default_are_the_first_and_the_last_layer_and_saved_modules():
    names = [*LORA, "lm_head.weight", "model.layers.3.norm.weight"]
    assert protected_names(names, None) == {*LORA[:2], *LORA[-2:], *names[-2:]}


def test_protected_by_patterns():
    assert protected_names(LORA, []) == set()
    assert protected_names(LORA, [".*_a", r".*\.3\..*"]) == {name for name in LORA if name[-1] == "a" or ".3." in name}


@pytest.mark.parametrize(
    "names, patterns, message",
    [
        (LORA, ["(", ".*"], "protect has '(', which is no regular expression: "),
        (LORA, ["wq"], f"protect has 'wq', which matches no trained parameter, such as {LORA[0]}."),
        (LORA, [".*"], "protect leaves none of the 8 trained parameters to compress"),
        (LORA[:4], None, "protect leaves none of the 4 trained parameters to compress"),
    ],
)
def test_wrong_protection_is_named(names, patterns, message):
    with pytest.raises(ConfigError) as raised:
        protected_names(names, patterns)
    assert str(raised.value).startswith(f"gradient_exchange: {message}")


def test_pieces_cover_the_vector():
    assert pieces(10, []) == [(0, 10, False)]
    assert pieces(10, [(8, 10), (0, 3)]) == [(0, 3, True), (3, 8, False), (8, 10, True)]
    assert pieces(4, [(0, 4)]) == [(0, 4, True)]


def test_parts_of_spans():
    assert clipped([(0, 3), (5, 9), (12, 14)], 2, 6) == [(0, 1), (3, 6)]


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
