"""Preference training under MindFormers' PyNative Trainer: log-probabilities of labels, and the reference."""

import contextlib
from typing import Iterator

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.training.model.loss_in_pieces import EvaluatedInPieces
from mindlora.training.preference.loss import PreferenceLoss
from mindlora.training.preference.settings import PreferenceSettings
from mindlora.training.pynative.evaluation import EvaluatedModel


class RowLogProbabilities(EvaluatedInPieces):
    """The log-probability of each label except the first; for a reward model, each score except the last.

    Args:
        network (EvaluatedModel): The model in evaluation. In training, the model returns logits too
            (GPTModel.return_logits), or its head's input if put_loss_in_pieces was called.
        has_scores (bool): Whether the model is a reward model, whose logits are one score per token.
        temperature (float): As for LabelLogProbabilities. Default: 1.

    Inputs:
        - **input_ids**, **labels** (Tensor) - int32 [rows, N + 1].

    Outputs:
        float32 [rows * N]; 0 for labels that are not tokens, which do not count.
    """

    def __init__(self, network: EvaluatedModel, has_scores: bool, temperature: float = 1.0):
        super().__init__(network)
        self.has_scores = has_scores
        self.temperature = temperature

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        labels = labels[:, 1:].reshape((-1,))
        logits = self.outputs(input_ids)
        if self.has_scores:
            return logits.reshape((-1,))
        if self.losses_of_head is not None:
            losses, _ = self.losses_of_head(logits, labels)
            return -losses
        log_probabilities = ops.log_softmax(logits.astype(mstype.float32), -1)
        counted = labels >= 0
        safe_labels = ops.select(counted, labels, ops.zeros_like(labels))
        picked = ops.gather_elements(log_probabilities, 1, safe_labels.expand_dims(1)).squeeze(1)
        # Selected, not multiplied: values that do not count may be infinite.
        return ops.select(counted, picked, ops.zeros_like(picked))

    def outputs(self, input_ids: Tensor) -> Tensor:
        """Returns the model's logits, or its head's inputs, for all tokens but each row's last one: [rows * N, ...]."""
        tokens = input_ids[:, :-1]
        # The Trainer sets only the model's mode.
        model = self.network.network
        if model.training:
            logits = model(input_ids=tokens, labels=tokens)
        else:
            logits, _, _ = self.network(tokens)
        logits = logits.reshape((tokens.shape[0] * tokens.shape[1], -1))
        # The head is linear in what it takes, so that this divides its logits too.
        return logits if self.temperature == 1 else logits / self.temperature


class BaseLogProbabilities(nn.Cell):
    """RowLogProbabilities of the model with its adapters off, without noise or dropout.

    Inputs and outputs are those of RowLogProbabilities.
    """

    def __init__(self, policy: RowLogProbabilities):
        super().__init__(auto_prefix=False)
        # Not a child cell: its mode is switched temporarily.
        self._policy = (policy,)

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        (policy,) = self._policy
        model = policy.network.network
        was_training = model.training
        policy.set_train(False)
        with adapters_off(model):
            log_probabilities = policy(input_ids, labels)
        policy.set_train(was_training)
        return log_probabilities


@contextlib.contextmanager
def adapters_off(network: nn.Cell) -> Iterator[None]:
    """Switches adapters off temporarily, one or several, so that their cells compute only the base's output."""
    cells = [cell for _, cell in network.cells_and_names() if hasattr(cell, "without_adapter")]
    for cell in cells:
        cell.construct = cell.without_adapter
    try:
        yield
    finally:
        for cell in cells:
            del cell.construct


def pynative_preference_loss(evaluated: EvaluatedModel, settings: PreferenceSettings) -> PreferenceLoss:
    """Returns a PyNative model's loss on preferences; its base is the reference, unless the data has one.

    In training, the model returns logits from then on.
    """
    evaluated.gpt.return_logits = True
    policy = RowLogProbabilities(evaluated, settings.kind.scores)
    reference = None
    if settings.kind.uses_reference and not settings.precomputed_reference:
        reference = BaseLogProbabilities(policy)
    return PreferenceLoss(policy, reference, settings)
