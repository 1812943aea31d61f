"""The flat vector."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from mindlora.training.exchange.exchange import FlatLayout

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
