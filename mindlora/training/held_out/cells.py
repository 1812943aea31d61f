"""Cells that compute the held-out loss of a MindFormers model, and the confusion matrix of a classifier."""

from typing import Tuple

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.training.model.loss_in_pieces import EvaluatedInPieces
from mindlora.training.model.mcore_model import McoreRows


class HeldOutLossCell(EvaluatedInPieces):
    """The sum of a causal language model's cross entropy over the labels that count, and the number of these labels.

    In evaluation mode, called with tokens [batch, N] and labels [batch, N], MindFormers' model returns (logits
    [batch, N, vocabulary], tokens, mask [batch, N]).

    Inputs:
        - **input_ids** (Tensor) - int32 [batch, N + 1].
        - **labels** (Tensor) - int32 [batch, N + 1]; label i belongs to token i. If the model's configuration sets
          input_sliced_sig, both are [batch, N] and label i belongs to token i + 1, as in training. An mcore model takes
          both.

    Outputs:
        Tuple of two float32 scalars: the sum and the count; with ``by_row``, of two tensors float32 [batch].
    """

    def __init__(self, network: nn.Cell, ignore_token_id: int, by_row: bool = False):
        super().__init__(network)
        self.ignore_token_id = ignore_token_id
        self.by_row = by_row
        # An mcore model takes rows of both lengths.
        self.rows = next((cell for _, cell in network.cells_and_names() if isinstance(cell, McoreRows)), None)
        self.is_sliced = bool(getattr(getattr(network, "config", None), "input_sliced_sig", False))

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        if self.losses_of_head is not None:
            input_ids, labels = self.shifted(input_ids, labels)
            hidden, _, mask = self.network(input_ids, labels)
            losses, _ = self.losses_of_head(hidden.reshape((-1, hidden.shape[-1])), labels.reshape((-1,)))
            return self.sums(losses.reshape(mask.shape), mask)
        log_probabilities, labels, mask = self.of_batch(input_ids, labels)
        return self.loss(log_probabilities, labels, mask)

    def shifted(self, input_ids: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns tokens and labels in the form that the network takes in evaluation, [batch, N] each."""
        if self.rows is not None:
            return self.rows(input_ids, labels)
        if self.is_sliced:
            return input_ids, labels
        # Position i predicts token i + 1, as in training.
        return input_ids[:, :-1], labels[:, 1:]

    def of_batch(self, input_ids: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities [batch, N, vocabulary], labels [batch, N], and the mask of labels that count."""
        input_ids, labels = self.shifted(input_ids, labels)
        logits, _, mask = self.network(input_ids, labels)
        safe_labels = ops.select(labels == self.ignore_token_id, ops.zeros_like(labels), labels)
        return ops.log_softmax(logits.astype(mstype.float32), -1), safe_labels, mask

    def loss(self, log_probabilities: Tensor, labels: Tensor, mask: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns the sum of the losses and the count of labels."""
        return self.sums(-ops.gather_elements(log_probabilities, -1, labels.expand_dims(-1)).squeeze(-1), mask)

    def sums(self, losses: Tensor, mask: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns the sum and the count of losses [batch, N]."""
        # Selected, not multiplied: losses that do not count may be infinite.
        losses = ops.select(mask > 0, losses, ops.zeros_like(losses))
        if self.by_row:
            return losses.sum(-1), mask.sum(-1)
        return losses.sum(), mask.sum()


class HeldOutLabelsCell(HeldOutLossCell):
    """The results of HeldOutLossCell for a classifier, and its confusion matrix.

    Inputs:
        - **input_ids**, **labels** (Tensor) - As in HeldOutLossCell.

    Outputs:
        Tuple of two float32 scalars, the sum and the count, and float32 [labels, labels]: how often the row's label was
        predicted as the column's label.
    """

    def __init__(self, network: nn.Cell, ignore_token_id: int, num_labels: int):
        super().__init__(network, ignore_token_id)
        self.num_labels = num_labels

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        log_probabilities, labels, mask = self.of_batch(input_ids, labels)
        total, count = self.loss(log_probabilities, labels, mask)
        one, zero = Tensor(1, mstype.float32), Tensor(0, mstype.float32)
        actual = ops.one_hot(labels.reshape((-1,)), self.num_labels, one, zero) * mask.reshape((-1, 1))
        given = ops.one_hot(log_probabilities.argmax(-1).reshape((-1,)), self.num_labels, one, zero)
        return total, count, ops.matmul(actual.T, given)
