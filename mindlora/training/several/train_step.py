"""The train step of several adapters, each with its own loss, norm, clipping, rate and decision to skip."""

from typing import Any, Dict, Optional, Sequence, Tuple, Union

import numpy as np
from mindformers.core.loss.loss import CrossEntropyLoss
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindlora.models.names import TRANSIENT
from mindlora.network.graph_cache import CompiledOnce
from mindlora.training.model.loss_in_pieces import put_loss_in_pieces
from mindlora.training.model.mcore_model import gpt_model_of, is_gpt_model, replace_loss
from mindlora.training.model.network import base_of, with_loss
from mindlora.training.step.packing import install_segment_mask
from mindlora.training.step.token_gradients import TokenGradients
from mindlora.training.step.train_step import StepRecord

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
    # Not a product with 0: values that are not applied may be NaN.
    is_applied = by_adapter(applied, shape)
    done = ops.assign(first, ops.select(is_applied, new_first, first))
    done = ops.depend(ops.assign(second, ops.select(is_applied, new_second, second)), done)
    new = ops.select(is_applied, moved.astype(parameter.dtype), parameter)
    return ops.depend(ops.assign(parameter, new), done)


def by_adapter(values: Tensor, shape: Tuple[int, ...]) -> Tensor:
    """Expands [K] to [K, ...], without the tables that MindSpore's CPU kernels keep for broadcasts."""
    return ops.broadcast_to(values.reshape((-1,) + (1,) * (len(shape) - 1)), shape)


class UpdateOfEach:
    """The update of StackedAdamW, as a mixin for optimizers with its attributes.

    Attributes:
        weights (tuple of Parameter): The parameters to update, [K, ...] each, or float32 copies of them.
        global_step (Parameter): int32 [K, 1], the number of steps that each adapter has taken.
        exp_avg, exp_avg_sq (tuple of Parameter): The moments.
        beta1, beta2, eps (Tensor): float32 [1].
        decays (tuple of Tensor): lambda for each weight, float32 [1].
    """

    def decays_of_groups(self) -> Tuple[Tensor, ...]:
        """Returns ``decays`` from the optimizer's groups."""
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
    r"""AdamW for parameters [K, ...] of K adapters, each with its own learning rate and step count t.

    .. math::
        m = \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2, \quad
        w = w (1 - \eta \lambda) - \eta \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    So each adapter takes the same steps as alone with MindFormers' AdamW. An adapter whose gradients are not applied
    keeps its weights, moments and t, bit for bit, whatever the gradients hold. Where weights and gradients are zero, as
    in the rows and columns beyond an adapter's rank, they stay zero. It uses plain operators on every device:
    MindSpore's Adam kernel, which trains a single adapter on a CPU, has one rate and one t per tensor.

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


# The losses of several adapters on one MindFormers model, with a batch and a sum for each adapter.


class AdapterLosses(nn.Cell):
    """The cross entropy of each adapter's tokens, from the parts of the model's CrossEntropyLoss.

    Inputs:
        - **logits** (Tensor) - float32 [K n, vocabulary], the first adapter's first; the head's input, if
          put_loss_in_pieces was called.
        - **labels** (Tensor) - int32 [K n].
        - **mask** (Tensor) - float32 [K n]: 1 for labels that count.

    Outputs:
        Tuple of two tensors float32 [K]: the sum over each adapter's counted tokens, and their number plus 1e-8, as
        CrossEntropyLoss returns them for a batch.
    """

    def __init__(self, loss: CrossEntropyLoss, adapters: int):
        super().__init__()
        self.log_softmax = loss._log_softmax
        self.negative_log_likelihood = loss._nllloss
        self.adapters = adapters

    def construct(self, logits: Tensor, labels: Tensor, mask: Tensor) -> Tuple[Tensor, Tensor]:
        losses = self.of_tokens(logits, labels)
        # Selected, not multiplied: losses that do not count may be infinite.
        losses = ops.select(mask > 0, losses, ops.zeros_like(losses))
        return losses.reshape((self.adapters, -1)).sum(-1), mask.reshape((self.adapters, -1)).sum(-1) + 1e-8

    def of_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss of each token, float32 [K n]."""
        log_probabilities, one_hot = self.log_softmax(logits, labels)
        return self.negative_log_likelihood(log_probabilities, one_hot)


