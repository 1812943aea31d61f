"""The low-rank path of a linear cell: which operators add ((dropout(x) A^T) * scale) B^T to the base's product.

There is one class per way of computing it. pick_low_rank picks one of them when a cell is created. They hold
operators and no parameters: A, B and the scale come from the cell. The cell calls their methods, not construct, so
that their operators belong to its scope (for recomputation) and PyNative does not pay for calling another cell.
"""

import itertools
from typing import NamedTuple, Optional, Tuple, Union

import mindspore as ms
from mindspore import Parameter, Tensor, get_context, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops import functional

from mindlora.ops.backend import Choice, choose_for_cell
from mindlora.ops.lora_delta import LoraDelta
from mindlora.ops.lora_dropout import LoraDeltaWithDropout
from mindlora.ops.lora_linear import LoraLinear, LoraLinearWithBias
from mindlora.ops.measured import measured

# TrainedRead: reads a trainable parameter so that a step on a CPU does not keep the results computed from it.


class TrainedRead(nn.Cell):
    """A trainable parameter in the products' ``dtype``: in a compiled step on a CPU, a copy of it.

    MindSpore reads a parameter without a copy, and writes to it only after all operators that read it are done.
    It does so by making their outputs inputs of the write. A train step writes in a branch, which it takes if no
    gradient has overflowed, and inputs of a branch are kept until then: all products with A and B, the cell's
    update [tokens, out] among them, stayed in memory to the end of the backward. With a copy, the copy stays.

    It holds no parameter. The cell calls ``of``, not construct, so that PyNative does not pay for another cell.
    """

    def __init__(self, dtype: mstype.Type):
        super().__init__()
        self.dtype = dtype
        self.copies = ms.get_context("device_target") == "CPU" and ms.get_context("mode") == ms.GRAPH_MODE
        self.cast = ops.Cast()
        self.copy = ops.Identity()

    def of(self, parameter: Parameter) -> Tensor:
        """The value of a parameter in ``dtype``; a cast from another dtype already copies."""
        value = self.cast(parameter, self.dtype)
        return self.copy(value) if self.copies and self.training and parameter.dtype == self.dtype else value


# Seeds for dropout, which a network draws while it runs.

_numbers = itertools.count(1)


class SeedDraw(nn.Cell):
    """Draws a new seed, int32 [1], at each call, in a sequence that mindspore.set_seed fixes."""

    def __init__(self):
        super().__init__()
        # Each cell has its own sequence. With two zeros, MindSpore picks a random one.
        seed = ms.get_seed()
        # If the backward recomputes the forward, it must use the same seed.
        self.draw = ops.UniformInt(*((0, 0) if seed is None else (seed, next(_numbers)))).recompute(False)
        self.least = Tensor(0, ms.int32)
        self.end = Tensor(2**31 - 1, ms.int32)

    def construct(self) -> Tensor:
        return self.draw((1,), self.least, self.end)


# Up to this many tokens, one pass over W beats MatMul and lora_delta. Measured on a CPU, with AVX-512 and with AVX2
# (scripts/bench.py ops); estimated on Ascend by the bytes moved (scripts/report_ascend.py), with the least for MatMul,
# where no measured choice was adopted.
_ONE_PASS_TOKENS = {"cpu": 64, "ascend": 8}

# How the base's product is sharded: ((tokens, in), (out, in)).
Strategy = Tuple[Tuple[int, int], Tuple[int, int]]
# One number; with VeRA, one for each row of A; with aLoRA, one for each token.
Scale = Union[float, Tensor]


