"""Learning from rewards under MindFormers' PyNative Trainer: the step, and what computes gradients without a graph."""

import contextlib
import functools
from typing import Any, Callable, Mapping, Optional, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.graph.api import _no_grad

from mindlora.core.errors import ConfigError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.models.label_losses import IN_PYNATIVE
from mindlora.network.pynative.linear import local
from mindlora.training.model.loss_in_pieces import plain_logits, set_differentiates
from mindlora.training.preference.pynative import RowLogProbabilities, adapters_off
from mindlora.training.pynative.evaluation import EvaluatedModel
from mindlora.training.pynative.loss_in_pieces import hand_on, of_counted
from mindlora.training.pynative.train_step import TrainStep
from mindlora.training.rl.callback import RlReport
from mindlora.training.rl.gkd import (
    GkdPolicy,
    RowDivergences,
    b_of_head,
    betas_of,
    head_in_pieces,
    policy_of,
    put_teacher,
    without_adapters,
)
from mindlora.training.rl.graph_mode import RlSteps, best_of, sampler_of
from mindlora.training.rl.policies import Policies
from mindlora.training.rl.policy import Policy
from mindlora.training.rl.policy_graphs import PolicyGraphs
from mindlora.training.rl.rules import as_in_graph_mode, check_prompts, settings_of
from mindlora.training.rl.settings import RlSettings
from mindlora.training.run_configuration import plain
from mindlora.training.step.packing import McorePositions, mask_positions

require_mindformers("2.0")
from mindformers.pynative.config.config import CallbackConfig  # noqa: E402


class PyNativeGradients(nn.Cell):
    """PolicyGradients that adds to the gradients of the parameters themselves.

    Args:
        log_probabilities (RowLogProbabilities): The training network's.
        weights (sequence of Parameter): The trainable parameters.

    Inputs and outputs are those of PolicyGradients.
    """

    def __init__(self, log_probabilities: RowLogProbabilities, weights: Tuple[Parameter, ...]):
        super().__init__(auto_prefix=False)
        self.log_probabilities = log_probabilities
        # Past nn.Cell, which would list the parameters, and name them, a second time.
        self.__dict__["weights"] = weights
        self.one = Tensor(1, ms.float32)

    def construct(self, input_ids: Tensor, labels: Tensor, coefficients: Tensor, goes_on: Tensor) -> Tensor:
        if not float(goes_on.asnumpy()):
            for weight in self.weights:
                weight.grad = None
        log_probabilities = self.log_probabilities(input_ids, labels)
        (log_probabilities * coefficients.reshape((-1,))).sum().backward(self.one)
        return log_probabilities.reshape(coefficients.shape)


class PyNativeLogProbabilities(nn.Cell):
    """PolicyLogProbabilities of a model that no graph is made of.

    Args:
        log_probabilities (RowLogProbabilities): The training network's.
        is_reference (bool): Whether the network's adapters are off. Default: False.

    Inputs and outputs are those of PolicyLogProbabilities.
    """

    def __init__(self, log_probabilities: RowLogProbabilities, is_reference: bool = False):
        super().__init__(auto_prefix=False)
        self.log_probabilities = log_probabilities
        self.is_reference = is_reference

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        model = self.log_probabilities.network.network
        set_differentiates(model, False)
        with _no_grad(), adapters_off(model) if self.is_reference else contextlib.nullcontext():
            log_probabilities = self.log_probabilities(input_ids, labels)
        set_differentiates(model, True)
        return log_probabilities.reshape((input_ids.shape[0], input_ids.shape[1] - 1))


