"""The gradients of LoRADense against the closed form and against differences."""

import numpy as np
import pytest
from mindspore import Tensor, nn

from tests.support.lora_dense import EACH_CELL, IN, OUT, SCALE, adapted
from tests.support.networks import as_array, assert_close, gradients, lora_forward, normal


@pytest.mark.parametrize("shape", [(4, IN), (2, 3, IN)])
def test_gradients_are_the_closed_form(mode, shape):
    lora = adapted(nn.Dense(IN, OUT))
    x, upstream = normal(*shape), normal(*shape[:-1], OUT, seed=4)
    of_x, of_a, of_b = gradients(lora, x, upstream)
    weight, (a, b) = as_array(lora.weight), (as_array(p) for p in lora.lora_parameters())
    rows, flat = x.reshape(-1, IN).astype(np.float64), upstream.reshape(-1, OUT).astype(np.float64)
    assert_close(of_x, (flat @ weight + SCALE * flat @ b @ a).reshape(shape))
    assert_close(of_a, SCALE * (flat @ b).T @ rows)
    assert_close(of_b, SCALE * flat.T @ (rows @ a.T))


@EACH_CELL
def test_gradients_are_the_differences_of_the_oracle(mode, plain):
    cell, activation = plain
    lora = adapted(cell)
    x, upstream = normal(2, 3, IN), normal(2, 3, OUT, seed=4)
    places = [x.astype(np.float64)] + [as_array(p) for p in lora.lora_parameters()]

    def loss():
        y = lora_forward(
            places[0],
            as_array(lora.weight),
            places[1],
            places[2],
            SCALE,
            None if lora.bias is None else as_array(lora.bias),
            activation,
        )
        return (y * upstream).sum()

    for gradient, place in zip(gradients(lora, x, upstream), places):
        assert_close(gradient, _differences(loss, place, step=1e-6), "float32")


def test_gradients_are_the_differences_of_the_cell_itself(mode):
    lora = adapted(nn.Dense(IN, OUT))
    x, upstream = normal(2, IN), normal(2, OUT, seed=4)
    a, b = lora.lora_parameters()
    places = [x.copy(), a.asnumpy().copy(), b.asnumpy().copy()]

    def loss():
        a.set_data(Tensor(places[1]))
        b.set_data(Tensor(places[2]))
        return (as_array(lora(Tensor(places[0]))) * upstream).sum()

    # y is linear in each of x, A and B, so that central differences are exact at any step, and a long one rounds least.
    for gradient, place in zip(gradients(lora, x, upstream), places):
        assert_close(gradient, _differences(loss, place, step=1.0), "float32")


def _differences(loss, place, step):
    """Returns the central differences of ``loss`` in each element of ``place``, an array that ``loss`` reads."""
    result = np.empty(place.shape)
    for index in np.ndindex(place.shape):
        kept = place[index]
        place[index] = kept + step
        above = loss()
        place[index] = kept - step
        below = loss()
        place[index] = kept
        result[index] = (above - below) / (2 * step)
    return result
