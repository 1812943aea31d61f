"""What every exchange of gradients is, the flat vector that it sums, and the two plain kinds: dense and float16."""

from typing import Optional, Sequence, Tuple

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.training.exchange.ranks import FLOAT16, Ranks
from mindlora.training.step.rate_factor import TRANSIENT

# float32 holds every whole number below 2 ** 24 exactly; a sum of such numbers that stays below it is exact too.
WORD_BITS = 24
# Each rank has a residual of its own, so it is not part of the state that rank 0 saves.
RESIDUAL_NAME = f"{TRANSIENT}gradient_exchange_residual"
# A sum of at most 2 ** 15 leaves room for the rounding of every addend below float16's largest number, 65504.
_LARGEST_EXPONENT = 14


class FlatLayout:
    """Where each parameter's gradient lies in the flat vector: one after the other, in the order of ``parameters``.

    ``flatten`` makes the vector, float32 [size], of a tuple of gradients; ``unflatten`` makes of it float32 gradients
    in the shapes of the parameters. ``offsets`` says where each begins in it.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        self.names = [parameter.name for parameter in parameters]
        self.sizes = [parameter.size for parameter in parameters]
        self.offsets = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.size = sum(self.sizes)
        self.flatten = _Flatten()
        self.unflatten = _Unflatten(self, [tuple(parameter.shape) for parameter in parameters])


class _Flatten(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, gradients: Tuple[Tensor, ...]) -> Tensor:
        parts = ()
        for gradient in gradients:
            parts += (gradient.astype(mstype.float32).reshape(-1),)
        return ops.cat(parts)


class _Unflatten(nn.Cell):
    def __init__(self, layout, shapes):
        super().__init__(auto_prefix=False)
        self.places = tuple(zip(layout.offsets, layout.sizes, shapes))

    def construct(self, flat: Tensor) -> Tuple[Tensor, ...]:
        gradients = ()
        for start, size, shape in self.places:
            gradients += (flat[start : start + size].reshape(shape),)
        return gradients


class Exchange(nn.Cell):
    """Sums a flat vector over the ranks of a group.

    The train step calls ``reduce`` inside its graph, and ``keep`` only if the step is done and not skipped.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.nothing = Tensor([0.0], mstype.float32)

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        """Sums this rank's gradients, float32 [size], over the ranks, with the same bits on each; it changes nothing.

        Returns the sum, and what this rank has not sent of its gradients, for keep.
        """
        raise NotImplementedError

    def keep(self, residual: Tensor) -> Tensor:
        """Keeps the residual, to be sent in later steps, and returns it."""
        return residual

    @property
    def bytes_per_step(self) -> int:
        """How many bytes this rank sends in a step."""
        raise NotImplementedError

    @property
    def bytes_between_machines(self) -> int:
        """How many of the bytes of a step leave this rank's machine."""
        return self.bytes_per_step

    def unsent(self) -> Optional[Parameter]:
        """Returns the parameter with what this rank has not sent yet, float32; None if the exchange sends all."""
        return None


class DenseExchange(Exchange):
    """Sums the whole vector of ``size`` elements in one AllReduce, and not each parameter in one of its own."""

    def __init__(self, size: int, ranks: Ranks):
        super().__init__()
        self.size = size
        self.ranks = ranks
        self.all_reduce = ranks.all_reduce()

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        return self.all_reduce(flat), self.nothing

    @property
    def bytes_per_step(self) -> int:
        return self.ranks.bytes_to_sum(self.size)


class Float16Exchange(Exchange):
    """Sums the vector of ``size`` elements in float16: sum = AllReduce(float16(s flat)) / s.

    s is a power of two, the same on all ranks. It follows from m, the sum over the ranks of their largest absolute
    values, which is a first AllReduce of one number: s m is in [2 ** 14, 2 ** 15). No partial sum of any element
    exceeds m, so neither the cast nor the sum can overflow, and small gradients do not vanish. Where the gradient of a
    rank is not finite, the sum is not finite on any rank.
    """

    def __init__(self, size: int, ranks: Ranks):
        super().__init__()
        self.size = size
        self.ranks = ranks
        self.all_reduce = ranks.all_reduce()
        self.all_reduce_largest = ranks.all_reduce()
        self.smallest = Tensor(2.0**-100, mstype.float32)

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        largest = self.all_reduce_largest(ops.abs(flat).max().reshape(1))
        exponent = ops.floor(ops.log2(ops.maximum(largest, self.smallest)))
        scale = ops.pow(2.0, _LARGEST_EXPONENT - exponent)
        return self.all_reduce((flat * scale).astype(mstype.float16)).astype(mstype.float32) / scale, self.nothing

    @property
    def bytes_per_step(self) -> int:
        return self.ranks.bytes_to_sum(self.size, FLOAT16) + self.ranks.bytes_to_sum(1)