class PyNativePolicyGraphs(PolicyGraphs):
    """PolicyGraphs of a model that no graph is made of; ``network`` is an EvaluatedModel."""

    def _install_positions(self, model: EvaluatedModel, rows: int) -> Parameter:
        gpt = model.gpt
        obstacles = {
            "use_attn_mask_compression": gpt.use_attn_mask_compression,
            "apply_rope_fusion": gpt.config.apply_rope_fusion,
        }
        settings = [key for key, value in obstacles.items() if value]
        if settings:
            raise ConfigError(
                f"Rows cannot hold several sequences: the model sets {', '.join(settings)}. Switch it off."
            )
        positions = mask_positions(gpt, rows, gpt.seq_length, gpt.pad_token_id)
        gpt.rotary_pos_emb = McorePositions(gpt.rotary_pos_emb, positions)
        return positions

    def _make_cells(self, policy: RowLogProbabilities, weights: Tuple[Parameter, ...], with_reference: bool) -> None:
        self.policy_gradients = PyNativeGradients(policy, weights)
        self.log_probabilities = PyNativeLogProbabilities(policy)
        self.reference = PyNativeLogProbabilities(policy, is_reference=True) if with_reference else None


class PyNativePolicy(Policy):
    """Policy of a PyNative model."""

    @staticmethod
    def of_rows(network: EvaluatedModel, settings: Sequence[RlSettings]) -> RowLogProbabilities:
        """Returns the input of the loss; in training, the model returns logits from then on."""
        network.gpt.return_logits = True
        return RowLogProbabilities(network, False, settings[0].temperature)


def pynative_policies(config: Mapping[str, Any]) -> Policies:
    """Returns the policies of a YAML with ``rl``: one for each adapter, or the only one.

    Raises ConfigError if a prompt cannot be used, or there are fewer than a step answers.
    """
    run = as_in_graph_mode(config)
    of_adapters = settings_of(run)
    sampler, prompts = sampler_of(run)
    sampler["configuration"] = run.config
    kinds = (PyNativePolicy, PyNativeGkdPolicy)
    policies = [policy_of(name, settings, sampler["seed"], kinds) for name, settings in of_adapters.items()]
    check_prompts(prompts, policies[0].settings)
    return Policies(policies, sampler)


def take_step(step: Any, trainer: Any) -> Tuple[Tensor, Any]:
    """Takes a step of the Trainer that learns from rewards; returns the loss, and the norm of the gradient.

    ``step`` is its TrainStep, with ``policies``; ``learned`` of it takes the loss of each policy, and its tokens that
    count, float64 [K] each.
    """

    def update(losses: np.ndarray, tokens: np.ndarray) -> Tuple[Tensor, Any]:
        step.learned(losses, tokens)
        return Tensor(losses[list(step.policies.learning)].mean(), ms.float32), trainer._optimizer_update()

    return step.policies.step(trainer.state.global_step, update)


class RlStep(TrainStep):
    """TrainStep of a run that learns from rewards.

    Args:
        model, optimizer, records_norms: As for TrainStep.
        config (mapping): The content of the run's YAML.

    Attributes:
        policies (Policies): The policy, which is number 0 of one.
    """

    # Which of the policies callbacks are told of.
    number = 0

    def __init__(self, model: nn.Cell, optimizer: nn.Optimizer, records_norms: bool, config: Mapping[str, Any]):
        super().__init__(model, optimizer, records_norms)
        self.policies = pynative_policies(config)
        self.policies.train(self.evaluated, tuple(optimizer.parameters), [model], graphs=PyNativePolicyGraphs)
        self.copy_gradients()

    def learned(self, losses: np.ndarray, tokens: np.ndarray) -> None:
        """Takes the loss of the step, and its tokens that count, float64 [1] each."""
        self.tokens = int(tokens[0])
        self.losses.append(Tensor(losses[0], ms.float32))

    def end(self, loss: float, norm: float, skipped: bool) -> None:
        """Records the step."""
        super().end(loss, norm, skipped)
        self.record = self.record._replace(measures=self.policies[0].measures, loss_falls=False)


# The divergence from a teacher, and the teacher's network


class RowHeadInputs(RowLogProbabilities):
    """The head's inputs where it predicts the labels, in training, as those of row_head_inputs."""

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.outputs(input_ids)


