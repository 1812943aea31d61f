"""lora_dropout beyond tests/ops/test_contract.py: statistics of what is dropped, and what is not finite."""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindlora.ops.lora_dropout import lora_dropout
from tests.support.native import values


def test_the_share_is_right_and_neighbours_rows_columns_and_seeds_are_independent(reference):
    tokens, channels, rate = 1000, 512, 0.1
    kept = reference.kept(tokens, channels, 3, rate)
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 5 * deviation / kept.size**0.5
    for axis, count in ((0, tokens), (1, channels)):
        assert abs(kept.mean(axis=axis) - (1 - rate)).max() < 5.5 * deviation / count**0.5
    others = [kept[1:, :], kept[:, 1:], kept[2:, :], kept[:, 64:]]
    others += [reference.kept(tokens, channels, seed, rate) for seed in (4, 3 + 2**20, -3, 0x9E3779B1 + 3 - 2**32)]
    for other in others:
        same = kept[: other.shape[0], : other.shape[1]]
        assert abs(np.corrcoef(same.ravel(), other.ravel())[0, 1]) < 5 / other.size**0.5


def test_what_is_dropped_is_zero_even_if_it_was_not_finite(each_path, reference):
    kept = reference.kept(8, 16, 1, 0.5)
    x = np.where(kept, 1, np.inf).astype(np.float32)
    y = lora_dropout(Tensor(x), Tensor([1], ms.int32), Tensor([0.5], ms.float32))
    np.testing.assert_array_equal(values(y), np.where(kept, 2, 0))
