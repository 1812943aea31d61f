"""Finds the train step, and the model, inside the cells that MindFormers and MindSpore wrap around them."""

from typing import Callable, Optional

from mindformers.core.loss.loss import CrossEntropyLoss
from mindspore import nn

from mindlora.training.model.mcore_model import count_tokens, gpt_model_of, is_gpt_model

# Attributes in which a cell keeps the network that it wraps. _VirtualDatasetCell, which MindFormers puts around the
# model in the semi-automatic parallel modes, uses the second.
_WRAPPED = ("network", "_backbone")


def base_of(train_network: nn.Cell) -> nn.Cell:
    """Returns the MindFormers model (with its PET wrapper) inside a train step or a tool cell.

    Cells for accumulation or pipelining may be around it. Raises TypeError if there is no MindFormers model inside.
    """
    network = innermost(train_network, lambda cell: hasattr(cell, "config"))
    if network is None:
        raise TypeError(f"{type(train_network).__name__} contains no MindFormers model.")
    return network


def evaluated_model(train_network: nn.Cell) -> nn.Cell:
    """Returns the model inside a train step for evaluation: it returns (logits [batch, N, vocabulary], tokens, mask).

    Under the PyNative Trainer, the result is a cell around the model (EvaluatedModel).
    """
    evaluated: Optional[nn.Cell] = getattr(train_step_of(train_network), "evaluated", None)
    return evaluated if evaluated is not None else base_of(train_network)


def train_step_of(train_network: nn.Cell) -> Optional[nn.Cell]:
    """Returns mindlora's train step in the network that mindspore.Model trains, or None if there is none."""
    return innermost(train_network, lambda cell: hasattr(cell, "last_record"))


def collect_state(train_network: nn.Cell) -> None:
    """Writes one adapter's state into the parameters of its train step, if the step keeps it among other adapters'."""
    step = train_step_of(train_network)
    if hasattr(step, "collect_state"):
        step.collect_state()


def distribute_state(train_network: nn.Cell) -> None:
    """Reads one adapter's state back from the parameters of its train step: the inverse of collect_state."""
    step = train_step_of(train_network)
    if hasattr(step, "distribute_state"):
        step.distribute_state()


def losses_in_sum(train_network: nn.Cell) -> int:
    """Returns the number of losses whose sum is a step's loss: one for each micro-batch that MindFormers makes.

    MindFormers adds up their means in a pipeline, and in the semi-automatic modes when it accumulates or interleaves.
    With calculate_per_token_loss, it divides the sum over all tokens once.
    """
    step = innermost(train_network, lambda cell: hasattr(cell, "calculate_per_token_loss"))
    if step is not None and step.calculate_per_token_loss:
        return 1
    count = 1
    cell: Optional[nn.Cell] = train_network
    while cell is not None:
        count *= getattr(cell, "micro_size", 1) * getattr(cell, "interleave_num", 1)
        cell = wrapped_in(cell)
    return count


def check_loaded_base(network: nn.Cell) -> None:
    """Compares the base that adapter_path was trained on with the loaded base, if both exist.

    Raises BaseMismatchError if they differ, and on_base_mismatch of pet_config is "error".
    """
    model = innermost(network, lambda cell: hasattr(cell, "check_loaded_base"))
    if model is not None:
        model.check_loaded_base()


def count_tokens_in_loss(train_network: nn.Cell) -> bool:
    """Makes a MindFormers model return the sum of its losses and the number of counted tokens, not their quotient.

    Changes the model's loss in place. Returns False if no model inside has a loss that counts tokens.
    """
    model = with_loss(train_network)
    if model is None:
        return False
    if is_gpt_model(model):
        return count_tokens(model)
    model.loss.calculate_per_token_loss = True
    return True


def with_loss(network: nn.Cell) -> Optional[nn.Cell]:
    """Returns the cell inside a network whose ``loss`` gets the logits of all tokens in training, or None.

    The cell is a legacy model whose loss is MindFormers' CrossEntropyLoss, or the GPTModel of an mcore model. The loss
    is called with logits float32 [n, vocabulary], labels int32 [n] and a mask float32 of n elements.
    """
    mcore = gpt_model_of(network)
    if mcore is not None:
        return mcore
    return innermost(network, lambda cell: isinstance(getattr(cell, "loss", None), CrossEntropyLoss))


def innermost(cell: nn.Cell, accepts: Callable[[nn.Cell], bool]) -> Optional[nn.Cell]:
    """Returns the outermost nested cell that ``accepts`` approves, or None."""
    wrapped: Optional[nn.Cell] = cell
    while wrapped is not None and not accepts(wrapped):
        wrapped = wrapped_in(wrapped)
    return wrapped


def wrapped_in(cell: nn.Cell) -> Optional[nn.Cell]:
    """Returns the network that a cell of MindFormers or MindSpore wraps, or None if it wraps none."""
    for name in _WRAPPED:
        network = getattr(cell, name, None)
        if isinstance(network, nn.Cell):
            return network
    return None
