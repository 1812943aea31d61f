"""The graphs of a run that learns from rewards, for all its policies at once and any number of batches."""

import contextlib
import dataclasses
import itertools
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.errors import ConfigError
from mindlora.core.fields import ignore_token_id
from mindlora.models.names import TRANSIENT
from mindlora.network.graph_cache import CompiledOnce
from mindlora.training.log import logger
from mindlora.training.model.log_probabilities import RowLogProbabilities
from mindlora.training.model.loss_in_pieces import set_differentiates
from mindlora.training.model.network import base_of
from mindlora.training.preference.loss import reference_of
from mindlora.training.rl.rollouts import Answers
from mindlora.training.step.packing import install_positions
from mindlora.training.step.token_gradients import TokenGradients

# Packing sequences, each a prompt and an answer, into rows of one length


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Sequences in rows of N tokens: sequence i occupies begins[i] to begins[i] + lengths[i] in row rows[i].

    Attributes:
        rows, begins, lengths (array): int64 [sequences].
        length (int): N.
    """

    rows: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray
    length: int

    @property
    def count(self) -> int:
        """The number of rows."""
        return int(self.rows.max()) + 1

    def batches(
        self, tokens: np.ndarray, labels: np.ndarray, coefficients: np.ndarray, size: int, ignored: int
    ) -> Iterator[Tuple[np.ndarray, ...]]:
        """Yields positions, int32 [size, N], and tokens, labels and coefficients of ``size`` rows at a time.

        Empty rows, without labels, fill up the last batch, so that one graph serves all batches.

        Args:
            tokens, labels (array): int32 [sequences, N + 1]; position i of a row predicts label i + 1.
            coefficients (array): [sequences, N], of the labels except the first.
            size (int): Rows of a batch.
            ignored (int): The label that does not count.
        """
        count = -(-self.count // size) * size
        # Places without a label that no sequence sees may hold any token.
        packed_tokens = np.pad(self._packed(tokens[:, :-1], count, 0), ((0, 0), (0, 1)))
        packed_labels = np.pad(self._packed(labels[:, 1:], count, ignored), ((0, 0), (1, 0)), constant_values=ignored)
        packed_coefficients = self._packed(coefficients.astype(np.float32), count, 0)
        positions = self.positions(count)
        for begin in range(0, count, size):
            batch = slice(begin, begin + size)
            yield positions[batch], packed_tokens[batch], packed_labels[batch], packed_coefficients[batch]

    def _packed(self, values: np.ndarray, count: int, fill: int) -> np.ndarray:
        """Returns values [sequences, N] in ``count`` rows, [count, N], with ``fill`` outside the sequences."""
        packed = np.full((count, self.length), fill, values.dtype)
        for sequence, (row, begin, length) in enumerate(zip(self.rows, self.begins, self.lengths)):
            packed[row, begin : begin + length] = values[sequence, :length]
        return packed

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """Returns each sequence's part of packed values, [count, N], as float64 [sequences, N]; 0 elsewhere."""
        values = np.zeros((len(self.rows), self.length))
        for sequence, (row, begin, length) in enumerate(zip(self.rows, self.begins, self.lengths)):
            values[sequence, :length] = packed[row, begin : begin + length]
        return values

    def positions(self, count: int) -> np.ndarray:
        """Returns each token's position in its sequence, int32 [count, N]; the rest of a row is one more sequence."""
        places = np.arange(self.length, dtype=np.int32)
        starts = np.zeros((count, self.length), np.int32)
        # Where a sequence ends, the next one or the rest begins.
        for marks in (self.begins, self.begins + self.lengths):
            inside = marks < self.length
            starts[self.rows[inside], marks[inside]] = marks[inside]
        return places - np.maximum.accumulate(starts, axis=1)


def empty_batch(size: int, length: int, ignored: int) -> Tuple[np.ndarray, ...]:
    """Returns the batch that ``batches`` would yield for ``size`` empty rows of ``length`` tokens."""
    positions = np.tile(np.arange(length, dtype=np.int32), (size, 1))
    labels = np.full((size, length + 1), ignored, np.int32)
    return positions, np.zeros_like(labels), labels, np.zeros((size, length), np.float32)


def pack_rows(lengths: np.ndarray, length: int) -> PackedRows:
    """Packs sequences by first-fit decreasing (Johnson, 1973): the longest first, each into the first row with room.

    Args:
        lengths (array): int64 [sequences], at most ``length`` each.
        length (int): Tokens of a row.
    """
    rows, begins = np.zeros_like(lengths), np.zeros_like(lengths)
    filled: List[int] = []
    for sequence in np.argsort(-lengths, kind="stable"):
        needed = int(lengths[sequence])
        row = next((row for row, taken in enumerate(filled) if taken + needed <= length), len(filled))
        if row == len(filled):
            filled.append(0)
        rows[sequence], begins[sequence] = row, filled[row]
        filled[row] += needed
    return PackedRows(rows, begins, lengths, length)


def single_rows(lengths: np.ndarray, length: int) -> PackedRows:
    """Puts each sequence into its own row; the arguments are those of pack_rows."""
    return PackedRows(np.arange(len(lengths)), np.zeros_like(lengths), lengths, length)


