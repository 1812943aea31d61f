"""A step of MindFormers' PyNative Trainer with mindlora, and mindlora's callbacks, which have another interface.

Callbacks see the parameters of MindSpore's Model, as in graph mode: the run is one epoch of all its steps. Each
function called with_... takes a method of the Trainer and returns its replacement: for rows, weights of micro-batches
and skipped updates.
"""

import functools
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import mindspore as ms
import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_rank
from mindspore import Callback, Tensor, nn
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.core.text import listed
from mindlora.network.tree import lora_cells
from mindlora.run.checks.pynative_adapter import GRAPH_MODE_ALONE
from mindlora.training.callbacks import lora_checkpoint
from mindlora.training.callbacks.common import report_event
from mindlora.training.callbacks.registry import ORDER, AdapterHealth, RankBudget
from mindlora.training.log import logger
from mindlora.training.model.network import collect_state
from mindlora.training.pynative import checkpoints
from mindlora.training.pynative.configuration import current_trainer, division_of_model, refuse_division
from mindlora.training.pynative.initialization import Initialization
from mindlora.training.pynative.train_step import TrainStep, gradient_of, shifted
from mindlora.training.resume import collectives, training_state
from mindlora.training.resume.training_state import warn_about_draws
from mindlora.training.rl.pynative import RlStep, take_step
from mindlora.training.run_configuration import plain
from mindlora.training.several.pynative import StackedRlStep, StackedStep, several_of
from mindlora.training.several.pynative_callback import EachAdapter, run_facts

from mindlora.training.held_out import pynative as held_out_loss  # noqa: F401  # isort: skip

require_mindformers("2.0")
from mindformers.pynative.base_models.gpt.gpt_model import GPTModel  # noqa: E402
from mindformers.pynative.callback import CheckpointCallback, TrainerCallback  # noqa: E402


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class LoraCheckpoint(lora_checkpoint.LoraCheckpoint):
    """Saves the adapter without the base while training: every save_steps steps, at the end, and the best so far.

    ``directory`` holds step_N, in PEFT's format, and best; rank 0 writes them. Anything that an earlier run saved there
    after the step at which this run starts is moved into earlier_run_1, earlier_run_2 and so on. A run is resumed from
    MindFormers' own checkpoints (checkpoint.load_path), which hold the optimizer too.

    Args:
        save_steps (int): Steps between saves. Default: 100.
        directory (str): Folder to write to. Default: None, lora_checkpoint in the output folder of MindFormers.
        keep_last (int): How many step folders to keep. Default: 3.
        best_metric (str): The metric that decides which adapter is best: ``loss``, the mean training loss since the
            last save, or a metric that a callback reports, such as ``held_out_loss``. Default: "loss".
        best_mode (str): "min" if a smaller metric is better, "max" if a larger one is. Default: "min".

    Raises:
        ConfigError: An argument is out of range or only for graph mode, or the metric is not reported.
    """

    def __init__(
        self,
        save_steps: int = 100,
        directory: Optional[str] = None,
        keep_last: int = 3,
        best_metric: str = "loss",
        best_mode: str = "min",
        **others: Any,
    ):
        if others:
            raise ConfigError(
                f"LoraCheckpoint: {', '.join(others)} cannot be set under the PyNative Trainer, where it takes "
                "save_steps, directory, keep_last, best_metric and best_mode. To resume, set checkpoint.load_path."
            )
        super().__init__(save_steps, directory, keep_last, best_metric, best_mode)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Moves earlier saves aside."""
        self.last_saved = run_context.original_args().cur_step_num
        if get_real_rank() == 0:
            training_state.set_aside(self.directory, self.last_saved)

    def is_sharded(self, params: InternalCallbackParam) -> bool:
        """Returns False: callbacks run only if each process has the complete model."""
        return False

    def write(self, folder: str, params: InternalCallbackParam, values: Optional[Mapping[str, np.ndarray]]) -> None:
        """Writes only the adapter."""
        collect_state(params.train_network)
        training_state.save_adapter(folder, params)

    def training_state(self) -> Dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values: MindFormers saves at steps of its own."""
        return {"losses": self.losses}

    def restore_training_state(self, state: Mapping[str, Any]) -> None:
        """Restores what ``training_state`` returned."""
        self.losses = list(state["losses"])


CALLBACKS = tuple(name for name in ORDER if name not in GRAPH_MODE_ALONE)


