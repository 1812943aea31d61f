"""LabelLosses: an output head and its cross entropy for some tokens at a time, without the logits of all tokens."""

from typing import Optional

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.models.label_losses import tokens_at_once
from mindlora.ops.frozen_linear import FrozenLinear
from mindlora.ops.operator_cell import CellWithBprop


class _OfHead(nn.Cell):
    """What the losses of a head have in common: what it computes in, and what multiplies by its weight."""

    def __init__(self, dtype: mstype.Type, piece: Optional[int], frozen: Optional[FrozenLinear]):
        super().__init__(auto_prefix=False)
        self.dtype = dtype
        self.piece = piece
        self.differentiates = True
        self.holds = frozen is not None
        self.head = _Head() if frozen is None else frozen

    def operand(self, weight: Tensor) -> Tensor:
        """Returns the weight as the head's product takes it: in its dtype, or in the 16 bits in which it is held."""
        return weight if self.holds else weight.astype(self.dtype)


class LabelLosses(_OfHead):
    """The loss of each label, loss[i] = log(sum_v exp(z[i, v])) - z[i, labels[i]] with the logits z = x W^T.

    With p = softmax(z) and e the rows of the identity, dx[i] = dloss[i] (p[i] - e[labels[i]]) W. That is known as soon
    as z is, but for the factor dloss[i]. So the forward goes through the tokens in pieces, one after the other, and
    keeps the gradient of each, [tokens, channels], in the place of logits, [tokens, vocabulary], and the backward
    scales it. Where the head trains, the backward computes z again, piece by piece, as it needs dloss for dW too:
    dW = sum_i dloss[i] (p[i] - e[labels[i]]) x[i]^T. Sums are in float32, the products in the head's dtype.

    The losses' gradient in the forward is that of Liger Kernel (Hsu et al., 2024); computing the logits again is that
    of Cut Cross-Entropy (Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024).

    Args:
        dtype (mindspore.dtype): What the head computes in.
        trained (bool): Whether the head's weight trains; if not, its gradient is zero.
        piece (int, optional): Tokens at a time; it need not divide them. Default: None, as tokens_at_once has it.
        frozen (FrozenLinear, optional): What multiplies by a frozen weight of 16 bits, which is not cast. Default:
            None, MindSpore's MatMul.

    Inputs:
        - **hidden** (Tensor) - What the head takes, [tokens, channels].
        - **weight** (Tensor) - The head's, [vocabulary, channels].
        - **labels** (Tensor) - int32 [tokens]; one that is not in the vocabulary, such as ignore_token_id, has a loss
          and a gradient of 0.

    Outputs:
        float32 [tokens]. In evaluation, or where ``differentiates`` is False, no gradient is computed.

    Attributes:
        differentiates (bool): Whether training takes the gradient of the losses. Default: True.
    """

    def __init__(
        self, dtype: mstype.Type, trained: bool, piece: Optional[int] = None, frozen: Optional[FrozenLinear] = None
    ):
        super().__init__(dtype, piece, frozen)
        self.with_gradient = _Trained(piece, self.head) if trained else _Frozen(piece, self.head)

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        hidden, weight = hidden.astype(self.dtype), self.operand(weight)
        counted, labels = _in_vocabulary(labels, weight)
        if self.training and self.differentiates:
            losses = self.with_gradient(hidden, weight, labels)
        else:
            losses = _losses(hidden, weight, labels, self.piece, self.head)
        # Selected, not multiplied: what does not count may be infinite.
        return ops.select(counted, losses, ops.zeros_like(losses))


