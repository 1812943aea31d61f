"""The attention mask of packed rows: no example of a row sees another one."""

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.network.cells.segments import segment_numbers

_MASKED = -10000.0


class SegmentMask(nn.Cell):
    """Adds to a causal mask that tokens of different examples do not see each other.

    Every ``boundary`` token begins an example, so the number of an example within its row is the count of boundary
    tokens up to a position, ``segment[i] = sum_{k <= i} (tokens[k] == boundary)``, and position i sees position j only
    if the causal mask lets it and ``segment[i] == segment[j]``: a block-diagonal mask (Krell et al., 2021). Positions
    need not be counted anew in each example where only their difference matters, as with rotary embeddings.

    ``causal_mask`` is MindFormers' LowerTriangularMaskWithDynamic, or any cell that makes a mask [batch, 1, N, N] from
    tokens, int32 [batch, N]. In uint8, 1 masks and 0 does not (flash attention); in any other dtype the mask is added
    to the scores, and -10000 masks. The result has its shape and dtype.
    """

    def __init__(self, causal_mask: nn.Cell, boundary: int):
        super().__init__(auto_prefix=False)
        self.causal_mask = causal_mask
        self.boundary = boundary

    def construct(self, tokens: Tensor) -> Tensor:
        mask = self.causal_mask(tokens)
        segment = segment_numbers(tokens, self.boundary)
        different = (segment.expand_dims(2) != segment.expand_dims(1)).expand_dims(1)
        # Not by where: in the semi-automatic parallel modes, MindSpore's Select broadcasts nothing.
        if mask.dtype == mstype.uint8:
            return ops.logical_or(mask.astype(mstype.bool_), different).astype(mask.dtype)
        return ops.minimum(mask, different.astype(mask.dtype) * _MASKED)
