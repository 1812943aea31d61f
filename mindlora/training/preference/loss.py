"""PreferenceLoss: the cell that a train step differentiates to learn from preferences."""

from typing import Callable, Dict, Optional, Sequence, Tuple, Union

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.network.graph_cache import CompiledOnce
from mindlora.network.repeated_layers import mark_reference
from mindlora.training.model.log_probabilities import RowLogProbabilities, row_log_probabilities
from mindlora.training.model.loss_in_pieces import set_differentiates
from mindlora.training.preference.reference import from_column, reference_network
from mindlora.training.preference.settings import PreferenceSettings

# Preference losses, as functions of log-probabilities.
#
# A loss compares scores. A score is log p(answer | prompt), or with a reference the difference log p - log p_reference:
# the sum over the answer's tokens, or with length normalization the mean. Tensor arguments and results are float32
# [...]; beta, smoothing, margin and the weights are numbers.

# The logarithm of the largest probability below 1 in float32, 1 - 2^-24.
_NEARLY_CERTAIN = -(2.0**-24)


def log_sigmoid(x: Tensor) -> Tensor:
    """log(1 / (1 + e^-x)), also where e^-x overflows."""
    # min(x, 0) is (x - |x|) / 2 here, so that the gradient at 0, where DPO begins, is 1/2. MindSpore's Softplus on a
    # CPU returns one of two values for an element, depending on the thread: a resumed run would differ.
    distance = ops.abs(x)
    return 0.5 * (x - distance) - ops.log1p(ops.exp(-distance))


