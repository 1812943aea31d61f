"""Reactive learning rates, against PyTorch's schedulers on the same measurements."""

import numpy as np
import pytest

from mindlora.training.callbacks.learning_rate import PlateauRate, warm_up_factor

RATE = 0.3


def measurements(seed, count=300):
    """Returns a loss that falls, stalls, repeats itself, rises, and is NaN or infinite now and then."""
    rng = np.random.default_rng(seed)
    falling = 3.0 * np.exp(-np.arange(count) / rng.uniform(20, 200)) + 0.2 * rng.normal(size=count)
    metrics = np.where(rng.random(count) < 0.3, np.round(falling, 1), falling)
    metrics[rng.integers(0, count, 4)] = np.nan
    metrics[rng.integers(0, count, 2)] = np.inf
    metrics[rng.integers(0, count)] = -0.0
    return metrics.tolist()


def random_settings(seed):
    rng = np.random.default_rng(seed)
    return {
        "mode": rng.choice(["min", "max"]).item(),
        "factor": float(rng.uniform(0.1, 0.95)),
        "patience": int(rng.integers(0, 8)),
        "threshold": float(rng.choice([0.0, 1e-4, 0.05])),
        "threshold_mode": rng.choice(["rel", "abs"]).item(),
        "cooldown": int(rng.integers(0, 5)),
        "min_lr": float(rng.choice([0.0, 1e-3, 0.05])),
        "eps": float(rng.choice([0.0, 1e-8, 1e-2])),
    }


@pytest.mark.parametrize("settings", [{}, *map(random_settings, range(24))], ids=str)
def test_plateau_rates_are_torch_s_at_every_measurement(peer, settings):
    for seed in range(4):
        metrics = measurements(seed)
        rule, rates = PlateauRate(**settings), [RATE]
        for number, metric in enumerate(metrics):
            rates.append(rule.step(metric, rates[-1]))
            if number % 70 == 9:  # as if the run were resumed
                state, rule = rule.state(), PlateauRate(**settings)
                rule.restore(state)
        assert rates[1:] == peer.plateau_rates(metrics=metrics, rate=RATE, settings=settings)
        assert len(set(rates)) > 1


@pytest.mark.parametrize("steps, start", [(1, 0.5), (7, 0.1), (100, 0.001)])
def test_warm_up_rates_are_torch_s(peer, steps, start):
    expected = peer.warm_up_rates(count=steps + 5, steps=steps, start=start)
    found = [warm_up_factor(step, steps, start) for step in range(1, steps + 6)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert found[0] == start and found[steps:] == [1.0] * 5
