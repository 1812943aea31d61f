"""AdaLoRA's part of a train step: keeps P and Q near orthogonal, rates the importance of triplets, and masks some.

All of it is computed in the step, from gradients that are the same on every rank, so that all ranks decide alike.
Values that change from step to step are parameters, so that nothing is recompiled.
"""

from typing import Dict, List, Mapping, Sequence, Tuple

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.rank_schedule import BudgetSchedule
from mindlora.core.text import listed
from mindlora.models.names import TRANSIENT
from mindlora.models.variants.adalora import ADALORA
from mindlora.network.tree import lora_cells
from mindlora.network.variants.adalora import AdaLoRADense

# Kinds of trainable parameters: of the base (modules_to_save), or a part of an AdaLoRADense.
_OTHER, _A, _B, _LAMBDA = range(4)


class RankBudget(nn.Cell):
    r"""Allocates the ranks of AdaLoRA's cells: masks the least important triplets after an optimizer's update.

    For each element w of P, Lambda and Q, with the gradient g that the optimizer got and the updated value w:

    .. math::
        I = |w g|, \quad \bar I \leftarrow \beta_1 \bar I + (1 - \beta_1) I, \quad
        \bar U \leftarrow \beta_2 \bar U + (1 - \beta_2) |I - \bar I|, \quad s(w) = \bar I \bar U

    A triplet's score is s(Lambda[i]) + mean(s(A[i])) + mean(s(B[:, i])). The triplets with the k smallest scores over
    all cells, k from BudgetSchedule, and any that tie with the largest of these, get a Lambda of zero. A masked triplet
    still gets a gradient and may come back, until the last allocation: from then on, importance no longer changes, and
    each step masks the same triplets. It must be called right after the optimizer, in the same branch of the graph:
    behind a branch, MindSpore may read weights from before the update.

    Args:
        network (nn.Cell): A network with AdaLoRADense cells.
        weights (sequence of Parameter): The parameters that the optimizer trains, in the order of its gradients.

    Raises:
        ConfigError: The network has no such cell, or does not train all parts of one.

    Source: Zhang et al., AdaLoRA: Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning, 2023, section 3;
    PEFT's RankAllocator.
    """

    def __init__(self, network: nn.Cell, weights: Sequence[Parameter]):
        super().__init__(auto_prefix=False)
        cells = {path: cell for path, cell in lora_cells(network) if isinstance(cell, AdaLoRADense)}
        if not cells:
            raise ConfigError(f"The network has no cell of AdaLoRA: set pet_config.{ADALORA.field}: True.")
        self.adapted = cells
        self.settings = next(iter(cells.values())).budget_settings
        self.weights = ParameterTuple(weights)
        self.triplets, self.kinds = _places(cells, weights)
        parts = [weights[place] for places in self.triplets for place in places]
        self.sensitivities = ParameterTuple([_zeros(part, "sensitivity") for part in parts])
        self.uncertainties = ParameterTuple([_zeros(part, "uncertainty") for part in parts])
        # Whether the step counts towards the importance, and how many triplets are masked after it; set before each
        # step.
        self.plan = Parameter(Tensor([0, 0], mstype.float32), name=f"{TRANSIENT}rank_plan", requires_grad=False)
        self.distance = Parameter(Tensor(0, mstype.float32), name=f"{TRANSIENT}orthogonality", requires_grad=False)
        self.matmul = ops.MatMul()
        self.none = Tensor(-1, mstype.float32)

    def schedule(self, total: int) -> BudgetSchedule:
        """Returns the budget of a run of ``total`` steps; raises ConfigError if it is too short for the settings."""
        return BudgetSchedule(self.settings, len(self.adapted), total)

    def set_plan(self, schedule: BudgetSchedule, step: int) -> None:
        """Sets what ``step``, the next step, masks."""
        ops.assign(self.plan, Tensor([schedule.learns(step), schedule.masked(step)], mstype.float32))

    def ranks(self) -> Dict[str, int]:
        """Returns the number of remaining triplets by cell path."""
        return {path: cell.rank_left for path, cell in self.adapted.items()}

    def orthogonality(self) -> float:
        """Returns the mean of |Q Q^T - I| and |P^T P - I| (Frobenius norms) over all cells, before the last step."""
        return float(self.distance.asnumpy())

    def regularized(self, gradients: Tuple[Tensor, ...]) -> Tuple[Tensor, ...]:
        r"""Adds the gradient of the orthogonality term, orth_reg_weight R, to the gradients of a mean loss.

        .. math::
            R = \frac{1}{2 n} \sum_{cells} (|Q Q^T - I| + |P^T P - I|), \quad
            \frac{\partial |Q Q^T - I|}{\partial Q} = \frac{2 (Q Q^T - I) Q}{|Q Q^T - I|}

        Args:
            gradients (tuple of Tensor): float32, one for each weight.

        Returns:
            tuple of Tensor, likewise.
        """
        regularized = ()
        total = self.none * 0
        count = 2 * len(self.triplets)
        for place in range(len(self.kinds)):
            gradient = gradients[place]
            if self.kinds[place] == _A or self.kinds[place] == _B:
                is_b = self.kinds[place] == _B
                weight = self.weights[place].astype(mstype.float32)
                rows = weight.T if is_b else weight
                difference = self.matmul(rows, rows.T) - ops.eye(rows.shape[0], rows.shape[0], mstype.float32)
                norm = ops.sqrt((difference * difference).sum())
                step = self.matmul(difference, rows) * (2 * self.settings.orth_reg_weight / count)
                step = step / ops.maximum(norm, 1e-30)
                gradient = gradient + (step.T if is_b else step)
                total = total + norm
            regularized += (gradient,)
        ops.assign(self.distance, total / count)
        return regularized

    def construct(self, gradients: Tuple[Tensor, ...]) -> Tensor:
        """Updates the importance after the optimizer's update, and masks triplets as the step's plan says.

        Args:
            gradients (tuple of Tensor): The gradients that the optimizer got, float32, one for each weight.

        Returns:
            Tensor, the largest score of a masked triplet, or -1 if none was masked: float32 [].
        """
        learns = self.plan[0] > 0
        scores = ()
        for cell in range(len(self.triplets)):
            a, b, weights = self.triplets[cell]
            score = self._element_scores(3 * cell + 2, gradients[weights], learns)
            score = score + self._element_scores(3 * cell, gradients[a], learns).mean(1)
            scores += (score + self._element_scores(3 * cell + 1, gradients[b], learns).mean(0),)
        masked = self.plan[1].astype(mstype.int32)
        ordered, _ = ops.sort(ops.concat(scores))
        highest = ops.gather(ordered, ops.maximum(masked - 1, 0), 0)
        highest = ops.select(masked > 0, highest, self.none)
        for cell in range(len(self.triplets)):
            weights = self.weights[self.triplets[cell][2]]
            ops.assign(weights, weights * (scores[cell] > highest).astype(weights.dtype))
        return highest

    def _element_scores(self, number, gradient, learns):
        """Updates the importance of one part's elements, and returns their scores."""
        place = self.triplets[number // 3][number % 3]
        sensitivity = self.sensitivities[number]
        uncertainty = self.uncertainties[number]
        beta1 = self.settings.beta1
        beta2 = self.settings.beta2
        importance = ops.abs(self.weights[place].astype(mstype.float32) * gradient.astype(mstype.float32))
        mean = beta1 * sensitivity + (1 - beta1) * importance
        spread = beta2 * uncertainty + (1 - beta2) * ops.abs(importance - mean)
        mean, spread = ops.select(learns, mean, sensitivity), ops.select(learns, spread, uncertainty)
        ops.assign(sensitivity, mean)
        ops.assign(uncertainty, spread)
        return mean * spread


def _places(cells: Mapping[str, AdaLoRADense], weights: Sequence[Parameter]) -> Tuple[Tuple, Tuple]:
    """Returns the indices of each cell's A, B and Lambda in ``weights``, and the kind of each weight."""
    numbers = {id(weight): number for number, weight in enumerate(weights)}
    places: List[Tuple[int, ...]] = []
    frozen: List[str] = []
    kinds = [_OTHER] * len(weights)
    for cell in cells.values():
        parts = [cell.parts()[part] for part in ("A", "B", "lambda")]
        frozen += [parameter.name for parameter in parts if id(parameter) not in numbers]
        places.append(tuple(numbers.get(id(parameter), -1) for parameter in parts))
    if frozen:
        raise ConfigError(
            f"AdaLoRA needs the gradients of all parts of its cells, and these do not train: {listed(frozen)}. Remove "
            "them from freeze_include."
        )
    for a, b, weights_of_triplets in places:
        kinds[a], kinds[b], kinds[weights_of_triplets] = _A, _B, _LAMBDA
    return tuple(places), tuple(kinds)


def _zeros(weight, name):
    """Returns the state of a weight's importance: float32, saved with the optimizer's state."""
    zeros = Tensor(np.zeros(weight.shape, np.float32))
    return Parameter(zeros, name=f"rank_budget.{weight.name}.{name}", requires_grad=False)
