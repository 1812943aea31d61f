"""MindFormers' qkv_concat: pairs joined for the joined cells and split again, against row orders written out."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindlora.core.errors import AdapterError, ScaleMismatchError, ShapeMismatchError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.adapters import joined_pairs
from mindlora.files.adapters.adapter import Adapter
from mindlora.models import names
from mindlora.models.architectures import joined_rows

HEADS, KV_HEADS, HEAD_DIM, IN = 4, 2, 3, 5
HOLDER = "model.layers.0.attention."
QKV, PARTS = HOLDER + "w_qkv", [HOLDER + leaf for leaf in ("wq", "wk", "wv")]
GATE = "model.layers.0.feed_forward.w_gate_hidden"
GATE_PARTS = [GATE.replace("w_gate_hidden", leaf) for leaf in ("w1", "w3")]
ROWS = dict(zip(PARTS, (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM))) | dict.fromkeys(GATE_PARTS, 7)
TOTAL = sum(ROWS[part] for part in PARTS)


def adapter(paths, ranks=(2, 2, 2), alphas=(3, 3, 3), rslora=False, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    tensors = {
        (path, half): from_float32(
            rng.normal(size=(rank, IN) if half == "A" else (ROWS[path], rank)).astype(np.float32), dtype
        )
        for path, rank in zip(paths, ranks)
        for half in "AB"
    }
    return Adapter(tensors, dict(zip(paths, map(float, alphas))), rslora)


def delta(own, path):
    """scale B A in float64."""
    a, b = (own.tensors[path, half].astype(np.float64) for half in "AB")
    return own.scale(path) * b @ a


def qkv_rows(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM):
    """(part, row) of each row of w_qkv: by key-value head, the heads of q that share it, then its k, then its v."""
    order = []
    shared = heads // kv_heads
    for kv_head in range(kv_heads):
        for head in range(kv_head * shared, (kv_head + 1) * shared):
            for row in range(head_dim):
                order.append((0, head * head_dim + row))
        for part in (1, 2):
            for row in range(head_dim):
                order.append((part, kv_head * head_dim + row))
    return order


GATE_ROWS = [(part, row) for row in range(7) for part in range(2)]


# Rows -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.sampled_from([(), (3,), (2, 2)]))
def test_rows_of_w_qkv(kv_heads, shared, head_dim, rest):
    heads = kv_heads * shared
    parts = [
        np.random.default_rng(i).normal(size=(count * head_dim,) + rest)
        for i, count in enumerate((heads, kv_heads, kv_heads))
    ]
    layout = names.joined_cell(QKV).layout
    joined = joined_rows.join_rows(parts, layout.groups([len(part) for part in parts], kv_heads))
    np.testing.assert_array_equal(
        joined, np.stack([parts[part][row] for part, row in qkv_rows(heads, kv_heads, head_dim)])
    )
    sizes = layout.sizes(len(joined), joined_rows.HeadSizes(None, kv_heads, head_dim))
    for part, again in zip(parts, joined_rows.split_rows(joined, sizes)):
        np.testing.assert_array_equal(again, part)


def test_rows_of_w_gate_hidden():
    parts = [np.random.default_rng(i).normal(size=(7, 3)) for i in range(2)]
    layout = names.joined_cell(GATE).layout
    joined = joined_rows.join_rows(parts, layout.groups([7, 7], None))
    np.testing.assert_array_equal(joined, np.stack([parts[part][row] for part, row in GATE_ROWS]))
    for part, again in zip(parts, joined_rows.split_rows(joined, layout.sizes(14))):
        np.testing.assert_array_equal(again, part)


# Joined ---------------------------------------------------------------------------------------------------------

CASES = [((2, 2, 2), (3, 3, 3)), ((2, 2, 2), (3, 6, 1)), ((1, 2, 4), (3, 3, 3)), ((3, 1, 2), (2, 5, 7))]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("ranks, alphas", CASES)
@pytest.mark.parametrize(
    "parts, path, order, arguments", [(PARTS, QKV, qkv_rows(), (TOTAL, KV_HEADS)), (GATE_PARTS, GATE, GATE_ROWS, (14,))]
)
def test_the_joined_pair_changes_each_row_as_its_own_pair_does(parts, path, order, arguments, ranks, alphas, rslora):
    own = adapter(parts, ranks, alphas, rslora)
    expected = [delta(own, part) for part in parts]
    joined_pairs.join_pairs(own, path, *arguments)
    assert own.paths == [path] and own.rank(path) == sum(ranks[: len(parts)]) and list(own.alphas) == [path]
    np.testing.assert_allclose(
        delta(own, path), np.stack([expected[part][row] for part, row in order]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("ranks, alphas", [case for case in CASES if len(set(case[1])) == 1 and len(set(case[0])) == 1])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_scale_stays(ranks, alphas, rslora):
    own = adapter(PARTS, ranks, alphas, rslora)
    scale = own.scale(PARTS[0])
    joined_pairs.join_pairs(own, QKV, TOTAL, KV_HEADS)
    assert own.scale(QKV) == pytest.approx(scale, rel=1e-12)
    assert own.alphas[QKV] == pytest.approx(3 * math.sqrt(3) if rslora else 9, rel=1e-12)


@pytest.mark.parametrize("present", [[0], [1], [2], [0, 1], [0, 2], [1, 2]])
def test_a_part_without_a_pair_is_not_changed(present):
    parts = [PARTS[i] for i in present]
    own = adapter(parts)
    expected = {part: delta(own, part) for part in parts}
    joined_pairs.join_pairs(own, QKV, TOTAL, KV_HEADS)
    found = delta(own, QKV)
    assert own.rank(QKV) == 2 * len(present)
    for row, (part, index) in zip(found, qkv_rows()):
        wanted = expected[PARTS[part]][index] if PARTS[part] in expected else np.zeros(IN)
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("present", [0, 1])
def test_a_missing_part_of_w_gate_hidden(present):
    own = adapter([GATE_PARTS[present]])
    expected = delta(own, GATE_PARTS[present])
    joined_pairs.join_pairs(own, GATE, 14)
    for row, (part, index) in zip(delta(own, GATE), GATE_ROWS):
        np.testing.assert_allclose(row, expected[index] if part == present else np.zeros(IN), rtol=1e-5, atol=1e-6)


def test_parts_of_different_dtypes_become_float32():
    own = adapter(PARTS)
    for part, dtype in zip(PARTS, (BFLOAT16, np.dtype("<f2"), np.dtype("<f4"))):
        for half in "AB":
            own.tensors[part, half] = from_float32(np.round(own.tensors[part, half]), dtype)
    expected = adapter(PARTS)
    expected.tensors = {key: np.round(array) for key, array in expected.tensors.items()}
    for each in (own, expected):
        joined_pairs.join_pairs(each, QKV, TOTAL, KV_HEADS)
    for half in "AB":
        assert own.tensors[QKV, half].dtype == np.float32
        np.testing.assert_array_equal(own.tensors[QKV, half], expected.tensors[QKV, half])


# Split ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.sampled_from(["<f4", "<f2", BFLOAT16]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_split_gives_back_what_was_joined_bit_for_bit(ranks, dtype, rslora, gate, seed):
    parts, path = (GATE_PARTS, GATE) if gate else (PARTS, QKV)
    # One scale for all; otherwise it goes into B, which is rounded.
    alphas = [3 * (math.sqrt(rank) if rslora else rank) for rank in ranks]
    own, before = (adapter(parts, ranks, alphas, rslora, np.dtype(dtype), seed) for _ in range(2))
    joined_pairs.join_pairs(own, path, *((14,) if gate else (TOTAL, KV_HEADS)))
    joined_pairs.split_pairs(own, path, *(() if gate else (KV_HEADS, HEAD_DIM)))
    assert own.paths == before.paths == parts
    for key, array in before.tensors.items():
        found = own.tensors[key]
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    for part in parts:
        assert own.alphas[part] == pytest.approx(before.alphas[part], rel=1e-12)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    "parts, path, rows, order, arguments",
    [(PARTS, QKV, TOTAL, qkv_rows(), (KV_HEADS, HEAD_DIM)), (GATE_PARTS, GATE, 14, GATE_ROWS, ())],
)
def test_a_pair_that_was_trained_as_one_gives_parts_that_share_its_a(parts, path, rows, order, arguments, rslora):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, IN)).astype(np.float32), rng.normal(size=(rows, 3)).astype(np.float32)
    own = Adapter({(path, "A"): a, (path, "B"): b}, {path: 6.0}, rslora)
    whole = delta(own, path)
    joined_pairs.split_pairs(own, path, *arguments)
    assert own.paths == parts and own.alphas == dict.fromkeys(parts, 6.0)
    for part in parts:
        np.testing.assert_array_equal(own.tensors[part, "A"], a)
    for row, (part, index) in zip(whole, order):
        np.testing.assert_allclose(delta(own, parts[part])[index], row, rtol=1e-6)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    "path, rows, split, join", [(QKV, TOTAL, (KV_HEADS, HEAD_DIM), (TOTAL, KV_HEADS)), (GATE, 14, (), (14,))]
)
def test_such_a_pair_is_joined_again_with_its_own_rank_bit_for_bit(path, rows, split, join, rslora):
    rng = np.random.default_rng(0)
    before = {
        (path, "A"): rng.normal(size=(3, IN)).astype(np.float32),
        (path, "B"): rng.normal(size=(rows, 3)).astype(np.float32),
    }
    own = Adapter(dict(before), {path: 6.0}, rslora)
    joined_pairs.split_pairs(own, path, *split)
    joined_pairs.join_pairs(own, path, *join)
    assert own.alphas == {path: 6.0} and own.tensors.keys() == before.keys()
    for key, array in before.items():
        np.testing.assert_array_equal(own.tensors[key], array)


def test_parts_that_share_a_but_not_their_scale_keep_their_own_columns():
    own = adapter(PARTS, alphas=(3, 3, 5))
    for part in PARTS:
        own.tensors[part, "A"] = own.tensors[PARTS[0], "A"]
    expected = [delta(own, part) for part in PARTS]
    joined_pairs.join_pairs(own, QKV, TOTAL, KV_HEADS)
    np.testing.assert_allclose(
        delta(own, QKV), np.stack([expected[part][row] for part, row in qkv_rows()]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("zero", [[0], [1], [2], [0, 1], [0, 1, 2]])
def test_a_column_of_zeros_in_b_loses_nothing(zero):
    own = adapter(PARTS)
    for part in zero:
        own.tensors[PARTS[part], "B"][:, 0] = 0
    before = [delta(own, part) for part in PARTS]
    joined_pairs.join_pairs(own, QKV, TOTAL, KV_HEADS)
    joined_pairs.split_pairs(own, QKV, KV_HEADS, HEAD_DIM)
    for part, expected in zip(PARTS, before):
        if (part, "A") in own.tensors:
            np.testing.assert_allclose(delta(own, part), expected, rtol=1e-5, atol=1e-6)
        else:
            assert not expected.any()


@pytest.mark.parametrize(
    "columns",
    [[[1], [0], [2]], [[2], [1], [0]], [[0, 2], [1], [3]], [[1, 2], [0], [3]], [[0], [2], [3]], [[0, 1], [1], [2]]],
)
def test_columns_in_any_order_lose_nothing(columns):
    rank = 1 + max(max(own) for own in columns)
    rng = np.random.default_rng(0)
    parts = [np.zeros((ROWS[part], rank), np.float32) for part in PARTS]
    for block, own in zip(parts, columns):
        block[:, own] = rng.normal(size=(len(block), len(own)))
    b = np.stack([parts[part][row] for part, row in qkv_rows()])
    own = Adapter({(QKV, "A"): rng.normal(size=(rank, IN)).astype(np.float32), (QKV, "B"): b}, {QKV: 5.0})
    whole = delta(own, QKV)
    joined_pairs.split_pairs(own, QKV, KV_HEADS, HEAD_DIM)
    for row, (part, index) in zip(whole, qkv_rows()):
        np.testing.assert_allclose(delta(own, PARTS[part])[index], row, rtol=1e-6, atol=1e-7)


def test_without_alpha_a_pair_can_be_split():
    own = adapter([GATE_PARTS[0], GATE_PARTS[1]])
    joined_pairs.join_pairs(own, GATE, 14)
    own.alphas = {}
    joined_pairs.split_pairs(own, GATE)
    assert own.paths == GATE_PARTS and own.alphas == {}


# Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [None, 0, 4, 5])
def test_heads_that_do_not_divide_the_rows_to_join(kv_heads):
    own = adapter(PARTS)
    with pytest.raises(AdapterError) as error:
        joined_pairs.join_pairs(own, QKV, TOTAL, kv_heads)
    assert str(error.value) == (
        f"{QKV} orders its rows by key-value head, but {kv_heads or 'an unknown number of'} heads do not divide the "
        "12, 6, 6 rows of q, k, v evenly. Name the model's folder or YAML (--base, or --config of base merge); a "
        "network says it by n_kv_heads."
    )
    assert own.paths == PARTS


@pytest.mark.parametrize("kv_heads, head_dim", [(None, 3), (2, None), (5, 3), (2, 5), (2, 6), (4, 3), (0, 3)])
def test_heads_that_do_not_divide_the_rows_to_split(kv_heads, head_dim):
    own = adapter(PARTS)
    joined_pairs.join_pairs(own, QKV, TOTAL, KV_HEADS)
    with pytest.raises(AdapterError) as error:
        joined_pairs.split_pairs(own, QKV, kv_heads, head_dim)
    assert str(error.value) == (
        f"{QKV} joins {', '.join(PARTS)} in {TOTAL} rows, which do not match "
        f"{kv_heads or 'an unknown number of'} key-value heads of {f'size {head_dim}' if head_dim else 'unknown size'}."
        " Name the model's folder or YAML (--base, or --config of base merge); a "
        "network says it by n_kv_heads."
    )
    assert own.paths == [QKV]


@pytest.mark.parametrize("present, rows", [([0, 1, 2], 25), ([0, 1], 18), ([0], 12), ([1], 12), ([1, 2], 12)])
def test_rows_that_the_parts_do_not_make_up(present, rows):
    own = adapter([PARTS[i] for i in present])
    with pytest.raises(ShapeMismatchError) as error:
        joined_pairs.join_pairs(own, QKV, rows, KV_HEADS)
    found = ", ".join(f"{PARTS[i]} with {ROWS[PARTS[i]]}" for i in present)
    assert str(error.value) == (
        f"{QKV} has {rows} rows and cannot be made of the adapter's {found}. Load the adapter into the model it was "
        "trained on."
    )


def test_parts_with_inputs_of_different_sizes():
    own = adapter(PARTS)
    own.tensors[PARTS[1], "A"] = np.zeros((2, IN + 1), np.float32)
    with pytest.raises(ShapeMismatchError) as error:
        joined_pairs.join_pairs(own, QKV, TOTAL, KV_HEADS)
    assert str(error.value) == (
        f"{', '.join(PARTS)} take inputs of different sizes, so {QKV} cannot replace them. Load the adapter into the "
        "model it was trained on."
    )


def test_a_join_needs_alpha():
    own = adapter(PARTS)
    own.alphas = {}
    with pytest.raises(ScaleMismatchError, match="does not state lora_alpha"):
        joined_pairs.join_pairs(own, QKV, TOTAL, KV_HEADS)
