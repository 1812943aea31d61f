"""resize, inspect --energy and combine on stacked experts: each expert is a weight of its own, all have one rank."""

import numpy as np
import pytest

from mindlora import inspect_adapter, resize_adapter
from mindlora.core.errors import AdapterError, RankMismatchError, ShapeMismatchError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32, to_float32
from mindlora.files.adapters import expert_pairs
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.combine import METHODS, combine_adapters

HOLDER = "model.layers.3.mlp.experts"
GATE_UP, DOWN = f"{HOLDER}.weight1", f"{HOLDER}.weight2"
EXPERTS, HIDDEN, INNER = 3, 11, 4
# path -> [out, in] of one expert; down_proj's smaller side is below the rank of most adapters here.
SIZES = {GATE_UP: (2 * INNER, HIDDEN), DOWN: (HIDDEN, INNER)}


def make(seed=0, rank=6, alpha=9.0, dtype=np.float32, **fields):
    """An adapter whose experts need different ranks; the last one was never trained, so its B is zero."""
    random, tensors = np.random.default_rng(seed), {}
    for path, (out, width) in SIZES.items():
        decay = np.array([[0.3], [0.8], [0.5]]) ** np.arange(rank)
        a, b = random.normal(size=(EXPERTS, rank, width)) * decay[:, :, None], random.normal(size=(EXPERTS, out, rank))
        b[2] = 0
        for half, array in (("A", a), ("B", b)):
            tensors[path, half] = from_float32(array.astype(np.float32), dtype)
    return Adapter(tensors, dict.fromkeys(SIZES, alpha), dialect="test", **fields)


def changes(adapter, path):
    """scale B A of each expert in float64, written out."""
    a, b = (to_float32(adapter.tensors[path, half]).astype(np.float64) for half in "AB")
    return [adapter.scale(path) * b[expert] @ a[expert] for expert in range(EXPERTS)]


def best(matrix, rank):
    u, s, vh = np.linalg.svd(matrix)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def rank_holding(matrix, share):
    squares = np.linalg.svd(matrix, compute_uv=False) ** 2
    return next((k for k in range(len(squares) + 1) if squares[:k].sum() >= share * squares.sum() * (1 - 1e-12)), 0)


@pytest.mark.parametrize("fields, dtype", [({}, np.float32), ({"use_rslora": True}, np.float32), ({}, BFLOAT16)])
def test_each_expert_is_the_best_approximation_at_the_one_rank_of_its_stack(fields, dtype):
    before = make(dtype=dtype, **fields)
    adapter_files.write(before, "wide", to="peft")
    report = resize_adapter("wide", "small", rank=3)
    after, rounding = adapter_files.read("small"), 1e-6 if dtype == np.float32 else 0.01
    assert [(cell.rank_before, cell.rank) for cell in report.cells] == [(6, 3), (6, 3)]
    for cell in report.cells:
        assert after.scale(cell.path) == pytest.approx(before.scale(cell.path))
        assert {array.dtype for array in after.tensors.values()} == {np.dtype(dtype)}
        whole, smaller = np.stack(changes(before, cell.path)), np.stack(changes(after, cell.path))
        for matrix, found in zip(whole, smaller):
            np.testing.assert_allclose(found, best(matrix, 3), rtol=0, atol=rounding * np.abs(whole).max())
        # The error is that of all experts together.
        assert cell.norm == pytest.approx(np.linalg.norm(whole), rel=1e-6)
        assert cell.error == pytest.approx(np.linalg.norm(whole - smaller) / np.linalg.norm(whole), rel=1e-5)


@pytest.mark.parametrize("energy, limit", [(0.9, None), (0.999, None), (0.999, 2), (1.0, None)])
def test_the_rank_holds_the_energy_in_every_expert(energy, limit):
    before = make()
    adapter_files.write(before, "wide", to="peft")
    report = resize_adapter("wide", "small", energy=energy, rank=limit)
    after = adapter_files.read("small")
    for cell in report.cells:
        needed = [rank_holding(matrix, energy) for matrix in changes(before, cell.path)]
        assert len(set(needed)) > 1 and cell.rank == min(max(needed), limit or 6) == after.rank(cell.path)


