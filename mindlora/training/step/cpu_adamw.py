"""MindFormers' AdamW in one kernel per parameter, instead of a dozen, for two of which MindSpore keeps tables."""

from typing import Tuple

import mindspore as ms
from mindformers.core.optim.adamw import AdamW
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

_adamw = ops.MultitypeFuncGraph("cpu_adamw")
# The operator has no parameters of its own, so all updates share it.
_adam = ops.Adam()


class CpuAdamW(AdamW):
    """AdamW (Loshchilov and Hutter, 2019) for float32 parameters, by MindSpore's Adam kernel.

    MindFormers' step t is p <- (1 - lr d) p - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps). The kernel's step is p
    <- p - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps'), the same with eps' = eps sqrt(1 - b2^t).
    """

    def construct(self, gradients: Tuple[Tensor, ...]) -> Tuple[bool, ...]:
        decay = self.get_weight_decay()
        rate = self.get_lr()
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        beta1, beta2 = self.beta1, self.beta2
        power1, power2 = ops.pow(beta1, self.global_step), ops.pow(beta2, self.global_step)
        eps = self.eps * ops.sqrt(1 - power2)
        weights, means, squares, filters = self._parameters, self.exp_avg, self.exp_avg_sq, self.optim_filter
        if self.is_group_lr:
            update = ops.partial(_adamw, power1, power2, beta1, beta2, eps)
            return self.hyper_map(update, rate, decay, weights, gradients, means, squares, filters)
        if self.is_group:
            update = ops.partial(_adamw, power1, power2, beta1, beta2, eps, rate)
            return self.hyper_map(update, decay, weights, gradients, means, squares, filters)
        update = ops.partial(_adamw, power1, power2, beta1, beta2, eps, rate, decay)
        return self.hyper_map(update, weights, gradients, means, squares, filters)


@_adamw.register(*["Tensor"] * 11, "Bool")
def _update(power1, power2, beta1, beta2, eps, rate, decay, weight, gradient, mean, square, is_updated):
    """Updates a parameter and its moments; returns True once that is done."""
    if not is_updated:
        return True
    gradient = ops.depend(gradient, ops.assign(weight, weight * (1 - rate * decay)))
    return ops.depend(True, _adam(weight, mean, square, power1, power2, rate, beta1, beta2, eps, gradient))


def use_cpu_adamw(optimizer: nn.Optimizer) -> None:
    """Turns MindFormers' AdamW into a CpuAdamW, in place, on a CPU in graph mode, if all its parameters are float32."""
    if ms.get_context("device_target") != "CPU" or ms.get_context("mode") != ms.GRAPH_MODE:
        return
    if type(optimizer) is AdamW and all(parameter.dtype == mstype.float32 for parameter in optimizer.parameters):
        # Settings and states stay, and so does the instance, to which callbacks refer.
        optimizer.__class__ = CpuAdamW
