"""One policy of a run that learns from rewards: what it asks, and what it learns from the answers."""

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
from mindspore import nn

from mindlora.core.errors import DivergenceError
from mindlora.serving.in_training import TRAINED
from mindlora.training.model.log_probabilities import row_log_probabilities
from mindlora.training.rl.policy_loss import (
    advantages,
    agreement,
    answer_kl,
    answer_measures,
    counted,
    distillation,
    policy_loss,
    weighted_rewards,
)
from mindlora.training.rl.processes import Processes
from mindlora.training.rl.prompts import Prompt, prompts_of_step
from mindlora.training.rl.rewards import Rewards
from mindlora.training.rl.rollouts import Answers, Question, Rollouts
from mindlora.training.rl.settings import RlSettings

# In the place of a step's number, which is smaller.
_HELD_OUT = 2**32 - 1


@dataclasses.dataclass
class Experience:
    """The answers of a step and what is known of them, for num_iterations steps of the optimizer.

    The rows of its arrays are those of all processes.

    Attributes:
        answers (Answers): This process's.
        log_probabilities (array): float64 [rows, N], the sampler's.
        mask (array): bool [rows, N], where a row has a token of its answer to predict.
        advantages (array): float64 [rows], or with a teacher [rows, N].
        counted (array): bool [rows, N], the tokens that the loss counts.
        reference (array or None): float64 [rows, N], their log-probabilities under the reference.
        measures (dict): What is reported of them.
        old (array or None): float64 [rows, N], under the policy before the first step on them; None until then.
    """

    answers: Answers
    log_probabilities: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    counted: np.ndarray
    reference: Optional[np.ndarray]
    measures: Dict[str, float]
    old: Optional[np.ndarray] = None


