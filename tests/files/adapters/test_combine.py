"""combine_adapters: each method against its formula written out, element by element where possible."""

import math

import numpy as np
import pytest

from mindlora.core.errors import AdapterError
from mindlora.files.adapters.combine import METHODS, combine_adapters, keep_largest, keep_random
from tests.support.combinable_adapters import SIZES, W1, WEIGHTS, WK, WQ, make, three_adapters


@pytest.fixture
def three():
    return three_adapters()


def test_the_base_s_own_table_beside_pairs_of_a_head_stays_beside_the_combined_pair():
    """PEFT saves lm_head.base_layer.weight by default; adapters with different ones are of different bases."""
    table = np.random.default_rng(3).normal(size=SIZES[WQ]).astype(np.float32)
    adapters = [make(seed, {WQ: 3}, saved_modules={f"{WQ}.weight": table.copy()}) for seed in (0, 1)] + [
        make(2, {WQ: 1})
    ]
    combined = combine_adapters(adapters, WEIGHTS, "cat")
    np.testing.assert_array_equal(combined.saved_modules[f"{WQ}.weight"], table)
    np.testing.assert_allclose(combined.delta(WQ), weighted_sum(adapters, WQ), atol=1e-5)
    adapters[1].saved_modules[f"{WQ}.weight"] *= 2
    with pytest.raises(AdapterError, match="Adapter 2 and one before it hold different values of .*wq.weight"):
        combine_adapters(adapters, WEIGHTS, "cat")


def holders(adapters, path, weights=None):
    return [(adapter, weight) for adapter, weight in zip(adapters, weights or WEIGHTS) if path in adapter.paths]


def weighted_sum(adapters, path, weights=None):
    return sum(weight * adapter.delta(path).astype(np.float64) for adapter, weight in holders(adapters, path, weights))


def in_factors(adapters, path, rule):
    """Applies ``rule(stack, weights)`` to A and to B of the adapters that hold ``path``, with PEFT's square roots."""
    held = holders(adapters, path)
    scaled = [weight * adapter.scale(path) for adapter, weight in held]
    roots = {"A": [math.sqrt(abs(v)) * (1 if v >= 0 else -1) for v in scaled], "B": [math.sqrt(abs(v)) for v in scaled]}
    return {half: rule([adapter.tensors[path, half] for adapter, _ in held], roots[half]) for half in "AB"}


def added(stack, weights):
    return sum(weight * tensor.astype(np.float64) for tensor, weight in zip(stack, weights))


def elected(stack, weights, majority_sign):
    """TIES after its pruning, one element at a time."""
    result = np.zeros(stack[0].shape)
    for index in np.ndindex(*stack[0].shape):
        values = [float(tensor[index]) for tensor in stack]
        votes = sum(values) if majority_sign == "total" else sum(np.sign(value) for value in values)
        sign = 1 if votes >= 0 else -1
        kept = [weight * value for value, weight in zip(values, weights) if np.sign(value) == sign]
        result[index] = sum(kept) / len(kept) if kept else 0
    return result


def trimmed(tensor, density):
    order = sorted(range(tensor.size), key=lambda index: -abs(tensor.reshape(-1)[index]))
    flat = np.zeros(tensor.size, np.float32)
    for index in order[: int(density * tensor.size)]:
        flat[index] = tensor.reshape(-1)[index]
    return flat.reshape(tensor.shape)


def truncated(matrix, rank):
    u, s, vh = np.linalg.svd(matrix)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def assert_near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("majority_sign", ["total", "frequency"])
@pytest.mark.parametrize("density", [0.35, 0.8, 1.0])
@pytest.mark.parametrize("method", ["linear", "magnitude_prune", "ties"])
def test_methods_on_a_and_b(three, method, density, majority_sign):
    options = {} if method == "linear" else {"density": density, "majority_sign": majority_sign}
    result = combine_adapters(three, WEIGHTS, method, **options)
    share = options.get("density", 1.0)

    def rule(stack, weights):
        stack = [trimmed(tensor, share) for tensor in stack]
        return elected(stack, weights, majority_sign) if method == "ties" else added(stack, weights)

    assert result.paths == [WQ, WK, W1]
    for path in result.paths:
        for half, expected in in_factors(three, path, rule).items():
            assert_near(result.tensors[path, half], expected)
        assert result.rank(path) == 3 and result.scale(path) == 1


