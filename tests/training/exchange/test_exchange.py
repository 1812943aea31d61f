"""The parts of an exchange: the flat vector, and which ranks make a machine."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from mindlora.core.errors import ConfigError
from mindlora.training.exchange.exchange import FlatLayout, Ranks, machine_groups, make_exchange
from mindlora.training.exchange.settings import ExchangeSettings

SHAPES = {"a": (3, 2), "b": (5,), "c": (), "d": (2, 1, 2)}


@pytest.fixture
def layout():
    return FlatLayout([Parameter(Tensor(np.zeros(shape, np.float32)), name=name) for name, shape in SHAPES.items()])


def test_gradients_become_one_vector_and_come_back(layout, mode):
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]
    flat = layout.flatten(tuple(map(Tensor, gradients)))
    assert flat.dtype == ms.float32 and layout.size == 16
    assert (flat.asnumpy() == np.concatenate([gradient.ravel() for gradient in gradients])).all()
    for gradient, returned in zip(gradients, layout.unflatten(flat)):
        assert returned.shape == gradient.shape and (returned.asnumpy() == gradient).all()


def test_float16_becomes_float32(layout, mode):
    gradients = tuple(Tensor(np.full(shape, 0.5, np.float16)) for shape in SHAPES.values())
    flat = layout.flatten(gradients)
    assert flat.dtype == ms.float32 and (flat.asnumpy() == 0.5).all()


# Which ranks make a machine


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
