"""LoRAPyNativeLinear: LoRA on the linear cells of the models that MindFormers' PyNative Trainer runs.

MindFormers finds the cells that it shards by their class, and A and B by the names lora_a and lora_b. It builds a model
without values (on the device "meta"), allocates them once the model is sharded, and then calls reset_parameter
of each cell to set its own.
"""

import functools
import operator
import sys
from types import MappingProxyType
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Type

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.numerics import initializers
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.initializers import InitialPair
from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.registry import PARAMETERS, PYNATIVE_INITIAL, PYNATIVE_PARAMETERS, PYNATIVE_STACKED
from mindlora.models.variants.variant import SHARDED
from mindlora.network.cells.cell import InitialDraws, LoRACell, refuse_unsupported
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.linear_base import LinearBase, check_mindformers_linear, pynative_linear_types
from mindlora.network.cells.low_rank import LowRankPicks, composed_low_rank
from mindlora.network.cells.stacked import StackedLoRAParallelLinear
from mindlora.network.tensors import fill, to_array
from mindlora.network.variants.adalora import AdaLoRADense
from mindlora.network.variants.dora import DoRADense
from mindlora.network.variants.miss import MiSSDense
from mindlora.network.variants.vera import VeRADense

# Parameters of the PyNative Trainer's models, of which a device may hold a slice.


def is_sharded(parameter: Parameter) -> bool:
    """Returns whether hyper_parallel has sharded a parameter, even if into one part."""
    return hasattr(parameter, "placements")


def is_divided(parameter: Parameter) -> bool:
    """Returns whether a device holds only a part of a parameter."""
    placements = getattr(parameter, "placements", ())
    return any(kind.is_shard() and parameter.device_mesh.size(axis) > 1 for axis, kind in enumerate(placements))


def local(parameter: Tensor) -> Tensor:
    """Returns this device's slice of a parameter or gradient: all of it, unless it is sharded."""
    return parameter.to_local() if is_sharded(parameter) else parameter


def set_value(parameter: Parameter, value: Any) -> None:
    """Copies a whole value, which an initializer may have yet to draw, into a parameter."""
    value = value.init_data() if value.has_init else value
    if is_sharded(parameter):
        sharding = sys.modules["hyper_parallel.core.dtensor.dtensor"]
        value = sharding.distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(ops.cast(value, parameter.dtype))


# Attributes of MindFormers' Linear, besides weight and bias, that its forward and its sharding plans read.
_OF_LINEAR = (
    "input_size",
    "output_size",
    "init_method",
    "skip_weight_param_allocation",
    "has_bias",
    "compute_dtype",
    "params_dtype",
    "bias_init",
    "matmul",
    "transpose",
    "cast",
    "add",
)


def names_of(*parts: str) -> Mapping[str, str]:
    """Returns part -> name of its parameter in a PyNative model."""
    return MappingProxyType({part: PYNATIVE_PARAMETERS[part] for part in parts})


class PyNativeBase(LinearBase):
    """The base of MindFormers' Linear, which computes like other linear cells unless it is divided."""

    types = staticmethod(pynative_linear_types)

    @classmethod
    def check(cls, cell: nn.Cell) -> None:
        check_mindformers_linear(cell, pynative_linear_types())

    @classmethod
    def traits(cls, cell: nn.Cell) -> Tuple[str, ...]:
        # MindFormers shards later, if at all.
        return ()

    @staticmethod
    def operators(cell: nn.Cell) -> Tuple[Any, Any, mstype.Type]:
        return ops.MatMul(transpose_b=True), ops.Add() if cell.has_bias else None, cell.compute_dtype

    def pick_low_rank(self, rank: int, dropout_rate: float) -> LowRankPicks:
        # MindFormers shards later. Even without sharding, fused operators saved no time (docs/pynative_details.md).
        return composed_low_rank(dropout_rate, "a cell that may be sharded takes MindSpore's operators alone")


class AllocatedLater(LoRACell):
    """Mixin of the adapters on cells that MindFormers builds without values; it comes before the class of the adapter.

    Parts that exist already get their initial values in place.
    """

    def _add_unallocated_parts(self, config):
        dtype = getattr(ms, config.param_init_type)
        shapes = self.part_shapes(self, config.lora_rank)
        with ms.DeviceCtx("meta"):
            self._add_parts({part: mint.empty(shapes[part], dtype=dtype) for part in self.parameter_names})

    def _add_parts(self, values):
        there = self.parts()
        super()._add_parts({part: value for part, value in values.items() if part not in there})
        for part in values.keys() & there.keys():
            set_value(there[part], values[part])


