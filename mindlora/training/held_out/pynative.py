"""HeldOutLoss under the PyNative Trainer, whose models take rows of seq_length or seq_length + 1 tokens."""

from typing import Tuple

from mindspore import Tensor, nn

from mindlora.network.cells.score import score_of
from mindlora.training.callbacks.common import register
from mindlora.training.held_out import held_out_loss
from mindlora.training.held_out.cells import HeldOutLabelsCell, HeldOutLossCell
from mindlora.training.model.network import evaluated_model, train_step_of
from mindlora.training.pynative.train_step import shifted
from mindlora.training.several.step_of_adapter import StepOfAdapter


@register
class HeldOutLoss(held_out_loss.HeldOutLoss):
    __doc__ = held_out_loss.HeldOutLoss.__doc__

    def make_cell(self, train_network: nn.Cell) -> nn.Cell:
        """Returns a cell that computes the loss of a batch."""
        step = train_step_of(train_network)
        if isinstance(step, StepOfAdapter):
            return step
        if step.preference is not None:
            return step.preference
        network = evaluated_model(train_network)
        score = score_of(network)
        if score is not None:
            return _Labels(network, network.config.ignore_token_id, score.num_labels)
        return LossOfRows(network, network.config.ignore_token_id)


class LossOfRows(HeldOutLossCell):
    """HeldOutLossCell for rows with shifted or unshifted labels."""

    def shifted(self, input_ids: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        rows = shifted({"input_ids": input_ids, "labels": labels}, self.network.config.seq_length)
        return rows["input_ids"], rows["labels"]


class _Labels(LossOfRows, HeldOutLabelsCell):
    """HeldOutLabelsCell for rows with shifted or unshifted labels."""
