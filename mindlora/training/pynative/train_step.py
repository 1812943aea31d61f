"""The train step's interface for callbacks under MindFormers' PyNative Trainer, which has no train step."""

import functools
import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.graph.api import _no_grad

from mindlora.core.errors import DataError, LoraError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.core.text import listed
from mindlora.network.pynative.linear import local
from mindlora.network.tree import lora_cells
from mindlora.training.adalora.rank_budget import RankBudget
from mindlora.training.preference.loss import SUMS, answer_tokens, preference_measures
from mindlora.training.preference.pynative import pynative_preference_loss
from mindlora.training.pynative.evaluation import EvaluatedModel
from mindlora.training.pynative.initialization import preference_of, reference_of
from mindlora.training.resume.collectives import mean_over_ranks, rank_count, sum_over_ranks
from mindlora.training.step.rate_factor import RateFactor
from mindlora.training.step.train_step import StepRecord

require_mindformers("2.0")
from mindformers.pynative.base_models.gpt.gpt_model import GPTModel  # noqa: E402

_COLUMNS = ("input_ids", "labels")


def gradient_of(parameter: Parameter) -> Optional[Tensor]:
    """Returns the gradient of a parameter, summed over several processes; None if it has none."""
    # hyper_parallel sums gradients in float32 under this name.
    summed = getattr(parameter, "main_grad", None)
    return parameter.grad if summed is None else local(summed)


def refuse_missing_gradients(parameters: Sequence[Parameter]) -> None:
    """Raises LoraError if a trainable parameter has no gradient: an optimizer would apply another one's to it."""
    missing = [parameter.name for parameter in parameters if gradient_of(parameter) is None]
    if missing:
        raise LoraError(
            f"The loss has no gradient for {listed(missing)}, which are trainable: the model does not use these cells. "
            "Remove them from target_modules."
        )


