"""Puts LabelLosses in the place of the output head and the loss of a model that the PyNative Trainer runs."""

from typing import Optional, Union

from mindspore import Tensor, nn

from mindlora.core.mindformers_version import require_mindformers
from mindlora.models.label_losses import IN_PYNATIVE, Head
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.score import score_of
from mindlora.training.log import logger
from mindlora.training.model.loss_in_pieces import HandingHead, LossesOfHead

require_mindformers("2.0")
from mindformers.pynative.base_models.gpt.gpt_model import GPTModel  # noqa: E402
from mindformers.pynative.layers.linear import Linear  # noqa: E402


class HandingPynativeLinear(HandingHead, Linear):
    """HandingHead for the models of the PyNative Trainer."""

    def construct(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        if self.training:
            return input_
        return super().construct(input_, weight)


class LossesOfLabels(nn.Cell):
    """LossesOfHead, called as the nll_loss of MindFormers' CrossEntropyLoss, whose log_softmax passes its input on.

    Inputs:
        - **hidden** (Tensor) - What the head takes, [tokens, channels].
        - **labels** (Tensor) - int32 [rows, N], as many as there are tokens.

    Outputs:
        float32 [tokens].
    """

    def __init__(self, losses_of_head: LossesOfHead):
        super().__init__(auto_prefix=False)
        self.losses_of_head = losses_of_head

    def construct(self, hidden: Tensor, labels: Tensor) -> Tensor:
        losses, _ = self.losses_of_head(hidden, labels.reshape((-1,)))
        return losses


def put_loss_in_pieces(network: nn.Cell, setting: Union[bool, int], processes: int) -> None:
    """Makes a model compute its losses by LabelLosses, in place, where it can; logs whether it does.

    Args:
        network (nn.Cell): A whole PyNative model, or one of its pipeline stages. What of it trains has been decided.
        setting (bool or int): loss_in_pieces of pet_config, which is in its range.
        processes (int): How many the run has.
    """
    model = next((cell for _, cell in network.cells_and_names() if isinstance(cell, GPTModel)), None)
    if model is None or not model.post_process:
        return
    described = _described(network, model, setting, processes)
    logger.info("%s", described)
    if described.why_whole:
        return
    head = model.output_layer
    weight = model.embedding.word_embeddings.weight if head.weight is None else head.weight
    losses = LossesOfLabels(LossesOfHead(weight, head.compute_dtype, setting))
    model.loss._cells.update(log_softmax=nn.Identity(), nll_loss=losses)
    # MindFormers cuts the loss of logits into so many parts.
    model.chunk_loss_num = 1
    # Parameter and settings stay when the class of a cell changes.
    head.__class__ = HandingPynativeLinear


def _described(network, model, setting, processes):
    head, cell = model.output_layer, ""
    if isinstance(head, LoRACell):
        cell = "has an adapter"
    elif score_of(network) is not None:
        cell = "gives scores of labels"
    elif type(head) is not Linear:
        cell = f"is a {type(head).__name__}"
    elif head.has_bias:
        cell = "has a bias"
    run = f"the run has {processes} processes" if processes > 1 else ""
    is_known = type(model) is GPTModel
    return Head(setting, run, type(network).__name__, is_known, cell, bool(model.mtp_process), IN_PYNATIVE)
