"""GroupNorm and SiLU of a UNet computed again in the backward, so that what is between them is not kept."""

from typing import Dict, Iterator, Tuple

import numpy as np
from mindspore import Tensor, mint, nn

from mindlora.common.text import listed
from mindlora.errors import TargetError
from mindlora.nn.tree import replace_children

NORMS = (nn.GroupNorm, mint.nn.GroupNorm)
ACTIVATIONS = (nn.SiLU, mint.nn.SiLU)
# Cells of diffusers' blocks: the norm, and the activation that is called on what the norm returns.
PAIRS = (("norm1", "nonlinearity"), ("norm2", "nonlinearity"), ("conv_norm_out", "conv_act"))


class NormActivation(nn.Cell):
    """y = SiLU(GroupNorm(x)), recomputed in the backward: x is kept, and GroupNorm(x) is not.

    Args:
        norm (nn.Cell): The GroupNorm; its parameters keep their names.
        activation (nn.Cell): The SiLU.

    Inputs:
        - **x** (Tensor) - Shape [N, channels, ...].

    Outputs:
        Tensor of the shape and dtype of x.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """

    def __init__(self, norm: nn.Cell, activation: nn.Cell):
        super().__init__(auto_prefix=False)
        self.norm, self.activation = norm, activation
        self.recompute()

    def construct(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(x))


class AfterNorm(nn.Cell):
    """The activation of a block whose norms are NormActivations: it returns feature maps, activated already, as they
    are, and activates the embedding of the time, which has two axes.

    Args:
        activation (nn.Cell): The SiLU.
    """

    def __init__(self, activation: nn.Cell):
        super().__init__()
        self.activation = activation

    def construct(self, x: Tensor) -> Tensor:
        return self.activation(x) if x.ndim == 2 else x


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
        TargetError: There is no such pair; or the output on the probe has changed, because a block of this network
            calls its cells in another order.
    """
    before = _output(network, probe) if probe else None
    found, replacements = [], {}
    for path, norm, activation in _pairs(network):
        found.append(path)
        replacements[id(norm)] = NormActivation(norm, activation)
        replacements[id(activation)] = AfterNorm(activation)
    if not found:
        raise TargetError(
            "The network has no GroupNorm with a SiLU after it, under diffusers' names or in a SequentialCell, that is "
            "not recomputed already, so there is nothing to recompute."
        )
    replaced: Dict[int, nn.Cell] = {id(new): _replaced(new) for new in replacements.values()}
    replace_children(network, replacements)
    if probe and not np.array_equal(before, _output(network, probe)):
        replace_children(network, replaced)
        raise TargetError(
            f"With {listed(found)} recomputed, the network's output on the probe is another: its blocks do not call "
            "SiLU right after GroupNorm as diffusers' do. Nothing was changed: leave the recomputation out."
        )
    return tuple(found)


def _pairs(network) -> Iterator[Tuple[str, nn.Cell, nn.Cell]]:
    """Yields (path of the norm, norm, activation) for each pair of one cell of the network."""
    for path, parent in network.cells_and_names():
        children = parent.name_cells()
        names = list(children)
        beside = zip(names, names[1:]) if isinstance(parent, nn.SequentialCell) else PAIRS
        for norm, activation in beside:
            if isinstance(children.get(norm), NORMS) and isinstance(children.get(activation), ACTIVATIONS):
                yield f"{path}.{norm}".lstrip("."), children[norm], children[activation]


def _replaced(cell) -> nn.Cell:
    return cell.norm if isinstance(cell, NormActivation) else cell.activation


def _output(network, probe) -> np.ndarray:
    output = network(*probe)
    return (output[0] if isinstance(output, (tuple, list)) else output).asnumpy()
