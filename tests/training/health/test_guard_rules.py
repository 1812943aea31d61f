"""RunGuard against runs that go well and badly, EarlyStop, and the copies of the last good state."""

import json
import math

import numpy as np
import pytest

from mindlora.core.errors import ConfigError
from mindlora.training.callbacks.stopping import EarlyStop
from mindlora.training.health.training_guard import RunGuard, Snapshots

STEPS = 1500


class Watched:
    """What a RunGuard does to a run: the steps that its limits skip, and those at which it asks to go back."""

    def __init__(self, losses, norms=None, resume_every=None, **settings):
        self.skipped, self.back = [], {}
        guard = RunGuard(**settings)
        for step, loss in enumerate(losses):
            if resume_every and step % resume_every == 0:
                state = json.loads(json.dumps(guard.state(), allow_nan=False))
                guard = RunGuard(**settings)
                guard.restore(state)
            norm = 1.0 if norms is None else norms[step]
            highest_loss, highest_norm = guard.limits
            skipped = not (loss <= highest_loss and norm <= highest_norm and math.isfinite(loss + norm))
            if skipped:
                self.skipped.append(step)
            reason = guard.step(loss, norm, skipped)
            if reason:
                self.back[step] = reason
                guard.forget()
        self.guard = guard


def falling(noise, seed=0, steps=STEPS, start=2.5, end=0.5):
    """Returns losses that fall from start to end, times log-normal noise."""
    noise = np.exp(noise * np.random.default_rng(seed).normal(size=steps))
    return (end + (start - end) * np.exp(-np.arange(steps) / 400)) * noise


# Runs that go well


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3, 0.5])
def test_noise_is_no_fault(noise):
    norms = np.exp(0.5 * np.random.default_rng(1).normal(size=STEPS))
    watched = Watched(falling(noise), norms)
    assert not watched.back and len(watched.skipped) <= 3


def test_memorized_rows_and_a_row_that_is_not_are_no_fault():
    losses = falling(0.5, start=3, end=0.004)
    losses[1200::37] = 0.6  # far above the others, but less than one nat
    watched = Watched(losses)
    assert not watched.back and len(watched.skipped) <= 1


def test_a_norm_that_grows_as_b_does_is_no_fault():
    assert not Watched(falling(0.05, steps=60), 0.3 * 1.15 ** np.arange(60)).skipped


# Faults


def test_a_spike_is_skipped_and_nothing_else():
    losses = falling(0.1)
    losses[[500, 1400]] = 9.0, np.nan
    norms = np.ones(STEPS)
    norms[[700, 701, 1450]] = 50, 60, np.inf
    watched = Watched(losses, norms)
    assert watched.skipped == [500, 700, 701, 1400, 1450] and not watched.back


def test_so_many_bad_steps_in_a_row_are_a_fault():
    losses = falling(0.1)
    losses[500:503], losses[900:904] = 9.0, np.nan
    watched = Watched(losses, max_skipped=4)
    assert watched.back == {903: "4 steps in a row were skipped"}
    assert Watched(losses, max_skipped=3).back.keys() == {502, 902}


@pytest.mark.parametrize("growth", [0.005, 0.02, 0.04])
@pytest.mark.parametrize("level", [0.3, 2.0, 8.0])
def test_a_loss_that_climbs_steadily_is_a_fault_though_no_step_is_a_spike(growth, level):
    climbing = np.concatenate([np.ones(100), (1 + growth) ** np.arange(400)]).clip(max=40) * level
    losses = climbing * np.exp(0.05 * np.random.default_rng(2).normal(size=500))
    watched = Watched(losses)
    first = min(watched.back)
    assert not [step for step in watched.skipped if step < first]
    # At the latest when the loss is three times what it was, or has risen by two nats; the median is 16 steps behind.
    assert climbing[first - 16] < max(3 * level, level + 2)


def test_a_rate_far_too_high_from_the_start_is_a_fault_before_there_are_limits():
    watched = Watched([4.2, 4.1, 3.9, 8, 20, 25, 30, 28, 29, 27])
    assert watched.back == {7: "the loss climbed from 4.1 to 14 (medians of up to 16 steps)"}


def test_a_single_good_loss_is_enough_to_see_that_the_next_ones_are_not():
    watched = Watched([1.2, 4.6, 4.5, 4.2, 4.3])
    assert list(watched.back) == [3]


