"""Principal components batch by batch, against one decomposition of all rows."""

import numpy as np
import pytest

from mindlora.core.numerics.principal_components import PrincipalComponents

FEATURES = 12


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
