"""LoraTrainOneStepCell: its five outputs and its step against numpy, and what it does on overflow."""

import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora.training.step import train_step as train_step_module
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.support import tiny_runs

LEARNING_RATE, DECAY_STEPS = 0.5, 10


class Loss(nn.Cell):
    """mean((x W^T - target)^2), whose gradient has a short formula, computed in ``dtype``."""

    def __init__(self, weight, dtype=ms.float32):
        super().__init__()
        self.dense = nn.Dense(3, 2, has_bias=False, weight_init=Tensor(weight))
        self.dtype = dtype

    def construct(self, x, target):
        weight = self.dense.weight.astype(self.dtype)
        y = ops.matmul(x.astype(self.dtype), weight.T)
        return ((y - target.astype(self.dtype)) ** 2).mean()


class Linear(nn.learning_rate_schedule.LearningRateSchedule):
    """A learning rate that falls by the same amount each step."""

    def construct(self, global_step):
        return LEARNING_RATE * (1 - global_step.astype(ms.float32) / DECAY_STEPS)


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in ((2, 3), (4, 3), (4, 2)))


def expected_step(weight, x, target, learning_rate, max_grad_norm=None):
    """The oracle in float64: (loss, global norm, weight after a step of gradient descent with a clipped gradient)."""
    weight, x, target = (array.astype(np.float64) for array in (weight, x, target))
    difference = x @ weight.T - target
    gradient = 2 * difference.T @ x / difference.size
    norm = np.sqrt((gradient**2).sum())
    if max_grad_norm is not None:
        gradient = gradient * min(1.0, max_grad_norm / (norm + 1e-6))
    return (difference**2).mean(), norm, weight - learning_rate * gradient


def train_step(network, learning_rate=LEARNING_RATE, **wrapper):
    optimizer = nn.SGD(network.trainable_params(), learning_rate)
    cell = LoraTrainOneStepCell(network, optimizer, **wrapper)
    cell.set_train()
    return cell


def weight_of(cell):
    return cell.network.dense.weight.asnumpy()


@pytest.mark.parametrize("max_grad_norm", [None, 0.1, 100.0], ids=["no clipping", "clipped", "below the limit"])
@pytest.mark.parametrize("scale_sense", [1.0, 1024.0])
def test_outputs_and_step(pynative_mode, data, max_grad_norm, scale_sense):
    check_outputs_and_step(data, max_grad_norm, scale_sense)


@pytest.mark.parametrize("max_grad_norm, scale_sense", [(None, 1.0), (0.1, 1024.0)], ids=["no clipping", "clipped"])
def test_outputs_and_step_in_graph_mode(graph_mode, data, max_grad_norm, scale_sense):
    """A norm below the limit takes the graph of one above it, and a scale is a value in it."""
    check_outputs_and_step(data, max_grad_norm, scale_sense)


def check_outputs_and_step(data, max_grad_norm, scale_sense):
    weight, x, target = data
    clipping = {} if max_grad_norm is None else {"use_clip_grad": True, "max_grad_norm": max_grad_norm}
    cell = train_step(Loss(weight), scale_sense=scale_sense, **clipping)
    loss, overflow, scale, learning_rate, global_norm = cell(Tensor(x), Tensor(target))
    expected_loss, expected_norm, expected_weight = expected_step(weight, x, target, LEARNING_RATE, max_grad_norm)
    assert 0.1 < expected_norm < 100
    np.testing.assert_allclose(loss.asnumpy(), expected_loss, rtol=1e-6)
    assert overflow.asnumpy().tolist() is False
    assert float(scale.asnumpy()) == scale_sense
    assert float(learning_rate.asnumpy()) == LEARNING_RATE
    np.testing.assert_allclose(global_norm.asnumpy(), [expected_norm], rtol=1e-6)
    np.testing.assert_allclose(weight_of(cell), expected_weight, rtol=1e-6, atol=1e-7)


def test_a_step_of_mindformers_returns_no_none(graph_mode, data):
    weight, x, target = data
    for clipping, count in (({}, 4), ({"use_clip_grad": True}, 5)):
        cell = train_step(Loss(weight), **clipping)
        # As in the semi-automatic parallel modes, which a CPU does not have.
        cell.is_mindformers_step = True
        outputs = cell(Tensor(x), Tensor(target))
        assert len(outputs) == count and all(isinstance(output, Tensor) for output in outputs)


