"""Frozen cells with K adapters beside them, each of which trains on its own rows of a batch, or on its own tokens."""

from typing import Mapping, Optional, Sequence, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from mindlora.models.variants.registry import PARAMETERS
from mindlora.network.cells.broadcasting import BroadcastMul, SwapHeads
from mindlora.network.cells.cell import ReplacingCell, carry_settings
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.experts import ExpertWeight, GroupedProduct, LoRAExpertWeight, Operands
from mindlora.network.cells.linear_base import HeldWeight, adopt_linear, adopt_weight
from mindlora.network.cells.low_rank import TrainedRead
from mindlora.network.cells.parallel_linear import construct_parallel


class StackedLoRADense(ReplacingCell, HeldWeight, nn.Cell):
    r"""y_k = activation(x_k W^T + bias + ((dropout(x_k) A_k^T) scale_k) B_k^T), where x_k are the rows of adapter k.

    A batch has the same number of rows for each adapter, the first adapter's first. The A of all adapters are
    one parameter, and so are the B: pairs of smaller rank end in rows of A and columns of B that are zero. Their
    gradients are zero too, so they stay zero under any optimizer that moves nothing without a gradient. An
    adapter that is not on this cell has only zeros.

    The products with A and B are batched over the adapters, in plain MindSpore operators on every device. Only
    from_cells creates such a cell.

    Weights:
        Those of the cell that it adopts, whose weight may be 4-bit; mindpet_delta_lora_a [K, r, in_channels] and
        mindpet_delta_lora_b [K, out_channels, r] with r the largest rank.

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels]; the first axis holds equal numbers of rows for the K adapters.

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Source: Ye et al., mLoRA: Fine-Tuning LoRA Adapters via Highly-Efficient Pipeline Parallelism in Multiple GPUs,
    2023.
    """

    # "A" or "B" -> name of the parameter.
    parameter_names: Mapping[str, str] = {part: PARAMETERS[part] for part in "AB"}

    @classmethod
    def from_cells(
        cls, cell: nn.Cell, adapted: Sequence[Optional[LoRADense]], compute_dtype: Optional[str] = None
    ) -> "StackedLoRADense":
        """Puts K adapters on an existing linear cell, and shares its parameters and operators with it.

        Args:
            cell (nn.Dense, mindformers.modules.layers.Linear or NF4Dense): The cell to replace.
            adapted (sequence of LoRADense): For each adapter the cell that carries it alone, of the same base, or None
                for an adapter that is not on this cell; at least one is given. A and B are zero until they are set.
            compute_dtype (str): The dtype of the products. Default: None, the cell's.
        """
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        present = [one for one in adapted if one is not None]
        first = present[0]
        self._adopted = (cell,)
        adopt_linear(self, cell, first.base_kind.of(cell, compute_dtype))
        adopt_weight(self, cell)
        self.adapters = len(adapted)
        self.rank = max(one.lora_rank for one in present)
        dtype = first.mindpet_delta_lora_a.dtype
        path = first.adapter_path
        shapes = {"A": [self.rank, self.in_channels], "B": [self.out_channels, self.rank]}
        for part, shape in shapes.items():
            name = self.parameter_names[part]
            setattr(self, name, self._zeros([self.adapters, *shape], dtype, f"{path}.{name}"))
        scales = np.array([0.0 if one is None else one.scale for one in adapted], np.float32)
        self.scales = Tensor(scales.reshape(-1, 1, 1))
        self.dropout = nn.Dropout(p=first.dropout_rate) if first.dropout_rate > 0 else None
        self.product = ops.BatchMatMul(transpose_b=True)
        self.scale = BroadcastMul()
        self.swap = SwapHeads()
        self.cast = ops.Cast()
        self.trained = TrainedRead(self.dtype)
        self.reshape = ops.Reshape()
        carry_settings(cell, self)
        return self

    @staticmethod
    def _zeros(shape, dtype, name):
        return Parameter(initializer("zeros", shape, dtype), name=name)

    def lora_parameters(self) -> Tuple[Parameter, Parameter]:
        """Returns A and B of all adapters."""
        return self.mindpet_delta_lora_a, self.mindpet_delta_lora_b

    def hold_base(self, rounds: bool) -> None:
        """Makes the cell multiply by a frozen 16-bit W directly: see LinearBase.hold."""
        self.base.hold(rounds)

    def construct(self, x: Tensor) -> Tensor:
        tokens = self.base.tokens(x)
        y = self.base.linear(tokens, self._operands(), self.bias) + self._delta(tokens, x.shape)
        if self.activation_flag:
            y = self.activation(y)
        return self.base.like(y, x)

    def _delta(self, tokens, shape):
        """((dropout(x_k) A_k^T) scale_k) B_k^T for all tokens, [tokens, out]."""
        if self.dropout is not None and self.training:
            tokens = self.dropout(tokens)
        a = self.trained.of(self.mindpet_delta_lora_a)
        b = self.trained.of(self.mindpet_delta_lora_b)
        low = self.product(self._by_adapter(tokens, shape), a)
        low = self.scale(low, self.cast(self.scales, self.dtype))
        return self._together(self.product(low, b), shape)

    def _by_adapter(self, tokens, shape):
        """Reshapes [tokens, in] to [K, tokens of an adapter, in]; ``shape`` is the shape of the cell's x."""
        return self.reshape(tokens, (self.adapters, -1, self.in_channels))

    def _together(self, y, shape):
        """Reshapes [K, tokens of an adapter, out] to [tokens, out]."""
        return self.reshape(y, (-1, self.out_channels))

    def _operands(self):
        """The factor of x: W as the base takes it, or the tensors of a quantized W."""
        if self.packed:
            return self.packed_weight()
        return (self.base.operand(self.weight),)

    def extend_repr(self) -> str:
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, has_bias={self.has_bias}, "
            f"adapters={self.adapters}, largest_rank={self.rank}, compute_dtype={self.dtype}"
        )


