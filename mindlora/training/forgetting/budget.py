"""ForgettingBudget: a run may move away from its base by so much, and no further."""

import math
from typing import Any, Dict

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.core.errors import ConfigError
from mindlora.core.fields import FACTOR, Range, check_number, whole_numbers
from mindlora.training.callbacks.common import (
    controlled_step,
    copy_state,
    put_back,
    register,
    report_event,
    reported_metrics,
)

_NAME = "ForgettingBudget"


@register
class ForgettingBudget(Callback):
    """Keeps what Forgetting measures within a budget, by going back to the last state that was.

    When a measurement exceeds ``budget``, adapter and optimizer become again what they were at the last one that did
    not (a copy on the host). Then the run ends; or, up to ``max_returns`` times, it goes on with ``rate_cut`` times the
    learning rate. As the last step is measured too, the adapter at the end is within the budget. All ranks see the same
    measurement, and decide alike.

    Args:
        budget (float): Nats per token; above 0.
        max_returns (int): How many times the run goes on, more slowly. Default: 0, it ends at once.
        rate_cut (float): Factor of the learning rate each time; above 0 and at most 1. Default: 0.3.

    Raises:
        ConfigError: An argument is out of range, nothing measures forgetting, or the train step is not mindlora's.
    """

    def __init__(self, budget: float, max_returns: int = 0, rate_cut: float = 0.3):
        super().__init__()
        check_number(budget, "budget", Range("a number above 0", lambda v: 0 < v < math.inf))
        check_number(max_returns, "max_returns", whole_numbers(0))
        check_number(rate_cut, "rate_cut", FACTOR)
        self.budget = budget
        self.max_returns = max_returns
        self.rate_cut = rate_cut
        self.returns = 0
        self.factor = 1.0
        self.within: Dict[str, Any] = {}
        self.step_within = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks that forgetting is measured."""
        params = run_context.original_args()
        if "Forgetting" not in {type(callback).__name__ for callback in params.list_callback}:
            raise ConfigError(f"{_NAME} needs forgetting, which nothing measures: add Forgetting to callbacks.")

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Copies the state at which the run begins, and sets the rate that a resumed run had."""
        # Not when training begins: a resumed run may not have its state by then.
        params = run_context.original_args()
        step = controlled_step(params, _NAME)
        if not self.within:
            self._keep(params.cur_step_num, step)
            step.set_rate_factor(_NAME, self.factor)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Goes back if the budget is exceeded."""
        params = run_context.original_args()
        moved = reported_metrics(params).get("forgetting")
        if moved is None:
            return
        step = controlled_step(params, _NAME)
        # Not a NaN either.
        if moved <= self.budget:
            self._keep(params.cur_step_num, step)
            return
        put_back(step, self.within)
        # It was measured of the state that is gone.
        params["eval_results"] = {k: v for k, v in reported_metrics(params).items() if k != "held_out_loss"}
        self.returns += 1
        told = (
            f"{_NAME}: the model is {moved:.4g} nats per token away from its base, and the budget is "
            f"{self.budget:.4g}. Adapter and optimizer are those of step {self.step_within} again"
        )
        if self.returns > self.max_returns:
            report_event(params, "budget", f"{told}, and the run ends.")
            run_context.request_stop()
        else:
            self.factor *= self.rate_cut
            rate = f"from now on the learning rate is {self.factor:.4g} times that of the schedule"
            report_event(params, "budget", f"{told}; {rate}.")
        # Restoring an optimizer without a schedule has restored its rate.
        step.set_rate_factor(_NAME, self.factor)

    def training_state(self) -> Dict[str, Any]:
        """Returns what a resumed run needs, as JSON values."""
        return {"returns": self.returns, "factor": self.factor}

    def restore_training_state(self, state: Dict[str, Any]) -> None:
        """Takes over what ``training_state`` returned."""
        self.returns = state["returns"]
        self.factor = state["factor"]

    def _keep(self, number: int, step: Any) -> None:
        self.within = copy_state(step)
        self.step_within = number
