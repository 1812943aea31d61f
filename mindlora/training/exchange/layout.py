"""One flat vector in the place of many gradients: which part of it belongs to which parameter."""

from typing import AbstractSet, List, Sequence, Tuple

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype


class FlatLayout:
    """Where each parameter's gradient lies in the flat vector; those of ``last`` lie at its end.

    Args:
        parameters (Sequence[Parameter]): The trained parameters, in the order in which their gradients come.
        last (set of str): Names of the parameters to put at the end. Default: none.

    Attributes:
        names (list of str): The parameters' names in the order of the flat vector.
        shapes (list of tuple): Their shapes.
        offsets (list of int): Where each one begins.
        size (int): How many elements there are in all.
        last_size (int): How many of these belong to ``last``.
    """

    def __init__(self, parameters: Sequence[Parameter], last: AbstractSet[str] = frozenset()):
        self.order: List[int] = sorted(range(len(parameters)), key=lambda i: parameters[i].name in last)
        ordered = [parameters[i] for i in self.order]
        self.names = [parameter.name for parameter in ordered]
        self.shapes = [tuple(parameter.shape) for parameter in ordered]
        sizes = [parameter.size for parameter in ordered]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.size = sum(sizes)
        self.last_size = sum(size for name, size in zip(self.names, sizes) if name in last)

    def flatten(self) -> nn.Cell:
        """Returns a cell: a tuple of gradients, in the parameters' order -> the flat vector, float32 [size]."""
        return _Flatten(self)

    def unflatten(self) -> nn.Cell:
        """Returns a cell: the flat vector [size] -> a tuple of gradients in the parameters' order and shapes."""
        return _Unflatten(self)


class _Flatten(nn.Cell):
    def __init__(self, layout):
        super().__init__(auto_prefix=False)
        self.order = tuple(layout.order)

    def construct(self, gradients: Tuple[Tensor, ...]) -> Tensor:
        parts = ()
        for i in self.order:
            parts += (gradients[i].astype(mstype.float32).reshape(-1),)
        return ops.cat(parts)


class _Unflatten(nn.Cell):
    def __init__(self, layout):
        super().__init__(auto_prefix=False)
        ends = layout.offsets[1:] + [layout.size]
        # In the order in which the gradients came.
        self.places = tuple(place for _, place in sorted(zip(layout.order, zip(layout.offsets, ends, layout.shapes))))

    def construct(self, flat: Tensor) -> Tuple[Tensor, ...]:
        gradients = ()
        for start, end, shape in self.places:
            gradients += (flat[start:end].reshape(shape),)
        return gradients