def sigmoid_loss(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, margin: float) -> Tensor:
    """-(1 - smoothing) log sigmoid(h) - smoothing log sigmoid(-h) with h = beta (chosen - rejected) - margin.

    DPO (Rafailov et al., 2023), or with smoothing conservative DPO (Mitchell, 2023); without a reference CPO (Xu et
    al., 2024), or with mean log-probabilities and a margin SimPO (Meng et al., 2024). For a reward model's scores, it
    is the loss of Bradley and Terry (1952; Ouyang et al., 2022).
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
    # A certain answer would have infinite odds and a gradient of NaN.
    score = ops.minimum(score, _NEARLY_CERTAIN)
    return score - ops.log(-ops.expm1(score))


def kto_loss(score: Tensor, judgment: Tensor, kl: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(judgment beta (score - kl)) (Ethayarajh et al., KTO, 2024).

    ``judgment`` is 1 for a desirable answer and -1 for an undesirable one; ``kl``, of shape [] and at least 0,
    estimates the model's distance from the reference, and has no gradient.
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


# The sums that PreferenceLoss computes along with the loss, in this order.
SUMS = (
    "examples",
    "chosen",
    "rejected",
    "right",
    "reward_chosen",
    "reward_rejected",
    "log_probability_chosen",
    "log_probability_rejected",
    "tokens_chosen",
    "tokens_rejected",
    "kl",
)
_TOKENS_CHOSEN, _TOKENS_REJECTED = SUMS.index("tokens_chosen"), SUMS.index("tokens_rejected")


class PreferenceLoss(CompiledOnce):
    """The sum of the losses of all examples in a batch, and sums that describe the examples.

    An example is a pair of answers to one prompt, chosen and rejected, or with KTO one desirable or undesirable answer
    and the answer of another example, from which the model's distance from the reference is estimated (see
    docs/preferences.md). Both answers are in one row of the data. Every example weighs the same.

    Args:
        network (Cell): Called with tokens and labels, int32 [rows, N + 1] each, it returns the log-probability of each
            label but the first, float32 [rows * N], and 0 where the label does not count; or a reward model's score of
            each token but the last.
        reference (Cell, optional): The same for the reference; None if the loss needs none or the data has its
            log-probabilities.
        settings (PreferenceSettings): The loss.

    Inputs:
        - **input_ids** (Tensor) - int32 [batch, N + 1] or [batch, R, N + 1]: a row of the data is one row of the
          network, or R of them.
        - **labels** (Tensor) - The same shape: the answers' tokens, and elsewhere the label that does not count.
        - **answers** (Tensor) - The same shape: the number, within the row of the data, of the answer to which a label
          belongs, -1 for none. Example k has the answers 2k (chosen or judged) and 2k + 1 (rejected, or another
          example's).
        - **marks** (Tensor) - int32 [batch, K], the column ``pairs`` or ``judgments``: 1 for a pair and for a desirable
          answer, -1 for an undesirable one, 0 if the row has no k-th example.
        - **reference** (Tensor) - The log-probabilities of the reference, as returned by to_column, in the shape of
          labels, if settings.precomputed_reference is True.

    Outputs:
        Tuple (total, sums): the sum of the losses, float32 [], and SUMS, float32 [len(SUMS)], the first of which is the
            number of examples.
    """

    def __init__(self, network: nn.Cell, reference: Optional[nn.Cell], settings: PreferenceSettings):
        super().__init__(auto_prefix=False)
        self.network = network
        self.reference = reference
        self.settings = settings
        self.pairs = settings.kind.pairs
        self.uses_reference = settings.kind.uses_reference
        self.has_scores = settings.kind.scores
        self.pair_loss = PAIR_LOSSES.get(settings.loss)
        self.beta = float(settings.beta)
        self.smoothing = float(settings.label_smoothing)
        self.margin = float(settings.margin)
        self.desirable_weight = float(settings.desirable_weight)
        self.undesirable_weight = float(settings.undesirable_weight)
        self.normalizes = settings.length_normalization
        self.sft_weight = float(settings.sft_weight)
        self.one_hot = ops.OneHot()
        self.on = Tensor(1, mstype.float32)
        self.off = Tensor(0, mstype.float32)
        # exp of this is near the largest float32.
        self.farthest = Tensor(88, mstype.float32)

    def construct(
        self, input_ids: Tensor, labels: Tensor, answers: Tensor, marks: Tensor, reference: Optional[Tensor] = None
    ) -> Tuple[Tensor, Tensor]:
        width = input_ids.shape[-1]
        tokens, labels = input_ids.reshape((-1, width)), labels.reshape((-1, width))
        batch, examples = marks.shape
        which = self.places(answers.reshape((-1, width))).reshape((batch, -1))
        which = self.one_hot(which, 2 * examples, self.on, self.off)
        lengths = which.sum(1).reshape((batch, examples, 2))
        of_tokens = self.network(tokens, labels)
        policy = self.of_answers(of_tokens, which, lengths)
        exists = (marks != 0).astype(mstype.float32)
        compared, kl = policy, self.off
        if self.uses_reference:
            distances = of_tokens - ops.stop_gradient(self.reference_of(tokens, labels, reference))
            compared = self.of_answers(distances, which, lengths)
            if self.pairs:
                moved = ops.stop_gradient(distances)
                distances_of_tokens = ops.expm1(ops.minimum(moved, self.farthest)) - moved
                kl = (self.of_answers(distances_of_tokens, which, lengths).sum(-1) * exists).sum()
        if self.normalizes:
            compared = compared / ops.maximum(lengths, self.on)
        judged = marks.astype(mstype.float32)
        # Without an example, a score of 0 would have infinite odds.
        compared = compared + (exists - 1).expand_dims(-1)
        if self.pairs:
            losses = self.pair_loss(compared[:, :, 0], compared[:, :, 1], self.beta, self.smoothing, self.margin)
        else:
            kl = (ops.stop_gradient(compared)[:, :, 1] * exists).sum()
            estimate = ops.maximum(kl / ops.maximum(exists.sum(), self.on), self.off)
            losses = kto_loss(compared[:, :, 0], judged, estimate, self.beta)
            losses = losses * ops.select(marks > 0, self.desirable_weight, self.undesirable_weight)
        if self.sft_weight:
            mean = policy[:, :, 0] / ops.maximum(lengths[:, :, 0], self.on)
            losses = losses - self.sft_weight * mean * (marks > 0).astype(mstype.float32)
        sums = self.sums(ops.stop_gradient(compared), ops.stop_gradient(policy), lengths, judged, kl)
        return (losses * exists).sum(), sums

    def places(self, answers: Tensor) -> Tensor:
        """Returns the number of the answer that each of the network's N positions describes, int32 [rows, N], or -1.

        A position's log-probability belongs to the next token. A score counts at the last token of an answer, or at the
        one before it if the last token ends the row, where the network does not see it.
        """
        here, following = answers[:, :-1], answers[:, 1:]
        if not self.has_scores:
            return following
        ends = ops.select(here == following, ops.zeros_like(here) - 1, here)
        last = ops.select(following[:, -1:] >= 0, following[:, -1:], ends[:, -1:])
        return ops.concat((ends[:, :-1], last), 1)

    def reference_of(self, tokens: Tensor, labels: Tensor, column: Optional[Tensor]) -> Tensor:
        """Returns the reference's log-probabilities, float32 [rows * N], computed or from the data."""
        if self.reference is not None:
            return self.reference(tokens, labels)
        return from_column(column.reshape(labels.shape)[:, 1:]).reshape((-1,))

    def of_answers(self, log_probabilities: Tensor, which: Tensor, lengths: Tensor) -> Tensor:
        """Returns each answer's log-probability, float32 [batch, examples, 2], from its tokens' log-probabilities."""
        of_tokens = ops.broadcast_to(log_probabilities.reshape((which.shape[0], -1, 1)), which.shape)
        # Selected, not multiplied: values of another answer's tokens may be infinite.
        return ops.select(which > 0, of_tokens, ops.zeros_like(which)).sum(1).reshape(lengths.shape)

    def sums(self, scores: Tensor, policy: Tensor, lengths: Tensor, judged: Tensor, kl: Tensor) -> Tensor:
        """Returns SUMS for pairs or for single answers."""
        rewards = self.beta * scores
        if self.pairs:
            is_chosen = is_rejected = exists = judged
            second = 1
            right = (rewards[:, :, 0] > rewards[:, :, 1]).astype(mstype.float32) * exists
        else:
            is_chosen = (judged > 0).astype(mstype.float32)
            is_rejected = (judged < 0).astype(mstype.float32)
            exists = is_chosen + is_rejected
            second = 0
            estimate = ops.maximum(kl / ops.maximum(exists.sum(), self.on), self.off)
            right = (judged * (scores[:, :, 0] - estimate) > 0).astype(mstype.float32)
        return ops.stack(
            (
                exists.sum(),
                is_chosen.sum(),
                is_rejected.sum(),
                right.sum(),
                (rewards[:, :, 0] * is_chosen).sum(),
                (rewards[:, :, second] * is_rejected).sum(),
                (policy[:, :, 0] * is_chosen).sum(),
                (policy[:, :, second] * is_rejected).sum(),
                (lengths[:, :, 0] * is_chosen).sum(),
                (lengths[:, :, second] * is_rejected).sum(),
                kl,
            )
        )


def preference_measures(sums: Sequence[float], settings: PreferenceSettings) -> Dict[str, float]:
    """Returns MEASURES computed from SUMS: means over examples, or over the chosen and the rejected answers.

    Losses without a reference have no kl. Measures without an example are left out.
    """
    total = dict(zip(SUMS, map(float, sums)))
    measures = {}
    names = ("reward",) if settings.kind.scores else ("reward", "log_probability", "tokens")
    for side in ("chosen", "rejected"):
        for name in names:
            if total[side]:
                measures[f"{name}_{side}"] = total[f"{name}_{side}"] / total[side]
    if total["chosen"] and total["rejected"]:
        measures["reward_margin"] = measures["reward_chosen"] - measures["reward_rejected"]
    if total["examples"]:
        measures["reward_accuracy"] = total["right"] / total["examples"]
    if total["examples"] and settings.kind.uses_reference:
        # Both answers of a pair count; for a judged answer, KTO estimates the distance from the other example's answer.
        measures["kl"] = total["kl"] / (total["examples"] * (2 if settings.kind.pairs else 1))
    return measures


def answer_tokens(sums: Union[np.ndarray, Tensor]) -> Union[np.floating, Tensor]:
    """Returns the number of answer tokens in SUMS, float32 [len(SUMS)]: float32 []."""
    return sums[_TOKENS_CHOSEN] + sums[_TOKENS_REJECTED]


# The loss on MindFormers' models: of log-probabilities of labels, and the reference


def reference_of(policy: RowLogProbabilities) -> RowLogProbabilities:
    """Returns a cell for the initial model's log-probabilities, without a second copy of the base."""
    reference = reference_network(policy.network)
    mark_reference(reference)
    set_differentiates(reference, False)
    return RowLogProbabilities(reference, policy.of_labels)


def preference_loss(network: nn.Cell, settings: PreferenceSettings) -> PreferenceLoss:
    """Returns a MindFormers model's loss on preferences. The model's own loss is replaced in place.

    Raises ConfigError if the model's loss does not get the logits of all tokens, or the reference is missing.
    """
    policy = row_log_probabilities(network, "preference", settings.kind.scores)
    reference = None
    if settings.kind.uses_reference and not settings.precomputed_reference:
        reference = reference_of(policy)
    return PreferenceLoss(policy, reference, settings)