class AdaptedLabelLosses(_OfHead):
    """The losses of LabelLosses where the head has an adapter and its weight is frozen: z = x W^T + u B^T.

    u = (dropout(x) A^T) * scale is of the width of the rank, so it comes for all tokens at once, and A learns by its
    gradient, du[i] = dloss[i] (p[i] - e[labels[i]]) B. The backward computes z again, piece by piece, for
    dB = sum_i dloss[i] (p[i] - e[labels[i]]) u[i]^T.

    Args:
        dtype (mindspore.dtype): What the head computes in.
        piece (int, optional): As for LabelLosses. Default: None.
        frozen (FrozenLinear, optional): As for LabelLosses. Default: None.

    Inputs:
        - **hidden** (Tensor) - x, [tokens, channels].
        - **low_rank** (Tensor) - u, [tokens, r].
        - **weight** (Tensor) - W, [vocabulary, channels]; its gradient is zero.
        - **b** (Tensor) - B, [vocabulary, r].
        - **labels** (Tensor) - As for LabelLosses.

    Outputs:
        float32 [tokens].

    Attributes:
        differentiates (bool): As for LabelLosses. Default: True.
    """

    def __init__(self, dtype: mstype.Type, piece: Optional[int] = None, frozen: Optional[FrozenLinear] = None):
        super().__init__(dtype, piece, frozen)
        self.with_gradient = _Adapted(piece, self.head)

    def construct(self, hidden: Tensor, low_rank: Tensor, weight: Tensor, b: Tensor, labels: Tensor) -> Tensor:
        hidden, low_rank, b = hidden.astype(self.dtype), low_rank.astype(self.dtype), b.astype(self.dtype)
        weight = self.operand(weight)
        counted, labels = _in_vocabulary(labels, weight)
        if self.training and self.differentiates:
            losses = self.with_gradient(hidden, low_rank, weight, b, labels)
        else:
            losses = _adapted_losses(hidden, low_rank, weight, b, labels, self.piece, self.head)
        return ops.select(counted, losses, ops.zeros_like(losses))


class _Head(nn.Cell):
    """The products of FrozenLinear for a weight in the dtype of hidden: x W^T, and dy W."""

    def construct(self, x, weight):
        return ops.MatMul(transpose_b=True)(x, weight)

    def times(self, dy, weight):
        return ops.MatMul()(dy, weight)


class _Frozen(nn.Cell):
    """The losses of labels in the vocabulary, and their gradient with respect to hidden, both computed forward."""

    def __init__(self, piece, head):
        super().__init__(auto_prefix=False)
        self.pieces = _LossesAndGradients(piece, head)

    def construct(self, hidden, weight, labels):
        return self.pieces(hidden, weight, labels)[0]


class _LossesAndGradients(CellWithBprop):
    """(losses, gradients), of which the backward scales the second."""

    reads_output = True

    def __init__(self, piece, head):
        super().__init__(auto_prefix=False)
        self.piece = piece
        self.head = head

    def construct(self, hidden, weight, labels):
        losses, gradients = (), ()
        for begin, end in _bounds(hidden.shape, weight.shape, self.piece):
            rows, truth = hidden[begin:end], labels[begin:end]
            if begin > 0:
                # The labels too, or the one-hot tensors of all pieces would be made at the start.
                done = (losses[-1], gradients[-1])
                rows, truth = ops.depend(rows, done), ops.depend(truth, done)
            log_probabilities = _log_probabilities(self.head(rows, weight))
            losses += (_picked(log_probabilities, truth),)
            gradients += (self.head.times(_of_logits(log_probabilities, truth, hidden.dtype), weight),)
        return ops.concat(losses, 0), ops.concat(gradients, 0)

    def bprop(self, hidden, weight, labels, out, dout):
        return _scaled(out[1], dout[0]), _zeros_like_frozen(weight), ops.zeros_like(labels)


class _Trained(CellWithBprop):
    """The losses of labels in the vocabulary; the backward computes the logits again."""

    def __init__(self, piece, head):
        super().__init__(auto_prefix=False)
        self.piece = piece
        self.head = head

    def construct(self, hidden, weight, labels):
        return _losses(hidden, weight, labels, self.piece, self.head)

    def bprop(self, hidden, weight, labels, out, dout):
        gradients, of_weight, done = (), None, dout
        for begin, end in _bounds(hidden.shape, weight.shape, self.piece):
            # The first one too, whose logits MindSpore would else keep from the forward.
            rows, truth = ops.depend(hidden[begin:end], done), ops.depend(labels[begin:end], done)
            of_logits = _of_logits(_log_probabilities(self.head(rows, weight)), truth, hidden.dtype)
            # Factors of [piece, channels]: of [piece, vocabulary], a CPU held those of nearly all pieces.
            gradients += (_scaled(self.head.times(of_logits, weight), dout[begin:end]),)
            product = _of_weight(of_logits, _scaled(rows, dout[begin:end]))
            of_weight = product if begin == 0 else of_weight + product
            done = (gradients[-1], of_weight)
        return ops.concat(gradients, 0), of_weight.astype(weight.dtype), ops.zeros_like(labels)


