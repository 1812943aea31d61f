"""LabelLosses: an output head and its cross entropy for some tokens at a time, without the logits of all tokens."""

from typing import Optional, Tuple

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.models.label_losses import tokens_at_once
from mindlora.ops.frozen_linear import FrozenLinear
from mindlora.ops.operator_cell import CellWithBprop


class HeadLosses(nn.Cell):
    """Base class of a head's losses: the dtype, the vocabulary and the product with the head's weight."""

    def __init__(
        self,
        dtype: mstype.Type,
        piece: Optional[int],
        frozen: Optional[FrozenLinear],
        vocabulary: Optional["WholeVocabulary"] = None,
    ):
        super().__init__(auto_prefix=False)
        self.dtype = dtype
        self.piece = piece
        self.differentiates = True
        self.holds = frozen is not None
        self.head = HeadProduct() if frozen is None else frozen
        self.vocabulary = vocabulary or WholeVocabulary()

    def operand(self, weight: Tensor) -> Tensor:
        """Returns the weight for the head's product: in the product's dtype, or in its held 16 bits."""
        return weight if self.holds else weight.astype(self.dtype)


class LabelLosses(HeadLosses):
    """The loss of each label, loss[i] = log(sum_v exp(z[i, v])) - z[i, labels[i]] with the logits z = x W^T.

    With p = softmax(z) and e the rows of the identity, dx[i] = dloss[i] (p[i] - e[labels[i]]) W. That is known as soon
    as z is, except for the factor dloss[i]. So the forward goes through the tokens in pieces, one after the other, and
    keeps the gradient of each, [tokens, channels], in the place of logits, [tokens, vocabulary], and the backward
    scales it. Where the head trains, the backward computes z again, piece by piece, as it needs dloss for dW too:
    dW = sum_i dloss[i] (p[i] - e[labels[i]]) x[i]^T. Sums are in float32, the products in the head's dtype.

    Computing the gradient in the forward follows Liger Kernel (Hsu et al., 2024); computing the logits again follows
    Cut Cross-Entropy (Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024).

    Args:
        dtype (mindspore.dtype): What the head computes in.
        trained (bool): Whether the head's weight trains; otherwise its gradient is zero.
        piece (int, optional): Tokens at a time; it need not divide their number. Default: None, by tokens_at_once.
        frozen (FrozenLinear, optional): The product with a frozen 16-bit weight, which is not cast. Default:
            None, MindSpore's MatMul.
        vocabulary (WholeVocabulary, optional): WholeVocabulary, or VocabularyPart for a part of the rows. Default:
            None, all rows.

    Inputs:
        - **hidden** (Tensor) - The head's input, [tokens, channels].
        - **weight** (Tensor) - The head's weight, [vocabulary, channels], or a rank's part of its rows.
        - **labels** (Tensor) - int32 [tokens]; one that is not in the vocabulary, such as ignore_token_id, has a loss
          and a gradient of 0.

    Outputs:
        float32 [tokens]. In evaluation, or where ``differentiates`` is False, no gradient is computed.

    Attributes:
        differentiates (bool): Whether training takes the gradient of the losses. Default: True.
    """

    def __init__(
        self,
        dtype: mstype.Type,
        trained: bool,
        piece: Optional[int] = None,
        frozen: Optional[FrozenLinear] = None,
        vocabulary: Optional["WholeVocabulary"] = None,
    ):
        super().__init__(dtype, piece, frozen, vocabulary)
        kind = _Trained if trained else _Frozen
        self.with_gradient = kind(piece, self.head, self.vocabulary)

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        hidden, weight = hidden.astype(self.dtype), self.operand(weight)
        counted, labels = self.vocabulary.places(labels, weight)
        if self.training and self.differentiates:
            losses = self.with_gradient(hidden, weight, labels)
        else:
            losses = _losses(hidden, weight, labels, self.piece, self.head, self.vocabulary)
        losses = self.vocabulary.of_all(losses)
        # Selected, not multiplied: what does not count may be infinite.
        return ops.select(counted, losses, ops.zeros_like(losses))