class Callbacks(TrainerCallback):
    """Runs mindlora's callbacks in their own order, whatever the YAML's, and then the callback that saves checkpoints.

    So a checkpoint includes their effects on the step. Their states are saved beside it, and a resumed run restores
    them.

    Args:
        callbacks (sequence): Callbacks of graph mode, and of the PyNative Trainer.
        step (TrainStep): The train step that the callbacks see.
        saver (CheckpointCallback): MindFormers' own; None if the run saves nothing.
    """

    def __init__(self, callbacks: Sequence[Any], step: TrainStep, saver: Optional[CheckpointCallback]):
        self.callbacks = sorted(callbacks, key=lambda callback: ORDER.index(type(callback).__name__))
        self.step = step
        if saver is not None:
            self.callbacks.append(checkpoints.SavedWithStates(saver, self.callbacks[:], step))
        self.params = InternalCallbackParam()
        self.context = RunContext(self.params)

    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Passes the run to the callbacks, and begins it."""
        self.params.update(
            train_network=self.step,
            network=self.step.network,
            optimizer=self.step.optimizer,
            train_dataset=kwargs["train_dataset"],
            list_callback=self.callbacks,
            epoch_num=1,
            batch_num=state.max_steps,
            cur_epoch_num=1,
            cur_step_num=state.global_step,
            run_facts=run_facts(plain(args.to_dict())),
            how_to_go_on=_how_to_go_on(args.checkpoint),
        )
        self.skipped_before = getattr(state, "skipped_steps", 0)
        if state.global_step:
            self._resume(args, state.global_step)
        self._call("on_train_begin", ("on_train_begin", "on_train_epoch_begin"), args, state, kwargs)

    def on_step_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Passes the beginning step to the callbacks."""
        # Counted from 1, as by MindSpore's Model.
        self.params.cur_step_num = state.global_step + 1
        self._call("on_step_begin", ("on_train_step_begin",), args, state, kwargs)

    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Passes the step's measurements to the callbacks; ends the run if one of them has requested it."""
        loss, norm = (_number(kwargs[name]) for name in ("loss", "grad_norm"))
        # MindFormers 2.1 can skip steps itself.
        skipped = getattr(state, "skipped_steps", 0)
        self.step.end(loss, norm, skipped > self.skipped_before)
        self.skipped_before = skipped
        self.params.net_outputs = Tensor(self.step.record.loss, ms.float32)
        self._call("on_step_end", ("on_train_step_end",), args, state, kwargs)
        if self.context.get_stop_requested():
            state.max_steps = state.global_step

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Ends the run; raises the error with which a callback ended it, after all callbacks have saved."""
        self._call("on_train_end", ("on_train_epoch_end", "on_train_end"), args, state, kwargs)
        for callback in self.callbacks:
            if isinstance(callback, Callback):
                callback.__exit__(None, None, None)

    def _resume(self, args, step):
        """Restores the callbacks' states; reports callbacks without a saved state."""
        noise = getattr(getattr(args, "pet_config", None), "neftune_alpha", None)
        warn_about_draws(self.step.adapted, noise is not None)
        anew = checkpoints.restore(args.checkpoint.load_path, self.callbacks, self.step)
        if anew:
            report_event(
                self.params,
                "resume",
                f"The run goes on after step {step}, whose checkpoint holds nothing of {listed(anew)}: these begin "
                "anew. Resume with the callbacks of the run to continue exactly.",
            )

    def _call(self, event, names, args, state, kwargs):
        """Calls an event of the Trainer's callbacks, or the equivalent MindSpore events."""
        for callback in self.callbacks:
            if isinstance(callback, TrainerCallback):
                getattr(callback, event)(args, state, **kwargs)
            else:
                for name in names:
                    getattr(callback, name)(self.context)


def with_callbacks(handler: Callable) -> Callable:
    """Wraps MindFormers' CallbackHandler, so that it runs mindlora's callbacks too."""

    @functools.wraps(handler, updated=())
    def handle(callbacks: List[Any], model: List[nn.Cell], optimizer: nn.Optimizer, **others: Any) -> Any:
        ours = [callback for callback in callbacks if isinstance(callback, Callback)]
        _check(ours)
        theirs = [callback for callback in callbacks if callback not in ours]
        several = several_of(model[0])
        if several is not None:
            ours.append(EachAdapter(several.runs, several.directory))
        whole = division_of_model() == 1
        collectives.set_rank_count(current_trainer().world_size if whole else 1)
        if whole and (ours or any(lora_cells(model[0]))):
            norms = any(isinstance(callback, AdapterHealth) for callback in ours)
            step = _step(model[0], optimizer, norms)
            if step.rank_budget is not None and not any(isinstance(callback, RankBudget) for callback in ours):
                ours.append(RankBudget())
            saver = next((callback for callback in theirs if isinstance(callback, CheckpointCallback)), None)
            theirs = [callback for callback in theirs if callback is not saver]
            theirs.append(Callbacks(ours, step, saver))
        # Before all others, which see the initial adapters.
        return handler(callbacks=[Initialization(), *theirs], model=model, optimizer=optimizer, **others)

    return handle


