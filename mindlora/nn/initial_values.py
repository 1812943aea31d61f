"""What A and B hold when a cell is made."""

import math
from typing import Sequence

import numpy as np
from mindspore import Tensor
from mindspore.common import dtype as mstype
from mindspore.common.initializer import HeUniform, Normal, initializer

from mindlora.config import LoraConfig
from mindlora.errors import ConfigError
from mindlora.numerics import initializers


def initial_values(config: LoraConfig, a_shape: Sequence[int], b_shape: Sequence[int]):
    """Returns the initial values of A and B, in these shapes: [r, in] and [out, r], or those of a convolution.

    A start that changes the base begins as the plain one: what it needs is loaded later (see initialize_adapters).
    """
    a, b = config.lora_a_init, config.lora_b_init
    dtype = getattr(mstype, config.param_init_type)
    if config.lora_init == "gaussian":
        a = Normal(1 / config.lora_rank)
    elif config.lora_init == "orthogonal":
        # From NumPy's own numbers, which mindspore.set_seed fixes.
        rng = np.random.default_rng(np.random.randint(2**31))
        a, b = (Tensor(half, dtype) for half in initializers.orthogonal(config.lora_rank, a_shape[1], b_shape[0], rng))
    return initial_value(a, list(a_shape), dtype, "lora_a_init"), initial_value(b, list(b_shape), dtype, "lora_b_init")


def initial_value(init, shape, dtype, field):
    """Returns the initial value of A or B, which stays unallocated where MindSpore delays initialization."""
    if init is None:
        init = "kaiming_uniform" if field == "lora_a_init" else "zeros"
    if isinstance(init, str) and init == "kaiming_uniform":
        init = HeUniform(negative_slope=math.sqrt(5))
    elif isinstance(init, Tensor):
        if list(init.shape) != shape:
            raise ConfigError(f"{field} is a Tensor of shape {list(init.shape)}: it must be {shape}.")
    try:
        return initializer(init, shape, dtype)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{field} is {init!r}, which is no MindSpore initializer: {error}") from error