class TeacherHeadInputs(RowHeadInputs):
    """RowHeadInputs without a gradient."""

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        with _no_grad():
            return self.outputs(input_ids)


class PyNativeRowDivergences(RowDivergences):
    """RowDivergences of a model that no graph is made of, without tokens that have no label."""

    @property
    def weight(self) -> Tensor:
        """The head's weight, which hyper_parallel may hold."""
        return local(self.__dict__["weight"])

    def _of_part(self, compute: Callable[..., Tensor], policy: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        def of_rows(*rows: Tensor) -> Tensor:
            return super(PyNativeRowDivergences, self)._of_part(compute, *rows)

        return of_counted(of_rows, (policy, teacher), labels, self.weight.shape[0])


def pynative_row_divergences(network: EvaluatedModel, settings: Sequence[RlSettings]) -> PyNativeRowDivergences:
    """Returns the divergence of a PyNative model from rl's teacher; as row_divergences.

    In training, the model returns its head's inputs from then on.
    """
    head = head_in_pieces(network, IN_PYNATIVE)
    network.gpt.return_logits = True
    teacher = pynative_teacher(network, settings[0].teacher_adapter)
    temperature = settings[0].temperature
    inputs = RowHeadInputs(network, False, temperature), TeacherHeadInputs(teacher, False, temperature)
    return PyNativeRowDivergences(*inputs, head, b_of_head(teacher.gpt), betas_of(settings))


def pynative_teacher(network: EvaluatedModel, path: Optional[str]) -> EvaluatedModel:
    """Returns a network without adapters on the base of a PyNative model, or with the one at ``path``.

    Raises AdapterError as teacher_network does.
    """
    model = without_adapters(network.network)
    gpt = next(cell for _, cell in model.cells_and_names() if type(cell) is type(network.gpt))
    with plain_logits(gpt, hand_on), _no_grad():
        put_teacher(model, path)
    # In training, it returns the inputs of its head.
    model.set_train()
    return EvaluatedModel(model, gpt)


class PyNativeGkdPolicy(GkdPolicy):
    """GkdPolicy of a PyNative model."""

    @staticmethod
    def of_rows(network: EvaluatedModel, settings: Sequence[RlSettings]) -> nn.Cell:
        """Returns the cell that computes the divergences of rows' tokens."""
        return pynative_row_divergences(network, settings)


# What the YAML of a run becomes


def check_processes(settings: Any, processes: int) -> None:
    """Raises ConfigError if the YAML of a Trainer has ``rl`` and the run has several processes."""
    if getattr(settings, "rl", None) is not None and processes > 1:
        raise ConfigError(
            f"The YAML has rl, and a run learns from rewards in one process, but this one has {processes}. Start one."
        )


def prepare_pynative_rl(settings: Any) -> None:
    """Completes the configuration of a Trainer whose YAML has ``rl`` and no mistakes, in place."""
    if getattr(settings, "rl", None) is None:
        return
    # Adapters that learn side by side have the same metric.
    first = next(iter(settings_of(as_in_graph_mode(plain(settings.to_dict()))).values()))
    for callback in settings.callbacks:
        if callback.type == "LoraCheckpoint" and not hasattr(callback, "best_metric"):
            for name, value in best_of(first).items():
                setattr(callback, name, value)
    settings.callbacks = [*settings.callbacks, CallbackConfig.from_dict({"type": RlReport.__name__})]


def with_steps_of_rl(build_dataset: Callable, current_trainer: Callable) -> Callable:
    """Returns MindFormers' function that builds a dataset, which then has the numbers of steps if the YAML has ``rl``.

    ``current_trainer`` returns the Trainer that calls it.
    """

    @functools.wraps(build_dataset)
    def build(config: Any, *arguments: Any, **keywords: Any) -> Any:
        settings = current_trainer().config
        if getattr(settings, "rl", None) is None or config is not settings.train_dataset:
            return build_dataset(config, *arguments, **keywords)
        return RlSteps(config, settings.training.steps)

    return build
