"""The grouped matrix product of routed experts, on each device."""

from typing import List, Optional, Tuple

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.auto_generate import GroupedMatmul


class CpuGroupedMatmul(nn.Cell):
    """x_e W_e for the rows x_e of each group, in plain operators: a CPU has no kernel of GroupedMatmul.

    Each row is multiplied by the weights of all groups, and the product with its own is taken: as many times the
    arithmetic, and the memory of the result, as there are groups. It is meant for small models.

    Inputs:
        As MindSpore's GroupedMatmul with split_item 3 and group_type 0 takes them.

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
        # [groups, rows]: whether a row is before the end of a group. It belongs to the first of which this is so.
        before = ops.cast(row < group_list.reshape((groups, 1)), x[0].dtype)
        own = before - ops.concat((ops.zeros((1, rows), x[0].dtype), before[:-1]), 0)
        products = ops.matmul(ops.tile(x[0].expand_dims(0), (groups, 1, 1)), weight[0])
        return ((products * own.expand_dims(2)).sum(0),)


def grouped_matmul() -> object:
    """Returns what multiplies rows in groups on the current device, called as MindFormers calls GroupedMatmul."""
    return CpuGroupedMatmul() if ms.get_context("device_target") == "CPU" else GroupedMatmul(split_item=3, group_type=0)
