"""MultiLoRADense: a frozen linear cell in which each token uses an adapter of its own, from a pool of slots."""

from typing import Optional, Tuple

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer

from mindlora.core.numerics.dtypes import to_float32
from mindlora.network.cells.cell import carry_settings
from mindlora.network.cells.linear_base import LinearBase, adopt_linear, adopt_weight, plain_linear_types
from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.network.quantized.qlora import Nf4Base
from mindlora.network.tensors import to_array, to_tensor
from mindlora.ops.multi_lora_delta import MultiLoraDelta
from mindlora.ops.multi_lora_linear import MultiLoraLinear, MultiLoraLinearWithBias
from mindlora.ops.rounded_linear import RoundedLinear


class MultiLoRADense(nn.Cell):
    r"""y[t] = activation(x[t] W^T + bias + ((x[t] A_i^T) * scale_i) B_i^T) with i = slots_of_tokens[t].

    A token whose i is -1 uses the base alone, as do those whose slot is empty. With ``gained``, what is added to the
    bias is multiplied by 1 + gain_i, number by number, which makes a DoRA of each adapter with gains. It serves
    adapters that are trained already: there is no gradient for them. Only from_cell creates such a cell.

    Weights:
        Those of the cell that it adopts, whose weight may be 4-bit (NF4Dense); lora_pool [slots, max_rank, in_channels
        + out_channels] of the compute dtype or of 16 bits, lora_ranks [slots] int32 and lora_scales [slots] float32,
        which multi_lora_slot_write fills (layout: MultiLoraDelta); and lora_gains [slots + 1, out_channels] float32,
        the last row of zeros, that of the base.

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Source: Chen et al., Punica: Multi-Tenant LoRA Serving, 2023; Sheng et al., S-LoRA: Serving Thousands of Concurrent
    LoRA Adapters, 2023; Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation, 2024.

    Attributes:
        quantization (str or None): "nf4" if the base's weight is 4-bit.
        rounds (bool): Whether the base's products are in bfloat16.
        few (bool): A flag, read when a graph is compiled: whether the graph is for steps of few tokens.
        gained (bool): Such a flag: whether the graph is for steps in which adapters have gains.
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
            cell (nn.Dense, mindformers.modules.layers.Linear or NF4Dense): The cell to replace.
            prefix (str): The prefix of its parameters, without the last dot.
            slots (int): How many adapters the pool holds at once.
            max_rank (int): The largest rank of an adapter.
            slots_of_tokens (Parameter): int32 [at least the tokens of any call], the slot of each token, -1 for the
                base. All cells of a network share it.
            pool_dtype (mindspore.dtype): What the pool holds adapters in; one of 16 bits goes with a compute dtype of
                float32 on a CPU. Default: None, the compute dtype.
            rounds (bool): Whether the base's products are in bfloat16 (RoundedLinear) where its weight is in bfloat16
                or 4-bit; for a CPU and a compute dtype of float32. Default: False.

        Raises:
            UnsupportedCellError: The cell is of another kind, sharded, or holds experts.
        """
        base_kind = Nf4Base if isinstance(cell, NF4Dense) else LinearBase
        if base_kind is LinearBase:
            NF4Dense.check(cell)
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
        # A weight of 16 bits stays as it is: the operator widens it as it reads.
        self.widens = self.linear.path == "cpu" and self.dtype == mstype.float32
        self.rounds = rounds and (self.packed or self.weight.dtype == mstype.bfloat16)
        if self.rounds:
            self.rounded = RoundedLinear(self.packed, self.has_bias)
        if self.has_bias and self.widens:
            # MindSpore's operators on a CPU do not take one of bfloat16.
            bias = to_tensor(to_float32(to_array(self.bias)))
            self.bias = Parameter(bias, name=self.bias.name, requires_grad=False)
        self.few = False
        self.gained = False
        carry_settings(cell, self)
        return self

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        """Returns the classes of the cells that this one replaces."""
        return (*plain_linear_types(), NF4Dense)

    def construct(self, x: Tensor) -> Tensor:
        return self.with_slots(x, self.slots_of_tokens, self.few)

    def with_slots(self, x: Tensor, slots: Tensor, few: bool) -> Tensor:
        """The cell's output with slots, int32 [at least tokens], other than those of the step's tokens.

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
        """What comes after the product and the adapters: gains and the activation."""
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
        return self._packed_weight() if self.packed else (self.weight,)

    def _packed_weight(self):
        return self.weight, self.weight_absmax, self.weight_scales, self.weight_offsets

    def _two_passes(self, x, slots):
        """For many tokens: the base's own product, then the adapters'."""
        weight = self._packed_weight() if self.packed else (self.cast(self.weight, self.dtype),)
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
