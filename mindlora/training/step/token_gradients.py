"""Gradients of a batch processed in micro-batches, in which every counted token or example weighs the same."""

import os
from typing import Optional, Tuple

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.core.errors import ConfigError

_add_float32 = ops.MultitypeFuncGraph("add_float32")


@_add_float32.register("Tensor", "Tensor")
def _add_in_float32(total, part):
    return total + part.astype(mstype.float32)


@constexpr
def _rows_of_micro_batch(rows, micro_batches):
    if rows % micro_batches:
        raise ConfigError(
            f"A batch has {rows} rows, which cannot be split into {micro_batches} micro-batches of equal size. Set "
            "train_dataset.drop_remainder: True, and a batch size that gradient accumulation divides."
        )
    return rows // micro_batches


class TokenGradients(nn.Cell):
    """The sum of the losses of all counted tokens of a batch, their number, and the gradients of the sum.

    With micro-batches x_1 ... x_K, where network(x_i) = (s_i, n_i): s = s_1 + ... + s_K, n = n_1 + ... + n_K, and
    ds/dw = ds_1/dw + ... + ds_K/dw. So s / n is the mean over the counted tokens of the batch, whatever K is, while the
    mean of the means s_i / n_i would give more weight to tokens in micro-batches with fewer of them.

    Args:
        network (Cell): Returns the sum of the losses and the number of counted tokens, float32 [] or [1] each; or only
            a loss, which then counts as one token. The number may be the first of several, float32 [M], all of which
            are added up over the micro-batches.
        weights (ParameterTuple): The parameters with respect to which to differentiate.
        micro_batches (int): K; the first dimension of every input must be a multiple of it.
        counts (int): M. Default: 1.
        losses (int): The size of s if the network returns a vector of sums, float32 [losses]; ds is then the sum of all
            ds_i, and s is not added up. Default: None, the network returns one sum.

    Inputs:
        - **scale** (Tensor) - Factor of the gradients, which keeps a float16 network's gradients from underflowing.
        - **\\*inputs** (Tensor) - The batch.

    Outputs:
        Tuple (s, n, gradients): float32 [] or [losses], float32 [M] (M is 1 if the network returns one number or none),
            and a tuple of scale ds/dw in the shapes of the weights, in float32 if there are several micro-batches,
        otherwise in the dtypes of the weights.
    """

    def __init__(
        self, network: nn.Cell, weights: tuple, micro_batches: int = 1, counts: int = 1, losses: Optional[int] = None
    ):
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = weights
        self.micro_batches = micro_batches
        self.no_counts = Tensor(np.zeros(counts), mstype.float32)
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.map = ops.HyperMap()
        self.shape = () if losses is None else (losses,)
        self.zero = Tensor(np.zeros(self.shape), mstype.float32)
        self.one = Tensor(1, mstype.float32)
        self.first = Tensor(0, mstype.int32)
        # MindSpore's dry run computes nothing, so a loop on the device would never end.
        self.loops = not os.environ.get("MS_SIMULATION_LEVEL")

    def construct(self, scale: Tensor, *inputs: Tensor) -> Tuple[Tensor, Tensor, tuple]:
        if self.micro_batches == 1:
            return self.of_micro_batch(scale, *inputs)
        micro_batches = ()
        for x in inputs:
            rows = _rows_of_micro_batch(x.shape[0], self.micro_batches)
            micro_batches += (x.reshape((self.micro_batches, rows) + x.shape[1:]),)
        gradients = ()
        for weight in self.weights:
            gradients += (ops.zeros(weight.shape, mstype.float32),)
        sums = (self.zero, self.no_counts, gradients)
        index = self.first
        if not self.loops:
            return self.with_micro_batch(sums, scale, micro_batches, index)
        # A loop in the graph instead of K copies of the network: it compiles as fast as one micro-batch, and only one
        # micro-batch's activations are in memory.
        while index < self.micro_batches:
            sums = self.with_micro_batch(sums, scale, micro_batches, index)
            index = index + 1
        return sums

    def with_micro_batch(self, sums: tuple, scale: Tensor, micro_batches: tuple, index: Tensor) -> tuple:
        """Returns (s, n, gradients) with the results of micro-batch ``index`` added."""
        total, count, gradients = sums
        part = ()
        for x in micro_batches:
            part += (ops.gather(x, index, 0),)
        part_total, part_count, part_gradients = self.of_micro_batch(scale, *part)
        return total + part_total, count + part_count, self.map(_add_float32, gradients, part_gradients)

    def of_micro_batch(self, scale: Tensor, *inputs: Tensor) -> Tuple[Tensor, Tensor, tuple]:
        """Returns the outputs of construct for one micro-batch."""
        outputs = self.network(*inputs)
        if isinstance(outputs, tuple):
            total, count = outputs
            sens = (ops.ones_like(total) * scale.astype(total.dtype), ops.zeros_like(count))
        else:
            total = outputs
            count = self.one
            sens = ops.ones_like(total) * scale.astype(total.dtype)
        gradients = self.grad(self.network, self.weights)(*inputs, sens)
        return total.astype(mstype.float32).reshape(self.shape), count.astype(mstype.float32).reshape((-1,)), gradients
