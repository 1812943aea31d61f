r"""The losses of GRPO and RLOO, in NumPy: from rewards to advantages, and from log-probabilities to gradients.

A step has P prompts with G answers each; row i of its arrays is an answer, and answers to one prompt are adjacent. The
log-probability of token t of answer i is l under the training policy, l_old under the sampling policy, and l_ref under
the reference. The policy learns from

.. math::
    L(l), \qquad c_{it} = \partial L / \partial l_{it}

A trainer needs only the coefficients c: sum(c l), with c held constant, has the gradient of L. Everything is computed
in float64. tests/peers compares every case with TRL's trainers.

Sources: GRPO (Shao et al., 2024), RLOO (Ahmadian et al., 2024), DAPO (Yu et al., 2025), Dr. GRPO (Liu et al., 2025),
GSPO (Zheng et al., 2025), the upper limit delta (INTELLECT-2, Prime Intellect, 2025), the estimate k3 of the KL
divergence (Schulman, 2020); distillation: Agarwal et al., On-Policy Distillation of Language Models, 2024, and Lu and
Thinking Machines Lab, On-Policy Distillation, 2025.
"""

from typing import Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mindlora.training.rl.settings import RlSettings

# TRL adds this to a standard deviation before dividing by it.
_EPSILON = 1e-4


class Advantages(NamedTuple):
    """The advantages: how much better each answer is than the others.

    Attributes:
        values (array): float64 [rows]; 0 for an answer without a rating.
        rewards (array): float64 [rows], the weighted sum of the functions' rewards, without a KL penalty; NaN for an
            answer without a rating.
        measures (dict): reward, reward_std, frac_reward_zero_std, and rewards/NAME/mean and /std for each function.
    """

    values: np.ndarray
    rewards: np.ndarray
    measures: Dict[str, float]


class Distillation(NamedTuple):
    """Token advantages: how much more likely each token is under a teacher than under the policy that sampled it.

    Attributes:
        values (array): float64 [rows, tokens], the advantages; 0 where the mask is False.
        kl (float): mean(policy - teacher) over the tokens, in nats: k1 of the reverse KL divergence.
    """

    values: np.ndarray
    kl: float


class PolicyLoss(NamedTuple):
    """A loss and its gradient.

    Attributes:
        loss (float): L.
        coefficients (array): float64 [rows, tokens], dL / dl; 0 where the mask is False.
        measures (dict): clip_ratio/low_mean, clip_ratio/high_mean, clip_ratio/region_mean and, with a reference, kl:
            means over the given tokens, or over the rows if ratios are per answer.
    """

    loss: float
    coefficients: np.ndarray
    measures: Dict[str, float]


class Agreement(NamedTuple):
    """The distance of the sampler's log-probabilities from the trainer's, in nats.

    Attributes:
        max (float): The largest difference at a token; NaN if one of them is NaN.
        k1 (float): mean(sampler - trainer), an estimate of KL(sampler || trainer) that can be negative.
        k2 (float): mean((sampler - trainer)^2 / 2), an estimate that cannot (Schulman, 2020).
    """

    max: float
    k1: float
    k2: float

    def holds(self, limit: float) -> bool:
        """Returns whether no token differs by more than ``limit``; False if a log-probability is NaN."""
        return self.max <= limit


def counted(mask: np.ndarray, truncated: np.ndarray, settings: RlSettings) -> np.ndarray:
    """Returns which tokens count: all answers' tokens, or with mask_truncated_completions only ended answers'.

    Args:
        mask (array): bool [rows, tokens], where an answer has a token.
        truncated (array): bool [rows], answers cut at max_completion_length.
        settings (RlSettings): The run's.
    """
    return mask & ~truncated[:, None] if settings.mask_truncated_completions else mask.copy()


def answer_kl(log_probs: np.ndarray, reference_log_probs: np.ndarray, mask: np.ndarray) -> np.ndarray:
    r"""Returns float64 [rows], sum_t (l - l_ref) of each answer: RLOO's estimate of the KL divergence, k1.

    Args:
        log_probs (array): [rows, tokens], of the policy that sampled.
        reference_log_probs (array): [rows, tokens].
        mask (array): bool [rows, tokens], as returned by ``counted``.
    """
    return np.where(mask, _float64(log_probs) - _float64(reference_log_probs), 0).sum(1)


