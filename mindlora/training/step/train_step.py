"""The train step: accumulates micro-batches, exchanges gradients, skips bad steps, and works on every device."""

import ctypes
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple, Union

import mindspore as ms
import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper import MFTrainOneStepCell
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.communication import get_group_size, get_local_rank_size, get_rank

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, check_number
from mindlora.models.names import TRANSIENT
from mindlora.network.graph_cache import CompiledOnce
from mindlora.network.tree import allocates_ranks, lora_cells
from mindlora.training.adalora.rank_budget import RankBudget
from mindlora.training.exchange.exchange import Exchange, FlatLayout, Ranks, make_exchange
from mindlora.training.exchange.settings import exchange_settings
from mindlora.training.log import logger
from mindlora.training.model.loss_in_pieces import put_loss_in_pieces
from mindlora.training.model.mcore_cpu_cells import use_mcore_cpu_cells
from mindlora.training.model.mcore_model import McoreLoss, gpt_model_of, rows_of
from mindlora.training.model.network import base_of, count_tokens_in_loss
from mindlora.training.preference.loss import SUMS, answer_tokens, preference_loss, preference_measures
from mindlora.training.preference.settings import preference_settings
from mindlora.training.step.cpu_adamw import use_cpu_adamw
from mindlora.training.step.packing import install_segment_mask
from mindlora.training.step.rate_factor import RateFactor
from mindlora.training.step.token_gradients import TokenGradients

_not_finite = ops.MultitypeFuncGraph("not_finite")
_scaled = ops.MultitypeFuncGraph("scaled")
_sum_of_squares = ops.MultitypeFuncGraph("sum_of_squares")


@_not_finite.register("Tensor")
def _count_not_finite(gradient):
    """Returns the number of NaN or infinite elements: float32, shape []."""
    return ops.logical_not(ops.isfinite(gradient)).astype(mstype.float32).sum()


@_scaled.register("Tensor", "Tensor")
def _scale(factor, gradient):
    return gradient.astype(mstype.float32) * factor


@_sum_of_squares.register("Tensor")
def _square_and_sum(gradient):
    return (gradient * gradient).sum()


