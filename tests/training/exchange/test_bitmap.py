"""The bitmap of the largest elements against NumPy, and the positions that it gives back."""

import numpy as np
import pytest
from mindspore import Tensor

from mindlora.training.exchange.exchange import WORD_BITS
from mindlora.training.exchange.top_k import LargestAsBitmap, PositionsOfBitmap, words_of


def bits_of(words):
    """Returns the positions that words hold, lowest bit first."""
    integers = words.astype(np.int64)
    assert (integers == words).all() and (integers >= 0).all() and (integers < 1 << WORD_BITS).all()
    return np.nonzero((integers[:, None] >> np.arange(WORD_BITS) & 1).ravel())[0]


@pytest.mark.parametrize("size, k", [(1, 1), (23, 4), (24, 24), (25, 1), (1000, 37), (4801, 4801)])
def test_the_largest_by_absolute_value(size, k, mode):
    vector = np.random.default_rng(size).normal(size=size).astype(np.float32)
    words = LargestAsBitmap(size, k)(Tensor(vector)).asnumpy()
    assert words.shape == (words_of(size),) and words.dtype == np.float32
    largest = np.sort(np.argsort(-np.abs(vector))[:k])
    assert (bits_of(words) == largest).all()
    positions = PositionsOfBitmap(k)(Tensor(words)).asnumpy()
    assert positions.dtype == np.int32 and (positions == largest).all()


def test_every_bit_of_a_word_survives_a_sum_with_zeros(mode):
    vector = np.ones(2 * WORD_BITS, np.float32)
    words = LargestAsBitmap(2 * WORD_BITS, 2 * WORD_BITS)(Tensor(vector)).asnumpy()
    assert (words == 2**WORD_BITS - 1).all()
    assert (words + np.zeros(2, np.float32) == words).all()


def test_what_is_not_finite_is_not_chosen(mode):
    vector = np.array([np.nan, 1, -np.inf, -2, np.inf, 0.5, 0], np.float32)
    assert bits_of(LargestAsBitmap(7, 3)(Tensor(vector)).asnumpy()).tolist() == [1, 3, 5]


def test_ties_give_exactly_k(mode):
    words = LargestAsBitmap(100, 30)(Tensor(np.ones(100, np.float32))).asnumpy()
    assert len(bits_of(words)) == 30
