"""Generalized knowledge distillation: a policy that learns its teacher's distribution, and the teacher's network."""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.errors import AdapterError, ConfigError
from mindlora.files.adapters import files
from mindlora.files.adapters.dialects.peft_config import Extras
from mindlora.models.label_losses import IN_GRAPH_MODE
from mindlora.models.names import TRANSIENT
from mindlora.network.cells.cell import LoRACell, ReplacingCell
from mindlora.network.cells.divergences import HeadDivergences
from mindlora.network.cells.low_rank import TrainedRead
from mindlora.network.cells.routed_experts import StackedRoutedExperts
from mindlora.network.repeated_layers import compile_layers_once, mark_reference
from mindlora.network.save_load import load_lora
from mindlora.network.tree import copy_cells, lora_cells, replace_children
from mindlora.training.model.held_weights import hold_weights, release_weights
from mindlora.training.model.log_probabilities import RowLogProbabilities, row_head_inputs
from mindlora.training.model.loss_in_pieces import (
    LossesOfHead,
    hand_on_undivided,
    losses_of_head,
    output_head,
    plain_logits,
)
from mindlora.training.model.network import innermost, with_loss
from mindlora.training.model.pet import MindloraModel
from mindlora.training.rl.policy import Experience, Policy, best_and_worst
from mindlora.training.rl.policy_loss import answer_measures, counted
from mindlora.training.rl.prompts import Prompt
from mindlora.training.rl.rollouts import TEACHER, Answers, Question, Rollouts, joined
from mindlora.training.rl.settings import RlSettings


class RowDivergences(nn.Cell):
    """The divergence at each token that precedes a label; in training, like RowLogProbabilities.

    The rows are equal parts, each with its own divergence: one part for each adapter, or one for all rows.

    Args:
        policy, teacher (RowLogProbabilities): The inputs of both heads, from row_head_inputs.
        head (LossesOfHead): The policy's head; the teacher's has the same weight.
        teacher_b (Parameter or None): B of the adapter on the teacher's head.
        betas (sequence of float): As for HeadDivergences, of each part, in the order of the rows.

    Inputs:
        - **input_ids**, **labels** (Tensor) - int32 [rows, N + 1].

    Outputs:
        float32 [rows * N], in nats; 0 for labels that do not count.
    """

    def __init__(
        self,
        policy: RowLogProbabilities,
        teacher: RowLogProbabilities,
        head: LossesOfHead,
        teacher_b: Optional[Parameter],
        betas: Sequence[float],
    ):
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.teacher = teacher
        losses = head.losses
        frozen = losses.head if losses.holds else None
        self.divergences = nn.CellList(
            [HeadDivergences(losses.dtype, beta, head.b is not None, losses.piece, frozen) for beta in betas]
        )
        self.trained = TrainedRead(losses.dtype)
        self.channels = head.weight.shape[1]
        # Replaces an adapter's product if a head has no adapter.
        self.nothing = Tensor(np.zeros((head.weight.shape[0], 1)), mstype.float32)
        # Bypasses nn.Cell, which would register and name the parameters a second time.
        self.__dict__.update(weight=head.weight, b=head.b, teacher_b=teacher_b)

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        policy = self.policy(input_ids, labels)
        teacher = ops.stop_gradient(self.teacher(input_ids, labels))
        labels = labels[:, 1:].reshape((-1,))
        size = labels.shape[0] // len(self.divergences)
        parts = ()
        for number, compute in enumerate(self.divergences):
            begin, end = number * size, (number + 1) * size
            rows, taught = policy[begin:end], teacher[begin:end]
            if number > 0:
                # One part at a time, or the logits of pieces of several parts would be in memory.
                rows, taught = ops.depend(rows, parts[-1]), ops.depend(taught, parts[-1])
            parts += (self._of_part(compute, rows, taught, labels[begin:end]),)
        return ops.concat(parts, 0)

    def _of_part(self, compute, policy, teacher, labels):
        """Returns the divergences of one part, from the inputs of both heads."""
        low_rank, teacher_low_rank = ops.zeros_like(policy[:, :1]), ops.zeros_like(teacher[:, :1])
        b = teacher_b = self.nothing
        if self.b is not None:
            low_rank, b = policy[:, self.channels :], self.trained.of(self.b)
        if self.teacher_b is not None:
            teacher_low_rank, teacher_b = teacher[:, self.channels :], self.teacher_b
        student = (policy[:, : self.channels], low_rank, self.weight, b)
        taught = (teacher[:, : self.channels], teacher_low_rank, teacher_b)
        return compute(*student, *taught, labels)