@pytest.mark.parametrize("method", ["magnitude_prune_svd", "ties_svd", "dare_linear_svd", "dare_ties_svd"])
@pytest.mark.parametrize("rank", [None, 2, 5])
def test_methods_on_products(three, method, rank):
    density = 1.0 if "dare" in method else 0.4
    result = combine_adapters(three, WEIGHTS, method, density=density, svd_rank=rank)
    for path in result.paths:
        held = holders(three, path)
        stack = [trimmed(adapter.delta(path), density) for adapter, _ in held]
        weights = [weight for _, weight in held]
        merged = elected(stack, weights, "total") if "ties" in method else added(stack, weights)
        assert result.rank(path) == (rank or 3)
        assert_near(result.delta(path), truncated(merged, rank or 3))


@pytest.mark.parametrize("majority_sign", ["total", "frequency"])
def test_dare_of_density_one_prunes_nothing(three, majority_sign):
    linear = combine_adapters(three, WEIGHTS, "linear")
    assert_same(combine_adapters(three, WEIGHTS, "dare_linear", density=1.0), linear)
    ties = combine_adapters(three, WEIGHTS, "ties", density=1.0, majority_sign=majority_sign)
    assert_same(combine_adapters(three, WEIGHTS, "dare_ties", density=1.0, majority_sign=majority_sign), ties)


def assert_same(found, expected):
    assert list(found.tensors) == list(expected.tensors)
    for key, array in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[key], array)


def test_dare_keeps_the_share_and_the_expectation():
    tensor = np.random.default_rng(0).normal(size=(400, 500)).astype(np.float32)
    kept = keep_random(tensor, 0.3, np.random.default_rng(1))
    there = kept != 0
    assert abs(there.mean() - 0.3) < 0.005
    np.testing.assert_array_equal(kept[there], (tensor / np.float32(0.3))[there])
    # Over many draws each element comes back; one draw of 200,000 elements has a deviation of 0.5 % of their size.
    draws = np.mean([keep_random(tensor, 0.3, np.random.default_rng(seed)) for seed in range(40)], axis=0)
    assert abs(np.corrcoef(draws.ravel(), tensor.ravel())[0, 1]) > 0.95
    assert abs((draws * tensor).sum() / (tensor * tensor).sum() - 1) < 0.01
    # Rows and columns are affected alike.
    assert there.mean(axis=0).min() > 0.15 and there.mean(axis=1).max() < 0.45


def test_dare_of_a_density_near_one_still_prunes():
    kept = keep_random(np.ones((100, 100), np.float32), 0.95, np.random.default_rng(0))
    assert 400 < np.count_nonzero(kept == 0) < 600


def test_dare_draws_anew_for_each_tensor_and_by_the_seed():
    ones = make(0, {WQ: 3, WK: 3})
    for key in ones.tensors:
        ones.tensors[key] = np.ones_like(ones.tensors[key])
    first, again, other = (
        combine_adapters([ones, ones], [1.0, 1.0], "dare_linear", density=0.5, seed=seed) for seed in (3, 3, 4)
    )
    assert_same(again, first)
    assert any((other.tensors[key] != first.tensors[key]).any() for key in first.tensors)
    # Two adapters with the same mask would give 0 or 2 / density; with two masks, half of that as well.
    root = math.sqrt(ones.scale(WQ))
    assert {round(float(value / root), 3) for value in first.tensors[WQ, "A"].ravel()} == {0.0, 2.0, 4.0}


