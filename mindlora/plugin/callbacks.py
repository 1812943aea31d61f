"""Callbacks to name in a YAML: LoraCheckpoint, LoraStart, HeldOutLoss, LossCurve, ProgressBar."""
import json
import os

import numpy as np
from mindformers.core.callback.callback import _get_loss_output
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_output_root_path, get_real_rank
from mindspore import Callback
from tqdm import tqdm

from mindlora import atomic
from mindlora.adapt import lora_cells
from mindlora.errors import ConfigError
from mindlora.plugin import resume as training_state
from mindlora.plugin.evaluate import HeldOutLossCell, held_out_loss
from mindlora.plugin.log import logger
from mindlora.plugin.network import base_of
from mindlora.residual import start_adapters

register = MindFormerRegister.register(MindFormerModuleType.CALLBACK, legacy=True)


def _loss(params):
    return float(_get_loss_output(params.net_outputs)[0])


# MindFormers puts the class before the message of an error that a constructor raises.
def _check_count(name, value):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, it must be a whole number of at least 1.")


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
            _check_count(name, value)
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
                logger.warning("lora_dropout is above 0: the resumed run drops other elements than the run would have "
                               "that was stopped, so its losses differ a little from now on.")
        else:
            start_adapters(base_of(params.train_network))
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
        self.losses.append(_loss(params))
        # A resumed run starts inside an epoch, so the epochs that MindSpore counts would outlast the data.
        last = step >= training_state.total_steps(params)
        if last or training_state.passed(self.save_steps, self.last_saved, step):
            reported = self._reported(params)
            if self.best_metric not in reported:
                raise ConfigError(f"LoraCheckpoint: best_metric is {self.best_metric!r}, but at step {step} only "
                                  f"{', '.join(sorted(reported))} is reported. List the callback that reports it "
                                  "before LoraCheckpoint, and let it run at every save.")
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
        logger.info("Adapter of step %d saved in %s (%s %s).", step, folder, self.best_metric,
                    "not measured" if value is None else f"{value:.6g}")
        best = os.path.join(self.directory, "best")
        known = training_state.best_value(best, self.best_metric)
        if value is not None and np.isfinite(value) and (
                known is None or (value < known if self.best_mode == "min" else value > known)):
            training_state.save_best(best, params, self.best_metric, value)
        for old in training_state.step_folders(self.directory)[:-self.keep_last]:
            atomic.remove_folder(old)

    def _reported(self, params):
        """Returns the metrics of this step by name."""
        reported = dict(params.get("eval_results") or {})
        if self.losses:
            reported["loss"] = float(np.mean(self.losses))
        return reported


@register
class LoraStart(Callback):
    """Carries out a lora_init that changes the base, once the base is loaded; only for runs without LoraCheckpoint."""

    def on_train_begin(self, run_context):
        params = run_context.original_args()
        # Which resumes where a run stopped, or else starts itself.
        if not any(isinstance(callback, LoraCheckpoint) for callback in params.list_callback):
            start_adapters(base_of(params.train_network))


@register
class HeldOutLoss(Callback):
    """Measures the loss on held-out data while training and reports it as the metric ``held_out_loss``.

    The metric stands for the step alone at which it was measured; LoraCheckpoint sees it if it is listed after this.

    Args:
        dataset_dir (str): MindRecord with int32 columns input_ids and labels.
        every_steps (int): How often. Default: 100. It is measured at the last step too.
        batch_size (int): Rows at a time. Default: 8.

    Raises:
        ConfigError: An argument is out of range, or there is no such file.
    """

    def __init__(self, dataset_dir, every_steps=100, batch_size=8):
        super().__init__()
        for name, value in (("every_steps", every_steps), ("batch_size", batch_size)):
            _check_count(name, value)
        if not os.path.exists(dataset_dir):
            raise ConfigError(f"dataset_dir {dataset_dir} does not exist.")
        self.dataset_dir, self.every_steps, self.batch_size = dataset_dir, every_steps, batch_size
        self.cell, self.step_before, self.measured = None, 0, []

    def on_train_epoch_begin(self, run_context):
        # Not at the beginning of training, when a resumed run may not yet know its step.
        self.step_before = run_context.original_args().cur_step_num

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        step, results = params.cur_step_num, dict(params.get("eval_results") or {})
        results.pop("held_out_loss", None)
        if (training_state.passed(self.every_steps, self.step_before, step)
                or step >= training_state.total_steps(params)):
            if self.cell is None:
                network = base_of(params.train_network)
                self.cell = HeldOutLossCell(network, network.config.ignore_token_id)
            loss = held_out_loss(self.cell, self.dataset_dir, self.batch_size)
            params.train_network.set_train(True)
            logger.info("step %d: held_out_loss %.6f", step, loss)
            results["held_out_loss"] = loss
            self.measured.append((step, loss))
        params["eval_results"] = results
        self.step_before = step


@register
class LossCurve(Callback):
    """Records the loss of every step, and what HeldOutLoss measures, and draws both: loss_curve.json, loss_curve.png.

    Args:
        directory (str): Where to write. Default: None, the output folder of the run.

    Raises:
        ConfigError: matplotlib is not installed.
    """

    def __init__(self, directory=None):
        super().__init__()
        try:
            import matplotlib  # pylint: disable=import-outside-toplevel,unused-import
        except ImportError as error:
            raise ConfigError("LossCurve draws with matplotlib, which is not installed: pip install "
                              "'mindlora[plot]', or take LossCurve out of callbacks.") from error
        self.directory = directory or get_output_root_path()
        self.train = []

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        self.train.append((params.cur_step_num, _loss(params)))

    def on_train_end(self, run_context):
        if get_real_rank() != 0 or not self.train:
            return
        held_out = [point for callback in run_context.original_args().list_callback
                    if isinstance(callback, HeldOutLoss) for point in callback.measured]
        from mindlora.plugin.plot import draw_loss  # pylint: disable=import-outside-toplevel
        os.makedirs(self.directory, exist_ok=True)
        with atomic.replace_file(os.path.join(self.directory, "loss_curve.json")) as path:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"train": self.train, "held_out": held_out}, file)
        with atomic.replace_file(os.path.join(self.directory, "loss_curve.png")) as path:
            draw_loss(self.train, held_out, path)
        logger.info("Loss curve drawn: %s", os.path.join(self.directory, "loss_curve.png"))


@register
class ProgressBar(Callback):
    """Shows step, loss and time left on stderr while training, on rank 0.

    Args:
        label (str): What stands before the bar. Default: "training".
    """

    def __init__(self, label="training"):
        super().__init__()
        self.label, self.bar = label, None

    def on_train_epoch_begin(self, run_context):
        # Not at the beginning of training, when a resumed run may not yet know its step.
        if self.bar is not None:
            return
        params = run_context.original_args()
        self.bar = tqdm(total=training_state.total_steps(params), initial=params.cur_step_num, desc=self.label,
                        unit="step", disable=get_real_rank() != 0, dynamic_ncols=True,
                        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left"
                                   "{postfix}")

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        self.bar.set_postfix_str(f"loss {_loss(params):.3f}", refresh=False)
        self.bar.update(params.cur_step_num - self.bar.n)

    def on_train_end(self, run_context):
        if self.bar is not None:
            self.bar.close()