class AdaptedLabelLosses(HeadLosses):
    """LabelLosses for a head with an adapter and a frozen weight: z = x W^T + u B^T.

    u = (dropout(x) A^T) * scale has the width of the rank, so it is computed for all tokens at once, and A learns by
    its gradient, du[i] = dloss[i] (p[i] - e[labels[i]]) B. The backward computes z again, piece by piece, for
    dB = sum_i dloss[i] (p[i] - e[labels[i]]) u[i]^T.

    Args:
        dtype (mindspore.dtype): What the head computes in.
        piece (int, optional): As for LabelLosses. Default: None.
        frozen (FrozenLinear, optional): As for LabelLosses. Default: None.
        vocabulary (WholeVocabulary, optional): As for LabelLosses. Default: None.

    Inputs:
        - **hidden** (Tensor) - x, [tokens, channels].
        - **low_rank** (Tensor) - u, [tokens, r].
        - **weight** (Tensor) - W, [vocabulary, channels], or a rank's part of its rows; its gradient is zero.
        - **b** (Tensor) - B, [vocabulary, r], or the same part of its rows.
        - **labels** (Tensor) - As for LabelLosses.

    Outputs:
        float32 [tokens].

    Attributes:
        differentiates (bool): As for LabelLosses. Default: True.
    """

    def __init__(
        self,
        dtype: mstype.Type,
        piece: Optional[int] = None,
        frozen: Optional[FrozenLinear] = None,
        vocabulary: Optional["WholeVocabulary"] = None,
    ):
        super().__init__(dtype, piece, frozen, vocabulary)
        self.with_gradient = _Adapted(piece, self.head, self.vocabulary)

    def construct(self, hidden: Tensor, low_rank: Tensor, weight: Tensor, b: Tensor, labels: Tensor) -> Tensor:
        hidden, low_rank, b = hidden.astype(self.dtype), low_rank.astype(self.dtype), b.astype(self.dtype)
        weight = self.operand(weight)
        counted, labels = self.vocabulary.places(labels, weight)
        if self.training and self.differentiates:
            losses = self.with_gradient(hidden, low_rank, weight, b, labels)
        else:
            losses = _adapted_losses(hidden, low_rank, weight, b, labels, self.piece, self.head, self.vocabulary)
        losses = self.vocabulary.of_all(losses)
        return ops.select(counted, losses, ops.zeros_like(losses))


class WholeVocabulary(nn.Cell):
    """A vocabulary whose rows of the head are all on this device."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def places(self, labels: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns which labels [tokens] are in the vocabulary, and their rows of ``weight``, 0 for others."""
        return in_vocabulary(labels, weight)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Returns logits [tokens, rows] - log(sum of exp(logits) over the vocabulary), in float32."""
        return log_probabilities_of(logits)

    def picked(self, log_probabilities: Tensor, rows: Tensor) -> Tensor:
        """Returns the losses [tokens] of labels at these rows, or the part that this device knows."""
        return -ops.GatherD()(log_probabilities, 1, rows.reshape((-1, 1))).reshape((-1,))

    def of_all(self, losses: Tensor) -> Tensor:
        """Completes the losses of ``picked`` to those of the whole vocabulary."""
        return losses


class VocabularyPart(WholeVocabulary):
    """A vocabulary of which each of ``count`` ranks of a group has an equal part of the rows, in order.

    With z of the rank's own rows, each gathers the logarithms of all ranks' sums, log(sum_v exp(z[i, v])), one number
    per token and rank. A label's loss is known where its row is, and 0 elsewhere, and the losses are the sum over the
    ranks. The backward of this sum adds up the ranks' gradients dloss: MindSpore gives each rank its share of
    the gradient of a value that all of them hold. So the gradient of hidden is also a share, that of the rank's rows,
    and A, B and the layers before the head sum the shares as for any cell that is divided by rows.

    Args:
        group (str): The group of ranks.
        count (int): Number of its ranks.
        number (int): This rank's number in it.
    """

    def __init__(self, group: str, count: int, number: int):
        super().__init__()
        self.count = count
        self.number = number
        self.gather = ops.AllGather(group=group)
        self.sum = ops.AllReduce(group=group)

    def places(self, labels: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns which labels are in the vocabulary, and their rows; below 0 or too large if another rank has them."""
        rows = weight.shape[0]
        return ops.logical_and(labels >= 0, labels < rows * self.count), labels - rows * self.number

    def log_probabilities(self, logits: Tensor) -> Tensor:
        logits = logits.astype(mstype.float32)
        sums = self.gather(_log_of_sum(logits, 1).reshape((1, -1)))
        return logits - _log_of_sum(sums, 0).reshape((-1, 1))

    def picked(self, log_probabilities: Tensor, rows: Tensor) -> Tensor:
        here = ops.logical_and(rows >= 0, rows < log_probabilities.shape[1])
        rows = rows * here.astype(mstype.int32)
        losses = -ops.GatherD()(log_probabilities, 1, rows.reshape((-1, 1))).reshape((-1,))
        # Not zeros_like: in the forward of a cell with its own bprop, MindSpore may not compile it.
        return ops.select(here, losses, 0.0)

    def of_all(self, losses: Tensor) -> Tensor:
        return self.sum(losses)


