"""Generalized knowledge distillation: a policy that learns its teacher's complete distribution."""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

import numpy as np
from mindspore import nn

from mindlora.training.rl.divergence import RowDivergences, row_divergences
from mindlora.training.rl.policy import Experience, Policy, best_and_worst
from mindlora.training.rl.policy_loss import answer_measures, counted
from mindlora.training.rl.prompts import Prompt
from mindlora.training.rl.rollouts import TEACHER, Answers, Question, Rollouts, joined
from mindlora.training.rl.settings import RlSettings

# Distinguishes this draw from others with the seed and a step's number.
_OWN, _TEACHER = 1, 2


class _Rows(NamedTuple):
    """Prompts of rows of one kind, and the number of the first one among those of all processes."""

    prompts: List[Prompt]
    first: int


class GkdPolicy(Policy):
    """The policy of a run with ``rl.gkd``.

    A share ``lmbda`` of a step's rows has the policy's answers; the others have the data's completions, or with
    ``seq_kd`` the teacher's answers. The loss is the mean, over the tokens of these answers, of the divergence D_beta
    of the policy from the teacher (see HeadDivergences). The policy's gradient is taken only through the distributions,
    not through the sampling (Agarwal et al., 2024).
    """

    compares = False
    # The number of rows of the last step, this process's first ones, that the policy sampled.
    sampled = 0

    @staticmethod
    def of_rows(network: nn.Cell, settings: Sequence[RlSettings]) -> RowDivergences:
        """Returns the cell that computes the divergences of rows' tokens."""
        return row_divergences(network, settings)

    def questions(self, number: int) -> List[Question]:
        """Returns the questions of a step for the policy and for the teacher."""
        own, others = self._rows_of(number)
        questions = []
        if own.prompts:
            questions.append(Question(self.adapter, self.settings, own.prompts, (self.seed, number), 1, own.first))
        if others.prompts and self.settings.gkd.seq_kd:
            teacher = TEACHER if self.settings.teacher_adapter else None
            seed = (self.seed, number, _TEACHER)
            questions.append(Question(teacher, self.settings, others.prompts, seed, 1, others.first))
        return questions

    def answers(self, number: int, answered: Sequence[Answers], rollouts: Rollouts) -> Answers:
        """Returns the rows of a step, with answers of the policy, the teacher or the data."""
        own, others = self._rows_of(number)
        parts = list(answered)
        self.sampled = len(own.prompts)
        if others.prompts and not self.settings.gkd.seq_kd:
            parts.append(rollouts.completions(others.prompts, self.settings))
        return joined(parts)

    def rate(self, answers: Answers, reference: Optional[np.ndarray], rollouts: Rollouts) -> None:
        """Makes an experience from a step's rows."""
        gather = self.processes.gather
        mask, truncated = gather(answers.mask), gather(answers.truncated)
        sampled = gather(np.arange(len(answers.mask)) < self.sampled)
        measures = answer_measures(mask[sampled], truncated[sampled]) if sampled.any() else {}
        counts = counted(mask, truncated, self.settings)
        likely = gather(answers.log_probabilities)
        self.experience = Experience(answers, likely, mask, np.zeros(len(mask)), counts, None, measures)

    def coefficients(self, log_probabilities: Optional[np.ndarray]) -> np.ndarray:
        """Returns the weight of each token's divergence."""
        counts = self.experience.counted
        self.tokens = float(counts.sum())
        return self.processes.own(counts / max(counts.sum(), 1))

    def differentiated(self, given: np.ndarray) -> None:
        """Takes the divergences of the tokens, float64 [rows, N]."""
        counts = self.experience.counted
        divergences = self.processes.gather(given) * counts
        self.samples = best_and_worst(self.experience.answers, -self.processes.own(divergences).sum(1), False)
        self.loss = float(divergences.sum() / max(counts.sum(), 1))
        self.measures = {**self.experience.measures, "teacher/divergence": self.loss}

    def held_out_measures(
        self, answers: Answers, rollouts: Rollouts, differentiate: Callable[[Answers, np.ndarray], np.ndarray]
    ) -> Dict[str, float]:
        """Returns the divergence from the teacher on answers to held-out prompts."""
        counts = counted(answers.mask, answers.truncated, self.settings)
        # The existing graph computes a gradient of zeros, to which the next step does not add.
        divergences = self.of_held_out(differentiate(answers, np.zeros(counts.shape)) * counts)
        counts = self.of_held_out(counts)
        return {"held_out_teacher/divergence": float(divergences.sum() / max(counts.sum(), 1))}

    def _rows_of(self, number: int) -> Tuple[_Rows, _Rows]:
        """Returns this process's rows of a step: those that the policy answers, and the others."""
        rows = [prompt for prompt in self.prompts_of(number) for _ in range(self.settings.num_generations)]
        is_own = np.random.default_rng([self.seed, number, _OWN]).random(len(rows)) < self.settings.gkd.lmbda
        here = self.processes.own(np.arange(len(rows)))
        own, others = here[is_own[here]], here[~is_own[here]]
        before = is_own[: here[0]]
        return (
            _Rows([rows[index] for index in own], int(before.sum())),
            _Rows([rows[index] for index in others], int((~before).sum())),
        )


def policy_of(
    name: str, settings: RlSettings, seed: int, kinds: Tuple[Type[Policy], Type[GkdPolicy]] = (Policy, GkdPolicy)
) -> Policy:
    """Returns the policy that learns what its settings ask for.

    ``kinds`` are the classes of a policy without gkd and of one with it; the other arguments are those of Policy.
    """
    without, with_gkd = kinds
    return (without if settings.gkd is None else with_gkd)(name, settings, seed)
