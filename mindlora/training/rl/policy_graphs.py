"""The graphs of a run that learns from rewards, for all its policies at once and any number of batches."""

import contextlib
import itertools
from typing import Callable, Dict, Mapping, Optional, Tuple

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.core.errors import ConfigError
from mindlora.core.fields import ignore_token_id
from mindlora.training.log import logger
from mindlora.training.model.network import base_of
from mindlora.training.preference.step import reference_of
from mindlora.training.rl.gradients import PolicyGradients, PolicyLogProbabilities
from mindlora.training.rl.packed_rows import PackedRows, empty_batch, pack_rows, single_rows
from mindlora.training.rl.rollouts import Answers
from mindlora.training.step.packing import install_positions

# Lets a graph run while an engine has requests.
Turn = Callable[[], contextlib.AbstractContextManager]


class PolicyGraphs(nn.Cell):
    """The gradients and log-probabilities of answers under K policies of one network: K adapters, or one.

    A batch has ``rows`` rows of each policy, the first policy's first; rows of a policy without answers are empty.

    Args:
        network (Cell): The training network. Its model's loss is replaced in place.
        weights (sequence of Parameter): The trainable parameters.
        policies (int): K.
        rows (int): Number of a policy's rows of seq_length tokens at a time; each holds several answers.
        of_rows (callable): Takes the network, and returns a cell whose outputs the losses take: for tokens and labels
            of rows, a number for each label except the first.
        with_reference (bool): Whether there are log-probabilities under the reference.

    Attributes:
        gradients (ParameterTuple): As in PolicyGradients.
    """

    def __init__(
        self,
        network: nn.Cell,
        weights: Tuple[Parameter, ...],
        policies: int,
        rows: int,
        of_rows: Callable[[nn.Cell], nn.Cell],
        with_reference: bool,
    ):
        super().__init__(auto_prefix=False)
        self.policies = policies
        self.rows = rows
        model = base_of(network)
        self.ignored, self.length = ignore_token_id(model.config), model.config.seq_length
        self.row_positions: Optional[Parameter] = None
        try:
            self.row_positions = self._install_positions(model, policies * rows)
        except ConfigError as refusal:
            logger.info("rl: each answer takes a row of its own. %s", refusal)
        self._make_cells(of_rows(network), weights, with_reference)

    def _install_positions(self, model: nn.Cell, rows: int) -> Parameter:
        """Makes a model keep the answers of a row apart; as install_positions."""
        return install_positions(model, rows)

    def _make_cells(self, policy: nn.Cell, weights: Tuple[Parameter, ...], with_reference: bool) -> None:
        """Makes what computes gradients, log-probabilities, and those under the reference, of what of_rows returned."""
        reference = PolicyLogProbabilities(reference_of(policy), is_reference=True) if with_reference else None
        self.policy_gradients = PolicyGradients(policy, weights)
        self.log_probabilities = PolicyLogProbabilities(policy)
        self.reference = reference
        if self.row_positions is not None:
            for cell in filter(None, (self.policy_gradients, self.log_probabilities, reference)):
                # A graph that was compiled before, in another process, has only the parameters of its own cell.
                cell.row_positions = self.row_positions

    @property
    def gradients(self) -> ParameterTuple:
        """The accumulated gradients."""
        return self.policy_gradients.gradients

    def differentiate(
        self, answers: Mapping[int, Answers], coefficients: Mapping[int, np.ndarray], turn: Turn
    ) -> Dict[int, np.ndarray]:
        """Adds up the gradient of the sum of coefficients times the outputs of of_rows.

        Args:
            answers (mapping): Number of a policy -> its answers; the gradient of other policies is zero.
            coefficients (mapping): Number -> [answers, N].
            turn (callable): Returns the context in which a graph runs.

        Returns:
            dict, number -> the outputs of of_rows, float64 [answers, N].
        """
        goes_on = itertools.chain([0.0], itertools.repeat(1.0))
        return self._computed(
            answers,
            coefficients,
            lambda *batch: self.policy_gradients(*batch, Tensor(next(goes_on), mstype.float32)),
            turn,
        )

    def forward(self, answers: Mapping[int, Answers], turn: Turn, by_reference: bool = False) -> Dict[int, np.ndarray]:
        """Returns the log-probabilities of answers' tokens, by policy number: float64 [answers, N]."""
        cell = self.reference if by_reference else self.log_probabilities
        nothing = {number: np.zeros(each.mask.shape) for number, each in answers.items()}
        return self._computed(answers, nothing, lambda tokens, labels, _: cell(tokens, labels), turn)

    def _computed(
        self,
        answers: Mapping[int, Answers],
        coefficients: Mapping[int, np.ndarray],
        graph: Callable[[Tensor, Tensor, Tensor], Tensor],
        turn: Turn,
    ) -> Dict[int, np.ndarray]:
        """Returns a graph's outputs for the tokens, labels and coefficients of answers, by policy number."""
        packed = {number: self._packed(each) for number, each in answers.items()}
        batches = {
            number: packed[number].batches(each.tokens, each.labels, coefficients[number], self.rows, self.ignored)
            for number, each in answers.items()
        }
        empty = empty_batch(self.rows, self.length, self.ignored)
        of_policies = [batches.get(number, iter(())) for number in range(self.policies)]
        found = []
        for parts in itertools.zip_longest(*of_policies, fillvalue=empty):
            positions, *batch = map(np.concatenate, zip(*parts))
            if self.row_positions is not None:
                self.row_positions.set_data(Tensor(positions))
            with turn():
                result = graph(*map(Tensor, batch)).asnumpy()
            found.append(result.reshape(self.policies, self.rows, -1))
        rows = np.concatenate(found, 1)
        return {number: each.unpack(rows[number]) for number, each in packed.items()}

    def _packed(self, answers: Answers) -> PackedRows:
        """Returns the place of each prompt with its answer in the rows that the graphs take."""
        # The last token of an answer is only predicted.
        lengths = np.where(answers.mask, np.arange(1, answers.mask.shape[1] + 1), 0).max(1)
        pack = single_rows if self.row_positions is None else pack_rows
        return pack(lengths, answers.mask.shape[1])
