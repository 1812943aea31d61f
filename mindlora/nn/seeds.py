"""Seeds that a network draws while it runs."""

import itertools

import mindspore as ms
from mindspore import Tensor, nn, ops

_numbers = itertools.count(1)


class SeedDraw(nn.Cell):
    """Draws a seed, another one at each call, in a sequence that mindspore.set_seed fixes.

    Outputs:
        Tensor [1], int32.
    """

    def __init__(self):
        super().__init__()
        # Two zeros ask MindSpore for another sequence each time; otherwise each cell has one of its own.
        seed = ms.get_seed()
        # What is computed again in the backward (recompute) must use the seed of the forward.
        self.draw = ops.UniformInt(*((0, 0) if seed is None else (seed, next(_numbers)))).recompute(False)
        self.least, self.end = Tensor(0, ms.int32), Tensor(2**31 - 1, ms.int32)

    def construct(self):
        return self.draw((1,), self.least, self.end)
