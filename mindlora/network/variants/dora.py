"""DoRADense: LoRADense with a trained magnitude for each row of the weight."""

from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import Constant

from mindlora.core.errors import LoraError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.folding import Rows
from mindlora.models.variants.dora import DORA
from mindlora.network.cells.dense import LoRADense

# How many rows of W, evenly spread, are compared to detect a change of W since the magnitude was initialized.
_SAMPLED_ROWS = 4
# The number of rows of W + scale B A that are formed at a time when the magnitude is initialized.
_ROWS = 256


class DoRADense(LoRADense):
    r"""A linear cell whose weight W + scale B A is rescaled to rows of trained magnitudes m.

    .. math::
        g = m / \|W + scale \, B A\|_{row}, \quad y = activation(g (x W^T + ((x A^T) scale) B^T) + bias)

    The backward treats the norm as a constant, as in the paper (section 4.3). With dropout in training, as in PEFT,
    x W^T is computed from x, but DoRA's update of it from the dropped x':
    y = x W^T + (g (x' W^T + ((x' A^T) scale) B^T) - x' W^T) + bias, which takes two products with W.

    The norm of a row is computed from products with A and B, without the matrix scale B A:
    ||W||^2 + 2 scale (W A^T . B) + scale^2 (B (A A^T) . B), in float32. Where W + scale B A is very small compared to
    W, the norm has the rounding error of that difference.

    The magnitude m is NaN until it is initialized to the row norms of W + scale B A. That happens when it is first
    needed (set_train(True), save_lora, merge_lora), so that a base loaded after the cell was created counts
    too. Until then g is 1 at inference; in training the loss is NaN. If another base is loaded after that, m is
    initialized again, unless it has been trained, which raises an error.

    The arguments are as in LoRADense.

    Weights:
        As in LoRADense, and mindpet_delta_lora_magnitude [out_channels].

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Raises:
        ConfigError: An argument is out of range.

    Source: Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation, 2024.
    """

    # The magnitude's initial values, and rows of their W. None before, and after a magnitude is loaded.
    _initial = None
    # A resumed run takes the graph that the run from the start has kept.
    UNREAD_BY_GRAPHS = ("_initial",)

    variant = DORA
    not_fused = "DoRA scales what the fused operators add to y"

    def _add_adapter(self, config, shared):
        super()._add_adapter(config, shared)
        self._add_parts(self._drawn(config, {"magnitude": Constant(float("nan"))}))
        self.add = ops.Add()
        self.mul = ops.Mul()
        self.div = ops.RealDiv()
        self.sqrt = ops.Sqrt()
        self.times_transposed = ops.MatMul(transpose_b=True)
        self.row_sum = ops.ReduceSum()
        self.is_nan = ops.IsNan()
        self.select = ops.Select()
        self.stop_gradient = ops.StopGradient()
        self.ones = Tensor(np.ones(self.out_channels, np.float32))

    def _adapted(self, x):
        """g (x W^T + ((x A^T) * scale) B^T) + bias; with dropout in training, the equation that the class gives."""
        a, b = self.trained.of(self.mindpet_delta_lora_a), self.trained.of(self.mindpet_delta_lora_b)
        weight = self._operands()
        gain = self.cast(self._gain(x, weight, a, b), self.dtype)
        if self.dropout_rate > 0 and self.training:
            dropped = self.low_rank.drop(x)
            plain = self.base.product(dropped, weight)
            scaled = self.mul(gain, self.low_rank.add_without_dropout(plain, dropped, a, b, self.scale))
            return self.base.with_bias(self.add(self.base.product(x, weight), scaled - plain), self.bias)
        y = self.low_rank.add_without_dropout(self.base.product(x, weight), x, a, b, self.scale)
        return self.base.with_bias(self.mul(gain, y), self.bias)

    def _gain(self, x, weight, a, b):
        """m / ||W + scale B A||, float32 [out], with the norm as a constant in the backward."""
        magnitude = self.cast(self.mindpet_delta_lora_magnitude, mstype.float32)
        gain = self.div(magnitude, self._norm(x, weight, self.stop_gradient(a), self.stop_gradient(b)))
        # In training, a magnitude that was never initialized must not go unnoticed.
        return gain if self.training else self.select(self.is_nan(magnitude), self.ones, gain)

    def _norm(self, x, weight, a, b):
        scale = self.scale
        # A norm that is rounded would be worse than the change that training makes to it.
        on_a = self.cast(self.base.times_rows(weight, a), mstype.float32)
        a = self.cast(a, mstype.float32)
        b = self.cast(b, mstype.float32)
        on_b = self.times_transposed(b, self.times_transposed(a, a))
        crossed = self.row_sum(self.mul(on_a * (2 * scale) + on_b * (scale * scale), b), 1)
        return self.sqrt(self.base.squared_norms(self._stored(), x) + crossed)

    def prepare(self) -> None:
        """Initializes the magnitude, or initializes it again if W has changed since and the magnitude is untrained.

        Raises:
            LoraError: W has changed since the magnitude was initialized and trained; or a row of W + scale B A is 0.
        """
        magnitude = self.mindpet_delta_lora_magnitude
        if self.weight.has_init or magnitude.has_init or self.merged:
            return
        values = _array(magnitude)
        if not np.isnan(values).all():
            if self._initial is None:
                return
            same = all(map(np.array_equal, self._sample(), self._initial[1]))
            trained = (values != self._initial[0]).any()
            if trained and not same and not self.weight.requires_grad:
                raise LoraError(
                    f"The weight of {self.adapter_path or 'the cell'} was loaded after its DoRA magnitude "
                    "was initialized from another weight and trained. Load the base before set_train(True)."
                )
            if trained:
                self._initial = None
            if trained or same:
                return
        norms = row_norms(self.by_rows(), *map(_array, self.lora_parameters()[:2]), self.scale)
        if not norms.all():
            raise LoraError(
                f"The weight of {self.adapter_path or 'the cell'} has {np.count_nonzero(norms == 0)} rows of zeros, "
                "which have no direction, so DoRA is not defined there. Add it to exclude_modules, or train plain LoRA."
            )
        magnitude.set_data(Tensor(norms, magnitude.dtype))
        self._initial = _array(magnitude), self._sample()

    def load_part(self, part: str, array: np.ndarray) -> None:
        super().load_part(part, array)
        if part == "magnitude":
            self._initial = None

    def add_flags(self, **flags: Any) -> nn.Cell:
        super().add_flags(**flags)
        if flags.get("training"):
            self.prepare()
        return self

    def _sample(self):
        """Returns copies of some rows of W as it is stored."""
        samples = []
        for tensor in self._stored():
            array = tensor.asnumpy()
            samples.append(array[np.linspace(0, len(array) - 1, min(_SAMPLED_ROWS, len(array))).astype(int)])
        return samples


def row_norms(weight: Rows, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Returns ||W + scale B A|| of each row, float32 [out].

    W [out, in] is in any dtype of floats, A [r, in] and B [out, r] are float32.
    """
    norms = np.empty(len(weight), np.float32)
    for begin in range(0, len(weight), _ROWS):
        rows = slice(begin, begin + _ROWS)
        norms[rows] = np.linalg.norm(to_float32(weight[rows]) + np.float32(scale) * (b[rows] @ a), axis=1)
    return norms


def _array(parameter) -> np.ndarray:
    return parameter.asnumpy().astype(np.float32)