def rows_for_each(x: Tensor, adapters: int) -> Tensor:
    """Returns [K rows, N], the first adapter's first, from shared rows [rows, N] or from [rows, K, N]."""
    return of_each(x, adapters, x.ndim == 3)


def of_each(x: Tensor, adapters: int, has_own: bool) -> Tensor:
    """Returns [K rows, ...], the first adapter's first, from shared rows [rows, ...] or from [rows, K, ...]."""
    if has_own:
        return ops.swapaxes(x, 0, 1).reshape((-1, *x.shape[2:]))
    return ops.tile(x, (adapters, *(1,) * (x.ndim - 1)))


class RowsOfAdapters(nn.Cell):
    """Passes a network with K adapters the rows of a batch: the same rows for each adapter, or its own.

    Inputs:
        - **\\*inputs** (Tensor) - [rows, N] each, or [rows, K, N] if each adapter has its own rows.

    Outputs:
        The network's outputs for K times the rows, the first adapter's first; for an mcore model, the first two
        tensors, since its further losses are zero without routed experts or with moe_aux_loss_coeff 0.
    """

    def __init__(self, network: nn.Cell, adapters: int):
        super().__init__(auto_prefix=False)
        self.network = network
        self.adapters = adapters
        self.returns_others = gpt_model_of(network) is not None

    def construct(self, *inputs: Tensor) -> Tuple[Tensor, ...]:
        batch = ()
        for x in inputs:
            batch += (rows_for_each(x, self.adapters),)
        outputs = self.network(*batch)
        return (outputs[0], outputs[1]) if self.returns_others else outputs


def losses_of_adapters(network: nn.Cell, adapters: int) -> RowsOfAdapters:
    """Returns a cell that computes the losses of K adapters on a batch; the model's loss is replaced in place."""
    model = with_loss(network)
    losses = AdapterLosses(model.loss, adapters)
    if is_gpt_model(model):
        replace_loss(model, losses, counts_tokens=True)
    else:
        model.loss = losses
    return RowsOfAdapters(network, adapters)


_scaled_by_adapter = ops.MultitypeFuncGraph("scaled_by_adapter")
_squares_by_adapter = ops.MultitypeFuncGraph("squares_by_adapter")
# Rows of the record: loss, gradient norm, counted tokens, whether the step was skipped, learning rate.
_RECORDED = 5


@_scaled_by_adapter.register("Tensor", "Tensor")
def _scale(factors, gradient):
    return gradient.astype(mstype.float32) * by_adapter(factors, gradient.shape)


@_squares_by_adapter.register("Tensor")
def _sum_of_squares(gradient):
    return (gradient * gradient).reshape((gradient.shape[0], -1)).sum(-1)


