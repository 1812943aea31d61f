"""RankBudget: plans when AdaLoRA removes ranks, and reports the ranks that each cell keeps."""

from typing import Dict, Optional

from mindformers.tools.register import MindFormerConfig
from mindformers.tools.utils import get_real_rank
from mindspore import Callback
from mindspore.train import RunContext

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.rank_schedule import BudgetSchedule
from mindlora.core.text import listed
from mindlora.models.variants.adalora import ADALORA
from mindlora.training.callbacks.common import controlled_step, register, report_event
from mindlora.training.log import logger
from mindlora.training.resume.training_state import total_steps


@register
class RankBudget(Callback):
    """Carries out the budget of AdaLoRA; mindlora-run adds it.

    Before each step, it sets how many of AdaLoRA's triplets are masked after the step (rank_schedule.BudgetSchedule,
    with the steps of the complete run as its total). Importance and masks are computed in the step (rank_budget.py),
    and LoraCheckpoint saves them with the optimizer's moments. The remaining ranks are reported as an event of the run.

    Raises:
        ConfigError: The train step allocates no ranks, tinit and tfinal leave no steps, or data sinking hides steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Optional[BudgetSchedule] = None

    def on_train_begin(self, run_context: RunContext) -> None:
        """Makes the schedule, now that the run's number of steps is known."""
        params = run_context.original_args()
        budget = _budget(params)
        self.schedule = budget.schedule(total_steps(params))
        if params.get("dataset_sink_mode") and params.batch_num > 1:
            raise ConfigError(
                "RankBudget plans each step, but data sinking does several at once. Set runner_config.sink_mode: False."
            )
        logger.info(
            "AdaLoRA: %d triplets in %d cells; after step %d, %d are left.",
            self.schedule.first,
            len(budget.ranks()),
            self.schedule.last_allocation,
            self.schedule.target,
        )

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Sets what the train step masks after this step."""
        params = run_context.original_args()
        _budget(params).set_plan(self.schedule, params.cur_step_num)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Reports the ranks after the last allocation."""
        params = run_context.original_args()
        if params.cur_step_num == self.schedule.last_allocation:
            budget = _budget(params)
            report_event(params, "rank_budget", _message(budget.ranks(), budget.orthogonality()))

    def on_train_end(self, run_context: RunContext) -> None:
        """Warns if the run ended before the last allocation."""
        step = run_context.original_args().cur_step_num
        if step < self.schedule.last_allocation and get_real_rank() == 0:
            left = sum(_budget(run_context.original_args()).ranks().values())
            logger.warning(
                "AdaLoRA: the run ended at step %d, before the last allocation at step %d. Its adapter has %d ranks "
                "in all instead of %d. Resume the run to its end.",
                step,
                self.schedule.last_allocation,
                left,
                self.schedule.target,
            )


def _budget(params):
    step = controlled_step(params, RankBudget.__name__)
    if step.rank_budget is None:
        raise ConfigError(
            f"RankBudget: the train step allocates no ranks. Set pet_config.{ADALORA.field}: True and "
            "runner_wrapper.rank_budget: True (mindlora-run sets it), or remove RankBudget from callbacks."
        )
    return step.rank_budget


def _message(ranks: Dict[str, int], orthogonality: float) -> str:
    """Returns a message on the ranks that AdaLoRA has allocated."""
    by_rank: Dict[int, list] = {}
    for path, rank in ranks.items():
        by_rank.setdefault(rank, []).append(path)
    cells = "; ".join(f"{rank} at {listed(by_rank[rank])}" for rank in sorted(by_rank, reverse=True) if rank)
    none = f" None at {listed(by_rank[0])}, which an adapter file leaves out." if 0 in by_rank else ""
    return (
        f"AdaLoRA has allocated {sum(ranks.values())} ranks: {cells}.{none} P and Q are {orthogonality:.2g} from "
        "orthogonal (mean Frobenius norm)."
    )


def prepare_budget(config: MindFormerConfig) -> None:
    """Adds the callback RankBudget, and rank_budget of the train step, to the YAML of a training run with AdaLoRA."""
    pet_config = config.model.model_config.pet_config or {}
    if not pet_config.get(ADALORA.field):
        return
    if pet_config.get("adapter_path"):
        logger.info(
            "adapter_path is set: the adapter there is trained further as a plain LoRA of the ranks that it has, and "
            "%s allocates none.",
            ADALORA.field,
        )
        return
    config.runner_wrapper.rank_budget = True
    callbacks = list(config.callbacks or [])
    if not any(callback.get("type") == "RankBudget" for callback in callbacks):
        config.callbacks = [*callbacks, MindFormerConfig(type="RankBudget")]
