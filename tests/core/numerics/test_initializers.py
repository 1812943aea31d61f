"""Initializers of A and B in NumPy: what each decomposition promises, and what is left of the base."""

import math

import numpy as np
import pytest

from mindlora.core.errors import ConfigError
from mindlora.core.numerics import initializers, nf4
from mindlora.core.numerics.dtypes import from_float32, named_dtype, to_float32
from mindlora.core.numerics.initializers import PrincipalComponents, vera_projection

SCALE = 1.5
# What PyTorch draws for the key 0.
A = [
    [-0.010587962344288826, 0.75864577293396, -1.1639615297317505],
    [-1.040774941444397, -0.5446904897689819, 0.3792317807674408],
]
B = [[-0.03431743383407593, 1.3733248710632324], [-0.15370918810367584, 0.4583223760128021]]
FEATURES = 12


@pytest.fixture(params=[(24, 40), (40, 24), (16, 16)], ids=str)
def weight(request):
    return np.random.default_rng(1).normal(size=request.param).astype(np.float32)


def decaying(shape, seed=0):
    """Returns a matrix with singular values that each fall by a tenth from the last, much as in trained weights."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(side, min(shape))))[0] for side in shape)
    return ((u * 0.9 ** np.arange(min(shape))) @ v.T).astype(np.float32)


@pytest.mark.parametrize(
    "name, known, changes, whole",
    [
        ("kaiming", True, False, False),
        ("gaussian", True, False, False),
        ("orthogonal", True, False, True),
        ("pissa", True, True, True),
        ("pissa_niter_4", True, True, True),
        ("pissa_niter_16", True, True, True),
        ("olora", True, True, True),
        ("mica", True, False, True),
        ("loftq", True, False, False),
        ("pissa_niter_N", False, False, False),
        ("pissa_niter_", False, False, False),
        ("pissa_niter_4x", False, False, False),
        ("PiSSA", False, False, False),
        ("loftq_iter_1", True, False, False),
        ("loftq_iter_12", True, False, False),
        ("loftq_iter_N", False, False, False),
        ("loftq_iter_0", False, False, False),
        ("loftq_iter_", False, False, False),
        ("", False, False, False),
    ],
)
def test_names(name, known, changes, whole):
    assert initializers.is_known(name) == known
    assert initializers.changes_base(name) == changes
    assert initializers.needs_whole_matrices(name) == whole


@pytest.mark.parametrize("name, turns", [("loftq", 1), ("loftq_iter_1", 1), ("loftq_iter_12", 12)])
def test_loftqs_iterations_by_its_name(name, turns):
    assert initializers.is_loftq(name) and initializers.loftq_iterations(name) == turns
    assert not any(initializers.is_loftq(other) for other in (None, "", "loftq_iter_0", "loftq_niter_4", "pissa"))


def test_without_a_name_the_base_stays():
    assert not initializers.changes_base(None) and not initializers.needs_whole_matrices(None)


@pytest.mark.parametrize("rank", [1, 5, 16])
def test_pissa_is_the_best_approximation_shared_evenly(weight, rank):
    a, b = initializers.pissa(weight, rank, SCALE)
    assert a.shape == (rank, weight.shape[1]) and b.shape == (weight.shape[0], rank)
    assert a.dtype == b.dtype == np.float32
    u, s, vt = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(SCALE * b @ a, (u[:, :rank] * s[:rank]) @ vt[:rank], atol=1e-5)
    # Each direction has the same length in A and in B.
    np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0), rtol=1e-4)
    # The residual has the other singular values.
    left = np.linalg.svd(initializers.residual(weight, a, b, SCALE), compute_uv=False)
    np.testing.assert_allclose(left[: len(s) - rank], s[rank:], atol=1e-5)


def test_randomized_pissa_nears_the_exact_one_with_each_iteration():
    weight = decaying((96, 64))
    a, b = initializers.pissa(weight, 8, SCALE)
    exact = b @ a
    errors = []
    for iterations in (0, 1, 4, 16):
        a, b = initializers.pissa(weight, 8, SCALE, iterations)
        assert a.shape == (8, 64) and b.shape == (96, 8) and a.dtype == b.dtype == np.float32
        errors.append(np.linalg.norm(b @ a - exact) / np.linalg.norm(exact))
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.01 and errors[2] < 0.01 and errors[3] < 1e-5


def test_randomized_pissa_is_the_same_each_time_and_for_the_transpose():
    weight = decaying((48, 32))
    first, second = initializers.pissa(weight, 4, SCALE, 2), initializers.pissa(weight, 4, SCALE, 2)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(first, second))
    a, b = initializers.pissa(np.ascontiguousarray(weight.T), 4, SCALE, 2)
    np.testing.assert_allclose(a, first[1].T, atol=1e-5)
    np.testing.assert_allclose(b, first[0].T, atol=1e-5)


@pytest.mark.parametrize("iterations", [None, 3])
def test_pissa_at_full_rank(weight, iterations):
    rank = min(weight.shape)
    a, b = initializers.pissa(weight, rank, SCALE, iterations)
    np.testing.assert_allclose(SCALE * b @ a, weight, atol=1e-5)
    with pytest.raises(
        ConfigError,
        match=rf"^lora_init is 'pissa' and lora_rank is {rank + 1}, more than the smaller "
        r"side of a weight \[",
    ):
        initializers.pissa(weight, rank + 1, SCALE, iterations)


def test_olora_is_orthonormal_and_takes_the_first_rows_of_r(weight):
    a, b = initializers.olora(weight, 5, SCALE)
    np.testing.assert_allclose(b.T @ b, np.eye(5), atol=1e-5)
    np.testing.assert_allclose(np.tril(a[:, :5], -1), 0, atol=1e-6)
    # The first columns of W depend only on the first columns of Q.
    np.testing.assert_allclose((b @ a)[:, :5], weight[:, :5], atol=1e-5)
    with pytest.raises(ConfigError, match="^lora_init is 'olora' and lora_rank is 17"):
        initializers.olora(weight[:16], 17, SCALE)


def test_mica_takes_the_directions_of_the_smallest_singular_values(weight):
    a, b = initializers.mica(weight, 5)
    assert a.shape == (5, weight.shape[1]) and not a.any()
    assert b.shape == (weight.shape[0], 5) and initializers.has_orthonormal_columns(b)
    smallest = np.linalg.svd(weight.astype(np.float64), compute_uv=False)[-5:]
    np.testing.assert_allclose(np.linalg.norm(weight.T @ b, axis=0), smallest, rtol=1e-4)
    with pytest.raises(ConfigError, match="^lora_init is 'mica' and lora_rank is 17"):
        initializers.mica(weight[:16], 17)


@pytest.mark.parametrize("dtype, orthonormal", [("float16", True), ("bfloat16", True), (None, False)])
def test_columns_are_orthonormal_up_to_rounding(weight, dtype, orthonormal):
    b = initializers.mica(weight, 5)[1]
    rounded = b * np.float32(1.02) if dtype is None else to_float32(from_float32(b, named_dtype(dtype)))
    assert initializers.has_orthonormal_columns(rounded) == orthonormal


@pytest.mark.parametrize(
    "name, made",
    [
        ("pissa", lambda w: initializers.pissa(w, 4, SCALE)),
        ("pissa_niter_0", lambda w: initializers.pissa(w, 4, SCALE, 0)),
        ("pissa_niter_7", lambda w: initializers.pissa(w, 4, SCALE, 7)),
        ("olora", lambda w: initializers.olora(w, 4, SCALE)),
        ("mica", lambda w: initializers.mica(w, 4)),
    ],
)
def test_an_initializer_by_its_name(weight, name, made):
    for one, other in zip(initializers.of_base(name, weight, 4, SCALE), made(weight)):
        assert one.tobytes() == other.tobytes()


def test_residual(weight):
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(3, weight.shape[1])), rng.normal(size=(weight.shape[0], 3))
    expected = weight.astype(np.float64) - SCALE * b @ a
    np.testing.assert_allclose(
        initializers.residual(weight, a.astype(np.float32), b.astype(np.float32), SCALE), expected, atol=1e-5
    )


def test_the_product_of_an_orthogonal_pair_is_zero():
    a, b = initializers.orthogonal(8, 300, 500, np.random.default_rng(3))
    assert a.shape == (8, 300) and b.shape == (500, 8) and a.dtype == b.dtype == np.float32
    np.testing.assert_allclose(b @ a, 0, atol=1e-6)
    assert np.linalg.matrix_rank(a) == np.linalg.matrix_rank(b) == 4
    # Half of r directions of deviation 1/10 each.
    np.testing.assert_allclose([a.std(), b.std()], 0.1 * np.sqrt(0.5), rtol=0.1)
    with pytest.raises(ConfigError, match="^lora_init is 'orthogonal' and lora_rank is 7: .* needs an even rank"):
        initializers.orthogonal(7, 30, 50, np.random.default_rng(3))


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_loftq_is_nearer_to_the_base_than_quantizing_alone(scale):
    weight = np.random.default_rng(4).normal(size=(64, 128)).astype(np.float32)
    plain = np.linalg.norm(weight - nf4.dequantize(nf4.quantize(weight)))
    errors = []
    for iterations in (1, 5):
        quantized, a, b = initializers.loftq(weight, 8, nf4.quantize, nf4.dequantize, iterations, scale)
        assert isinstance(quantized, nf4.Nf4Array) and a.shape == (8, 128) and b.shape == (64, 8)
        errors.append(np.linalg.norm(weight - nf4.dequantize(quantized) - scale * b @ a))
    assert errors[1] < errors[0] < plain


def test_loftqs_iterations():
    """Compared with two iterations written out, with rounding to whole numbers as the quantizer."""
    weight = 3 * np.random.default_rng(5).normal(size=(12, 9)).astype(np.float32)

    def best(matrix):
        u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
        return (u[:, :2] * s[:2]) @ vt[:2]

    first = best(weight - np.rint(weight))
    expected = np.rint(weight - first)
    quantized, a, b = initializers.loftq(weight, 2, np.rint, lambda q: q, 2)
    np.testing.assert_array_equal(quantized, expected)
    np.testing.assert_allclose(b @ a, best(weight - expected), atol=1e-5)
    with pytest.raises(ConfigError, match="^iterations of loftq is 0: it must be a whole number of at least 1"):
        initializers.loftq(weight, 2, np.rint, lambda q: q, 0)


def test_numbers_are_pytorch_s():
    """torch.empty(shape).uniform_(-bound, bound, generator=manual_seed(0)): (2, 3) within 2 ** 0.5, (2, 2) 3 ** 0.5."""
    a, b = vera_projection(0, 2, 3, 2)
    np.testing.assert_array_equal(a, np.array(A, np.float32))
    np.testing.assert_array_equal(b, np.array(B, np.float32))
    # PyTorch's Mersenne Twister takes 32 bits of a seed.
    np.testing.assert_array_equal(vera_projection(2**32 + 5, 2, 3, 2)[0], vera_projection(5, 2, 3, 2)[0])


def test_distribution_is_he_uniform():
    a, b = vera_projection(1, 16, 600, 300)
    for array, fan_in in ((a, 600), (b, 16)):
        bound = math.sqrt(6 / fan_in)
        assert array.dtype == np.float32 and 0.99 * bound < np.abs(array).max() <= bound * (1 + 1e-6)
        np.testing.assert_allclose(array.std(), bound / math.sqrt(3), rtol=0.03)
        assert abs(array.mean()) < 0.05 * bound
    assert np.abs(vera_projection(2, 16, 600, 300)[0] - a).max() > 0.1 * np.abs(a).max()


def rows_of(count, seed=0):
    """Rows with a mean, whose directions differ in strength."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(count, FEATURES)) * 0.7 ** np.arange(FEATURES) + 3).astype(np.float32)