class _OnPyNativeLinear(AllocatedLater, LoRADense):
    """Mixin of the adapters on MindFormers' Linear; it comes before the class of the adapter.

    The names of all parts end like those that MindFormers recognizes as an adapter's. If lora_init changes the base,
    the initial pair is in two more parameters, initial_lora_a [r, in_channels] and initial_lora_b [out_channels, r],
    which do not train: MindFormers' checkpoints hold them with the changed base. They are zero until the change.
    """

    base_kind = PyNativeBase
    # MindFormers' Linear, and the class that on_linear has combined with it.
    linear_type: Type[nn.Cell]
    adapter_type: Type[nn.Cell]
    # The fingerprint of the base before the change, which is stored beside a checkpoint and not in it.
    _fingerprint: Optional[dict] = None
    # Shared by the cells of a model with pet_config.seed.
    draws = InitialDraws(None)

    @classmethod
    def from_cell(
        cls, cell: nn.Cell, config: LoraConfig, shared: Optional[Tuple[Parameter, ...]] = None
    ) -> "_OnPyNativeLinear":
        cls.check(cell, config)
        return super(_OnPyNativeLinear, on_linear(cls, *pynative_linear_types())).from_cell(cell, config, shared)

    def _adopt(self, cell, config):
        super()._adopt(cell, config)
        adopt_settings(self, cell)

    def _add_adapter(self, config, shared):
        if self.weight.is_meta:
            self._add_unallocated_parts(config)
            with ms.DeviceCtx("meta"):
                self._add_initial_pair(config)
        else:
            super()._add_adapter(config, shared)
            self._add_initial_pair(config)

    def _add_initial_pair(self, config):
        if not initializers.changes_base(config.lora_init):
            return
        prefix = self.weight.name.rpartition(".")[0]
        for part, name in PYNATIVE_INITIAL.items():
            like = self.parts()[part]
            setattr(self, name, Parameter(mint.zeros(like.shape, dtype=like.dtype), name=name, requires_grad=False))
            getattr(self, name).name = f"{prefix}.{name}" if prefix else name

    @property
    def initial_pair(self) -> Optional[InitialPair]:
        """The initial A and B whose product was subtracted from the base; None if nothing was subtracted."""
        if not initializers.changes_base(self.lora_init):
            return None
        a, b = (to_array(getattr(self, name)) for name in PYNATIVE_INITIAL.values())
        return InitialPair(a, b, self._fingerprint) if b.any() else None

    @initial_pair.setter
    def initial_pair(self, pair: InitialPair) -> None:
        for name, array in zip(PYNATIVE_INITIAL.values(), (pair.a, pair.b)):
            parameter = getattr(self, name)
            parameter.set_data(Tensor(array, parameter.dtype))
        self._fingerprint = pair.fingerprint

    def lora_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the parameters of parts(), and those of the initial pair."""
        initial = [getattr(self, name) for name in PYNATIVE_INITIAL.values() if hasattr(self, name)]
        return *super().lora_parameters(), *initial

    def reset_parameter(self) -> None:
        """Sets all parameters to their initial values, where MindFormers has made room for them."""
        self.reset_linear()
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """Sets the adapter's allocated parameters to their initial values."""
        with self.draws:
            super()._add_adapter(self.config, tuple(self.shared_parts().values()))
        for name in PYNATIVE_INITIAL.values():
            if hasattr(self, name):
                fill(getattr(self, name), 0)

    def linear(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        """x W^T + bias, by MindFormers' Linear if the cell is divided."""
        if is_divided(self.weight):
            return self.linear_type.construct(self, input_, weight)
        # MindFormers multiplies by a transposed view of W, which a CPU copies at every step.
        return self.base.like(self.base.linear(self.base.tokens(input_), self._operands(), self.bias), input_)

    def without_adapter(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        """Returns the output of the replaced cell."""
        return self.linear(input_, weight)

    def reset_linear(self) -> None:
        """Sets W and bias to their initial values, by MindFormers' Linear."""
        self.linear_type.reset_parameter(self)


class LoRAPyNativeLinear(_OnPyNativeLinear):
    r"""A linear cell of a PyNative model with a low-rank update: y = x W^T + bias + ((dropout(x) A^T) * scale) B^T.

    It uses MindSpore's operators, of which PyNative computes the gradient, in the dtype in which the cell
    computes; the low-rank path has the operators of MindFormers' own LoRA, so that both train to the same bits.
    Only from_cell creates such a cell, which is also an instance of MindFormers' Linear.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], lora_a [r, in_channels], lora_b [out_channels, r].

    Inputs:
        - **input_** (Tensor) - Shape [..., in_channels].
        - **weight** (Tensor) - A weight to use instead of the cell's. Default: None.

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of input_.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    parameter_names = names_of("A", "B")
    lora_a: Parameter
    lora_b: Parameter

    def construct(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        if self.invocation_tokens:
            return super().construct(input_)
        # Both are slices where the cell is sharded, as MindFormers' forward takes its weight.
        a, b = (self.cast(local(parameter), self.dtype) for parameter in (self.lora_a, self.lora_b))
        x = self.low_rank.drop(self.cast(input_, self.dtype))
        low_rank = mint.matmul(x, mint.transpose(a, 1, 0)) * self.scale
        delta = mint.matmul(low_rank, mint.transpose(b, 1, 0))
        return self.linear(input_, weight) + self.cast(delta, input_.dtype)


class WholePyNativeLinear(_OnPyNativeLinear):
    """A variant of LoRA on MindFormers' Linear: it computes as on other linear cells, and cannot be sharded."""

    def prepare(self) -> None:
        if not self.weight.is_meta:
            super().prepare()

    def reset_parameter(self) -> None:
        if is_divided(self.weight):
            refuse_unsupported(self.config, SHARDED)
        super().reset_parameter()

    def construct(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        # The model passes a weight only to a cell without its own, which check refuses.
        return super().construct(input_)


class DoRAPyNativeLinear(WholePyNativeLinear, DoRADense):
    """DoRADense for MindFormers' Linear. The magnitude is initialized when training begins, if no checkpoint had it.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], lora_a [r, in_channels], lora_b [out_channels, r],
        magnitude_lora_b [out_channels].

    Inputs and outputs are those of LoRAPyNativeLinear.

    Source: Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation, 2024.
    """

    parameter_names = names_of("A", "B", "magnitude")


class AdaLoRAPyNativeLinear(WholePyNativeLinear, AdaLoRADense):
    """AdaLoRADense for MindFormers' Linear.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], lora_a [r, in_channels], lora_b [out_channels, r],
        lambda_lora_b [r].

    Inputs and outputs are those of LoRAPyNativeLinear.

    Source: Zhang et al., AdaLoRA: Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning, 2023.
    """

    parameter_names = names_of("A", "B", "lambda")


class MiSSPyNativeLinear(WholePyNativeLinear, MiSSDense):
    """MiSSDense for MindFormers' Linear.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], miss_block_lora_b [out_channels, r].

    Inputs and outputs are those of LoRAPyNativeLinear.

    Source: Kang et al., MiSS: Revisiting the Trade-off in LoRA with an Efficient Shard-Sharing Structure, 2025.
    """

    parameter_names = names_of("block")


def adopt_settings(target: nn.Cell, cell: nn.Cell) -> None:
    """Copies the attributes that MindFormers reads, besides weight and bias, to the cell that replaces a Linear."""
    for name in _OF_LINEAR:
        setattr(target, name, getattr(cell, name))


@functools.lru_cache(maxsize=None)
def on_linear(kind: Type[nn.Cell], linear: type) -> Type[nn.Cell]:
    """Returns the class that combines both.

    An adapter's parts also have the names of other cells, under which the class of the adapter reads them.
    """
    parts = getattr(kind, "parameter_names", {})
    members: Dict[str, Any] = {PARAMETERS[part]: property(operator.attrgetter(name)) for part, name in parts.items()}
    members |= {"__doc__": kind.__doc__, "__module__": kind.__module__, "linear_type": linear, "adapter_type": kind}
    return type(kind.__name__, (kind, linear), members)


# VeRAPyNativeLinear: VeRA on the linear cells of the models that MindFormers' PyNative Trainer runs.


class VeRAPyNativeLinear(WholePyNativeLinear, VeRADense):
    """VeRADense for MindFormers' Linear.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], lambda_d_lora_b [r], lambda_b_lora_b [out_channels];
        of the first cell, shared by all, mindpet_delta_lora_vera_a [r, widest in_channels] and
        mindpet_delta_lora_vera_b [widest out_channels, r].

    Inputs and outputs are those of LoRAPyNativeLinear.

    Source: Kopiczko et al., VeRA: Vector-based Random Matrix Adaptation, 2024.
    """

    parameter_names = names_of("lambda_d", "lambda_b")

    @classmethod
    def shared_parameters(cls, cells: Sequence[nn.Cell], config: LoraConfig) -> Tuple[Parameter, ...]:
        shared = super().shared_parameters(cells, config)
        for parameter in shared:
            # Allocating the values of a model empties the parameters that it knows.
            parameter.initial = parameter.asnumpy()
        return shared

    def _add_adapter(self, config, shared):
        self._share(shared)
        super()._add_adapter(config, shared)

    def _share(self, projection):
        # hyper_parallel would give each layer parameters of its own, all with one name: the first cell alone has them
        # as nn.Cell knows them, so that checkpoints hold them.
        initial = [vars(parameter).pop("initial", None) for parameter in projection]
        if initial[0] is not None:
            self._initial = tuple(initial)
            super()._share(projection)
        elif not self._is_first:
            self.__dict__.update(zip(("mindpet_delta_lora_vera_a", "mindpet_delta_lora_vera_b"), projection))

    @property
    def _is_first(self):
        return "mindpet_delta_lora_vera_a" in self._params

    def reset_parameter(self) -> None:
        """Sets all parameters to their initial values; the first cell of a model sets the shared ones."""
        super().reset_parameter()
        if self._is_first:
            for parameter, initial in zip(self.shared_parts().values(), self._initial):
                set_value(parameter, Tensor(initial))


class StackedLoRAPyNativeLinear(StackedLoRAParallelLinear):
    """StackedLoRADense for MindFormers' Linear, whose rows are on the second axis.

    Weights:
        Those of the cell that it adopts, whose weight may be 4-bit; stacked_lora_a [K, r, in_channels] and
        stacked_lora_b [K, out_channels, r] with r the largest rank. The names end as those that MindFormers takes for
        an adapter's, and differ from those of a single adapter.

    Inputs:
        - **input_** (Tensor) - Shape [sequence, batch, in_channels]; the second axis holds equal numbers of rows for
          the K adapters, those of the first adapter first.

    Outputs:
        Tensor of shape [sequence, batch, out_channels] and of the dtype of input_.
    """

    parameter_names = PYNATIVE_STACKED
    mindpet_delta_lora_a = property(operator.attrgetter(PYNATIVE_STACKED["A"]))
    mindpet_delta_lora_b = property(operator.attrgetter(PYNATIVE_STACKED["B"]))

    @classmethod
    def from_cells(
        cls, cell: nn.Cell, adapted: Sequence[Optional[LoRADense]], compute_dtype: Optional[str] = None
    ) -> "StackedLoRAPyNativeLinear":
        self = super().from_cells(cell, adapted, compute_dtype)
        # Tuples hide them from MindSpore, which would name and save their parameters a second time.
        self._base_cell = (cell,)
        self._adapted = tuple(adapted)
        # Tensor.backward() does not call the bprop of the cells that graph mode has for them.
        self.scale, self.swap = ops.Mul(), ops.Transpose()
        return self

    @staticmethod
    def _zeros(shape, dtype, name):
        # An initializer would not have drawn its values yet when the optimizer copies them.
        with ms.DeviceCtx("meta"):
            return Parameter(mint.empty(shape, dtype=dtype), name=name)

    @property
    def quantization(self) -> Optional[str]:
        """The quantization of W, as in a cell with one adapter."""
        return getattr(self._base_cell[0], "quantization", None)

    def reset_parameter(self) -> None:
        """Sets W and bias to their initial values, and A and B to the adapters' initial values."""
        (base,) = self._base_cell
        # hyper_parallel replaces the parameters of this cell alone.
        base._params.update({name: self._params[name] for name in base._params if name in self._params})
        base.reset_parameter()
        for part, stacked in zip("AB", self.lora_parameters()):
            set_value(stacked, Tensor(stacked_values(stacked.shape, part, self._adapted)))

    def construct(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        # The model passes a weight only to a cell without its own, which the adapters' cells refuse.
        return self.computed(input_)

    def without_adapter(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        """Returns the output of the replaced cell."""
        y = self.base.linear(self.base.tokens(input_), self._operands(), self.bias)
        return self.base.like(y, input_)


def stacked_values(shape: Tuple[int, ...], part: str, adapted: Sequence[Optional[LoRACell]]) -> np.ndarray:
    """Returns one part of all adapters, float32 [K, ...], of the cells that carry each alone, or None."""
    values = np.zeros(shape, np.float32)
    for number, cell in enumerate(adapted):
        if cell is not None:
            own = to_float32(to_array(cell.parts()[part]))
            values[(number, *map(slice, own.shape))] = own
    return values