class UpdatesOfAdapters(nn.Cell):
    """The updates of K adapters from their gradients, their records, and their limits and factors from callbacks.

    An adapter's step is skipped, which changes neither its weights, its moments nor its learning rate's step, if its
    loss or gradient norm is not finite or exceeds its limit, if no token of its rows counts, or if it has been stopped.
    This does not affect the other adapters.

    Attributes:
        scale_sense (float or None): The loss scale, if there is one.

    Args:
        optimizer (UpdateOfEach): The optimizer of the adapters' parameters.
        max_grad_norm (float, optional): The largest norm of an adapter's gradient. Default: None, none is clipped.
    """

    scale_sense: Optional[float] = None
    # What else the last step measured of each adapter, such as the tokens and measures of preferences.
    more: Sequence[Dict[str, Any]] = ()

    def __init__(self, optimizer: nn.Optimizer, max_grad_norm: Optional[float] = None):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.learning_rate = optimizer.learning_rate
        self.adapters = optimizer.parameters[0].shape[0]
        self.use_clip_grad = max_grad_norm is not None
        self.max_grad_norm = Tensor(0.0 if max_grad_norm is None else max_grad_norm, mstype.float32)
        self.hyper_map = ops.HyperMap()
        # Values that callbacks set and read between two steps.
        self.record = _transient("record", np.zeros((_RECORDED, self.adapters)))
        self.limits = _transient("limits", np.full((2, self.adapters), np.inf))
        self.rate_factors = _transient("rate_factors", np.ones(self.adapters))
        self.stopped = _transient("stopped", np.zeros(self.adapters))

    def update(
        self, losses: Tensor, counts: Tensor, gradients: Tuple[Tensor, ...], factors: Tensor
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """Takes a step of each adapter.

        Args:
            losses (Tensor): float32 [K], the mean loss of each.
            counts (Tensor): float32 [K], the number of each adapter's counted tokens, possibly 0.
            gradients (tuple of Tensor): [K, ...], in the shapes of the parameters.
            factors (Tensor): float32 [K], the factors that turn these into gradients of the mean losses.

        Returns:
            As in MFTrainOneStepCell, over the adapters whose step was not skipped: mean loss, whether none was left,
            largest learning rate, and largest gradient norm.
        """
        # As in LoraTrainOneStepCell, the loss is NaN if no token counts.
        losses = ops.select(counts > 0.5, losses, ops.full_like(losses, np.nan))
        gradients = self.hyper_map(ops.partial(_scaled_by_adapter, factors), gradients)
        norms = ops.sqrt(ops.stack(self.hyper_map(_squares_by_adapter, gradients)).sum(0))
        if self.use_clip_grad:
            # The clipping of LoraTrainOneStepCell.
            clipping = self.max_grad_norm / (ops.maximum(norms, self.max_grad_norm) + 1e-6)
            clipping = ops.minimum(clipping, Tensor(1, mstype.float32))
            gradients = self.hyper_map(ops.partial(_scaled_by_adapter, clipping), gradients)
        rates = self.learning_rate(self.optimizer.global_step) * self.rate_factors
        # A comparison with NaN is false.
        applied = ops.logical_and(losses <= self.limits[0], norms <= self.limits[1])
        applied = ops.logical_and(applied, ops.logical_and(ops.isfinite(losses), ops.isfinite(norms)))
        applied = ops.logical_and(applied, self.stopped == 0)
        updated = self.optimizer(gradients, rates, applied)
        record = ops.stack((losses, norms, counts, 1.0 - applied.astype(mstype.float32), rates))
        recorded = ops.depend(ops.assign(self.record, record), updated)
        left = applied.astype(mstype.float32)
        kept = ops.select(applied, losses, ops.zeros_like(losses))
        loss = ops.depend(kept.sum() / ops.maximum(left.sum(), Tensor(1, mstype.float32)), recorded)
        return loss, left.sum() == 0, rates.max(), norms.max().reshape((1,))

    def last_record(self) -> StepRecord:
        """Returns the mean loss, the counted tokens and the largest rate of the adapters whose last step counted."""
        losses, _, counts, skipped, rates = self.record.asnumpy()
        counted = skipped == 0
        if not counted.any():
            return StepRecord(float("nan"), skipped=True)
        tokens = float(counts[counted].sum())
        return StepRecord(float(losses[counted].mean()), tokens=tokens, learning_rate=float(rates[counted].max()))

    def record_of(self, adapter: int) -> StepRecord:
        """Returns one adapter's measurements in the last step."""
        loss, norm, count, skipped, rate = (float(value) for value in self.record.asnumpy()[:, adapter])
        record = StepRecord(loss, norm, round(count), skipped > 0, learning_rate=rate)
        return record._replace(**self.more[adapter]) if self.more else record

    def set_limits(self, adapter: int, loss: float, gradient_norm: float) -> None:
        """Sets the loss and the gradient norm before clipping above which an adapter's step is skipped."""
        _set(self.limits, (slice(None), adapter), [loss, gradient_norm])

    def set_rate_factor(self, adapter: int, factor: float) -> None:
        """Sets the factor of an adapter's learning rate."""
        _set(self.rate_factors, adapter, factor)

    def stop(self, adapter: int) -> None:
        """Stops an adapter's learning."""
        _set(self.stopped, adapter, 1)


class StackedStep(CompiledOnce, UpdatesOfAdapters):
    """UpdatesOfAdapters for a network that MindFormers trains, in place of MFTrainOneStepCell.

    Args:
        network (Cell): A MindFormers model with StackedLoRADense cells.
        optimizer (StackedAdamW): The optimizer of their parameters.
        loss_in_pieces (bool or int): As for LoraTrainOneStepCell. Default: True.
        use_clip_grad (bool): Whether each adapter's gradient is clipped to max_grad_norm. Default: False.
        max_grad_norm (float): The largest norm of an adapter's gradient. Default: 1.0.
        scale_sense (float): The loss scale. Default: 1.0.
        **others: Arguments that MindFormers passes to every train step, unused here.
    """

    is_mindformers_step = False
    loss_scaling_manager = exchange = None

    def __init__(
        self,
        network: nn.Cell,
        optimizer: StackedAdamW,
        loss_in_pieces: Union[bool, int] = True,
        use_clip_grad: bool = False,
        max_grad_norm: float = 1.0,
        scale_sense: float = 1.0,
        **others: Any,
    ):
        super().__init__(optimizer, max_grad_norm if use_clip_grad else None)
        del others
        put_loss_in_pieces(network, loss_in_pieces, steps_by_mindlora=True)
        self.network = network
        self.network.set_grad()
        self.weights = optimizer.parameters
        self.scale_sense = float(scale_sense)


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class StackedTrainOneStepCell(StackedStep):
    """A train step in which each of K adapters takes the same step as alone with LoraTrainOneStepCell.

    UpdatesOfAdapters says which steps are skipped. mindlora-run sets this cell in the YAML of a run with
    pet_config.adapters.

    Args:
        network, optimizer: As for StackedStep.
        micro_batches (int): Number of equal parts into which a batch is split. Default: 1.
        packed_boundary (int, optional): Token at which the examples of packed rows begin. Default: None, they are not.
        **kwargs: As for StackedStep.

    Inputs:
        - **\\*inputs** (Tensor) - Shared rows for all adapters, [rows, N], or each adapter's own rows, [rows, K, N].

    Outputs:
        As in MFTrainOneStepCell, over the adapters whose step was not skipped: mean loss, whether none was left, loss
        scale, largest learning rate, and largest gradient norm.
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: StackedAdamW,
        micro_batches: int = 1,
        packed_boundary: Optional[int] = None,
        **kwargs: Any,
    ):
        if packed_boundary is not None:
            install_segment_mask(base_of(network), packed_boundary)
        super().__init__(network, optimizer, **kwargs)
        self.micro_batches = micro_batches
        losses = losses_of_adapters(network, self.adapters)
        self.token_gradients = TokenGradients(losses, self.weights, micro_batches, self.adapters, self.adapters)

    def construct(self, *inputs: Tensor) -> Tuple:
        # As in LoraTrainOneStepCell, gradients have the size for which loss scales are chosen.
        positions = float(inputs[0].shape[0] * inputs[0].shape[-1])
        scale = Tensor(self.scale_sense / positions, mstype.float32)
        totals, counts, gradients = self.token_gradients(scale, *inputs)
        factors = positions / (self.scale_sense * counts)
        loss, is_skipped, rate, norm = self.update(totals / counts, counts, gradients, factors)
        return loss, is_skipped, scale, rate, norm


def _transient(name, value):
    """Returns a parameter that describes a step and is not part of the run's state."""
    return Parameter(Tensor(value, mstype.float32), name=f"{TRANSIENT}{name}", requires_grad=False)


def _set(parameter, place, value):
    values = parameter.asnumpy().copy()
    values[place] = value
    ops.assign(parameter, Tensor(values))
