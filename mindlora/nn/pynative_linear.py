"""LoRAPyNativeLinear: LoRA on the linear cells of the models that MindFormers' PyNative Trainer runs.

MindFormers finds the cells that it shards by their class, and A and B by the names lora_a and lora_b. It builds a model
without values (on the device "meta"), makes room for them once the model is sharded, and then has each cell set its
own by reset_parameter.
"""

import functools
import sys
from types import MappingProxyType
from typing import Any, Optional, Tuple, Type

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from mindlora.config import LoraConfig
from mindlora.config.description import TIED_HEAD
from mindlora.config.variants.registry import LORA
from mindlora.errors import UnsupportedCellError
from mindlora.nn.cell import LoRACell, refuse_own_forward
from mindlora.nn.dense import LoRADense
from mindlora.nn.initial_values import initial_values
from mindlora.nn.linear_base import pynative_linear_types
from mindlora.ops.backend import Choice

# What MindFormers' Linear keeps, and its forward and the plans by which it is sharded read.
_OF_LINEAR = (
    "input_size",
    "output_size",
    "init_method",
    "skip_weight_param_allocation",
    "has_bias",
    "compute_dtype",
    "params_dtype",
    "weight",
    "bias_init",
    "bias",
    "matmul",
    "transpose",
    "cast",
    "add",
)


class LoRAPyNativeLinear(LoRADense):
    r"""A linear cell of a PyNative model with a low-rank update: y = x W^T + bias + ((dropout(x) A^T) * scale) B^T.

    The first two terms are MindFormers' own forward. The low-rank path is made of MindSpore's operators, of which
    PyNative computes the gradient, in the dtype in which the cell computes. Only from_cell creates such a cell, which
    is an instance of MindFormers' Linear too.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], lora_a [r, in_channels], lora_b [out_channels, r].

    Inputs:
        - **input_** (Tensor) - Shape [..., in_channels].
        - **weight** (Tensor) - A weight in the place of the cell's. Default: None.

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of input_.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    parameter_names = MappingProxyType({"A": "lora_a", "B": "lora_b"})
    lora_a: Parameter
    lora_b: Parameter

    @classmethod
    def from_cell(
        cls, cell: nn.Cell, config: LoraConfig, shared: Optional[Tuple[Parameter, ...]] = None
    ) -> "LoRAPyNativeLinear":
        cls.check(cell, config)
        return super(LoRAPyNativeLinear, _on(cls, *pynative_linear_types())).from_cell(cell, config, shared)

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return pynative_linear_types()

    @classmethod
    def check(cls, cell: nn.Cell, config: Optional[LoraConfig]) -> None:
        kind = type(cell).__name__
        if isinstance(cell, LoRACell):
            raise UnsupportedCellError(
                f"{kind} has an adapter already: adapters do not stack. Use a network without adapters."
            )
        refuse_own_forward(cell, pynative_linear_types(), "the adapter's cell")
        if cell.weight is None:
            raise UnsupportedCellError(TIED_HEAD)
        if config and config.variant is not LORA:
            raise UnsupportedCellError(
                f"{config.variant.field} is True, and MindFormers' PyNative models take plain LoRA alone. Remove it, "
                "or train in graph mode."
            )

    def _adopt(self, cell, config):
        for name in _OF_LINEAR:
            setattr(self, name, getattr(cell, name))
        self.in_channels, self.out_channels = cell.input_size, cell.output_size
        self.dtype = getattr(ms, config.compute_dtype) if config.compute_dtype else cell.compute_dtype
        self.choice = Choice("lora_delta", "composed", "PyNative computes the gradients of MindSpore's operators alone")
        self.dropout = nn.Dropout(p=self.dropout_rate) if self.dropout_rate > 0 else None
        self.config = config

    def _add_adapter(self, config, shared):
        if not self.weight.is_meta:
            LoRACell._add_adapter(self, config, shared)
            return
        dtype = getattr(ms, config.param_init_type)
        shapes = self.part_shapes(self, config.lora_rank)
        with ms.DeviceCtx("meta"):
            self._add_parts({part: mint.empty(shape, dtype=dtype) for part, shape in shapes.items()})

    def reset_parameter(self) -> None:
        """Sets all parameters to their initial values, where MindFormers has made room for them."""
        self.reset_linear()
        a, b = initial_values(self.config, list(self.lora_a.shape), list(self.lora_b.shape))
        _set(self.lora_a, a)
        _set(self.lora_b, b)

    def construct(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        # Both are slices where the cell is sharded, as MindFormers' forward takes its weight.
        a, b = (self.cast(_local(parameter), self.dtype) for parameter in (self.lora_a, self.lora_b))
        x = self.cast(input_, self.dtype)
        if self.dropout is not None and self.training:
            x = self.dropout(x)
        low_rank = mint.matmul(x, mint.transpose(a, 1, 0)) * self.scale
        delta = mint.matmul(low_rank, mint.transpose(b, 1, 0))
        return self.linear(input_, weight) + self.cast(delta, input_.dtype)

    def pair(self) -> Tuple[np.ndarray, np.ndarray]:
        return self.lora_a.asnumpy().copy(), self.lora_b.asnumpy().copy()

    def linear(self, input_: Tensor, weight: Optional[Tensor]) -> Tensor:
        """x W^T + bias, by MindFormers' Linear."""
        raise NotImplementedError

    def reset_linear(self) -> None:
        """Sets W and bias to their initial values, by MindFormers' Linear."""
        raise NotImplementedError


@functools.lru_cache(maxsize=None)
def _on(kind: Type[LoRAPyNativeLinear], linear: type) -> Type[LoRAPyNativeLinear]:
    """Returns the class that is both, whose forward and reset of the base are MindFormers'."""
    members = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "linear": linear.construct,
        "reset_linear": linear.reset_parameter,
    }
    return type(kind.__name__, (kind, linear), members)


def _local(parameter: Parameter) -> Tensor:
    """Returns the slice of a parameter that is on this device: all of it, unless hyper_parallel has sharded it."""
    return parameter.to_local() if _is_sharded(parameter) else parameter


def _set(parameter: Parameter, value: Any) -> None:
    """Copies a whole initial value into a parameter, of which this device may have a slice."""
    value = value.init_data() if value.has_init else value
    if _is_sharded(parameter):
        sharding = sys.modules["hyper_parallel.core.dtensor.dtensor"]
        value = sharding.distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(ops.cast(value, parameter.dtype))


def _is_sharded(parameter: Parameter) -> bool:
    return hasattr(parameter, "placements")