class TrainStep(nn.Cell):
    """The model and the optimizer of a Trainer, with the interface of LoraTrainOneStepCell that callbacks use.

    The Trainer's replaced methods report each step to this cell and follow its decisions.

    Args:
        model (nn.Cell): The undivided model.
        optimizer (nn.Optimizer): The model's optimizer.
        records_norms (bool): Whether gradient_norms() is available. Default: False.
    """

    is_mindformers_step = False
    exchange = loss_scaling_manager = scale_sense = None

    def __init__(self, model: nn.Cell, optimizer: nn.Optimizer, records_norms: bool = False):
        super().__init__(auto_prefix=False)
        self.network = model
        self.optimizer = optimizer
        self.records_norms = records_norms
        self.rank_budget = None
        if any(cell.variant.allocates_ranks for _, cell in lora_cells(model)):
            self.rank_budget = RankBudget(model, optimizer.parameters)
        self.rate = None
        self.stop_requested = False
        settings = preference_of(model)
        self.preference = None if settings is None else pynative_preference_loss(self.evaluated, settings)
        self.limits: Optional[Tuple[float, float]] = None
        self.copies_gradients = False
        self.begin()

    @functools.cached_property
    def gpt(self) -> GPTModel:
        """The part of the model that computes the loss."""
        return next(cell for _, cell in self.network.cells_and_names() if isinstance(cell, GPTModel))

    @functools.cached_property
    def evaluated(self) -> EvaluatedModel:
        """The model in evaluation, as callbacks call it."""
        # Not a child cell, since it has the parameters of this cell.
        return EvaluatedModel(self.network, self.gpt)

    @property
    def adapted(self) -> nn.Cell:
        """A network with an adapter's cells: the model, or with several adapters the first one's network."""
        return self.network

    @property
    def reference(self) -> Optional[np.ndarray]:
        """The initial model's fingerprint, if its log-probabilities are stored in the data."""
        return reference_of(self.network)

    def begin(self) -> None:
        """Begins a step."""
        # The counted tokens of all micro-batches on all ranks; None if there is only one micro-batch.
        self.expected: Optional[int] = None
        self.stops = False
        self.losses: List[Tensor] = []
        # SUMS of the step's preferences.
        self.sums = np.zeros(len(SUMS))
        self.tokens = 0
        self.norms: Dict[str, float] = {}
        self.skipped = False
        self.learning_rate = None
        self.record = StepRecord(math.nan)

    def accumulate(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Prepares a step of several micro-batches, here or on all ranks, each weighted by its number of tokens."""
        self.expected = sum(self.counted_tokens(batch) for batch in micro_batches)
        if rank_count() > 1:
            tokens, stops = sum_over_ranks([self.expected, self.stop_requested])
            self.expected, self.stops = int(tokens), bool(stops)
        if len(micro_batches) > 1:
            self.copy_gradients()

    def copy_gradients(self) -> None:
        """Makes a CPU add up the gradients of several micro-batches correctly.

        MindSpore 2.10 adds the next micro-batch's gradient incorrectly to one that is a transposed view.
        """
        if ms.get_context("device_target") == "CPU" and not self.copies_gradients:
            for parameter in self.network.trainable_params():
                parameter.register_hook(lambda gradient: gradient.copy())
            self.copies_gradients = True

    def rows(self, inputs: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns a micro-batch in the form that the loss takes."""
        return dict(inputs) if self.preference is not None else shifted(inputs, self.gpt.seq_length)

    def loss(self, inputs: Mapping[str, Any], micro_batches: int, compute: Callable) -> Tensor:
        """Returns a micro-batch's mean loss, weighted as by ``weighted``; ``compute`` is the Trainer's loss of rows."""
        if self.preference is not None:
            return self.of_preferences(inputs, micro_batches)
        rows = self.rows(inputs)
        return self.weighted(compute(rows), self.counted_tokens(rows), micro_batches)

    def of_preferences(self, inputs: Mapping[str, Any], micro_batches: int) -> Tensor:
        """Returns a micro-batch's mean preference loss, weighted as by ``weighted``."""
        total, sums = self.preference(*(inputs[name] for name in self.preference.settings.columns))
        self.sums += sums.asnumpy()
        examples = self.counted_tokens(inputs)
        return self.weighted(total / max(examples, 1), examples, micro_batches)

    def counted_tokens(self, inputs: Mapping[str, Any]) -> int:
        """Returns the number of tokens of a micro-batch, or of preference examples, that the loss counts."""
        if self.preference is not None:
            return int((inputs[self.preference.settings.kind.columns[-1]].asnumpy() != 0).sum())
        return int(self.is_counted(inputs).sum())

    def is_counted(self, inputs: Mapping[str, Any]) -> np.ndarray:
        """Returns which tokens of a micro-batch the loss counts, bool in the shape of the tokens."""
        tokens = inputs["input_ids"].asnumpy()
        mask = inputs.get("loss_mask")
        counted = tokens != self.gpt.pad_token_id if mask is None else mask.asnumpy() > 0
        labels = inputs.get("labels")
        if labels is not None:
            counted = counted & (labels.asnumpy() != self.gpt.ignore_token_id)
        return counted

    def weighted(self, loss: Tensor, tokens: int, micro_batches: int) -> Tensor:
        """Returns a micro-batch's mean loss, times its share of the step's tokens, times the number of micro-batches.

        MindFormers divides by this number, ``micro_batches`` on each rank.
        """
        self.tokens += tokens
        if self.expected is not None:
            loss = loss * (tokens * micro_batches * rank_count() / max(self.expected, 1))
        if self.limits is not None:
            self.losses.append(ops.stop_gradient(loss / micro_batches))
        return loss

    @property
    def tokens_of_step(self) -> int:
        """Number of tokens that the step's loss counts, on all ranks."""
        return self.tokens if self.expected is None else self.expected

    def before_update(self, parameters: Sequence[Parameter]) -> Optional[float]:
        """Checks the gradients; returns their norm if the step must be skipped, else None."""
        self.learning_rate = self.current_rate()
        self.skipped = not self.tokens_of_step
        if self.skipped:
            return 0.0
        if self.rank_budget is not None:
            self._regularize(parameters)
        if self.limits is None and not self.records_norms:
            return None
        known = [parameter for parameter in parameters if gradient_of(parameter) is not None]
        gradients = {parameter.name: gradient_of(parameter).astype("float32") for parameter in known}
        self.norms = {name: float(ops.sqrt((g * g).sum()).asnumpy()) for name, g in gradients.items()}
        if self.limits is None:
            return None
        norm = math.sqrt(sum(value**2 for value in self.norms.values()))
        loss = mean_over_ranks(sum(float(np.ravel(value.asnumpy())[0]) for value in self.losses))
        within = loss <= self.limits[0] and norm <= self.limits[1]
        self.skipped = not (within and math.isfinite(loss) and math.isfinite(norm))
        return norm if self.skipped else None

    def _regularize(self, parameters):
        """Adds the gradient of AdaLoRA's orthogonality term; a missing gradient is an error later."""
        before = [gradient_of(parameter) for parameter in parameters]
        if any(gradient is None for gradient in before):
            return
        with _no_grad():
            gradients = self.rank_budget.regularized(tuple(gradient.astype(ms.float32) for gradient in before))
        for gradient, regularized in zip(before, gradients):
            gradient.assign_value(regularized)

    def after_update(self, gradients: Sequence[Tensor]) -> None:
        """Updates AdaLoRA's importance and masks after the optimizer's update with these gradients."""
        if self.rank_budget is not None:
            with _no_grad():
                self.rank_budget(tuple(gradients))

    def end(self, loss: float, norm: float, skipped: bool) -> None:
        """Records the step, with the loss and the norm that the Trainer reports; the loss is NaN if no token counts."""
        loss = loss if self.tokens_of_step else math.nan
        self.skipped = self.skipped or skipped
        tokens, measures = float(self.tokens_of_step), None
        if self.preference is not None:
            sums = sum_over_ranks(self.sums)
            tokens = float(answer_tokens(sums))
            measures = preference_measures(sums, self.preference.settings)
        self.record = StepRecord(loss, norm, tokens, self.skipped, self.stops, self.learning_rate, measures)

    def state_parameters(self) -> List[Parameter]:
        """Returns the step's state for resuming, in addition to the model and the optimizer."""
        if self.rank_budget is None:
            return []
        return [*self.rank_budget.sensitivities, *self.rank_budget.uncertainties]

    def current_rate(self) -> float:
        """Returns the learning rate of this step; with several groups, the first one's."""
        rate = self.optimizer.get_lr()
        return float(np.ravel((rate[0] if isinstance(rate, (list, tuple)) else rate).asnumpy())[0])

    def set_rate_factor(self, source: str, value: float) -> None:
        """Sets the learning-rate factor of ``source``; all sources' factors are multiplied."""
        if self.rate is None:
            self.rate = RateFactor(self.optimizer)
        self.rate.set(source, value)

    @property
    def rate_factors(self) -> Dict[str, float]:
        """The factors of the learning rate: source -> value."""
        return {} if self.rate is None else dict(self.rate.factors)

    def request_stop(self) -> None:
        """Requests that all ranks stop: the next step's record has ``stop`` set on every rank."""
        self.stop_requested = True

    def set_limits(self, loss: float, gradient_norm: float) -> None:
        """Sets the loss and the gradient norm before clipping above which a step is skipped; infinity for no limit."""
        self.limits = (loss, gradient_norm)

    def last_record(self) -> StepRecord:
        """Returns the measurements of the last step."""
        return self.record

    def gradient_norms(self) -> Dict[str, float]:
        """Returns the norm of each trainable parameter's gradient, before clipping, in the last step."""
        return self.norms


def shifted(inputs: Mapping[str, Any], seq_length: int) -> Dict[str, Any]:
    """Returns a batch in the model's form: seq_length tokens per row, each labeled with the next token.

    Rows of seq_length + 1 tokens have the form of ``mindlora data`` and of graph mode: label i belongs to token i.

    Raises DataError if the rows have another length, or unshifted labels without the extra token.
    """
    tokens, labels = (inputs.get(name) for name in _COLUMNS)
    if labels is None or tokens.ndim != 2:
        return dict(inputs)
    length = tokens.shape[1]
    if length == seq_length + 1 and set(inputs) == set(_COLUMNS):
        return {"input_ids": tokens[:, :-1], "labels": labels[:, 1:]}
    if length != seq_length:
        raise DataError(
            f"The rows of the data have {length} tokens and the columns {', '.join(sorted(inputs))}, but the model's "
            f"seq_length is {seq_length}. Write rows of {seq_length} tokens with shifted labels, or rows of "
            f"{seq_length + 1} tokens with input_ids and labels alone, as mindlora data does."
        )
    return dict(inputs)
