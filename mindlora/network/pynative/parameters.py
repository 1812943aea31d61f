"""Parameters of the models that MindFormers' PyNative Trainer runs, of which a device may hold a slice."""

import sys
from typing import Any

from mindspore import Parameter, Tensor, ops


def is_sharded(parameter: Parameter) -> bool:
    """Returns whether hyper_parallel has sharded a parameter."""
    return hasattr(parameter, "placements")


def local(parameter: Parameter) -> Tensor:
    """Returns the slice of a parameter that is on this device: all of it, unless it is sharded."""
    return parameter.to_local() if is_sharded(parameter) else parameter


def set_value(parameter: Parameter, value: Any) -> None:
    """Copies a whole value, which an initializer may have yet to make, into a parameter."""
    value = value.init_data() if value.has_init else value
    if is_sharded(parameter):
        sharding = sys.modules["hyper_parallel.core.dtensor.dtensor"]
        value = sharding.distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(ops.cast(value, parameter.dtype))
