"""LoraCheckpoint: saves the adapter while training, and the state that a run needs to resume."""

import os
from typing import Mapping, Optional, Union

import numpy as np
from mindformers.tools.utils import get_real_rank
from mindspore import Callback
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core import atomic
from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, check_number
from mindlora.network.cells.embedding import NoisyEmbedding
from mindlora.network.initialize import initialize_adapters
from mindlora.training.callbacks.common import check_mode, loss_of, register, reported_metrics, step_record
from mindlora.training.exchange import exchange as exchange_state
from mindlora.training.log import logger
from mindlora.training.model.network import base_of, check_loaded_base
from mindlora.training.resume import training_state
from mindlora.training.resume.sharded_adapter import ShardedSaves


@register
class LoraCheckpoint(Callback):
    """Saves the adapter without the base while training: every save_steps steps, at the end, and the best so far.

    ``directory`` holds step_N (adapter and training state, from which a run resumes) and best (only the adapter). Rank
    0 writes each of them atomically. Anything that an earlier run saved there after the step at which this run starts
    is moved into earlier_run_1, earlier_run_2 and so on.

    In a sharded run (model_parallel, pipeline_stage, or an optimizer that splits parameters) the ranks join their
    slices at each save, and rank 0 writes only the adapter: such a run cannot be resumed here. If the slices cannot be
    joined, each rank writes its own in the folder slices, and the log says which command joins them.

    A resumed run continues exactly as if it had never stopped: the same data in the same order, the same learning
    rates and losses. The exceptions are lora_dropout above 0 and neftune_alpha, which the log warns about: MindSpore
    cannot restore the random state of its kernels, so the resumed run drops different elements and adds different
    noise.

    Args:
        save_steps (int): Steps between saves. Default: 100.
        directory (str): Folder to write to. Default: None, lora_checkpoint in the output folder of the run.
        keep_last (int): How many step folders to keep. Default: 3.
        best_metric (str): The metric that decides which adapter is best: ``loss``, the mean training loss since the
            last save, or a metric that a callback listed before this one reports, such as ``held_out_loss``. Default:
            "loss".
        best_mode (str): "min" if a smaller metric is better, "max" if a larger one is. Default: "min".
        resume (bool or str): True to resume from the newest step folder in ``directory``, or the path of a step folder.
            Default: False.

    Raises:
        ConfigError: An argument is out of range, the metric is not reported, or there is nothing to resume from.
    """

    def __init__(
        self,
        save_steps: int = 100,
        directory: Optional[str] = None,
        keep_last: int = 3,
        best_metric: str = "loss",
        best_mode: str = "min",
        resume: Union[bool, str] = False,
    ):
        super().__init__()
        for name, value in (("save_steps", save_steps), ("keep_last", keep_last)):
            check_number(value, name, COUNT)
        check_mode("best_mode", best_mode)
        if not isinstance(resume, (bool, str)):
            raise ConfigError(f"resume is {resume!r}, but it must be True, False or the path of a step folder.")
        self.save_steps = save_steps
        self.keep_last = keep_last
        self.directory = training_state.checkpoint_directory(directory)
        self.best_metric = best_metric
        self.best_mode = best_mode
        self.resume = resume
        self.losses = []
        self.last_saved = 0
        self.measured = (0, None)
        self.sharded = ShardedSaves(self.directory, keep_last)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Compares the bases as BaseCheck does, resumes or initializes the adapters, and moves earlier saves aside."""
        params = run_context.original_args()
        check_loaded_base(params.train_network)
        if self.resume:
            folder = training_state.resume_folder(self.directory, self.resume)
            training_state.restore(folder, params)
            exchange_state.restore_unsent(folder, params.cur_step_num, params.train_network)
            self.last_saved = params.cur_step_num
            logger.info("Resumed from %s.", folder)
            cells = params.train_network.cells_and_names()
            has_noise = any(isinstance(cell, NoisyEmbedding) for _, cell in cells)
            training_state.warn_about_draws(params.train_network, has_noise)
        else:
            initialize_adapters(base_of(params.train_network))
        if get_real_rank() == 0:
            training_state.set_aside(self.directory, params.cur_step_num)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Corrects MindSpore's count of epochs in a resumed run."""
        # MindSpore counts epochs from 1 even in a resumed run.
        params = run_context.original_args()
        if self.resume and not params.get("dataset_sink_mode"):
            params.cur_epoch_num = params.cur_step_num // params.batch_num + 1

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Saves if a save is due, and stops the run after its last step."""
        params = run_context.original_args()
        step = params.cur_step_num
        if not step_record(params).is_empty:
            self.losses.append(loss_of(params))
        # A resumed run may start within an epoch, so MindSpore would count past the end of the data.
        last = step >= training_state.total_steps(params)
        if last or training_state.passed(self.save_steps, self.last_saved, step):
            reported = self._reported(params)
            # The adapter is saved first, even if the metric is missing.
            self._save(params, float(reported[self.best_metric]) if self.best_metric in reported else None)
            # The loss is missing if no step since the last save learned anything.
            if self.best_metric not in reported and self.best_metric != "loss":
                raise ConfigError(
                    f"LoraCheckpoint: best_metric is {self.best_metric!r}, but at step {step} only these are "
                    f"reported: {', '.join(sorted(reported))}. List the callback that reports it before "
                    "LoraCheckpoint, and let it measure at every step that is saved. The step was saved."
                )
        elif self.best_metric in reported_metrics(params):
            self.measured = step, float(reported_metrics(params)[self.best_metric])
            self._keep_if_best(params, self.measured[1])
        if last:
            run_context.request_stop()

    def on_train_end(self, run_context: RunContext) -> None:
        """Saves the last step, if it has not been saved."""
        params = run_context.original_args()
        if params.cur_step_num != self.last_saved:
            # Another callback stopped the run, perhaps at a step without a measurement. By now, MindSpore has dropped
            # the reported metrics.
            step, value = self.measured
            self._save(params, value if step == params.cur_step_num else self._reported(params).get(self.best_metric))

    # Methods that differ under another Trainer.

    def is_sharded(self, params: InternalCallbackParam) -> bool:
        """Returns whether each rank holds only a part of the adapter."""
        return self.sharded.applies_to(params)

    def write(self, folder: str, params: InternalCallbackParam, values: Optional[Mapping[str, np.ndarray]]) -> None:
        """Writes a step folder; ``values`` are the joined tensors of a sharded adapter."""
        training_state.save(folder, params, values)

    def _save(self, params, value):
        """Writes the step folder, and best if ``value`` is the best so far; None means that it was not measured."""
        step = params.cur_step_num
        self.losses = []
        self.last_saved = step
        exchange_state.save_unsent(self.directory, step, params.train_network, self.keep_last)
        values = None
        if self.is_sharded(params):
            value = self.sharded.metric(value)
            values = self.sharded.gather(params)
            if values is None:
                return
        if get_real_rank() != 0:
            return
        folder = os.path.join(self.directory, f"{training_state.STEP_PREFIX}{step}")
        self.write(folder, params, values)
        logger.info(
            "Adapter of step %d saved in %s (%s: %s).",
            step,
            folder,
            self.best_metric,
            "not measured" if value is None else f"{value:.6g}",
        )
        if value is not None and self._is_best(value):
            training_state.save_best(self._best, params, self.best_metric, value, values)
        for old in training_state.step_folders(self.directory)[: -self.keep_last]:
            atomic.remove_folder(old)

    def _keep_if_best(self, params, value):
        """Writes best, on rank 0, if ``value`` is the best so far."""
        values = None
        if self.is_sharded(params):
            value = self.sharded.metric(value)
            # All ranks must know, because all of them have to gather.
            if not self.sharded.rank_0_says(self._is_best(value)):
                return
            values = self.sharded.gather(params)
            if values is None:
                return
        if get_real_rank() == 0 and self._is_best(value):
            training_state.save_best(self._best, params, self.best_metric, value, values)

    @property
    def _best(self):
        return os.path.join(self.directory, "best")

    def _is_best(self, value):
        """Returns whether ``value`` is the best so far, judging by the files that this rank finds in the folder."""
        before = training_state.best_value(self._best, self.best_metric)
        better = before is None or (value < before if self.best_mode == "min" else value > before)
        return bool(np.isfinite(value)) and better

    def _reported(self, params):
        """Returns {metric: value} of this step."""
        reported = reported_metrics(params)
        if self.losses:
            reported["loss"] = float(np.mean(self.losses))
        return reported