@pytest.mark.parametrize("ranks", [(3, 3, 3), (2, 5, 1)])
def test_cat_is_exact_at_any_ranks(ranks):
    adapters = [
        make(0, {WQ: ranks[0], WK: ranks[0]}, 6.0),
        make(1, {WQ: ranks[1]}, 2.0),
        make(2, {WQ: ranks[2], WK: ranks[2], W1: ranks[2]}, 3.0),
    ]
    result = combine_adapters(adapters, WEIGHTS, "cat")
    for path in result.paths:
        assert result.rank(path) == sum(ranks) and result.scale(path) == 1
        assert_near(result.delta(path), weighted_sum(adapters, path))
    np.testing.assert_array_equal(
        result.tensors[WQ, "B"], np.concatenate([adapter.tensors[WQ, "B"] for adapter in adapters], axis=1)
    )
    np.testing.assert_array_equal(result.tensors[W1, "A"][ranks[2] :], 0)


def test_cat_has_one_rank_where_the_ranks_of_an_adapter_differ():
    adapters = [make(0, {WQ: 2, WK: 4}), make(1, {WQ: 3, WK: 1})]
    result = combine_adapters(adapters, [1.0, 2.0], "cat")
    for path in (WQ, WK):
        assert result.rank(path) == 4 + 3
        assert_near(result.delta(path), weighted_sum(adapters, path, [1.0, 2.0]))


@pytest.mark.parametrize("svd_rank", [None, 1, 2, 4, 6])
def test_svd_is_the_best_of_its_rank(svd_rank):
    adapters = [make(0, {WQ: 2, WK: 2}, 6.0), make(1, {WQ: 4, WK: 4}, 2.0), make(2, {WQ: 1, W1: 1}, 3.0)]
    result = combine_adapters(adapters, WEIGHTS, "svd", svd_rank=svd_rank)
    for path in result.paths:
        rank = min(svd_rank or 4, *SIZES[path])
        assert result.rank(path) == rank and result.scale(path) == 1
        assert_near(result.delta(path), truncated(weighted_sum(adapters, path), rank))
    a, b = result.tensors[WQ, "A"], result.tensors[WQ, "B"]
    if svd_rank != 6:
        # PEFT's split: V^T has orthonormal rows, and B carries the singular values, the largest first.
        np.testing.assert_allclose(a @ a.T, np.eye(len(a)), atol=1e-5)
        sizes = np.linalg.norm(b, axis=0)
        assert_near(sizes, np.linalg.svd(weighted_sum(adapters, WQ), compute_uv=False)[: len(a)])


def test_svd_of_ranks_above_the_size_of_the_cell():
    adapters = [make(0, {WK: 9}), make(1, {WK: 8})]
    result = combine_adapters(adapters, [1.0, 1.0], "svd", svd_rank=64)
    assert result.rank(WK) == 6
    assert_near(result.delta(WK), weighted_sum(adapters, WK, [1.0, 1.0]))


@pytest.mark.parametrize("method", METHODS)
def test_one_adapter_comes_back_with_its_weight(method):
    adapter = make(0, {WQ: 3})
    pruning = {"density": 1.0} if "prune" in method or "ties" in method or "dare" in method else {}
    result = combine_adapters([adapter], [-2.0], method, **pruning)
    # TIES elects the sign without the weight, so this holds for a negative weight too.
    assert_near(result.delta(WQ), -2 * adapter.delta(WQ))


def test_one_adapter_is_cut_to_a_lower_rank():
    adapter = make(0, {WQ: 5})
    result = combine_adapters([adapter], [1.0], "svd", svd_rank=2)
    assert result.rank(WQ) == 2
    assert_near(result.delta(WQ), truncated(adapter.delta(WQ), 2))


@pytest.mark.parametrize("method", ["linear", "cat", "svd"])
def test_a_weight_of_zero_leaves_an_adapter_out_of_a_sum(method):
    adapters = [make(0, {WQ: 3}), make(1, {WQ: 3})]
    assert_near(combine_adapters(adapters, [1.0, 0.0], method).delta(WQ), adapters[0].delta(WQ))


def test_ties_counts_pruned_elements_in_nobodys_favour():
    paths = {WQ: 1}
    first, second = make(0, paths, alpha=1.0), make(1, paths, alpha=1.0)
    first.tensors[WQ, "A"][:] = [[5, -4, 3, 0.1, 0, 0, 0, 0, 0, 0]]
    second.tensors[WQ, "A"][:] = [[-1, -4, -0.2, 0.1, 0, 0, 0, 0, 0, 9]]
    result = combine_adapters([first, second], [1.0, 1.0], "ties", density=0.3)
    # Kept: 5, -4, 3 and 9, -4, -1. Conflict at the first element: 5 wins alone and is not halved.
    np.testing.assert_allclose(result.tensors[WQ, "A"], [[5, -4, 3, 0, 0, 0, 0, 0, 0, 9]])