def test_learning_rate_of_each_step(mode, data):
    weight, x, target = data
    cell = train_step(Loss(weight), Linear())
    for step in range(3):
        learning_rate = LEARNING_RATE * (1 - step / DECAY_STEPS)
        expected_weight = expected_step(weight, x, target, learning_rate)[2]
        outputs = cell(Tensor(x), Tensor(target))
        np.testing.assert_allclose(outputs[3].asnumpy(), learning_rate, rtol=1e-6)
        weight = weight_of(cell).copy()
        np.testing.assert_allclose(weight, expected_weight, rtol=1e-6, atol=1e-7)


def test_a_weight_that_is_not_finite_skips_the_step(mode, data):
    weight, x, target = data
    cell = train_step(Loss(weight), Linear(), use_clip_grad=True)
    for value in (np.inf, np.nan):
        weight[0, 0] = value
        ops.assign(cell.network.dense.weight, Tensor(weight))
        _, overflow, _, learning_rate, _ = cell(Tensor(x), Tensor(target))
        assert overflow.asnumpy().tolist() is True
        np.testing.assert_array_equal(weight_of(cell), weight)
        # The schedule does not advance either.
        assert int(cell.optimizer.global_step.asnumpy().item()) == 0 and float(learning_rate.asnumpy()) == LEARNING_RATE


@pytest.mark.parametrize(
    "mode, dtype, scale, lowest",
    [(0, ms.float16, 2.0**20, 2.0**9), (1, ms.float16, 2.0**20, 2.0**9), (1, ms.float32, 2.0**127, 2.0**120)],
    indirect=["mode"],
    ids=["float16 in graph mode", "float16", "float32"],
)
def test_a_loss_scale_that_is_too_large_is_lowered_until_a_step_succeeds(mode, data, dtype, scale, lowest):
    weight, x, target = data
    target = target * 16
    manager = nn.DynamicLossScaleUpdateCell(loss_scale_value=scale, scale_factor=2, scale_window=1000)
    cell = train_step(Loss(weight, dtype), scale_sense=manager)
    scales, overflowed = [], True
    while overflowed:
        before = float(cell.scale_sense.asnumpy())
        overflowed = bool(cell(Tensor(x), Tensor(target))[1].asnumpy())
        scales.append(float(cell.scale_sense.asnumpy()))
        assert scales[-1] == (before / 2 if overflowed else before)
        if overflowed:
            np.testing.assert_array_equal(weight_of(cell), weight)
        assert len(scales) < 30
    assert len(scales) > 1 and scales[-1] >= lowest
    expected_weight = expected_step(weight, x, target, LEARNING_RATE)[2]
    np.testing.assert_allclose(weight_of(cell), expected_weight, atol=1e-2 if dtype == ms.float16 else 1e-5)


def test_what_the_compiler_has_freed_goes_back_before_the_first_step_alone(graph_mode, data, monkeypatch):
    given_back = []
    monkeypatch.setattr(train_step_module, "give_back_freed_memory", lambda: given_back.append(cell.was_compiled))
    weight, x, target = data
    cell = train_step(Loss(weight))
    for _ in range(3):
        cell(Tensor(x), Tensor(target))
    assert given_back == [True]


def test_no_class_of_mindformers_is_changed(tmp_path):
    """Importing mindlora fills MindFormers' registries and changes none of its classes."""
    script = """
import json, inspect, sys
import mindformers
from mindformers.pet import pet_model
from mindformers.pet.models import lora
from mindformers.wrapper import wrapper
from mindformers.core.callback import callback
from mindformers.models import modeling_utils, build_model
from mindformers.modules import layers
from mindpet.delta import lora as mindpet_lora
import mindspore

def members():
    modules = [pet_model, lora, wrapper, callback, modeling_utils, build_model, layers, mindpet_lora, mindspore.nn]
    found = {}
    for module in modules:
        for name, value in vars(module).items():
            found[f"{module.__name__}.{name}"] = value
            if inspect.isclass(value):
                found.update((f"{module.__name__}.{name}.{key}", member) for key, member in vars(value).items())
    return found

before, maps = members(), {**pet_model.PET_TYPE_TO_MODEL_MAPPING}
assert not any(name.startswith("mindlora") for name in sys.modules)
from mindlora.training.launch import hooks
after = members()
json.dump({"changed": sorted(key for key in before if after.get(key) is not before[key]),
           "pet": sorted(key for key, now in pet_model.PET_TYPE_TO_MODEL_MAPPING.items() if maps.get(key) is not now),
           "compared": sorted(before)}, open("members.json", "w"))
"""
    result = tiny_runs.python(["-c", script], tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    with open(tmp_path / "members.json", encoding="utf-8") as file:
        found = json.load(file)
    assert found["changed"] == [] and found["pet"] == ["lora", "qlora"]
    assert "mindformers.wrapper.wrapper.MFTrainOneStepCell.construct" in found["compared"]
