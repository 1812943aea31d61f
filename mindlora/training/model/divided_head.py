"""Losses of an output head that MindSpore divides among the devices of a semi-automatic parallel run."""

from typing import Any, Callable, List, Optional, Tuple

import mindspore as ms
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.tensor_parallel.utils import get_tp_group_name
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.communication import GlobalComm, get_group_size, get_rank
from mindspore.parallel import Layout

from mindlora.core.yaml_file import SEMI_AUTOMATIC
from mindlora.models.label_losses import HeadDivision
from mindlora.network.cells.label_losses import AdaptedLabelLosses, LabelLosses, VocabularyPart
from mindlora.training.model.mcore_model import is_gpt_model

_TOKENS, _MODEL, _WHOLE = "tokens", "model", "None"


def is_semi_automatic() -> bool:
    """Returns whether MindSpore divides cells among devices by the cells' own strategies."""
    return ms.get_auto_parallel_context("parallel_mode").upper() in SEMI_AUTOMATIC


def division_of(model: nn.Cell) -> Optional[HeadDivision]:
    """Returns the division of a MindFormers model's head; None if the run is not semi-automatic."""
    if not is_semi_automatic():
        return None
    if is_gpt_model(model):
        config = model.config
        data, context = config.data_parallel_size or 1, config.context_parallel_size or 1
        parts = config.tensor_model_parallel_size or 1
        return HeadDivision.of_sizes(data, context, parts, False, model.vocab_size, config.seq_length)
    config, parallel = model.config, model.config.parallel_config
    return HeadDivision.of_sizes(
        parallel.data_parallel,
        parallel.context_parallel,
        parallel.model_parallel,
        parallel.vocab_emb_dp,
        config.vocab_size,
        config.seq_length,
    )


def vocabulary_of(division: Optional[HeadDivision]) -> Optional[VocabularyPart]:
    """Returns this rank's part of the vocabulary; None if the rank has the complete vocabulary."""
    if division is None or not division.by_vocabulary:
        return None
    rank, count = get_rank(), division.model
    # Ranks that share a head are consecutive. The group of all ranks exists already.
    group = GlobalComm.WORLD_COMM_GROUP if count == get_group_size() else get_tp_group_name(rank, count)
    return VocabularyPart(group, count, rank % count)


class _Same(nn.Cell):
    """x instead of x + 0, which MindFormers' loss uses to redistribute logits."""

    def construct(self, x, zero):
        return x


def keep_channels_whole(model: nn.Cell) -> None:
    """Makes the cells between a MindFormers model's head and loss divide hidden states only by tokens.

    These cells divide logits by the vocabulary, which would divide hidden states by channels. LossesOfRank defines its
    own layout.
    """
    _take_as_they_are(model.loss)
    if is_gpt_model(model):
        config = model.config
        tokens = config.context_parallel_size or 1, config.data_parallel_size or 1, 1
        model.transpose.shard((tokens,))
        if model.mtp_process:
            _take_as_they_are(model.mtp.compute_language_model_loss.cross_entropy)
            model.mtp.transpose_logits.shard((tokens,))
            model.mtp.morphed_reshape_logits.shard(
                in_strategy=(layout("dp", "cp", "None"),), out_strategy=(layout("dp_cp", "None"),)
            )


def _take_as_they_are(loss):
    del loss.add
    loss.add = _Same(auto_prefix=False)


class LossesOfRank(nn.Cell):
    """LabelLosses in which each device computes the losses of its tokens, with its rows of the head.

    MindSpore sees one operator (Morph) with the layouts of its inputs and outputs. Everything inside, including the
    gradient, is computed from a device's own slices, with no collectives but those of VocabularyPart.

    Args:
        losses (LabelLosses): The losses, with the vocabulary_of ``division``.
        division (HeadDivision): How the head is divided.

    Inputs:
        - **hidden**, **weight**, **labels** (Tensor) - As for LabelLosses, of all devices.

    Outputs:
        float32 [tokens].
    """

    def __init__(self, losses: LabelLosses, division: HeadDivision):
        super().__init__(auto_prefix=False)
        self.losses = losses
        hidden, rows, _, labels = _layouts(division)
        self.of_all_ranks = _operator(self.of_rank, (hidden, rows, labels), labels)

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return self.of_all_ranks(hidden, weight, labels)

    def of_rank(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Returns the losses of a device."""
        return self.losses(hidden, weight, labels)


class AdaptedLossesOfRank(nn.Cell):
    """AdaptedLabelLosses in which each device computes the losses of its tokens, with its rows of W and B.

    A is complete on every device. Each device computes x A^T for its tokens, and the share of the gradient that comes
    from its rows of B; MindSpore sums the shares, as it does for any parameter that several devices hold.

    Args:
        losses (AdaptedLabelLosses): The losses, with the vocabulary_of ``division``.
        scale (float): The factor of x A^T.
        division (HeadDivision): How the head is divided.

    Inputs:
        - **hidden** (Tensor) - x, [tokens, channels], of all devices.
        - **weight**, **a**, **b** (Tensor) - W, A and B of all devices.
        - **labels** (Tensor) - As for LabelLosses.

    Outputs:
        float32 [tokens].
    """

    def __init__(self, losses: AdaptedLabelLosses, scale: float, division: HeadDivision):
        super().__init__(auto_prefix=False)
        self.losses = losses
        self.scale = scale
        self.shrink = ops.MatMul(transpose_b=True)
        hidden, rows, whole, labels = _layouts(division)
        self.of_all_ranks = _operator(self.of_rank, (hidden, rows, whole, rows, labels), labels)

    def construct(self, hidden: Tensor, weight: Tensor, a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
        return self.of_all_ranks(hidden, weight, a, b, labels)

    def of_rank(self, hidden: Tensor, weight: Tensor, a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
        """Returns the losses of a device."""
        hidden = hidden.astype(self.losses.dtype)
        low_rank = self.shrink(hidden, a.astype(hidden.dtype)) * self.scale
        return self.losses(hidden, low_rank, weight, b, labels)


def _layouts(division: HeadDivision) -> Tuple[Layout, Layout, Layout, Layout]:
    """Returns the layouts of hidden states, rows of the vocabulary, an undivided matrix and labels."""
    axes = Layout((division.rows, division.model), (_TOKENS, _MODEL))
    tokens: Any = (_TOKENS, _MODEL) if division.by_tokens else _TOKENS
    rows = axes(_MODEL if division.by_vocabulary else _WHOLE, _WHOLE)
    return axes(tokens, _WHOLE), rows, axes(_WHOLE, _WHOLE), axes(tokens)


def _operator(of_rank: Callable, inputs: Tuple[Layout, ...], losses: Layout) -> ops.Morph:
    """Returns an operator; each device computes its part by ``of_rank``."""
    operator = ops.Morph(of_rank, _shape, _dtype).add_prim_attr("self_define_shard", True)
    return operator.shard(in_strategy=inputs, out_strategy=(losses,))


def _shape(*shapes: List[int]) -> List[int]:
    return shapes[-1]


def _dtype(*dtypes: mstype.Type) -> mstype.Type:
    return mstype.float32
