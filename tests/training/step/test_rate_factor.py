"""RateFactor: the rates of an optimizer times one factor, for schedules, groups and fixed rates, compiled once."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora.training.step.rate_factor import RateFactor
from tests.conftest import in_mode


class Falling(nn.learning_rate_schedule.LearningRateSchedule):
    """first, first - 0.01, first - 0.02, ..."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def construct(self, global_step):
        return self.first - 0.01 * global_step.astype(ms.float32)


class Step(nn.Cell):
    """A step of gradient descent whose gradients are ones, so that a weight falls by its learning rate."""

    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, x):
        gradients = ()
        for weight in self.optimizer.parameters:
            gradients += (ops.ones_like(weight) * x,)
        return self.optimizer(gradients)


def weights():
    return [ms.Parameter(Tensor([0.0], ms.float32), name=name) for name in "ab"]


def optimizers():
    a, b = weights()
    yield "one schedule", nn.SGD([a, b], Falling(0.5)), (a, b), ([0.5, 0.49, 0.48], [0.5, 0.49, 0.48])
    a, b = weights()
    groups = [{"params": [a], "lr": Falling(0.5)}, {"params": [b], "lr": Falling(8.0)}]
    yield "schedules in groups", nn.SGD(groups, 0.1), (a, b), ([0.5, 0.49, 0.48], [8.0, 7.99, 7.98])
    a, b = weights()
    yield "one fixed rate", nn.SGD([a, b], 0.5), (a, b), ([0.5] * 3, [0.5] * 3)
    a, b = weights()
    groups = [{"params": [a], "lr": 0.5}, {"params": [b], "lr": 8.0}]
    yield "fixed rates in groups", nn.SGD(groups, 0.1), (a, b), ([0.5] * 3, [8.0] * 3)


CASES = {name: (optimizer, parameters, rates) for name, optimizer, parameters, rates in optimizers()}


@pytest.mark.parametrize("name", CASES)
def test_every_rate_is_multiplied(name):
    optimizer, parameters, rates = CASES[name]
    factor = RateFactor(optimizer)
    with in_mode(ms.GRAPH_MODE):
        step = Step(optimizer)
        for number, (guard, plateau) in enumerate([(None, None), (0.5, None), (0.5, 0.2)]):
            for source, value in (("guard", guard), ("plateau", plateau)):
                if value is not None:
                    factor.set(source, value)
            before = [float(parameter.asnumpy()[0]) for parameter in parameters]
            step(Tensor(1.0, ms.float32))
            fell = [old - float(parameter.asnumpy()[0]) for old, parameter in zip(before, parameters)]
            product = (guard or 1) * (plateau or 1)
            np.testing.assert_allclose(fell, [rate[number] * product for rate in rates], rtol=1e-5)
        assert len(step.compile_cache) == 1  # A new factor compiles nothing.
    assert factor.factors == {"guard": 0.5, "plateau": 0.2}
