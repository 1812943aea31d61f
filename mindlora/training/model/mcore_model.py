"""Parts of the wrapper around an mcore model: takes the rows that mindlora converts, and evaluates."""

from typing import Optional, Tuple, Union

from mindspore import Tensor, nn, ops
from mindspore.ops.primitive import constexpr

from mindlora.core.errors import ConfigError


@constexpr
def _check_width(width, seq_length):
    if width not in (seq_length, seq_length + 1):
        raise ConfigError(
            f"The rows of the data have {width} tokens, but the model's seq_length is {seq_length}: give an mcore "
            f"model rows of {seq_length}, or of {seq_length + 1} as mindlora data --seq-length {seq_length} "
            "writes them."
        )


class McoreRows(nn.Cell):
    """Turns rows of data, int32 [batch, N] or [batch, N + 1], into the form of MindFormers' mcore models: [batch, N].

    A row of N = seq_length tokens has shifted labels: label i is token i + 1. A row of N + 1 tokens is in the form that
    MindFormers' legacy models take and ``mindlora data`` writes: label i is token i. Its last token and its first label
    are dropped. A batch's rows are divided into ``data_parallel`` parts on the devices.
    """

    def __init__(self, seq_length: int, data_parallel: int = 1):
        super().__init__(auto_prefix=False)
        self.seq_length = seq_length
        self.slice = ops.StridedSlice().shard(((data_parallel, 1),))

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        _check_width(input_ids.shape[1], self.seq_length)
        if input_ids.shape[1] == self.seq_length:
            return input_ids, labels
        rows, width = input_ids.shape
        return (
            self.slice(input_ids, (0, 0), (rows, width - 1), (1, 1)),
            self.slice(labels, (0, 1), (rows, width), (1, 1)),
        )


def rows_of(model: nn.Cell) -> McoreRows:
    """Returns McoreRows for one of MindFormers' mcore models."""
    return McoreRows(model.config.seq_length, model.get_gpt_transformer_config().data_parallel_size or 1)


class McoreLoss(nn.Cell):
    """The sum of an mcore model's losses, which MindFormers trains.

    They are the language model's loss, the loss of multi-token prediction, and auxiliary losses: three in MindFormers
    1.8, four in 1.9. If the model counts tokens (calculate_per_token_loss), each of the first two is a sum and a number
    of tokens, and the auxiliary losses have been multiplied by the first of these numbers; then the result is (sum,
    number of tokens), else the loss, float32 [1].

    Args:
        network (nn.Cell): The model, or a cell around it.
        counts_tokens (bool): Whether the model counts tokens.
        rows (McoreRows, optional): Brings rows into the model's form, if the network does not. Default: None.
    """

    def __init__(self, network: nn.Cell, counts_tokens: bool, rows: Optional[McoreRows] = None):
        super().__init__(auto_prefix=False)
        self.network = network
        self.counts_tokens = counts_tokens
        self.rows = rows

    def construct(self, *inputs: Tensor) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        if self.rows is not None:
            inputs = (*self.rows(inputs[0], inputs[1]), *inputs[2:])
        losses = self.network(*inputs)
        if not self.counts_tokens:
            return _sum_of(losses)
        return _sum_of((losses[0], *losses[2:3], *losses[4:])), losses[1]


def _sum_of(losses):
    total = losses[0].reshape(1)
    for loss in losses[1:]:
        total = total + loss.reshape(1)
    return total


def gpt_model_of(network: nn.Cell) -> Optional[nn.Cell]:
    """Returns the GPTModel inside a network that MindFormers trains as an mcore model, or None for any other."""
    return next((cell for _, cell in network.cells_and_names() if is_gpt_model(cell)), None)


def refuse_further_tokens(model: nn.Cell) -> None:
    """Raises ConfigError if a GPTModel predicts several tokens: it learns them by a second loss of its own."""
    if model.mtp_process:
        raise ConfigError(
            "The model predicts several tokens (num_nextn_predict_layers), which it learns by a loss of tokens alone. "
            "Set model.model_config.num_nextn_predict_layers: 0."
        )


def replace_loss(model: nn.Cell, loss: nn.Cell, counts_tokens: bool = False) -> None:
    """Makes ``loss`` the loss of a GPTModel on the labels, in place.

    The model then returns this loss first; with ``counts_tokens``, its first two outputs are sums of losses and numbers
    of tokens.

    Raises ConfigError as refuse_further_tokens does.
    """
    refuse_further_tokens(model)
    model.loss = loss
    model.calculate_per_token_loss = counts_tokens


def count_tokens(model: nn.Cell) -> bool:
    """Makes a GPTModel return sums of losses over tokens, in place, if it can; returns whether it does.

    With multi-token prediction, it cannot.
    """
    if not model.mtp_process:
        model.calculate_per_token_loss = model.loss.calculate_per_token_loss = True
    return bool(model.calculate_per_token_loss)


def is_gpt_model(cell: nn.Cell) -> bool:
    """Returns whether a cell is MindFormers' GPTModel, which every mcore model contains."""
    return hasattr(cell, "mtp_process") and hasattr(cell, "calculate_per_token_loss")
