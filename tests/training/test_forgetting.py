"""Forgetting and ForgettingBudget in MindSpore's own training loop: what is measured, undone, reported and resumed."""

import types

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from mindlora.core.errors import ConfigError
from mindlora.training.callbacks.registry import Forgetting as RealForgetting
from mindlora.training.callbacks.registry import ForgettingBudget, LoraCheckpoint, RunReport
from mindlora.training.report.history import read_history
from tests.support.controlled_runs import RATE, play
from tests.support.scripted_runs import Model, Report, ScriptedStep, train

pytestmark = pytest.mark.usefixtures("pynative_mode")

LENGTH, VOCABULARY, BOS, EOS, PAD = 12, 16, 1, 2, 0
TABLE = np.random.default_rng(4).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)


class Scaled(Model):
    """A bigram model whose logits training makes larger: TABLE[token] (1 + B[0, 0] / 4)."""

    def __init__(self):
        super().__init__()
        self.table = Tensor(TABLE)
        self.config = types.SimpleNamespace(
            seq_length=LENGTH, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, ignore_token_id=-100
        )

    def construct(self, tokens, labels=None):
        logits = ops.gather(self.table, tokens, 0) * (1 + self.wq.mindpet_delta_lora_b[0, 0] / 4)
        mask = None if labels is None else (labels != -100).astype(ms.float32)
        return logits, tokens, mask


def logprobs(b):
    logits = TABLE.astype(np.float64) * (1 + b / 4)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_the_divergence_is_measured_on_samples_of_the_base(tmp_path):
    callback = RealForgetting(every_steps=2, samples=60, max_tokens=9, batch_size=7)
    train([callback, RunReport(str(tmp_path))], [1.0] * 5, step=ScriptedStep(Scaled()))
    assert all(sample[0] == BOS and 2 <= len(sample) <= 10 for sample in callback.samples)
    assert {len(sample) for sample in callback.samples} > {10}
    assert all(EOS not in sample[:-1] and (len(sample) == 10 or sample[-1] == EOS) for sample in callback.samples)
    before = np.concatenate([sample[:-1] for sample in callback.samples])
    after = np.concatenate([sample[1:] for sample in callback.samples])
    records = read_history(str(tmp_path)).forgetting
    assert [record["step"] for record in records] == [2, 4, 5]
    for record in records:
        ratios = (logprobs(0) - logprobs(record["step"]))[before, after]
        assert record["forgetting"] == pytest.approx(ratios.mean(), abs=1e-5)
        exact = (np.exp(logprobs(0)) * (logprobs(0) - logprobs(record["step"]))).sum(-1)[before]
        noise = (ratios - exact).std() / len(exact) ** 0.5
        assert abs(record["forgetting"] - exact.mean()) < 4 * noise
    assert "Divergence from the base" in (tmp_path / "report.html").read_text("utf-8")


def test_an_adapter_that_was_loaded_counts_as_change():
    fresh, loaded = RealForgetting(samples=4, max_tokens=5), RealForgetting(samples=4, max_tokens=5)
    step = ScriptedStep(Scaled())
    b = step.network.wq.mindpet_delta_lora_b
    b.set_data(Tensor(np.full((3, 2), 2.0, np.float32)))
    params = types.SimpleNamespace(train_network=step, cur_step_num=0)
    loaded.on_train_epoch_begin(types.SimpleNamespace(original_args=lambda: params))
    assert (b.asnumpy() == 2).all()
    train([fresh], [1.0], step=ScriptedStep(Scaled()))
    assert (loaded.samples, loaded.base_loss) == (fresh.samples, fresh.base_loss)


def test_a_resumed_run_measures_on_the_same_samples(tmp_path):
    saved = str(tmp_path / "saved")
    options = {"every_steps": 1, "samples": 4, "max_tokens": 5}
    whole = RealForgetting(**options)
    train([whole, LoraCheckpoint(save_steps=2, directory=saved)], [1.0] * 4, step=ScriptedStep(Scaled()))
    resumed = RealForgetting(**options, seed=8)
    callbacks = [resumed, LoraCheckpoint(save_steps=2, directory=saved, resume=f"{saved}/step_2")]
    train(callbacks, [1.0] * 4, skip=2, step=ScriptedStep(Scaled()))
    assert (resumed.samples, resumed.base_loss) == (whole.samples, whole.base_loss)


