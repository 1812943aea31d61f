"""Gradients computed apart from the optimizer: of any loss of log-probabilities, over any number of batches."""

from typing import Any, Tuple

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.models.names import TRANSIENT
from mindlora.network.graph_cache import CompiledOnce
from mindlora.training.model.log_probabilities import RowLogProbabilities
from mindlora.training.model.loss_in_pieces import set_differentiates
from mindlora.training.step.token_gradients import TokenGradients


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
