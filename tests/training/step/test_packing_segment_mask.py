"""SegmentMask against the definition: a position sees what the causal mask shows it in its own example, no more."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora.training.step.packing import SegmentMask

BOUNDARY, PAD = 1, 3
TOKENS = np.array([[1, 7, 8, 1, 9, 1, 5, 3, 3], [4, 1, 1, 6, 6, 6, 6, 6, 3], [4] * 9], np.int32)


class Causal(nn.Cell):
    """A causal mask that also hides padding, as MindFormers makes it."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def construct(self, tokens):
        length = tokens.shape[1]
        seen = ops.tril(ops.ones((length, length), ms.float32)) * (tokens != PAD).astype(ms.float32).expand_dims(1)
        hidden = (1 - seen).expand_dims(1)
        return hidden.astype(ms.uint8) if self.dtype == ms.uint8 else (hidden * -10000.0).astype(self.dtype)


def hidden(tokens):
    """The oracle, pair by pair."""
    rows, length = tokens.shape
    result = np.ones((rows, 1, length, length), bool)
    for row in range(rows):
        for i in range(length):
            for j in range(i + 1):
                same_example = not (tokens[row, j + 1 : i + 1] == BOUNDARY).any()
                result[row, 0, i, j] = tokens[row, j] == PAD or not same_example
    return result


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16, ms.uint8], ids=str)
def test_mask(mode, dtype):
    mask = SegmentMask(Causal(dtype), BOUNDARY)(Tensor(TOKENS))
    assert mask.dtype == dtype
    np.testing.assert_array_equal(mask.asnumpy(), hidden(TOKENS) * (1 if dtype == ms.uint8 else -10000.0))


def test_a_row_with_one_example_keeps_its_causal_mask(pynative_mode):
    tokens = Tensor(np.array([[1, 5, 6, 7, 3]], np.int32))
    causal = Causal(ms.float32)
    np.testing.assert_array_equal(SegmentMask(causal, BOUNDARY)(tokens).asnumpy(), causal(tokens).asnumpy())
