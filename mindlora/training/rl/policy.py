"""One policy of a run that learns from rewards: its questions, what it learns from the answers, and its processes."""

import contextlib
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from mindspore import nn

from mindlora.core import errors
from mindlora.core.errors import DivergenceError, LoraError
from mindlora.serving.in_training import TRAINED
from mindlora.training.model.log_probabilities import row_log_probabilities
from mindlora.training.resume.collectives import all_gather, rank_and_count, rank_count, share
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
from mindlora.training.rl.prompts import Prompt, prompts_of_step
from mindlora.training.rl.rewards import Rewards
from mindlora.training.rl.rollouts import Answers, Question, Rollouts
from mindlora.training.rl.settings import RlSettings


class Processes:
    """The exchange of arrays and errors between a run's processes. All of them must call the same, in the same order.

    Attributes:
        rank (int): The number of this process.
        count (int): The number of processes that train in data parallel; 1 if this one is alone.
    """

    def __init__(self) -> None:
        self.rank, self.count = (0, 1) if rank_count() == 1 else rank_and_count()

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Returns the rows of all processes, rank 0's first; each process has the same number of rows."""
        if self.count == 1:
            return values
        content = np.ascontiguousarray(values)
        gathered = all_gather(content.reshape(-1).view(np.uint8))
        return np.ascontiguousarray(gathered).view(content.dtype).reshape(-1, *content.shape[1:])

    def own(self, values: np.ndarray) -> np.ndarray:
        """Returns this process's part of the rows of all processes."""
        each = len(values) // self.count
        return values[self.rank * each : (self.rank + 1) * each]

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """Within this, the LoraError of one process is raised in all of them, with the rank of that process."""
        if self.count == 1:
            yield
            return
        failure = None
        try:
            yield
        except LoraError as error:
            failure = error
        failed = failure is not None
        if not self.gather(np.array([failed])).any():
            return
        texts = share(f"{type(failure).__name__} {failure}".encode() if failed else b"")
        rank, text = next((rank, text.decode()) for rank, text in enumerate(texts) if text)
        kind, _, message = text.partition(" ")
        raise getattr(errors, kind)(f"rank {rank}: {message}") from failure


# Replaces a step's number, which is always smaller.
_HELD_OUT = 2**32 - 1


