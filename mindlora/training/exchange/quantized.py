"""The exchange of gradients as whole numbers of few bits, several in one float32, with error feedback."""

from typing import Tuple

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.common import dtype as mstype

from mindlora.training.exchange.exchange import RESIDUAL_NAME, WORD_BITS, Exchange
from mindlora.training.exchange.ranks import Ranks

# Elements that share a scale; a multiple of how many numbers a word carries, for 4, 6 and 8 bits.
BLOCK = 240


def levels(bits: int, ranks: int) -> float:
    """Returns L: a sum over the ranks has the whole numbers up to L + ranks / 2, which is what ``bits`` can tell."""
    return 2 ** (bits - 1) - 1 - ranks / 2


class QuantizedExchange(Exchange):
    """Sums the vector in whole numbers of ``bits`` bits: 4, 6 or 8.

    With c = gradient + residual, in blocks of 240 elements, S = sum over the ranks of max |c| (a first AllReduce of
    one number for each block), and u = S / L, where L must be at least 1:

        q = round(c / u) on each rank,  sum = u AllReduce(q),  residual = c - u q

    |q| is at most max |c| / u + 1/2 on each rank, so the sum of q is at most L + ranks / 2 = 2 ** (bits - 1) - 1, and
    24 / bits such sums fit into one float32, which adds them up without losing a bit. All elements arrive in every
    step, so that an optimizer such as Adam sees no gaps. What rounding took away is in the residual (error
    feedback; Seide et al., 1-Bit Stochastic Gradient Descent, 2014), which only a comparison switches off. Where the
    gradient of a rank is not finite, the sum is not finite on any rank.
    """

    def __init__(self, size: int, ranks: Ranks, bits: int = 6, feedback: bool = True):
        super().__init__()
        self.size = size
        self.ranks = ranks
        self.feedback = feedback
        self.blocks = -(-size // BLOCK)
        self.padding = Tensor(np.zeros(self.blocks * BLOCK - size), mstype.float32)
        self.is_padded = self.blocks * BLOCK > size
        self.in_word = WORD_BITS // bits
        self.words = self.blocks * BLOCK // self.in_word
        self.levels = levels(bits, ranks.count)
        self.sum_largest = ranks.all_reduce()
        self.sum_words = ranks.all_reduce()
        self.base = float(2**bits)
        powers = self.base ** np.arange(self.in_word)
        self.powers = Tensor(powers, mstype.float32)
        # Makes all digits of a sum positive, so that they can be told apart.
        self.digit_offset = self.base / 2
        self.word_offset = float(self.digit_offset * powers.sum())
        self.residual = Parameter(Tensor(np.full(size, -0.0, np.float32)), name=RESIDUAL_NAME, requires_grad=False)

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        corrected = flat + self.residual
        blocks = (ops.cat((corrected, self.padding)) if self.is_padded else corrected).reshape(self.blocks, BLOCK)
        largest = self.sum_largest(ops.amax(ops.abs(blocks), -1))
        unit = (ops.select(largest == 0, ops.ones_like(largest), largest) / self.levels).expand_dims(-1)
        whole = ops.round(blocks / unit)
        sums = self.digits(self.sum_words((whole.reshape(self.words, self.in_word) * self.powers).sum(-1)))
        total = sums.reshape(self.blocks, BLOCK) * unit
        return total.reshape(-1)[: self.size], (blocks - whole * unit).reshape(-1)[: self.size]

    def digits(self, words: Tensor) -> Tensor:
        """Returns the whole numbers that words carry: float32 [words] -> [words, 24 / bits]."""
        shifted = (words + self.word_offset).expand_dims(-1) / self.powers
        return ops.floor(shifted) - self.base * ops.floor(shifted / self.base) - self.digit_offset

    def keep(self, residual: Tensor) -> Tensor:
        if not self.feedback:
            return residual
        return ops.assign(self.residual, residual)

    @property
    def bytes_per_step(self) -> int:
        return self.ranks.bytes_to_sum(self.blocks) + self.ranks.bytes_to_sum(self.words)

    def unsent(self) -> Parameter:
        return self.residual


def fits(bits: int, ranks: int) -> bool:
    """Returns whether ``bits`` bits can hold the sum of the numbers of ``ranks`` ranks."""
    return levels(bits, ranks) >= 1