def fitted(rows, count, *sizes):
    found = PrincipalComponents(count)
    for batch in np.split(rows, np.cumsum(sizes)):
        found.update(batch)
    return found


@pytest.mark.parametrize("sizes", [(), (20,), (13, 40, 17)])
def test_all_components_are_those_of_all_rows(sizes):
    """Where no component is dropped, batches lose nothing."""
    rows = rows_of(101)
    found = fitted(rows, FEATURES, *sizes)
    centered = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    _, values, vectors = np.linalg.svd(centered, full_matrices=False)
    np.testing.assert_allclose(np.abs((found.components * vectors).sum(axis=1)), 1, atol=1e-6)
    np.testing.assert_allclose(found.explained, values**2 / (values**2).sum(), rtol=1e-5)


def test_leading_components_are_nearly_those_of_all_rows():
    rows = rows_of(400)
    found, whole = fitted(rows, 3, 100, 100, 100), fitted(rows, FEATURES)
    assert found.components.shape == (3, FEATURES) and found.components.dtype == np.float32
    assert np.abs((found.components * whole.components[:3]).sum(axis=1)).min() > 0.999
    np.testing.assert_allclose(found.explained, whole.explained[:3], rtol=0.02)
    assert (found.components[np.arange(3), np.abs(found.components).argmax(axis=1)] > 0).all()


def test_rows_that_are_all_the_same_explain_nothing():
    found = PrincipalComponents(2)
    found.update(np.ones((5, FEATURES), np.float32))
    assert found.explained.tolist() == [0, 0]