def weighted_rewards(rewards: np.ndarray, settings: RlSettings) -> np.ndarray:
    """Returns float64 [rows], sum_f w_f r_f over the functions f that rated an answer; NaN if none did.

    Args:
        rewards (array): float64 [rows, functions], NaN where a function has not rated an answer.
        settings (RlSettings): The run's, with the weights.
    """
    unrated = np.isnan(rewards).all(1)
    return np.where(unrated, np.nan, np.nansum(rewards * np.asarray(settings.reward_weights), axis=1))


def advantages(rewards: np.ndarray, settings: RlSettings, kl: Optional[np.ndarray] = None) -> Advantages:
    r"""Computes advantages by comparing the rewards of the answers to each prompt.

    With r_i = sum_f w_f r_if over the functions f that rated answer i, and over the rated answers to its prompt,

    .. math::
        GRPO: A_i = \frac{r_i - mean(r)}{std(r) + 10^{-4}}, \qquad
        RLOO: A_i = r'_i - \frac{1}{n - 1} \sum_{j \ne i} r'_j, \quad r'_i = r_i - \beta KL_i

    std has the divisor n - 1; scale_rewards "batch" takes the std of all answers, "none" does not divide. RLOO's
    normalize_advantages brings the A of all answers to mean 0 and standard deviation 1.

    Args:
        rewards (array): [rows, functions], NaN where a function has not rated an answer.
        settings (RlSettings): The run's; rows are a multiple of its num_generations.
        kl (array): [rows], the result of ``answer_kl``; needed by RLOO with beta. Default: None.

    Returns:
        The advantages, and measures of the rewards.
    """
    rewards = _float64(rewards)
    total = weighted_rewards(rewards, settings)
    is_rloo = settings.algorithm == "rloo"
    penalized = total - settings.beta * _float64(kl) if is_rloo and settings.beta else total
    groups = penalized.reshape(-1, settings.num_generations)
    deviation = _std(groups, 1)
    if is_rloo:
        rated = (~np.isnan(groups)).sum(1, keepdims=True)
        # A prompt with one rated answer has nothing to compare it with: 0 / 0.
        with np.errstate(invalid="ignore", divide="ignore"):
            values = groups - (np.nansum(groups, 1, keepdims=True) - groups) / (rated - 1)
        if settings.normalize_advantages:
            values = (values - _mean(values)) / (_std(values) + _EPSILON)
    else:
        values = groups - _mean(groups, 1)
        if settings.scale_rewards == "batch":
            deviation = np.broadcast_to(_std(groups), deviation.shape)
        if settings.scale_rewards != "none":
            values = values / (deviation + _EPSILON)
    measures = {
        "reward": float(_mean(total).item()),
        "reward_std": float(_std(total).item()),
        "frac_reward_zero_std": float(np.isclose(deviation, 0).mean()),
    }
    for name, column in zip(settings.reward_names, rewards.T):
        measures[f"rewards/{name}/mean"] = float(_mean(column).item())
        measures[f"rewards/{name}/std"] = float(_std(column).item())
    return Advantages(np.nan_to_num(values.reshape(-1)), total, measures)


def distillation(
    log_probs: np.ndarray, teacher_log_probs: np.ndarray, mask: np.ndarray, settings: RlSettings
) -> Distillation:
    r"""Compares each answer token's log-probability with a teacher's.

    With a token's log-probabilities l_T under the teacher and l under the policy that sampled it, and teacher_coef c,

    .. math::
        A_{it} = c (l_{T,it} - l_{it})

    Its policy gradient is the gradient of c times the reverse KL divergence from the teacher at each token, sum_v p(v)
    (log p(v) - log p_T(v)), whose estimate k1 is the mean of l - l_T (GKD with the student's own answers, Agarwal et
    al., 2024). Each token is credited only with its own divergence, discount 0, without a baseline (Lu and Thinking
    Machines Lab, 2025).

    Args:
        log_probs (array): [rows, tokens], l, of the policy that sampled.
        teacher_log_probs (array): [rows, tokens], l_T.
        mask (array): bool [rows, tokens], as returned by ``counted``. Values elsewhere do not matter.
        settings (RlSettings): The run's.

    Returns:
        The tokens' advantages, which are added to the answers' advantages, and the divergence.
    """
    divergence = np.where(mask, _float64(log_probs) - _float64(teacher_log_probs), 0)
    return Distillation(-settings.teacher_coef * divergence, _mean_of(divergence, mask))


