"""VeRADense: a linear cell that trains two vectors around random matrices that the whole network shares."""

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import Constant, initializer

from mindlora.nn.cell import PART_NAMES
from mindlora.nn.dense import LoRADense, refuse_sharded
from mindlora.nn.low_rank import composed_low_rank
from mindlora.numerics.vera_projection import projection

# A bears mindpet_delta_lora so that MindFormers takes it for what it is: the adapter's.
VERA_A, VERA_B = "mindpet_delta_lora_vera_a", "mindpet_delta_lora_vera_b"


class VeRADense(LoRADense):
    r"""A linear cell with a low-rank path of frozen random matrices, scaled by two trained vectors.

    .. math::
        y = activation(x W^T + bias + ((dropout(x) A^T) \lambda_d) (diag(\lambda_b) B)^T)

    A and B are the same two parameters in all cells of a network, as wide as its widest adapted cell, of which each
    takes the first columns and the first rows (see mindlora.numerics.vera_projection). lambda_d starts at d_initial and lambda_b at
    zero, so the cell starts as the plain one; these two train, r + out numbers.

    The fused operators do not serve it.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], mindpet_delta_lora_lambda_d [r],
        mindpet_delta_lora_lambda_b [out_channels], and, common to all cells, mindpet_delta_lora_vera_a
        [r, widest in_channels] and mindpet_delta_lora_vera_b [widest out_channels, r].

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Source: Kopiczko et al., VeRA: Vector-based Random Matrix Adaptation, 2024.
    """

    zero_part = "lambda_b"

    @classmethod
    def serves(cls, config):
        return config.use_vera

    @classmethod
    def check(cls, cell, config):
        super().check(cell, config)
        refuse_sharded(cell, "use_vera")

    @classmethod
    def part_shapes(cls, cell, rank):
        return {**super().part_shapes(cell, rank), "lambda_d": (rank,), "lambda_b": (cell.out_channels,)}

    @classmethod
    def shared_parameters(cls, cells, config):
        a, b = projection(
            config.projection_prng_key,
            config.lora_rank,
            max(cell.in_channels for cell in cells),
            max(cell.out_channels for cell in cells),
        )
        dtype = getattr(mstype, config.param_init_type)
        return tuple(
            Parameter(Tensor(array, dtype), name=name, requires_grad=False)
            for name, array in ((VERA_A, a), (VERA_B, b))
        )

    def _add_adapter(self, config):
        self.projection_key = config.projection_prng_key
        self.slice, self.mul = ops.Slice(), ops.Mul()
        dtype = getattr(mstype, config.param_init_type)
        for part, size, value in (("lambda_d", self.lora_rank, config.d_initial), ("lambda_b", self.out_channels, 0)):
            name = PART_NAMES[part]
            setattr(self, name, Parameter(initializer(Constant(value), [size], dtype), name=name))

    def _join(self, common):
        self.mindpet_delta_lora_vera_a, self.mindpet_delta_lora_vera_b = common

    def _pick_low_rank(self, strategy):
        return composed_low_rank(self.dropout_rate, "VeRA scales between and after the two products")

    def shared_parts(self):
        return {"A": self.mindpet_delta_lora_vera_a, "B": self.mindpet_delta_lora_vera_b}

    def pair(self):
        parts = {**self.shared_parts(), **self.parts()}
        a, b, lambda_d, lambda_b = (parameter.asnumpy().astype(np.float32) for parameter in parts.values())
        return lambda_d[:, None] * a[:, : self.in_channels], lambda_b[:, None] * b[: self.out_channels]

    def load_part(self, part, array):
        if part not in "AB":
            super().load_part(part, array)
            return
        # No wider than this cell, so never than what all have in common.
        common, (rows, columns) = self.shared_parts()[part], array.shape
        values = common.asnumpy().astype(np.float32, copy=False)
        if not np.array_equal(values[:rows, :columns], array):
            values = values.copy()
            values[:rows, :columns] = array
            common.set_data(Tensor(values, common.dtype))

    def _factors(self):
        # Cast before: not every dtype that A and B can be kept in can be cut on a CPU.
        a = self.cast(self.mindpet_delta_lora_vera_a, self.dtype)
        b = self.cast(self.mindpet_delta_lora_vera_b, self.dtype)
        # On the rows of B and not on y: so nothing of the size of y is kept for the backward.
        lambda_b = self.reshape(self.cast(self.mindpet_delta_lora_lambda_b, self.dtype), (-1, 1))
        return (
            self._first(a, self.lora_rank, self.in_channels),
            self.mul(lambda_b, self._first(b, self.out_channels, self.lora_rank)),
            self.mindpet_delta_lora_lambda_d,
        )

    def _first(self, matrix, rows, columns):
        """The first rows and columns; no copy of the whole."""
        return matrix if matrix.shape == (rows, columns) else self.slice(matrix, (0, 0), (rows, columns))
