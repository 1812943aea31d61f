"""LoraCheckpoint: the adapter, and what a run needs to resume, saved while training."""

import os

import numpy as np
from mindformers.tools.utils import get_real_rank
from mindspore import Callback

from mindlora.common import atomic
from mindlora.errors import ConfigError
from mindlora.initialize import initialize_adapters
from mindlora.nn.tree import lora_cells
from mindlora.plugin import resume as training_state
from mindlora.plugin.callbacks.common import check_count, loss_of, register
from mindlora.plugin.log import logger
from mindlora.plugin.network import base_of


@register
class LoraCheckpoint(Callback):
    """Saves the adapter alone while training: every so many steps, at the end, and the best one.

    ``directory`` gets step_N (adapter and training state, from which a run resumes) and best (adapter alone). Each is
    written in one atomic step, by rank 0. What an earlier run left there beyond the step at which this one starts is
    moved into earlier_run_1, earlier_run_2 and so on.

    A resumed run goes on exactly as if it had never stopped: the same data in the same order, the same learning rates
    and losses. With lora_dropout above 0 it does not, and says so in the log: MindSpore cannot put the random state of
    its dropout kernels back, so the resumed run drops other elements.

    Args:
        save_steps (int): Save every so many steps. Default: 100.
        directory (str): Where to write. Default: None, lora_checkpoint in the output folder of the run.
        keep_last (int): How many step folders to keep. Default: 3.
        best_metric (str): What decides which is best: ``loss``, the mean training loss since the last save, or a
            metric that another callback listed before this one reports, such as ``held_out_loss``. Default: "loss".
        best_mode (str): "min" or "max". Default: "min".
        resume (bool or str): True to go on from the newest step folder in ``directory``, or the path of one.
            Default: False.

    Raises:
        ConfigError: An argument is out of range, the metric is not reported, or there is nothing to resume from.
    """

    def __init__(self, save_steps=100, directory=None, keep_last=3, best_metric="loss", best_mode="min", resume=False):
        super().__init__()
        for name, value in (("save_steps", save_steps), ("keep_last", keep_last)):
            check_count(name, value)
        if best_mode not in ("min", "max"):
            raise ConfigError(f"best_mode is {best_mode!r}, it must be 'min' or 'max'.")
        if not isinstance(resume, (bool, str)):
            raise ConfigError(f"resume is {resume!r}, it must be True, False or the path of a step folder.")
        self.save_steps, self.keep_last = save_steps, keep_last
        self.directory = training_state.checkpoint_directory(directory)
        self.best_metric, self.best_mode, self.resume = best_metric, best_mode, resume
        self.losses, self.last_saved = [], 0

    def on_train_begin(self, run_context):
        params = run_context.original_args()
        if self.resume:
            folder = training_state.resume_folder(self.directory, self.resume)
            training_state.restore(folder, params)
            self.last_saved = params.cur_step_num
            logger.info("Resumed from %s.", folder)
            if any(cell.dropout_rate > 0 for _, cell in lora_cells(params.train_network)):
                logger.warning(
                    "lora_dropout is above 0: the resumed run drops other elements than the run would have "
                    "that was stopped, so its losses differ a little from now on."
                )
        else:
            initialize_adapters(base_of(params.train_network))
        if get_real_rank() == 0:
            aside = training_state.set_aside(self.directory, params.cur_step_num)
            if aside:
                logger.warning("%s holds what an earlier run saved; it has been moved to %s.", self.directory, aside)

    def on_train_epoch_begin(self, run_context):
        # MindSpore counts epochs from 1 also where a run resumes.
        params = run_context.original_args()
        if self.resume and not params.get("dataset_sink_mode"):
            params.cur_epoch_num = params.cur_step_num // params.batch_num + 1

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        step = params.cur_step_num
        self.losses.append(loss_of(params))
        # A resumed run starts inside an epoch, so the epochs that MindSpore counts would outlast the data.
        last = step >= training_state.total_steps(params)
        if last or training_state.passed(self.save_steps, self.last_saved, step):
            reported = self._reported(params)
            if self.best_metric not in reported:
                raise ConfigError(
                    f"LoraCheckpoint: best_metric is {self.best_metric!r}, but at step {step} only "
                    f"{', '.join(sorted(reported))} is reported. List the callback that reports it "
                    "before LoraCheckpoint, and let it run at every save."
                )
            self._save(params, float(reported[self.best_metric]))
        if last:
            run_context.request_stop()

    def on_train_end(self, run_context):
        params = run_context.original_args()
        if params.cur_step_num != self.last_saved:
            # Another callback stopped the run at a step at which the metric may not have been measured.
            value = self._reported(params).get(self.best_metric)
            self._save(params, None if value is None else float(value))

    def _save(self, params, value):
        """Writes the step folder, and best too if ``value`` is the best so far; None is no value."""
        step = params.cur_step_num
        self.losses, self.last_saved = [], step
        if get_real_rank() != 0:
            return
        folder = os.path.join(self.directory, f"{training_state.STEP_PREFIX}{step}")
        training_state.save(folder, params)
        logger.info(
            "Adapter of step %d saved in %s (%s %s).",
            step,
            folder,
            self.best_metric,
            "not measured" if value is None else f"{value:.6g}",
        )
        best = os.path.join(self.directory, "best")
        known = training_state.best_value(best, self.best_metric)
        if (
            value is not None
            and np.isfinite(value)
            and (known is None or (value < known if self.best_mode == "min" else value > known))
        ):
            training_state.save_best(best, params, self.best_metric, value)
        for old in training_state.step_folders(self.directory)[: -self.keep_last]:
            atomic.remove_folder(old)

    def _reported(self, params):
        """Returns the metrics of this step by name."""
        reported = dict(params.get("eval_results") or {})
        if self.losses:
            reported["loss"] = float(np.mean(self.losses))
        return reported
