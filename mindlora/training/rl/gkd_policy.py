"""Generalized knowledge distillation: a policy that learns its teacher's complete distribution."""

from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
from mindspore import nn

from mindlora.training.rl.divergence import RowDivergences, row_divergences
from mindlora.training.rl.policy import Experience, Policy, best_and_worst
from mindlora.training.rl.policy_loss import answer_measures, counted
from mindlora.training.rl.prompts import Prompt
from mindlora.training.rl.rollouts import TEACHER, Answers, Question, Rollouts, joined

# Distinguishes this draw from others with the seed and a step's number.
_OWN, _TEACHER = 1, 2


class GkdPolicy(Policy):
    """The policy of a run with ``rl.gkd``.

    A share ``lmbda`` of a step's rows has the policy's answers; the others have the data's completions, or with
    ``seq_kd`` the teacher's answers. The loss is the mean, over the tokens of these answers, of the divergence D_beta
    of the policy from the teacher (see HeadDivergences). The policy's gradient is taken only through the distributions,
    not through the sampling (Agarwal et al., 2024).
    """

    compares = False
    # Measures of the answers that the policy sampled in the last step.
    sampled: Dict[str, float] = {}

    def of_rows(self, network: nn.Cell) -> RowDivergences:
        """Returns the cell that computes the divergences of rows' tokens."""
        return row_divergences(network, self.settings)

    def questions(self, number: int) -> List[Question]:
        """Returns the questions of a step for the policy and for the teacher."""
        own, others = self._rows_of(number)
        questions = []
        if own:
            questions.append(Question(self.adapter, self.settings, own, (self.seed, number), 1))
        if others and self.settings.gkd.seq_kd:
            teacher = TEACHER if self.settings.teacher_adapter else None
            questions.append(Question(teacher, self.settings, others, (self.seed, number, _TEACHER), 1))
        return questions

    def answers(self, number: int, answered: Sequence[Answers], rollouts: Rollouts) -> Answers:
        """Returns the rows of a step, with answers of the policy, the teacher or the data."""
        own, others = self._rows_of(number)
        parts = list(answered)
        self.sampled = answer_measures(parts[0].mask, parts[0].truncated) if own else {}
        if others and not self.settings.gkd.seq_kd:
            parts.append(rollouts.completions(others, self.settings))
        return joined(parts)

    def rate(self, answers: Answers, reference: Optional[np.ndarray], rollouts: Rollouts) -> None:
        """Makes an experience from a step's rows."""
        counts = counted(answers.mask, answers.truncated, self.settings)
        self.experience = Experience(answers, np.zeros(len(answers.tokens)), counts, None, self.sampled)

    def coefficients(self, log_probabilities: Optional[np.ndarray]) -> np.ndarray:
        """Returns the weight of each token's divergence."""
        counts = self.experience.counted
        self.tokens = float(counts.sum())
        return counts / max(counts.sum(), 1)

    def differentiated(self, given: np.ndarray) -> None:
        """Takes the divergences of the tokens, float64 [rows, N]."""
        answers, counts = self.experience.answers, self.experience.counted
        self.samples = best_and_worst(answers, -(given * counts).sum(1), False)
        self.loss = float((given * counts).sum() / max(counts.sum(), 1))
        self.measures = {**self.experience.measures, "teacher/divergence": self.loss}

    def held_out_measures(
        self, answers: Answers, rollouts: Rollouts, differentiate: Callable[[Answers, np.ndarray], np.ndarray]
    ) -> Dict[str, float]:
        """Returns the divergence from the teacher on answers to held-out prompts."""
        counts = counted(answers.mask, answers.truncated, self.settings)
        # The existing graph computes a gradient of zeros, to which the next step does not add.
        divergences = differentiate(answers, np.zeros(counts.shape))
        return {"held_out_teacher/divergence": float((divergences * counts).sum() / max(counts.sum(), 1))}

    def _rows_of(self, number: int) -> Tuple[List[Prompt], List[Prompt]]:
        """Returns the prompts of a step's rows: those that the policy answers, and the others."""
        rows = [prompt for prompt in self.prompts_of(number) for _ in range(self.settings.num_generations)]
        is_own = np.random.default_rng([self.seed, number, _OWN]).random(len(rows)) < self.settings.gkd.lmbda
        first = [row for row, holds in zip(rows, is_own) if holds]
        return first, [row for row, holds in zip(rows, is_own) if not holds]