def test_a_model_without_a_first_token_is_refused():
    step = ScriptedStep(Scaled())
    step.network.config.bos_token_id = None
    with pytest.raises(ConfigError, match="bos_token_id of the model is None. Set it"):
        train([RealForgetting()], [1.0], step=step)


class Forgetting(Report):
    """Reports given measurements in Forgetting's place."""

    def __init__(self, values):
        super().__init__("forgetting", values)


class NoteAdapter(ms.Callback):
    """Notes the step number in B after each step."""

    def __init__(self):
        super().__init__()
        self.marks = []

    def on_train_step_end(self, run_context):
        b = run_context.original_args().train_network.network.wq.mindpet_delta_lora_b
        self.marks.append(int(b.asnumpy()[0, 0]))


def test_a_run_ends_with_the_last_state_within_its_budget():
    note = NoteAdapter()
    measured = Forgetting({2: 0.1, 4: 0.2, 6: 0.25, 8: 0.1})
    step, events, error = play([measured, ForgettingBudget(0.2), note], [1.0] * 9)
    assert error is None and note.marks == [1, 2, 3, 4, 5, 4]
    assert events.events == [(6, "budget")]
    assert "0.25 nats per token away from its base, but the budget is 0.2." in events.messages[0]
    assert events.messages[0].endswith("those of step 4 again, and the run ends.")


@pytest.mark.parametrize("exceeding", [0.3, float("nan")])
def test_a_run_goes_on_more_slowly_as_often_as_it_may(exceeding):
    note = NoteAdapter()
    measured = Forgetting({2: exceeding, 4: 0.1, 6: exceeding, 8: exceeding})
    budget = ForgettingBudget(0.2, max_returns=2, rate_cut=0.5)
    step, events, error = play([measured, budget, note], [1.0] * 9)
    assert error is None and note.marks == [1, 0, 3, 4, 5, 4, 7, 4]
    assert step.rates == pytest.approx([RATE] * 2 + [RATE / 2] * 4 + [RATE / 4] * 2)
    assert events.events == [(2, "budget"), (6, "budget"), (8, "budget")]
    assert events.messages[0].endswith("from now on the learning rate is 0.5 times that of the schedule.")
    again = ForgettingBudget(0.2)
    again.restore_training_state(budget.training_state())
    assert (again.returns, again.factor) == (3, 0.25)


def test_what_was_measured_of_the_state_that_is_gone_is_not_reported(tmp_path):
    class Both(Forgetting):
        def on_train_step_end(self, run_context):
            super().on_train_step_end(run_context)
            run_context.original_args()["eval_results"]["held_out_loss"] = 1.0

    Both.__name__ = "Forgetting"
    callbacks = [Both({1: 0.1, 2: 0.3}), ForgettingBudget(0.2), RunReport(str(tmp_path))]
    assert play(callbacks, [1.0] * 3)[2] is None
    history = read_history(str(tmp_path))
    assert [record["step"] for record in history.held_out] == [1]
    assert [record["step"] for record in history.forgetting] == [1, 2]


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: RealForgetting(samples=0), "samples is 0"),
        (lambda: RealForgetting(max_tokens=0), "max_tokens is 0"),
        (lambda: RealForgetting(every_steps=0), "every_steps is 0"),
        (lambda: ForgettingBudget(0.0), "budget is 0.0"),
        (lambda: ForgettingBudget(0.1, max_returns=-1), "max_returns is -1"),
        (lambda: ForgettingBudget(0.1, rate_cut=2), "rate_cut is 2"),
    ],
)
def test_arguments_out_of_range_are_named(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def test_a_budget_needs_a_measurement():
    error = play([ForgettingBudget(0.1)], [1.0])[2]
    assert isinstance(error, ConfigError) and "add Forgetting to callbacks" in str(error)
