"""top_k, top_p and the draw, against sorting in float64."""

import numpy as np
import pytest

from mindlora.serving.sampling import draw, largest, nucleus


def masses_of(seed, size, scale):
    logits = np.random.default_rng(seed).normal(0, scale, size)
    return np.exp(logits - logits.max()).astype(np.float32)


def sorted_nucleus(masses, top_p):
    order = np.argsort(-masses, kind="stable")
    before = np.cumsum(masses[order].astype(np.float64))
    before = np.concatenate([[0.0], before[:-1] / before[-1]])
    return np.sort(order[: max(1, (before < top_p).sum())])


@pytest.mark.parametrize("size", [1, 7, 127, 128, 1000, 5003, 32000])
@pytest.mark.parametrize("count", [1, 3, 50, 700, 40000])
def test_the_largest_values_are_found(size, count):
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    expected = np.sort(np.argsort(-values, kind="stable")[:count])
    assert largest(values, count).tolist() == expected.tolist()


def test_all_that_equal_the_smallest_of_the_largest_are_kept():
    assert largest(np.array([1, 3, 2, 2, 0, 2], np.float32), 2).tolist() == [1, 2, 3, 5]
    assert largest(np.zeros(1000, np.float32), 2).tolist() == list(range(1000))
    values = np.full(4096, -np.inf, np.float32)
    values[[5, 4000]] = 1, 2
    assert largest(values, 1).tolist() == [4000]
    assert largest(values, 2).tolist() == [5, 4000]
    assert len(largest(values, 3)) == 4096


@pytest.mark.parametrize("size, scale", [(1, 1), (2, 1), (513, 3), (5003, 0.01), (32000, 1), (32000, 3), (3000, 30)])
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_the_nucleus_is_that_of_a_sort(size, scale, top_p):
    masses = masses_of(size, size, scale)
    found = nucleus(masses, top_p)
    assert found.tolist() == sorted_nucleus(masses, top_p).tolist()


def test_of_equal_masses_the_first_are_kept():
    assert nucleus(np.ones(4, np.float32), 0.5).tolist() == [0, 1]
    assert nucleus(np.ones(5000, np.float32), 0.5).tolist() == list(range(2500))
    assert nucleus(np.ones(5000, np.float32), 0.0).tolist() == [0]
    assert nucleus(np.array([0.5, 1, 0.5, 1, 0.5], np.float32), 0.7).tolist() == [0, 1, 3]
    spread = np.concatenate([np.full(3000, 0.25), np.ones(1000), np.full(3000, 0.25)]).astype(np.float32)
    assert nucleus(spread, 0.5).tolist() == [*range(1000), *range(3000, 4000)]


def test_nothing_is_lost_when_top_p_is_nearly_one():
    masses = np.full(6000, 1e-30, np.float32)
    masses[17] = 1
    assert nucleus(masses, 1 - 1e-16).tolist() == [17]
    assert nucleus(np.ones(6000, np.float32), 1 - 1e-12).tolist() == list(range(6000))


@pytest.mark.parametrize("size", [1, 5, 128, 300, 4097])
def test_a_draw_inverts_the_running_sum(size):
    masses = masses_of(size, size, 2)
    masses[:: 3 if size > 1 else 2][1:] = 0
    sums = np.cumsum(masses.astype(np.float64)) / masses.sum(dtype=np.float64)
    for uniform in np.random.default_rng(0).random(200):
        place = draw(masses, uniform)
        assert masses[place] > 0
        assert sums[place] >= (1 - uniform) - 1e-12 and (place == 0 or sums[place - 1] <= (1 - uniform) + 1e-12)


def test_what_has_no_mass_is_never_drawn():
    masses = np.zeros(1000, np.float32)
    masses[[300, 700]] = 1
    for uniform, place in [(0.0, 700), (np.nextafter(1, 0), 300), (0.5, 300), (0.4999, 700)]:
        assert draw(masses, uniform) == place
