"""LoRA on the weights of the routed experts in MindFormers' mcore models, stacked for a grouped matrix product.

MindFormers' FFNGroupedGEMM holds two of them. ExpertWeight presents each as a separate cell, so that it can be
selected, adapted, saved and merged like any other; mindlora.network.cells.routed_experts computes the forward of
FFNGroupedGEMM with the two.
"""

import math
import sys
from typing import List, Optional, Tuple

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.auto_generate import GroupedMatmul

from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.pair_shapes import EXPERTS
from mindlora.models.lora_config import LoraConfig
from mindlora.network.cells.cell import LoRACell, refuse_own_forward, refuse_unsupported
from mindlora.network.cells.linear_base import adopt_weight
from mindlora.ops.frozen_linear import FrozenExperts

FFN_MODULE = "mindformers.parallel_core.training_graph.transformer.moe.ffn"
Operands = Tuple[Tensor, Tensor, Tensor]


class ExpertWeight(nn.Cell):
    """One stacked weight of a layer's experts: y_e = x_e W_e for the tokens x_e of each expert.

    It shares the weight of its ``holder``, MindFormers' FFNGroupedGEMM; ``leaf`` is "weight1" (gate_proj and up_proj)
    or "weight2" (down_proj).

    Weights:
        weight [experts * in_channels, out_channels].

    Inputs:
        - **x** (Tensor) - Shape [tokens, in_channels], sorted by expert.
        - **weight**, **a**, **b** (Tensor) - The result of ``operands``, or this device's part of it.
        - **groups** (Tensor) - int64, the token after each expert's last.

    Outputs:
        Tensor of shape [tokens, out_channels].
    """

    def __init__(self, holder: nn.Cell, leaf: str):
        super().__init__()
        # The tuple hides it from MindSpore, as in LoRACell.
        self._holder = (holder,)
        self.leaf = leaf
        self._take_weight()
        self.experts = holder.num_local_experts
        *rows, self.out_channels = self.weight.shape
        self.in_channels = math.prod(rows) // self.experts
        self.dtype = holder.compute_dtype
        self.product = GroupedProduct(self.in_channels, self.out_channels)
        self.cast = ops.Cast()

    def _take_weight(self):
        self.weight = getattr(self.holder, self.leaf)

    @property
    def holder(self) -> nn.Cell:
        """The FFNGroupedGEMM that holds the weight."""
        return self._holder[0]

    def operands(self, after: Tensor) -> Operands:
        """Returns the factors of construct, read after ``after`` is computed; W stands in for the missing A and B."""
        weight = self.product.operand(self.weight, self.dtype)
        return weight, weight, weight

    def hold_base(self, rounds: bool) -> None:
        """Makes the cell multiply by a frozen 16-bit W directly: see GroupedProduct.hold."""
        self.product.hold(rounds)

    def decoder(self, dtype: mstype.Type) -> Optional[nn.Cell]:
        """Returns the function that decodes the weight into a dtype; None for a weight in float."""
        return None

    def construct(self, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
        return self.product(x, weight, groups)


class GroupedProduct(nn.Cell):
    """x_e W_e for the tokens x_e of each expert, by MindFormers' operator.

    Attributes:
        held (FrozenExperts or None): The product with a 16-bit W; see ``hold``.
    """

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.shape = (-1, in_channels, out_channels)
        self.reshape = ops.Reshape()
        self.grouped_matmul = grouped_matmul()
        self.held = None
        self.cast = ops.Cast()

    def hold(self, rounds: bool) -> None:
        """Makes the product take a frozen 16-bit W directly; as LinearBase.hold."""
        self.held = FrozenExperts(rounds)

    def operand(self, weight: Parameter, dtype: mstype.Type) -> Tensor:
        """W as the product takes it: in a dtype, or in the held bits."""
        return weight if self.held is not None else self.cast(weight, dtype)

    def construct(self, x: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
        if self.held is not None:
            return self.held(x, weight, groups)
        x = self.cast(x, weight.dtype)
        weight = self.reshape(weight, self.shape)
        return self.grouped_matmul([x], [weight], None, None, None, None, None, groups)[0]


class LoRAExpertWeight(LoRACell):
    """A stacked weight of experts with a low-rank update: y_e = x_e W_e + ((x_e A_e^T) * scale) B_e^T.

    All experts of a layer have the same rank. The groups of tokens are the base's.

    Weights:
        weight [experts * in, out], mindpet_delta_lora_a [experts, r, in], mindpet_delta_lora_b [experts, out, r].

    Inputs:
        As for ExpertWeight.

    Outputs:
        Tensor of shape [tokens, out].

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    layout = EXPERTS

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return (ExpertWeight,)

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        check_holder(cell.holder)
        refuse_unsupported(config, cls.layout.cells)

    @classmethod
    def weight_shape(cls, cell: nn.Cell) -> Tuple[int, ...]:
        return cell.experts, cell.out_channels, cell.in_channels

    def _adopt(self, cell, config):
        adopt_weight(self, cell)
        self.leaf = cell.leaf
        self.experts = cell.experts
        self.in_channels, self.out_channels = cell.in_channels, cell.out_channels
        self.dtype = getattr(mstype, config.compute_dtype) if config.compute_dtype else cell.dtype
        self.decode = cell.decoder(self.dtype)
        self.product = cell.product
        self.a_product = GroupedProduct(self.in_channels, self.lora_rank)
        self.b_product = GroupedProduct(self.lora_rank, self.out_channels)
        self.cast = ops.Cast()
        self.transpose = ops.Transpose()

    def operands(self, after: Tensor) -> Operands:
        """Returns the factors of construct, read after ``after`` is computed: W, A and B."""
        a = self.cast(self.mindpet_delta_lora_a, self.dtype)
        b = self.cast(self.mindpet_delta_lora_b, self.dtype)
        if self.packed:
            weight = self.decode(after, self.weight, self.weight_absmax, self.weight_scales, self.weight_offsets)
        else:
            weight = self.product.operand(self.weight, self.dtype)
        return weight, a, b

    # The plain cell uses this product too.
    hold_base = ExpertWeight.hold_base

    def construct(self, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
        low_rank = self.a_product(x, self.transpose(a, (0, 2, 1)), groups) * self.cast(self.scale, self.dtype)
        return self.product(x, weight, groups) + self.b_product(low_rank, self.transpose(b, (0, 2, 1)), groups)

    def extend_repr(self) -> str:
        quantization = f", quantization={self.quantization}" if self.quantization else ""
        return (
            f"experts={self.experts}, in_channels={self.in_channels}, out_channels={self.out_channels}, "
            f"lora_rank={self.lora_rank}, lora_alpha={self.lora_alpha}, compute_dtype={self.dtype}{quantization}"
        )


def check_holder(cell: nn.Cell) -> None:
    """Raises UnsupportedCellError for an FFNGroupedGEMM whose weights cannot become separate cells."""
    kind = type(cell).__name__
    refuse_own_forward(cell, (sys.modules[FFN_MODULE].FFNGroupedGEMM,), "the adapter's cell")
    if getattr(cell.config, "enable_expert_relocation", False):
        raise UnsupportedCellError(
            f"{kind} moves experts between devices (enable_expert_relocation), and their adapters would stay behind. "
            "Set enable_expert_relocation: False, or add the experts to exclude_modules."
        )


class CpuGroupedMatmul(nn.Cell):
    """x_e W_e for the rows x_e of each group, in plain operators: a CPU has no kernel of GroupedMatmul.

    Each row is multiplied by the weights of all groups, and the product with its own group is selected. Arithmetic
    and result memory grow with the number of groups, so this is for small models.

    Inputs:
        As for MindSpore's GroupedMatmul with split_item 3 and group_type 0.

    Outputs:
        A tuple of one Tensor, [rows, out].
    """

    def construct(
        self,
        x: List[Tensor],
        weight: List[Tensor],
        bias: Optional[Tensor],
        scale: Optional[Tensor],
        offset: Optional[Tensor],
        antiquant_scale: Optional[Tensor],
        antiquant_offset: Optional[Tensor],
        group_list: Tensor,
    ) -> Tuple[Tensor]:
        rows, groups = x[0].shape[0], weight[0].shape[0]
        row = ops.cast(ops.arange(rows), mstype.int64).expand_dims(0)
        # [groups, rows]: whether a row is before the end of a group. It belongs to the first such group.
        before = ops.cast(row < group_list.reshape((groups, 1)), x[0].dtype)
        own = before - ops.concat((ops.zeros((1, rows), x[0].dtype), before[:-1]), 0)
        products = ops.matmul(ops.tile(x[0].expand_dims(0), (groups, 1, 1)), weight[0])
        return ((products * own.expand_dims(2)).sum(0),)


def grouped_matmul() -> object:
    """Returns the grouped product for the current device, called as MindFormers calls GroupedMatmul."""
    return CpuGroupedMatmul() if ms.get_context("device_target") == "CPU" else GroupedMatmul(split_item=3, group_type=0)
