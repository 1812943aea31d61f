"""LoRA on the routed experts of the models that MindFormers' PyNative Trainer runs.

MindFormers' GroupedMLP holds two stacked weights and sends the tokens to the experts. In a PyNativeExperts, which
replaces it, a cell for each weight multiplies by it. MindFormers finds the experts that it shards by their class, and
the weights, A and B by their names in them: all of them are parameters of PyNativeExperts, where the cells read them.
"""

import functools
import operator
import sys
from typing import Dict, Mapping, Optional, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.numerics.pair_shapes import transposed_experts
from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.registry import PYNATIVE_PARAMETERS, PYNATIVE_STACKED
from mindlora.network.cells.cell import (
    InitialDraws,
    carry_settings,
    initial_values,
    refuse_own_forward,
    refuse_unsupported,
)
from mindlora.network.cells.experts import ExpertWeight, GroupedProduct, LoRAExpertWeight
from mindlora.network.cells.stacked import StackedLoRAExpertWeight
from mindlora.network.pynative.linear import local, set_value, stacked_values
from mindlora.network.tensors import to_array

_GROUPED_MLP = "mindformers.pynative.transformers.moe.experts"
LEAVES = ("weight1", "weight2")


def grouped_mlp_types() -> Tuple[type, ...]:
    """Returns the class of routed experts of MindFormers' PyNative models, if it is imported."""
    module = sys.modules.get(_GROUPED_MLP)
    return (module.GroupedMLP,) if module else ()


class PyNativeExpertWeight(ExpertWeight):
    """One stacked weight of GroupedMLP as a separate cell: y_e = x_e W_e for the tokens x_e of each expert.

    It has no parameter. Its ``holder``, GroupedMLP or the PyNativeExperts that replaces it, has the weight.

    Weights, of the holder:
        weight1 or weight2 [experts, in_channels, out_channels].

    Inputs:
        - **x** (Tensor) - Shape [tokens, in_channels], sorted by expert.
        - **groups** (Tensor) - int64, the token after each expert's last.

    Outputs:
        Tensor of shape [tokens, out_channels].
    """

    def _take_weight(self):
        """Leaves the weight in the holder, since MindFormers replaces the holder's parameter when it shards it."""

    @property
    def weight(self) -> Parameter:
        """The weight."""
        return getattr(self.holder, self.leaf)

    def put_into(self, experts: "PyNativeExperts") -> None:
        """Makes ``experts``, which replace the holder, the new holder."""
        self._holder = (experts,)

    def reset_parameter(self) -> None:
        """Sets the weight to MindFormers' initial values."""
        self.weight.normal_(mean=0.0, std=0.01)

    def construct(self, x: Tensor, groups: Tensor) -> Tensor:
        return self.product(x, self.cast(local(self.weight), self.dtype), groups)


