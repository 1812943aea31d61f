"""One flat vector in the place of many gradients: which part of it belongs to which parameter."""

from typing import AbstractSet, List, Sequence, Tuple

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

Span = Tuple[int, int]


class FlatLayout:
    """Where each parameter's gradient lies in the flat vector: one after the other, in the parameters' order.

    Args:
        parameters (Sequence[Parameter]): The trained parameters, in the order in which their gradients come.

    Attributes:
        names (list of str): The parameters' names.
        sizes (list of int): How many elements each has.
        offsets (list of int): Where each begins in the flat vector.
        size (int): How many elements there are in all.
        flatten (Cell): A tuple of gradients -> the flat vector, float32 [size].
        unflatten (Cell): The flat vector -> a tuple of float32 gradients in the shapes of the parameters.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        self.names = [parameter.name for parameter in parameters]
        self.sizes = [parameter.size for parameter in parameters]
        self.offsets = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.size = sum(self.sizes)
        self.flatten = _Flatten()
        self.unflatten = _Unflatten(self, [tuple(parameter.shape) for parameter in parameters])

    def spans(self, names: AbstractSet[str]) -> List[Span]:
        """Returns the parts (start, end) of the flat vector that belong to ``names``; neighbours are joined."""
        spans: List[Span] = []
        for name, start, size in zip(self.names, self.offsets, self.sizes):
            if name in names:
                begin = spans.pop()[0] if spans and spans[-1][1] == start else start
                spans.append((begin, start + size))
        return spans


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
