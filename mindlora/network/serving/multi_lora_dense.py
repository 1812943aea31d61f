"""MultiLoRADense: a frozen linear cell in which each token uses its own adapter, from a pool of slots."""

from typing import Optional, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer

from mindlora.core.numerics.dtypes import to_float32
from mindlora.network.cells.cell import carry_settings
from mindlora.network.cells.linear_base import HeldWeight, LinearBase, adopt_linear, adopt_weight, plain_linear_types
from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.network.quantized.quantized_dense import QuantizedBase, QuantizedDense
from mindlora.network.tensors import to_array, to_tensor
from mindlora.ops.multi_lora_delta import MultiLoraDelta
from mindlora.ops.multi_lora_linear import MultiLoraLinear, MultiLoraLinearWithBias
from mindlora.ops.rounded_linear import RoundedLinear, RoundedLinears

# MultiLoRAExperts: a pool of adapters of one stacked weight of routed experts.


class MultiLoRAExperts(nn.Cell):
    r"""Holds A_ie and B_ie of each slot i and expert e, for W_e + scale_i B_ie A_ie.

    It does not compute: mindlora.ops.routed_experts does, and on Ascend GroupedExperts. On a CPU the pool takes
    memory only for adapters that have been written.

    Weights:
        lora_pool [slots, experts * max_rank, in_channels + out_channels], lora_ranks [slots] int32 and lora_scales
        [slots] float32, which multi_lora_slot_write fills (layout: RoutedExperts, GroupedExperts). A slot of fewer rows
        than experts is empty.

    Args:
        name (str): Name of the base's weight.
        shape (tuple): Its [experts, out_channels, in_channels].
        slots (int): How many adapters the pool holds at once.
        max_rank (int): The largest rank of an adapter.
        dtype (mindspore.dtype): The dtype of the pool, in which the experts compute; float32 on a CPU.
    """

    def __init__(self, name: str, shape: Tuple[int, int, int], slots: int, max_rank: int, dtype: mstype.Type):
        super().__init__()
        self.experts, self.out_channels, self.in_channels = shape
        self.dtype = dtype
        pool = (slots, self.experts * max_rank, self.in_channels + self.out_channels)
        self.lora_pool = _zeros(f"{name}.lora_pool", pool, dtype)
        if ms.get_context("device_target") == "CPU":
            # The zeros of NumPy have no memory until they are written to: a pool can be larger than the model.
            self.lora_pool.set_data(Tensor.from_numpy(np.zeros(pool, np.float32)))
        self.lora_ranks = _zeros(f"{name}.lora_ranks", (slots,), mstype.int32)
        self.lora_scales = _zeros(f"{name}.lora_scales", (slots,), mstype.float32)


def _zeros(name, shape, dtype):
    return Parameter(initializer("zeros", list(shape), dtype), name=name, requires_grad=False)


