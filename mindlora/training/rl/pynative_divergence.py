"""The divergence of a policy from a teacher under MindFormers' PyNative Trainer, and the teacher's network."""

from typing import Callable, Optional, Sequence

from mindspore import Tensor, nn
from mindspore.graph.api import _no_grad

from mindlora.models.label_losses import IN_PYNATIVE
from mindlora.network.pynative.linear import local
from mindlora.training.model.loss_in_pieces import plain_logits
from mindlora.training.preference.pynative import RowLogProbabilities
from mindlora.training.pynative.evaluation import EvaluatedModel
from mindlora.training.pynative.loss_in_pieces import hand_on, of_counted
from mindlora.training.rl.divergence import (
    RowDivergences,
    b_of_head,
    betas_of,
    head_in_pieces,
    put_teacher,
    without_adapters,
)
from mindlora.training.rl.gkd_policy import GkdPolicy
from mindlora.training.rl.settings import RlSettings


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
