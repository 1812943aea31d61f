"""Advantages, losses and gradients of GRPO and RLOO against finite differences and what follows from their equations.

tests/peers/test_policy_loss_against_trl.py compares every case with TRL.
"""

import numpy as np
import pytest

from mindlora.training.rl.policy_loss import advantages, agreement, answer_kl, answer_measures, counted, policy_loss
from mindlora.training.rl.settings import rl_settings
from tests.support.finite_differences import finite_differences

ROWS, TOKENS = 6, 5
LENGTHS = np.array([5, 2, 1, 4, 5, 3])
MASK = np.arange(TOKENS) < LENGTHS[:, None]


def settings(**keys):
    functions = {"reward_funcs": ["rewards.py:first", "rewards.py:second"]}
    return rl_settings({**functions, "num_generations": 3, "max_completion_length": 8, **keys})


def step(seed=0):
    """Log-probabilities of the policy, of the one that sampled and of the reference, and advantages."""
    rng = np.random.default_rng(seed)
    log_probs = -rng.uniform(0.1, 3, (ROWS, TOKENS))
    changed = [log_probs + scale * rng.normal(size=log_probs.shape) for scale in (0.5, 0.6)]
    return log_probs, *changed, rng.normal(size=ROWS)


CASES = [
    *({"loss_type": name} for name in ("dapo", "grpo", "dr_grpo", "bnpo")),
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.02},
    {"epsilon": 0.05, "epsilon_high": 0.4, "delta": 1.3},
    {"delta": 1.1, "epsilon": 0.3},
    {"beta": 0.5},
    {"beta": 0.5, "importance_sampling_level": "sequence", "epsilon": 0.02},
    {"algorithm": "rloo", "epsilon": 0.1},
]


