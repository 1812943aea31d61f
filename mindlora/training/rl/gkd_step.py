"""The train step of generalized knowledge distillation: the policy learns the whole distribution of its teacher."""

from typing import Dict, List, Sequence, Tuple

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import nn

from mindlora.training.rl.divergence import RowDivergences, row_divergences
from mindlora.training.rl.policy_loss import answer_measures, counted
from mindlora.training.rl.prompts import Prompt, prompts_of_step
from mindlora.training.rl.rollouts import Answers, joined
from mindlora.training.rl.step import Experience, RlTrainOneStepCell, best_and_worst

# In the place of what else is drawn with the seed and the number of a step.
_OWN, _TEACHER = 1, 2


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class GkdTrainOneStepCell(RlTrainOneStepCell):
    """RlTrainOneStepCell for a run with ``rl.gkd``.

    A share ``lmbda`` of the rows of a step has answers of the policy, and the others have the completions of the data,
    or with ``seq_kd`` answers of the teacher. The loss is the mean, over the tokens of these answers, of the divergence
    D_beta of the policy from the teacher (see HeadDivergences), of which the policy's gradient is taken through the
    distributions alone, not through what was sampled (Agarwal et al., 2024).

    Args, inputs, outputs: As for RlTrainOneStepCell.
    """

    def of_rows(self, network: nn.Cell) -> RowDivergences:
        """Returns the divergences of the tokens of rows."""
        return row_divergences(network, self.settings)

    def new_experience(self, number: int) -> Experience:
        """Returns rows of the prompts of a step, answered by the policy, by the teacher or by the data."""
        self.open()
        settings, seed = self.settings, self.sampler["seed"]
        chosen = prompts_of_step(len(self.prompts), number, settings.prompts_per_step, seed)
        rows = [self.prompts[index] for index in chosen for _ in range(settings.num_generations)]
        is_own = np.random.default_rng([seed, number, _OWN]).random(len(rows)) < settings.gkd.lmbda
        own, others = _split(rows, is_own)
        parts, measures = [], {}
        if own:
            sampled = self.rollouts.answers(own, (seed, number), generations=1)
            measures = answer_measures(sampled.mask, sampled.truncated)
            parts.append(sampled)
        if others and settings.gkd.seq_kd:
            parts.append(self.rollouts.answers(others, (seed, number, _TEACHER), generations=1, by_teacher=True))
        elif others:
            parts.append(self.rollouts.completions(others))
        answers = joined(parts)
        counts = counted(answers.mask, answers.truncated, settings)
        return Experience(answers, np.zeros(len(answers.tokens)), counts, None, measures)

    def add_gradients(self, experience: Experience) -> Tuple[float, Dict[str, float]]:
        """Adds up the gradients of the mean divergence; returns it, and what is reported of it."""
        counts = experience.counted
        weights = counts / max(counts.sum(), 1)
        divergences = self.differentiate(experience.answers, weights)
        self.samples = best_and_worst(experience.answers, -(divergences * counts).sum(1), False)
        loss = float((divergences * weights).sum())
        return loss, {"teacher/divergence": loss}

    def teacher_measures(self, answers: Answers) -> Dict[str, float]:
        """Returns how far answers to held-out prompts are from the teacher."""
        counts = counted(answers.mask, answers.truncated, self.settings)
        # The graph that is there makes a gradient of zeros, with which the next step does not go on.
        divergences = self.differentiate(answers, np.zeros(counts.shape))
        return {"held_out_teacher/divergence": float((divergences * counts).sum() / max(counts.sum(), 1))}


def _split(rows: Sequence[Prompt], is_first: np.ndarray) -> Tuple[List[Prompt], List[Prompt]]:
    first = [row for row, holds in zip(rows, is_first) if holds]
    return first, [row for row, holds in zip(rows, is_first) if not holds]
