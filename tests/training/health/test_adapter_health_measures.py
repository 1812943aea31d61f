"""The numbers of AdapterHealth against numpy.linalg.svd of the whole scale B A."""

import json

import numpy as np
import pytest

from mindlora.training.health.adapter_health import CellValues, change_factors, effective_rank, measure
from mindlora.training.health.report import CellHealth, Finding, HealthReport, PartHealth

SCALE = 1.5
# rank, in_channels, out_channels; the last rank is larger than a side.
SHAPES = [(1, 7, 5), (3, 11, 4), (8, 33, 17), (16, 40, 129), (5, 6, 3)]


def values(a, b, initial=None, **known):
    """CellValues of a linear cell."""
    return CellValues(len(a), {"A": a, "B": b}, "B", change_factors(a, b, initial), SCALE, **known)


def health(cell):
    return measure(1, {"wq": cell}).cells["wq"]


def pair(rank, in_channels, out_channels, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in ((rank, in_channels), (out_channels, rank)))


def oracle(change):
    """Effective rank and norm of a matrix in float64."""
    singular = np.linalg.svd(change, compute_uv=False)
    shares = singular / singular.sum()
    shares = shares[shares > 0]
    return np.exp(-(shares * np.log(shares)).sum()), np.sqrt((singular**2).sum())


def product(a, b):
    return SCALE * b.astype(np.float64) @ a.astype(np.float64)


@pytest.mark.parametrize("rank, in_channels, out_channels", SHAPES)
def test_effective_rank_and_change(rank, in_channels, out_channels):
    a, b = pair(rank, in_channels, out_channels)
    found = health(values(a, b, weight_norm=4.0))
    rank_expected, norm_expected = oracle(product(a, b))
    np.testing.assert_allclose(found.effective_rank, rank_expected, rtol=1e-6)
    np.testing.assert_allclose(found.change_norm, norm_expected, rtol=1e-12)
    assert found.change == found.change_norm / 4.0 and found.rank == rank
    expected = np.linalg.svd(product(a, b), compute_uv=False)
    np.testing.assert_allclose(found.singular_values[: len(expected)], expected[:rank], rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("decay", [0.5, 1e-1, 1e-2])
def test_spectra_that_fall_steeply(decay):
    """Each direction has ``decay`` times the size of the one before."""
    a, b = pair(6, 31, 22)
    left, right = np.linalg.qr(b)[0], np.linalg.qr(a.T)[0].T
    b = (left * decay ** np.arange(6)).astype(np.float32)
    found = health(values(right, b))
    assert found.effective_rank < 4.5
    np.testing.assert_allclose(found.effective_rank, oracle(product(right, b))[0], rtol=1e-6)


@pytest.mark.parametrize("moved", [1e-1, 1e-5])
def test_change_from_an_initial_pair_however_little_it_moved(moved):
    a0, b0 = pair(4, 30, 21)
    a, b = ((half + moved * new).astype(np.float32) for half, new in zip((a0, b0), pair(4, 30, 21, seed=1)))
    found = health(values(a, b, initial=(a0, b0)))
    rank_expected, norm_expected = oracle(product(a, b) - product(a0, b0))
    np.testing.assert_allclose(found.effective_rank, rank_expected, rtol=1e-6)
    np.testing.assert_allclose(found.change_norm, norm_expected, rtol=1e-7)
    assert found.rank == 8
    assert health(values(a0, b0, initial=(a0, b0))).change_norm == 0


def test_convolution_is_a_matrix_of_its_rows():
    a, b = pair(3, 2 * 9, 5)
    found = health(values(a.reshape(3, 2, 3, 3), b.reshape(5, 3, 1, 1)))
    np.testing.assert_allclose(found.effective_rank, oracle(product(a, b))[0], rtol=1e-6)
    assert found.parts["A"].size == 54


def test_cells_of_several_ranks_are_not_mixed_up():
    pairs = {f"layers.{i}.wq": pair(rank, 20 + i, 15, seed=i) for i, rank in enumerate((4, 2, 4, 7, 2))}
    report = measure(7, {path: values(a, b) for path, (a, b) in pairs.items()})
    assert report.step == 7 and list(report.cells) == list(pairs) and report.findings == []
    for path, (a, b) in pairs.items():
        np.testing.assert_allclose(report.cells[path].effective_rank, oracle(product(a, b))[0], rtol=1e-6)


def test_zero_b_changes_nothing_and_has_no_rank():
    a, b = pair(3, 8, 6)
    found = health(values(a, np.zeros_like(b), weight_norm=2.0))
    assert found.effective_rank is None and found.change_norm == found.change == 0
    assert set(found.singular_values) == {0}
    assert found.parts["B"] == PartHealth(size=18, norm=0.0, zeros=1.0)


def test_parts():
    a, b = pair(2, 6, 4)
    before = {"A": a.copy(), "B": np.zeros_like(b)}
    a = a + np.float32(0.25)
    a[0, :3] = 0
    parts = health(values(a, b, before=before, gradient_norms={"A": 3.0, "B": 4.0})).parts
    np.testing.assert_allclose(parts["A"].norm, np.linalg.norm(a), rtol=1e-6)
    np.testing.assert_allclose(
        parts["A"].update, np.linalg.norm(a - before["A"]) / np.linalg.norm(before["A"]), rtol=1e-6
    )
    assert parts["A"].zeros == 0.25 and parts["B"].zeros == 0
    # A part that was zero has no relative update.
    assert parts["B"].update is None and parts["B"].gradient_norm == 4.0
    assert health(values(a, b, gradient_norms={"A": 3.0, "B": 4.0})).gradient_norm == 5.0
    assert health(values(a, b)).gradient_norm is None


def test_values_that_are_not_finite_leave_other_cells_alone():
    a, b = pair(3, 8, 6)
    broken = a.copy()
    broken[1, 2] = np.nan
    report = measure(1, {"broken": values(broken, b), "sound": values(a, b)})
    assert np.isnan(report.cells["broken"].parts["A"].norm) and report.cells["broken"].effective_rank is None
    np.testing.assert_allclose(report.cells["sound"].change_norm, oracle(product(a, b))[1], rtol=1e-12)


def test_without_a_product_only_the_parts_are_measured():
    vectors = {"lambda_d": np.full(3, 0.1, np.float32), "lambda_b": np.zeros(8, np.float32)}
    found = health(CellValues(3, vectors, "lambda_b"))
    assert (found.rank, found.effective_rank, found.change_norm, found.change) == (3, None, None, None)
    assert found.parts["lambda_b"].zeros == 1 and found.zero_part == "lambda_b"


def test_effective_rank_of_equal_values_is_their_number():
    assert effective_rank(np.array([2.0, 2.0, 2.0, 0.0])) == pytest.approx(3)
    assert effective_rank(np.zeros(2)) is None


def test_report_as_json_has_no_nan():
    part = PartHealth(size=2, norm=float("nan"), zeros=0.5, gradient_norm=float("inf"))
    report = HealthReport(3, {"wq": CellHealth(1, "B", {"A": part})}, [Finding("rule", "wq", "message", "advice")])
    text = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(text) == {
        "step": 3,
        "cells": {
            "wq": {
                "rank": 1,
                "zero_part": "B",
                "parts": {"A": {"size": 2, "norm": None, "zeros": 0.5, "gradient_norm": None, "update": None}},
                "effective_rank": None,
                "change_norm": None,
                "change": None,
                "singular_values": None,
            }
        },
        "findings": [{"rule": "rule", "path": "wq", "message": "message", "advice": "advice"}],
    }
