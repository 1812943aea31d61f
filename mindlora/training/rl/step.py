"""The train step of a run that learns from rewards: it answers prompts, rates the answers, and learns from them."""

import dataclasses
import functools
import time
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.core.errors import ConfigError, DivergenceError
from mindlora.core.fields import ignore_token_id
from mindlora.data.tokenizers import encode, load_tokenizer
from mindlora.run.yaml_run import YamlRun
from mindlora.training.log import logger
from mindlora.training.model.log_probabilities import row_log_probabilities
from mindlora.training.model.network import base_of
from mindlora.training.preference.step import reference_of
from mindlora.training.rl.gradients import GivenGradients, PolicyGradients, PolicyLogProbabilities
from mindlora.training.rl.packed_rows import PackedRows, pack_rows, single_rows
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
from mindlora.training.rl.prompts import prompts_of_run, prompts_of_step
from mindlora.training.rl.rewards import Rewards
from mindlora.training.rl.rollouts import Answers, Rollouts
from mindlora.training.rl.settings import rl_settings
from mindlora.training.rl.teacher import ServedTeacher
from mindlora.training.rl.tools import tools_of
from mindlora.training.run_configuration import run_configuration
from mindlora.training.step.packing import install_positions
from mindlora.training.step.train_step import LoraTrainOneStepCell, StepRecord

# In the place of a step's number, which is smaller.
_HELD_OUT = 2**32 - 1


