"""VeRADense: a linear cell that trains two vectors around random matrices that the whole network shares."""

from typing import Dict, Sequence, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import Constant

from mindlora.core.numerics.initializers import vera_projection
from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.vera import VERA
from mindlora.network.cells.dense import LoRADense


class VeRADense(LoRADense):
    r"""A linear cell with a low-rank path of frozen random matrices, scaled by two trained vectors.

    .. math::
        y = activation(x W^T + bias + ((dropout(x) A^T) \lambda_d) (diag(\lambda_b) B)^T)

    A and B are the shared projection: the same two parameters in all cells of a network, as wide as its widest adapted
    cell. Each cell takes the first columns of A and the first rows of B (see mindlora.core.numerics.initializers).
    lambda_d is initialized to d_initial and lambda_b to zero, so that the cell computes the same as the plain one until
    it trains. Only these two train, r + out_channels numbers. The fused operators do not support this cell.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], mindpet_delta_lora_lambda_d [r],
        mindpet_delta_lora_lambda_b [out_channels]; shared by all cells, mindpet_delta_lora_vera_a
        [r, widest in_channels] and mindpet_delta_lora_vera_b [widest out_channels, r].

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Source: Kopiczko et al., VeRA: Vector-based Random Matrix Adaptation, 2024.
    """

    variant = VERA
    not_fused = "VeRA scales between and after the two products"

    @classmethod
    def shared_parameters(cls, cells: Sequence[nn.Cell], config: LoraConfig) -> Tuple[Parameter, ...]:
        shapes = VERA.shared_shapes([cls.weight_shape(cell) for cell in cells], config.lora_rank)
        (_, in_channels), (out_channels, _) = shapes.values()
        arrays = vera_projection(config.projection_prng_key, config.lora_rank, in_channels, out_channels)
        dtype = getattr(mstype, config.param_init_type)
        return tuple(
            Parameter(Tensor(array, dtype), name=part.parameter, requires_grad=False)
            for part, array in zip(VERA.shared_parts.values(), arrays)
        )

    def _add_adapter(self, config, shared):
        self.mindpet_delta_lora_vera_a, self.mindpet_delta_lora_vera_b = shared
        self.projection_key = config.projection_prng_key
        self.slice = ops.Slice()
        self.mul = ops.Mul()
        self.reshape = ops.Reshape()
        self._add_parts(self._drawn(config, {"lambda_d": Constant(config.d_initial), "lambda_b": "zeros"}))

    def shared_parts(self) -> Dict[str, Parameter]:
        return {"A": self.mindpet_delta_lora_vera_a, "B": self.mindpet_delta_lora_vera_b}

    def pair(self) -> Tuple[np.ndarray, np.ndarray]:
        parts = {**self.shared_parts(), **self.parts()}
        a, b, lambda_d, lambda_b = (parameter.asnumpy().astype(np.float32) for parameter in parts.values())
        return lambda_d[:, None] * a[:, : self.in_channels], lambda_b[:, None] * b[: self.out_channels]

    def load_part(self, part: str, array: np.ndarray) -> None:
        if part not in "AB":
            super().load_part(part, array)
            return
        # The array is at most as wide as this cell, and so as the shared projection.
        shared, (rows, columns) = self.shared_parts()[part], array.shape
        values = shared.asnumpy().astype(np.float32, copy=False)
        if not np.array_equal(values[:rows, :columns], array):
            values = values.copy()
            values[:rows, :columns] = array
            shared.set_data(Tensor(values, shared.dtype))

    def _adapted(self, x):
        """x W^T + bias + ((dropout(x) A^T) lambda_d) (diag(lambda_b) B)^T."""
        # Cast first: a CPU cannot slice every stored dtype of A and B.
        a = self.cast(self.mindpet_delta_lora_vera_a, self.dtype)
        b = self.cast(self.mindpet_delta_lora_vera_b, self.dtype)
        # lambda_b scales the rows of B, not y, so that nothing of the size of y is kept for the backward.
        lambda_b = self.reshape(self.cast(self.mindpet_delta_lora_lambda_b, self.dtype), (-1, 1))
        a = self._first(a, self.lora_rank, self.in_channels)
        b = self.mul(lambda_b, self._first(b, self.out_channels, self.lora_rank))
        y = self.base.linear(x, self._operands(), self.bias)
        return self.low_rank.add_to(y, x, a, b, self.mindpet_delta_lora_lambda_d)

    def _first(self, matrix, rows, columns):
        """The first rows and columns of a matrix, without a slice if these are the whole matrix."""
        return matrix if matrix.shape == (rows, columns) else self.slice(matrix, (0, 0), (rows, columns))