@pytest.mark.parametrize("keys", CASES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_coefficients_are_the_gradient(keys):
    chosen = settings(**keys)
    log_probs, old, reference, values = step()

    def loss():
        return policy_loss(log_probs, old, reference, values, MASK, chosen).loss

    result = policy_loss(log_probs, old, reference, values, MASK, chosen)
    np.testing.assert_allclose(result.coefficients, finite_differences(loss, log_probs), rtol=1e-6, atol=1e-9)
    measures = result.measures
    low, high = measures["clip_ratio/low_mean"], measures["clip_ratio/high_mean"]
    assert 0 < low < 1 and low + high == pytest.approx(measures["clip_ratio/region_mean"])
    assert high > 0 or "delta" in keys


@pytest.mark.parametrize(
    "ratio, advantage, keys, loss, coefficient",
    [
        (1.1, 1.0, {}, -1.1, -1.1),
        # Moving on would be wrong beyond the clip: no gradient. Moving back is right, however far away it is.
        (2.0, 1.0, {}, -1.3, 0.0),
        (0.5, -1.0, {}, 0.9, 0.0),
        (2.0, -1.0, {}, 2.0, 2.0),
        (0.5, 1.0, {}, -0.5, -0.5),
        (2.0, -1.0, {"delta": 1.5}, 1.5, 0.0),
        (1.2, -1.0, {"delta": 1.5}, 1.2, 1.2),
        (1.2, 1.0, {"delta": 1.1}, -1.1, 0.0),
        (2.0, 1.0, {"algorithm": "rloo"}, -1.3, 0.0),
        (2.0, -1.0, {"algorithm": "rloo"}, 2.0, 2.0),
    ],
)
def test_where_a_ratio_is_clipped(ratio, advantage, keys, loss, coefficient):
    chosen = settings(epsilon=0.1, epsilon_high=0.3, **keys)
    mask = np.array([[True]])
    found = policy_loss(np.log([[ratio]]), np.zeros((1, 1)), None, np.array([advantage]), mask, chosen)
    assert found.loss == pytest.approx(loss) and found.coefficients[0, 0] == pytest.approx(coefficient)
    assert found.measures["clip_ratio/low_mean"] == (loss == 0.9)
    assert found.measures["clip_ratio/high_mean"] == (loss == -1.3)


@pytest.mark.parametrize("keys", [{}, {"importance_sampling_level": "sequence"}, {"algorithm": "rloo"}])
def test_without_old_log_probs_every_ratio_is_1(keys):
    log_probs, _, _, values = step()
    found = policy_loss(log_probs, None, None, values, MASK, settings(**keys))
    expected = policy_loss(log_probs, log_probs.copy(), None, values, MASK, settings(**keys))
    assert found.loss == expected.loss and found.measures["clip_ratio/region_mean"] == 0
    np.testing.assert_array_equal(found.coefficients, expected.coefficients)


def test_divisors():
    """At ratio 1, the coefficient of a token is minus the advantage, times the weight that each loss type has."""
    log_probs, _, _, values = step()
    weights = {
        "grpo": 1 / (ROWS * LENGTHS[:, None]),
        "dapo": np.full((ROWS, 1), 1 / MASK.sum()),
        "bnpo": np.full((ROWS, 1), 1 / MASK.sum()),
        "dr_grpo": np.full((ROWS, 1), 1 / (ROWS * 8)),
    }
    for name, weight in weights.items():
        found = policy_loss(log_probs, None, None, values, MASK, settings(loss_type=name)).coefficients
        np.testing.assert_allclose(found, -values[:, None] * weight * MASK, rtol=1e-14)


@pytest.mark.parametrize("keys", CASES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_what_stands_behind_an_answer_does_not_matter(keys):
    log_probs, old, reference, values = step()
    expected = policy_loss(log_probs, old, reference, values, MASK, settings(**keys))
    for array in (log_probs, old, reference):
        array[~MASK] = np.nan
    found = policy_loss(log_probs, old, reference, values, MASK, settings(**keys))
    assert found.loss == expected.loss and found.measures == expected.measures
    np.testing.assert_array_equal(found.coefficients, expected.coefficients)
    assert not found.coefficients[~MASK].any()


def test_truncated_answers_can_be_left_out():
    truncated = LENGTHS == TOKENS
    np.testing.assert_array_equal(counted(MASK, truncated, settings()), MASK)
    mask = counted(MASK, truncated, settings(mask_truncated_completions=True))
    assert mask.sum(1).tolist() == [0, 2, 1, 4, 0, 3]
    log_probs, _, _, values = step()
    found = policy_loss(log_probs, None, None, values, mask, settings(mask_truncated_completions=True))
    assert not found.coefficients[truncated].any() and found.coefficients[~truncated, 0].all()
    assert policy_loss(log_probs, None, None, values, mask & False, settings()).loss == 0


def test_advantages_of_groups():
    """What the equations give for numbers that are easy to follow."""
    rewards = np.array([[1, 0], [3, 0], [5, 0], [2, 2], [2, 2], [2, 2]], float)
    grpo = advantages(rewards, settings())
    np.testing.assert_allclose(grpo.values, np.array([-2, 0, 2, 0, 0, 0]) / (2 + 1e-4), rtol=1e-14)
    assert grpo.measures["frac_reward_zero_std"] == 0.5 and grpo.measures["reward"] == 3.5
    assert grpo.measures["rewards/first/mean"] == 2.5 and grpo.measures["rewards/second/mean"] == 1
    assert grpo.measures["rewards/first/std"] == pytest.approx(rewards[:, 0].std(ddof=1))
    assert advantages(rewards, settings(scale_rewards="none")).values.tolist() == [-2, 0, 2, 0, 0, 0]
    batch = advantages(rewards, settings(scale_rewards="batch")).values
    np.testing.assert_allclose(batch[:3], np.array([-2, 0, 2]) / (rewards.sum(1).std(ddof=1) + 1e-4), rtol=1e-14)
    assert advantages(rewards, settings(algorithm="rloo")).values.tolist() == [-3, 0, 3, 0, 0, 0]
    weighted = advantages(rewards, settings(reward_weights=[2.0, 0.5]))
    assert weighted.rewards.tolist() == [2, 6, 10, 5, 5, 5]


def test_rloo_takes_the_divergence_out_of_the_reward():
    rewards = np.zeros((ROWS, 2))
    log_probs, _, reference, _ = step()
    kl = answer_kl(log_probs, reference, MASK)
    assert kl[2] == pytest.approx(log_probs[2, 0] - reference[2, 0])
    found = advantages(rewards, settings(algorithm="rloo", beta=0.5), kl)
    assert found.values[0] == pytest.approx(-0.5 * (kl[0] - (kl[1] + kl[2]) / 2))
    assert not found.rewards.any()


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_answers_without_a_rating_move_nothing(algorithm):
    """A row that no function has rated, and the only rated one of its prompt."""
    rewards = np.array([[1, 2], [np.nan, np.nan], [4, np.nan], [1, 1], [np.nan, np.nan], [np.nan, np.nan]])
    found = advantages(rewards, settings(algorithm=algorithm))
    assert found.values[1] == 0 and not found.values[3:].any()
    assert found.values[0] == -found.values[2] < 0
    np.testing.assert_array_equal(found.rewards, [3, np.nan, 4, 2, np.nan, np.nan])
    assert found.measures["reward"] == 3 and found.measures["rewards/second/mean"] == 1.5


def test_measures_of_answers():
    found = answer_measures(MASK, LENGTHS == TOKENS)
    assert found["completions/mean_length"] == pytest.approx(20 / 6)
    assert (found["completions/min_length"], found["completions/max_length"]) == (1, 5)
    assert found["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert found["completions/mean_terminated_length"] == 2.5
    assert answer_measures(MASK, np.full(ROWS, True))["completions/mean_terminated_length"] == 0


def test_agreement_of_trainer_and_sampler():
    trainer = step()[0].astype(np.float32)
    sampler = trainer.copy()
    sampler[~MASK] = np.nan
    assert agreement(trainer, sampler, MASK) == (0, 0, 0)
    sampler[0, 0] += 0.5
    sampler[3, 1] -= 0.25
    found = agreement(trainer, sampler, MASK)
    assert found.max == pytest.approx(0.5, rel=1e-6) and found.k1 == pytest.approx(0.25 / 20, rel=1e-5)
    assert found.k2 == pytest.approx((0.25 + 0.0625) / 40, rel=1e-6)
    assert found.holds(0.6) and not found.holds(0.4)
    sampler[0, 0] = np.nan
    assert not agreement(trainer, sampler, MASK).holds(1e9)
