"""VeRA's random matrices: the numbers of PyTorch's generator, and their distribution."""

import math

import numpy as np

from mindlora.core.numerics.vera_projection import projection

# What PyTorch draws for the key 0.
A = [
    [-0.010587962344288826, 0.75864577293396, -1.1639615297317505],
    [-1.040774941444397, -0.5446904897689819, 0.3792317807674408],
]
B = [[-0.03431743383407593, 1.3733248710632324], [-0.15370918810367584, 0.4583223760128021]]


def test_numbers_are_pytorch_s():
    """torch.empty(shape).uniform_(-bound, bound, generator=manual_seed(0)): (2, 3) within 2 ** 0.5, (2, 2) 3 ** 0.5."""
    a, b = projection(0, 2, 3, 2)
    np.testing.assert_array_equal(a, np.array(A, np.float32))
    np.testing.assert_array_equal(b, np.array(B, np.float32))
    # PyTorch's Mersenne Twister takes 32 bits of a seed.
    np.testing.assert_array_equal(projection(2**32 + 5, 2, 3, 2)[0], projection(5, 2, 3, 2)[0])


def test_distribution_is_he_uniform():
    a, b = projection(1, 16, 600, 300)
    for array, fan_in in ((a, 600), (b, 16)):
        bound = math.sqrt(6 / fan_in)
        assert array.dtype == np.float32 and 0.99 * bound < np.abs(array).max() <= bound * (1 + 1e-6)
        np.testing.assert_allclose(array.std(), bound / math.sqrt(3), rtol=0.03)
        assert abs(array.mean()) < 0.05 * bound
    assert np.abs(projection(2, 16, 600, 300)[0] - a).max() > 0.1 * np.abs(a).max()
