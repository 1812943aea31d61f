"""The examples of packed rows: which one each token belongs to."""

from mindspore import Tensor, ops
from mindspore.common import dtype as mstype


def segment_numbers(tokens: Tensor, boundary: int) -> Tensor:
    """Returns for each token the number of its example within the row, from 1: int32 [rows, N], as ``tokens``.

    Each example begins with the token ``boundary``: ``segment[i] = sum_{k <= i} (tokens[k] == boundary)``.
    """
    # mint's cumulative sum has no CPU kernel.
    return ops.CumSum()((tokens == boundary).astype(mstype.int32), 1)
