"""StackedAdamW: AdamW on the parameters of several adapters, each with a learning rate and a step count of its own."""

from typing import Any, Sequence, Tuple

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

_adamw = ops.MultitypeFuncGraph("stacked_adamw")


@_adamw.register(*["Tensor"] * 11)
def _update(beta1, beta2, eps, step, rate, applied, decay, parameter, gradient, first, second):
    """Updates a parameter [K, ...] and its moments; step, rate and applied are [K]."""
    gradient = gradient.astype(mstype.float32)
    new_first = first * beta1 + gradient * (1.0 - beta1)
    new_second = second * beta2 + gradient * gradient * (1.0 - beta2)
    correction1 = 1.0 - ops.pow(beta1, step)
    correction2 = 1.0 - ops.pow(beta2, step)
    shape = parameter.shape
    denominator = ops.sqrt(new_second / by_adapter(correction2, shape)) + eps
    moved = parameter.astype(mstype.float32) * by_adapter(1.0 - rate * decay, shape)
    moved = moved - new_first / denominator * by_adapter(rate / correction1, shape)
    # Not a product with 0: what is not applied may be NaN.
    is_applied = by_adapter(applied, shape)
    done = ops.assign(first, ops.select(is_applied, new_first, first))
    done = ops.depend(ops.assign(second, ops.select(is_applied, new_second, second)), done)
    new = ops.select(is_applied, moved.astype(parameter.dtype), parameter)
    return ops.depend(ops.assign(parameter, new), done)


def by_adapter(values: Tensor, shape: Tuple[int, ...]) -> Tensor:
    """Returns [K] as [K, ...], without the tables that MindSpore's CPU kernels keep for what they broadcast."""
    return ops.broadcast_to(values.reshape((-1,) + (1,) * (len(shape) - 1)), shape)


class UpdateOfEach:
    """The update of StackedAdamW, for an optimizer with its attributes: a class beside nn.Optimizer.

    Attributes:
        weights (tuple of Parameter): What is updated, [K, ...] each: the parameters, or float32 copies of them.
        global_step (Parameter): int32 [K, 1], the steps that each adapter has taken.
        exp_avg, exp_avg_sq (tuple of Parameter): The moments.
        beta1, beta2, eps (Tensor): float32 [1].
        decays (tuple of Tensor): lambda for each of the weights, float32 [1].
    """

    def decays_of_groups(self) -> Tuple[Tensor, ...]:
        """Returns ``decays`` by the groups that the optimizer was given."""
        decays = self.weight_decay if self.is_group else [self.weight_decay] * len(self.parameters)
        return tuple(Tensor([_number(decay)], mstype.float32) for decay in decays)

    def update(self, gradients: Tuple[Tensor, ...], rates: Tensor, applied: Tensor) -> Tuple[Tensor, ...]:
        """Updates the weights, moments and steps of the adapters whose gradients are applied."""
        steps = self.global_step.reshape((-1,)) + applied.astype(mstype.int32)
        counted = ops.assign(self.global_step, steps.reshape(self.global_step.shape))
        step = ops.depend(steps, counted).astype(mstype.float32)
        update = ops.partial(_adamw, self.beta1, self.beta2, self.eps, step, rates, applied)
        return self.hyper_map(update, self.decays, self.weights, gradients, self.exp_avg, self.exp_avg_sq)


class StackedAdamW(UpdateOfEach, nn.Optimizer):
    r"""AdamW for parameters [K, ...] of K adapters, each with a learning rate and a count of steps t of its own.

    .. math::
        m = \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2, \quad
        w = w (1 - \eta \lambda) - \eta \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    So each adapter takes the steps that MindFormers' AdamW would take with it alone. One whose gradients are not
    applied keeps its weights, its moments and its t, bit for bit, whatever the gradients hold. Where weights and
    gradients are zero, as in the rows and columns beyond an adapter's rank, they stay zero. These are plain operators
    on every device: MindSpore's kernel of Adam, which trains one adapter on a CPU, has one rate and one t for a tensor.

    Args:
        params (list): Parameters [K, ...], or groups of them as for MindSpore's optimizers, without rates.
        learning_rate (LearningRateSchedule): Returns the rates float32 [K] for steps int32 [K].
        betas (list of float): beta_1 and beta_2. Default: (0.9, 0.999).
        eps (float): epsilon. Default: 1e-8.
        weight_decay (float): lambda. Default: 0.0.

    Inputs:
        - **gradients** (tuple of Tensor) - In the shapes of the parameters.
        - **rates** (Tensor) - float32 [K].
        - **applied** (Tensor) - bool [K]: whether the gradients of an adapter count.

    Outputs:
        Tuple of the new values of the parameters.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """

    def __init__(
        self,
        params: Any,
        learning_rate: LearningRateSchedule,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(learning_rate, params, weight_decay=weight_decay)
        adapters = self.parameters[0].shape[0]
        self.beta1, self.beta2 = (Tensor([beta], mstype.float32) for beta in betas)
        self.eps = Tensor([eps], mstype.float32)
        self.global_step = Parameter(Tensor(np.zeros((adapters, 1)), mstype.int32), "global_step", requires_grad=False)
        self.exp_avg = self._moments("adam_m")
        self.exp_avg_sq = self._moments("adam_v")
        self.decays = self.decays_of_groups()
        self.weights = self._parameters

    def _moments(self, prefix):
        return ParameterTuple(
            Parameter(initializer("zeros", p.shape, mstype.float32), f"{prefix}.{p.name}", requires_grad=False)
            for p in self.parameters
        )

    def construct(self, gradients: Tuple[Tensor, ...], rates: Tensor, applied: Tensor) -> Tuple[Tensor, ...]:
        return self.update(gradients, rates, applied)


def _number(decay):
    return float(decay.asnumpy()) if isinstance(decay, Tensor) else float(decay)