@dataclasses.dataclass
class Experience:
    """The answers of a step and their properties, for num_iterations steps of the optimizer.

    The rows of its arrays are those of all processes.

    Attributes:
        answers (Answers): This process's.
        log_probabilities (array): float64 [rows, N], the sampler's.
        mask (array): bool [rows, N], where a row has a token of its answer to predict.
        advantages (array): float64 [rows], or with a teacher [rows, N].
        counted (array): bool [rows, N], the tokens that the loss counts.
        reference (array or None): float64 [rows, N], the tokens' log-probabilities under the reference.
        measures (dict): The measures of the answers.
        old (array or None): float64 [rows, N], their log-probabilities under the policy before the first step on them;
            None until then.
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
        name (str): The adapter's name; "" if it is the only one.
        settings (RlSettings): The policy's settings.
        seed (int): The run's seed, used if the settings have none.

    Attributes:
        adapter (str): The name by which requests select the policy.
        processes (Processes): The run's processes, each of which answers a part of the prompts.
        prompts, held_out (list of Prompt): The prompts that it answers; set when the run begins, as is
        rewards (Rewards): the functions that rate the answers, or None.
        learns (bool): Whether the policy has not ended.
        experience (Experience or None): The experience of the last step.
        measures (dict): The measures of the last step.
        samples (list of dict): The last step's answers that the report shows.
        held_out_rewards (array or None): The last measured rewards of answers to the held-out prompts.
        loss, tokens (float): The loss and the number of counted tokens of the last step.
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

    @staticmethod
    def of_rows(network: nn.Cell, settings: Sequence[RlSettings]) -> nn.Cell:
        """Returns the cell whose outputs the losses of all policies take, as for PolicyGraphs.

        The model's loss is replaced in place. ``settings`` has the settings of each policy.
        """
        return row_log_probabilities(network, "rl", temperature=settings[0].temperature)

    def questions(self, number: int) -> List[Question]:
        """Returns this process's questions of a step of the data."""
        prompts = self.prompts_of(number)
        rows = np.arange(len(prompts) * self.settings.num_generations)
        own = [prompts[index] for index in self.processes.own(np.arange(len(prompts)))]
        return [Question(self.adapter, self.settings, own, (self.seed, number), first=int(self.processes.own(rows)[0]))]

    def prompts_of(self, number: int) -> List[Prompt]:
        """Returns the prompts of a step of the data, for all processes."""
        chosen = prompts_of_step(len(self.prompts), number, self.settings.prompts_per_step, self.seed)
        return [self.prompts[index] for index in chosen]

    def held_out_question(self) -> Question:
        """Returns the question of this process's part of the held-out prompts: one answer to each, with the same draws
        each time. If the prompts cannot be shared evenly, some processes answer the last one again.
        """
        each = -(-len(self.held_out) // self.processes.count)
        first = self.processes.rank * each
        last = len(self.held_out) - 1
        prompts = [self.held_out[min(index, last)] for index in range(first, first + each)]
        return Question(self.adapter, self.settings, prompts, (self.seed, _HELD_OUT), 1, first)

    def of_held_out(self, values: np.ndarray) -> np.ndarray:
        """Returns the values for each held-out prompt, given those for this process's part."""
        return self.processes.gather(values)[: len(self.held_out)]

    def answers(self, number: int, answered: Sequence[Answers], rollouts: Rollouts) -> Answers:
        """Returns the rows of a step, from the answers to its questions."""
        return answered[0]

    def rate(self, answers: Answers, reference: Optional[np.ndarray], rollouts: Rollouts) -> None:
        """Makes an experience from a step's rows.

        Args:
            answers (Answers): The rows.
            reference (array): float64 [rows, N], log-probabilities under the reference, if beta is above 0.
            rollouts (Rollouts): The engine that computes a teacher's log-probabilities.

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
        """Returns the reward functions' values for answers, float64 [rows, functions], and the teacher's
        log-probabilities of the answers' tokens, float64 [rows, N]; None for one that does not exist.

        Raises RewardError or TeacherError on all processes if a function or the teacher fails on one.
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
        """Returns the calls per answer and the share of failed calls; without tools, the result is empty."""
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
        """Whether the loss compares the current policy with another one."""
        return self.experience.old is not None or self.experience.reference is not None

    def coefficients(self, log_probabilities: Optional[np.ndarray]) -> np.ndarray:
        """Computes the loss of the step, and returns its derivative by the outputs of of_rows, float64 [rows, N].

        Args:
            log_probabilities (array): The current policy's, float64 [rows, N]; None if the loss compares nothing and
                the sampler's suffice.
        """
        given = self.experience
        now = given.log_probabilities if log_probabilities is None else self.processes.gather(log_probabilities)
        loss = policy_loss(now, given.old, given.reference, given.advantages, given.counted, self.settings)
        self.loss, self.tokens = loss.loss, float(given.counted.sum())
        self.measures = loss.measures
        return self.processes.own(loss.coefficients)

    def differentiated(self, given: np.ndarray) -> None:
        """Takes the outputs of of_rows from the gradient's computation, float64 [rows, N].

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
        """Returns the measures of one answer to each held-out prompt.

        They are ``held_out_reward``, the mean reward, and ``held_out_teacher/kl``, the divergence from the teacher.
        ``differentiate`` is PolicyGraphs.differentiate for this policy.
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
        """Measures the distance of the sampler's log-probabilities from the trainer's, for the same weights and tokens.

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
    """Returns the answers with the highest and the lowest value for the report; rewards are included."""
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
