"""The losses of several adapters on one MindFormers model: a batch for each, and a sum for each."""

from typing import Tuple

from mindformers.core.loss.loss import CrossEntropyLoss
from mindspore import Tensor, nn, ops

from mindlora.training.model.network import with_cross_entropy


class AdapterLosses(nn.Cell):
    """The cross entropy of each adapter's tokens, by the parts of the model's CrossEntropyLoss.

    Inputs:
        - **logits** (Tensor) - float32 [K n, vocabulary], those of the first adapter first.
        - **labels** (Tensor) - int32 [K n].
        - **mask** (Tensor) - float32 [K n]: 1 for labels that count.

    Outputs:
        Tuple of two tensors float32 [K]: the sum over the tokens of each adapter that count, and their number plus
        1e-8, as CrossEntropyLoss gives them for a batch.
    """

    def __init__(self, loss: CrossEntropyLoss, adapters: int):
        super().__init__()
        self.log_softmax = loss._log_softmax
        self.negative_log_likelihood = loss._nllloss
        self.adapters = adapters

    def construct(self, logits: Tensor, labels: Tensor, mask: Tensor) -> Tuple[Tensor, Tensor]:
        log_probabilities, one_hot = self.log_softmax(logits, labels)
        losses = self.negative_log_likelihood(log_probabilities, one_hot)
        # Selected, not multiplied: what does not count may be infinite.
        losses = ops.select(mask > 0, losses, ops.zeros_like(losses))
        return losses.reshape((self.adapters, -1)).sum(-1), mask.reshape((self.adapters, -1)).sum(-1) + 1e-8


class RowsOfAdapters(nn.Cell):
    """Gives a network with K adapters the rows of a batch: the same ones to each adapter, or to each its own.

    Inputs:
        - **\\*inputs** (Tensor) - [rows, N] each, or [rows, K, N] where each adapter has its own rows.

    Outputs:
        What the network returns for tensors of K rows, those of the first adapter first.
    """

    def __init__(self, network: nn.Cell, adapters: int):
        super().__init__(auto_prefix=False)
        self.network = network
        self.adapters = adapters

    def construct(self, *inputs: Tensor) -> Tuple[Tensor, ...]:
        batch = ()
        for x in inputs:
            rows = ops.tile(x, (self.adapters, 1)) if x.ndim == 2 else ops.swapaxes(x, 0, 1)
            batch += (rows.reshape((-1, x.shape[-1])),)
        return self.network(*batch)


def losses_of_adapters(network: nn.Cell, adapters: int) -> RowsOfAdapters:
    """Returns what computes the losses of K adapters on a batch; the loss of the model is replaced in place."""
    model = with_cross_entropy(network)
    model.loss = AdapterLosses(model.loss, adapters)
    return RowsOfAdapters(network, adapters)
