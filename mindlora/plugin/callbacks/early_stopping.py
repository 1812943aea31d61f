"""EarlyStopping: ends a run whose held-out loss no longer improves."""

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.plugin.callbacks.common import register, report_event
from mindlora.plugin.callbacks.step_control import check_is_measured
from mindlora.plugin.resume import training_state
from mindlora.training.early_stop import EarlyStop


@register
class EarlyStopping(Callback):
    """Ends a run when the held-out loss, or another metric, has not improved in ``patience`` measurements in a row.

    LoraCheckpoint keeps the best adapter, if its best_metric is the same metric. All ranks see the same held-out loss,
    and stop at the same step.

    Args:
        patience (int): Measurements in a row without an improvement after which the run ends. Default: 3.
        min_delta (float): By how much a measurement must be better than the best one. Default: 0.0.
        metric (str): ``held_out_loss``, or another metric that a callback reports. Default: "held_out_loss".
        mode (str): "min" if a smaller metric is better, "max" if a larger one is. Default: "min".

    Raises:
        ConfigError: An argument is out of range, or nothing measures held_out_loss.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0, metric: str = "held_out_loss", mode: str = "min"):
        super().__init__()
        self.metric, self.rule = metric, EarlyStop(patience, min_delta, mode)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks that the metric is measured."""
        check_is_measured(run_context.original_args(), "EarlyStopping", self.metric)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Counts a measurement, and ends the run if it is time."""
        params = run_context.original_args()
        value = (params.get("eval_results") or {}).get(self.metric)
        if value is None or not self.rule.step(params.cur_step_num, value):
            return
        if params.cur_step_num < training_state.total_steps(params):
            best = "was never finite" if self.rule.best is None else f"has been {self.rule.best:.6g} at best"
            message = (
                f"EarlyStopping: {self.metric} {best} (step {self.rule.best_step}) and has not improved in "
                f"{self.rule.waited} measurements. The run ends."
            )
            report_event(params, "early_stop", message)
        run_context.request_stop()

    def training_state(self) -> dict:
        """Returns what a resumed run needs, as JSON values."""
        return self.rule.state()

    def restore_training_state(self, state: dict) -> None:
        """Takes over what ``training_state`` returned."""
        self.rule.restore(state)
