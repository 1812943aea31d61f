"""Pairs of single experts to stacked ones and back: what they do to each expert stays the same."""

import numpy as np
import pytest

from mindlora.core.errors import AdapterError, LoraError, MissingTensorsError, RankMismatchError, ShapeMismatchError
from mindlora.files.adapters import expert_pairs
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.compare import compare_adapters
from mindlora.files.adapters.convert import convert_adapter
from mindlora.files.adapters.inspect import inspect_adapter

HOLDER = "model.layers.3.mlp.experts"
EXPERTS, HIDDEN, INNER, RANK = 3, 7, 5, 2
SIZES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def of_single_experts(shared=False, seed=0, dtype=np.float32, use_rslora=False):
    """An adapter with a pair for each expert; ``shared``: gate_proj and up_proj have one A."""
    rng, tensors, alphas = np.random.default_rng(seed), {}, {}
    for expert in range(EXPERTS):
        for cell, (rows, columns) in SIZES.items():
            path = f"{HOLDER}.{expert}.{cell}"
            tensors[path, "A"] = rng.normal(size=(RANK, columns)).astype(dtype)
            tensors[path, "B"] = rng.normal(size=(rows, RANK)).astype(dtype)
            alphas[path] = 3.0
        if shared:
            tensors[f"{HOLDER}.{expert}.up_proj", "A"] = tensors[f"{HOLDER}.{expert}.gate_proj", "A"]
    return Adapter(tensors, alphas, use_rslora=use_rslora, dialect="test")


def of_stacked_experts(seed=0, rank=RANK):
    rng, tensors = np.random.default_rng(seed), {}
    for leaf, rows, columns in (("weight1", 2 * INNER, HIDDEN), ("weight2", HIDDEN, INNER)):
        tensors[f"{HOLDER}.{leaf}", "A"] = rng.normal(size=(EXPERTS, rank, columns)).astype(np.float32)
        tensors[f"{HOLDER}.{leaf}", "B"] = rng.normal(size=(EXPERTS, rows, rank)).astype(np.float32)
    return Adapter(tensors, dict.fromkeys((f"{HOLDER}.weight1", f"{HOLDER}.weight2"), 3.0), dialect="test")


def changes(adapter):
    """Returns the change [out, in] of each expert's gate_up_proj and down_proj, whatever the form."""
    found = {}
    for expert in range(EXPERTS):
        if f"{HOLDER}.{expert}.down_proj" in adapter.paths:
            own = {cell: adapter.delta(f"{HOLDER}.{expert}.{cell}") for cell in SIZES}
            found[expert] = np.concatenate([own["gate_proj"], own["up_proj"]]), own["down_proj"]
        else:
            stacks = [
                adapter.delta(f"{HOLDER}.{leaf}").reshape(EXPERTS, -1, size)
                for leaf, size in (("weight1", 2 * INNER), ("weight2", HIDDEN))
            ]
            found[expert] = tuple(stack[expert].T for stack in stacks)
    return found


def assert_same_changes(found, expected):
    for expert in range(EXPERTS):
        for one, other in zip(found[expert], expected[expert]):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def same_bits(one, other):
    assert one.tensors.keys() == other.tensors.keys() and one.alphas == other.alphas
    for key, array in one.tensors.items():
        assert array.dtype == other.tensors[key].dtype
        np.testing.assert_array_equal(array, other.tensors[key])


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("shared, rank", [(True, RANK), (False, 2 * RANK)])
def test_stacking_and_splitting_keep_every_change_and_every_bit(shared, rank, use_rslora):
    single = of_single_experts(shared, use_rslora=use_rslora)
    expected = changes(single)
    expert_pairs.stack_pairs(single)
    assert single.paths == [f"{HOLDER}.weight1", f"{HOLDER}.weight2"]
    assert (single.rank(f"{HOLDER}.weight1"), single.rank(f"{HOLDER}.weight2")) == (rank, RANK)
    single.check_pairs("It")
    assert_same_changes(changes(single), expected)
    expert_pairs.unstack_pairs(single)
    before = of_single_experts(shared, use_rslora=use_rslora)
    single.tensors = {key: single.tensors[key] for key in before.tensors}
    single.alphas = {path: round(alpha, 12) for path, alpha in single.alphas.items()}
    same_bits(single, before)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_pair_that_was_trained_stacked_comes_back_bit_for_bit(rank):
    adapter = of_stacked_experts(rank=rank)
    expected = changes(adapter)
    expert_pairs.unstack_pairs(adapter)
    assert_same_changes(changes(adapter), expected)
    expert_pairs.stack_pairs(adapter)
    same_bits(adapter, of_stacked_experts(rank=rank))


def test_a_pair_that_has_not_been_trained_comes_back_too():
    adapter, before = of_stacked_experts(), of_stacked_experts()
    for either in (adapter, before):
        for path in either.paths:
            either.tensors[path, "B"] *= 0
    expert_pairs.unstack_pairs(adapter)
    expert_pairs.stack_pairs(adapter)
    same_bits(adapter, before)


def test_different_scales_and_dtypes_become_one():
    adapter = of_single_experts()
    adapter.alphas[f"{HOLDER}.1.down_proj"] = 5.0
    adapter.tensors[f"{HOLDER}.2.up_proj", "A"] = adapter.tensors[f"{HOLDER}.2.up_proj", "A"].astype(np.float16)
    expected = changes(adapter)
    expert_pairs.stack_pairs(adapter)
    assert {array.dtype for array in adapter.tensors.values()} == {np.dtype(np.float32)}
    assert_same_changes(changes(adapter), expected)


