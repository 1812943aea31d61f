"""RlReport: what a run that learns from rewards reports beside the numbers of its steps."""

from typing import Any, Dict, List, Optional

from mindspore.train import RunContext

from mindlora.training.callbacks.common import PeriodicCallback, register, reported_metrics
from mindlora.training.log import logger
from mindlora.training.model.network import train_step_of


@register
class RlReport(PeriodicCallback):
    """Reports the metric ``reward`` of each step, and ``held_out_reward`` where prompts are held out.

    The answers with the highest and the lowest reward go into the report, where ``samples_every`` says. mindlora-run
    adds this callback to a run with runner_wrapper.rl.

    Args:
        samples_every (int): Steps between the answers that are shown; those of the first and of the last step are.
            Default: 10.
    """

    def __init__(self, samples_every: int = 10):
        super().__init__("samples_every", samples_every)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Reports what the step measured."""
        params = run_context.original_args()
        step = train_step_of(params.train_network)
        metrics = {**reported_metrics(params), "reward": step.measures["reward"]}
        metrics.pop("held_out_reward", None)
        is_last = self.is_due(params)
        every = step.settings.held_out_steps
        if step.settings.held_out_prompts and (params.cur_step_num % every == 0 or params.cur_step_num == params.batch_num * params.epoch_num):
            metrics["held_out_reward"] = step.held_out_reward()
        params["eval_results"] = metrics
        logger.info("step %d: %s", params.cur_step_num, _in_words(step.measures, metrics))
        if is_last or params.cur_step_num == 1:
            shown: List[Dict[str, Any]] = [*(params.get("training_answers") or [])]
            params["training_answers"] = [*shown, {"step": params.cur_step_num, "answers": step.samples}]
        self.step_before = params.cur_step_num

    def on_train_end(self, run_context: RunContext) -> None:
        """Ends the sampler and the process of the rewards."""
        train_step_of(run_context.original_args().train_network).close()


def _in_words(measures: Dict[str, float], metrics: Dict[str, Optional[float]]) -> str:
    names = ("reward", "reward_std", "kl", "completions/mean_length", "completions/clipped_ratio", "agreement/max")
    values = {name: measures[name] for name in names if name in measures}
    if metrics.get("held_out_reward") is not None:
        values["held_out_reward"] = metrics["held_out_reward"]
    return ", ".join(f"{name.rpartition('/')[2] if name != 'agreement/max' else 'disagreement'} {value:.4g}" for name, value in values.items())
