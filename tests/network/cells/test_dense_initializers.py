"""The names, shapes and initial values of A and B in a LoRADense."""

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.common.initializer import Normal

from mindlora import LoraConfig, LoRADense
from mindlora.core.errors import ConfigError
from tests.support.lora_dense import ALPHA, IN, OUT, RANK
from tests.support.networks import as_array


def test_shapes_names_and_default_values_of_the_parameters():
    lora = LoRADense(400, 30, 64, 8)
    assert [(p.name, p.shape, p.requires_grad) for p in lora.get_parameters()] == [
        ("weight", (30, 400), True),
        ("bias", (30,), True),
        ("mindpet_delta_lora_a", (64, 400), True),
        ("mindpet_delta_lora_b", (30, 64), True),
    ]
    a, b = (p.asnumpy() for p in lora.lora_parameters())
    bound = 1 / np.sqrt(400)  # He uniform with negative_slope sqrt(5)
    assert 0.99 * bound < a.max() <= bound and -bound <= a.min() < -0.99 * bound
    assert abs(a.mean()) < 0.03 * bound
    assert abs(a.std() / (bound / np.sqrt(3)) - 1) < 0.02
    assert not b.any()


def test_two_cells_have_different_a():
    first, second = (LoRADense(IN, OUT, RANK, ALPHA).mindpet_delta_lora_a.asnumpy() for _ in range(2))
    assert (first != second).all()


@pytest.mark.parametrize(
    "name, std",
    [
        ("normal", 0.01),
        ("uniform", 0.07 / np.sqrt(3)),
        ("xavier_uniform", np.sqrt(2 / (400 + 64))),
        ("he_normal", np.sqrt(2 / 400)),
        ("he_uniform", np.sqrt(2 / 400)),
        ("kaiming_uniform", 1 / np.sqrt(3 * 400)),
        (Normal(sigma=0.5, mean=0.0), 0.5),
    ],
)
def test_the_initializer_that_is_named_is_the_one_used(name, std):
    dense = nn.Dense(400, 400)
    a = LoRADense.from_dense(dense, LoraConfig(lora_rank=64, lora_a_init=name)).mindpet_delta_lora_a.asnumpy()
    assert abs(a.std() / std - 1) < 0.05 and abs(a.mean()) < 0.05 * std
    if name != "kaiming_uniform":  # for B, the fan-in is the rank
        b = LoRADense.from_dense(nn.Dense(64, 64), LoraConfig(lora_rank=400, lora_b_init=name)).mindpet_delta_lora_b
        assert abs(b.asnumpy().std() / std - 1) < 0.05


def test_constants():
    lora = LoRADense(IN, OUT, RANK, ALPHA, lora_a_init="zeros", lora_b_init="ones")
    assert not lora.mindpet_delta_lora_a.asnumpy().any()
    assert (lora.mindpet_delta_lora_b.asnumpy() == 1).all()


@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
def test_a_tensor_gives_the_initial_values(param_init_type):
    # Quarters are exact in each dtype.
    a, b = np.arange(RANK * IN).reshape(RANK, IN) / 4, np.arange(OUT * RANK).reshape(OUT, RANK) / 4
    lora = LoRADense(
        IN,
        OUT,
        RANK,
        ALPHA,
        lora_a_init=Tensor(a, getattr(ms, param_init_type)),
        lora_b_init=Tensor(b, getattr(ms, param_init_type)),
        param_init_type=param_init_type,
    )
    np.testing.assert_array_equal(as_array(lora.mindpet_delta_lora_a), a)
    np.testing.assert_array_equal(as_array(lora.mindpet_delta_lora_b), b)


@pytest.mark.parametrize(
    "inits, message",
    [
        (
            {"lora_a_init": Tensor(np.ones((IN, RANK), np.float32))},
            f"lora_a_init is a Tensor of shape [{IN}, {RANK}]: its shape must be [{RANK}, {IN}].",
        ),
        (
            {"lora_b_init": Tensor(np.ones((OUT, RANK + 1), np.float32))},
            f"lora_b_init is a Tensor of shape [{OUT}, {RANK + 1}]: its shape must be [{OUT}, {RANK}].",
        ),
        ({"lora_a_init": "kaming"}, "lora_a_init is 'kaming', which is not a MindSpore initializer: "),
        ({"lora_b_init": "nonsense"}, "lora_b_init is 'nonsense', which is not a MindSpore initializer: "),
        ({"lora_rank": 0}, "lora_rank is 0: it must be a whole number of at least 1."),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0: it must be a number in [0, 1)."),
    ],
)
def test_wrong_initializers_and_numbers_are_refused(inits, message):
    arguments = {"lora_rank": RANK, "lora_alpha": ALPHA, **inits}
    with pytest.raises(ConfigError, match=re.escape(message)):
        LoRADense(IN, OUT, **arguments)
    if "lora_dropout" not in inits and "lora_rank" not in inits:
        with pytest.raises(ConfigError, match=re.escape(message)):
            LoRADense.from_dense(nn.Dense(IN, OUT), LoraConfig(**arguments))