class StepRecord(NamedTuple):
    """The measurements of a train step, over all ranks.

    Attributes:
        loss (float): Mean loss of the counted tokens, in nats; NaN if there are none.
        gradient_norm (float or None): Norm of the gradient before clipping.
        tokens (float or None): Counted tokens of all micro-batches of all ranks; None if the network does not count.
        skipped (bool): Whether the step changed nothing.
        stop (bool): Whether a rank has requested a stop.
        learning_rate (float or None): The rate that was used, or would have been used in a skipped step.
        measures (dict or None): Further measures of a step that learns from preferences (preference_measures), in which
            the loss is a mean over examples, or from rewards; the tokens are then those of the answers.
        loss_falls (bool): Whether the loss falls as the model learns; a policy's loss, of which only the gradient is
            meaningful, need not.
    """

    loss: float
    gradient_norm: Optional[float] = None
    tokens: Optional[float] = None
    skipped: bool = False
    stop: bool = False
    learning_rate: Optional[float] = None
    measures: Optional[Dict[str, float]] = None
    loss_falls: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether no token of the step counted, so that it had nothing to learn."""
        return self.tokens == 0


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class LoraTrainOneStepCell(CompiledOnce, MFTrainOneStepCell):
    """A train step for CPUs as well as for Ascend, on one device or data parallel.

    The loss is the mean over the counted tokens of all micro-batches of all ranks, and every rank reports this mean. A
    step is skipped, which changes neither weights, moments nor the learning rate's step, if a gradient overflows on any
    rank, if the loss or the gradient norm exceeds its limit, or if none of its tokens counts. The learning rate is the
    schedule's rate times a factor (set_rate_factor).

    In the semi-automatic parallel modes, and when MindFormers dumps local norms, the step is MindFormers' own, and none
    of the above holds, except that a step without counted tokens, whose loss is 0, is skipped. MindFormers detects
    overflow with kernels that only Ascend has. On other devices, this cell reports an overflow if an element of a
    gradient is NaN or infinite, as those kernels do, or so large that the norm is not finite.

    Args:
        network (Cell): As for mindformers.wrapper.MFTrainOneStepCell.
        optimizer (Optimizer): Likewise.
        micro_batches (int): Number of equal parts into which a batch is split; their gradients are added up, one part
            after another. mindlora-run sets it from runner_config.gradient_accumulation_steps. Default: 1.
        gradient_exchange (str or dict): How data-parallel processes exchange gradients: see docs/exchange.md.
            Default: "dense".
        record_gradient_norms (bool): Whether gradient_norms() is available. Default: False.
        rank_budget (bool): Whether AdaLoRA's ranks are allocated, as planned by the callback RankBudget. mindlora-run
            sets it. Default: False.
        packed_boundary (int, optional): Token at which the examples of packed rows begin; no example then sees another.
            mindlora-run sets it from the data. Default: None, the rows are not packed.
        preference (dict, optional): How the run learns from preferences: the fields of PreferenceSettings. Default:
            None, it learns the labels.
        loss_in_pieces (bool or int): Whether to compute logits and loss for some tokens at a time, without ever making
            the logits of all tokens (see LabelLosses), if the model's head is a linear cell, with or without plain
            LoRA; or the number of tokens in a piece. Default: True, the number from tokens_at_once.
        **kwargs: As for mindformers.wrapper.MFTrainOneStepCell.

    Outputs:
        As in MFTrainOneStepCell: loss, overflow, loss scale, learning rate, global norm, the last of which is there
        even without use_clip_grad; MindFormers' own step then returns only the first four.

    Raises:
        ConfigError: An argument is out of range, or not supported in the parallel mode.
    """

    was_compiled = False

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Optimizer,
        micro_batches: int = 1,
        gradient_exchange: Union[str, Mapping] = "dense",
        record_gradient_norms: bool = False,
        rank_budget: bool = False,
        packed_boundary: Optional[int] = None,
        preference: Optional[Mapping] = None,
        loss_in_pieces: Union[bool, int] = True,
        **kwargs: Any,
    ):
        rate = RateFactor(optimizer)
        use_cpu_adamw(optimizer)
        if gpt_model_of(network) is not None:
            # A model to which pet_config has given no adapters trains on a CPU too.
            use_mcore_cpu_cells(network)
        super().__init__(network, optimizer, **kwargs)
        # MFTrainOneStepCell has copied the schedules, and a copy would not see changes of the factor.
        self.learning_rate = optimizer.learning_rate
        self.rate = rate
        self.rate_factor = rate.parameter
        self.checks_values = ms.get_context("device_target") != "Ascend"
        self.no_status = Tensor([0] * 8, mstype.int32)
        self.one = Tensor(1, mstype.float32)
        self.no_loss = Tensor(np.nan, mstype.float32)
        mode = ms.get_auto_parallel_context("parallel_mode")
        self.is_mindformers_step = (
            mode not in ("stand_alone", "data_parallel")
            or self.if_dump
            or bool(self.dump_device_local_norm)
            or bool(getattr(self, "use_graceful_exit", False))
        )
        check_number(micro_batches, "micro_batches", COUNT)
        if self.is_mindformers_step:
            settings = {"micro_batches": micro_batches > 1, "gradient_exchange": gradient_exchange != "dense"}
            _refuse(mode, **settings, preference=preference is not None, rank_budget=rank_budget)
        self.rank_budget = _budget(network, self.weights, rank_budget)
        if packed_boundary is not None:
            install_segment_mask(base_of(network), packed_boundary)
        put_loss_in_pieces(network, loss_in_pieces, not self.is_mindformers_step)
        self.is_distributed_step = mode == "data_parallel" and get_group_size() > 1
        self.micro_batches = micro_batches
        self.preference = None if preference is None else preference_settings(preference)
        self.learns_preferences = self.preference is not None
        self.counts_tokens = False
        counts = len(SUMS) if self.learns_preferences else 1
        self.token_gradients = self._gradients(network, micro_batches, counts)
        self.exchange = None
        if self.is_distributed_step and not self.is_mindformers_step:
            layout = FlatLayout(self.weights)
            self.flatten = layout.flatten
            self.unflatten = layout.unflatten
            self.exchange = _exchange(gradient_exchange, layout)
            self.sum_over_ranks = ops.AllReduce()
        # Values that callbacks set and read between two steps.
        self.record = _transient("record", np.zeros(6))
        self.limits = _transient("limits", np.full(2, np.inf))
        self.stop_request = _transient("stop_request", np.zeros(()))
        self.sums = _transient("sums", np.zeros(counts))
        self.norms = _transient("gradient_norms", np.zeros(len(self.weights))) if record_gradient_norms else None
        self.records_norms = record_gradient_norms

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the step, and returns the compiler's freed memory to the system before the first step."""
        super().compile(*args, **kwargs)
        # MindSpore calls this before every step.
        if not self.was_compiled:
            self.was_compiled = True
            give_back_freed_memory()

    def _gradients(self, network, micro_batches, counts):
        """Returns the cell that computes the sum of a batch's losses, their number, and the gradients of the sum."""
        return TokenGradients(self._model(network), self.weights, micro_batches, counts)

    def _model(self, network):
        """Returns the cell to differentiate, which returns the sum of losses and their number."""
        if self.learns_preferences:
            return preference_loss(self.network, self.preference)
        self.counts_tokens = not self.is_mindformers_step and count_tokens_in_loss(network)
        if self.use_legacy:
            return self.network
        # A model without adapters lacks mindlora's wrapper, which takes the rows that mindlora data writes.
        adapted = next(lora_cells(network), None)
        return McoreLoss(self.network, self.counts_tokens, None if adapted else rows_of(base_of(network)))

    def construct(self, *inputs: Tensor) -> Tuple:
        if self.is_mindformers_step:
            outputs = super().construct(*inputs)
            # Without clipping, the step's norm is None, which MindSpore makes in Python on the host, in every step.
            return outputs if self.use_clip_grad or self.local_norm else outputs[:4]
        # Loss scales are chosen for gradients of a mean over the positions of a batch.
        positions = self.positions(inputs)
        total, sums, gradients = self.token_gradients(self.scale_sense / positions, *inputs)
        status, scale = self.start_overflow_check(total, self.scale_sense)
        stop = self.stop_request.reshape(())
        elsewhere = None
        if self.exchange is not None:
            elsewhere = ops.addn(self.hyper_map(_not_finite, gradients))
            total, elsewhere, stop, sums = self.of_all_ranks(total, elsewhere, stop, sums)
        # If no token counts, the mean loss is NaN, which skips the step, and the gradient is 0.
        count = ops.maximum(sums[0], self.one)
        loss = ops.select(self.learned_from(sums) > 0.5, total / count, self.no_loss)
        gradients = self.hyper_map(ops.partial(_scaled, positions / (scale * count)), gradients)
        if self.local_norm:
            local_norm, size = self.localnorm(gradients)
            local_norm = self.concat(local_norm)
        residual = None
        if self.exchange is not None:
            summed, residual = self.exchange.reduce(self.flatten(gradients))
            gradients = self.unflatten(summed)
        if self.rank_budget is not None:
            gradients = self.rank_budget.regularized(gradients)

        squares = ops.stack(self.hyper_map(_sum_of_squares, gradients))
        norm = ops.sqrt(squares.sum())
        overflow = self.overflows(status, gradients, norm, elsewhere)
        overflow = self.process_loss_scale(overflow)
        global_norm = norm.reshape((1,))
        if self.use_clip_grad:
            gradients = self.clipped(gradients, norm)
        learning_rate = self.current_rate()

        skipped = ops.logical_or(overflow, self.exceeds_limits(loss, norm))
        if ops.logical_not(skipped):
            loss = self.update(loss, gradients, residual)
        values = (loss, norm, sums[0], skipped.astype(mstype.float32), stop, learning_rate)
        ops.assign(self.record, ops.stack(values))
        ops.assign(self.sums, sums)
        if self.records_norms:
            ops.assign(self.norms, ops.sqrt(squares))
        if self.local_norm:
            return loss, overflow, scale, learning_rate, global_norm, local_norm, size
        return loss, overflow, scale, learning_rate, global_norm

    def learned_from(self, sums: Tensor) -> Tensor:
        """Returns the number of tokens from which the step learns, if counted: float32 []."""
        return answer_tokens(sums) if self.learns_preferences else sums[0]

    def overflows(self, status: Tensor, gradients: Tuple[Tensor, ...], norm: Tensor, elsewhere: Any) -> Tensor:
        """Returns whether a gradient has overflowed, here or on another rank (``elsewhere`` is not 0): bool []."""
        if self.checks_values:
            # The norm over all ranks says as much as each gradient, which would need three more operators.
            overflow = ops.logical_not(ops.isfinite(norm))
        else:
            overflow = self.get_overflow_status(status, gradients)
        if self.exchange is not None:
            overflow = ops.logical_or(overflow, elsewhere > 0)
        return overflow

    def clipped(self, gradients: Tuple[Tensor, ...], norm: Tensor) -> Tuple[Tensor, ...]:
        """Returns the gradients, scaled to max_grad_norm if their norm is larger, as ClipGradNorm does."""
        most = self.clip_grad_norm.clip_norm
        factor = ops.minimum(most / (ops.maximum(norm, most) + 1e-6), self.one)
        return self.hyper_map(ops.partial(_scaled, factor), gradients)

    def of_all_ranks(self, total: Tensor, elsewhere: Tensor, stop: Tensor, sums: Tensor) -> Tuple[Tensor, ...]:
        """Returns the sums over all ranks of three numbers, float32 [], and of sums, float32 [M]."""
        summed = self.sum_over_ranks(ops.concat((ops.stack((total, elsewhere, stop)), sums)))
        return summed[0], summed[1], summed[2], summed[3:]

    def update(self, loss: Tensor, gradients: Tuple[Tensor, ...], residual: Optional[Tensor]) -> Tensor:
        """Updates the weights and everything that depends on the update; then returns ``loss``."""
        loss = ops.depend(loss, self.optimizer(gradients))
        if self.rank_budget is not None:
            loss = ops.depend(loss, self.rank_budget(gradients))
        if self.exchange is not None:
            loss = ops.depend(loss, self.exchange.keep(residual))
        return loss

    def positions(self, inputs: Tuple[Tensor, ...]) -> float:
        """Returns the maximum number of tokens or examples in a batch's loss: a constant of the shape."""
        if self.learns_preferences:
            marks = inputs[3]
            return float(marks.shape[0] * marks.shape[1])
        return float(inputs[0].shape[0] * inputs[0].shape[1]) if self.counts_tokens else float(self.micro_batches)

    def exceeds_limits(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Returns whether the loss or the gradient norm is above its limit or not finite: bool []."""
        within = ops.logical_and(loss <= self.limits[0], norm <= self.limits[1])
        within = ops.logical_and(within, ops.logical_and(ops.isfinite(loss), ops.isfinite(norm)))
        if self.use_skip_data_by_global_norm:
            within = ops.logical_and(within, norm < self.global_norm_spike_threshold)
        return ops.logical_not(within)

    def current_rate(self) -> Tensor:
        """Returns the learning rate of this step, with several groups the default group's: float32 []."""
        rate = self.learning_rate
        step = self.optimizer.global_step
        if self.optimizer.dynamic_lr:
            if self.use_grouped_lr:
                factor = self.rate_factor
                rate = self.default_lr(step).reshape(()) * factor
                self.default_lr_parameter = rate
                for group, schedule in enumerate(self.grouped_lr):
                    self.grouped_lr_parameter[group] = schedule(step).reshape(()) * factor
            elif self.optimizer.is_group_lr:
                rate = rate[-1](step)
            else:
                rate = rate(step)
        elif self.optimizer.is_group_lr:
            rate = rate[-1]
        return rate.reshape(())

    # MindFormers' step calls the next three methods in turn, each with the previous one's result: the loss is passed
    # along, and the last method decides whether the step is skipped.

    def start_overflow_check(self, pre_cond: Any, compute_input: Any) -> Tuple[Any, Any]:
        """Returns a cleared overflow status, and ``compute_input``; ``pre_cond`` is the loss."""
        status = self.no_status
        if not self.checks_values:
            status, compute_input = super().start_overflow_check(pre_cond, compute_input)
        return (status, pre_cond) if self.is_mindformers_step else status, compute_input

    def get_overflow_status(self, status: Any, compute_output: Any) -> Any:
        """Returns whether the gradients in ``compute_output`` have overflowed."""
        before = status[0] if self.is_mindformers_step else status
        if self.checks_values:
            overflow = ops.addn(self.hyper_map(_not_finite, compute_output)) > 0
        else:
            overflow = super().get_overflow_status(before, compute_output)
        return (overflow, status[1]) if self.is_mindformers_step else overflow

    def process_loss_scale(self, overflow: Any) -> Tensor:
        """Returns whether a gradient has overflowed, which lowers the loss scale.

        In MindFormers' step, which does not count tokens, a loss of 0 also returns True, but does not lower the scale:
        no token counts, and the update would change the weights only by the moments.
        """
        if not self.is_mindformers_step:
            return self._lower_loss_scale(overflow)
        overflowed, loss = overflow
        return ops.logical_or(self._lower_loss_scale(overflowed), (loss == 0).all())

    def _lower_loss_scale(self, overflowed: Tensor) -> Tensor:
        """Repeats the base class's method: in graph mode, super() in a subclass would call the method above."""
        if self.loss_scaling_manager is None:
            return overflowed
        return self.loss_scaling_manager(self.scale_sense, overflowed)

    def set_rate_factor(self, source: str, value: float) -> None:
        """Sets the learning-rate factor of ``source``; the product of all sources' factors applies."""
        self.rate.set(source, value)

    @property
    def rate_factors(self) -> Dict[str, float]:
        """The factors of the learning rate: source -> value."""
        return dict(self.rate.factors)

    def set_limits(self, loss: float, gradient_norm: float) -> None:
        """Sets the loss and the gradient norm before clipping above which a step is skipped; infinity for no limit."""
        ops.assign(self.limits, Tensor(np.array([loss, gradient_norm], np.float32)))

    def request_stop(self) -> None:
        """Requests that all ranks stop: the next step's record has ``stop`` set on every rank."""
        ops.assign(self.stop_request, Tensor(1, mstype.float32))

    def last_record(self) -> StepRecord:
        """Returns the measurements of the last step, the same on every rank."""
        loss, norm, count, skipped, stop, rate = (float(value) for value in self.record.asnumpy())
        # MindFormers' losses add 1e-8 to the number of tokens.
        tokens, measures = (float(round(count)) if self.counts_tokens else None), None
        if self.preference is not None:
            sums = self.sums.asnumpy()
            tokens, measures = float(answer_tokens(sums)), preference_measures(sums, self.preference)
        return StepRecord(loss, norm, tokens, skipped > 0, stop > 0, rate, measures)

    def gradient_norms(self) -> Dict[str, float]:
        """Returns the norm of each trainable parameter's gradient, before clipping, in the last step.

        Raises ConfigError if the train step does not record them.
        """
        if self.norms is None:
            raise ConfigError(
                "The train step records no gradient norms. Set runner_wrapper.record_gradient_norms: True."
            )
        return {p.name: float(norm) for p, norm in zip(self.weights, self.norms.asnumpy())}


def _exchange(setting: Union[str, Mapping], layout: FlatLayout) -> Exchange:
    """Returns the exchange of one of several data-parallel processes, from the YAML's ``gradient_exchange``."""
    ranks = Ranks(get_rank(), get_group_size())
    exchange = make_exchange(exchange_settings(setting), layout, ranks, get_local_rank_size())
    logger.info(
        "Gradient exchange %s: rank %d of %d sends %s bytes per step, %s of them to other machines.",
        setting if isinstance(setting, str) else setting.get("type"),
        ranks.rank,
        ranks.count,
        f"{exchange.bytes_per_step:,}",
        f"{exchange.bytes_between_machines:,}",
    )
    return exchange


def _budget(network, weights, allocates):
    """Returns the cell that allocates AdaLoRA's ranks, or None for a network without AdaLoRA."""
    if allocates_ranks(network) and not allocates:
        raise ConfigError(
            "The network has cells of AdaLoRA, whose ranks this train step would not allocate. Start "
            "the run with mindlora-run, or set runner_wrapper.rank_budget: True and add RankBudget to callbacks."
        )
    return RankBudget(network, weights) if allocates else None


def _refuse(mode, **settings):
    for name, is_set in settings.items():
        if is_set:
            raise ConfigError(
                f"runner_wrapper has {name}, which works alone and in data parallel (parallel.parallel_mode 0), "
                f"without dumped norms, and not in this run of parallel_mode {mode!r}. Remove it."
            )


def _transient(name, value):
    """Returns a parameter that describes a step and is not part of the run's state."""
    return Parameter(Tensor(value.astype(np.float32)), name=f"{TRANSIENT}{name}", requires_grad=False)


def give_back_freed_memory() -> None:
    """Returns freed memory to the system, in whole pages, if the C library can (glibc's malloc_trim).

    glibc keeps small pieces for later ones of their size. A graph compiler frees very many, and the large tensors
    of later steps cannot use them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
