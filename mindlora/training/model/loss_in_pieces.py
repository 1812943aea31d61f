"""Replaces a MindFormers model's output head and loss by LabelLosses."""

import contextlib
import functools
from typing import Any, Callable, Iterator, Optional, Tuple, Type, Union

from mindformers.models.llama.llama import LlamaForCausalLM
from mindformers.modules.layers import Linear
from mindformers.parallel_core.training_graph.tensor_parallel.layers import ColumnParallelLinear
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.errors import ConfigError
from mindlora.models.label_losses import (
    DIVIDED_DROPOUT,
    OTHER_STEP,
    SEVERAL_ADAPTERS,
    Head,
    HeadDivision,
    adapter_obstacle,
    check_loss_in_pieces,
)
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.label_losses import AdaptedLabelLosses, LabelLosses
from mindlora.network.cells.low_rank import TrainedRead
from mindlora.network.cells.score import score_of
from mindlora.network.cells.stacked import StackedLoRADense
from mindlora.network.graph_cache import CompiledOnce
from mindlora.ops.frozen_linear import FrozenLinear
from mindlora.training.log import logger
from mindlora.training.model.divided_head import (
    AdaptedLossesOfRank,
    LossesOfRank,
    division_of,
    is_semi_automatic,
    keep_channels_whole,
    vocabulary_of,
)
from mindlora.training.model.held_weights import HeldColumnParallelLinear, HeldLinear
from mindlora.training.model.mcore_model import is_gpt_model
from mindlora.training.model.network import with_loss


class HandingHead:
    """A mixin for output heads that, in training, pass the loss the factors of their weights instead of logits.

    These factors are x [..., channels]; with plain LoRA on an undivided head, they are x and (dropout(x) A^T) * scale
    side by side, [..., channels + r], both in the head's compute dtype.
    """

    def hand_on(self, x: Tensor) -> Tensor:
        """Returns the factors of the loss."""
        return x


class HandingLoRA(HandingHead):
    """HandingHead for a head with plain LoRA."""

    def hand_on(self, x: Tensor) -> Tensor:
        """Returns the factors of the loss."""
        tokens = x.astype(self.dtype).reshape((-1, self.in_channels))
        dropped = tokens if self.dropout_of_loss is None else self.dropout_of_loss(tokens)
        low_rank = self.shrink(dropped, self.trained.of(self.mindpet_delta_lora_a)) * self.scale
        return ops.concat((tokens, low_rank.astype(self.dtype)), -1).reshape(x.shape[:-1] + (-1,))


def _linear(self, x):
    return self.hand_on(x) if self.training else self.logits(x)


def _parallel_linear(self, input_, weight=None):
    return (self.hand_on(input_), None) if self.training else self.logits(input_, weight)


_CONSTRUCTS = {
    Linear: _linear,
    HeldLinear: _linear,
    ColumnParallelLinear: _parallel_linear,
    HeldColumnParallelLinear: _parallel_linear,
}


@functools.lru_cache(maxsize=None)
def _handing(mixin: type, kind: type, construct: Callable) -> type:
    """Returns the HandingHead class for a kind of heads; in a graph, super() would refer to the cell's own class."""
    members = {"construct": construct, "logits": kind.construct, "__module__": __name__, "__doc__": kind.__doc__}
    return type(f"Handing{kind.__name__}", (mixin, kind), members)


def make_hand_on(head: nn.Cell, construct: Callable, with_adapter: Type[HandingHead] = HandingLoRA) -> None:
    """Turns an output head into a HandingHead, in place, by changing its class; parameters and settings stay.

    Args:
        head (nn.Cell): A linear cell, or one with plain LoRA.
        construct (callable): The new class's construct: returns ``hand_on`` in training, else ``logits``, the former
            construct, in the form that the model takes.
        with_adapter (type): The mixin for a head with an adapter: HandingHead if the loss is to multiply by A too.
    """
    plain = head
    if isinstance(head, LoRACell):
        # A reference that leaves out a new adapter uses the cell from before the adapter.
        plain = head.base_cell
        head.__class__ = _handing(with_adapter, type(head), construct)
        if issubclass(with_adapter, HandingLoRA):
            head.shrink = ops.MatMul(transpose_b=True)
            head.dropout_of_loss = nn.Dropout(p=head.dropout_rate) if head.dropout_rate else None
    plain.__class__ = _handing(HandingHead, type(plain), construct)


