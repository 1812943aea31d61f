"""HeadDivergences: a student's divergence from its teacher over the whole vocabulary, for some tokens at a time."""

import math
from typing import Optional, Tuple

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.network.cells.label_losses import (
    HeadLosses,
    adapted_logits,
    bounds_of_pieces,
    gradient_of_weight,
    in_vocabulary,
    log_probabilities_of,
    scaled_rows,
    zeros_like_frozen,
)
from mindlora.ops.frozen_linear import FrozenLinear
from mindlora.ops.operator_cell import CellWithBprop

# Each takes log-probabilities [tokens, vocabulary], and returns D [tokens] and its gradient with respect to the
# student's logits, [tokens, vocabulary].


class ForwardKL(nn.Cell):
    """D = sum_v t_v log(t_v / p_v), KL(teacher || student); dD/dz = p - t."""

    def construct(self, student: Tensor, teacher: Tensor) -> Tuple[Tensor, Tensor]:
        t = ops.exp(teacher)
        return (t * (teacher - student)).sum(-1), ops.exp(student) - t


class ReverseKL(nn.Cell):
    """D = sum_v p_v log(p_v / t_v), KL(student || teacher); dD/dz = p (log(p / t) - D)."""

    def construct(self, student: Tensor, teacher: Tensor) -> Tuple[Tensor, Tensor]:
        p, away = ops.exp(student), student - teacher
        divergence = (p * away).sum(-1)
        return divergence, p * (away - _beside(divergence, away))


class GeneralizedJSD(nn.Cell):
    r"""D = beta KL(t || m) + (1 - beta) KL(p || m) with m = beta t + (1 - beta) p.

    dD/dz = (1 - beta) p (log(p / m) - KL(p || m)): the terms of D through m itself cancel.
    """

    def __init__(self, beta: float):
        super().__init__()
        self.beta = beta
        self.of_teacher, self.of_student = math.log(beta), math.log1p(-beta)

    def construct(self, student: Tensor, teacher: Tensor) -> Tuple[Tensor, Tensor]:
        one, other = student + self.of_student, teacher + self.of_teacher
        mixture = ops.maximum(one, other) + ops.log1p(ops.exp(-ops.abs(one - other)))
        p, away = ops.exp(student), student - mixture
        from_student = (p * away).sum(-1)
        from_teacher = (ops.exp(teacher) * (teacher - mixture)).sum(-1)
        divergence = self.beta * from_teacher + (1 - self.beta) * from_student
        return divergence, (1 - self.beta) * p * (away - _beside(from_student, away))


def _beside(values, like):
    """Repeats one number per row over all columns; a CPU keeps a table for an operand that a difference broadcasts."""
    return ops.broadcast_to(values.reshape((-1, 1)), like.shape)


def _divergence(beta):
    if beta in (0, 1):
        return ReverseKL() if beta else ForwardKL()
    return GeneralizedJSD(beta)


class HeadDivergences(HeadLosses):
    r"""The generalized Jensen-Shannon divergence of each token's distribution under a student from its teacher's.

    With p = softmax(x W^T + u B^T) of the student and t = softmax(x_T W^T + u_T B_T^T) of the teacher,

    .. math::
        D_\beta = \beta KL(t || m) + (1 - \beta) KL(p || m), \quad m = \beta t + (1 - \beta) p

    for 0 < beta < 1; D_0 is KL(t || p), the forward divergence, and D_1 KL(p || t), the reverse one (Agarwal et al.,
    On-Policy Distillation of Language Models, 2024, as in TRL's GKDTrainer). As in LabelLosses, the tokens go
    through in pieces, so that only one piece's logits are in memory. Without an adapter on the head, the forward
    computes the gradient too; otherwise the backward computes the logits again.

    Args:
        dtype (mindspore.dtype): The dtype in which the head computes.
        beta (float): From 0 to 1.
        adapted (bool): Whether the student's head has an adapter, B. Its weight is frozen.
        piece (int, optional): As for LabelLosses. Default: None.
        frozen (FrozenLinear, optional): As for LabelLosses. Default: None.

    Inputs:
        - **hidden** (Tensor) - x, [tokens, channels].
        - **low_rank** (Tensor) - u, [tokens, r].
        - **weight** (Tensor) - W, [vocabulary, channels]; its gradient is zero.
        - **b** (Tensor) - B, [vocabulary, r].
        - **teacher_hidden**, **teacher_low_rank**, **teacher_b** (Tensor) - x_T, u_T and B_T, with their own rank;
          their gradients are zero.
        - **labels** (Tensor) - int32 [tokens]; where one is not in the vocabulary, such as ignore_token_id, divergence
          and gradient are 0.

    u and B of a head without an adapter are zeros, of rank 1.

    Outputs:
        float32 [tokens], in nats.
    """

    def __init__(
        self,
        dtype: mstype.Type,
        beta: float,
        adapted: bool,
        piece: Optional[int] = None,
        frozen: Optional[FrozenLinear] = None,
    ):
        super().__init__(dtype, piece, frozen)
        self.adapted = adapted
        kind = _OfAdapted if adapted else _OfFrozen
        self.with_gradient = kind(piece, self.head, _divergence(beta))

    def construct(
        self,
        hidden: Tensor,
        low_rank: Tensor,
        weight: Tensor,
        b: Tensor,
        teacher_hidden: Tensor,
        teacher_low_rank: Tensor,
        teacher_b: Tensor,
        labels: Tensor,
    ) -> Tensor:
        dtype, weight = self.dtype, self.operand(weight)
        teacher = (teacher_hidden.astype(dtype), teacher_low_rank.astype(dtype), teacher_b.astype(dtype))
        counted, _ = in_vocabulary(labels, weight)
        if self.adapted:
            student = (hidden.astype(dtype), low_rank.astype(dtype), weight, b.astype(dtype))
            divergences = self.with_gradient(*student, *teacher)
        else:
            divergences, _ = self.with_gradient(hidden.astype(dtype), weight, *teacher)
        # Selected, not multiplied: rows that do not count may be infinite.
        return ops.select(counted, divergences, ops.zeros_like(divergences))


