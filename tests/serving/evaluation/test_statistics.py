"""Intervals and verdicts: those of resampling by hand, and right about as often as they say."""

import numpy as np
import pytest

from mindlora.serving.evaluation import statistics
from mindlora.serving.evaluation.statistics import BETTER, NOT_TOLD_APART, WORSE, measure


def measured(base, adapter, weights=None, **options):
    amounts = {None: np.array(base, float), "tuned": np.array(adapter, float)}
    weights = np.ones(len(base)) if weights is None else np.array(weights, float)
    return measure("loss", "a file", options.pop("smaller_is_better", True), amounts, weights, **options)


def test_values_are_those_of_all_examples_together():
    found = measured([2.0, 3.0, 5.0], [1.0, 1.0, 2.0], [1, 1, 3], transform=np.exp)
    assert found.values["base"].value == pytest.approx(np.exp(10 / 5))
    assert found.differences["tuned"].value == pytest.approx(np.exp(4 / 5) - np.exp(10 / 5))
    assert found.examples == 3


def test_intervals_are_those_of_examples_drawn_by_hand(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 40_000)
    rng = np.random.default_rng(1)
    base, weights = rng.normal(5, 1, 30), rng.uniform(1, 3, 30)
    adapter = base - rng.normal(0.2, 0.5, 30)
    found = measured(base, adapter, weights)
    draws = rng.integers(30, size=(40_000, 30))
    sums = {name: one[draws].sum(1) / weights[draws].sum(1) for name, one in (("base", base), ("tuned", adapter))}
    for estimate, curve in (
        (found.values["base"], sums["base"]),
        (found.values["tuned"], sums["tuned"]),
        (found.differences["tuned"], sums["tuned"] - sums["base"]),
    ):
        assert [estimate.low, estimate.high] == pytest.approx(np.percentile(curve, [2.5, 97.5]), abs=0.01)


def test_the_same_examples_are_compared():
    """Hard and easy examples differ by far more than the models do, which makes no difference."""
    base = np.linspace(0, 100, 20)
    found = measured(base, base - 0.1)
    assert found.verdicts == {"tuned": BETTER}
    assert found.differences["tuned"].low == pytest.approx(found.differences["tuned"].high) == pytest.approx(-0.1)


@pytest.mark.parametrize("smaller_is_better, verdict", [(True, WORSE), (False, BETTER)])
def test_what_is_better_depends_on_the_measure(smaller_is_better, verdict):
    found = measured(np.zeros(8), np.ones(8), smaller_is_better=smaller_is_better)
    assert found.verdicts == {"tuned": verdict}


def test_five_examples_never_tell_two_models_apart():
    for count, verdict in ((5, NOT_TOLD_APART), (6, BETTER)):
        found = measured(np.ones(count), np.zeros(count))
        assert found.verdicts == {"tuned": verdict}
        assert (found.values["base"].low is None) == (count == 5)


def test_equal_models_are_told_apart_in_few_cases():
    rng = np.random.default_rng(3)
    wrong = 0
    for trial in range(200):
        base, adapter = rng.normal(size=(2, 40))
        wrong += measured(base, adapter, seed=trial).verdicts["tuned"] != NOT_TOLD_APART
    assert 2 <= wrong <= 22  # about 5 % of 200