@dataclasses.dataclass
class Experience:
    """The answers of a step and what is known of them, for num_iterations steps of the optimizer.

    Attributes:
        advantages (array): float64 [rows], or with a teacher [rows, N].
        counted (array): bool [rows, N], the tokens that the loss counts.
        reference (array or None): float64 [rows, N], their log-probabilities under the reference.
        old (array or None): float64 [rows, N], under the policy before the first step on them; None until then.
        measures (dict): What is reported of them.
    """

    answers: Answers
    advantages: np.ndarray
    counted: np.ndarray
    reference: Optional[np.ndarray]
    measures: Dict[str, float]
    old: Optional[np.ndarray] = None


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class RlTrainOneStepCell(LoraTrainOneStepCell):
    """LoraTrainOneStepCell for a run with ``rl``, which mindlora-run puts in its place.

    A call samples the answers to the prompts of a step, has them rated, adds up the gradient of the policy's loss over
    batches of rows, and takes the optimizer's step as LoraTrainOneStepCell does: clipping, limits, learning rate and
    record are its.

    Args:
        rl (dict): The fields of RlSettings.
        sampler (dict): ``tokenizer``, its path; ``seed``; ``rows``, how many of seq_length tokens, which hold several
            answers each, the gradient takes at a time; ``folder``, where relative paths begin. The
            model is that of the run's YAML.
        **kwargs: As for LoraTrainOneStepCell.

    Inputs:
        - **step** (Tensor) - int32 [1, 1]: the number of the step, from 0.

    Raises:
        ConfigError: An argument is out of range, or cannot hold in the parallel mode.
    """

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer, rl: Mapping, sampler: Mapping, **kwargs: Any):
        self.settings = rl_settings(rl)
        self.sampler = dict(sampler)
        super().__init__(network, optimizer, **kwargs)
        self.counts_tokens = False
        self.experience: Optional[Experience] = None
        self.measures: Dict[str, float] = {}
        self.tokens_of_step = 0.0
        self.rollouts: Optional[Rollouts] = None
        self.rewards: Optional[Rewards] = None
        self.tokenizer: Any = None

    def _gradients(self, network, micro_batches, counts):
        """Returns what gives the gradients to the train step: another graph has added them up."""
        try:
            self.row_positions = install_positions(base_of(network), self.sampler["rows"])
        except ConfigError as refusal:
            self.row_positions = None
            logger.info("rl: each answer takes a row of its own. %s", refusal)
        self.ignored = ignore_token_id(base_of(network).config)
        self.policy = self.of_rows(network)
        self.reference = None
        if self.settings.beta:
            self.reference = PolicyLogProbabilities(reference_of(self.policy), is_reference=True)
        self.policy_gradients = PolicyGradients(self.policy, self.weights)
        self.log_probabilities = PolicyLogProbabilities(self.policy)
        if self.row_positions is not None:
            for cell in filter(None, (self.policy_gradients, self.log_probabilities, self.reference)):
                # A graph that was compiled before, in another process, has the parameters of its own cell alone.
                cell.row_positions = self.row_positions
        return GivenGradients(self.policy_gradients.gradients)

    def of_rows(self, network: nn.Cell) -> nn.Cell:
        """Returns what the loss is of: for tokens and labels of rows, a number for each label but the first."""
        return row_log_probabilities(network, "rl", temperature=self.settings.temperature)

    def __call__(self, step: Tensor) -> Tuple:
        number = int(step.asnumpy().reshape(-1)[0])
        iteration = number % self.settings.num_iterations
        began = time.perf_counter()
        if iteration == 0 or self.experience is None:
            self.experience = self.new_experience(number // self.settings.num_iterations)
        sampled = time.perf_counter()
        tokens = float(self.experience.counted.sum())
        loss, measures = self.add_gradients(self.experience)
        with self.rollouts.engine.turns.turn():
            # The loss is one mean already; where no token counts, there is none, and the step is skipped.
            outputs = super().__call__(Tensor(loss, mstype.float32), Tensor(float(tokens > 0), mstype.float32))
        self.rollouts.publish()
        seconds = {"seconds_sampling": sampled - began, "seconds_training": time.perf_counter() - sampled}
        self.measures = {**self.experience.measures, **measures, **seconds}
        self.tokens_of_step = tokens
        return outputs

    def new_experience(self, number: int) -> Experience:
        """Returns the answers to the prompts of a step, rated.

        Raises DivergenceError if the sampler does not agree with the trainer, RewardError if a reward fails, and
        TeacherError if a served teacher does.
        """
        self.open()
        settings = self.settings
        chosen = prompts_of_step(len(self.prompts), number, settings.prompts_per_step, self.sampler["seed"])
        answers = self.rollouts.answers([self.prompts[index] for index in chosen], (self.sampler["seed"], number))
        counts = counted(answers.mask, answers.truncated, settings)
        reference, kl = None, None
        if self.reference is not None:
            reference = self.forward(self.reference, answers)
            kl = answer_kl(answers.log_probabilities, reference, counts)
        measures = {**answer_measures(answers.mask, answers.truncated), **answers.tool_measures()}
        values, rewards = np.zeros(len(answers.tokens)), None
        if self.rewards is not None:
            compared = advantages(self.rewards_of(answers), settings, kl)
            values, rewards = compared.values, compared.rewards
            measures = {**compared.measures, **measures}
        if settings.teacher is not None:
            teacher = self.rollouts.teacher_log_probabilities(answers)
            distilled = distillation(answers.log_probabilities, teacher, counts, settings)
            values = values[:, None] + distilled.values
            measures["teacher/kl"] = distilled.kl
        self.samples = best_and_worst(answers, values.sum(1) if rewards is None else rewards, rewards is not None)
        return Experience(answers, values, counts, reference, measures)

    def rewards_of(self, answers: Answers) -> np.ndarray:
        """Returns what the reward functions give to answers, float64 [rows, functions]."""
        return self.rewards.of([prompt.given for prompt in answers.prompts], answers.texts, answers.columns())

    def held_out_measures(self) -> Dict[str, float]:
        """Returns what is measured of one answer to each prompt that is held out; the same draws each time.

        That is ``held_out_reward``, their mean reward, and ``held_out_teacher/kl``, their divergence from the teacher.
        """
        answers = self.rollouts.answers(self.held_out, (self.sampler["seed"], _HELD_OUT), generations=1)
        measures = {}
        if self.rewards is not None:
            rewards = weighted_rewards(self.rewards_of(answers), self.settings)
            measures["held_out_reward"] = float(np.nanmean(rewards))
        if self.settings.teacher is not None:
            measures.update(self.teacher_measures(answers))
        return measures

    def teacher_measures(self, answers: Answers) -> Dict[str, float]:
        """Returns how far answers to held-out prompts are from the teacher."""
        counts = counted(answers.mask, answers.truncated, self.settings)
        teacher = self.rollouts.teacher_log_probabilities(answers)
        return {"held_out_teacher/kl": distillation(answers.log_probabilities, teacher, counts, self.settings).kl}

    def add_gradients(self, experience: Experience) -> Tuple[float, Dict[str, float]]:
        """Adds up the gradients of a step's loss; returns the loss, and what is reported of it."""
        answers = experience.answers
        is_first = experience.old is None
        policy = answers.log_probabilities
        if not is_first or self.reference is not None:
            policy = self.forward(self.log_probabilities, answers)
        loss = policy_loss(
            policy, experience.old, experience.reference, experience.advantages, experience.counted, self.settings
        )
        trained = self.differentiate(answers, loss.coefficients)
        if is_first:
            self.check_agreement(experience, trained)
            experience.old = trained
        return loss.loss, loss.measures

    def differentiate(self, answers: Answers, coefficients: np.ndarray) -> np.ndarray:
        """Adds up the gradient of the sum of coefficients times what of_rows gives; returns the latter, [rows, N]."""
        found = []
        packed = self.packed(answers)
        for number, batch in enumerate(self.batches(answers, coefficients, packed)):
            goes_on = Tensor(float(number > 0), mstype.float32)
            with self.rollouts.engine.turns.turn():
                found.append(self.policy_gradients(*batch, goes_on).asnumpy())
        return packed.unpack(np.concatenate(found))

    def forward(self, cell: PolicyLogProbabilities, answers: Answers) -> np.ndarray:
        """Returns the log-probabilities of the answers' tokens, float64 [rows, N]."""
        found = []
        packed = self.packed(answers)
        for tokens, labels, _ in self.batches(answers, np.zeros(answers.mask.shape), packed):
            with self.rollouts.engine.turns.turn():
                found.append(cell(tokens, labels).asnumpy())
        return packed.unpack(np.concatenate(found))

    def packed(self, answers: Answers) -> PackedRows:
        """Returns where each answer lies, behind its prompt, in the rows that the graphs take."""
        # The last token of an answer is one to predict alone.
        lengths = np.where(answers.mask, np.arange(1, answers.mask.shape[1] + 1), 0).max(1)
        pack = single_rows if self.row_positions is None else pack_rows
        return pack(lengths, answers.mask.shape[1])

    def batches(
        self, answers: Answers, coefficients: np.ndarray, packed: PackedRows
    ) -> Iterator[Tuple[Tensor, Tensor, Tensor]]:
        """Yields tokens, labels and coefficients of as many rows as a graph takes at a time; writes their positions."""
        size = self.sampler["rows"]
        rows = packed.batches(answers.tokens, answers.labels, coefficients, size, self.ignored)
        for positions, *batch in rows:
            if self.row_positions is not None:
                self.row_positions.set_data(Tensor(positions))
            yield tuple(map(Tensor, batch))

    def check_agreement(self, experience: Experience, trained: np.ndarray) -> None:
        """Measures how far the sampler's log-probabilities are from the trainer's, of the same weights and tokens.

        Raises DivergenceError if they differ by more than rl.max_disagreement.
        """
        answers = experience.answers
        found = agreement(trained, answers.log_probabilities, answers.mask)
        experience.measures.update({"agreement/max": found.max, "agreement/k1": found.k1, "agreement/k2": found.k2})
        if not found.holds(self.settings.max_disagreement):
            raise DivergenceError(
                f"Sampler and trainer differ by {found.max:.2g} nats on a token's log-probability, and "
                f"rl.max_disagreement is {self.settings.max_disagreement:g}: the policy would learn from answers that "
                "are not its own. Raise it if the network computes in 16 bits; else report this, with the YAML."
            )

    def open(self) -> None:
        """Makes sampler and rewards, which need the loaded weights, at the first step."""
        if self.rollouts is not None:
            return
        run = YamlRun(run_configuration())
        model = {"model_config": run.model} if run.is_mcore else run.config["model"]
        self.tokenizer = load_tokenizer(self.sampler["tokenizer"])
        seq_length = model["model_config"]["seq_length"]
        folder = self.sampler["folder"]
        tools = None
        if self.settings.reward_funcs:
            self.rewards = Rewards(self.settings, folder)
            tools = tools_of(self.rewards, self.tokenizer, self.settings)
        self.prompts, self.held_out = prompts_of_run(self.settings, self.tokenizer, seq_length, folder, tools)
        teacher = self.settings.teacher
        if isinstance(teacher, ServedTeacher) and not teacher.check_tokenizer(
            functools.partial(encode, self.tokenizer)
        ):
            logger.warning(
                "rl.teacher: %s has no /tokenize, so that nothing compares its tokenizer with the student's. Make sure "
                "that it is the same.",
                teacher.url,
            )
        self.rollouts = Rollouts(
            base_of(self.network),
            model,
            self.tokenizer,
            self.settings,
            max(len(prompt.tokens) for prompt in [*self.prompts, *self.held_out]),
            run.lora.product_dtype,
            tools,
        )
        logger.info(
            "rl: %d prompts; each step has %d answers to %d of them.",
            len(self.prompts),
            self.settings.rows,
            self.settings.prompts_per_step,
        )

    def close(self) -> None:
        """Ends the processes and threads of the sampler and the rewards."""
        if self.rollouts is not None:
            self.rollouts.close()
        if self.rewards is not None:
            self.rewards.close()

    def last_record(self) -> StepRecord:
        """Returns what the last step measured."""
        record = super().last_record()
        return record._replace(tokens=self.tokens_of_step, measures=self.measures, loss_falls=False)


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
