"""A batch in which no token counts: the train step skips it, and what counted before goes on as if it had not come."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.training.several.stack import stack_adapters
from mindlora.training.several.train_step import StackedAdamW, StackedTrainOneStepCell
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.conftest import in_mode

ROWS, WIDTH, IGNORED = 4, 17, -100
LORA = {"lora_rank": 4, "target_modules": ".*wq|.*w2"}


class Falling(nn.learning_rate_schedule.LearningRateSchedule):
    """A learning rate that halves in each step."""

    def construct(self, global_step):
        return 0.1 * 0.5 ** global_step.astype(ms.float32)


class OfAdapters(Falling):
    """The same rate for each of several adapters."""

    def construct(self, global_step):
        return super().construct(global_step.reshape(-1))


@pytest.fixture
def network(make_llama):
    network = make_llama(num_layers=1)
    rng = np.random.default_rng(1)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(rng.normal(0, 0.1, parameter.shape).astype(np.float32)))
    return network


def adapted(network):
    apply_lora(network, LoraConfig(**LORA))
    freeze_base(network)
    return network


def tokens(*shape):
    return np.random.default_rng(0).integers(4, 64, shape).astype(np.int32)


def state(step):
    """Returns what a step may change: weights, moments and the number of steps."""
    return [parameter.asnumpy().copy() for parameter in (*step.weights, *step.optimizer.get_parameters())]


def assert_skips(step, batch, empty):
    """Asserts that a batch trains, that the empty one after it changes nothing, and that the next one trains again."""
    step.set_train()
    step(*map(Tensor, batch))
    before = state(step)
    outputs = step(*map(Tensor, empty))
    record = step.last_record()
    assert record.is_empty and record.skipped and np.isnan(record.loss) and record.gradient_norm == 0
    assert np.isnan(outputs[0].asnumpy()) and not outputs[1].asnumpy()
    for array, value in zip(state(step), before):
        np.testing.assert_array_equal(array, value)
    step(*map(Tensor, batch))
    record = step.last_record()
    assert not record.skipped and record.tokens > 0 and record.learning_rate == pytest.approx(0.05)


@pytest.mark.parametrize("micro_batches, step_mode", [(1, ms.PYNATIVE_MODE), (2, ms.GRAPH_MODE)])
def test_a_batch_without_labels_is_skipped(network, micro_batches, step_mode):
    network = adapted(network)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), Falling())
    step = LoraTrainOneStepCell(network, optimizer, micro_batches=micro_batches, use_clip_grad=True)
    ids = tokens(ROWS, WIDTH)
    with in_mode(step_mode):
        assert_skips(step, (ids, ids), (ids, np.full_like(ids, IGNORED)))


def test_mindformers_own_step_skips_it_by_its_loss_and_lowers_no_loss_scale(network, semi_auto_parallel, graph_mode):
    network = adapted(network)
    scale = nn.DynamicLossScaleUpdateCell(loss_scale_value=1024, scale_factor=2, scale_window=1000)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), Falling())
    step = LoraTrainOneStepCell(network, optimizer, scale_sense=scale, use_clip_grad=True, loss_in_pieces=False)
    assert step.is_mindformers_step
    # A CPU compiles nothing for the semi-automatic modes; alone, the same step computes the same.
    ms.reset_auto_parallel_context()
    step.set_train()
    ids = tokens(ROWS, WIDTH)
    loss, overflow, *_ = step(Tensor(ids), Tensor(ids))
    assert loss > 0 and not overflow
    before = state(step)
    loss, overflow, *_ = step(Tensor(ids), Tensor(np.full_like(ids, IGNORED)))
    assert loss == 0 and overflow
    for array, value in zip(state(step), before):
        np.testing.assert_array_equal(array, value)
    assert float(step.scale_sense.asnumpy()) == 1024
    assert not step(Tensor(ids), Tensor(ids))[1]


@pytest.mark.parametrize("without", ["examples", "answers"])
def test_a_batch_without_preferences_is_skipped_and_lowers_no_loss_scale(network, without, pynative_mode):
    network = adapted(network)
    scale = nn.DynamicLossScaleUpdateCell(loss_scale_value=1024, scale_factor=2, scale_window=1000)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), Falling())
    step = LoraTrainOneStepCell(network, optimizer, preference={"loss": "dpo"}, scale_sense=scale)
    ids = tokens(ROWS, 2, WIDTH)
    answers = np.full(ids.shape, -1, np.int32)
    answers[:, 0, 6:12], answers[:, 1, 6:9] = 0, 1
    labels, pairs = np.where(answers >= 0, ids, IGNORED), np.ones((ROWS, 1), np.int32)
    nothing = {"examples": (answers, pairs * 0), "answers": (np.full_like(answers, -1), pairs)}[without]
    assert_skips(step, (ids, labels, answers, pairs), (ids, np.full_like(ids, IGNORED), *nothing))
    assert float(step.scale_sense.asnumpy()) == 1024


def test_an_adapter_whose_rows_have_no_labels_is_skipped_and_the_others_are_not(network, pynative_mode):
    stack = stack_adapters(network, [LoraConfig(**LORA), LoraConfig(**LORA)])
    stack.set_initial_values()
    step = StackedTrainOneStepCell(network, StackedAdamW(network.trainable_params(), OfAdapters()))
    step.set_train()
    ids = np.stack([tokens(ROWS, WIDTH)] * 2, 1)
    labels = ids.copy()
    labels[:, 1] = IGNORED
    for _ in range(2):
        step(Tensor(ids), Tensor(labels))
    first, second = step.record_of(0), step.record_of(1)
    assert not first.skipped and first.learning_rate == pytest.approx(0.05)
    assert second.skipped and second.is_empty and np.isnan(second.loss)
    assert step.optimizer.global_step.asnumpy().ravel().tolist() == [2, 0]
    assert step.last_record().loss == pytest.approx(first.loss)