def policy_loss(
    log_probs: np.ndarray,
    old_log_probs: Optional[np.ndarray],
    reference_log_probs: Optional[np.ndarray],
    advantages: np.ndarray,
    mask: np.ndarray,
    settings: RlSettings,
) -> PolicyLoss:
    r"""Returns the loss of answers, and its derivative by each log-probability.

    The ratio of a token is r = exp(l - l_old); with importance_sampling_level "sequence", its logarithm is the answer's
    mean. GRPO's loss of a token is

    .. math::
        L_{it} = -\min(\min(r, \delta) A_i,\; clip(r, 1 - \epsilon, 1 + \epsilon_{high}) A_i)
            + \beta r (e^{l_{ref} - l} - (l_{ref} - l) - 1)

    and L is their sum with the weight of loss_type: 1 / (rows |o_i|) for grpo, |o_i| being the tokens of the answer;
    1 / tokens for dapo; 1 / (rows max_completion_length) for dr_grpo. TRL's bnpo divides by the tokens of a
    micro-batch; here, a step is one batch, however it is divided, so bnpo is dapo.

    RLOO's ratio is per answer, r_i = exp(sum_t l - l_old), and

    .. math::
        L = -\frac{1}{rows} \sum_i \min(r_i A_i,\; clip(r_i, 1 - \epsilon, 1 + \epsilon_{high}) A_i)

    Args:
        log_probs (array): [rows, tokens], l.
        old_log_probs (array): [rows, tokens], l_old; None takes l itself, so that all ratios are 1.
        reference_log_probs (array): [rows, tokens], l_ref; needed by GRPO with beta, and by RLOO only for the measure
            kl. None: no reference.
        advantages (array): [rows], per answer, or with GRPO's ratios per token [rows, tokens].
        mask (array): bool [rows, tokens], as returned by ``counted``. Values elsewhere do not matter.
        settings (RlSettings): The run's.

    Returns:
        The loss, the coefficients and the measures.
    """
    log_probs = np.where(mask, _float64(log_probs), 0)
    old = log_probs if old_log_probs is None else np.where(mask, _float64(old_log_probs), 0)
    reference = None if reference_log_probs is None else np.where(mask, _float64(reference_log_probs), 0)
    advantages = _float64(advantages)
    advantages = np.where(mask, advantages, 0) if advantages.ndim > 1 else advantages[:, None]
    if settings.algorithm == "rloo":
        return _rloo(log_probs, old, reference, advantages, mask, settings)
    of_sequence = settings.importance_sampling_level == "sequence"
    lengths = np.maximum(mask.sum(1, keepdims=True), 1)
    difference = log_probs - old
    ratio = np.exp(difference.sum(1, keepdims=True) / lengths if of_sequence else difference)
    gain, slope = _clipped(ratio, advantages, settings, settings.delta)
    losses, slopes = -gain, -slope
    weights = mask * _weight(mask, lengths, settings)
    measures = _clip_measures(np.minimum(ratio, settings.delta or np.inf), advantages, mask, settings)
    direct = 0.0
    if settings.beta:
        away = reference - log_probs
        k3 = np.exp(away) - away - 1
        measures["kl"] = _mean_of(k3 * ratio, mask)
        losses, slopes = losses + settings.beta * k3 * ratio, slopes + settings.beta * k3 * ratio
        direct = settings.beta * ratio * (1 - np.exp(away))
    # The derivative by the ratio's logarithm, then by l: each token has a share of its answer's ratio.
    by_ratio = (slopes * weights).sum(1, keepdims=True) * mask / lengths if of_sequence else slopes * weights
    coefficients = by_ratio + direct * weights
    return PolicyLoss(float((losses * weights).sum()), coefficients, measures)


