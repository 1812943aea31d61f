"""The losses of preferences, as functions of log-probabilities.

A score is what a loss compares: log p(answer | prompt), or with a reference its distance from the reference's,
log p - log p_reference; a sum over the tokens of the answer, or with length normalization the mean. All arguments that
are tensors are float32 [...], and so are the results; beta, smoothing, margin and the weights are numbers.
"""

from typing import Callable, Dict

from mindspore import Tensor, ops

# The logarithm of the largest probability below 1 in float32, 1 - 2^-24.
_NEARLY_CERTAIN = -(2.0**-24)


def log_sigmoid(x: Tensor) -> Tensor:
    """log(1 / (1 + e^-x)), also where e^-x overflows."""
    # min(x, 0) is (x - |x|) / 2 here, so that the gradient at 0, where DPO begins, is 1/2. MindSpore's Softplus on a
    # CPU gives an element one of two values, by the thread that computes it: a resumed run would differ.
    distance = ops.abs(x)
    return 0.5 * (x - distance) - ops.log1p(ops.exp(-distance))


def sigmoid_loss(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, margin: float) -> Tensor:
    """-(1 - smoothing) log sigmoid(h) - smoothing log sigmoid(-h) with h = beta (chosen - rejected) - margin.

    DPO (Rafailov et al., 2023), with smoothing conservative DPO (Mitchell, 2023); without a reference CPO (Xu et al.,
    2024), and with mean log-probabilities and a margin SimPO (Meng et al., 2024). Of a reward model's scores it is the
    loss of Bradley and Terry (1952; Ouyang et al., 2022).
    """
    h = beta * (chosen - rejected) - margin
    return -(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h)


def ipo_loss(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, margin: float) -> Tensor:
    """(chosen - rejected - 1 / (2 beta))^2 (Azar et al., IPO, 2023)."""
    return ops.square(chosen - rejected - 1 / (2 * beta))


def hinge_loss(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, margin: float) -> Tensor:
    """max(0, 1 - beta (chosen - rejected)) (Zhao et al., SLiC-HF, 2023)."""
    return ops.relu(1 - beta * (chosen - rejected))


def odds_loss(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, margin: float) -> Tensor:
    """-beta log sigmoid(log odds(chosen) - log odds(rejected)), odds(s) = e^s / (1 - e^s) (Hong et al., ORPO, 2024)."""
    return -beta * log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(score):
    # An answer that is certain would have infinite odds, and a gradient of NaN.
    score = ops.minimum(score, _NEARLY_CERTAIN)
    return score - ops.log(-ops.expm1(score))


def kto_loss(score: Tensor, judgment: Tensor, kl: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(judgment beta (score - kl)) (Ethayarajh et al., KTO, 2024).

    ``judgment`` is 1 for a desirable answer and -1 for an undesirable one; ``kl``, of shape [], estimates how far the
    model is from the reference, at least 0, and has no gradient.
    """
    return 1 - ops.sigmoid(judgment * beta * (score - kl))


PAIR_LOSSES: Dict[str, Callable] = {
    "dpo": sigmoid_loss,
    "ipo": ipo_loss,
    "hinge": hinge_loss,
    "simpo": sigmoid_loss,
    "orpo": odds_loss,
    "cpo": sigmoid_loss,
    "reward": sigmoid_loss,
}
