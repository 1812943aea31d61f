"""How a step of MindFormers' PyNative Trainer goes with mindlora: rows, weights of micro-batches, skipped updates.

Each function takes a method of the Trainer, and returns the one that gets its name.
"""

import functools
from typing import Any, Callable, Dict, List, Mapping, Optional

import mindspore as ms
from mindspore import Tensor, nn

from mindlora.core.errors import LoraError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.network.tree import lora_cells
from mindlora.training.log import logger
from mindlora.training.pynative.callbacks import train_step_of_trainer
from mindlora.training.pynative.rows import shifted

require_mindformers("2.0")
from mindformers.pynative.base_models.gpt.gpt_model import GPTModel  # noqa: E402


class NoGradient(Exception):
    """Ends the update of a step in several processes whose gradient is 0 on all of them: no token of it counts."""


def with_begun_step(training_step: Callable) -> Callable:
    """Returns the method that trains a step, which then counts the tokens of its micro-batches first."""

    @functools.wraps(training_step)
    def train(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        step = train_step_of_trainer(trainer)
        if step is None:
            return training_step(trainer, *arguments, **keywords)
        step.begin()
        if trainer.num_accumulation_steps > 1:
            batches = _micro_batches(trainer, *arguments, **keywords)
            step.accumulate([step.rows(batch) for batch in batches])
            # MindFormers 2.1 reads each micro-batch when its turn comes: it gets those that have been read.
            trainer._next_batch = iter(batches).__next__
        try:
            return training_step(trainer, *arguments, **keywords)
        except RuntimeError as error:
            # MindFormers hides what went wrong behind a "RuntimeError: Error in training step".
            if isinstance(error.__cause__, LoraError):
                raise error.__cause__ from None
            raise
        finally:
            vars(trainer).pop("_next_batch", None)

    return train


def with_weights(compute_loss: Callable) -> Callable:
    """Returns the method that computes the loss of a micro-batch, which then counts as much as its tokens.

    MindFormers takes the mean of the micro-batches' means.
    """

    @functools.wraps(compute_loss)
    def compute(trainer: Any, model: List[nn.Cell], inputs: Mapping[str, Any]) -> Tensor:
        step = train_step_of_trainer(trainer)
        if step is not None:
            compute_rows = functools.partial(compute_loss, trainer, model)
            return step.loss(inputs, trainer.num_accumulation_steps, compute_rows)
        gpt = _gpt_with_adapters(model[0])
        return compute_loss(trainer, model, inputs if gpt is None else shifted(inputs, gpt.seq_length))

    return compute


def with_skipping(optimizer_update: Callable) -> Callable:
    """Returns the method that updates the parameters, which then skips steps with nothing to learn or above a limit."""

    @functools.wraps(optimizer_update)
    def update(trainer: Any) -> Any:
        step = train_step_of_trainer(trainer)
        parameters = trainer.optimizer.parameters
        norm = None if step is None else step.before_update(parameters)
        if norm is None:
            # MindFormers clips them in place, and then lets go of them.
            gradients = [parameter.grad for parameter in parameters]
            skipped = getattr(trainer.state, "skipped_steps", 0)
            try:
                norm = optimizer_update(trainer)
                if step is not None and getattr(trainer.state, "skipped_steps", 0) == skipped:
                    step.after_update(gradients)
                return norm
            except NoGradient:
                norm = 0.0
                _count_empty(trainer)
        for cell in trainer.model:
            if hasattr(cell, "zero_grad"):
                cell.zero_grad()
        for parameter in parameters:
            parameter.grad = None
        return Tensor(norm, ms.float32)

    return update


def _count_empty(trainer):
    """Says that a step had nothing to learn, in several processes, where EmptySteps does not run."""
    trainer.empty_steps = getattr(trainer, "empty_steps", 0) + 1
    logger.warning(
        "step %d: No token of the step's rows counts in the loss: it has nothing to learn, and was skipped (%d so far)."
        " Check the labels of the data.",
        trainer.state.global_step + 1,
        trainer.empty_steps,
    )


@functools.lru_cache(maxsize=1)
def _gpt_with_adapters(model: nn.Cell) -> Optional[nn.Cell]:
    """Returns the part of a model with adapters that computes the loss; None of a model without adapters."""
    if not any(lora_cells(model)):
        return None
    return next((cell for _, cell in model.cells_and_names() if isinstance(cell, GPTModel)), None)


def _micro_batches(trainer: Any, *arguments: Any, **keywords: Any) -> List[Dict[str, Any]]:
    """Returns what a step trains on: MindFormers 2.0 hands it over as one batch, 2.1 reads it in the step."""
    count = trainer.num_accumulation_steps
    inputs = keywords.get("inputs", arguments[0] if arguments else None)
    if isinstance(inputs, Mapping):
        return [trainer._split_micro_batch(inputs, number) for number in range(count)]
    return [trainer._next_batch() for _ in range(count)]