class LoRAPyNativeExpertWeight(LoRAExpertWeight):
    """A stacked weight of experts with a low-rank update: y_e = x_e W_e + ((x_e A_e^T) * scale) B_e^T.

    The holder of the weight, a PyNativeExperts, holds A and B too: each expert's transposed, as in MindFormers.

    Weights, of the holder:
        weight1 [experts, in, out], weight1_lora_a [experts, in, r], weight1_lora_b [experts, r, out]; or weight2 and
        so on.

    Inputs and outputs are those of PyNativeExpertWeight.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    # Shared by the cells of a model with pet_config.seed.
    draws = InitialDraws(None)

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return (PyNativeExpertWeight,)

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        check_grouped_mlp(cell.holder)
        refuse_unsupported(config, cls.layout.cells)

    def _adopt(self, cell, config):
        self.leaf = cell.leaf
        self.experts = cell.experts
        self.in_channels, self.out_channels = cell.in_channels, cell.out_channels
        self.dtype = getattr(mstype, config.compute_dtype) if config.compute_dtype else cell.dtype
        self.a_product = GroupedProduct(self.in_channels, self.lora_rank)
        self.b_product = GroupedProduct(self.lora_rank, self.out_channels)
        self.cast = ops.Cast()

    def _add_adapter(self, config, shared):
        if isinstance(self.holder, PyNativeExperts):
            self._add_pair()

    def put_into(self, experts: "PyNativeExperts") -> None:
        """Gives A and B to the experts, and makes them the holder of the weight."""
        self.base_cell.put_into(experts)
        self._add_pair()

    def _add_pair(self):
        """Gives A and B to the holder."""
        trained = self.variant.trained_parts(self)
        for part, value in self._initial_values(self.weight.is_meta).items():
            name = f"{self.weight.name}_{PYNATIVE_PARAMETERS[part]}"
            setattr(self.holder, self._name(part), Parameter(value, name=name, requires_grad=part in trained))

    def _initial_values(self, on_meta):
        """Returns part -> initial value; without values if MindFormers allocates them later."""
        shapes = self.part_shapes(self, self.lora_rank)
        if on_meta:
            dtype = getattr(ms, self.config.param_init_type)
            transposed = {part: (experts, columns, rows) for part, (experts, rows, columns) in shapes.items()}
            with ms.DeviceCtx("meta"):
                return {part: mint.empty(shape, dtype=dtype) for part, shape in transposed.items()}
        values = initial_values(self.config, shapes["A"], shapes["B"])
        allocated = [value.init_data() if value.has_init else value for value in values]
        return {part: ops.transpose(value, (0, 2, 1)) for part, value in zip("AB", allocated)}

    def reset_parameter(self) -> None:
        """Sets all parameters that MindFormers has allocated to their initial values."""
        self.base_cell.reset_parameter()
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """Sets A and B, which are allocated, to their initial values."""
        parts = self.parts()
        with self.draws:
            values = self._initial_values(False)
        for part, value in values.items():
            set_value(parts[part], value)

    def construct(self, x: Tensor, groups: Tensor) -> Tensor:
        a, b = (self.cast(local(parameter), self.dtype) for parameter in self.lora_parameters())
        y = self.base_cell(x, groups)
        return y + self.cast(self.b_product(self.a_product(x, a, groups) * self.scale, b, groups), y.dtype)

    def without_adapter(self, x: Tensor, groups: Tensor) -> Tensor:
        """Returns the output of the replaced cell."""
        return self.base_cell(x, groups)

    @property
    def holder(self) -> nn.Cell:
        """The cell that holds the weight, A and B as parameters."""
        return self.base_cell.holder

    @property
    def weight(self) -> Parameter:
        """The weight."""
        return self.base_cell.weight

    @property
    def adapter_path(self) -> str:
        return self.weight.name

    def name_parts(self, path: str) -> None:
        """Keeps MindFormers' names for A and B, which follow from the weight's."""

    def parts(self) -> Dict[str, Parameter]:
        holder = self.holder
        return {part: getattr(holder, self._name(part)) for part in "AB" if hasattr(holder, self._name(part))}

    def saved_parts(self, keep_zeros: bool = False) -> Dict[str, np.ndarray]:
        return {part: transposed_experts(to_array(parameter)) for part, parameter in self.parts().items()}

    def pair(self) -> Tuple[np.ndarray, np.ndarray]:
        saved = self.saved_parts()
        return saved["A"], saved["B"]

    def load_part(self, part: str, array: np.ndarray) -> None:
        super().load_part(part, transposed_experts(array))

    def plain_cell(self) -> nn.Cell:
        return self.base_cell

    # The other tensors of a weight in 4 bits.
    weight_absmax = property(operator.attrgetter("base_cell.weight_absmax"))
    weight_scales = property(operator.attrgetter("base_cell.weight_scales"))
    weight_offsets = property(operator.attrgetter("base_cell.weight_offsets"))

    def _name(self, part):
        return f"{self.leaf}_{PYNATIVE_PARAMETERS[part]}"


class PyNativeExperts(nn.Cell):
    """MindFormers' GroupedMLP with an adapter on its weights; ``of`` builds it from a GroupedMLP.

    y = sum over the experts e of a token of p_e act(x W1_e) W2_e. The tokens are sent to the experts and back by
    GroupedMLP, of which it is also an instance.

    Weights:
        weight1 [experts, hidden, inner] and weight2 [experts, inner, hidden], with A and B as in
        LoRAPyNativeExpertWeight. The inner size includes the gate.

    Inputs and outputs are those of GroupedMLP.
    """

    def __init__(self, cell: nn.Cell):
        with ms.DeviceCtx("meta"):
            super().__init__(cell.config)
        self._adopted = (cell,)
        for leaf in LEAVES:
            setattr(self, leaf, getattr(cell, leaf))
        carry_settings(cell, self)

    @staticmethod
    def of(cell: nn.Cell, weights: Mapping[str, nn.Cell]) -> "PyNativeExperts":
        """Returns the replacement of a GroupedMLP, with these cells as its weights, by leaf."""
        stacked = next((each for each in weights.values() if isinstance(each, StackedLoRAPyNativeExpertWeight)), None)
        kind = PyNativeExperts if stacked is None else StackedPyNativeExperts
        experts = _on(kind, *grouped_mlp_types())(cell)
        if stacked is not None:
            experts.adapters = stacked.adapters
        for leaf in LEAVES:
            weight = weights.get(leaf) or PyNativeExpertWeight(cell, leaf)
            experts.insert_child_to_cell(_cell_name(leaf), weight)
            weight.put_into(experts)
        return experts

    def weights(self) -> Dict[str, nn.Cell]:
        """Returns the cells of its weights, by leaf."""
        return {leaf: self._cells[_cell_name(leaf)] for leaf in LEAVES}

    def reset_parameter(self) -> None:
        """Does nothing, unlike GroupedMLP's: each weight's cell sets it to its initial values."""

    def drop_float(self, leaf: str) -> None:
        """Frees a weight that a quantized one replaces."""
        for cell in (self, *self._adopted):
            delattr(cell, leaf)

    def experts_forward(self, tokens: Tensor, groups: Tensor) -> Tensor:
        """The experts' part of GroupedMLP's forward: act(x W1_e) W2_e for tokens [tokens, hidden] sorted by expert."""
        first, second = self.weights().values()
        x = self._activated(self.multiplied(first, tokens, groups))
        return self.cast(self.multiplied(second, x, groups), tokens.dtype)

    def multiplied(self, weight: nn.Cell, x: Tensor, groups: Tensor) -> Tensor:
        """Returns x times a weight, one of ``weights``."""
        return weight(x, groups)

    def _activated(self, x):
        if not self.gated_linear_unit:
            return self.activation_func(x)
        if self.activation_type == "fusedswiglu":
            return self.activation_func(x, -1)
        gate, up = self.chunk(x, 2, -1)
        return self.activation_func(gate) * up

    def plain_cell(self) -> nn.Cell:
        """Returns the replaced GroupedMLP, with its weights."""
        (cell,) = self._adopted
        for leaf in LEAVES:
            setattr(cell, leaf, getattr(self, leaf))
        carry_settings(self, cell)
        return cell


def check_grouped_mlp(cell: nn.Cell) -> None:
    """Raises UnsupportedCellError for routed experts whose forward PyNativeExperts would change."""
    if not isinstance(cell, PyNativeExperts):
        refuse_own_forward(cell, grouped_mlp_types(), "the adapter's cell")


# Several adapters on the same experts.


class StackedLoRAPyNativeExpertWeight(StackedLoRAExpertWeight):
    r"""A stacked weight of experts with K adapters: y_e = x_e W_e + (mask(x_e A_e^T) * scale) B_e^T, as in
    StackedLoRAExpertWeight, which has the symbols.

    Weights, of the holder:
        weight1 [experts, in, out], weight1_stacked_lora_a [K, experts, in, r], weight1_stacked_lora_b
        [K, experts, r, out]; or weight2 and so on.

    Inputs:
        - As for PyNativeExpertWeight, and
        - **owners** (Tensor) - Shape [tokens, K]: 1 for the adapter that a token is of, else 0.

    Outputs:
        Tensor of shape [tokens, out_channels].
    """

    @classmethod
    def from_cells(
        cls,
        cell: PyNativeExpertWeight,
        adapted: Sequence[Optional[LoRAPyNativeExpertWeight]],
        compute_dtype: Optional[str] = None,
    ) -> "StackedLoRAPyNativeExpertWeight":
        """Puts K adapters on a weight of experts, in float, without values; as StackedLoRADense.from_cells."""
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        self._adopt(cell, adapted)
        # Tuples hide them from MindSpore, which would list their parameters a second time.
        self._base_cell, self._adapted = (cell,), tuple(adapted)
        return self

    def put_into(self, experts: "PyNativeExperts") -> None:
        """Gives A and B of all adapters to the experts, and makes them the holder of the weight."""
        (base,) = self._base_cell
        base.put_into(experts)
        first = next(one for one in self._adapted if one is not None)
        dtype = getattr(ms, first.config.param_init_type)
        shapes = {"A": (self.in_channels, self.rank), "B": (self.rank, self.out_channels)}
        for part, shape in shapes.items():
            with ms.DeviceCtx("meta"):
                values = mint.empty((self.adapters, self.experts, *shape), dtype=dtype)
            name = f"{base.weight.name}_{PYNATIVE_STACKED[part]}"
            setattr(experts, self._name(part), Parameter(values, name=name))

    def lora_parameters(self) -> Tuple[Parameter, Parameter]:
        """Returns A and B of all adapters."""
        a, b = (getattr(self._base_cell[0].holder, self._name(part)) for part in "AB")
        return a, b

    def reset_parameter(self) -> None:
        """Sets the weight to its initial values, and A and B to the adapters' initial values."""
        self._base_cell[0].reset_parameter()
        for part, stacked in zip("AB", self.lora_parameters()):
            set_value(stacked, Tensor(stacked_values(stacked.shape, part, self._adapted)))

    def construct(self, x: Tensor, groups: Tensor, owners: Tensor) -> Tensor:
        together = self.adapters * self.rank
        a, b = (self.cast(local(parameter), self.dtype) for parameter in self.lora_parameters())
        a = self.reshape(self.transpose(a, (1, 2, 0, 3)), (self.experts, self.in_channels, together))
        b = self.reshape(self.transpose(b, (1, 0, 2, 3)), (self.experts, together, self.out_channels))
        own = self.cast(ops.matmul(owners, self.scales), self.dtype)
        y = self._base_cell[0](x, groups)
        return y + self.cast(self.b_product(self.a_product(x, a, groups) * own, b, groups), y.dtype)

    def without_adapter(self, x: Tensor, groups: Tensor, owners: Tensor) -> Tensor:
        """Returns the output of the replaced cell."""
        return self._base_cell[0](x, groups)

    def _name(self, part):
        return f"{self._base_cell[0].leaf}_{PYNATIVE_STACKED[part]}"