class ComposedLowRank(nn.Cell):
    """y + ((dropout(x) A^T) * scale) B^T in MindSpore's own operators: on any device, sharded as the base is or not."""

    def __init__(self, dropout_rate: float = 0.0, strategy: Optional[Strategy] = None):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout_rate) if dropout_rate > 0 else None
        self.a_matmul = ops.MatMul(transpose_b=True)
        self.b_matmul = ops.MatMul(transpose_b=True)
        self.mul = ops.Mul()
        self.sum = ops.Add()
        self.cast = ops.Cast()
        if strategy is not None:
            self._shard(strategy)

    def _shard(self, base_strategy):
        (tokens, in_parts), (out_parts, _) = base_strategy
        # A is split as W is along `in`, B as W is along `out`; the rank is never split.
        if self.dropout is not None:
            self.dropout.dropout.shard(((tokens, in_parts),))
        self.a_matmul.shard(((tokens, in_parts), (1, in_parts)))
        self.mul.shard(((tokens, 1), ()))
        self.b_matmul.shard(((tokens, 1), (out_parts, 1)))
        self.sum.shard(((tokens, out_parts), (tokens, out_parts)))

    def add_to(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Scale) -> Tensor:
        """y + ((dropout(x) A^T) * scale) B^T, with x [tokens, in], A [r, in], B [out, r] and scale one number or [r].

        y [tokens, out] is the base's product. All have its dtype; the result has its dtype and shape.
        """
        return self.add_without_dropout(y, self.drop(x), a, b, scale)

    def drop(self, x: Tensor) -> Tensor:
        """dropout(x) in training, else x."""
        return self.dropout(x) if self.dropout is not None and self.training else x

    def add_without_dropout(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Scale) -> Tensor:
        """y + ((x A^T) * scale) B^T."""
        low_rank = self.mul(self.a_matmul(x, a), self.cast(scale, x.dtype))
        return self.sum(y, self.b_matmul(low_rank, b))


class ActivatedLowRank(ComposedLowRank):
    """y[t] + a[t] ((dropout(x[t]) A^T) * scale) B^T, where a[t] is 1 if the adapter acts on token t and 0 otherwise.

    a is the beginning of a parameter that all cells of a network share (see mindlora.network.invocation).
    """

    def __init__(self, dropout_rate: float):
        super().__init__(dropout_rate)
        self.active = None
        # An index would read the parameter's value before this step's write, since MindSpore takes it for a view.
        self.slice = ops.Slice()

    def read(self, active: Parameter) -> None:
        """Makes the path read ``active``, float32 [at least the tokens of any call]."""
        # Past nn.Cell, which would list the parameter among those of the network.
        self.__dict__["active"] = active

    def add_without_dropout(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Scale) -> Tensor:
        """y[t] + a[t] ((x[t] A^T) * scale) B^T."""
        active = self.slice(self.active, (0,), (x.shape[0],)).expand_dims(1)
        return super().add_without_dropout(y, x, a, b, active * scale)


class FusedLowRank(nn.Cell):
    """y + ((dropout(x) A^T) * scale) B^T by the operator lora_delta; dropout in training is nn.Dropout's."""

    def __init__(self, dropout_rate: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout_rate) if dropout_rate > 0 else None
        self.lora_delta = LoraDelta()
        self.cast = ops.Cast()

    def add_to(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Scale) -> Tensor:
        """y + ((dropout(x) A^T) * scale) B^T."""
        if self.dropout is not None and self.training:
            x = self.dropout(x)
        return self.lora_delta(y, x, a, b, self.cast(scale, mstype.float32))


class SeededDropoutLowRank(nn.Cell):
    """y + ((dropout(x) A^T) * scale) B^T in training; the backward recomputes the mask from a four-byte seed.

    Neither the mask nor the dropped x is kept for the backward.
    """

    def __init__(self, dropout_rate: float):
        super().__init__()
        self.draw_seed = SeedDraw()
        self.lora_delta = LoraDeltaWithDropout()
        self.cast = ops.Cast()
        self.rate = Tensor([dropout_rate], mstype.float32)

    def add_to(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Scale) -> Tensor:
        """y + ((dropout(x) A^T) * scale) B^T, with a new mask at each call."""
        return self.lora_delta(y, x, a, b, self.cast(scale, mstype.float32), self.draw_seed(), self.rate)


class LowRankByMode(nn.Cell):
    """One of the paths above in training, another at inference."""

    def __init__(self, in_training: nn.Cell, at_inference: nn.Cell):
        super().__init__()
        self.in_training = in_training
        self.at_inference = at_inference

    def add_to(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Scale) -> Tensor:
        """y + ((dropout(x) A^T) * scale) B^T."""
        if self.training:
            return self.in_training.add_to(y, x, a, b, scale)
        return self.at_inference.add_to(y, x, a, b, scale)


