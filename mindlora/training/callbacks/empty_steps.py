"""EmptySteps: reports and counts steps with nothing to learn, because no token of their rows counts in the loss."""

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.training.callbacks.common import register, report_event, step_record
from mindlora.training.log import logger


@register
class EmptySteps(Callback):
    """Reports each step in which no token counts, and the number of such steps at the end.

    The train step has skipped them: they change neither the adapter, nor the optimizer, nor the learning rate's step,
    and their loss is NaN. mindlora-run adds this callback to every training run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Reports the step if no token counted."""
        params = run_context.original_args()
        if step_record(params).is_empty:
            self.count += 1
            message = "No token of the step's rows counts in the loss: it has nothing to learn, and was skipped."
            report_event(params, "empty_step", message)

    def on_train_end(self, run_context: RunContext) -> None:
        """Warns if there were such steps."""
        if self.count:
            logger.warning(
                "train_dataset: %d of the %d steps had nothing to learn, because no token of their rows counts in the "
                "loss, and were skipped. Check the labels of the data.",
                self.count,
                run_context.original_args().cur_step_num,
            )