# Gradients apart from the optimizer: of any loss of log-probabilities, over any number of batches


class WeightedLogProbabilities(nn.Cell):
    """sum_it c_it log p_it over the labels of rows, along with the log-probabilities, in the form for TokenGradients.

    Inputs:
        - **input_ids**, **labels** (Tensor) - As for RowLogProbabilities, [rows, N + 1].
        - **coefficients** (Tensor) - float32 [rows, N]: c.

    Outputs:
        Tuple of the sum, float32 [], and the log-probabilities, float32 [rows * N].
    """

    def __init__(self, log_probabilities: RowLogProbabilities):
        super().__init__(auto_prefix=False)
        self.log_probabilities = log_probabilities

    def construct(self, input_ids: Tensor, labels: Tensor, coefficients: Tensor) -> Tuple[Tensor, Tensor]:
        log_probabilities = self.log_probabilities(input_ids, labels)
        return (log_probabilities * coefficients.reshape((-1,))).sum(), log_probabilities


class PolicyGradients(CompiledOnce):
    r"""Adds the gradient of a loss L of log-probabilities to earlier batches' gradients; returns log-probabilities.

    For any L, sum_it c_it log p_it with c_it = dL / dlog p_it held constant has the gradient of L, so that one graph
    serves all losses (Williams, 1992).

    Args:
        log_probabilities (RowLogProbabilities): The log-probabilities of the training network.
        weights (sequence of Parameter): The trainable parameters.

    Inputs:
        - **input_ids**, **labels** (Tensor) - int32 [rows, N + 1].
        - **coefficients** (Tensor) - float32 [rows, N]: c.
        - **goes_on** (Tensor) - float32 []: 1 to add to the previous call's gradients, 0 to begin anew.

    Outputs:
        float32 [rows, N], log p; 0 for labels that do not count.

    Attributes:
        gradients (ParameterTuple): float32, in the shapes of the weights.
    """

    def __init__(self, log_probabilities: RowLogProbabilities, weights: Tuple[Parameter, ...]):
        super().__init__(auto_prefix=False)
        self.token_gradients = TokenGradients(WeightedLogProbabilities(log_probabilities), weights)
        self.gradients = ParameterTuple(
            Parameter(
                np.zeros(weight.shape, np.float32), name=f"{TRANSIENT}gradient.{weight.name}", requires_grad=False
            )
            for weight in weights
        )
        self.one = Tensor(1, mstype.float32)

    def construct(self, input_ids: Tensor, labels: Tensor, coefficients: Tensor, goes_on: Tensor) -> Tensor:
        _, log_probabilities, gradients = self.token_gradients(self.one, input_ids, labels, coefficients)
        for index, gradient in enumerate(gradients):
            before = self.gradients[index]
            # Selected, not multiplied: the former values may not be finite.
            kept = ops.select(ops.broadcast_to(goes_on > 0, before.shape), before, ops.zeros_like(before))
            ops.assign(before, kept + gradient.astype(mstype.float32))
        return log_probabilities.reshape(coefficients.shape)


class PolicyLogProbabilities(CompiledOnce):
    """The log-probabilities of labels under a policy, without a gradient.

    Inputs:
        - **input_ids**, **labels** (Tensor) - int32 [rows, N + 1].

    Outputs:
        float32 [rows, N], log p; 0 for labels that do not count.

    Args:
        log_probabilities (RowLogProbabilities): The log-probabilities of the training network, or of its reference.
        is_reference (bool): Whether it belongs to a reference, which nothing differentiates. Default: False.
    """

    def __init__(self, log_probabilities: RowLogProbabilities, is_reference: bool = False):
        super().__init__(auto_prefix=False)
        self.log_probabilities = log_probabilities
        self.is_reference = is_reference
        self.was_compiled = False

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the graph; the head's cell, which computes its gradient in the forward, skips it."""
        # MindSpore calls this before every call of the cell.
        if self.was_compiled:
            super().compile(*args, **kwargs)
            return
        self.was_compiled = True
        set_differentiates(self.log_probabilities, False)
        try:
            super().compile(*args, **kwargs)
        finally:
            set_differentiates(self.log_probabilities, not self.is_reference)

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.log_probabilities(input_ids, labels).reshape((input_ids.shape[0], input_ids.shape[1] - 1))


class GivenGradients(nn.Cell):
    """Gradients that another graph has added up, in place of TokenGradients in a train step.

    Args:
        gradients (ParameterTuple): The gradients of the sum of the losses.

    Inputs:
        - **scale** (Tensor) - Factor of the gradients.
        - **total**, **count** (Tensor) - float32 [] each: the sum of the losses, and its divisor.

    Outputs:
        As in TokenGradients.
    """

    def __init__(self, gradients: ParameterTuple):
        super().__init__(auto_prefix=False)
        self.gradients = gradients

    def construct(self, scale: Tensor, total: Tensor, count: Tensor) -> Tuple[Tensor, Tensor, tuple]:
        scaled = ()
        for gradient in self.gradients:
            scaled += (gradient * scale,)
        return total, count.reshape((-1,)), scaled


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