def row_divergences(network: nn.Cell, settings: Sequence[RlSettings]) -> RowDivergences:
    """Returns the divergence of a MindFormers model from rl's teacher. The model's loss is replaced in place.

    Args:
        network (nn.Cell): The model, or a cell around it, with one adapter or several.
        settings (sequence of RlSettings): The settings of each adapter, which have one teacher and one temperature.

    Raises:
        ConfigError: The model makes the logits of all tokens at once.
        AdapterError: The teacher is an adapter that cannot be used.
    """
    head = head_in_pieces(network, IN_GRAPH_MODE)
    teacher = teacher_network(network, settings[0].teacher_adapter)
    # Before the loss is replaced, by which the model is found.
    teacher_b = b_of_head(with_loss(teacher))
    temperature = settings[0].temperature
    both = row_head_inputs(network, temperature), row_head_inputs(teacher, temperature)
    return RowDivergences(*both, head, teacher_b, betas_of(settings))


def head_in_pieces(network: nn.Cell, key: str) -> LossesOfHead:
    """Returns the LossesOfHead of a network.

    Raises ConfigError if there are none, as the logits of all tokens are made at once. ``key`` is the YAML's key of
    loss_in_pieces.
    """
    head = losses_of_head(network)
    if head is None:
        raise ConfigError(
            "rl.gkd compares the whole vocabulary for some tokens at a time, and the logits of all tokens are made at "
            f"once: see the log for the reason. Leave {key} as it is, with plain LoRA or none on the output head (none "
            "in a run with several adapters); or remove gkd."
        )
    return head


def b_of_head(model: nn.Cell) -> Optional[Parameter]:
    """Returns B of the adapter on a teacher's output head, or None if it has none."""
    head = output_head(model)
    return head.mindpet_delta_lora_b if isinstance(head, LoRACell) else None


def betas_of(settings: Sequence[RlSettings]) -> Sequence[float]:
    """Returns ``betas`` of RowDivergences: one for each adapter, or one for all of them if they do not differ."""
    betas = [each.gkd.beta for each in settings]
    return betas[:1] if len(set(betas)) == 1 else betas


def teacher_network(network: nn.Cell, path: Optional[str]) -> nn.Cell:
    """Returns a network without adapters on the base's parameters of a network in training.

    Args:
        network (nn.Cell): A network with one adapter or several that has gone through put_loss_in_pieces.
        path (str): The adapter to put on instead. Default: None, none. Its base is not compared, since the base's
            values are loaded later.

    Raises:
        AdapterError: The adapter does not match the network, or has more than adapters of linear cells.
    """
    teacher = without_adapters(network)
    wrapper = innermost(teacher, lambda cell: isinstance(cell, MindloraModel))
    with plain_logits(with_loss(teacher), hand_on_undivided):
        release_weights(teacher)
        put_teacher(wrapper.network, path)
        hold_weights(teacher, wrapper.config.pet_config.product_dtype)
    compile_layers_once(teacher)
    mark_reference(teacher)
    teacher.set_train(network.training)
    return teacher


def without_adapters(network: nn.Cell) -> nn.Cell:
    """Returns a copy of a network's cells on the same base, without its adapters."""
    copied_network, copies = copy_cells(network)
    replacements: Dict[int, nn.Cell] = {}
    for _, cell in network.cells_and_names():
        if isinstance(cell, (ReplacingCell, StackedRoutedExperts)):
            copied = copies[id(cell)]
            replacements[id(copied)] = copied.plain_cell()
    replace_children(copied_network, replacements)
    return copied_network


def put_teacher(network: nn.Cell, path: Optional[str]) -> None:
    """Puts the teacher's adapter, if it has one, on a network of without_adapters; it does not train.

    Raises AdapterError as teacher_network does.
    """
    if path is None:
        return
    _check_teacher(path)
    load_lora(network, path, on_base_mismatch="ignore")
    for _, cell in lora_cells(network):
        _freeze(cell)


def _check_teacher(path: str) -> None:
    """Raises AdapterError if an adapter has parts that cannot be put on the base in training."""
    adapter = files.read(path, extras=Extras(token_rows=True, invocation_tokens=True))
    for has, what in (
        (adapter.saved_modules or adapter.token_rows, "modules of its own (modules_to_save)"),
        (adapter.invocation_tokens, "invocation tokens (aLoRA)"),
    ):
        if has:
            raise AdapterError(
                f"rl.teacher: {path} has {what}, and rl.gkd computes with adapters of linear cells alone on the base "
                "in training. Name another adapter, or remove gkd."
            )


def _freeze(cell: LoRACell) -> None:
    for parameter in cell.lora_parameters():
        parameter.requires_grad = False
        parameter.name = f"{TRANSIENT}teacher.{parameter.name}"


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