def test_cells_that_are_no_experts_are_left_alone():
    adapter = of_single_experts()
    others = {f"model.layers.3.{path}": np.ones((RANK, 4), np.float32) for path in ("attention.wq", "mlp.shared.w1")}
    adapter.tensors.update({(path, half): array for path, array in others.items() for half in "AB"})
    adapter.alphas.update(dict.fromkeys(others, 1.0))
    expert_pairs.stack_pairs(adapter)
    assert all(adapter.tensors[path, "A"] is array for path, array in others.items())


# Refusals -----------------------------------------------------------------------------------------------------------


def without(*paths):
    adapter = of_single_experts()
    for path in paths:
        for half in "AB":
            del adapter.tensors[f"{HOLDER}.{path}", half]
    return adapter


@pytest.mark.parametrize(
    "lost, named", [(["1.down_proj"], "experts.1.down_proj"), ([f"{e}.up_proj" for e in range(3)], "{0..2}.up_proj")]
)
def test_experts_without_a_pair_are_named(lost, named):
    with pytest.raises(MissingTensorsError, match=r"has pairs of single experts but none for .*") as error:
        expert_pairs.stack_pairs(without(*lost))
    assert named in str(error.value)


def test_a_weight_that_no_expert_adapts_is_left_out():
    adapter = without(*(f"{expert}.{cell}" for expert in range(3) for cell in ("gate_proj", "up_proj")))
    expert_pairs.stack_pairs(adapter)
    assert adapter.paths == [f"{HOLDER}.weight2"]


def test_ranks_and_shapes_must_agree():
    adapter = of_single_experts()
    for half, shape in (("A", (3, INNER)), ("B", (HIDDEN, 3))):
        adapter.tensors[f"{HOLDER}.1.down_proj", half] = np.ones(shape, np.float32)
    with pytest.raises(RankMismatchError, match="make up model.layers.3.mlp.experts.weight2 have the ranks 2, 3"):
        expert_pairs.stack_pairs(adapter)
    adapter = of_single_experts()
    adapter.tensors[f"{HOLDER}.1.down_proj", "B"] = np.ones((HIDDEN + 1, RANK), np.float32)
    with pytest.raises(ShapeMismatchError, match="Single experts of one layer have pairs of different shapes"):
        expert_pairs.stack_pairs(adapter)
    adapter = of_single_experts()
    for expert in range(EXPERTS):
        adapter.tensors[f"{HOLDER}.{expert}.up_proj", "A"] = np.ones((RANK, HIDDEN + 1), np.float32)
    with pytest.raises(ShapeMismatchError, match="take inputs of different sizes, so they cannot make up"):
        expert_pairs.stack_pairs(adapter)


def test_dora_of_single_experts_cannot_be_stacked():
    adapter = of_single_experts()
    for path in adapter.paths:
        adapter.tensors[path, "magnitude"] = np.ones(len(adapter.tensors[path, "B"]), np.float32)
    with pytest.raises(AdapterError, match="^DoRA \\(use_dora\\) of single experts cannot become one pair"):
        expert_pairs.stack_pairs(adapter)


# Commands -----------------------------------------------------------------------------------------------------------


def test_convert_arranges_experts_as_asked(tmp_path):
    adapter_files.write(of_single_experts(shared=True), str(tmp_path / "single"))
    convert_adapter(str(tmp_path / "single"), str(tmp_path / "stacked"), "peft", experts="stacked")
    assert adapter_files.read(str(tmp_path / "stacked")).paths == [f"{HOLDER}.weight1", f"{HOLDER}.weight2"]
    convert_adapter(str(tmp_path / "stacked"), str(tmp_path / "again"), "peft", experts="single")
    assert compare_adapters(str(tmp_path / "single"), str(tmp_path / "again")).equal
    # MindFormers' own names have no form for single experts.
    convert_adapter(str(tmp_path / "single"), str(tmp_path / "one.ckpt"), "ckpt")
    assert compare_adapters(str(tmp_path / "one.ckpt"), str(tmp_path / "stacked")).only_in_first == ()
    with pytest.raises(LoraError, match="experts is 'both', which is none of stacked, single"):
        convert_adapter(str(tmp_path / "single"), str(tmp_path / "no"), "peft", experts="both")


def test_reports_know_stacked_experts(tmp_path):
    adapter = of_stacked_experts()
    adapter_files.write(adapter, str(tmp_path / "one"))
    (first, _) = inspect_adapter(str(tmp_path / "one"), energy=True).cells
    assert (first.shape, first.rank) == ((2 * INNER, HIDDEN), RANK)
    np.testing.assert_allclose(first.norm_delta, np.linalg.norm(adapter.delta(first.path)), rtol=1e-6)
    other = of_stacked_experts(seed=1)
    adapter_files.write(other, str(tmp_path / "two"))
    (cell, _) = compare_adapters(str(tmp_path / "one"), str(tmp_path / "two")).cells
    expected = np.linalg.norm(adapter.delta(cell.path) - other.delta(cell.path))
    np.testing.assert_allclose(cell.difference_delta, expected, rtol=1e-6)