class Policy:
    """A policy: the adapter that trains, or one of several.

    Args:
        name (str): The adapter's; "" where it is the only one.
        settings (RlSettings): The policy's.
        seed (int): The run's, where the settings have none.

    Attributes:
        adapter (str): By which requests ask for it.
        processes (Processes): Those of the run, each of which answers a part of the prompts.
        prompts, held_out (list of Prompt): What it answers; set when the run begins, as is
        rewards (Rewards): what rates the answers, or None.
        learns (bool): Whether it has not ended.
        experience (Experience or None): That of the last step.
        measures (dict): What is reported of the last step.
        samples (list of dict): The answers of the last step that the report shows.
        held_out_rewards (array or None): Of the answers to the prompts that are held out, as they were measured last.
        loss, tokens (float): Of the last step; the tokens are those that counted.
    """

    def __init__(self, name: str, settings: RlSettings, seed: int):
        self.name = name
        self.settings = settings
        self.seed = seed if settings.seed is None else settings.seed
        self.adapter = f"{TRAINED}/{name}" if name else TRAINED
        self.processes = Processes()
        self.prompts: List[Prompt] = []
        self.held_out: List[Prompt] = []
        self.rewards: Optional[Rewards] = None
        self.learns = True
        self.experience: Optional[Experience] = None
        self.measures: Dict[str, float] = {}
        self.samples: List[Dict[str, Any]] = []
        self.held_out_rewards: Optional[np.ndarray] = None
        self.loss = self.tokens = 0.0

    def of_rows(self, network: nn.Cell) -> nn.Cell:
        """Returns what the loss is of, as for PolicyGraphs; the loss of the model is replaced in place."""
        return row_log_probabilities(network, "rl", temperature=self.settings.temperature)

    def questions(self, number: int) -> List[Question]:
        """Returns what this process is to answer for a step of the data."""
        prompts = self.prompts_of(number)
        rows = np.arange(len(prompts) * self.settings.num_generations)
        own = [prompts[index] for index in self.processes.own(np.arange(len(prompts)))]
        return [Question(self.adapter, self.settings, own, (self.seed, number), first=int(self.processes.own(rows)[0]))]

    def prompts_of(self, number: int) -> List[Prompt]:
        """Returns the prompts of a step of the data, for all processes."""
        chosen = prompts_of_step(len(self.prompts), number, self.settings.prompts_per_step, self.seed)
        return [self.prompts[index] for index in chosen]

    def held_out_question(self) -> Question:
        """Returns the question of this process's part of the prompts that are held out: one answer to each, with the
        same draws each time. Where the parts differ in size, the last prompt is answered once more.
        """
        each = -(-len(self.held_out) // self.processes.count)
        first = self.processes.rank * each
        last = len(self.held_out) - 1
        prompts = [self.held_out[min(index, last)] for index in range(first, first + each)]
        return Question(self.adapter, self.settings, prompts, (self.seed, _HELD_OUT), 1, first)

    def of_held_out(self, values: np.ndarray) -> np.ndarray:
        """Returns what there is for each prompt that is held out, of values for this process's part."""
        return self.processes.gather(values)[: len(self.held_out)]

    def answers(self, number: int, answered: Sequence[Answers], rollouts: Rollouts) -> Answers:
        """Returns the rows of a step, of the answers to its questions."""
        return answered[0]

    def rate(self, answers: Answers, reference: Optional[np.ndarray], rollouts: Rollouts) -> None:
        """Makes an experience of the rows of a step.

        Args:
            answers (Answers): The rows.
            reference (array): float64 [rows, N], their log-probabilities under the reference, where beta is above 0.
            rollouts (Rollouts): What a teacher computes with.

        Raises RewardError if a reward fails, and TeacherError if a served teacher does.
        """
        settings, gather = self.settings, self.processes.gather
        rated, teacher = self._rated(answers, rollouts)
        mask, likely = gather(answers.mask), gather(answers.log_probabilities)
        truncated = gather(answers.truncated)
        reference = None if reference is None else gather(reference)
        counts = counted(mask, truncated, settings)
        kl = None if reference is None else answer_kl(likely, reference, counts)
        measures = {**answer_measures(mask, truncated), **self._tool_measures(answers)}
        values, rewards = np.zeros(len(mask)), None
        if rated is not None:
            compared = advantages(gather(rated), settings, kl)
            values, rewards = compared.values, compared.rewards
            measures = {**compared.measures, **measures}
        if teacher is not None:
            distilled = distillation(likely, gather(teacher), counts, settings)
            values = values[:, None] + distilled.values
            measures["teacher/kl"] = distilled.kl
        shown = self.processes.own(values.sum(1) if rewards is None else rewards)
        self.samples = best_and_worst(answers, shown, rewards is not None)
        self.experience = Experience(answers, likely, mask, values, counts, reference, measures)

    def _rated(self, answers: Answers, rollouts: Rollouts) -> Tuple[Optional[np.ndarray], Optional[np.ndarray]]:
        """Returns what the reward functions give to answers, float64 [rows, functions], and the teacher's
        log-probabilities of their tokens, float64 [rows, N]; None where there are none.

        Raises RewardError or TeacherError on all processes if that fails on one.
        """
        rated = teacher = None
        with self.processes.fail_together():
            if self.rewards is not None:
                given = [prompt.given for prompt in answers.prompts]
                rated = self.rewards.of(given, answers.texts, answers.columns())
            if self.settings.teacher is not None:
                teacher = rollouts.teacher_log_probabilities(answers)
        return rated, teacher

    def _tool_measures(self, answers: Answers) -> Dict[str, float]:
        """Returns the calls of an answer and the share that failed; nothing where there are no tools."""
        own = answers.tool_counts()
        if own is None:
            return {}
        count, calls, failures = self.processes.gather(own).sum(0)
        return {
            "tools/call_frequency": float(calls / count),
            "tools/failure_frequency": float(failures / max(calls, 1)),
        }

    @property
    def compares(self) -> bool:
        """Whether the loss compares the policy as it is now with another one."""
        return self.experience.old is not None or self.experience.reference is not None

    def coefficients(self, log_probabilities: Optional[np.ndarray]) -> np.ndarray:
        """Computes the loss of the step, and returns its derivative by what of_rows gives, float64 [rows, N].

        Args:
            log_probabilities (array): Of the policy as it is now, float64 [rows, N]; None where the loss compares
                nothing, and the sampler's do.
        """
        given = self.experience
        now = given.log_probabilities if log_probabilities is None else self.processes.gather(log_probabilities)
        loss = policy_loss(now, given.old, given.reference, given.advantages, given.counted, self.settings)
        self.loss, self.tokens = loss.loss, float(given.counted.sum())
        self.measures = loss.measures
        return self.processes.own(loss.coefficients)

    def differentiated(self, given: np.ndarray) -> None:
        """Takes what of_rows gave when the gradient was made, float64 [rows, N].

        Raises DivergenceError if the sampler does not agree with the trainer.
        """
        experience = self.experience
        if experience.old is None:
            experience.old = self.processes.gather(given)
            self._check_agreement(experience.old)
        self.measures = {**experience.measures, **self.measures}

    def held_out_measures(
        self, answers: Answers, rollouts: Rollouts, differentiate: Callable[[Answers, np.ndarray], np.ndarray]
    ) -> Dict[str, float]:
        """Returns what is measured of one answer to each prompt that is held out.

        That is ``held_out_reward``, their mean reward, and ``held_out_teacher/kl``, their divergence from the teacher.
        ``differentiate`` is that of PolicyGraphs, for this policy.
        """
        measures = {}
        rated, teacher = self._rated(answers, rollouts)
        if rated is not None:
            self.held_out_rewards = weighted_rewards(self.of_held_out(rated), self.settings)
            measures["held_out_reward"] = float(np.nanmean(self.held_out_rewards))
        if teacher is not None:
            counts = self.of_held_out(counted(answers.mask, answers.truncated, self.settings))
            likely = self.of_held_out(answers.log_probabilities)
            distilled = distillation(likely, self.of_held_out(teacher), counts, self.settings)
            measures["held_out_teacher/kl"] = distilled.kl
        return measures

    def _check_agreement(self, trained: np.ndarray) -> None:
        """Measures how far the sampler's log-probabilities are from the trainer's, of the same weights and tokens.

        Raises DivergenceError if they differ by more than rl.max_disagreement.
        """
        found = agreement(trained, self.experience.log_probabilities, self.experience.mask)
        self.experience.measures.update(
            {"agreement/max": found.max, "agreement/k1": found.k1, "agreement/k2": found.k2}
        )
        if not found.holds(self.settings.max_disagreement):
            raise DivergenceError(
                f"Sampler and trainer differ by {found.max:.2g} nats on a token's log-probability, and "
                f"rl.max_disagreement is {self.settings.max_disagreement:g}: the policy would learn from answers that "
                "are not its own. Raise it if the network computes in 16 bits; else report this, with the YAML."
            )


def best_and_worst(answers: Answers, values: np.ndarray, are_rewards: bool) -> List[Dict[str, Any]]:
    """Returns the answers with the highest and the lowest value, for the report, with these if they are rewards."""
    rated = np.flatnonzero(~np.isnan(values))
    if not len(rated):
        return []
    found = []
    for row in (rated[values[rated].argmax()], rated[values[rated].argmin()]):
        prompt = answers.prompts[row].given
        said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        reward = {"reward": float(values[row])} if are_rewards else {}
        found.append({"prompt": said, "answer": answers.texts[row], **reward})
    return found
