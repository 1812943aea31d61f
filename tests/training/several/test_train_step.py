"""StackedAdamW against numpy: a rate and a step count for each adapter, and adapters that are left as they are."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindlora.training.several.train_step import StackedAdamW

RATES = np.array([0.1, 0.02], np.float32)
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


class Rates(LearningRateSchedule):
    def construct(self, step):
        return Tensor(RATES)


def oracle(weight, gradients, rate):
    """Returns a weight after AdamW's steps with these gradients, in float64."""
    weight, m, v = weight.astype(np.float64), 0.0, 0.0
    for t, gradient in enumerate(gradients, 1):
        m = BETAS[0] * m + (1 - BETAS[0]) * gradient
        v = BETAS[1] * v + (1 - BETAS[1]) * gradient**2
        step = m / (1 - BETAS[0] ** t) / (np.sqrt(v / (1 - BETAS[1] ** t)) + EPS)
        weight = weight * (1 - rate * DECAY) - rate * step
    return weight


@pytest.fixture
def weight():
    values = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    values[0, 2] = 0
    return values


def run(weight, steps):
    """Returns the optimizer after steps of (gradient, which adapters it counts for), and the weight."""
    parameter = Parameter(Tensor(weight), name="wq.mindpet_delta_lora_a")
    optimizer = StackedAdamW([parameter], Rates(), BETAS, EPS, DECAY)
    for gradient, applied in steps:
        optimizer((Tensor(gradient),), Tensor(RATES), Tensor(np.array(applied)))
    return optimizer, parameter.asnumpy()


def gradients(count):
    values = np.random.default_rng(1).normal(size=(count, 2, 3, 4)).astype(np.float32)
    values[:, 0, 2] = 0
    return values


def test_each_adapter_takes_the_steps_that_it_would_take_alone(weight):
    given = gradients(3)
    applied = [(True, True), (False, True), (True, True)]
    optimizer, result = run(weight, zip(given, applied))
    np.testing.assert_allclose(result[0], oracle(weight[0], given[[0, 2], 0], RATES[0]), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(result[1], oracle(weight[1], given[:, 1], RATES[1]), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(optimizer.global_step.asnumpy(), [[2], [3]])
    # Rows beyond the rank stay zero, with weight decay too.
    assert not result[0, 2].any() and not optimizer.exp_avg_sq[0].asnumpy()[0, 2].any()


def test_an_adapter_whose_gradient_does_not_count_keeps_every_bit(weight):
    given = gradients(2)
    broken = given[1].copy()
    broken[0] = np.nan
    states = []
    for steps in ([(given[0], (True, True))], [(given[0], (True, True)), (broken, (False, True))]):
        optimizer, result = run(weight, steps)
        states.append((result, optimizer.exp_avg[0].asnumpy(), optimizer.exp_avg_sq[0].asnumpy()))
    for first, second in zip(*states):
        assert first[0].tobytes() == second[0].tobytes()
        assert np.isfinite(second).all() and first[1].tobytes() != second[1].tobytes()
