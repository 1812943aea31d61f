"""Finds the train step, and the model, inside the cells that MindFormers and MindSpore wrap around them."""

from typing import Callable, Optional

from mindformers.core.loss.loss import CrossEntropyLoss
from mindspore import nn

from mindlora.plugin.graph.mcore_model import count_tokens, gpt_model_of


def base_of(train_network: nn.Cell) -> nn.Cell:
    """Returns the MindFormers model (with its PET wrapper) inside a train step or a tool cell.

    Cells for accumulation or pipelining may be around it. Raises TypeError if there is no MindFormers model inside.
    """
    network = innermost(train_network, lambda cell: hasattr(cell, "config"))
    if network is None:
        raise TypeError(f"{type(train_network).__name__} contains no MindFormers model.")
    return network


def train_step_of(train_network: nn.Cell) -> Optional[nn.Cell]:
    """Returns the train step of mindlora's in the network that mindspore.Model trains, or None if there is none."""
    return innermost(train_network, lambda cell: hasattr(cell, "last_record"))


def collect_state(train_network: nn.Cell) -> None:
    """Has the parameters of a train step hold its state, where it is one adapter's and its state is among others'."""
    step = train_step_of(train_network)
    if hasattr(step, "collect_state"):
        step.collect_state()


def distribute_state(train_network: nn.Cell) -> None:
    """Has such a train step go on with what its parameters hold."""
    step = train_step_of(train_network)
    if hasattr(step, "distribute_state"):
        step.distribute_state()


def check_loaded_base(network: nn.Cell) -> None:
    """Compares the base that adapter_path was trained on with the one that has been loaded, if both are there.

    Raises BaseMismatchError if they differ, and on_base_mismatch of pet_config is "error".
    """
    model = innermost(network, lambda cell: hasattr(cell, "check_loaded_base"))
    if model is not None:
        model.check_loaded_base()


def count_tokens_in_loss(train_network: nn.Cell) -> bool:
    """Makes a model of MindFormers return the sum of its losses and the number of counted tokens, not their quotient.

    The loss of the model is changed in place. Returns False if there is no model inside whose loss counts tokens.
    """
    mcore = gpt_model_of(train_network)
    if mcore is not None:
        return count_tokens(mcore)
    model = innermost(train_network, lambda cell: isinstance(getattr(cell, "loss", None), CrossEntropyLoss))
    if model is None:
        return False
    model.loss.calculate_per_token_loss = True
    return True


def innermost(cell: nn.Cell, accepts: Callable[[nn.Cell], bool]) -> Optional[nn.Cell]:
    """Returns the first cell that ``accepts`` takes, from outside in, or None."""
    while isinstance(cell, nn.Cell):
        if accepts(cell):
            return cell
        cell = getattr(cell, "network", None)
    return None
