"""LoraTrainOneStepCell between two steps: its record, limits, rate factor, stop request and gradient norms."""

import math

import mindspore as ms
import numpy as np
import pytest
from mindformers.wrapper import MFTrainOneStepCell
from mindspore import Tensor, nn, ops

from mindlora.core.errors import ConfigError
from mindlora.models.names import TRANSIENT
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.conftest import in_mode

RATE = 0.5


class Loss(nn.Cell):
    """mean((x w + b - target)^2), which counts no tokens."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor([0.5, -1.0], ms.float32), name="weight")
        self.bias = ms.Parameter(Tensor([0.25], ms.float32), name="bias")

    def construct(self, x, target):
        return (((x * self.weight).sum(-1) + self.bias - target) ** 2).mean()


class Constant(nn.learning_rate_schedule.LearningRateSchedule):
    def construct(self, global_step):
        return Tensor(RATE, ms.float32) + 0 * global_step.astype(ms.float32)


@pytest.fixture
def batch():
    rng = np.random.default_rng(1)
    return rng.normal(size=(4, 2)).astype(np.float32), rng.normal(size=4).astype(np.float32)


def train_step(schedule=None, **keys):
    network = Loss()
    cell = LoraTrainOneStepCell(network, nn.SGD(network.trainable_params(), schedule or Constant()), **keys)
    return cell.set_train()


@pytest.fixture(scope="module", params=[0, 1], ids=["graph", "pynative"])
def compiled(request):
    """A train step in graph mode or in PyNative, compiled once for all tests."""
    with in_mode(request.param):
        yield train_step(record_gradient_norms=True)


@pytest.fixture
def cell(compiled):
    """The train step as it begins."""
    state = zip(compiled.network.trainable_params(), Loss().trainable_params())
    for parameter, value in (*state, (compiled.optimizer.global_step, 0), (compiled.stop_request, 0)):
        # Not set_data: where only a branch of a graph reads a parameter, it would keep its old value.
        ops.assign(parameter, Tensor(value, parameter.dtype).reshape(parameter.shape))
    compiled.set_limits(math.inf, math.inf)
    for source in compiled.rate_factors:
        compiled.set_rate_factor(source, 1.0)
    return compiled


def values(cell):
    return np.concatenate([parameter.asnumpy().copy() for parameter in cell.network.trainable_params()])


def gradients(x, target):
    """The oracle: loss, gradient of the weight and gradient of the bias at the initial values."""
    difference = x @ np.array([0.5, -1.0]) + 0.25 - target
    return (difference**2).mean(), 2 * (difference[:, None] * x).mean(0), 2 * difference.mean()


def test_the_record_says_what_the_step_measured(cell, batch):
    cell(*map(Tensor, batch))
    loss, of_weight, of_bias = gradients(*batch)
    record = cell.last_record()
    norm = math.sqrt((of_weight**2).sum() + of_bias**2)
    np.testing.assert_allclose([record.loss, record.gradient_norm, record.learning_rate], [loss, norm, RATE], rtol=1e-5)
    assert (record.tokens, record.skipped, record.stop) == (None, False, False)
    norms = cell.gradient_norms()
    assert list(norms) == ["weight", "bias"]
    np.testing.assert_allclose(list(norms.values()), [np.linalg.norm(of_weight), abs(of_bias)], rtol=1e-5)


def test_gradient_norms_that_are_not_recorded_are_an_error():
    with pytest.raises(ConfigError, match="runner_wrapper.record_gradient_norms: True"):
        train_step().gradient_norms()


def test_a_step_beyond_a_limit_changes_nothing(cell, batch):
    loss, of_weight, of_bias = gradients(*batch)
    norm = math.sqrt((of_weight**2).sum() + of_bias**2)
    before = values(cell)
    for limits in ((0.99 * loss, math.inf), (math.inf, 0.99 * norm)):
        cell.set_limits(*limits)
        overflow = cell(*map(Tensor, batch))[1]
        assert cell.last_record().skipped and not bool(overflow.asnumpy())
        np.testing.assert_array_equal(values(cell), before)
        assert int(cell.optimizer.global_step.asnumpy().item()) == 0
    cell.set_limits(1.01 * loss, 1.01 * norm)
    cell(*map(Tensor, batch))
    assert not cell.last_record().skipped
    expected = before - RATE * np.append(of_weight, of_bias)
    np.testing.assert_allclose(values(cell), expected, rtol=1e-5)


def test_the_factor_applies_to_the_next_step_and_is_in_what_is_reported(cell, batch):
    cell.set_rate_factor("guard", 0.5)
    cell.set_rate_factor("plateau", 0.1)
    before = values(cell)
    learning_rate = cell(*map(Tensor, batch))[3]
    _, of_weight, of_bias = gradients(*batch)
    np.testing.assert_allclose(values(cell), before - 0.05 * RATE * np.append(of_weight, of_bias), rtol=1e-5)
    np.testing.assert_allclose([learning_rate.asnumpy(), cell.last_record().learning_rate], 0.05 * RATE, rtol=1e-6)
    assert cell.rate_factors == {"guard": 0.5, "plateau": 0.1}


def test_the_factor_changes_between_two_steps(cell, batch):
    """A compiled graph must see it also where the rate is used, in the branch of steps that are not skipped."""
    cell(*map(Tensor, batch))
    cell.set_rate_factor("guard", 0.0)
    before = values(cell)
    assert cell(*map(Tensor, batch))[3].asnumpy() == 0
    np.testing.assert_array_equal(values(cell), before)


def test_a_stop_request_is_in_the_next_record(cell, batch):
    cell(*map(Tensor, batch))
    assert not cell.last_record().stop
    cell.request_stop()
    cell(*map(Tensor, batch))
    assert cell.last_record().stop


def test_only_what_mindformers_train_step_has_is_state_of_the_run():
    """What describes a step would differ between the rank that saves and the others."""
    network = Loss()
    theirs = MFTrainOneStepCell(network, nn.SGD(network.trainable_params(), Constant()))
    ours = train_step(record_gradient_norms=True)
    found = {parameter.name for parameter in ours.get_parameters() if TRANSIENT not in parameter.name}
    assert found == {parameter.name for parameter in theirs.get_parameters()}
    assert len(found) < len(list(ours.get_parameters()))


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
def test_a_wrong_number_of_micro_batches_is_refused(value):
    with pytest.raises(ConfigError, match="micro_batches is .*: it must be a whole number of at least 1"):
        train_step(micro_batches=value)


def test_mindformers_own_step_runs_where_the_parallel_mode_asks_for_it(mode, batch):
    """The semi-automatic modes do not run on a CPU; their path through the cell does."""
    cell = train_step()
    cell.is_mindformers_step = True
    before = values(cell)
    outputs = cell(*map(Tensor, batch))
    loss, of_weight, of_bias = gradients(*batch)
    np.testing.assert_allclose(outputs[0].asnumpy(), loss, rtol=1e-5)
    np.testing.assert_allclose(values(cell), before - RATE * np.append(of_weight, of_bias), rtol=1e-5)
    assert cell.last_record().loss == 0  # Nothing is recorded.
