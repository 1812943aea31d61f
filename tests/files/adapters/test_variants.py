"""Variants and layouts: each goes through all that is done with adapters, and no module there knows a variant."""

import numpy as np
import pytest

from mindlora.core.errors import AdapterError, MissingTensorsError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.core.numerics import pair_shapes
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32, to_float32
from mindlora.core.numerics.pair_shapes import CONVOLUTION, EMBEDDING, EXPERTS, LAYOUTS, LINEAR
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import joined_pairs
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.combine import combine_adapters
from mindlora.files.adapters.compare import compare_adapters
from mindlora.files.adapters.dialects import mindformers, peft
from mindlora.files.adapters.inspect import inspect_adapter
from mindlora.models.variants.registry import LORA, PARTS, SHARED_PARTS, STORED
from tests.support.adapter_samples import K, Q, assert_same

V = "model.layers.0.attention.wv"
RANK, IN = 2, 6
ROWS = {Q: 8, K: 4, V: 4}
PATHS = {"peft": "adapter", "mindformers": "adapter.safetensors", "ckpt": "adapter.ckpt", "slora": "slora"}

plain_or_variant = pytest.mark.parametrize("variant", (LORA, *STORED), ids=lambda variant: variant.name)
every_variant = pytest.mark.parametrize("variant", STORED, ids=lambda variant: variant.name)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.cells)


def of_variant(variant, seed=0):
    """An adapter of wq, wk and wv with the parts of the variant."""
    random, tensors = np.random.default_rng(seed), {}
    a, b = random.normal(size=(RANK, IN)), random.normal(size=(max(ROWS.values()), RANK))
    for path, rows in ROWS.items():
        tensors[path, "A"] = a if "A" in variant.shared_parts else random.normal(size=(RANK, IN))
        tensors[path, "B"] = b[:rows] if "B" in variant.shared_parts else random.normal(size=(rows, RANK))
        for part in variant.parts:
            tensors[path, part.name] = random.normal(size=part.shape(RANK, rows))
        if not variant.own_pair and not variant.shared_parts:
            block = {part.name: tensors[path, part.name] for part in variant.parts}
            tensors[path, "A"], tensors[path, "B"] = variant.pair_of_parts(block)
    tensors = {key: array.astype(np.float32) for key, array in tensors.items()}
    # Without a pair of its own, the scale is 1.
    return Adapter(tensors, dict.fromkeys(ROWS, 3.0 if variant.own_pair else float(RANK)))