class MultiLoRADense(HeldWeight, nn.Cell):
    r"""y[t] = activation(x[t] W^T + bias + ((x[t] A_i^T) * scale_i) B_i^T) with i = slots_of_tokens[t].

    A token whose i is -1 uses the base alone, as do tokens whose slot is empty. With ``gained``, everything added to
    the bias is multiplied element by element by 1 + gain_i, which turns each adapter with gains into DoRA. It serves
    trained adapters: there is no gradient for them. Only from_cell creates such a cell.

    Weights:
        As in the adopted cell, whose weight may be quantized (QuantizedDense); lora_pool [slots, max_rank,
        in_channels + out_channels] of the compute dtype or of 16 bits, lora_ranks [slots] int32 and lora_scales
        [slots] float32, which multi_lora_slot_write fills (layout: MultiLoraDelta); and lora_gains [slots + 1,
        out_channels] float32, whose last row, of zeros, is the base's.

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Source: Chen et al., Punica: Multi-Tenant LoRA Serving, 2023; Sheng et al., S-LoRA: Serving Thousands of Concurrent
    LoRA Adapters, 2023; Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation, 2024.

    Attributes:
        quantization (str or None): The form of the base's weight, if it is quantized.
        rounds (bool): Whether the base's products are in bfloat16.
        few (bool): Whether the graph is for steps of few tokens; read when a graph is compiled.
        gained (bool): Whether the graph is for steps in which adapters have gains; read when a graph is compiled.
    """

    @classmethod
    def from_cell(
        cls,
        cell: nn.Cell,
        prefix: str,
        slots: int,
        max_rank: int,
        slots_of_tokens: Parameter,
        pool_dtype: Optional[mstype.Type] = None,
        rounds: bool = False,
    ) -> "MultiLoRADense":
        """Puts a pool of adapters on an existing linear cell, and shares its parameters and operators with it.

        Args:
            cell (nn.Dense, mindformers.modules.layers.Linear or QuantizedDense): The cell to replace.
            prefix (str): The prefix of its parameters, without the last dot.
            slots (int): How many adapters the pool holds at once.
            max_rank (int): The largest rank of an adapter.
            slots_of_tokens (Parameter): int32 [at least the tokens of any call], the slot of each token, -1 for the
                base. All cells of a network share it.
            pool_dtype (mindspore.dtype): The dtype of adapters in the pool; one of 16 bits needs a compute dtype of
                float32 on a CPU. Default: None, the compute dtype.
            rounds (bool): Whether the base's products are in bfloat16 (RoundedLinear) where its weight is in bfloat16
                or 4-bit; for a CPU and a compute dtype of float32. Default: False.

        Raises:
            UnsupportedCellError: The cell is of another kind, sharded, or holds experts.
        """
        base_kind = QuantizedBase if isinstance(cell, QuantizedDense) else LinearBase
        if base_kind is LinearBase:
            QuantizedDense.check(cell)
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        adopt_linear(self, cell, base_kind(cell))
        adopt_weight(self, cell)
        self.quantization = getattr(cell, "quantization", None)
        self.cast = ops.Cast()
        width = self.in_channels + self.out_channels
        self.lora_pool = _pool("lora_pool", prefix, (slots, max_rank, width), pool_dtype or self.dtype)
        self.lora_ranks = _pool("lora_ranks", prefix, (slots,), mstype.int32)
        self.lora_scales = _pool("lora_scales", prefix, (slots,), mstype.float32)
        self.lora_gains = _pool("lora_gains", prefix, (slots + 1, self.out_channels), mstype.float32)
        self.slots_of_tokens = slots_of_tokens
        self.delta = MultiLoraDelta()
        self.linear = MultiLoraLinearWithBias() if self.has_bias else MultiLoraLinear()
        # A 16-bit weight stays unchanged: the operator widens it as it reads.
        self.widens = self.linear.path == "cpu" and self.dtype == mstype.float32
        # Integers are multiplied in float32 alone.
        rounded_form = isinstance(cell, NF4Dense) or self.weight.dtype == mstype.bfloat16
        self.rounds = rounds and rounded_form
        if self.rounds:
            self.rounded = RoundedLinear(self.packed, self.has_bias)
        if self.has_bias and self.widens:
            # MindSpore's operators on a CPU do not take a bfloat16 weight.
            bias = to_tensor(to_float32(to_array(self.bias)))
            self.bias = Parameter(bias, name=self.bias.name, requires_grad=False)
        self.few = False
        self.gained = False
        carry_settings(cell, self)
        return self

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        """Returns the classes of the cells that this one replaces."""
        return (*plain_linear_types(), QuantizedDense)

    def construct(self, x: Tensor) -> Tensor:
        return self.with_slots(x, self.slots_of_tokens, self.few)

    def with_slots(self, x: Tensor, slots: Tensor, few: bool) -> Tensor:
        """The cell's output with slots, int32 [at least tokens], instead of those of the step's tokens.

        ``few`` says whether x [..., in_channels] has only a few tokens. The result is [..., out_channels], dtype of x.
        """
        input_dtype = x.dtype
        x = self.cast(x, self.dtype)
        if self.rounds:
            y = self._rounded_pass(x, slots)
        elif few and not self.packed:
            y = self._one_pass(x, slots)
        else:
            y = self._two_passes(x, slots)
        return self.cast(self.finished(y, slots), input_dtype)

    def finished(self, y: Tensor, slots: Tensor) -> Tensor:
        """The steps after the product and the adapters: gains and the activation."""
        if self.gained:
            y = self._with_gains(y, slots)
        # The low-rank product is inside the activation, as in the cell that trained.
        return self.activation(y) if self.activation_flag else y

    def _one_pass(self, x, slots):
        """For few tokens: base and adapters in one operator."""
        weight = self.weight if self.widens else self.cast(self.weight, self.dtype)
        if self.has_bias:
            bias = self.cast(self.bias, self.dtype)
            return self.linear(x, weight, self.lora_pool, self.lora_ranks, self.lora_scales, slots, bias)
        return self.linear(x, weight, self.lora_pool, self.lora_ranks, self.lora_scales, slots)

    def _rounded_pass(self, x, slots):
        """For any number of tokens: base and adapters in one operator, the base's product in bfloat16."""
        bias = self.bias if self.has_bias else None
        return self.rounded(x, self.rounded_weight(), self.lora_pool, self.lora_ranks, self.lora_scales, slots, bias)

    def rounded_weight(self) -> Tuple[Tensor, ...]:
        """The weight as RoundedLinear takes it."""
        return self.packed_weight() if self.packed else (self.weight,)

    def _two_passes(self, x, slots):
        """For many tokens: the base's own product, then the adapters'."""
        weight = self.packed_weight() if self.packed else (self.cast(self.weight, self.dtype),)
        y = self.base.linear(self.base.tokens(x), weight, self.bias)
        return self.delta(y, x, self.lora_pool, self.lora_ranks, self.lora_scales, slots)

    def _with_gains(self, y, slots):
        """y + gain (y - bias), which is y to the last bit where the gain is 0."""
        rows = ops.reshape(y, (-1, self.out_channels))
        slots = ops.slice(slots, (0,), (rows.shape[0],))
        slots = ops.select(slots < 0, ops.full_like(slots, self.lora_gains.shape[0] - 1), slots)
        product = rows - self.cast(self.bias, rows.dtype) if self.has_bias else rows
        gained = ops.gather(self.lora_gains, slots, 0) * self.cast(product, mstype.float32)
        return ops.reshape(rows + self.cast(gained, rows.dtype), y.shape)

    def extend_repr(self) -> str:
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, has_bias={self.has_bias}, "
            f"slots={self.lora_pool.shape[0]}, max_rank={self.lora_pool.shape[1]}, compute_dtype={self.dtype}"
        )


