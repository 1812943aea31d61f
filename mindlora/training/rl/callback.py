"""RlReport: further reports of a run that learns from rewards, in addition to the numbers of its steps."""

from typing import Any, Dict, List, Tuple

from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.training.callbacks.common import PeriodicCallback, register, reported_metrics
from mindlora.training.log import logger
from mindlora.training.model.network import train_step_of
from mindlora.training.resume.training_state import total_steps
from mindlora.training.rl.policies import Policies
from mindlora.training.rl.settings import METRICS

# Measure -> its name in the log.
_LOGGED = {
    "reward": "reward",
    "reward_std": "spread",
    "held_out_reward": "held-out reward",
    "kl": "kl",
    "teacher/kl": "kl from the teacher",
    "held_out_teacher/kl": "held-out kl from the teacher",
    "teacher/divergence": "divergence from the teacher",
    "held_out_teacher/divergence": "held-out divergence from the teacher",
    "completions/mean_length": "tokens of an answer",
    "completions/clipped_ratio": "share that was cut",
    "agreement/max": "sampler and trainer differ by",
}


@register
class RlReport(PeriodicCallback):
    """Reports the metrics ``reward``, ``teacher/kl`` and ``teacher/divergence`` of each step, as far as it has them.

    ``teacher/kl`` needs a teacher, ``teacher/divergence`` gkd; with held-out prompts, there are also metrics with the
    prefix ``held_out_``. The report shows, as often as ``samples_every`` says, the answers with the highest and the
    lowest reward, or, without rewards, those that the teacher rates highest and lowest. mindlora-run adds this callback
    to a run with runner_wrapper.rl.

    Args:
        samples_every (int): Steps between shown answers; the first and the last step's answers are always shown.
            Default: 10.
    """

    def __init__(self, samples_every: int = 10):
        super().__init__("samples_every", samples_every)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Reports the measurements of the step."""
        params = run_context.original_args()
        policies, number = _policy_of(params)
        policy = policies[number]
        step = params.cur_step_num
        is_due = self.is_due(params)
        is_last = step >= total_steps(params)
        if policy.settings.held_out_prompts and (is_last or step % policy.settings.held_out_steps == 0):
            policy.measures.update(policies.held_out_measures(number))
        metrics = {name: value for name, value in reported_metrics(params).items() if name not in METRICS}
        metrics.update({name: policy.measures[name] for name in METRICS if name in policy.measures})
        params["eval_results"] = metrics
        logger.info("step %d%s: %s", step, f", {policy.name}" if policy.name else "", _in_words(policy.measures))
        if is_due or step == 1:
            shown: List[Dict[str, Any]] = [*(params.get("training_answers") or [])]
            params["training_answers"] = [*shown, {"step": step, "answers": policy.samples}]
        self.step_before = step

    def on_train_end(self, run_context: RunContext) -> None:
        """Ends the policy, and with the last one also the sampler and the reward process."""
        policies, number = _policy_of(run_context.original_args())
        policies.end(number)


def _policy_of(params: InternalCallbackParam) -> Tuple[Policies, int]:
    """Returns the policies of a run, and the number of the policy to which the callback parameters belong."""
    step = train_step_of(params.train_network)
    return step.policies, step.number


def _in_words(measures: Dict[str, float]) -> str:
    return ", ".join(f"{words} {measures[name]:.4g}" for name, words in _LOGGED.items() if name in measures)