# What the cells of a head with an adapter share with the others has neither loops nor conditions: in a function that
# the forward and the backward call, MindSpore does not compile them below a loop over micro-batches.


class _Adapted(CellWithBprop):
    """The losses with a head that has an adapter. Its B trains here; A trains by the gradient of low_rank."""

    def __init__(self, piece, head):
        super().__init__(auto_prefix=False)
        self.piece = piece
        self.head = head

    def construct(self, hidden, low_rank, weight, b, labels):
        return _adapted_losses(hidden, low_rank, weight, b, labels, self.piece, self.head)

    def bprop(self, hidden, low_rank, weight, b, labels, out, dout):
        of_hidden, of_low_rank, of_b, done = (), (), None, dout
        for begin, end in _bounds(hidden.shape, weight.shape, self.piece):
            rows, low_rows = ops.depend(hidden[begin:end], done), ops.depend(low_rank[begin:end], done)
            truth = ops.depend(labels[begin:end], done)
            logits = _adapted_logits(self.head(rows, weight), low_rows, b)
            of_logits = _of_logits(_log_probabilities(logits), truth, hidden.dtype)
            of_hidden += (_scaled(self.head.times(of_logits, weight), dout[begin:end]),)
            of_low_rank += (_scaled(ops.MatMul()(of_logits, b), dout[begin:end]),)
            product = _of_weight(of_logits, _scaled(low_rows, dout[begin:end]))
            of_b = product if begin == 0 else of_b + product
            done = (of_hidden[-1], of_low_rank[-1], of_b)
        of_hidden, of_low_rank = ops.concat(of_hidden, 0), ops.concat(of_low_rank, 0)
        return of_hidden, of_low_rank, _zeros_like_frozen(weight), of_b.astype(b.dtype), ops.zeros_like(labels)


@constexpr
def _bounds(hidden_shape, weight_shape, piece):
    tokens, channels = hidden_shape
    piece = piece or tokens_at_once(tokens, channels, weight_shape[0])
    return tuple((begin, min(begin + piece, tokens)) for begin in range(0, tokens, piece))


def _in_vocabulary(labels, weight):
    """Returns which labels are in the vocabulary, and the labels with 0 in the place of the others."""
    counted = ops.logical_and(labels >= 0, labels < weight.shape[0])
    # Not by select: in front of a cell with a bprop of its own, MindSpore does not compile one of whole numbers.
    return counted, labels * counted.astype(mstype.int32)


def _zeros_like_frozen(weight):
    # PyNative makes the gradient of a frozen weight too: a view of one zero takes no memory.
    return ops.broadcast_to(ops.zeros((), weight.dtype), weight.shape)


def _losses(hidden, weight, labels, piece, head):
    losses = ()
    for begin, end in _bounds(hidden.shape, weight.shape, piece):
        rows = hidden[begin:end] if begin == 0 else ops.depend(hidden[begin:end], losses[-1])
        losses += (_picked(_log_probabilities(head(rows, weight)), labels[begin:end]),)
    return ops.concat(losses, 0)


def _adapted_losses(hidden, low_rank, weight, b, labels, piece, head):
    losses = ()
    for begin, end in _bounds(hidden.shape, weight.shape, piece):
        rows = hidden[begin:end] if begin == 0 else ops.depend(hidden[begin:end], losses[-1])
        logits = _adapted_logits(head(rows, weight), low_rank[begin:end], b)
        losses += (_picked(_log_probabilities(logits), labels[begin:end]),)
    return ops.concat(losses, 0)


def _log_probabilities(logits):
    return ops.LogSoftmax(-1)(logits.astype(mstype.float32))


def _adapted_logits(logits, low_rank, b):
    return logits + ops.MatMul(transpose_b=True)(low_rank, b)


def _picked(log_probabilities, labels):
    return -ops.GatherD()(log_probabilities, 1, labels.reshape((-1, 1))).reshape((-1,))


def _of_logits(log_probabilities, labels, dtype):
    on, off = Tensor(1, mstype.float32), Tensor(0, mstype.float32)
    return (ops.exp(log_probabilities) - ops.OneHot()(labels, log_probabilities.shape[1], on, off)).astype(dtype)


def _of_weight(of_logits, rows):
    return ops.MatMul(transpose_a=True)(of_logits, rows).astype(mstype.float32)


def _scaled(rows, factors):
    return (rows.astype(mstype.float32) * factors.reshape((-1, 1))).astype(rows.dtype)