def of_layout(layout, groups=1):
    """An adapter of one cell."""
    random, path = np.random.default_rng(0), "model.tok_embeddings" if layout is EMBEDDING else "model.cell"
    path = "model.layers.0.mlp.experts.weight1" if layout is EXPERTS else path
    kernel, ones = ((3, 5), (1, 1)) if layout is CONVOLUTION else ((), ())
    stack = (3,) if layout is EXPERTS else ()
    tensors = {
        (path, "A"): random.normal(size=(*stack, 2, 6, *kernel)).astype(np.float32),
        (path, "B"): random.normal(size=(*stack, 4, 2 // groups, *ones)).astype(np.float32),
    }
    return Adapter(tensors, {path: 3.0}, embeddings={path} if layout is EMBEDDING else set())


# Kinds ------------------------------------------------------------------------------------------------------------


@plain_or_variant
@pytest.mark.parametrize("form", ["peft", "mindformers", "ckpt"])
def test_each_variant_makes_the_round_trip_through_files(tmp_path, variant, form):
    adapter, path = of_variant(variant), str(tmp_path / PATHS[form])
    assert adapter.variant is variant
    adapter_files.write(adapter, path, form)
    found = adapter_files.read(path)
    adapter.selection = found.selection
    assert_same(found, adapter)
    assert found.variant is variant


@every_variant
def test_pairs_that_follow_from_the_parts_are_ones_in_bfloat16_too(variant):
    if variant.own_pair or variant.shared_parts:
        return
    (part,) = variant.parts
    block = from_float32(np.ones(part.shape(RANK, 4), np.float32), BFLOAT16)
    a, b = variant.pair_of_parts({part.name: block})
    np.testing.assert_array_equal(to_float32(variant.columns_of(a, IN)), np.tile(np.eye(RANK), IN // RANK))
    assert b is block


@plain_or_variant
def test_the_change_of_a_weight_follows_from_the_low_rank_pair(variant):
    adapter = of_variant(variant)
    for path, rows in ROWS.items():
        a, b = adapter.pair(path)
        assert a.shape == adapter.tensors[path, "A"].shape and b.shape == (rows, RANK)
        np.testing.assert_allclose(adapter.delta(path), adapter.scale(path) * (b @ a), rtol=1e-5, atol=1e-6)
        norms = adapter.row_norms(path)
        assert (norms is None) == (not variant.row_norms) and (norms is None or norms.shape == (rows,))


@every_variant
def test_each_vector_has_the_size_in_the_table(variant):
    for part in variant.parts:
        adapter = of_variant(variant)
        adapter.tensors[K, part.name] = np.ones(13, np.float32)
        with pytest.raises(ShapeMismatchError) as error:
            adapter.check_pairs("It")
        columns = list(adapter.tensors[K, "A"].shape)
        assert str(error.value) == (
            f"It: the {part.name} is [13] and must be [{part.size}], at {K} (A {columns}, B [{ROWS[K]}, {RANK}]). "
            "Save the adapter again with the program that trained it."
        )


@every_variant
def test_a_vector_that_one_cell_lacks_is_missed(variant):
    for part in variant.parts:
        adapter = of_variant(variant)
        del adapter.tensors[K, part.name]
        with pytest.raises(MissingTensorsError) as error:
            adapter.check_pairs("It")
        assert str(error.value) == (
            f"It has a {part.name} at some cells but none at {K}. Copy or save the adapter again."
        )


def test_one_adapter_is_of_one_variant():
    adapter = Adapter({key: array for variant in (LORA, *STORED) for key, array in of_variant(variant).tensors.items()})
    with pytest.raises(UnexpectedTensorsError) as error:
        adapter.check_pairs("It")
    assert str(error.value) == (
        f"It holds {' and '.join(variant.tensors for variant in STORED)}: an adapter must be of one kind."
    )


@plain_or_variant
def test_pairs_of_joined_cells_are_made_and_split_or_refused(variant):
    adapter, joined = of_variant(variant), "model.layers.0.attention.w_qkv"
    if variant.cannot_join:
        with pytest.raises(AdapterError, match=variant.cannot_join):
            joined_pairs.join_pairs(adapter, joined, 16, 2)
        return
    joined_pairs.join_pairs(adapter, joined, 16, 2)
    adapter.check_pairs("It")
    assert adapter.paths == [joined] and adapter.variant is variant
    joined_pairs.split_pairs(adapter, joined, 2, 2)
    assert_same(adapter, of_variant(variant))


@plain_or_variant
def test_combining_is_done_or_refused(variant):
    adapters = [of_variant(variant, seed) for seed in (0, 1)]
    if variant.cannot_combine:
        with pytest.raises(
            AdapterError, match=f"Adapter 1 is a {variant.name} adapter .*: {variant.cannot_combine}\\."
        ):
            combine_adapters(adapters, [1, 1], "cat")
        return
    found = combine_adapters(adapters, [1, 1], "cat")
    expected = adapters[0].delta(Q) + adapters[1].delta(Q)
    np.testing.assert_allclose(found.delta(Q), expected, rtol=1e-5, atol=1e-5)


@plain_or_variant
def test_slora_serves_it_or_says_why_not(tmp_path, variant):
    path = str(tmp_path / "slora")
    if variant.is_plain:
        adapter_files.write(of_variant(variant), path, "slora")
        assert_same(adapter_files.read(path), of_variant(variant))
        return
    with pytest.raises(AdapterError, match=f"^slora does not serve {variant.tensors} \\({variant.field}\\)\\. Merge"):
        adapter_files.write(of_variant(variant), path, "slora")


@plain_or_variant
def test_reports_name_the_variant(tmp_path, variant):
    one, plain = str(tmp_path / "one"), str(tmp_path / "plain")
    adapter_files.write(of_variant(variant), one)
    adapter_files.write(of_variant(LORA), plain)
    assert all((f"\n{other.name} " in str(inspect_adapter(one))) == (other is variant) for other in STORED)
    settings = compare_adapters(one, plain).settings
    assert settings.keys().isdisjoint(other.name for other in STORED if other is not variant)
    assert variant is LORA or settings[variant.name] == ("yes", "no")


@pytest.mark.parametrize("part", [*PARTS.values(), *SHARED_PARTS.values()], ids=lambda part: part.name)
def test_every_part_has_a_key_of_its_own_in_each_world(part):
    path = "" if part.name in SHARED_PARTS else Q
    for dialect in (peft, mindformers):
        assert dialect.parse_key(dialect.tensor_key(path, part.name)) == (path, part.name)


# Layouts ----------------------------------------------------------------------------------------------------------


@every_layout
def test_each_layout_is_told_from_its_shapes_and_changes_the_weight(tmp_path, layout):
    adapter = of_layout(layout)
    (path,) = adapter.paths
    assert adapter.layout(path) is layout
    adapter.check_pairs("It")
    a, b = adapter.tensors[path, "A"], adapter.tensors[path, "B"]
    change = {
        LINEAR: lambda: np.einsum("ri,or->oi", a, b),
        EMBEDDING: lambda: np.einsum("ri,or->io", a, b),
        CONVOLUTION: lambda: np.einsum("rihw,or->oihw", a, b[:, :, 0, 0]),
        # Each expert's weight is [in, out], and they are stacked by rows.
        EXPERTS: lambda: np.einsum("eri,eor->eio", a, b).reshape(-1, b.shape[1]),
    }[layout]()
    np.testing.assert_allclose(adapter.delta(path), 1.5 * change, rtol=1e-5, atol=1e-6)
    for form in ("peft", "mindformers", "ckpt"):
        adapter_files.write(adapter, str(tmp_path / PATHS[form]), form)
        assert adapter_files.read(str(tmp_path / PATHS[form])).layout(path) is layout


@every_layout
def test_what_a_layout_does_not_support_is_refused(tmp_path, layout):
    adapter = of_layout(layout)
    if layout.can_combine:
        assert combine_adapters([adapter, adapter], [1, 1], "cat").layout(*adapter.paths) is layout
    else:
        with pytest.raises(AdapterError, match=f"^Adapter 1 adapts {layout.cells}, which cannot be combined: "):
            combine_adapters([adapter, adapter], [1, 1], "cat")
    if layout.in_slora:
        adapter_files.write(adapter, str(tmp_path / "slora"), "slora")
    else:
        with pytest.raises(AdapterError, match=f"^slora does not serve adapters of {layout.cells}: "):
            adapter_files.write(adapter, str(tmp_path / "slora"), "slora")


def test_groups_have_a_shape_and_no_product():
    adapter = of_layout(CONVOLUTION, groups=2)
    adapter.check_pairs("It")
    assert adapter.weight_shape("model.cell") == (4, 3, 3, 5)
    assert not pair_shapes.has_product(adapter.tensors["model.cell", "A"], adapter.tensors["model.cell", "B"])
    with pytest.raises(ShapeMismatchError, match="^The convolution has 2 groups"):
        adapter.delta("model.cell")


@pytest.mark.parametrize(
    "a, b, problem",
    [
        ((6,), (4, 2), "A and B must be matrices"),
        ((2, 6, 3), (4, 2), "A and B must be matrices"),
        ((3, 2, 6), (4, 5, 2), "A is of 3 experts and B of 4"),
        ((3, 2, 6), (3, 2, 5), "B is transposed: it must be [out, r]"),
        ((3, 2, 6), (3, 5, 7), "A [r, in] and B [out, r] have no rank r in common"),
        ((2, 6), (4, 2, 1, 1), "A and B must be matrices"),
        ((2, 6, 3, 3), (4, 2), "A and B must be matrices"),
        ((2, 0), (4, 2), "A or B is empty"),
        ((2, 6, 3, 3), (4, 0, 1, 1), "A or B is empty"),
        ((2, 6, 3, 3), (4, 2, 3, 3), "B of a convolution must be [out, r / groups, 1, 1]"),
        ((3, 6, 3, 3), (4, 2, 1, 1), "B of a convolution must be [out, r / groups, 1, 1]"),
        ((1, 6, 3, 3), (4, 2, 1, 1), "B of a convolution must be [out, r / groups, 1, 1]"),
        ((4, 6, 3, 3), (5, 2, 1, 1), "B of a convolution must be [out, r / groups, 1, 1]"),
        ((4, 5, 3, 3), (4, 2, 1, 1), "B of a convolution must be [out, r / groups, 1, 1]"),
    ],
)
def test_shapes_of_no_pair(a, b, problem):
    assert pair_shapes.shape_problem(a, b) == (ShapeMismatchError, problem)
