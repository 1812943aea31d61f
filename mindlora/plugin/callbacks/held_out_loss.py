"""HeldOutLoss: the loss on held-out data, measured while training."""

import os

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.common.fields import COUNT, check_number
from mindlora.errors import ConfigError
from mindlora.plugin.callbacks.common import register
from mindlora.plugin.graph.network import base_of
from mindlora.plugin.graph.packing import check_held_out
from mindlora.plugin.log import logger
from mindlora.plugin.resume import training_state
from mindlora.plugin.resume.ranks import mean_over_ranks
from mindlora.training.held_out import HeldOutLossCell, held_out_loss


@register
class HeldOutLoss(Callback):
    """Measures the mean cross entropy on held-out data while training and reports it as the metric ``held_out_loss``.

    The metric is reported only at the steps at which it is measured. LoraCheckpoint sees it if the YAML lists
    LoraCheckpoint after this callback.

    Args:
        dataset_dir (str): MindRecord with int32 columns input_ids and labels.
        every_steps (int): Steps between measurements; the last step is measured too. Default: 100.
        batch_size (int): Rows at a time. Default: 8.

    Raises:
        ConfigError: An argument is out of range, or the file does not exist.
    """

    def __init__(self, dataset_dir: str, every_steps: int = 100, batch_size: int = 8):
        super().__init__()
        for name, value in (("every_steps", every_steps), ("batch_size", batch_size)):
            check_number(value, name, COUNT)
        if not os.path.exists(dataset_dir):
            raise ConfigError(f"dataset_dir is {dataset_dir}, which does not exist: name a MindRecord.")
        self.dataset_dir, self.every_steps, self.batch_size = dataset_dir, every_steps, batch_size
        self.cell, self.step_before, self.measured = None, 0, []

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks that the network keeps the examples of packed rows apart."""
        check_held_out(run_context.original_args().train_network, self.dataset_dir)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Records the last step before the epoch."""
        # Not when training begins: a resumed run may not know its step by then.
        self.step_before = run_context.original_args().cur_step_num

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Measures the loss if it is due."""
        params = run_context.original_args()
        step, results = params.cur_step_num, dict(params.get("eval_results") or {})
        results.pop("held_out_loss", None)
        is_last = step >= training_state.total_steps(params)
        if is_last or training_state.passed(self.every_steps, self.step_before, step):
            if self.cell is None:
                network = base_of(params.train_network)
                self.cell = HeldOutLossCell(network, network.config.ignore_token_id)
            # What the ranks decide by it must be the same on all of them.
            loss = mean_over_ranks(held_out_loss(self.cell, self.dataset_dir, self.batch_size))
            params.train_network.set_train(True)
            logger.info("step %d: held_out_loss %.6f", step, loss)
            results["held_out_loss"] = loss
            self.measured.append((step, loss))
        params["eval_results"] = results
        self.step_before = step