def _step(model: nn.Cell, optimizer: nn.Optimizer, norms: bool) -> TrainStep:
    """Returns the TrainStep of a run; ``norms`` says whether callbacks ask for gradient_norms()."""
    config = plain(current_trainer().config.to_dict())
    learns_from_rewards = config.get("rl") is not None
    if several_of(model) is not None:
        return StackedRlStep(model, optimizer, config) if learns_from_rewards else StackedStep(model, optimizer)
    return RlStep(model, optimizer, norms, config) if learns_from_rewards else TrainStep(model, optimizer, norms)


def train_step_of_trainer(trainer: Any) -> Any:
    """Returns the TrainStep of a Trainer; None if it divides its model, or has neither adapters nor callbacks."""
    last = trainer.callback_handler.callbacks[-1]
    return last.step if isinstance(last, Callbacks) else None


def _check(callbacks):
    names = [type(callback).__name__ for callback in callbacks]
    others = [name for name in names if name not in CALLBACKS]
    if others:
        raise ConfigError(
            f"callbacks has {listed(others)}, a callback of graph mode, which MindFormers' PyNative Trainer cannot "
            "call. Remove it."
        )
    if names:
        refuse_division(f"callbacks has {listed(names)}", ", or remove it")


def _how_to_go_on(checkpoint):
    if not checkpoint.enable_save:
        return "MindFormers saved nothing: checkpoint.enable_save is False."
    return (
        f"MindFormers has saved it in {checkpoint.save_path}. To resume, repeat the command of mindlora-run with "
        "--resume, or set checkpoint.load_path to that, and no_load_optim: False."
    )


def _number(value):
    return float(np.ravel(value.asnumpy() if hasattr(value, "asnumpy") else value)[0])


class NoGradient(Exception):
    """Raised to end the update of a divided model's step with a gradient of 0, in which no token counts."""


def with_begun_step(training_step: Callable) -> Callable:
    """Wraps the method that trains a step, so that it first counts the tokens of its micro-batches on all ranks."""

    @functools.wraps(training_step)
    def train(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        step = train_step_of_trainer(trainer)
        if step is None:
            return training_step(trainer, *arguments, **keywords)
        step.begin()
        if hasattr(step, "policies"):
            return take_step(step, trainer)
        if trainer.num_accumulation_steps > 1 or collectives.rank_count() > 1:
            batches = _micro_batches(trainer, *arguments, **keywords)
            step.accumulate([step.rows(batch) for batch in batches])
            # MindFormers 2.1 reads each micro-batch when its turn comes; here it gets those already read.
            trainer._next_batch = iter(batches).__next__
        try:
            return training_step(trainer, *arguments, **keywords)
        except RuntimeError as error:
            # MindFormers hides the cause behind a "RuntimeError: Error in training step".
            if isinstance(error.__cause__, LoraError):
                raise error.__cause__ from None
            raise
        finally:
            vars(trainer).pop("_next_batch", None)

    return train


def with_weights(compute_loss: Callable) -> Callable:
    """Wraps the method that computes a micro-batch's loss, so that it is weighted by the number of tokens.

    MindFormers takes the mean of the micro-batches' means, and of the ranks' means.
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
    """Wraps the method that updates the parameters, to skip steps with nothing to learn or above a limit."""

    @functools.wraps(optimizer_update)
    def update(trainer: Any) -> Any:
        step = train_step_of_trainer(trainer)
        parameters = trainer.optimizer.parameters
        norm = None if step is None else step.before_update(parameters)
        if norm is None:
            # MindFormers clips the gradients in place, and then releases them.
            gradients = [gradient_of(parameter) for parameter in parameters]
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
    """Logs a step with nothing to learn, if several processes divide the model, where EmptySteps does not run."""
    trainer.empty_steps = getattr(trainer, "empty_steps", 0) + 1
    logger.warning(
        "step %d: No token of the step's rows counts in the loss: it has nothing to learn, and was skipped (%d so far)."
        " Check the labels of the data.",
        trainer.state.global_step + 1,
        trainer.empty_steps,
    )


@functools.lru_cache(maxsize=1)
def _gpt_with_adapters(model: nn.Cell) -> Optional[nn.Cell]:
    """Returns the part of a model with adapters that computes the loss; None for a model without adapters."""
    if not any(lora_cells(model)):
        return None
    return next((cell for _, cell in model.cells_and_names() if isinstance(cell, GPTModel)), None)


def _micro_batches(trainer: Any, *arguments: Any, **keywords: Any) -> List[Dict[str, Any]]:
    """Returns a step's micro-batches: MindFormers 2.0 passes them as one batch, 2.1 reads them in the step."""
    count = trainer.num_accumulation_steps
    inputs = keywords.get("inputs", arguments[0] if arguments else None)
    if isinstance(inputs, Mapping):
        return [trainer._split_micro_batch(inputs, number) for number in range(count)]
    return [trainer._next_batch() for _ in range(count)]
