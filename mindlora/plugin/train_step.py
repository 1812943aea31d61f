"""The train step: MindFormers' own, with an overflow check that has kernels on every device."""

from typing import Any, Tuple

import mindspore as ms
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper import MFTrainOneStepCell
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

_not_finite = ops.MultitypeFuncGraph("not_finite")


@_not_finite.register("Tensor")
def _count_not_finite(gradient):
    """Returns how many elements are NaN or infinite: float32, shape []."""
    return ops.logical_not(ops.isfinite(gradient)).astype(mstype.float32).sum()


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class LoraTrainOneStepCell(MFTrainOneStepCell):
    """MFTrainOneStepCell for CPUs as well as for Ascend.

    Loss scaling, clipping, global norm and the five outputs (loss, overflow, loss scale, learning rate, global norm)
    are MindFormers' own. MindFormers detects overflow with kernels that only Ascend has. On any other device, this
    cell reports an overflow if an element of a gradient is NaN or infinite, which is what those kernels report too.

    Args:
        As for mindformers.wrapper.MFTrainOneStepCell.
    """

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, **kwargs):
        super().__init__(network, optimizer, **kwargs)
        self.checks_values = ms.get_context("device_target") != "Ascend"
        self.no_status = Tensor([0] * 8, mstype.int32)

    def start_overflow_check(self, pre_cond: Any, compute_input: Any) -> Tuple[Tensor, Any]:
        """Returns a cleared overflow status, and ``compute_input``."""
        if self.checks_values:
            return self.no_status, compute_input
        return super().start_overflow_check(pre_cond, compute_input)

    def get_overflow_status(self, status: Tensor, compute_output: Any) -> Tensor:
        """Returns whether the gradients in ``compute_output`` have overflowed."""
        if self.checks_values:
            # The gradients have been reduced over the ranks by now, so every rank sees the same ones.
            counts = self.hyper_map(_not_finite, compute_output)
            return ops.addn(counts) > 0
        return super().get_overflow_status(status, compute_output)