def _rloo(log_probs, old, reference, advantages, mask, settings: RlSettings) -> PolicyLoss:
    ratio = np.exp((log_probs - old).sum(1, keepdims=True))
    gain, slope = _clipped(ratio, advantages, settings, None)
    measures = _clip_measures(ratio, advantages, mask, settings)
    if reference is not None:
        measures["kl"] = _mean_of(old - reference, mask)
    return PolicyLoss(float(-gain.sum() / len(mask)), -slope * mask / len(mask), measures)


def _clipped(ratio, advantages, settings: RlSettings, delta: Optional[float]) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the minimum of the ratio times A and the clipped ratio times A, and its derivative by log(ratio)."""
    low, high = 1 - settings.epsilon, 1 + settings.epsilon_high
    limit = np.inf if delta is None else delta
    free, clipped = np.minimum(ratio, limit) * advantages, np.clip(ratio, low, high) * advantages
    is_free = free <= clipped
    moves = np.where(is_free, ratio <= limit, (low <= ratio) & (ratio <= high))
    return np.where(is_free, free, clipped), np.where(moves, ratio, 0) * advantages


def _weight(mask, lengths, settings: RlSettings):
    """Returns the weight of a token, [rows, 1] or a number."""
    if settings.loss_type == "grpo":
        return 1 / (len(mask) * lengths)
    if settings.loss_type == "dr_grpo":
        return 1 / (len(mask) * settings.max_completion_length)
    return 1 / max(mask.sum(), 1)


def _clip_measures(ratio, advantages, mask, settings: RlSettings) -> Dict[str, float]:
    low = (ratio < 1 - settings.epsilon) & (advantages < 0)
    high = (ratio > 1 + settings.epsilon_high) & (advantages > 0)
    clipped = {"low": low, "high": high, "region": low | high}
    return {f"clip_ratio/{name}_mean": _mean_of(values, mask) for name, values in clipped.items()}


def _mean_of(values, mask) -> float:
    """Returns the mean over a mask's tokens, or over rows if there is one value per row."""
    if values.shape != mask.shape:
        return float(values.mean())
    return float((values * mask).sum() / max(mask.sum(), 1))


def answer_measures(mask: np.ndarray, truncated: np.ndarray) -> Dict[str, float]:
    """Returns completions/mean_length, /min_length, /max_length, /clipped_ratio, the share of answers that were cut,
    and /mean_terminated_length, of those that were not; 0 if all were.

    Args:
        mask (array): bool [rows, tokens], where an answer has a token.
        truncated (array): bool [rows].
    """
    lengths = mask.sum(1)
    ended = lengths[~truncated]
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        "completions/mean_terminated_length": float(ended.mean()) if len(ended) else 0.0,
    }


def agreement(trainer: np.ndarray, sampler: np.ndarray, mask: np.ndarray) -> Agreement:
    """Compares the log-probabilities of trainer and sampler, both [rows, tokens], at the tokens of a mask.

    Args:
        trainer (array): The trainer's, with the sampling weights, before the step.
        sampler (array): The sampler's, from when the tokens were chosen.
        mask (array): bool [rows, tokens], where an answer has a token.
    """
    difference = (_float64(sampler) - _float64(trainer))[mask]
    if not difference.size:
        return Agreement(0.0, 0.0, 0.0)
    return Agreement(float(np.abs(difference).max()), float(difference.mean()), float(np.square(difference).mean() / 2))


def _float64(values: Sequence) -> np.ndarray:
    return np.asarray(values, np.float64)


def _mean(values: np.ndarray, axis: Optional[int] = None) -> np.ndarray:
    """Returns the mean without NaN, keeping all axes; NaN if no value is left."""
    with np.errstate(invalid="ignore"):
        return np.nansum(values, axis, keepdims=True) / (~np.isnan(values)).sum(axis, keepdims=True)


def _std(values: np.ndarray, axis: Optional[int] = None) -> np.ndarray:
    """Returns the standard deviation without NaN, with the divisor n - 1; NaN for fewer than two values."""
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    squares = np.nansum(np.square(values - _mean(values, axis)), axis, keepdims=True)
    return np.sqrt(np.where(count > 1, squares / np.maximum(count - 1, 1), np.nan))