@functools.lru_cache(maxsize=4)
def owners_of(sequence: int, rows: int, adapters: int) -> Tensor:
    """Returns 1 for the adapter that each token of [sequence, rows] is of, else 0: float32 [sequence * rows, K]."""
    of_rows = np.repeat(np.eye(adapters, dtype=np.float32), rows // adapters, axis=0)
    return Tensor(np.tile(of_rows, (sequence, 1)))


class StackedPyNativeExperts(PyNativeExperts):
    """PyNativeExperts with K adapters on its weights (StackedLoRAPyNativeExpertWeight).

    A batch has equal numbers of rows for them, those of the first adapter first.

    Attributes:
        adapters (int): K.
    """

    def permute(
        self, tokens: Tensor, top_scores: Tensor, selected_experts_indices: Tensor, num_tokens_per_expert: Tensor
    ) -> Tuple[Tensor, ...]:
        """Sorts the tokens [sequence, rows, hidden] by expert, as GroupedMLP does; notes which adapter each is of."""
        found = super().permute(tokens, top_scores, selected_experts_indices, num_tokens_per_expert)
        owners = self.cast(owners_of(*tokens.shape[:2], self.adapters), tokens.dtype)
        if self.moe_permute_fusion:
            experts = self.reshape(selected_experts_indices, (-1, self.top_k)).astype(mstype.int32)
            owners, _ = ops.moe_token_permute(owners, experts)
        else:
            owners = owners[found[1] // self.top_k]
        self._owners = (owners.astype(mstype.float32),)
        return found

    def multiplied(self, weight: nn.Cell, x: Tensor, groups: Tensor) -> Tensor:
        """Returns x times a weight, one of ``weights``."""
        if isinstance(weight, StackedLoRAPyNativeExpertWeight):
            return weight(x, groups, *self._owners)
        return weight(x, groups)


@functools.lru_cache(maxsize=None)
def _on(kind: type, grouped_mlp: type) -> type:
    """Returns the class that is both, whose dispatch of tokens and reset of the weights are MindFormers'."""
    return type(kind.__name__, (kind, grouped_mlp), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def _cell_name(leaf: str) -> str:
    # Not the parameter's name, which MindFormers would then set to a Parameter in vain.
    return f"{leaf}_cell"
