"""GroupNorm and SiLU of a UNet computed again in the backward, so that what is between them is not kept."""

from typing import Dict, Iterable, Iterator, Tuple, Type

import numpy as np
from mindspore import Tensor, mint, nn

from mindlora.core.errors import TargetError
from mindlora.core.text import listed
from mindlora.network.tree import replace_children

NORMS = (nn.GroupNorm, mint.nn.GroupNorm)
ACTIVATIONS = (nn.SiLU, mint.nn.SiLU)
# Cells of diffusers' blocks: the norm, and the activation that is called on what the norm returns.
PAIRS = (("norm1", "nonlinearity"), ("norm2", "nonlinearity"), ("conv_norm_out", "conv_act"))


class NormActivation(nn.Cell):
    """y = SiLU(GroupNorm(x)), recomputed in the backward: x [N, channels, ...] is kept, and GroupNorm(x) is not.

    The norm's parameters keep their names.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """

    def __init__(self, norm: nn.Cell, activation: nn.Cell):
        super().__init__(auto_prefix=False)
        self.norm = norm
        self.activation = activation
        self.recompute()

    def construct(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(x))


class Activated(nn.Cell):
    """What stands in the SiLU's place behind a NormActivation in a SequentialCell: it returns what is activated."""

    def __init__(self, activation: nn.Cell):
        super().__init__()
        self.activation = activation

    def construct(self, x: Tensor) -> Tensor:
        return x


class AfterNorm(Activated):
    """The same in a block, which also activates the embedding of the time: that has two axes, feature maps have four.

    Raises ValueError if the input has another number of axes, as in blocks for videos.
    """

    def construct(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return self.activation(x)
        if x.ndim != 4:
            raise ValueError(
                "recompute_norm_activation is for blocks of pictures: feature maps of 4 axes and an embedding of the "
                f"time of 2, and this input has {x.ndim}. Leave it out for this network."
            )
        return x


def recompute_norm_activation(network: nn.Cell, *probe: Tensor) -> Tuple[str, ...]:
    """Makes each GroupNorm with the SiLU after it one cell that is recomputed in the backward, in place.

    They are found by the names that they have in diffusers' blocks (norm1 and norm2 with nonlinearity, conv_norm_out
    with conv_act), and side by side in a SequentialCell. Outputs, gradients and names of parameters stay what they are.
    For the backward, each pair keeps one feature map less, which is computed a second time.

    Args:
        network (nn.Cell): A network such as a UNet, before or after apply_lora.
        *probe (Tensor): Inputs of the network. If they are given, its output (the first, if it has several) must stay
            the same to the last bit, or everything is undone. Default: none, no comparison.

    Returns:
        tuple of str, the paths of the norms.

    Raises:
        TargetError: There is no such pair; a SiLU is used elsewhere too; or the output on the probe has changed,
            because a block of this network calls its cells in another order.
    """
    before = _output(network, probe) if probe else None
    pairs = list(_pairs(network))
    norms = []
    replacements = {}
    for path, norm, activation, after in pairs:
        norms.append(path)
        replacements[id(norm)] = NormActivation(norm, activation)
        replacements[id(activation)] = after(activation)
    _check_not_shared(network, {id(activation): after for _, _, activation, after in pairs})
    if not norms:
        raise TargetError(
            "The network has no GroupNorm with a SiLU after it, under diffusers' names or in a SequentialCell, that is "
            "not recomputed already. Leave recompute_norm_activation out."
        )
    replaced: Dict[int, nn.Cell] = {id(new): _replaced(new) for new in replacements.values()}
    replace_children(network, replacements)
    if probe and not np.array_equal(before, _output(network, probe)):
        replace_children(network, replaced)
        raise TargetError(
            f"With {listed(norms)} recomputed, the network's output on the probe is another: its blocks do not call "
            "SiLU right after GroupNorm as diffusers' do. Nothing was changed: leave the recomputation out."
        )
    return tuple(norms)


def _pairs(network) -> Iterator[Tuple[str, nn.Cell, nn.Cell, Type[Activated]]]:
    """Yields (path of the norm, norm, activation, what takes its place) for each pair of one cell of the network."""
    for path, parent in network.cells_and_names():
        children = parent._cells
        for norm, activation in _places(parent):
            if isinstance(children.get(norm), NORMS) and isinstance(children.get(activation), ACTIVATIONS):
                yield f"{path}.{norm}".lstrip("."), children[norm], children[activation], _after(parent)


def _places(parent) -> Iterable[Tuple[str, str]]:
    """Returns the names of norm and activation in a cell."""
    # Not name_cells(), which leaves out a cell that is there a second time.
    names = list(parent._cells)
    return zip(names, names[1:]) if isinstance(parent, nn.SequentialCell) else PAIRS


def _after(parent) -> Type[Activated]:
    return Activated if isinstance(parent, nn.SequentialCell) else AfterNorm


def _check_not_shared(network, activations: Dict[int, Type[Activated]]) -> None:
    """Raises TargetError if one of the activations is also where no norm is before it."""
    for path, parent in network.cells_and_names():
        behind = {after for norm, after in _places(parent) if isinstance(parent._cells.get(norm), NORMS)}
        for name, child in parent._cells.items():
            expected = activations.get(id(child))
            if expected is not None and (name not in behind or _after(parent) is not expected):
                raise TargetError(
                    f"{f'{path}.{name}'.lstrip('.')} is one cell with the SiLU behind a GroupNorm, and has none before "
                    "it, so that it cannot be recomputed with one. Give each its own SiLU. Nothing was changed."
                )


def _replaced(cell) -> nn.Cell:
    return cell.norm if isinstance(cell, NormActivation) else cell.activation


def _output(network, probe) -> np.ndarray:
    output = network(*probe)
    return (output[0] if isinstance(output, (tuple, list)) else output).asnumpy()
