"""Rules for the learning rate: warm-up, gradient norm, and what a plateau refuses; a plateau's rates are PyTorch's in
tests/peers."""

import json

import numpy as np
import pytest

from mindlora.core.errors import ConfigError
from mindlora.run.checks.training import CONTROLLING
from mindlora.training.callbacks.common import RateCallback
from mindlora.training.callbacks.learning_rate import GradientNormFactor, PlateauRate, warm_up_factor
from mindlora.training.callbacks.registry import GradientNormRate, LoraCheckpoint, ReduceOnPlateau, WarmUp
from tests.support import scripted_runs
from tests.support.controlled_runs import RATE, play
from tests.support.scripted_runs import Report


def test_warm_up_rises_in_a_line():
    assert [warm_up_factor(step, 4, 0.2) for step in (1, 2, 3, 4, 5, 99)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert warm_up_factor(5, 4, 0.7) == 1.0  # 0.7 + 0.3 need not be 1


def test_a_plateau_cuts_after_its_patience_and_cools_down():
    rule, rate, rates = PlateauRate(factor=0.5, patience=1, cooldown=2), 8.0, []
    for metric in (3, 2, 2, 2, 2, 2, 2, 2, 1):
        rate = rule.step(metric, rate)
        rates.append(rate)
    #        best, best, bad, cut, cooling twice, bad, cut, best
    assert rates == [8, 8, 8, 4, 4, 4, 4, 2, 2]


@pytest.mark.parametrize("metrics", [[1, 2, 3, 2.5], [float("nan")] * 4, [float("inf")] * 4], ids=str)
def test_a_plateau_s_state_survives_json(metrics):
    whole, parts = PlateauRate(patience=1), PlateauRate(patience=1)
    whole_rate = parts_rate = 1.0
    for metric in metrics:
        whole_rate = whole.step(metric, whole_rate)
        resumed = PlateauRate(patience=1)
        resumed.restore(json.loads(json.dumps(parts.state(), allow_nan=False)))
        parts, parts_rate = resumed, resumed.step(metric, parts_rate)
        assert parts_rate == whole_rate
    assert whole_rate < 1


class Played:
    """A GradientNormFactor after a sequence of norms, with what happened at which of them."""

    def __init__(self, norms, resume_every=None, **settings):
        self.factors, self.happened = [], {}
        rule = GradientNormFactor(**settings)
        for number, norm in enumerate(norms):
            if resume_every and number % resume_every == 0:
                state = json.loads(json.dumps(rule.state(), allow_nan=False))
                rule = GradientNormFactor(**settings)
                rule.restore(state)
            happened = rule.step(norm)
            if happened:
                self.happened[number] = happened
            self.factors.append(rule.factor)


SETTINGS = {"window": 4, "spike": 3.0, "steady": 1.5, "cut": 0.25, "recovery_steps": 2, "growth": 0.1}


def test_the_rate_grows_while_the_norm_is_steady():
    played = Played([2.0, 2.0, 2.0, 2.0, 2.1, 2.9, 3.1, 2.0, 2.0], **SETTINGS, max_factor=1.3)
    # Unknown for four norms, growth at 2.1 and 2.9, none above 1.5 medians, then growth up to the highest factor.
    assert played.factors == pytest.approx([1, 1, 1, 1, 1.1, 1.21, 1.21, 1.3, 1.3])
    assert played.happened == {7: "highest"}


def test_a_spike_cuts_the_rate_and_steady_norms_bring_it_back():
    played = Played([1, 1, 1, 1, 9, 1, 1, 1], **SETTINGS)
    assert played.factors == pytest.approx([1, 1, 1, 1, 0.25, 0.5, 1, 1.1])
    assert played.happened == {4: "cut", 6: "recovered"}


def test_a_second_spike_lowers_where_the_recovery_ends():
    played = Played([1, 1, 1, 1, 9, 1, 9, 1, 1, 1], **SETTINGS)
    # Cut at 1 and at 0.5: back to 0.5, and from there only as slowly as any rate grows.
    assert played.factors == pytest.approx([1, 1, 1, 1, 0.25, 0.5, 0.125, 0.25, 0.5, 0.55])


def test_norms_that_stay_high_are_the_new_normal():
    played = Played([1] * 8 + [9] * 8, **{**SETTINGS, "growth": 0.0})
    assert list(played.happened)[:3] == [8, 9, 12] and played.happened[12] == "recovered"
    assert min(played.factors) == 0.0625 == played.factors[10] and played.factors[-1] == 0.25


def test_a_norm_that_is_not_finite_changes_nothing():
    clean, with_nan = [1, 1, 1, 1, 9, 1], [1, 1, np.nan, 1, 1, np.inf, 9, 1]
    assert Played(with_nan, **SETTINGS).factors[-1] == Played(clean, **SETTINGS).factors[-1]
    assert Played([0.0] * 6 + [1.0], **SETTINGS).factors[-1] == 1


def test_the_rate_stays_between_its_bounds_and_survives_a_resume():
    norms = np.exp(0.8 * np.random.default_rng(0).normal(size=2000)).tolist()
    settings = {**SETTINGS, "min_factor": 0.1, "max_factor": 1.5}
    whole, resumed = Played(norms, **settings), Played(norms, resume_every=7, **settings)
    assert min(whole.factors) == 0.1 and max(whole.factors) == 1.5
    assert resumed.factors == whole.factors and resumed.happened == whole.happened


@pytest.mark.parametrize(
    "rule, arguments, message",
    [
        (PlateauRate, {"mode": "least"}, "mode is 'least', but it must be 'min' or 'max'"),
        (PlateauRate, {"threshold_mode": "x"}, "threshold_mode is 'x', but it must be 'rel' or 'abs'"),
        (PlateauRate, {"factor": 1.0}, "factor is 1.0: it must be a number above 0 and below 1"),
        (PlateauRate, {"patience": -1}, "patience is -1: it must be a whole number of at least 0"),
        (PlateauRate, {"min_lr": "1e-5"}, "min_lr is '1e-5': it must be a number of at least 0"),
        (GradientNormFactor, {"window": 3}, "window is 3: it must be a whole number of at least 4"),
        (GradientNormFactor, {"spike": 1.5}, "spike is 1.5: it must be a number above steady, 1.5"),
        (GradientNormFactor, {"max_factor": 0.5}, "max_factor is 0.5: it must be a number of at least 1"),
    ],
)
def test_wrong_settings(rule, arguments, message):
    with pytest.raises(ConfigError, match=message):
        rule(**arguments)


# WarmUp, ReduceOnPlateau and GradientNormRate: the rates that the steps use, what is reported, and resuming


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
