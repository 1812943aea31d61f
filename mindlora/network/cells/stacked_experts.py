"""StackedLoRAExpertWeight: the weight of a layer's experts with K adapters, each of which trains on its own tokens."""

from typing import Optional, Sequence, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from mindlora.network.cells.experts import ExpertWeight, GroupedProduct, LoRAExpertWeight, Operands


class StackedLoRAExpertWeight(nn.Cell):
    r"""y_e = x_e W_e + (mask(x_e A_e^T) * scale) B_e^T for the tokens x_e of expert e, where A_e and B_e hold the K
    adapters' one after the other: K r rows of A and columns of B, and the mask keeps of each token those r that are of
    its adapter.

    So the tokens of an expert stay together, whosever they are, at the price of K times the small products. Parameters
    and ranks are as in StackedLoRADense. Only from_cells creates such a cell.

    Weights:
        weight [experts * in, out], mindpet_delta_lora_a [K, experts, r, in], mindpet_delta_lora_b [K, experts, out, r].

    Inputs:
        - As for ExpertWeight, and
        - **owners** (Tensor) - Shape [tokens, K]: 1 for the adapter that a token is of, else 0.

    Outputs:
        Tensor of shape [tokens, out].
    """

    @classmethod
    def from_cells(
        cls, cell: ExpertWeight, adapted: Sequence[Optional[LoRAExpertWeight]], compute_dtype: Optional[str] = None
    ) -> "StackedLoRAExpertWeight":
        """Puts K adapters on the weight of experts, in float; as StackedLoRADense.from_cells."""
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
        """Returns what construct multiplies by: W, A^T [experts, in, K r] and B^T [experts, K r, out]."""
        together = self.adapters * self.rank
        a = self.transpose(self.cast(self.mindpet_delta_lora_a, self.dtype), (1, 3, 0, 2))
        b = self.transpose(self.cast(self.mindpet_delta_lora_b, self.dtype), (1, 0, 3, 2))
        a = self.reshape(a, (self.experts, self.in_channels, together))
        b = self.reshape(b, (self.experts, together, self.out_channels))
        return self.cast(self.weight, self.dtype), a, b

    def construct(self, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, groups: Tensor, owners: Tensor) -> Tensor:
        own = ops.matmul(owners, self.cast(self.scales, owners.dtype))
        return self.product(x, weight, groups) + self.b_product(self.a_product(x, a, groups) * own, b, groups)

    def extend_repr(self) -> str:
        return (
            f"experts={self.experts}, in_channels={self.in_channels}, out_channels={self.out_channels}, "
            f"adapters={self.adapters}, largest_rank={self.rank}, compute_dtype={self.dtype}"
        )
