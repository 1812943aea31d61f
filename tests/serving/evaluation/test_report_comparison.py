"""Comparison: the best of several adapters by held-out rows, and those that are not told apart from it."""

import numpy as np

from mindlora.serving.evaluation.report import compare

ROWS = 40
COUNTS = np.full(ROWS, 10.0)


def losses(mean, seed):
    """Sums of ten losses with this mean in each row."""
    return 10 * mean + np.random.default_rng(seed).normal(0, 1, ROWS)


def test_the_best_comes_first_and_others_are_judged_by_the_same_rows():
    rows = losses(1.0, 0)
    near = rows + np.random.default_rng(1).normal(0.01, 1, ROWS)
    found = compare({"far": rows + 5, "best": rows, "near": near}, COUNTS, {"far": 3, "best": 6, "near": 9}, "rows")
    assert found.best in ("best", "near")
    titles, *table = found.table()
    assert table[0][0] == found.best and table[-1][0] == "far" and table[-1][-1] == "worse"
    assert table[1][-1] == "not told apart" and table[1][3] in "69"
    assert len({len(row) for row in (titles, *table)}) == 1
    assert "do not tell" in found.sentence() and "far" not in found.sentence()
    assert found.measure.differences["far"].value > 0.4


def test_adapters_without_a_finite_loss_are_left_out():
    rows = losses(1.0, 0)
    found = compare({"a": np.full(ROWS, np.nan), "b": rows}, COUNTS, {"a": 1, "b": 2}, "rows")
    assert found.best == "b" and "all others" not in found.sentence() and len(found.table()) == 2
    assert compare({"a": np.full(ROWS, np.nan)}, COUNTS, {"a": 1}, "rows") is None
