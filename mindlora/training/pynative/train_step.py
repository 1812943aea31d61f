"""What callbacks read and set of a train step, where MindFormers' PyNative Trainer trains: it has none of its own."""

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
    """Returns the gradient of a parameter, in several processes the sum of theirs; None if it has none."""
    # hyper_parallel sums gradients in float32 under this name.
    summed = getattr(parameter, "main_grad", None)
    return parameter.grad if summed is None else local(summed)


def refuse_missing_gradients(parameters: Sequence[Parameter]) -> None:
    """Raises LoraError if a parameter that trains has no gradient: an optimizer would give it that of another one."""
    missing = [parameter.name for parameter in parameters if gradient_of(parameter) is None]
    if missing:
        raise LoraError(
            f"The loss has no gradient for {listed(missing)}, which train: the model does not use these cells. "
            "Remove them from target_modules."
        )


class TrainStep(nn.Cell):
    """The model and the optimizer of a Trainer, with the interface of LoraTrainOneStepCell that callbacks use.

    The Trainer's methods below tell it what a step computes, and obey it.

    Args:
        model (nn.Cell): The whole model.
        optimizer (nn.Optimizer): Its optimizer.
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
        """The model as callbacks call it in evaluation."""
        # Not a child of this cell, whose parameters it has.
        return EvaluatedModel(self.network, self.gpt)

    @property
    def adapted(self) -> nn.Cell:
        """A network with the cells of an adapter: the model, or of several adapters that of the first one."""
        return self.network

    @property
    def reference(self) -> Optional[np.ndarray]:
        """The fingerprint of the model with which the run began, if its log-probabilities are kept with the data."""
        return reference_of(self.network)

    def begin(self) -> None:
        """Begins a step."""
        # The tokens that all its micro-batches count, on all ranks; None if there is only one micro-batch.
        self.expected: Any = None
        self.stops = False
        self.losses: List[Tensor] = []
        # SUMS of what the step learns from preferences.
        self.sums = np.zeros(len(SUMS))
        self.tokens = 0
        self.norms: Dict[str, float] = {}
        self.skipped = False
        self.learning_rate = None
        self.record = StepRecord(math.nan)

    def accumulate(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Prepares a step of several micro-batches, here or on all ranks: each then counts as much as it has tokens."""
        self.expected = sum(self.counted_tokens(batch) for batch in micro_batches)
        if rank_count() > 1:
            *tokens, stops = sum_over_ranks([*np.ravel(self.expected), self.stop_requested])
            self.expected = np.reshape(tokens, np.shape(self.expected)).astype(int)[()]
            self.stops = bool(stops)
        copies = len(micro_batches) > 1 and ms.get_context("device_target") == "CPU"
        if copies and not self.copies_gradients:
            # There MindSpore 2.10 adds the next micro-batch's gradient wrongly to one that is a transposed view.
            for parameter in self.network.trainable_params():
                parameter.register_hook(lambda gradient: gradient.copy())
            self.copies_gradients = True

    def rows(self, inputs: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns a micro-batch as the loss takes it."""
        return dict(inputs) if self.preference is not None else shifted(inputs, self.gpt.seq_length)

    def loss(self, inputs: Mapping[str, Any], micro_batches: int, compute: Callable) -> Tensor:
        """Returns the mean loss of a micro-batch, weighted as by ``weighted``; ``compute`` is the Trainer's of rows."""
        if self.preference is not None:
            return self.of_preferences(inputs, micro_batches)
        rows = self.rows(inputs)
        return self.weighted(compute(rows), self.counted_tokens(rows), micro_batches)

    def of_preferences(self, inputs: Mapping[str, Any], micro_batches: int) -> Tensor:
        """Returns the mean loss of a micro-batch's preferences, weighted as by ``weighted``."""
        total, sums = self.preference(*(inputs[name] for name in self.preference.settings.columns))
        self.sums += sums.asnumpy()
        examples = self.counted_tokens(inputs)
        return self.weighted(total / max(examples, 1), examples, micro_batches)

    def counted_tokens(self, inputs: Mapping[str, Any]) -> int:
        """Returns how many tokens of a micro-batch the loss counts, or examples of preferences."""
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
        """Returns the mean loss of a micro-batch, times its part in the tokens of the step, times all micro-batches.

        MindFormers divides by the number of these, which are ``micro_batches`` on each rank.
        """
        self.tokens += tokens
        if self.expected is not None:
            loss = loss * (tokens * micro_batches * rank_count() / max(self.expected, 1))
        if self.limits is not None:
            self.losses.append(ops.stop_gradient(loss / micro_batches))
        return loss

    @property
    def tokens_of_step(self) -> int:
        """How many tokens the loss of the step counts, on all ranks."""
        return self.tokens if self.expected is None else self.expected

    def before_update(self, parameters: Sequence[Parameter]) -> Optional[float]:
        """Looks at the gradients; returns their norm if the step must be skipped, else None."""
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
        """Adds the gradient of AdaLoRA's orthogonality term; that of one that is missing is an error later."""
        before = [gradient_of(parameter) for parameter in parameters]
        if any(gradient is None for gradient in before):
            return
        with _no_grad():
            gradients = self.rank_budget.regularized(tuple(gradient.astype(ms.float32) for gradient in before))
        for gradient, regularized in zip(before, gradients):
            gradient.assign_value(regularized)

    def after_update(self, gradients: Sequence[Tensor]) -> None:
        """Does what follows from the optimizer's update with these gradients: AdaLoRA's importance and masks."""
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
        """Returns what it has that a run goes on with, besides the model and the optimizer."""
        if self.rank_budget is None:
            return []
        return [*self.rank_budget.sensitivities, *self.rank_budget.uncertainties]

    def current_rate(self) -> float:
        """Returns the learning rate of this step, of several groups the first one's."""
        rate = self.optimizer.get_lr()
        return float(np.ravel((rate[0] if isinstance(rate, (list, tuple)) else rate).asnumpy())[0])

    def set_rate_factor(self, source: str, value: float) -> None:
        """Sets the factor of the learning rate that ``source`` asks for; all sources' factors are multiplied."""
        if self.rate is None:
            self.rate = RateFactor(self.optimizer)
        self.rate.set(source, value)

    @property
    def rate_factors(self) -> Dict[str, float]:
        """The factors of the learning rate: source -> value."""
        return {} if self.rate is None else dict(self.rate.factors)

    def request_stop(self) -> None:
        """Asks all ranks to stop: the record of the next step has ``stop`` set on each of them."""
        self.stop_requested = True

    def set_limits(self, loss: float, gradient_norm: float) -> None:
        """Sets above which loss, or norm of the gradient before clipping, a step is skipped; infinity for no limit."""
        self.limits = (loss, gradient_norm)

    def last_record(self) -> StepRecord:
        """Returns what the last step measured."""
        return self.record

    def gradient_norms(self) -> Dict[str, float]:
        """Returns the norm of each trainable parameter's gradient, before clipping, in the last step."""
        return self.norms


def shifted(inputs: Mapping[str, Any], seq_length: int) -> Dict[str, Any]:
    """Returns a batch as the model takes it: seq_length tokens in a row, and as label of each the next one.

    Rows of seq_length + 1 tokens are those of ``mindlora data`` and of graph mode: label i belongs to token i.

    Raises DataError if the rows have another length, or labels that are not shifted although nothing is left over.
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
