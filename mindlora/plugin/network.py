"""Finds the model inside what MindFormers and MindSpore wrap around it to train."""

from mindspore import nn


def base_of(train_network: nn.Cell) -> nn.Cell:
    """Returns the MindFormers model (with its PET wrapper) inside a train step or a tool cell.

    Args:
        train_network (nn.Cell): What Model trains: a train step around, perhaps, cells for accumulation or pipelining.
    """
    network = train_network
    while not hasattr(network, "config"):
        inner = getattr(network, "network", None)
        if not isinstance(inner, nn.Cell):
            raise TypeError(f"{type(train_network).__name__} holds no MindFormers model.")
        network = inner
    return network