class StackedLoRAParallelLinear(StackedLoRADense):
    """StackedLoRADense for linear cells of mcore models, whose rows are on the second axis.

    Inputs:
        - **x** (Tensor) - Shape [sequence, batch, in_channels]; the second axis holds equal numbers of rows for the K
          adapters, those of the first adapter first.

    Outputs:
        (y, bias), as in LoRAParallelLinear.
    """

    construct = construct_parallel
    computed = StackedLoRADense.construct

    def _by_adapter(self, tokens, shape):
        rows = shape[1] // self.adapters
        tokens = self.reshape(tokens, (1, shape[0], self.adapters, rows * self.in_channels))
        return self.reshape(self.swap(tokens, (0, 2, 1, 3)), (self.adapters, -1, self.in_channels))

    def _together(self, y, shape):
        rows = shape[1] // self.adapters
        y = self.reshape(y, (1, self.adapters, shape[0], rows * self.out_channels))
        return self.reshape(self.swap(y, (0, 2, 1, 3)), (-1, self.out_channels))


class StackedLoRAExpertWeight(nn.Cell):
    r"""y_e = x_e W_e + (mask(x_e A_e^T) * scale) B_e^T for the tokens x_e of expert e, where A_e and B_e hold the K
    adapters' one after the other: K r rows of A and columns of B, and the mask keeps of each token those r that are of
    its adapter.

    So the tokens of an expert stay together for all adapters, at the price of K times the small products. Parameters
    and ranks are as in StackedLoRADense. Only from_cells creates such a cell.

    Weights:
        weight [experts * in, out], mindpet_delta_lora_a [K, experts, r, in], mindpet_delta_lora_b [K, experts, out, r].

    Inputs:
        - As for ExpertWeight, and
        - **owners** (Tensor) - Shape [tokens, K]: 1 for a token's adapter, otherwise 0.

    Outputs:
        Tensor of shape [tokens, out].
    """

    @classmethod
    def from_cells(
        cls, cell: ExpertWeight, adapted: Sequence[Optional[LoRAExpertWeight]], compute_dtype: Optional[str] = None
    ) -> "StackedLoRAExpertWeight":
        """Puts K adapters on a weight of experts in float; as StackedLoRADense.from_cells."""
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        present = [one for one in adapted if one is not None]
        first = present[0]
        self.weight = cell.weight
        self.leaf, self.experts, self.product = cell.leaf, cell.experts, cell.product
        self.in_channels, self.out_channels = cell.in_channels, cell.out_channels
        self.dtype = first.dtype
        self.adapters = len(adapted)
        self.rank = max(one.lora_rank for one in present)
        together = self.adapters * self.rank
        dtype = first.mindpet_delta_lora_a.dtype
        shapes = {"a": [self.rank, self.in_channels], "b": [self.out_channels, self.rank]}
        for part, shape in shapes.items():
            name = f"mindpet_delta_lora_{part}"
            zeros = initializer("zeros", [self.adapters, self.experts, *shape], dtype)
            setattr(self, name, Parameter(zeros, name=f"{first.adapter_path}.{name}"))
        scales = np.array([0.0 if one is None else one.scale for one in adapted], np.float32)
        # [K, K r]: the scale of each adapter at its r columns.
        self.scales = Tensor(np.kron(np.diag(scales), np.ones((1, self.rank), np.float32)))
        self.a_product = GroupedProduct(self.in_channels, together)
        self.b_product = GroupedProduct(together, self.out_channels)
        self.cast, self.transpose, self.reshape = ops.Cast(), ops.Transpose(), ops.Reshape()
        return self

    def lora_parameters(self) -> Tuple[Parameter, Parameter]:
        """Returns A and B of all adapters."""
        return self.mindpet_delta_lora_a, self.mindpet_delta_lora_b

    def operands(self, after: Tensor) -> Operands:
        """Returns the factors of construct: W, A^T [experts, in, K r] and B^T [experts, K r, out]."""
        together = self.adapters * self.rank
        a = self.transpose(self.cast(self.mindpet_delta_lora_a, self.dtype), (1, 3, 0, 2))
        b = self.transpose(self.cast(self.mindpet_delta_lora_b, self.dtype), (1, 0, 3, 2))
        a = self.reshape(a, (self.experts, self.in_channels, together))
        b = self.reshape(b, (self.experts, together, self.out_channels))
        return self.product.operand(self.weight, self.dtype), a, b

    hold_base = ExpertWeight.hold_base

    def construct(self, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, groups: Tensor, owners: Tensor) -> Tensor:
        own = ops.matmul(owners, self.cast(self.scales, owners.dtype))
        return self.product(x, weight, groups) + self.b_product(self.a_product(x, a, groups) * own, b, groups)

    def extend_repr(self) -> str:
        return (
            f"experts={self.experts}, in_channels={self.in_channels}, out_channels={self.out_channels}, "
            f"adapters={self.adapters}, largest_rank={self.rank}, compute_dtype={self.dtype}"
        )
