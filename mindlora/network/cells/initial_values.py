"""The initial values of A and B when a cell is created."""

import math
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
from mindspore import Tensor
from mindspore.common import dtype as mstype
from mindspore.common.initializer import HeUniform, Normal, Uniform, initializer

from mindlora.core.errors import ConfigError
from mindlora.core.numerics import initializers
from mindlora.models.lora_config import LoraConfig


class InitialDraws:
    """Within, initial values are drawn from ``seed``, and after it as if none had been; None changes nothing.

    Entered again, it goes on where it was: cells that are made one by one draw as those that are made together.
    """

    def __init__(self, seed: Optional[int]):
        # MindSpore's initializers take their seeds from NumPy's global generator.
        self._state = None if seed is None else np.random.RandomState(seed).get_state()
        self._outside: Any = None

    def __enter__(self) -> None:
        if self._state is not None:
            self._outside = np.random.get_state()
            np.random.set_state(self._state)

    def __exit__(self, *_: Any) -> None:
        if self._state is not None:
            self._state = np.random.get_state()
            np.random.set_state(self._outside)


def initial_values(config: LoraConfig, a_shape: Sequence[int], b_shape: Sequence[int]) -> Tuple[Tensor, Tensor]:
    """Returns the initial values of A and B, of dtype param_init_type.

    For an initializer that changes the base, these are the default values, because the weight that it needs is loaded
    later; initialize_adapters then applies it.

    Raises:
        ConfigError: lora_a_init or lora_b_init is not an initializer, or a Tensor of another shape.
    """
    a = config.lora_a_init
    b = config.lora_b_init
    dtype = getattr(mstype, config.param_init_type)
    if config.lora_init == "gaussian":
        a = Normal(1 / config.lora_rank)
    elif config.lora_init == "orthogonal":
        # Seeded from NumPy's global generator, which mindspore.set_seed sets.
        rng = np.random.default_rng(np.random.randint(2**31))
        a, b = (Tensor(half, dtype) for half in initializers.orthogonal(config.lora_rank, a_shape[1], b_shape[0], rng))
    return initial_value(a, list(a_shape), dtype, "lora_a_init"), initial_value(b, list(b_shape), dtype, "lora_b_init")


def initial_value(init: Any, shape: List[int], dtype: mstype.Type, field: str) -> Tensor:
    """Returns the initial value of A or B, which stays unallocated while MindSpore delays initialization.

    ``init`` is None for the default of ``field``: kaiming_uniform for lora_a_init, zeros for lora_b_init.
    """
    if init is None:
        init = "kaiming_uniform" if field == "lora_a_init" else "zeros"
    if isinstance(init, str) and init == "kaiming_uniform":
        # MindSpore would count the rank of stacked experts, [experts, r, in], among the inputs.
        init = HeUniform(negative_slope=math.sqrt(5)) if len(shape) != 3 else Uniform(1 / math.sqrt(shape[2]))
    elif isinstance(init, Tensor) and list(init.shape) != shape:
        raise ConfigError(f"{field} is a Tensor of shape {list(init.shape)}: it must be {shape}.")
    try:
        return initializer(init, shape, dtype)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{field} is {init!r}, which is not a MindSpore initializer: use a name such as 'normal', an Initializer, "
            f"a Tensor or a number. MindSpore says: {error}"
        ) from error
