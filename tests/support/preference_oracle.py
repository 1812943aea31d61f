"""The losses of preferences in NumPy, in float64, an example at a time."""

import numpy as np


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def pair_loss(settings, policy, reference, lengths):
    """The loss of one pair; policy, reference (or None) and lengths are of (chosen, rejected)."""
    scores = np.array(policy, np.float64)
    if reference is not None:
        scores = scores - reference
    if settings.length_normalization:
        scores = scores / lengths
    chosen, rejected = scores
    h = settings.beta * (chosen - rejected)
    if settings.loss == "ipo":
        loss = (chosen - rejected - 0.5 / settings.beta) ** 2
    elif settings.loss == "hinge":
        loss = max(0.0, 1 - h)
    elif settings.loss == "orpo":
        odds = [np.exp(score) / (1 - np.exp(score)) for score in scores]
        loss = -settings.beta * log_sigmoid(np.log(odds[0] / odds[1]))
    else:
        h = h - settings.margin
        share = settings.label_smoothing
        loss = -(1 - share) * log_sigmoid(h) - share * log_sigmoid(-h)
    return loss - settings.sft_weight * policy[0] / lengths[0]


def kto_losses(settings, policy, reference, judgments):
    """The losses of judged answers: policy and reference have (answer, answer of another example) in each row."""
    distance = np.asarray(policy, np.float64) - reference
    kl = max(distance[:, 1].mean(), 0.0)
    losses = []
    for score, judgment in zip(distance[:, 0], judgments):
        weight = settings.desirable_weight if judgment > 0 else settings.undesirable_weight
        losses.append(weight * (1 - np.exp(log_sigmoid(judgment * settings.beta * (score - kl)))))
    return np.array(losses)