def test_a_first_loss_that_is_small_by_chance_is_no_measure():
    usual = 2.0 * np.exp(0.05 * np.random.default_rng(4).normal(size=200))
    assert not Watched([0.8, *usual]).back
    # What is twice as high as usual is seen all the same.
    assert Watched([0.8, *usual, *(2 * usual)], spike=99).back


def test_other_data_cost_one_return_at_most():
    """A loss that jumps because the data changed is the new normal after one return."""
    losses = np.concatenate([falling(0.05, steps=300), 6 + falling(0.05, steps=600)])
    assert len(Watched(losses).back) == 1


def test_a_resumed_guard_goes_on_as_it_would_have():
    losses, norms = falling(0.3), np.exp(1.0 * np.random.default_rng(3).normal(size=STEPS))
    losses[400:404], losses[1000:1400] = np.nan, losses[1000:1400] * 1.02 ** np.arange(400)
    whole, resumed = Watched(losses, norms), Watched(losses, norms, resume_every=5)
    assert whole.back and whole.skipped
    assert (whole.back, whole.skipped) == (resumed.back, resumed.skipped)


# The last good state


def test_a_state_is_healthy_while_the_loss_is_near_its_best():
    guard = RunGuard()
    assert not guard.is_healthy  # nothing is known
    for loss in [2.0] * 20:
        guard.step(loss, 1.0, False)
    assert guard.is_healthy
    guard.step(9.0, 1.0, True)
    assert not guard.is_healthy
    for loss in [2.8] * 17:
        guard.step(loss, 1.0, False)
    assert not guard.is_healthy


def test_snapshots_go_back_to_the_last_state_that_is_proven():
    snapshots = Snapshots(every=20, proven_after=16)
    assert snapshots.is_empty and snapshots.is_due(0)
    snapshots.add(0, {"w": 0})
    assert [step for step in (1, 19, 20) if snapshots.is_due(step)] == [20]
    for step in (20, 40, 60):
        snapshots.add(step, {"w": step})
    assert snapshots.go_back(70) == (40, {"w": 40})
    assert snapshots.go_back(71) == (40, {"w": 40})
    snapshots.add(90, {"w": 90})
    assert snapshots.go_back(106) == (90, {"w": 90})


def test_the_first_snapshot_is_used_even_if_it_is_young():
    snapshots = Snapshots(every=1)
    snapshots.add(3, {"w": 3})
    assert snapshots.go_back(5) == (3, {"w": 3})


# EarlyStop


@pytest.mark.parametrize(
    "mode, metrics, stops_at, best",
    [
        ("min", [3, 2, 2.5, 1.875, 1.75, 1.74, 1.73, 1.65, 1], 8, (1.75, 5)),
        ("max", [1, 2, 2.04, 2.05, 1], 5, (2, 2)),
        ("min", [float("nan")] * 4, 3, (None, 0)),
        ("min", [3, 2, 1, 0], None, (0, 4)),
    ],
)
def test_early_stop_counts_measurements_without_an_improvement(mode, metrics, stops_at, best):
    rule = EarlyStop(patience=3, min_delta=0.1, mode=mode)
    for step, metric in enumerate(metrics, 1):
        state, rule = rule.state(), EarlyStop(rule.patience, rule.min_delta, mode)
        rule.restore(json.loads(json.dumps(state, allow_nan=False)))
        if rule.step(step, metric):
            break
    else:
        step = None
    assert step == stops_at and (rule.best, rule.best_step) == best


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RunGuard(spike=2), "spike is 2: it must be a number of at least 3"),
        (lambda: RunGuard(climb=1.0), "climb is 1.0: it must be a number above 1"),
        (lambda: RunGuard(max_skipped=1), "max_skipped is 1: it must be a whole number of at least 2"),
        (lambda: RunGuard(window=16), "window is 16: it must be a whole number above 16"),
        (lambda: Snapshots(0), "snapshot_steps is 0: it must be a whole number of at least 1"),
        (lambda: EarlyStop(0), "patience is 0: it must be a whole number of at least 1"),
        (lambda: EarlyStop(1, min_delta=-1), "min_delta is -1: it must be a number of at least 0"),
        (lambda: EarlyStop(1, mode="low"), "mode is 'low', but it must be 'min' or 'max'"),
    ],
)
def test_wrong_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