@contextlib.contextmanager
def plain_logits(model: nn.Cell, hand_on: Callable[[nn.Cell], None]) -> Iterator[None]:
    """Within the block, a head of put_loss_in_pieces without an adapter is a linear cell and can take one.

    ``model`` has the head, and ``hand_on`` turns it into a HandingHead again, in place.

    Raises ConfigError if the head gets an adapter that does not support computing logits in pieces.
    """
    handing = output_head(model)
    handing.__class__ = type(handing).__bases__[-1]
    yield
    head = output_head(model)
    obstacle = obstacle_of_adapter(head)
    if obstacle:
        raise ConfigError(f"The output head {obstacle}, whose logits are made all at once. Use an adapter without it.")
    hand_on(head)


def hand_on_undivided(head: nn.Cell) -> None:
    """Turns the undivided output head of a model in graph mode into a HandingHead, in place."""
    make_hand_on(head, _CONSTRUCTS[type(plain_head(head))])


class LossesOfHead(nn.Cell):
    """LabelLosses of a head; replaces the _log_softmax of MindFormers' CrossEntropyLoss, whose _nllloss becomes _First.

    Args:
        head (nn.Cell): A linear cell, or one with plain LoRA. Its weight is already marked as frozen or trainable.
        weight (Parameter): The head's weight, which may be the embedding's.
        dtype (mindspore.dtype): The dtype in which the head computes.
        setting (bool or int): True, or the number of tokens in a piece.
        division (HeadDivision, optional): How MindSpore divides the head among devices. Default: None, undivided.

    Inputs:
        - **handed** (Tensor) - The output of HandingHead.hand_on, [tokens, channels] or [tokens, channels + r]; the
          former if the head is divided.
        - **labels** (Tensor) - int32 [tokens].

    Outputs:
        Tuple (losses, labels), of which the first is float32 [tokens].
    """

    def __init__(
        self,
        head: nn.Cell,
        weight: Parameter,
        dtype: mstype.Type,
        setting: Union[bool, int],
        division: Optional[HeadDivision] = None,
    ):
        super().__init__(auto_prefix=False)
        piece, frozen = None if setting is True else setting, _product_of_held_weight(head)
        vocabulary = vocabulary_of(division)
        self.losses = LabelLosses(dtype, weight.requires_grad, piece, frozen, vocabulary)
        self.of_plain = self.losses if division is None else LossesOfRank(self.losses, division)
        self.adapted = self.of_adapted = None
        a = b = None
        if isinstance(head, LoRACell):
            self.adapted = AdaptedLabelLosses(dtype, piece, frozen, vocabulary)
            self.trained = TrainedRead(dtype)
            a, b = head.mindpet_delta_lora_a, head.mindpet_delta_lora_b
            if division is not None:
                self.of_adapted = AdaptedLossesOfRank(self.adapted, head.scale, division)
        # Bypasses nn.Cell, which would register and name the parameters a second time.
        self.__dict__.update(weight=weight, a=a, b=b)

    def construct(self, handed: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        if self.of_adapted is not None:
            # Cast inside the operator: MindSpore might divide a tensor that is cast or copied here by its rows.
            return self.of_adapted(handed, self.weight, self.a, self.b, labels), labels
        channels = self.weight.shape[1]
        if handed.shape[-1] == channels:
            return self.of_plain(handed, self.weight, labels), labels
        hidden, low_rank = handed[:, :channels], handed[:, channels:]
        return self.adapted(hidden, low_rank, self.weight, self.trained.of(self.b), labels), labels


class FurtherLosses(LossesOfHead):
    """LossesOfHead for the tokens after the next one, which a model predicts in training (multi-token prediction)."""


def _product_of_held_weight(head: nn.Cell) -> Optional[FrozenLinear]:
    """Returns the cell that multiplies by a head's 16-bit weight on a CPU, or None."""
    base = getattr(head, "held", None) or getattr(head, "base", None)
    return base.matmul if getattr(base, "holds", False) else None


class _First(nn.Cell):
    def construct(self, losses, labels):
        return losses


def put_loss_in_pieces(network: nn.Cell, setting: Union[bool, int], steps_by_mindlora: bool) -> bool:
    """Makes a model compute its losses by LabelLosses where possible, in place; logs and returns whether it does.

    Args:
        network (nn.Cell): The model, or a cell around it, with its trainable parameters already set.
        setting (bool or int): loss_in_pieces of runner_wrapper: a flag, or the number of tokens in a piece.
        steps_by_mindlora (bool): Whether mindlora's train step computes the gradients, which it need not do in the
            semi-automatic parallel mode.

    Raises ConfigError if ``setting`` is out of range.
    """
    check_loss_in_pieces(setting)
    model = with_loss(network)
    if model is None:
        return False
    is_gpt = is_gpt_model(model)
    head = output_head(model)
    described = _described(model, head, setting, steps_by_mindlora)
    logger.info("%s", described)
    if described.why_whole:
        return False
    weight = model.embedding.word_embeddings.weight if head.weight is None else head.weight
    plain = plain_head(head)
    dtype = plain.compute_dtype if is_gpt and head is plain else head.dtype
    division = division_of(model)
    if division is not None:
        keep_channels_whole(model)
    _take_hidden_states(model.loss, LossesOfHead(head, weight, dtype, setting, division))
    make_hand_on(head, _CONSTRUCTS[type(plain)], HandingLoRA if division is None else HandingHead)
    if is_gpt and model.mtp_process:
        # Its own head and loss, with the same weight but without the head's adapter.
        further, loss = model.mtp.output_layer, model.mtp.compute_language_model_loss.cross_entropy
        _take_hidden_states(loss, FurtherLosses(further, weight, further.compute_dtype, setting, division))
        make_hand_on(further, _CONSTRUCTS[type(further)])
    return True


def _take_hidden_states(loss, losses):
    """Makes a MindFormers loss compute ``losses`` from the output of its HandingHead."""
    # Written straight into _cells: assigning an attribute would rename the weight.
    loss._cells["_log_softmax"], loss._cells["_nllloss"] = losses, _First()


def _described(model, head, setting, steps_by_mindlora):
    is_gpt = is_gpt_model(model)
    plain = plain_head(head)
    if score_of(model) is not None:
        cell = "gives scores of labels"
    elif type(plain) not in _CONSTRUCTS:
        cell = other_head(head)
    elif plain.has_bias or not plain.transpose_b or getattr(plain, "activation_flag", False):
        cell = "has a bias, an activation or a transposed weight"
    else:
        drops = is_semi_automatic() and getattr(head, "dropout_rate", 0) > 0
        cell = obstacle_of_adapter(head) or (DIVIDED_DROPOUT if drops else "")
    is_known = is_gpt or type(model).construct is LlamaForCausalLM.construct
    run = "" if steps_by_mindlora or is_semi_automatic() else OTHER_STEP
    return Head(setting, run, type(model).__name__, is_known, cell)


def output_head(model: nn.Cell) -> Optional[nn.Cell]:
    """Returns the output head of a MindFormers model; None if it has no known head."""
    return model.output_layer if is_gpt_model(model) else getattr(model, "lm_head", None)


def plain_head(head: nn.Cell) -> nn.Cell:
    """Returns an output head, or the cell that a head with an adapter replaced."""
    return head.base_cell if isinstance(head, LoRACell) else head


def other_head(head: nn.Cell) -> str:
    """Returns Head.cell's text for a head that is not one of MindFormers' linear cells."""
    if isinstance(head, StackedLoRADense):
        return SEVERAL_ADAPTERS
    return "is in 4 bits" if getattr(head, "quantization", None) else f"is a {type(head).__name__}"


def obstacle_of_adapter(head: nn.Cell) -> str:
    """Returns Head.cell's text for the adapter on a head, if it has one."""
    if not isinstance(head, LoRACell):
        return ""
    return adapter_obstacle(head.variant, head.weight.requires_grad)


def losses_of_head(network: nn.Cell) -> Optional[LossesOfHead]:
    """Returns the LossesOfHead of put_loss_in_pieces for the next token, or None."""
    return next((cell for cell in _losses_of_heads(network) if not isinstance(cell, FurtherLosses)), None)


class EvaluatedInPieces(CompiledOnce):
    """A cell around a network that computes losses in evaluation, without logits if training makes none.

    Attributes:
        network (nn.Cell): The network.
        losses_of_head (LossesOfHead or None): The losses of put_loss_in_pieces, if it was called.
    """

    def __init__(self, network: nn.Cell):
        super().__init__(auto_prefix=False)
        self.network = network
        self.losses_of_head = losses_of_head(network)

    def add_flags_recursive(self, **flags: Any) -> nn.Cell:
        """Sets flags of all cells; a HandingHead passes on its input in evaluation too."""
        super().add_flags_recursive(**flags)
        if "training" in flags and self.losses_of_head is not None:
            for _, cell in self.network.cells_and_names():
                if isinstance(cell, HandingHead):
                    # Only the head: it has no dropout.
                    cell.add_flags(training=True)
        return self


def set_differentiates(network: nn.Cell, differentiates: bool) -> None:
    """Sets whether graphs compiled from now on compute gradients along with a network's losses."""
    for cell in _losses_of_heads(network):
        cell.losses.differentiates = differentiates
        if cell.adapted is not None:
            cell.adapted.differentiates = differentiates


def _losses_of_heads(network: nn.Cell) -> Iterator[LossesOfHead]:
    return (cell for _, cell in network.cells_and_names() if isinstance(cell, LossesOfHead))