def _pool(name, prefix, shape, dtype):
    return Parameter(initializer("zeros", list(shape), dtype), name=f"{prefix}.{name}", requires_grad=False)


# LinearsTogether: MultiLoRADense cells with one input, computed in one operator.


class LinearsTogether(nn.Cell):
    """(cell(x), ...) for two or three MultiLoRADense whose products are rounded, to the last bit. Only ``of`` makes it.

    Inputs:
        - **x** (Tensor) - [..., in_channels].

    Outputs:
        Tuple of Tensor [..., out_channels], dtype of x: the cells' outputs.
    """

    def __init__(self, cells: Sequence[MultiLoRADense]):
        super().__init__(auto_prefix=False)
        self.linears = nn.CellList(cells, auto_prefix=False)
        first = self.linears[0]
        self.has_bias = first.has_bias
        self.dtype = first.dtype
        self.slots_of_tokens = first.slots_of_tokens
        self.rounded = RoundedLinears(first.packed, first.has_bias, len(cells))
        self.cast = ops.Cast()

    @classmethod
    def of(cls, cells: Sequence[nn.Cell]) -> Optional["LinearsTogether"]:
        """Returns the cell for ``cells``; None if one operator cannot compute them."""
        if not all(isinstance(cell, MultiLoRADense) and cell.rounds for cell in cells):
            return None
        kinds = {(cell.packed, cell.has_bias, cell.dtype, cell.lora_pool.dtype) for cell in cells}
        return cls(cells) if len(kinds) == 1 else None

    def construct(self, x: Tensor) -> Tuple[Tensor, ...]:
        weights, pools, biases = (), (), ()
        for cell in self.linears:
            weights += (cell.rounded_weight(),)
            pools += ((cell.lora_pool, cell.lora_ranks, cell.lora_scales),)
            if self.has_bias:
                biases += (cell.bias,)
        products = self.rounded(self.cast(x, self.dtype), weights, pools, self.slots_of_tokens, biases)
        outputs = ()
        for cell, y in zip(self.linears, products):
            outputs += (self.cast(cell.finished(y, self.slots_of_tokens), x.dtype),)
        return outputs


class JoinsLinears(nn.Cell):
    """Base of cells that apply some linear cells to one input.

    Attributes:
        joined (tuple of str): The attributes that hold these cells.
        joins (bool): Whether one operator computes them; see join_linears.
    """

    joined: Tuple[str, ...]

    def __init__(self, auto_prefix: bool = True):
        super().__init__(auto_prefix=auto_prefix)
        self.joins = False

    def join_linears(self) -> None:
        """Lets one operator compute the linear cells, if it can. They must belong to the compiled network."""
        together = LinearsTogether.of([getattr(self, name) for name in self.joined])
        if together is not None:
            # Straight into _cells: assigning an attribute would rename the parameters.
            self._cells["together"] = together
            self.joins = True