def test_signs_are_elected_without_the_weights():
    first, second = make(0, {WQ: 1}, alpha=1.0), make(1, {WQ: 1}, alpha=1.0)
    first.tensors[WQ, "A"][:], second.tensors[WQ, "A"][:] = 2.0, -3.0
    result = combine_adapters([first, second], [100.0, 1.0], "ties", density=1.0)
    np.testing.assert_allclose(result.tensors[WQ, "A"], -3.0)
    # With one vote each, the positive sign wins.
    result = combine_adapters([first, second], [100.0, 1.0], "ties", density=1.0, majority_sign="frequency")
    np.testing.assert_allclose(result.tensors[WQ, "A"], 20.0)


@pytest.mark.parametrize("density, kept", [(0.5, 5), (0.59, 5), (0.1, 1), (0.05, 0), (1.0, 10)])
def test_density_counts_elements_rounded_down(density, kept):
    tensor = np.arange(-5, 5, dtype=np.float32).reshape(2, 5) + 0.25
    result = keep_largest(tensor, density)
    assert np.count_nonzero(result) == kept
    np.testing.assert_array_equal(result, trimmed(tensor, density))


@pytest.mark.parametrize("method", ["linear", "cat", "svd"])
def test_rslora_enters_by_its_scale_and_does_not_come_back(method):
    adapters = [make(0, {WQ: 4}, 6.0, use_rslora=True), make(1, {WQ: 4}, 6.0)]
    assert adapters[0].scale(WQ) == 3.0
    result = combine_adapters(adapters, [1.0, 1.0], method)
    assert result.use_rslora is False and result.scale(WQ) == 1 and result.alphas == {WQ: result.rank(WQ)}
    if method == "linear":
        np.testing.assert_allclose(
            result.tensors[WQ, "A"],
            math.sqrt(3) * adapters[0].tensors[WQ, "A"] + math.sqrt(1.5) * adapters[1].tensors[WQ, "A"],
            rtol=1e-5,
            atol=1e-6,
        )


def test_half_precision_is_widened():
    from mindlora.core.numerics.dtypes import BFLOAT16, from_float32

    adapters = [make(0, {WQ: 3}), make(1, {WQ: 3}, dtype=np.float16)]
    narrow = make(0, {WQ: 3})
    narrow.tensors = {key: from_float32(array, BFLOAT16) for key, array in narrow.tensors.items()}
    result = combine_adapters([narrow, adapters[1]], [1.0, 1.0], "cat")
    assert {array.dtype for array in result.tensors.values()} == {np.dtype(np.float32)}
    assert_near(result.delta(WQ), narrow.delta(WQ) + adapters[1].delta(WQ))


def test_the_adapters_are_left_as_they_were(three):
    before = [{key: array.copy() for key, array in adapter.tensors.items()} for adapter in three]
    for method in ("linear", "cat", "svd", "ties"):
        combine_adapters(three, WEIGHTS, method, **({"density": 0.5} if method == "ties" else {}))
    for adapter, tensors in zip(three, before):
        for key, array in tensors.items():
            np.testing.assert_array_equal(adapter.tensors[key], array)


def test_what_is_known_of_the_base_is_kept():
    fingerprint = {"shapes": "a", "values": "b"}
    adapters = [
        make(0, {WQ: 2}, dropout=0.1, fingerprint=fingerprint),
        make(1, {WQ: 2}, dropout=0.3, base_model="llama", fingerprint=dict(fingerprint)),
    ]
    result = combine_adapters(adapters, [1.0, 1.0], "linear")
    assert (result.base_model, result.fingerprint, result.dropout) == ("llama", fingerprint, 0.1)
    adapters[1].fingerprint = {"shapes": "a", "values": "c"}
    assert combine_adapters(adapters, [1.0, 1.0], "linear").fingerprint is None
