"""HeldOutLoss under the PyNative Trainer, whose models return logits alone when they are not training."""

from typing import Tuple

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.train import RunContext

from mindlora.training.callbacks.common import register
from mindlora.training.held_out import held_out_loss
from mindlora.training.model.network import train_step_of
from mindlora.training.pynative.rows import shifted


@register
class HeldOutLoss(held_out_loss.HeldOutLoss):
    __doc__ = held_out_loss.HeldOutLoss.__doc__

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Measures the loss if it is due."""
        # A router counts the tokens of its experts in evaluation too, for the bias that the next step sets.
        network = run_context.original_args().network
        counts = [p for p in network.get_parameters() if p.name.endswith("tokens_per_expert")]
        before = [parameter.asnumpy().copy() for parameter in counts]
        super().on_train_step_end(run_context)
        for parameter, value in zip(counts, before):
            parameter.set_data(Tensor(value))

    def make_cell(self, train_network: nn.Cell) -> nn.Cell:
        """Returns what computes the loss of a batch."""
        return _Loss(train_step_of(train_network))


class _Loss(nn.Cell):
    """As HeldOutLossCell, for a TrainStep."""

    def __init__(self, step: nn.Cell):
        super().__init__(auto_prefix=False)
        self.network = step.network
        self.gpt = step.gpt
        self.ignore_token_id = step.gpt.ignore_token_id

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        rows = shifted({"input_ids": input_ids, "labels": labels}, self.gpt.seq_length)
        tokens, labels = rows["input_ids"], rows["labels"]
        mask = ops.logical_and(tokens != self.gpt.pad_token_id, labels != self.ignore_token_id)
        logits = self.network(input_ids=tokens, labels=labels)
        safe_labels = ops.select(mask, labels, ops.zeros_like(labels)).reshape(-1)
        log_probabilities = ops.log_softmax(logits.astype(mstype.float32), -1)
        picked = ops.gather_elements(log_probabilities, -1, safe_labels.expand_dims(-1)).squeeze(-1)
        # Selected, not multiplied: what does not count may be infinite.
        picked = ops.select(mask.reshape(-1), picked, ops.zeros_like(picked))
        return -picked.sum(), mask.astype(mstype.float32).sum()
