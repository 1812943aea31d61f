"""Seeds for dropout, which a network draws while it runs."""

import itertools

import mindspore as ms
from mindspore import Tensor, nn, ops

_numbers = itertools.count(1)


class SeedDraw(nn.Cell):
    """Draws a new seed, int32 [1], at each call, in a sequence that mindspore.set_seed fixes."""

    def __init__(self):
        super().__init__()
        # Each cell has a sequence of its own. With two zeros, MindSpore picks one that differs from run to run.
        seed = ms.get_seed()
        # If the backward recomputes the forward, it must use the same seed.
        self.draw = ops.UniformInt(*((0, 0) if seed is None else (seed, next(_numbers)))).recompute(False)
        self.least = Tensor(0, ms.int32)
        self.end = Tensor(2**31 - 1, ms.int32)

    def construct(self) -> Tensor:
        return self.draw((1,), self.least, self.end)
