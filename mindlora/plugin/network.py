"""Finds the model inside the cells that MindFormers and MindSpore wrap around it for training."""

from mindspore import nn


def base_of(train_network: nn.Cell) -> nn.Cell:
    """Returns the MindFormers model (with its PET wrapper) inside a train step or a tool cell.

    Args:
        train_network (nn.Cell): The network that mindspore.Model trains, which may also hold cells for accumulation
            or pipelining.

    Raises:
        TypeError: There is no MindFormers model inside.
    """
    network = train_network
    while not hasattr(network, "config"):
        inner = getattr(network, "network", None)
        if not isinstance(inner, nn.Cell):
            raise TypeError(f"{type(train_network).__name__} contains no MindFormers model.")
        network = inner
    return network
