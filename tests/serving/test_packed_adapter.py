"""prepare: the blocks of an adapter compute what the adapter does, and what cannot be served is refused by name."""

import dataclasses

import numpy as np
import pytest

from mindlora.core.errors import (
    AdapterError,
    BaseMismatchError,
    MissingTensorsError,
    NotFiniteError,
    RankMismatchError,
    ScaleMismatchError,
    UnexpectedTensorsError,
)
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32, to_float32
from mindlora.files.adapters import expert_pairs, files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.fingerprint import fingerprint_from
from mindlora.files.adapters.matching import CellShape
from mindlora.serving.adapter_tables import BaseTables
from mindlora.serving.packed_adapter import Block, ServedLayout, prepare, rank_needed
from tests.support.refusals import part, refused

OUT = {"wq": 8, "wk": 4, "wv": 4, "wo": 6, "w1": 5, "w2": 6, "w3": 5}
IN = {"wo": 8, "w2": 5}
LAYERS = 2
# Rows of the joined cells by hand: two heads of q, then k, then v, of size 2, for each key-value head; w1, w3 in turn.
QKV_ROWS = [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
GATE_ROWS = [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]
F32, F16 = np.dtype("<f4"), np.dtype("<f2")


def path_of(leaf, layer=0, rename=str):
    return f"model.layers.{layer}.{'feed_forward' if leaf[1] in '123_g' and leaf != 'w_qkv' else 'attention'}.{leaf}"


def layout(joined=False, max_rank=16, dtype=F32, fingerprint=None):
    sizes = {leaf: (IN.get(leaf, 6), out) for leaf, out in OUT.items()}
    if joined:
        sizes = {"w_qkv": (6, 16), "w_gate_hidden": (6, 10), "wo": sizes["wo"], "w2": sizes["w2"]}
    cells = {path_of(leaf, layer): CellShape(*size, 2, 2) for layer in range(LAYERS) for leaf, size in sizes.items()}
    return ServedLayout(cells, max_rank, dtype, fingerprint)


def adapter_of(leaves=tuple(OUT), ranks=(2, 3), alphas=(4.0, 6.0), dtype=F32, layers=range(LAYERS), **fields):
    rng, made = np.random.default_rng(1), Adapter({}, **fields)
    for index, (layer, leaf) in enumerate((layer, leaf) for layer in layers for leaf in leaves):
        path, rank = path_of(leaf, layer), ranks[index % len(ranks)]
        for half, shape in (("A", (rank, IN.get(leaf, 6))), ("B", (OUT[leaf], rank))):
            made.tensors[path, half] = from_float32(rng.normal(size=shape).astype(np.float32), dtype)
        made.alphas[path] = alphas[index % len(alphas)]
    return made


def delta_of(block, in_channels):
    """Returns what a block adds to the weight, by the meaning of the pool: y += scale sum_j B[:, j] (A[j, :] x)."""
    rows = to_float32(block.rows).astype(np.float64)
    return block.scale * rows[:, in_channels:].T @ rows[:, :in_channels]


def written(tmp_path, adapter, form="peft"):
    path = str(tmp_path / {"peft": "adapter", "ckpt": "adapter.ckpt", "mindformers": "adapter.safetensors"}[form])
    files.write(adapter, path, form)
    return path


@pytest.mark.parametrize("form", ["peft", "ckpt", "mindformers"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_blocks_add_what_the_adapter_adds(tmp_path, form, use_rslora):
    adapter = adapter_of(("wq", "wo", "w1", "w2"), use_rslora=use_rslora)
    source = written(tmp_path, adapter, form)
    packed = prepare(source, layout())
    assert packed.blocks.keys() == set(adapter.paths)
    for path, block in packed.blocks.items():
        assert block.rows.shape == (adapter.rank(path), sum(layout().cells[path][:2])) and block.rows.dtype == F32
        np.testing.assert_array_equal(block.rows[:, : layout().cells[path].in_channels], adapter.tensors[path, "A"])
        np.testing.assert_allclose(
            delta_of(block, layout().cells[path].in_channels), adapter.delta(path), rtol=1e-5, atol=1e-6
        )
    assert (packed.source, packed.rank_max) == (source, 3)
    assert packed.nbytes == sum(block.rows.nbytes for block in packed.blocks.values())


@pytest.mark.parametrize("saved, held", [(F16, F16), (BFLOAT16, BFLOAT16), (F32, F32)])
def test_an_exact_layout_takes_the_numbers_as_they_were_saved(tmp_path, saved, held):
    adapter = adapter_of(dtype=saved)
    packed = prepare(written(tmp_path, adapter), dataclasses.replace(layout(dtype=held), exact=True))
    for path, block in packed.blocks.items():
        in_channels = layout().cells[path].in_channels
        assert block.rows.dtype == held
        np.testing.assert_array_equal(to_float32(block.rows[:, :in_channels]), to_float32(adapter.tensors[path, "A"]))


@pytest.mark.parametrize("saved, held, name", [(F32, BFLOAT16, "bfloat16"), (BFLOAT16, F16, "float16")])
def test_an_exact_layout_refuses_an_adapter_that_it_would_round(tmp_path, saved, held, name):
    adapter = adapter_of(("wq",), layers=(0,), dtype=saved)
    # No float16, but a bfloat16.
    adapter.tensors[path_of("wq"), "A"][0, 0] = from_float32(np.float32([1e-30]), saved)[0]
    source = written(tmp_path, adapter)
    message = f"{source} holds numbers at {path_of('wq')} that {name} (adapter_dtype) would round. Serve without"
    refused(AdapterError, part(message), prepare, source, dataclasses.replace(layout(dtype=held), exact=True))


def test_invocation_tokens_come_with_an_adapter_that_has_no_tables(tmp_path):
    adapter = adapter_of(("wq",))
    assert prepare(written(tmp_path, adapter), layout()).invocation_tokens == ()
    adapter.invocation_tokens = (5, 2)
    assert prepare(written(tmp_path, adapter), layout()).invocation_tokens == (5, 2)
    table = np.ones((7, 6), np.float32)
    adapter.saved_modules["lm_head.weight"] = table
    source = written(tmp_path, adapter)
    with pytest.raises(UnexpectedTensorsError, match="which acts on all tokens. Train it without modules_to_save"):
        prepare(source, dataclasses.replace(layout(), tables=BaseTables(table, tied=False)))


@pytest.mark.parametrize("stored", [F32, F16, BFLOAT16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("served", [F32, F16, BFLOAT16], ids=["float32", "float16", "bfloat16"])
def test_any_stored_dtype_goes_into_pools_of_any_with_one_rounding(tmp_path, stored, served):
    adapter = adapter_of(("wk", "w3"), dtype=stored)
    packed = prepare(written(tmp_path, adapter), layout(dtype=served))
    for path, block in packed.blocks.items():
        a, b = (to_float32(adapter.tensors[path, half]) for half in "AB")
        assert block.rows.tobytes() == from_float32(np.concatenate([a, b.T], axis=1), served).tobytes()
        assert block.rows.dtype == served


@pytest.mark.parametrize("leaves", [tuple(OUT), ("wq", "wv", "wo"), ("wk",), ("w3", "w2")])
def test_pairs_of_separate_cells_go_into_joined_ones(tmp_path, leaves):
    adapter = adapter_of(leaves)
    packed = prepare(written(tmp_path, adapter), layout(joined=True))
    for layer in range(LAYERS):
        for joined, parts, order in (
            ("w_qkv", ("wq", "wk", "wv"), QKV_ROWS),
            ("w_gate_hidden", ("w1", "w3"), GATE_ROWS),
        ):
            present = [leaf for leaf in parts if leaf in leaves]
            assert (path_of(joined, layer) in packed.blocks) == bool(present)
            if present:
                deltas = [
                    adapter.delta(path_of(leaf, layer)) if leaf in leaves else np.zeros((OUT[leaf], 6))
                    for leaf in parts
                ]
                found = delta_of(packed.blocks[path_of(joined, layer)], 6)
                np.testing.assert_allclose(found, np.concatenate(deltas)[order], rtol=1e-5, atol=1e-5)


def test_pairs_of_joined_cells_go_into_separate_ones(tmp_path):
    rng, path = np.random.default_rng(2), path_of("w_qkv")
    a, b = rng.normal(size=(3, 6)).astype(np.float32), rng.normal(size=(16, 3)).astype(np.float32)
    source = written(tmp_path, Adapter({(path, "A"): a, (path, "B"): b}, {path: 6.0}), "ckpt")
    packed = prepare(source, layout())
    found = np.concatenate([delta_of(packed.blocks[path_of(leaf)], 6) for leaf in ("wq", "wk", "wv")])
    np.testing.assert_allclose(found[QKV_ROWS], 2.0 * b @ a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
def test_vera_is_multiplied_out(tmp_path, joined):
    rng, adapter, leaves = np.random.default_rng(3), Adapter({}), ("wq", "wk", "wv", "wo")
    a, b = rng.normal(size=(2, 8)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)
    expected = {}
    for leaf in leaves:
        path, width = path_of(leaf), IN.get(leaf, 6)
        d, low = (rng.normal(size=size).astype(np.float32) for size in (2, OUT[leaf]))
        adapter.tensors.update({(path, "A"): a, (path, "B"): b[: OUT[leaf]]})
        adapter.tensors.update({(path, "lambda_d"): d, (path, "lambda_b"): low})
        adapter.alphas[path] = 2.0
        expected[leaf] = np.diag(low) @ b[: OUT[leaf]] @ np.diag(d) @ a[:, :width]
    packed = prepare(written(tmp_path, adapter), layout(joined=joined))
    if joined:
        expected = {"w_qkv": np.concatenate([expected[leaf] for leaf in leaves[:3]])[QKV_ROWS], "wo": expected["wo"]}
    assert packed.blocks.keys() == {path_of(leaf) for leaf in expected}
    for leaf, delta in expected.items():
        found = delta_of(packed.blocks[path_of(leaf)], IN.get(leaf, 6))
        np.testing.assert_allclose(found, delta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
def test_a_block_of_miss_is_repeated_over_the_inputs(tmp_path, joined):
    rng, blocks = np.random.default_rng(4), {}
    for leaf in ("wq", "wk", "wv", "wo"):
        blocks[leaf] = rng.normal(size=(OUT[leaf], 4)).astype(np.float32)
    adapter = Adapter({(path_of(leaf), "block"): block for leaf, block in blocks.items()})
    adapter.complete_pairs("It")
    packed = prepare(written(tmp_path, adapter), layout(joined=joined))
    width = IN.get("wo", 6)
    deltas = {leaf: block[:, np.arange(width if leaf == "wo" else 6) % 4] for leaf, block in blocks.items()}
    np.testing.assert_allclose(delta_of(packed.blocks[path_of("wo")], width), deltas["wo"], rtol=1e-6)
    if joined:
        expected = np.concatenate([deltas[leaf] for leaf in ("wq", "wk", "wv")])[QKV_ROWS]
        np.testing.assert_allclose(delta_of(packed.blocks[path_of("w_qkv")], 6), expected, rtol=1e-6)
    else:
        np.testing.assert_allclose(delta_of(packed.blocks[path_of("wq")], 6), deltas["wq"], rtol=1e-6)


def test_an_adapter_of_an_embedding_alone_has_no_blocks(tmp_path):
    adapter, path = Adapter({}, embeddings={"model.tok_embeddings"}), "model.tok_embeddings"
    adapter.tensors.update({(path, "A"): np.ones((2, 9), F32), (path, "B"): np.ones((6, 2), F32)})
    adapter.alphas[path] = 4.0
    tables = BaseTables(np.zeros((9, 6), F32), tied=False)
    packed = prepare(written(tmp_path, adapter), dataclasses.replace(layout(), tables=tables))
    assert (packed.blocks, packed.rank_max) == ({}, 0)
    np.testing.assert_array_equal(packed.tables.embed(np.int32([4]), tables), np.full((1, 6), 4, F32))
    assert packed.nbytes == packed.tables.nbytes == 4 * (9 * 2 + 2 * 6)


# Refused --------------------------------------------------------------------------------------------------------

MERGE = ". Merge it into its base with `mindlora base merge`, and serve that."


def refused_with_a_way_out(source, found):
    message = f"{source} cannot be served beside other adapters: it holds {found}{MERGE}"
    refused(UnexpectedTensorsError, message, prepare, source, layout())


def dora_of(leaves):
    adapter = adapter_of(leaves)
    rng = np.random.default_rng(5)
    for path in adapter.paths:
        out = len(adapter.tensors[path, "B"])
        adapter.tensors[path, "magnitude"] = rng.uniform(0.5, 1.5, out).astype(np.float32)
    return adapter


@pytest.mark.parametrize("stored", [F32, BFLOAT16], ids=["float32", "bfloat16"])
def test_magnitudes_of_dora_become_gains_of_rows(tmp_path, stored):
    adapter, rng = dora_of(("wq", "wo")), np.random.default_rng(6)
    weights = {
        path: from_float32(rng.normal(size=(cell.out_channels, cell.in_channels)).astype(np.float32), stored)
        for path, cell in layout().cells.items()
    }
    packed = prepare(written(tmp_path, adapter), dataclasses.replace(layout(), weights=weights))
    for path in adapter.paths:
        norms = np.linalg.norm(to_float32(weights[path]) + adapter.delta(path), axis=1)
        np.testing.assert_allclose(packed.blocks[path].gain, adapter.tensors[path, "magnitude"] / norms - 1, rtol=1e-5)
    assert packed.nbytes == sum(block.rows.nbytes + block.gain.nbytes for block in packed.blocks.values())


def test_dora_on_a_row_of_zeros_is_refused(tmp_path):
    adapter = dora_of(("wq",))
    for path in adapter.paths:
        adapter.tensors[path, "B"][3] = 0
    weights = {path: np.zeros((cell.out_channels, cell.in_channels), F32) for path, cell in layout().cells.items()}
    source = written(tmp_path, adapter)
    message = f"{source} at {path_of('wq')} rescales rows of zeros, which have no direction: DoRA is not defined there."
    refused(NotFiniteError, part(message), prepare, source, dataclasses.replace(layout(), weights=weights))


def test_dora_is_refused_where_the_weights_are_not_on_a_cpu(tmp_path):
    found = "DoRA magnitudes (use_dora), which are served on a CPU alone"
    refused_with_a_way_out(written(tmp_path, dora_of(("wq",))), found)


def test_saved_modules_are_refused(tmp_path):
    adapter = adapter_of(("wq",), saved_modules={"model.norm_out.weight": np.ones(6, np.float32)})
    found = "saved modules (modules_to_save), which replace the base's: model.norm_out.weight"
    refused_with_a_way_out(written(tmp_path, adapter), found)


@pytest.mark.parametrize("same", [True, False], ids=["the base's", "another"])
def test_a_head_s_pair_beside_the_table_that_peft_saves_with_it(tmp_path, same):
    """target_modules names lm_head, whose pair is in the pool, or in the head that the adapter has of its own."""
    table = np.ones((7, 6), np.float32)
    adapter = adapter_of(("wq",))
    adapter.tensors.update(
        {("lm_head", "A"): np.ones((2, 6), np.float32), ("lm_head", "B"): np.ones((7, 2), np.float32)}
    )
    adapter.alphas["lm_head"] = 4.0
    adapter.saved_modules["lm_head.weight"] = table if same else 2 * table
    adapter.selection = {"target_modules": ["q_proj", "lm_head"]}
    cells = {**layout().cells, "lm_head": CellShape(6, 7)}
    tables = BaseTables(np.zeros((7, 6), np.float32), False, table)
    packed = prepare(written(tmp_path, adapter), dataclasses.replace(layout(), cells=cells, tables=tables))
    assert ("lm_head" in packed.blocks) == same and (packed.tables.head is None) == same


@pytest.mark.parametrize(
    "path, kind", [("model.tok_embeddings", "embeddings"), ("lm_head", "output heads")], ids=["embedding", "head"]
)
def test_pairs_of_embeddings_and_heads_are_refused(tmp_path, path, kind):
    adapter = adapter_of(("wq",))
    adapter.tensors.update({(path, "A"): np.ones((2, 9), np.float32), (path, "B"): np.ones((6, 2), np.float32)})
    adapter.alphas[path] = 4.0
    if kind == "embeddings":
        adapter.embeddings.add(path)
    refused_with_a_way_out(written(tmp_path, adapter), f"pairs of {kind}: {path}")


@pytest.mark.parametrize(
    "form, single, filled",
    [("peft", False, False), ("peft", True, False), ("mindformers", False, False), ("peft", False, True)],
)
def test_pairs_of_experts_lie_one_after_the_other(tmp_path, form, single, filled):
    rng, made, (experts, hidden, inner) = np.random.default_rng(4), Adapter({}), (3, 6, 5)
    sizes = {"weight1": (2 * inner, hidden), "weight2": (hidden, inner)}
    for name, (high, wide) in sizes.items():
        path = f"model.layers.0.mlp.experts.{name}"
        made.tensors[path, "A"] = rng.normal(size=(experts, 2, wide)).astype(np.float32)
        made.tensors[path, "B"] = rng.normal(size=(experts, high, 2)).astype(np.float32)
        made.alphas[path] = 3.0
    deltas = {path: 1.5 * made.tensors[path, "B"] @ made.tensors[path, "A"] for path in made.paths}
    if single:
        expert_pairs.unstack_pairs(made)
    cells = {
        f"model.layers.0.mlp.experts.{name}": CellShape(*reversed(sizes[of]), experts=True)
        for name, of in (("gate_up_proj", "weight1"), ("down_proj", "weight2"))
    }
    served = ServedLayout(cells, 16, experts=experts, fills_experts=filled)
    packed = prepare(written(tmp_path, made, form), served)
    height = 16 if filled else 2
    assert packed.rank_max == 2 and packed.blocks.keys() == cells.keys()
    for (path, cell), delta in zip(cells.items(), deltas.values()):
        rows, scale, gain = packed.blocks[path]
        assert gain is None and rows.shape == (experts * height, cell.in_channels + cell.out_channels)
        for expert in range(experts):
            block = Block(rows[height * expert : height * (expert + 1)], scale)
            assert not block.rows[2:].any()
            np.testing.assert_allclose(delta_of(block, cell.in_channels), delta[expert], rtol=1e-5, atol=1e-6)


def test_the_rank_that_a_slot_needs_is_that_at_which_an_adapter_is_taken(tmp_path):
    source = written(tmp_path, adapter_of(("wq", "wk", "wv"), ranks=(4,)))
    for joins_cells, needed in ((False, 4), (True, 12)):
        assert rank_needed(source, joins_cells) == needed
        assert prepare(source, layout(joined=joins_cells, max_rank=needed)).rank_max == needed
        with pytest.raises(RankMismatchError):
            prepare(source, layout(joined=joins_cells, max_rank=needed - 1))


def test_pairs_of_routed_experts_are_refused_where_there_are_none(tmp_path):
    path = "model.layers.0.mlp.experts.weight1"
    adapter = Adapter({(path, "A"): np.ones((3, 2, 6), F32), (path, "B"): np.ones((3, 8, 2), F32)}, {path: 4.0})
    refused_with_a_way_out(written(tmp_path, adapter), f"pairs of routed experts: {path}")


def test_a_rank_that_a_slot_cannot_hold_is_refused(tmp_path):
    source = written(tmp_path, adapter_of(("wq", "wk", "wv"), ranks=(4,)))
    assert prepare(source, layout(max_rank=4)).rank_max == 4
    message = f"{source} has rank 4 at model.layers.{{0..1}}.attention.wk, model.layers.{{0..1}}.attention.wq, "
    message += "model.layers.{0..1}.attention.wv, but a slot holds up to 3: serve with --max-rank 4, "
    refused(RankMismatchError, part(message), prepare, source, layout(max_rank=3))
    message = (
        f"{source} has rank 12 at model.layers.{{0..1}}.attention.w_qkv (the pairs of joined cells have the ranks "
    )
    message += "of their parts together), but a slot holds up to 11: serve with --max-rank 12, of 256 at most"
    refused(RankMismatchError, part(message), prepare, source, layout(joined=True, max_rank=11))


def test_numbers_that_the_pools_cannot_hold_are_refused(tmp_path):
    adapter = adapter_of(("wq",), layers=[0])
    adapter.tensors[path_of("wq"), "B"][3, 1] = -65519.0
    source = written(tmp_path, adapter)
    assert np.isfinite(prepare(source, layout(dtype=F16)).blocks[path_of("wq")].rows).all()
    adapter.tensors[path_of("wq"), "B"][3, 1] = -65520.0
    source = written(tmp_path, adapter)
    message = f"{source} holds numbers at {path_of('wq')} that float16, in which this network computes, cannot hold. "
    refused(NotFiniteError, part(message), prepare, source, layout(dtype=F16))
    assert prepare(source, layout(dtype=BFLOAT16)).rank_max == 2


def test_nan_is_refused(tmp_path):
    source = written(tmp_path, adapter_of(("wq",)), "ckpt")
    with open(source, "rb") as file:
        content = file.read()
    tensor = adapter_of(("wq",)).tensors[path_of("wq"), "A"].tobytes()
    assert content.count(tensor) == 1
    with open(source, "wb") as file:
        file.write(content.replace(tensor, np.float32(np.nan).tobytes() + tensor[4:]))
    message = (
        f"{source} holds tensors with NaN or infinity: {path_of('wq')} A. "
        "Use a checkpoint from before training diverged."
    )
    refused(NotFiniteError, message, prepare, source, layout())


def test_an_unknown_alpha_is_refused(tmp_path):
    from mindlora.core.formats import ckpt_file

    source, adapter = str(tmp_path / "plain.ckpt"), adapter_of(("wq",))
    names = {"A": "mindpet_delta_lora_a", "B": "mindpet_delta_lora_b"}
    ckpt_file.write(source, {f"{path}.{names[half]}": array for (path, half), array in adapter.tensors.items()}, "{}")
    refused(ScaleMismatchError, part("does not state lora_alpha, so the scale of"), prepare, source, layout())


def test_a_lost_pair_and_one_too_many_are_noticed(tmp_path):
    adapter = adapter_of(("wq", "wk"))
    adapter.selection = {"target_modules": ["q_proj", "k_proj"]}
    lost = path_of("wk", 1)
    for half in "AB":
        del adapter.tensors[lost, half]
    del adapter.alphas[lost]
    source = written(tmp_path, adapter)
    message = f"{source} lacks 2 LoRA tensors of the network: {lost} A, {lost} B. Check target_modules."
    refused(MissingTensorsError, message, prepare, source, layout())
    source = written(tmp_path, adapter_of(("wq",), layers=[0, 5]))
    far = path_of("wq", 5)
    message = (
        f"{source} holds 2 LoRA tensors that the network has no place for: {far} A, {far} B. Check target_modules."
    )
    refused(UnexpectedTensorsError, message, prepare, source, layout())


def test_another_base_is_refused_and_the_same_is_not(tmp_path):
    shapes = {path_of("wq"): (8, 6)}
    samples = {path_of("wq"): np.arange(5.0)}
    asked = []

    def fingerprint(paths):
        asked.append(list(paths))
        return fingerprint_from(shapes, samples)

    adapter = adapter_of(("wq",), layers=[0], fingerprint=fingerprint_from(shapes, samples))
    source = written(tmp_path, adapter)
    assert prepare(source, layout(fingerprint=fingerprint)).fingerprint == adapter.fingerprint
    assert asked == [[path_of("wq")]]
    samples[path_of("wq")] = np.arange(1.0, 6.0)
    message = (
        f"{source} was trained on another base: the adapted weights have other values (another checkpoint, or another "
        "dtype). Load the base checkpoint it was trained on."
    )
    refused(BaseMismatchError, message, prepare, source, layout(fingerprint=fingerprint))
    assert prepare(source, layout(fingerprint=lambda paths: None)).rank_max == 2
    assert prepare(source, layout()).rank_max == 2
