"""WarmUp, ReduceOnPlateau and GradientNormRate: the rates that the steps use, what is reported, and resuming."""

import pytest

from mindlora.core.errors import ConfigError
from mindlora.run.checks.training import CONTROLLING
from mindlora.training.callbacks.common import RateCallback
from mindlora.training.callbacks.registry import GradientNormRate, LoraCheckpoint, ReduceOnPlateau, WarmUp
from tests.support import scripted_runs
from tests.support.controlled_runs import RATE, play
from tests.support.scripted_runs import Report

pytestmark = pytest.mark.usefixtures("pynative_mode")

NORM_SETTINGS = {"window": 4, "spike": 3.0, "cut": 0.25, "recovery_steps": 2, "growth": 0.0}
# Each with the losses and norms at which it changes the rate after step 5, and the factor of each step.
NORMS = {5: 9.0}
CASES = {
    "WarmUp": (lambda: WarmUp(steps=6, start_factor=0.4), [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1]),
    "ReduceOnPlateau": (
        lambda: ReduceOnPlateau("loss", every_steps=2, factor=0.5, patience=0),
        [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25],
    ),
    "GradientNormRate": (lambda: GradientNormRate(**NORM_SETTINGS), [1, 1, 1, 1, 1, 0.25, 0.5, 1]),
}
EVENTS = {"WarmUp": [1, 6], "ReduceOnPlateau": [4, 6, 8], "GradientNormRate": [5, 7]}


def test_the_doctor_knows_every_callback_that_sets_the_rate():
    assert {kind.__name__ for kind in RateCallback.__subclasses__()} == set(CASES) <= set(CONTROLLING)


@pytest.mark.parametrize("name", CASES)
def test_each_step_uses_the_rate_and_changes_are_reported(name):
    make, factors = CASES[name]
    step, events, error = play([make()], [1.0] * 8, norms=NORMS)
    assert error is None and step.rates == pytest.approx([RATE * factor for factor in factors])
    assert events.events == [(number, "learning_rate") for number in EVENTS[name]]
    assert all(message.startswith(f"{name}: ") for message in events.messages)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stopped", [3, 5])
def test_a_resumed_run_uses_the_same_rates(name, stopped):
    make, factors = CASES[name]
    play([make(), LoraCheckpoint(1, "saved", keep_last=9)], [1.0] * 8, norms=NORMS)
    checkpoint = LoraCheckpoint(1, "resumed", resume=f"saved/step_{stopped}")
    # In either order: the state comes while training begins.
    callbacks = [make(), checkpoint] if stopped == 3 else [checkpoint, make()]
    step, _, error = play(callbacks, [1.0] * 8, start=stopped, norms=NORMS)
    assert error is None and step.rates == pytest.approx([RATE * factor for factor in factors[stopped:]])


def test_factors_are_multiplied():
    step, _, _ = play([make() for make, _ in CASES.values()], [1.0] * 8, norms=NORMS)
    products = [first * second * third for first, second, third in zip(*(factors for _, factors in CASES.values()))]
    assert step.rates == pytest.approx([RATE * product for product in products])


def test_a_plateau_is_seen_where_the_metric_is_measured():
    report = Report("accuracy", {2: 0.5, 4: 0.6, 6: 0.6, 8: 0.6})
    plateau = ReduceOnPlateau("accuracy", mode="max", factor=0.1, patience=0, min_lr=RATE / 4)
    step, events, _ = play([report, plateau], [1.0] * 9)
    assert step.rates == pytest.approx([RATE] * 6 + [RATE / 4] * 3)
    assert events.messages == [
        "ReduceOnPlateau: accuracy is 0.6 and no longer improves; the learning rate goes from 0.01 to 0.0025."
    ]


@pytest.mark.parametrize("make", [make for make, _ in CASES.values()])
def test_another_train_step_is_refused(make):
    with pytest.raises(ConfigError, match="needs mindlora's train step, alone or in data parallel"):
        scripted_runs.train([make()], [1.0])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: WarmUp(steps=0), "steps is 0"),
        (lambda: WarmUp(start_factor=1), "start_factor is 1: it must be a number from 0 to below 1"),
        (lambda: ReduceOnPlateau(every_steps=0), "every_steps is 0"),
        (lambda: ReduceOnPlateau(factor=2.0), "factor is 2.0"),
        (lambda: GradientNormRate(cut=0), "cut is 0"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_plateau_of_what_nothing_measures_is_refused():
    _, _, error = play([ReduceOnPlateau()], [1.0])
    assert isinstance(error, ConfigError) and "add HeldOutLoss to callbacks" in str(error)
