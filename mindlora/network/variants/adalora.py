"""AdaLoRADense: a linear cell whose low-rank update is a product P Lambda Q, from which triplets are removed."""

from typing import Dict, Tuple

import numpy as np
from mindspore.common import dtype as mstype
from mindspore.common.initializer import Normal

from mindlora.core.numerics.dtypes import from_float32, to_float32
from mindlora.models.variants.adalora import ADALORA
from mindlora.network.cells.dense import LoRADense
from mindlora.network.tensors import to_array

# PEFT's deviation of the initial P and Q, and the number that it adds to the rank in a division.
_DEVIATION, _EPSILON = 0.02, 1e-5


class AdaLoRADense(LoRADense):
    r"""A linear cell with a low-rank update in the form of a singular value decomposition.

    .. math::
        y = activation(x W^T + bias + ((dropout(x) Q^T) (scale \, \Lambda)) P^T), \quad
        scale = \frac{lora\_alpha}{init\_r + 10^{-5}}

    A is Q and B is P, initialized to normal values of deviation 0.02; Lambda is zero, so that the cell computes the
    same as the plain one until it trains. Triplet i is (B[:, i], Lambda[i], A[i]). While the cell trains,
    mindlora.training.adalora.rank_budget keeps A and B near orthogonal matrices and sets Lambda to zero where a triplet
    has little importance. The scale is PEFT's and does not change when triplets are removed.

    The saved cell is a plain LoRA with one rank for each nonzero element of Lambda (saved_parts).

    Weights:
        weight [out_channels, in_channels], bias [out_channels], mindpet_delta_lora_a [r, in_channels],
        mindpet_delta_lora_b [out_channels, r], mindpet_delta_lora_lambda [r].

    Attributes:
        budget_settings (BudgetSettings): init_r, target_r and the rest, as in LoraConfig.

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Source: Zhang et al., AdaLoRA: Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning, 2023.
    """

    variant = ADALORA
    not_fused = "AdaLoRA scales between the two products, each row by its own"

    def _add_adapter(self, config, shared):
        self.scale = self.lora_alpha / (self.lora_rank + _EPSILON)
        self.budget_settings = config.budget_settings
        initial = {"A": Normal(_DEVIATION), "B": Normal(_DEVIATION), "lambda": "zeros"}
        self._add_parts(self._drawn(config, initial))

    def _adapted(self, x):
        """x W^T + bias + ((dropout(x) A^T) * (scale Lambda)) B^T."""
        a, b = self.trained.of(self.mindpet_delta_lora_a), self.trained.of(self.mindpet_delta_lora_b)
        scale = self.cast(self.mindpet_delta_lora_lambda, mstype.float32) * self.scale
        y = self.base.linear(x, self._operands(), self.bias)
        return self.low_rank.add_to(y, x, a, b, scale)

    def pair(self) -> Tuple[np.ndarray, np.ndarray]:
        a, b, weights = self._arrays()
        return weights[:, None] * a, b

    def saved_parts(self, keep_zeros: bool = False) -> Dict[str, np.ndarray]:
        """Returns A and B of the plain LoRA of rank k that computes the same, whose scale is lora_alpha / k.

        Lambda is multiplied into A; without ``keep_zeros``, triplets with a Lambda of zero are left out. Empty if no
        triplet is left.
        """
        a, b, weights = self._arrays()
        # Also NaN, which saving then refuses.
        kept = np.flatnonzero(weights != 0) if not keep_zeros else np.arange(len(weights))
        if not len(kept):
            return {}
        weights = weights[kept] * np.float32(self.scale * len(kept) / self.lora_alpha)
        dtype = to_array(self.mindpet_delta_lora_a).dtype
        pair = {"A": weights[:, None] * a[kept], "B": b[:, kept]}
        return {part: np.ascontiguousarray(from_float32(array, dtype)) for part, array in pair.items()}

    @property
    def rank_left(self) -> int:
        """The number of triplets whose Lambda is not zero."""
        return int(np.count_nonzero(to_float32(to_array(self.mindpet_delta_lora_lambda))))

    def _arrays(self):
        """Copies of A, B and Lambda in float32."""
        return tuple(to_float32(to_array(parameter)).copy() for parameter in self.lora_parameters())
