"""TrainingGuard, EarlyStopping and GracefulStop: what they do to a run, what they save, and how it ends."""

import os
import signal
import threading
import types

import mindspore as ms
import numpy as np
import pytest

from mindlora.core.errors import ConfigError, DivergenceError, RunStopped
from mindlora.training.callbacks.registry import EarlyStopping, GracefulStop, LoraCheckpoint, TrainingGuard
from mindlora.training.resume import training_state
from tests.support.controlled_runs import RATE, ControlledStep, play
from tests.support.scripted_runs import Report, folders, marked_step

pytestmark = pytest.mark.usefixtures("pynative_mode", "interruptible")

NAN = float("nan")


@pytest.fixture
def interruptible():
    """Lets SIGINT interrupt; in the background of a shell, these tests would begin with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class NoteAdapter(ms.Callback):
    """Notes the step number in B after each step."""

    def __init__(self):
        super().__init__()
        self.marks = []

    def on_train_step_end(self, run_context):
        b = run_context.original_args().train_network.network.wq.mindpet_delta_lora_b
        self.marks.append(int(b.asnumpy()[0, 0]))


# TrainingGuard


def test_bad_steps_are_skipped_and_reported():
    losses = [1.0] * 12 + [9.0, NAN, 1.0, 1.0]
    step, events, error = play([TrainingGuard()], losses, norms={16: 50.0})
    assert error is None and step.skipped == [13, 14, 16]
    assert events.events == [(13, "skipped_step"), (14, "skipped_step"), (16, "skipped_step")]
    assert "loss 9 (limit 2)" in events.messages[0] and "loss nan" in events.messages[1]
    assert "gradient norm 50 (limit 6.05)" in events.messages[2]
    # Limits come when eight steps are known, and are never those of the same step.
    assert step.limits[7] == (np.inf, np.inf) and step.limits[8] == (pytest.approx(2.0), pytest.approx(np.exp(1.8)))


def test_it_goes_back_to_the_last_good_state_and_cuts_the_rate():
    note = NoteAdapter()
    losses = [1.0] * 50 + [NAN] * 4 + [1.0] * 3
    step, events, error = play([TrainingGuard(snapshot_steps=20, rate_cut=0.5), note], losses)
    # The copies were made after steps 0, 20 and 40; at step 54 only the second has proved good.
    assert error is None and events.events[-1] == (54, "rollback") and note.marks[53] == 20
    assert "those of step 20 again" in events.messages[-1] and "0.5 times that of the schedule" in events.messages[-1]
    assert step.rates == pytest.approx([RATE] * 54 + [RATE / 2] * 3)
    # The limits are made anew.
    assert step.limits[54] == (np.inf, np.inf)


def test_moments_go_back_too():
    class MarkMoments(ms.Callback):
        def on_train_step_begin(self, run_context):
            params = run_context.original_args()
            for moment in params.train_network.optimizer.moments1:
                moment.set_data(ms.Tensor(np.full(moment.shape, params.cur_step_num, np.float32)))

    step, _, _ = play([TrainingGuard(snapshot_steps=20), MarkMoments()], [1.0] * 50 + [NAN] * 4)
    assert {float(moment.asnumpy().max()) for moment in step.optimizer.moments1} == {20.0}


def test_gradients_that_were_not_sent_are_dropped(monkeypatch):
    unsent = ms.Parameter(ms.Tensor([3.0, -2.0], ms.float32))
    monkeypatch.setattr(ControlledStep, "exchange", types.SimpleNamespace(unsent=lambda: unsent))
    play([TrainingGuard()], [1.0] * 20)
    assert unsent.asnumpy().tolist() == [3.0, -2.0]
    play([TrainingGuard()], [1.0] * 20 + [NAN] * 4)
    assert unsent.asnumpy().tobytes() == np.array([-0.0, -0.0], np.float32).tobytes()


def test_a_climbing_loss_is_taken_back_though_no_step_is_a_spike():
    losses = [1.0] * 30 + [1.04**n for n in range(60)]
    step, events, error = play([TrainingGuard(snapshot_steps=20)], losses)
    assert error is None and not step.skipped
    assert events.events[0][1] == "rollback" and "the loss climbed from 1 to" in events.messages[0]
    assert step.rates[-1] <= RATE * 0.3


def test_a_run_that_cannot_be_saved_ends_with_its_reason_after_everything_is_saved():
    losses = [1.0] * 30 + [NAN] * 50
    callbacks = [TrainingGuard(snapshot_steps=20, max_rollbacks=2), LoraCheckpoint(10, "saved", keep_last=9)]
    step, events, error = play(callbacks, losses)
    assert isinstance(error, DivergenceError)
    assert str(error) == (
        "TrainingGuard ended the run at step 42: 4 steps in a row were skipped, after 2 returns to an earlier state. "
        "The adapter is that of step 0. Check the data and learning_rate."
    )
    assert events.events[-1] == (42, "divergence") and step.number == 42
    assert folders("saved") == ["best", "step_10", "step_20", "step_30", "step_40", "step_42"]
    assert marked_step("saved/step_42") == 0 and marked_step("saved/best") <= 30


def test_a_resumed_run_keeps_limits_rate_and_count():
    losses = [1.0] * 12 + [NAN] * 4 + [1.0] * 20
    whole = [TrainingGuard(), LoraCheckpoint(7, "saved", keep_last=9)]
    expected, _, _ = play(whole, losses)
    parts = [TrainingGuard(), LoraCheckpoint(7, "resumed", resume="saved/step_28")]
    found, _, error = play(parts, losses, start=28)
    assert error is None and found.rates == expected.rates[28:] and found.limits == expected.limits[28:]
    assert parts[0].rollbacks == 1 and parts[0].training_state() == whole[0].training_state()


@pytest.mark.parametrize("scale, counted", [(1024.0, False), (1.0, True)])
def test_an_overflow_that_a_dynamic_loss_scale_deals_with_is_no_fault(monkeypatch, scale, counted):
    from tests.support import controlled_runs

    class Scaled(controlled_runs.ControlledStep):
        loss_scaling_manager = ms.nn.DynamicLossScaleUpdateCell(scale, 2, 4)

        def construct(self, loss):
            mean = super().construct(loss)
            overflow = self.number in (5, 6, 7, 8)
            self.record = self.record._replace(skipped=overflow)
            return mean, ms.Tensor(overflow), ms.Tensor(scale)

    monkeypatch.setattr(controlled_runs, "ControlledStep", Scaled)
    _, events, error = play([TrainingGuard()], [1.0] * 9)
    assert error is None and ((8, "rollback") in events.events) == counted


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_rollbacks": 0}, "max_rollbacks is 0"),
        ({"rate_cut": 0}, "rate_cut is 0: it must be a number above 0 and at most 1"),
        ({"snapshot_steps": 1.5}, "snapshot_steps is 1.5"),
        ({"spike": 1}, "spike is 1"),
    ],
)
def test_wrong_arguments_of_the_guard(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TrainingGuard(**arguments)


# EarlyStopping


def test_early_stopping_ends_the_run_and_says_why():
    report = Report("accuracy", {2: 0.5, 4: 0.7, 6: 0.7, 8: 0.6, 10: 0.9})
    stopping = EarlyStopping(patience=2, metric="accuracy", mode="max")
    step, events, error = play([report, stopping, LoraCheckpoint(4, "saved")], [1.0] * 12)
    assert error is None and step.number == 8 and events.events == [(8, "early_stop")]
    assert events.messages == [
        "EarlyStopping: accuracy has been 0.7 at best (step 4) and has not improved in 2 measurements. The run ends."
    ]


def test_early_stopping_goes_on_counting_in_a_resumed_run():
    report = Report("accuracy", {2: 0.7, 4: 0.6, 6: 0.6, 8: 0.5})

    def stopping():
        return EarlyStopping(patience=3, metric="accuracy", mode="max")

    play([report, stopping(), LoraCheckpoint(5, "saved")], [1.0] * 9)
    step, _, error = play([report, stopping(), LoraCheckpoint(5, "r", resume="saved/step_5")], [1.0] * 9, start=5)
    assert error is None and step.number == 8


def test_early_stopping_needs_something_that_measures():
    _, _, error = play([EarlyStopping()], [1.0])
    assert isinstance(error, ConfigError) and "EarlyStopping needs held_out_loss" in str(error)


# GracefulStop


class Signal(ms.Callback):
    """Sends this process a signal during some steps."""

    def __init__(self, number, *steps):
        super().__init__()
        self.number, self.steps = number, steps

    def on_train_step_begin(self, run_context):
        if run_context.original_args().cur_step_num in self.steps:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_and_saves_the_run(number, code):
    before = [signal.getsignal(handled) for handled in (signal.SIGINT, signal.SIGTERM)]
    step, events, error = play([GracefulStop(), LoraCheckpoint(100, "saved"), Signal(number, 3)], [1.0] * 6)
    assert isinstance(error, RunStopped) and error.exit_code == code
    folder = os.path.abspath("saved/step_3")
    assert str(error) == (
        f"{number.name} stopped the run after step 3 of 6. It is saved in {folder}. To resume, repeat the command "
        "with --resume, or set resume: True in LoraCheckpoint."
    )
    assert step.number == 3 and events.events == [(3, "stop")]
    assert (
        training_state.resume_folder("saved", True).endswith("step_3")
        and training_state.read_metadata(folder)["step"] == 3
    )
    assert [signal.getsignal(handled) for handled in (signal.SIGINT, signal.SIGTERM)] == before


def test_all_ranks_stop_where_one_was_asked_to():
    step, _, error = play([GracefulStop(), LoraCheckpoint(100, "saved")], [1.0] * 6, stopped_elsewhere=4)
    assert isinstance(error, RunStopped) and error.exit_code == 143 and step.number == 4
    assert folders("saved") == ["best", "step_4"]


def test_a_rank_that_is_asked_tells_the_others_before_its_next_step(monkeypatch):
    monkeypatch.setattr("mindlora.training.callbacks.stopping.rank_count", lambda: 2)
    step, _, error = play([Signal(signal.SIGTERM, 3), GracefulStop()], [1.0] * 6)
    # The others hear of it in the exchange of a step, so not before this one has begun.
    assert step.number == 3 and isinstance(error, RunStopped)
    step, _, error = play([GracefulStop(), Signal(signal.SIGTERM, 3)], [1.0] * 6)
    assert step.number == 4 and isinstance(error, RunStopped)


def test_a_signal_in_the_last_step_stops_nothing():
    step, events, error = play([GracefulStop(), LoraCheckpoint(100, "saved"), Signal(signal.SIGTERM, 6)], [1.0] * 6)
    assert error is None and step.number == 6 and not events.events


def test_without_a_checkpoint_the_message_says_that_nothing_was_saved():
    _, _, error = play([GracefulStop(), Signal(signal.SIGTERM, 2)], [1.0] * 6)
    assert "Nothing was saved: callbacks has no LoraCheckpoint." in str(error)


@pytest.mark.parametrize("seconds, ends_at_once", [(0.2, False), (1.5, True)])
def test_a_second_signal_ends_the_run_at_once_unless_it_is_the_same_request(monkeypatch, seconds, ends_at_once):
    clock = iter([10.0, 10.0 + seconds])
    monkeypatch.setattr("mindlora.training.callbacks.stopping.time.monotonic", lambda: next(clock))
    _, _, error = play_interrupted([GracefulStop(), Signal(signal.SIGINT, 3), Signal(signal.SIGINT, 3)])
    assert isinstance(error, KeyboardInterrupt if ends_at_once else RunStopped)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def play_interrupted(callbacks):
    """Plays a run, also one that KeyboardInterrupt ends."""
    try:
        return play(callbacks, [1.0] * 6)
    except KeyboardInterrupt as interrupt:
        return None, None, interrupt


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    step, _, error = play([GracefulStop(), Signal(signal.SIGINT, 3)], [1.0] * 6)
    assert error is None and step.number == 6
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_signals_are_left_alone():
    before, results = signal.getsignal(signal.SIGTERM), []
    stop = GracefulStop()
    thread = threading.Thread(target=lambda: results.append(play([stop], [1.0] * 2)))
    thread.start()
    thread.join()
    assert results[0][2] is None and not stop.before and signal.getsignal(signal.SIGTERM) is before


def test_an_error_of_another_callback_is_not_hidden():
    class Fails(ms.Callback):
        def on_train_end(self, run_context):
            raise OSError("the disk is full")

    _, _, error = play([GracefulStop(), Signal(signal.SIGTERM, 2), Fails()], [1.0] * 6)
    assert isinstance(error, OSError)