class HeadProduct(nn.Cell):
    """FrozenLinear's products for a weight in the dtype of hidden: x W^T and dy W."""

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.MatMul(transpose_b=True)(x, weight)

    def times(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Returns dy W."""
        return ops.MatMul()(dy, weight)


class _Frozen(nn.Cell):
    """The losses of labels in the vocabulary, and their gradient with respect to hidden, both computed forward."""

    def __init__(self, piece, head, vocabulary):
        super().__init__(auto_prefix=False)
        self.pieces = _LossesAndGradients(piece, head, vocabulary)

    def construct(self, hidden, weight, labels):
        return self.pieces(hidden, weight, labels)[0]


class _LossesAndGradients(CellWithBprop):
    """(losses, gradients); the backward scales the gradients."""

    reads_output = True

    def __init__(self, piece, head, vocabulary):
        super().__init__(auto_prefix=False)
        self.piece = piece
        self.head = head
        self.vocabulary = vocabulary

    def construct(self, hidden, weight, labels):
        losses, gradients = (), ()
        for begin, end in bounds_of_pieces(hidden.shape, weight.shape, self.piece):
            rows, truth = hidden[begin:end], labels[begin:end]
            if begin > 0:
                # The labels too, or the one-hot tensors of all pieces would be computed at the start.
                done = (losses[-1], gradients[-1])
                rows, truth = ops.depend(rows, done), ops.depend(truth, done)
            log_probabilities = self.vocabulary.log_probabilities(self.head(rows, weight))
            losses += (self.vocabulary.picked(log_probabilities, truth),)
            gradients += (self.head.times(_of_logits(log_probabilities, truth, hidden.dtype), weight),)
        return ops.concat(losses, 0), ops.concat(gradients, 0)

    def bprop(self, hidden, weight, labels, out, dout):
        return scaled_rows(out[1], dout[0]), zeros_like_frozen(weight), ops.zeros_like(labels)


class _Trained(CellWithBprop):
    """The losses of labels in the vocabulary; the backward computes the logits again."""

    def __init__(self, piece, head, vocabulary):
        super().__init__(auto_prefix=False)
        self.piece = piece
        self.head = head
        self.vocabulary = vocabulary

    def construct(self, hidden, weight, labels):
        return _losses(hidden, weight, labels, self.piece, self.head, self.vocabulary)

    def bprop(self, hidden, weight, labels, out, dout):
        gradients, of_weight, done = (), None, dout
        for begin, end in bounds_of_pieces(hidden.shape, weight.shape, self.piece):
            # The first one too, whose logits MindSpore would otherwise keep from the forward.
            rows, truth = ops.depend(hidden[begin:end], done), ops.depend(labels[begin:end], done)
            log_probabilities = self.vocabulary.log_probabilities(self.head(rows, weight))
            of_logits = _of_logits(log_probabilities, truth, hidden.dtype)
            # Factors of [piece, channels]: with [piece, vocabulary], a CPU held those of nearly all pieces.
            gradients += (scaled_rows(self.head.times(of_logits, weight), dout[begin:end]),)
            product = gradient_of_weight(of_logits, scaled_rows(rows, dout[begin:end]))
            of_weight = product if begin == 0 else of_weight + product
            done = (gradients[-1], of_weight)
        return ops.concat(gradients, 0), of_weight.astype(weight.dtype), ops.zeros_like(labels)


# Functions shared by heads with and without an adapter have neither loops nor conditions: in a function that
# the forward and the backward call, MindSpore does not compile them below a loop over micro-batches.


class _Adapted(CellWithBprop):
    """The losses of a head with an adapter. B trains here; A trains by the gradient of low_rank."""

    def __init__(self, piece, head, vocabulary):
        super().__init__(auto_prefix=False)
        self.piece = piece
        self.head = head
        self.vocabulary = vocabulary

    def construct(self, hidden, low_rank, weight, b, labels):
        return _adapted_losses(hidden, low_rank, weight, b, labels, self.piece, self.head, self.vocabulary)

    def bprop(self, hidden, low_rank, weight, b, labels, out, dout):
        of_hidden, of_low_rank, of_b, done = (), (), None, dout
        for begin, end in bounds_of_pieces(hidden.shape, weight.shape, self.piece):
            rows, low_rows = ops.depend(hidden[begin:end], done), ops.depend(low_rank[begin:end], done)
            truth = ops.depend(labels[begin:end], done)
            logits = adapted_logits(self.head(rows, weight), low_rows, b)
            of_logits = _of_logits(self.vocabulary.log_probabilities(logits), truth, hidden.dtype)
            of_hidden += (scaled_rows(self.head.times(of_logits, weight), dout[begin:end]),)
            of_low_rank += (scaled_rows(ops.MatMul()(of_logits, b), dout[begin:end]),)
            product = gradient_of_weight(of_logits, scaled_rows(low_rows, dout[begin:end]))
            of_b = product if begin == 0 else of_b + product
            done = (of_hidden[-1], of_low_rank[-1], of_b)
        of_hidden, of_low_rank = ops.concat(of_hidden, 0), ops.concat(of_low_rank, 0)
        return of_hidden, of_low_rank, zeros_like_frozen(weight), of_b.astype(b.dtype), ops.zeros_like(labels)


@constexpr
def bounds_of_pieces(
    hidden_shape: Tuple[int, int], weight_shape: Tuple[int, int], piece: Optional[int]
) -> Tuple[Tuple[int, int], ...]:
    """Returns begin and end of each piece of [tokens, channels]; ``piece`` is as for LabelLosses."""
    tokens, channels = hidden_shape
    piece = piece or tokens_at_once(tokens, channels, weight_shape[0])
    return tuple((begin, min(begin + piece, tokens)) for begin in range(0, tokens, piece))


def in_vocabulary(labels: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
    """Returns which labels are in the vocabulary, and the labels with the others replaced by 0."""
    counted = ops.logical_and(labels >= 0, labels < weight.shape[0])
    # Not by select: before a cell with its own bprop, MindSpore does not compile one of integers.
    return counted, labels * counted.astype(mstype.int32)


def zeros_like_frozen(weight: Tensor) -> Tensor:
    """Returns the gradient of a frozen weight."""
    # PyNative computes the gradient of a frozen weight too: a view of one zero takes no memory.
    return ops.broadcast_to(ops.zeros((), weight.dtype), weight.shape)


def _losses(hidden, weight, labels, piece, head, vocabulary):
    losses = ()
    for begin, end in bounds_of_pieces(hidden.shape, weight.shape, piece):
        rows = hidden[begin:end] if begin == 0 else ops.depend(hidden[begin:end], losses[-1])
        log_probabilities = vocabulary.log_probabilities(head(rows, weight))
        losses += (vocabulary.picked(log_probabilities, labels[begin:end]),)
    return ops.concat(losses, 0)


def _adapted_losses(hidden, low_rank, weight, b, labels, piece, head, vocabulary):
    losses = ()
    for begin, end in bounds_of_pieces(hidden.shape, weight.shape, piece):
        rows, low_rows = hidden[begin:end], low_rank[begin:end]
        if begin > 0:
            # Both, or the products of all pieces with B would be computed at the start.
            rows, low_rows = ops.depend(rows, losses[-1]), ops.depend(low_rows, losses[-1])
        logits = adapted_logits(head(rows, weight), low_rows, b)
        losses += (vocabulary.picked(vocabulary.log_probabilities(logits), labels[begin:end]),)
    return ops.concat(losses, 0)


def log_probabilities_of(logits: Tensor) -> Tensor:
    """Returns log(softmax(z)) in float32."""
    return ops.LogSoftmax(-1)(logits.astype(mstype.float32))


def _log_of_sum(logits, axis):
    largest = ops.ReduceMax(keep_dims=True)(logits, axis)
    return ops.log(ops.ReduceSum(keep_dims=True)(ops.exp(logits - largest), axis)) + largest


def adapted_logits(logits: Tensor, low_rank: Tensor, b: Tensor) -> Tensor:
    """Returns z + u B^T."""
    return logits + ops.MatMul(transpose_b=True)(low_rank, b)


def _of_logits(log_probabilities, labels, dtype):
    on, off = Tensor(1, mstype.float32), Tensor(0, mstype.float32)
    return (ops.exp(log_probabilities) - ops.OneHot()(labels, log_probabilities.shape[1], on, off)).astype(dtype)


def gradient_of_weight(of_logits: Tensor, rows: Tensor) -> Tensor:
    """Returns dz^T x in float32."""
    return ops.MatMul(transpose_a=True)(of_logits, rows).astype(mstype.float32)


def scaled_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Returns each row times its factor, in the dtype of the rows."""
    return (rows.astype(mstype.float32) * factors.reshape((-1, 1))).astype(rows.dtype)
