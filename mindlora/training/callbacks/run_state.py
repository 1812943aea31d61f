"""What a callback puts back to undo steps: the adapter and the optimizer, copied on the host."""

from typing import Dict, List

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindlora.training.model.network import collect_state, distribute_state
from mindlora.training.resume.training_state import state_parameters


def copy_state(step: nn.Cell) -> Dict[str, np.ndarray]:
    """Returns copies of what a train step, mindlora's, changes: name -> array."""
    collect_state(step)
    return {parameter.name: parameter.asnumpy().copy() for parameter in _state(step)}


def put_back(step: nn.Cell, arrays: Dict[str, np.ndarray]) -> None:
    """Gives a train step the state that copy_state returned. Its rate factors must be set again after that."""
    for parameter in _state(step):
        # Not set_data: the graph would keep the moments, which it uses only in the branch of steps that count.
        ops.assign(parameter, Tensor(arrays[parameter.name], parameter.dtype))
    distribute_state(step)
    unsent = step.exchange.unsent() if step.exchange is not None else None
    if unsent is not None:
        # What this rank has not sent yet is from the steps that are undone. -0.0, since x + -0.0 is x for every x.
        ops.assign(unsent, Tensor(np.full(unsent.shape, -0.0, np.float32)))


def _state(step: nn.Cell) -> List[Parameter]:
    """Returns the parameters of the adapter and the optimizer; a loss scale is not part of what was good."""
    manager = step.loss_scaling_manager
    scale = {step.scale_sense.name} if isinstance(step.scale_sense, Parameter) else set()
    scale.update(p.name for p in (manager.get_parameters() if manager is not None else ()))
    trained = [p for p in step.get_parameters() if p.requires_grad]
    by_name: Dict[str, Parameter] = {p.name: p for p in [*trained, *state_parameters(step)]}
    return [parameter for name, parameter in by_name.items() if name not in scale]
