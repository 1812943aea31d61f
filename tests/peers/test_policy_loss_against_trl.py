"""Advantages, losses and their gradients against TRL's GRPOTrainer and RLOOTrainer, on the same numbers."""

import json
import os

import numpy as np
import pytest

from mindlora.training.rl.policy_loss import advantages, answer_kl, answer_measures, counted, policy_loss
from mindlora.training.rl.settings import rl_settings

SIDE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "support", "peers", "trl_policy_side.py")
PROMPTS, GENERATIONS, TOKENS = 3, 4, 6
END, WORD = 2, 4
# Both sides take the same keys. Every epsilon is passed by some of the ratios.
GRPO = {"num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.3}
MASKED = {**GRPO, "mask_truncated_completions": True}
LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "bnpo")
CASES = {
    **{name: ("grpo", {**GRPO, "loss_type": name}) for name in LOSS_TYPES},
    **{f"{name}-masked": ("grpo", {**MASKED, "loss_type": name}) for name in LOSS_TYPES},
    **{
        f"{name}-sequence": ("grpo", {**GRPO, "loss_type": name, "importance_sampling_level": "sequence"})
        for name in LOSS_TYPES
    },
    "defaults": ("grpo", {}),
    "one-epsilon": ("grpo", {"num_iterations": 2, "epsilon": 0.2}),
    "delta": ("grpo", {**GRPO, "delta": 1.5}),
    "delta-below-the-clip": ("grpo", {**GRPO, "delta": 1.15}),
    "delta-sequence": ("grpo", {**GRPO, "delta": 1.1, "importance_sampling_level": "sequence"}),
    "kl": ("grpo", {**GRPO, "beta": 0.3}),
    "kl-at-ratio-1": ("grpo", {"beta": 0.3}),
    "kl-sequence-masked": (
        "grpo",
        {**MASKED, "beta": 0.3, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "kl-delta": ("grpo", {**GRPO, "beta": 0.3, "delta": 1.2}),
    "batch": ("grpo", {**GRPO, "scale_rewards": "batch"}),
    "unscaled": ("grpo", {**GRPO, "scale_rewards": "none"}),
    "weights": ("grpo", {**GRPO, "reward_weights": [0.5, -2.0]}),
    "rloo": ("rloo", {"beta": 0.0}),
    "rloo-clipped": ("rloo", {"beta": 0.0, "epsilon": 0.05, "epsilon_high": 0.2}),
    "rloo-kl": ("rloo", {"beta": 0.3}),
    "rloo-kl-masked": ("rloo", {"beta": 0.3, "mask_truncated_completions": True}),
    "rloo-normalized": ("rloo", {"beta": 0.1, "normalize_advantages": True}),
    "rloo-weights": ("rloo", {"beta": 0.0, "reward_weights": [0.5, -2.0]}),
}


def numbers():
    """The numbers of a step: answers of 1 to TOKENS tokens, some of them cut; a prompt whose rewards are all equal, a
    prompt that is rated in part, and one with a single rated answer.
    """
    rng = np.random.default_rng(7)
    rows = PROMPTS * GENERATIONS
    lengths = [6, 3, 1, 6, 2, 4, 6, 5, 1, 2, 6, 3]
    truncated = np.array(lengths) == TOKENS
    truncated[[3, 6]] = False
    rewards = rng.normal(size=(rows, 2))
    rewards[GENERATIONS : 2 * GENERATIONS] = [0.25, 0.5]
    rewards[0, 0] = np.nan
    rewards[[2, 8], 1] = np.nan
    rewards[[3, 9, 10, 11]] = np.nan
    log_probs = -rng.uniform(0.1, 3, (rows, TOKENS))
    return {
        "rewards": rewards,
        "log_probs": log_probs,
        "old_log_probs": log_probs + 0.25 * rng.normal(size=log_probs.shape),
        "reference_log_probs": log_probs + 0.5 * rng.normal(size=log_probs.shape),
        "mask": np.arange(TOKENS) < np.array(lengths)[:, None],
        "truncated": truncated,
    }


@pytest.fixture(scope="module")
def trl(peer, tmp_path_factory):
    """What TRL computed: case -> its advantages, mask, loss, gradient and metrics."""
    folder = tmp_path_factory.mktemp("trl")
    given = numbers()
    completions = [
        [WORD] * (length - 1) + [WORD if cut else END]
        for length, cut in zip(given["mask"].sum(1).tolist(), given["truncated"])
    ]
    request = {name: values.tolist() for name, values in given.items() if name not in ("mask", "truncated")}
    cases = {
        name: {"algorithm": algorithm, "arguments": {**keys_of_shape(), **keys}}
        for name, (algorithm, keys) in CASES.items()
    }
    request.update(folder=str(folder), completions=completions, cases=cases)
    (folder / "request.json").write_text(json.dumps(request))
    peer.run(program=SIDE, arguments=[str(folder / "request.json")])
    return json.loads((folder / "results.json").read_text())


def keys_of_shape():
    return {"num_generations": GENERATIONS, "max_completion_length": TOKENS}


@pytest.mark.parametrize("case", CASES)
def test_advantages_losses_gradients_and_measures(case, trl):
    algorithm, keys = CASES[case]
    functions = ["rewards.py:first", "rewards.py:second"]
    settings = rl_settings({"algorithm": algorithm, "reward_funcs": functions, **keys_of_shape(), **keys})
    given, expected = numbers(), trl[case]
    mask = counted(given["mask"], given["truncated"], settings)
    np.testing.assert_array_equal(mask, np.array(expected["mask"], bool))
    # TRL takes the ratio as 1 where the policy has not changed since it sampled; RLOOTrainer computes it always.
    old = given["old_log_probs"] if settings.num_iterations > 1 or algorithm == "rloo" else None
    reference = given["reference_log_probs"] if settings.beta else None
    kl = answer_kl(old, reference, mask) if algorithm == "rloo" and settings.beta else None
    compared = advantages(given["rewards"], settings, kl)
    assert_close(compared.values, expected["advantages"])
    result = policy_loss(given["log_probs"], old, reference, compared.values, mask, settings)
    assert_close(result.loss, expected["loss"])
    assert_close(result.coefficients, expected["gradient"])
    measures = {**compared.measures, **result.measures, **answer_measures(given["mask"], given["truncated"])}
    assert ("kl" in measures) == ("kl" in expected["metrics"])
    for name, value in measures.items():
        # TRL makes float32 of what it reports of lengths and of the clipped.
        np.testing.assert_allclose(value, expected["metrics"][name], rtol=1e-6, atol=1e-7, err_msg=name)


def assert_close(found, expected):
    # TRL's factor n / (n - 1) of a variance is in float32, the rest in float64.
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-12)