class OnePass(nn.Cell):
    """x W^T + bias + ((x A^T) * scale) B^T by the operator lora_linear, for a decode step or a short prompt."""

    def __init__(self, has_bias: bool, most_tokens: int):
        super().__init__()
        self.has_bias = has_bias
        self.most_tokens = most_tokens
        self.cast = ops.Cast()
        self.lora_linear = LoraLinearWithBias() if has_bias else LoraLinear()

    def takes(self, x: Tensor) -> bool:
        """Whether the cell is in inference, and x has few enough tokens, known at compile time."""
        return not self.training and functional.isconstant(x.shape[0]) and x.shape[0] <= self.most_tokens

    def linear(
        self, x: Tensor, weight: Parameter, bias: Optional[Parameter], a: Tensor, b: Tensor, scale: Scale
    ) -> Tensor:
        """x W^T + bias + ((x A^T) * scale) B^T as [tokens, out]; x, A and B have one dtype, that of the result."""
        weight, scale = self.cast(weight, x.dtype), self.cast(scale, mstype.float32)
        if self.has_bias:
            return self.lora_linear(x, weight, a, b, scale, self.cast(bias, x.dtype))
        return self.lora_linear(x, weight, a, b, scale)


class LowRankPicks(NamedTuple):
    """The result of pick_low_rank for a cell."""

    choice: Choice  # the path of lora_delta, and why
    low_rank: nn.Cell  # one of the classes above with a method add_to
    decode: Optional[OnePass]  # computes the whole cell for few tokens; None if they use low_rank too


def pick_low_rank(
    rank: int,
    dtype: mstype.Type,
    dropout_rate: float,
    has_bias: bool,
    strategy: Optional[Strategy],
    channels: Tuple[int, int],
) -> LowRankPicks:
    """Picks the operators of a cell's low-rank path by device, mode and built operators.

    A fused operator is picked where it is faster, which in training on a CPU is only the case for dropout. ``dtype`` is
    the products' dtype; ``strategy`` is None if the base's product is undivided; ``channels`` are (in, out).

    Raises:
        BackendError: MINDLORA_BACKEND names a path that is unknown or not available for this cell.
    """
    sharded = strategy is not None
    choice = choose_for_cell("lora_delta", rank, dtype, sharded, channels)
    one_pass = choose_for_cell("lora_linear", rank, dtype, sharded).path
    decode = None if one_pass == "composed" else OnePass(has_bias, _one_pass_tokens(one_pass))
    if choice.path == "ascend":
        return LowRankPicks(choice, FusedLowRank(dropout_rate), decode)
    if strategy is not None or get_context("device_target") != "CPU":
        return LowRankPicks(choice, ComposedLowRank(dropout_rate, strategy), decode)
    composed = ComposedLowRank()
    in_training = SeededDropoutLowRank(dropout_rate) if dropout_rate > 0 else composed
    at_inference = composed if choice.path == "composed" else FusedLowRank()
    if in_training is at_inference:
        return LowRankPicks(choice, composed, decode)
    return LowRankPicks(choice, LowRankByMode(in_training, at_inference), decode)


def _one_pass_tokens(path):
    """Returns the largest number of tokens for which one pass over W is fastest on a path of lora_linear."""
    adopted = measured() if path == "ascend" else None
    if adopted is None or adopted.one_pass_tokens is None:
        return _ONE_PASS_TOKENS[path]
    return adopted.one_pass_tokens


def activated_low_rank(dropout_rate: float) -> LowRankPicks:
    """Returns the picks for an adapter that acts from its invocation tokens on."""
    choice = Choice("lora_delta", "composed", "aLoRA acts on some tokens alone")
    return LowRankPicks(choice, ActivatedLowRank(dropout_rate), None)


def composed_low_rank(dropout_rate: float, reason: str) -> LowRankPicks:
    """Returns the picks for a kind of cell that the fused operators do not support, with this ``reason``."""
    return LowRankPicks(Choice("lora_delta", "composed", reason), ComposedLowRank(dropout_rate), None)