def test_inspect_shows_the_ranks_that_every_expert_needs():
    before = make()
    adapter_files.write(before, "wide", to="peft")
    for cell in inspect_adapter("wide", energy=True).spectra:
        matrices = changes(before, cell.path)
        needed = [max(rank_holding(matrix, share) for matrix in matrices) for share in (0.9, 0.95, 0.99)]
        assert list(cell.ranks) == needed
        values = np.array(cell.singular_values)
        for rank in range(len(values)):
            left_out = np.linalg.norm([matrix - best(matrix, rank) for matrix in matrices])
            assert np.linalg.norm(values[rank:]) == pytest.approx(left_out, rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_experts_are_combined_each_by_itself(method):
    """As adapters of cells of their own are, which test_combine.py and PEFT judge."""
    adapters, weights = [make(0), make(1, alpha=2.0, use_rslora=True)], [0.7, -1.5]
    options = {} if method in ("linear", "cat", "svd") else {"density": 1.0 if "dare" in method else 0.6}
    if method.endswith("svd"):
        options["svd_rank"] = 5
    combined = combine_adapters(adapters, weights, method, **options)
    assert set(combined.tensors) == set(adapters[0].tensors)
    for path in SIZES:
        assert combined.scale(path) == 1
        for expert in range(EXPERTS):
            lone = [
                Adapter(
                    {("cell", half): adapter.tensors[path, half][expert] for half in "AB"},
                    {"cell": adapter.alphas[path]},
                    adapter.use_rslora,
                )
                for adapter in adapters
            ]
            expected = combine_adapters(lone, weights, method, **options)
            for half in "AB":
                found = combined.tensors[path, half][expert]
                np.testing.assert_array_equal(found, expected.tensors["cell", half])


def test_cat_adds_the_changes_of_experts_of_any_rank_and_is_written_as_pefts_file():
    adapters, weights = [make(0, rank=6), make(1, rank=2), make(2, rank=5)], [1.0, -0.5, 2.0]
    del adapters[1].tensors[DOWN, "A"], adapters[1].tensors[DOWN, "B"]
    adapter_files.write(combine_adapters(adapters, weights, "cat"), "all", to="peft")
    found = adapter_files.read("all")
    for path, holders in ((GATE_UP, (0, 1, 2)), (DOWN, (0, 2))):
        assert found.rank(path) == 13
        parts = [[weights[index] * matrix for matrix in changes(adapters[index], path)] for index in holders]
        np.testing.assert_allclose(changes(found, path), np.sum(parts, axis=0), rtol=1e-4, atol=1e-5)


def test_experts_that_do_not_belong_together_are_refused():
    with pytest.raises(RankMismatchError, match=r"at model\.layers\.3\.mlp\.experts\.weight1 the ranks are 6, 2"):
        combine_adapters([make(), make(rank=2)], [1.0, 1.0], "linear")
    other = make()
    for key, array in other.tensors.items():
        other.tensors[key] = array[:2]
    with pytest.raises(ShapeMismatchError, match=r"\[experts, out, in\] is \[2, 8, 11\] in one and \[3, 8, 11\]"):
        combine_adapters([make(), other], [1.0, 1.0], "cat")
    single = make()
    expert_pairs.unstack_pairs(single)
    for order in ([make(), single], [single, make()]):
        for adapter in order:
            adapter.tensors["wo", "A"], adapter.tensors["wo", "B"] = np.ones((2, 2, 2), np.float32)
            adapter.alphas["wo"] = 1.0
        with pytest.raises(AdapterError, match="^Adapter . .* has one pair for all experts of a layer, and adapter"):
            combine_adapters(order, [1.0, 1.0], "cat")
