"""Puts LabelLosses in the place of a MindFormers model's output head and loss."""

from typing import Any, Iterator, Optional, Tuple, Union

from mindformers.models.llama.llama import LlamaForCausalLM
from mindformers.modules.layers import Linear
from mindformers.parallel_core.training_graph.tensor_parallel.layers import ColumnParallelLinear
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.models.label_losses import Head, check_loss_in_pieces
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.label_losses import LabelLosses
from mindlora.network.cells.score import score_of
from mindlora.ops.frozen_linear import FrozenLinear
from mindlora.training.log import logger
from mindlora.training.model.held_weights import HeldColumnParallelLinear, HeldLinear
from mindlora.training.model.mcore_model import is_gpt_model
from mindlora.training.model.network import with_loss


class HandingLinear(Linear):
    """MindFormers' Linear as an output head that, in training, hands its input on to the loss, which multiplies it."""

    def construct(self, x: Tensor, group_list: Any = None) -> Tensor:
        if self.training:
            return x
        return super().construct(x, group_list)


class HandingParallelLinear(ColumnParallelLinear):
    """HandingLinear for mcore models."""

    def construct(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Tensor]]:
        if self.training:
            return input_, None
        return super().construct(input_, weight)


class HandingHeldLinear(HeldLinear):
    """HandingLinear with a weight of 16 bits."""

    def construct(self, x: Tensor, group_list: Any = None) -> Tensor:
        if self.training:
            return x
        return super().construct(x, group_list)


class HandingHeldParallelLinear(HeldColumnParallelLinear):
    """HandingParallelLinear with a weight of 16 bits."""

    def construct(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Tensor]]:
        if self.training:
            return input_, None
        return super().construct(input_, weight)


_HANDING = {
    Linear: HandingLinear,
    HeldLinear: HandingHeldLinear,
    ColumnParallelLinear: HandingParallelLinear,
    HeldColumnParallelLinear: HandingHeldParallelLinear,
}


class LossesOfHead(nn.Cell):
    """LabelLosses of a head, called as the _log_softmax of MindFormers' CrossEntropyLoss, whose _nllloss is _First.

    Inputs:
        - **hidden** (Tensor) - What the head takes, [tokens, channels].
        - **labels** (Tensor) - int32 [tokens].

    Outputs:
        Tuple (losses, labels), of which the first is float32 [tokens].
    """

    def __init__(
        self, weight: Parameter, dtype: mstype.Type, piece: Optional[int], frozen: Optional[FrozenLinear] = None
    ):
        super().__init__(auto_prefix=False)
        # Past nn.Cell, which would list the parameter, and name it, a second time.
        self.__dict__["weight"] = weight
        self.losses = LabelLosses(dtype, weight.requires_grad, piece, frozen)

    def construct(self, hidden: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        return self.losses(hidden, self.weight, labels), labels


class _First(nn.Cell):
    def construct(self, losses, labels):
        return losses


def put_loss_in_pieces(network: nn.Cell, setting: Union[bool, int], steps_by_mindlora: bool) -> bool:
    """Makes a model compute its losses by LabelLosses, in place, where it can; logs, and returns, whether it does.

    Args:
        network (nn.Cell): The model, or a cell around it. What of it trains has been decided.
        setting (bool or int): loss_in_pieces of runner_wrapper: False for no, or the tokens of a piece.
        steps_by_mindlora (bool): Whether mindlora's train step makes the gradients.

    Raises ConfigError if ``setting`` is out of range.
    """
    check_loss_in_pieces(setting)
    model = with_loss(network)
    if model is None:
        return False
    head = model.output_layer if is_gpt_model(model) else getattr(model, "lm_head", None)
    described = _described(model, head, setting, steps_by_mindlora)
    logger.info("%s", described)
    if described.why_whole:
        return False
    piece = None if setting is True else setting
    weight = model.embedding.word_embeddings.weight if head.weight is None else head.weight
    dtype = head.compute_dtype if is_gpt_model(model) else head.dtype
    frozen = head.held.matmul if hasattr(head, "held") else None
    # Straight into _cells: assigning an attribute would rename the weight.
    model.loss._cells["_log_softmax"] = LossesOfHead(weight, dtype, piece, frozen)
    model.loss._cells["_nllloss"] = _First()
    # Parameter and settings stay when the class of a cell changes.
    head.__class__ = _HANDING[type(head)]
    return True


def _described(model, head, setting, steps_by_mindlora):
    is_gpt = is_gpt_model(model)
    cell = ""
    if isinstance(head, LoRACell):
        cell = "has an adapter"
    elif score_of(model) is not None:
        cell = "gives scores of labels"
    elif type(head) not in _HANDING:
        cell = f"is a {type(head).__name__}"
    elif head.has_bias or not head.transpose_b or getattr(head, "activation_flag", False):
        cell = "has a bias, an activation or a transposed weight"
    is_known = is_gpt or type(model).construct is LlamaForCausalLM.construct
    predicts_several = is_gpt and model.mtp_process
    return Head(setting, steps_by_mindlora, type(model).__name__, is_known, cell, predicts_several)


def losses_of_head(network: nn.Cell) -> Optional[LossesOfHead]:
    """Returns what put_loss_in_pieces has put into a network, or None."""
    return next(_losses_of_heads(network), None)


class EvaluatedInPieces(nn.Cell):
    """A cell around a network that computes losses in evaluation, without logits where training makes none.

    Attributes:
        network (nn.Cell): The network.
        losses_of_head (LossesOfHead or None): What put_loss_in_pieces has put into it.
    """

    def __init__(self, network: nn.Cell):
        super().__init__(auto_prefix=False)
        self.network = network
        self.losses_of_head = losses_of_head(network)

    def add_flags_recursive(self, **flags: Any) -> nn.Cell:
        """Sets flags of all cells; a head whose product is the loss's hands on its input in evaluation too."""
        super().add_flags_recursive(**flags)
        if "training" in flags and self.losses_of_head is not None:
            for _, cell in self.network.cells_and_names():
                if isinstance(cell, tuple(_HANDING.values())):
                    cell.set_train(True)
        return self


def forward_only(network: nn.Cell) -> None:
    """Lets the losses of a network be computed without their gradients, in training too."""
    for cell in _losses_of_heads(network):
        cell.losses.differentiates = False


def _losses_of_heads(network: nn.Cell) -> Iterator[LossesOfHead]:
    return (cell for _, cell in network.cells_and_names() if isinstance(cell, LossesOfHead))
