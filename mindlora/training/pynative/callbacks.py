"""mindlora's callbacks under MindFormers' PyNative Trainer, which calls callbacks of its own form.

They see what MindSpore's Model shows a callback, as in graph mode: the run is one epoch of all its steps.
"""

import functools
from typing import Any, Callable, List, Optional, Sequence

import mindspore as ms
import numpy as np
from mindspore import Callback, Tensor, nn
from mindspore.mint.distributed import get_world_size
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.errors import ConfigError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.core.text import listed
from mindlora.core.yaml_file import value_at
from mindlora.network.tree import lora_cells
from mindlora.training.callbacks.common import report_event
from mindlora.training.callbacks.order import ORDER
from mindlora.training.callbacks.registry import AdapterHealth
from mindlora.training.pynative import callback_states
from mindlora.training.pynative.initialization import Initialization
from mindlora.training.pynative.support import CALLBACKS
from mindlora.training.pynative.train_step import TrainStep
from mindlora.training.resume.training_state import warn_about_draws
from mindlora.training.run_configuration import plain

# These take the names of graph mode's callbacks in MindFormers' registry, so they come after these.
from mindlora.training.held_out import pynative as held_out_loss  # noqa: F401  # isort: skip
from mindlora.training.pynative import lora_checkpoint  # noqa: F401  # isort: skip

require_mindformers("2.0")
from mindformers.pynative.callback import CheckpointCallback, TrainerCallback  # noqa: E402


class Callbacks(TrainerCallback):
    """Runs callbacks of mindlora in their order, whatever it is in the YAML, and then the one that saves checkpoints.

    So a checkpoint holds what they have made of the step. What they know is saved beside it, and a resumed run goes on
    with that.

    Args:
        callbacks (sequence): Callbacks of graph mode, and of the PyNative Trainer.
        step (TrainStep): What they see as the train step.
        saver (CheckpointCallback): MindFormers' own; None if the run saves nothing.
    """

    def __init__(self, callbacks: Sequence[Any], step: TrainStep, saver: Optional[CheckpointCallback]):
        self.callbacks = sorted(callbacks, key=lambda callback: ORDER.index(type(callback).__name__))
        self.step = step
        if saver is not None:
            self.callbacks.append(callback_states.SavedWithStates(saver, self.callbacks[:]))
        self.params = InternalCallbackParam()
        self.context = RunContext(self.params)

    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Shows the run, and begins it."""
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
            run_facts=_run_facts(args),
            how_to_go_on=_how_to_go_on(args.checkpoint),
        )
        self.skipped_before = getattr(state, "skipped_steps", 0)
        if state.global_step:
            self._resume(args, state.global_step)
        self._call("on_train_begin", ("on_train_begin", "on_train_epoch_begin"), args, state, kwargs)

    def on_step_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Shows the step that begins."""
        # As MindSpore's Model counts: from 1.
        self.params.cur_step_num = state.global_step + 1
        self._call("on_step_begin", ("on_train_step_begin",), args, state, kwargs)

    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Shows what the step measured; ends the run if a callback has asked for it."""
        loss, norm = (_number(kwargs[name]) for name in ("loss", "grad_norm"))
        # MindFormers 2.1 can skip steps by itself.
        skipped = getattr(state, "skipped_steps", 0)
        self.step.end(loss, norm, skipped > self.skipped_before)
        self.skipped_before = skipped
        self.params.net_outputs = Tensor(self.step.record.loss, ms.float32)
        self._call("on_step_end", ("on_train_step_end",), args, state, kwargs)
        if self.context.get_stop_requested():
            state.max_steps = state.global_step

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Ends the run; raises what a callback has ended it with, after all have saved what they save."""
        self._call("on_train_end", ("on_train_epoch_end", "on_train_end"), args, state, kwargs)
        for callback in self.callbacks:
            if isinstance(callback, Callback):
                callback.__exit__(None, None, None)

    def _resume(self, args, step):
        """Lets the callbacks go on where they were; reports what does not go on so."""
        noise = getattr(getattr(args, "pet_config", None), "neftune_alpha", None)
        warn_about_draws(self.step.network, noise is not None)
        anew = callback_states.restore(args.checkpoint.load_path, self.callbacks)
        if anew:
            report_event(
                self.params,
                "resume",
                f"The run goes on after step {step}, whose checkpoint holds nothing of {listed(anew)}: these begin "
                "anew. Resume with the callbacks of the run to go on exactly.",
            )

    def _call(self, event, names, args, state, kwargs):
        """Calls one event of the Trainer's callbacks, and those of MindSpore's that stand for it."""
        for callback in self.callbacks:
            if isinstance(callback, TrainerCallback):
                getattr(callback, event)(args, state, **kwargs)
            else:
                for name in names:
                    getattr(callback, name)(self.context)


def with_callbacks(handler: Callable) -> Callable:
    """Returns MindFormers' CallbackHandler, which then runs callbacks of mindlora too."""

    @functools.wraps(handler, updated=())
    def handle(callbacks: List[Any], model: List[nn.Cell], optimizer: nn.Optimizer, **others: Any) -> Any:
        ours = [callback for callback in callbacks if isinstance(callback, Callback)]
        _check(ours)
        ours += [callback for callback in callbacks if type(callback).__name__ in ORDER and callback not in ours]
        theirs = [callback for callback in callbacks if callback not in ours]
        if get_world_size() == 1 and (ours or any(lora_cells(model[0]))):
            norms = any(isinstance(callback, AdapterHealth) for callback in ours)
            saver = next((callback for callback in theirs if isinstance(callback, CheckpointCallback)), None)
            theirs = [callback for callback in theirs if callback is not saver]
            theirs.append(Callbacks(ours, TrainStep(model[0], optimizer, norms), saver))
        # Before all others, which see how the adapters begin.
        return handler(callbacks=[Initialization(), *theirs], model=model, optimizer=optimizer, **others)

    return handle


def train_step_of_trainer(trainer: Any) -> Any:
    """Returns the TrainStep of a Trainer; None in a run of several processes, or without adapters and callbacks."""
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
    if names and get_world_size() > 1:
        raise ConfigError(
            f"callbacks has {listed(names)}, which mindlora runs in one process under MindFormers' PyNative Trainer, "
            f"and this run has {get_world_size()}. Remove it."
        )


def _run_facts(args):
    """Returns what a report says of the configuration."""
    configuration = plain(args.to_dict())
    dataloader = value_at(configuration, "train_dataset.dataloader") or {}
    facts = {
        "training data": dataloader.get("dataset_files") or dataloader.get("dataset_dir"),
        "rows in a step": args.training.global_batch_size,
    }
    return {
        "configuration": configuration,
        "defaults": {},
        "data": {name: fact for name, fact in facts.items() if fact},
    }


def _how_to_go_on(checkpoint):
    if not checkpoint.enable_save:
        return "MindFormers saved nothing: checkpoint.enable_save is False."
    return (
        f"MindFormers has saved it in {checkpoint.save_path}. To go on, set checkpoint.load_path to that, and "
        "no_load_optim: False."
    )


def _number(value):
    return float(np.ravel(value.asnumpy() if hasattr(value, "asnumpy") else value)[0])