class _OfFrozen(CellWithBprop):
    """(divergences, their gradients with respect to hidden); the backward scales the gradients."""

    reads_output = True

    def __init__(self, piece, head, divergence):
        super().__init__(auto_prefix=False)
        self.piece, self.head, self.divergence = piece, head, divergence

    def construct(self, hidden, weight, teacher_hidden, teacher_low_rank, teacher_b):
        divergences, gradients = (), ()
        for begin, end in bounds_of_pieces(hidden.shape, weight.shape, self.piece):
            rows, taught, low_taught = hidden[begin:end], teacher_hidden[begin:end], teacher_low_rank[begin:end]
            if begin > 0:
                done = (divergences[-1], gradients[-1])
                # All of them, or one product of each piece would be computed at the start.
                rows, taught = ops.depend(rows, done), ops.depend(taught, done)
                low_taught = ops.depend(low_taught, done)
            student = log_probabilities_of(self.head(rows, weight))
            teacher = log_probabilities_of(adapted_logits(self.head(taught, weight), low_taught, teacher_b))
            divergence, of_logits = self.divergence(student, teacher)
            divergences += (divergence,)
            gradients += (self.head.times(of_logits.astype(hidden.dtype), weight),)
        return ops.concat(divergences, 0), ops.concat(gradients, 0)

    def bprop(self, hidden, weight, teacher_hidden, teacher_low_rank, teacher_b, out, dout):
        of_teacher = (ops.zeros_like(teacher_hidden), ops.zeros_like(teacher_low_rank), zeros_like_frozen(teacher_b))
        return scaled_rows(out[1], dout[0]), zeros_like_frozen(weight), *of_teacher


class _OfAdapted(CellWithBprop):
    """The same for a student's head with an adapter: B trains here, and A by the gradient of low_rank."""

    def __init__(self, piece, head, divergence):
        super().__init__(auto_prefix=False)
        self.piece, self.head, self.divergence = piece, head, divergence

    def construct(self, hidden, low_rank, weight, b, teacher_hidden, teacher_low_rank, teacher_b):
        divergences = ()
        for begin, end in bounds_of_pieces(hidden.shape, weight.shape, self.piece):
            rows, low_rows = hidden[begin:end], low_rank[begin:end]
            taught, low_taught = teacher_hidden[begin:end], teacher_low_rank[begin:end]
            if begin > 0:
                done = divergences[-1]
                rows, low_rows = ops.depend(rows, done), ops.depend(low_rows, done)
                taught, low_taught = ops.depend(taught, done), ops.depend(low_taught, done)
            student = log_probabilities_of(adapted_logits(self.head(rows, weight), low_rows, b))
            logits = adapted_logits(self.head(taught, weight), low_taught, teacher_b)
            divergence, _ = self.divergence(student, log_probabilities_of(logits))
            divergences += (divergence,)
        return ops.concat(divergences, 0)

    def bprop(self, hidden, low_rank, weight, b, teacher_hidden, teacher_low_rank, teacher_b, out, dout):
        of_hidden, of_low_rank, of_b, done = (), (), None, dout
        for begin, end in bounds_of_pieces(hidden.shape, weight.shape, self.piece):
            # The first piece too, whose logits MindSpore would otherwise keep from the forward.
            rows, low_rows = ops.depend(hidden[begin:end], done), ops.depend(low_rank[begin:end], done)
            taught = ops.depend(teacher_hidden[begin:end], done)
            low_taught = ops.depend(teacher_low_rank[begin:end], done)
            student = log_probabilities_of(adapted_logits(self.head(rows, weight), low_rows, b))
            logits = adapted_logits(self.head(taught, weight), low_taught, teacher_b)
            _, of_logits = self.divergence(student, log_probabilities_of(logits))
            of_logits = of_logits.astype(hidden.dtype)
            of_hidden += (scaled_rows(self.head.times(of_logits, weight), dout[begin:end]),)
            of_low_rank += (scaled_rows(ops.MatMul()(of_logits, b), dout[begin:end]),)
            product = gradient_of_weight(of_logits, scaled_rows(low_rows, dout[begin:end]))
            of_b = product if begin == 0 else of_b + product
            done = (of_hidden[-1], of_low_rank[-1], of_b)
        of_student = (ops.concat(of_hidden, 0), ops.concat(of_low_rank, 0), zeros_like_frozen(weight))
        of_teacher = (ops.zeros_like(teacher_hidden), ops.zeros_like(teacher_low_rank), zeros_like_frozen(teacher_b))
        return *of_student, of_b.astype(b.dtype), *of_teacher
