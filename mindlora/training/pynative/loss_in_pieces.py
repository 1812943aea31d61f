"""Replaces the output head and the loss of a PyNative Trainer's model by LabelLosses."""

import contextlib
from typing import Callable, Optional, Sequence, Tuple, Union

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.graph.api import _no_grad

from mindlora.core.mindformers_version import require_mindformers
from mindlora.models.label_losses import IN_PYNATIVE, Head
from mindlora.network.cells.score import score_of
from mindlora.network.pynative.linear import local
from mindlora.training.log import logger
from mindlora.training.model.loss_in_pieces import (
    HandingLoRA,
    LossesOfHead,
    make_hand_on,
    obstacle_of_adapter,
    other_head,
    plain_head,
)

require_mindformers("2.0")
from mindformers.pynative.base_models.gpt.gpt_model import GPTModel  # noqa: E402
from mindformers.pynative.layers.linear import Linear  # noqa: E402


def _linear(self, input_, weight=None):
    return self.hand_on(input_) if self.training else self.logits(input_, weight)


class HandingPynativeLoRA(HandingLoRA):
    """HandingLoRA for a model that can compute without its adapters."""

    def without_adapter(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        """Returns the output, or hand_on, of the cell that this one replaced."""
        return input_ if self.training else super().without_adapter(input_, weight)


class PynativeLossesOfHead(LossesOfHead):
    """LossesOfHead without tokens that have no label, such as a prompt's: PyNative has no fixed shapes.

    In evaluation, it keeps nothing for a backward, although its weights may be trainable.
    """

    @property
    def weight(self) -> Tensor:
        """The head's weight, which hyper_parallel may hold."""
        return local(self.__dict__["weight"])

    def construct(self, handed: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        with contextlib.nullcontext() if self.training else _no_grad():
            losses = of_counted(self._losses, (handed,), labels, self.weight.shape[0])
        return losses, labels

    def _losses(self, handed, labels):
        return super().construct(handed, labels)[0]


def of_counted(compute: Callable[..., Tensor], tensors: Sequence[Tensor], labels: Tensor, vocabulary: int) -> Tensor:
    """Returns ``compute(*tensors, labels)``, float32 [tokens], computed for tokens with a label alone; 0 for others.

    Args:
        compute (callable): Computes a number for each token.
        tensors (sequence of Tensor): [tokens, ...] each.
        labels (Tensor): int32 [tokens]; a label in the vocabulary counts.
        vocabulary (int): The size of the vocabulary.
    """
    numbers = labels.asnumpy()
    counted = np.flatnonzero((numbers >= 0) & (numbers < vocabulary))
    if len(counted) in (0, len(numbers)):
        return compute(*tensors, labels)
    chosen = Tensor(counted, mstype.int32)
    values = compute(*(ops.gather(tensor, chosen, 0) for tensor in tensors), Tensor(numbers[counted]))
    # The index of each token's value among the computed ones; other tokens get the 0 appended below.
    places = np.full(len(numbers), len(counted), np.int32)
    places[counted] = np.arange(len(counted))
    return ops.gather(ops.concat((values, ops.zeros((1,), mstype.float32)), 0), Tensor(places), 0)


class LossesOfLabels(nn.Cell):
    """LossesOfHead, called as the nll_loss of MindFormers' CrossEntropyLoss, whose log_softmax passes its input on.

    Inputs:
        - **hidden** (Tensor) - The head's input, [tokens, channels].
        - **labels** (Tensor) - int32 [rows, N], one for each token.

    Outputs:
        float32 [tokens].
    """

    def __init__(self, losses_of_head: LossesOfHead):
        super().__init__(auto_prefix=False)
        self.losses_of_head = losses_of_head

    def construct(self, hidden: Tensor, labels: Tensor) -> Tensor:
        losses, _ = self.losses_of_head(hidden, labels.reshape((-1,)))
        return losses


def put_loss_in_pieces(network: nn.Cell, setting: Union[bool, int], processes: int, division: int) -> None:
    """Makes a model compute its losses by LabelLosses where possible, in place; logs whether it does.

    Args:
        network (nn.Cell): An undivided PyNative model, or one of its pipeline stages, with its trainable parameters
            already set.
        setting (bool or int): loss_in_pieces of pet_config, already checked.
        processes (int): The number of processes of the run.
        division (int): The number of processes among which the model is divided.
    """
    model = next((cell for _, cell in network.cells_and_names() if isinstance(cell, GPTModel)), None)
    if model is None or not model.post_process:
        return
    described = _described(network, model, setting, processes, division)
    logger.info("%s", described)
    if described.why_whole:
        return
    head = model.output_layer
    weight = model.embedding.word_embeddings.weight if head.weight is None else head.weight
    dtype = head.compute_dtype if plain_head(head) is head else head.dtype
    losses = LossesOfLabels(PynativeLossesOfHead(head, weight, dtype, setting))
    model.loss._cells.update(log_softmax=nn.Identity(), nll_loss=losses)
    # MindFormers computes the loss of logits in this many parts.
    model.chunk_loss_num = 1
    hand_on(head)


def hand_on(head: nn.Cell) -> None:
    """Turns the output head of a PyNative model into a HandingHead, in place."""
    make_hand_on(head, _linear, HandingPynativeLoRA)


def _described(network, model, setting, processes, division):
    head = model.output_layer
    plain = plain_head(head)
    weight = model.embedding.word_embeddings.weight if head.weight is None else head.weight
    if score_of(network) is not None:
        cell = "gives scores of labels"
    elif type(plain).construct is not Linear.construct:
        cell = other_head(head)
    elif plain.has_bias:
        cell = "has a bias"
    elif processes > 1 and (plain is not head or weight.requires_grad):
        # hyper_parallel exchanges the gradients of what a module multiplies by in its own forward.
        cell = f"trains in {processes} processes"
    else:
        cell = obstacle_of_adapter(head)
    run = f"{division} processes divide the model" if division > 1 else ""
    is_known = type(model) is GPTModel
    return Head(setting, run, type(network).__name__, is_known, cell, bool(model.mtp_process), IN_PYNATIVE)
