"""Adapters in the folders of MindFormers 2's PyNative trainer: read in every form that it saves, and written."""

import json
import os
import re

import numpy as np
import pytest

from mindlora.core.errors import (
    AdapterError,
    AdapterFormatError,
    MissingTensorsError,
    RankMismatchError,
    ScaleMismatchError,
    ShapeMismatchError,
)
from mindlora.core.formats.safetensors_file import TensorFile, write_arrays
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads, convert_adapter
from mindlora.files.adapters.dialects.pynative import target_regex
from tests.support.adapter_samples import assert_same
from tests.support.step_folders import MANIFEST, ONE_RANK, rank_file, write_ranks, write_run, write_step

HEADS = Heads(4, 2, 3)
HIDDEN, INNER, RANK, EXPERTS = 8, 6, 2, 4
LAYER = "decoder.layers.{}."
QKV, PROJ = LAYER + "self_attention.linear_qkv", LAYER + "self_attention.linear_proj"
LORA = {"target_modules": "linear", "lora_rank": RANK, "lora_alpha": 6, "lora_dropout": 0.05}
# Hugging Face's cells -> (out, in).
CELLS = {
    "model.layers.{}.attention.wq": (12, HIDDEN),
    "model.layers.{}.attention.wk": (6, HIDDEN),
    "model.layers.{}.attention.wv": (6, HIDDEN),
    "model.layers.{}.attention.wo": (HIDDEN, 12),
}
DENSE = {
    "model.layers.{}.feed_forward.w1": (INNER, HIDDEN),
    "model.layers.{}.feed_forward.w3": (INNER, HIDDEN),
    "model.layers.{}.feed_forward.w2": (HIDDEN, INNER),
}


def values(*shape, seed=0, dtype=np.float32):
    return from_float32(np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32), np.dtype(dtype))


def pairs(*paths, rows=24, columns=HIDDEN):
    tensors = {}
    for path in paths:
        tensors[f"{path}.lora_a"] = values(RANK, columns)
        tensors[f"{path}.lora_b"] = values(rows, RANK)
    return tensors


def stacks(layer=0, rank=RANK):
    """A and B of experts as the trainer stores them: x A B."""
    holder = LAYER.format(layer) + "mlp.experts"
    sizes = {"weight1": (HIDDEN, 2 * INNER), "weight2": (INNER, HIDDEN)}
    tensors = {}
    for weight, (inputs, outputs) in sizes.items():
        tensors[f"{holder}.{weight}_lora_a"] = values(EXPERTS, inputs, rank)
        tensors[f"{holder}.{weight}_lora_b"] = values(EXPERTS, rank, outputs)
    return tensors


def adapter_of(cells, layers=(0, 1), rank=RANK, dtype=np.float32, **fields):
    adapter = Adapter({}, **fields)
    for number, (path, (rows, columns)) in enumerate(
        (c.format(layer), s) for layer in layers for c, s in cells.items()
    ):
        adapter.tensors[path, "A"] = values(rank, columns, seed=number, dtype=dtype)
        adapter.tensors[path, "B"] = values(rows, rank, seed=number, dtype=dtype)
        adapter.alphas[path] = 6.0
    return adapter


def stored(folder):
    with TensorFile(os.path.join(folder, ONE_RANK)) as file:
        return {key: file.read(key) for key in file.tensors}


# Reading --------------------------------------------------------------------------------------------------------------


def test_a_step_and_the_folder_of_all_steps_are_the_same_adapter(tmp_path):
    tensors = pairs(QKV.format(0), QKV.format(1))
    write_step(tmp_path / "run" / "iteration_00000003", pairs("decoder.layers.9.mlp.linear_fc1"), **LORA)
    step = write_step(tmp_path / "run" / "iteration_00000010", tensors, **LORA)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    found = adapter_files.read(step)
    assert found.paths == ["model.layers.0.attention.w_qkv", "model.layers.1.attention.w_qkv"]
    assert (found.tensors[found.paths[0], "B"] == tensors[QKV.format(0) + ".lora_b"]).all()
    assert set(found.alphas.values()) == {6.0} and found.dropout == 0.05
    assert_same(adapter_files.read(str(tmp_path / "run")), found)
    assert_same(adapter_files.read(os.path.join(step, ONE_RANK)), found)


def test_the_tracker_of_a_step_that_is_not_there_is_an_error(tmp_path):
    write_step(tmp_path / "run" / "iteration_00000003", pairs(QKV.format(0)), **LORA)
    for text in ("10", "x" * 500, ""):
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(AdapterFormatError, match="the last step is .*there are iteration_00000003"):
            adapter_files.read(str(tmp_path / "run"))


def test_megatrons_folder_with_the_same_tracker_keeps_its_own_error(tmp_path):
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(AdapterFormatError, match="MindSpeed-LLM's or Megatron's"):
        adapter_files.read(str(tmp_path))


def test_without_a_manifest_lora_alpha_is_asked_for(tmp_path):
    step = write_step(tmp_path / "step", pairs(PROJ.format(0), rows=HIDDEN))
    with pytest.raises(ScaleMismatchError, match="Give the lora_alpha that it was trained with"):
        convert_adapter(step, str(tmp_path / "peft"), "peft")
    convert_adapter(step, str(tmp_path / "peft"), "peft", lora_alpha=6)
    assert adapter_files.read(str(tmp_path / "peft")).scale("model.layers.0.attention.wo") == 3


def test_base_and_optimizer_in_the_same_folder_are_left_out(tmp_path):
    tensors = {**pairs(QKV.format(0)), QKV.format(0) + ".weight": values(24, HIDDEN)}
    assert adapter_files.read(write_step(tmp_path / "step", tensors, **LORA)).paths == [
        "model.layers.0.attention.w_qkv"
    ]


def test_experts_are_stacked_pairs_that_do_what_the_grouped_matmul_does(tmp_path):
    tensors = stacks()
    found = adapter_files.read(write_step(tmp_path / "step", tensors, **LORA))
    x = values(EXPERTS, 5, HIDDEN).astype(np.float64)
    a, b = (tensors[LAYER.format(0) + f"mlp.experts.weight1_lora_{half}"] for half in "ab")
    path = "model.layers.0.mlp.experts.weight1"
    ours = [x[e] @ found.tensors[path, "A"][e].T @ found.tensors[path, "B"][e].T for e in range(EXPERTS)]
    np.testing.assert_allclose(ours, np.einsum("eti,eir,ero->eto", x, a, b), rtol=1e-6)


@pytest.mark.parametrize("half, shape", [("a", (8, 2)), ("b", (1, 2, 3, 4))])
def test_experts_of_another_shape_are_refused(tmp_path, half, shape):
    key = LAYER.format(0) + f"mlp.experts.weight1_lora_{half}"
    step = write_step(tmp_path / "step", {**stacks(), key: values(*shape)}, **LORA)
    with pytest.raises(ShapeMismatchError, match=re.escape(f"{key} is {list(shape)}: A of all experts must be")):
        adapter_files.read(step)


def test_the_manifest_must_be_that_of_the_tensors(tmp_path):
    step = write_step(tmp_path / "step", pairs(QKV.format(0)), **{**LORA, "lora_rank": 4})
    with pytest.raises(RankMismatchError, match="lora_config.lora_rank is 4, but model.layers.0.* has rank 2"):
        adapter_files.read(step)
    for alpha in (None, "6", 0, True, float("nan")):
        (tmp_path / "step" / MANIFEST).write_text(json.dumps({"lora_config": {"lora_alpha": alpha}}))
        with pytest.raises(AdapterFormatError, match="lora_config.lora_alpha is .*; it must be a number above 0"):
            adapter_files.read(step)


def test_a_run_of_mindlora_states_the_scale_of_each_cell(tmp_path):
    proj = {half: array[:1] for half, array in (("a", values(RANK, 12)), ("b", values(RANK, HIDDEN)))}
    tensors = {**pairs(QKV.format(0)), **stacks(), f"{PROJ.format(0)}.lora_a": proj["a"]}
    tensors[f"{PROJ.format(0)}.lora_b"] = proj["b"].T
    step = write_step(tmp_path / "step", tensors)
    # Patterns are matched with the paths of the trainer's cells.
    alphas = {r"model\.decoder\.layers\.0\.self_attention\.linear_qkv": 3, "experts.weight2": 10}
    write_run(tmp_path / "step", LORA, use_rslora=True, rank_pattern={"linear_proj": 1}, alpha_pattern=alphas)
    found = adapter_files.read(step)
    layer = "model.layers.0."
    expected = {"attention.w_qkv": 3, "attention.wo": 6, "mlp.experts.weight1": 6, "mlp.experts.weight2": 10}
    assert found.alphas == {layer + path: alpha for path, alpha in expected.items()}
    assert found.use_rslora and found.dropout == 0.05


def test_modules_that_are_left_out_are_named(tmp_path, caplog):
    step = write_step(tmp_path / "step", pairs(QKV.format(0)))
    write_run(tmp_path / "step", LORA, modules_to_save=["lm_head"])
    adapter_files.read(step)
    assert "trained modules_to_save ['lm_head'] too" in caplog.text and str(step) in caplog.text


def test_an_adapter_that_changed_its_base_has_the_scale_of_its_run(tmp_path, initialized):
    step = write_step(tmp_path / "step", initialized)
    write_run(tmp_path / "step", LORA, lora_init="pissa")
    found = adapter_files.read(step)
    (path,) = found.paths
    assert (found.rank(path), found.scale(path)) == (2 * RANK, LORA["lora_alpha"] / RANK)


@pytest.mark.parametrize(
    "lora_config, pet_config, error, message",
    [
        (None, {}, AdapterFormatError, "mindlora_run.json lacks the lora_config of the run"),
        ({**LORA, "lora_alpha": "6"}, {}, AdapterFormatError, "mindlora_run.json: lora_alpha is '6'"),
        ({**LORA, "lora_rank": 4}, {}, RankMismatchError, r"linear_qkv is 4, but its tensors have 2"),
        (LORA, {"use_dora": True}, AdapterFormatError, "is of a run of DoRA, and .* holds LoRA"),
    ],
)
def test_what_mindlora_says_must_be_of_the_tensors(tmp_path, lora_config, pet_config, error, message):
    step = write_step(tmp_path / "step", pairs(QKV.format(0)))
    write_run(tmp_path / "step", lora_config, **pet_config)
    with pytest.raises(error, match=message):
        adapter_files.read(step)


def test_veras_vectors_and_shared_projection_are_read(tmp_path):
    vectors = {f"{PROJ.format(0)}.lambda_d_lora_b": values(RANK), f"{PROJ.format(0)}.lambda_b_lora_b": values(HIDDEN)}
    shared = {f"mindpet_delta_lora_vera_{half}": values(*s) for half, s in zip("ab", ((RANK, 12), (HIDDEN, RANK)))}
    step = write_step(tmp_path / "step", {**vectors, **shared, f"{PROJ.format(0)}.weight": values(HIDDEN, 12)})
    write_run(tmp_path / "step", LORA, use_vera=True, projection_prng_key=7)
    found = adapter_files.read(step)
    assert found.variant.name == "VeRA" and found.projection_key == 7
    a, b = found.pair("model.layers.0.attention.wo")
    (d, bs), (shared_a, shared_b) = vectors.values(), shared.values()
    np.testing.assert_allclose(b @ a, bs[:, None] * shared_b @ (d[:, None] * shared_a), rtol=1e-6)


# Several ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    tensors = {**pairs(QKV.format(0)), **pairs(PROJ.format(0), rows=HIDDEN, columns=12), **stacks()}
    experts = LAYER.format(0) + "mlp.experts."
    cuts = {
        # Column parallel, row parallel, both ways, and experts on different ranks.
        QKV.format(0) + ".lora_b": (4, 1),
        PROJ.format(0) + ".lora_a": (1, 4),
        experts + "weight1_lora_a": (4, 1, 1),
        experts + "weight1_lora_b": (2, 1, 2),
    }
    whole = adapter_files.read(write_step(tmp_path / "whole", tensors, **LORA))
    return write_ranks(tmp_path / "ranks", tensors, cuts, 4, **LORA), whole


def test_the_parts_of_several_ranks_join_as_metadata_says(sharded):
    folder, whole = sharded
    assert_same(adapter_files.read(folder), whole)


def test_the_file_of_one_rank_of_several_is_not_taken_for_the_adapter(sharded):
    path = os.path.join(sharded[0], rank_file(1, 4))
    with pytest.raises(AdapterFormatError, match="is the part that one rank holds. Give the folder"):
        adapter_files.read(path)


def changed_metadata(folder, change):
    path = os.path.join(folder, "metadata.json")
    with open(path) as file:
        content = json.load(file)
    change(content["state_dict_metadata"], content["storage_data"])
    with open(path, "w") as file:
        json.dump(content, file)


B = QKV.format(0) + ".lora_b"
FIRST = str((B, (0,)))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda entries, files: entries[B]["chunk"].pop(), "does not say enough of .*linear_qkv.lora_b"),
        (lambda entries, files: entries[B]["chunk"].append(entries[B]["chunk"][0]), "does not say enough"),
        (lambda entries, files: entries[B].update(global_shape=[30, RANK]), "the whole is \\[30, 2\\]"),
        (lambda entries, files: entries[B].update(axis_fragmentations=[2, 2]), "does not say enough"),
        (lambda entries, files: entries[B].update(axis_fragmentations=[2, 1]), "is not as MindFormers writes it"),
        (lambda entries, files: entries[B]["chunk"][0].update(global_offset=[0, 0]), "is not as MindFormers writes"),
        (lambda entries, files: entries[B].pop("chunk"), "is not as MindFormers writes it \\(KeyError"),
        (lambda entries, files: files.pop(FIRST), "is not as MindFormers writes it \\(KeyError"),
        (lambda entries, files: files[FIRST][0].update(file_name="../x"), "is not the name of a file"),
        (lambda entries, files: files[FIRST][0].update(file_name=rank_file(9, 4)), "is missing, but metadata.json"),
        (lambda entries, files: files[FIRST][0].update(file_name=rank_file(0, 4, "x-model")), "is missing"),
        (
            lambda entries, files: entries.update(b=entries[B]) or files.update({str(("b", (0,))): files[FIRST]}),
            "is not as MindFormers writes it",
        ),
    ],
)
def test_metadata_that_does_not_say_enough_is_refused(sharded, change, message):
    changed_metadata(sharded[0], change)
    with pytest.raises(AdapterFormatError, match=message):
        adapter_files.read(sharded[0])


def test_a_part_that_its_file_has_otherwise_is_refused(sharded):
    write_arrays(os.path.join(sharded[0], rank_file(2, 4)), {B: values(5, RANK)})
    with pytest.raises(
        AdapterFormatError, match=r"says that '.*' is in .* as \[.*\], and the file (has it as|lacks it)"
    ):
        adapter_files.read(sharded[0])


def test_without_metadata_ranks_are_refused_by_name(sharded):
    folder = sharded[0]
    os.unlink(os.path.join(folder, "metadata.json"))
    with pytest.raises(AdapterFormatError, match="both in .*-0000000-.* and in .*-0000001-.*, and lacks metadata.json"):
        adapter_files.read(folder)
    os.unlink(os.path.join(folder, rank_file(3, 4)))
    with pytest.raises(AdapterFormatError, match="holds 3 of the 4 files of its step: those of rank 3 are missing"):
        adapter_files.read(folder)


INITIAL_A, INITIAL_B = "self_attention.linear_proj.initial_lora_a", "self_attention.linear_proj.initial_lora_b"


@pytest.fixture
def initialized():
    """The tensors of a run with PiSSA: the pair of a cell, and what was subtracted from the base."""
    tensors = pairs(PROJ.format(0), rows=HIDDEN, columns=12)
    a, b = LAYER.format(0) + INITIAL_A, LAYER.format(0) + INITIAL_B
    return {**tensors, a: values(RANK, 12, seed=1), b: values(HIDDEN, RANK, seed=1)}


def test_an_adapter_that_changed_its_base_is_one_for_the_base_before(tmp_path, initialized):
    found = adapter_files.read(write_step(tmp_path / "step", initialized))
    (path,) = found.paths
    found.set_alpha(6)
    a, b, initial_a, initial_b = initialized.values()
    assert found.rank(path) == 2 * RANK
    scaled_a, scaled_b = found.pair(path)
    np.testing.assert_allclose(
        found.scale(path) * scaled_b @ scaled_a, 6 / RANK * (b @ a - initial_b @ initial_a), 1e-4
    )
    stated = adapter_files.read(write_step(tmp_path / "stated", initialized, **LORA))
    np.testing.assert_allclose(stated.scale(path) * stated.pair(path)[1], found.scale(path) * scaled_b)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda tensors: tensors.pop(LAYER.format(0) + INITIAL_B), MissingTensorsError, "half of an initial pair"),
        (
            lambda tensors: tensors.update({LAYER.format(0) + INITIAL_A: values(RANK + 1, 12)}),
            ShapeMismatchError,
            r"is \[3, 12\], but the trained one is \[2, 12\]",
        ),
    ],
)
def test_an_initial_pair_that_is_not_that_of_its_pair_is_refused(tmp_path, initialized, change, error, message):
    change(initialized)
    with pytest.raises(error, match=message):
        adapter_files.read(write_step(tmp_path / "step", initialized))


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_from_peft_and_back_every_bit_is_there_again(tmp_path, dtype):
    adapter = adapter_of({**CELLS, **DENSE}, dtype=dtype, dropout=0.1, base_model="Qwen/Qwen3-8B")
    adapter_files.write(adapter, str(tmp_path / "peft"))
    report = convert_adapter(str(tmp_path / "peft"), str(tmp_path / "pn"), "pynative", heads=HEADS)
    assert (report.ranks, report.alphas) == ((3 * RANK,), (18.0,))
    assert sorted(os.listdir(tmp_path / "pn")) == [ONE_RANK, "common.json", MANIFEST]
    convert_adapter(str(tmp_path / "pn"), str(tmp_path / "again"), "peft", heads=HEADS)
    assert_same(adapter_files.read(str(tmp_path / "again")), adapter_files.read(str(tmp_path / "peft")))


def test_experts_from_peft_and_back(tmp_path):
    rng_of = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    singles = {
        f"model.layers.{{}}.mlp.experts.{e}.{name}": size for e in range(EXPERTS) for name, size in rng_of.items()
    }
    adapter = adapter_of({**CELLS, **singles}, base_model="Qwen/Qwen3-30B-A3B")
    adapter_files.write(adapter, str(tmp_path / "peft"))
    convert_adapter(str(tmp_path / "peft"), str(tmp_path / "pn"), "pynative", heads=HEADS)
    tensors = stored(tmp_path / "pn")
    holder = "decoder.layers.1.mlp.experts."
    assert tensors[holder + "weight1_lora_a"].shape == (EXPERTS, HIDDEN, 3 * RANK)
    assert tensors[holder + "weight2_lora_b"].shape == (EXPERTS, 3 * RANK, HIDDEN)
    # Experts that are apart: gate's columns come before up's.
    product = 3.0 * tensors[holder + "weight1_lora_a"] @ tensors[holder + "weight1_lora_b"]
    gate = adapter.delta("model.layers.1.mlp.experts.2.gate_proj")
    np.testing.assert_allclose(product[2][:, :INNER], gate.T, rtol=1e-5, atol=1e-6)
    convert_adapter(str(tmp_path / "pn"), str(tmp_path / "again"), "peft", heads=HEADS, experts="single")
    assert_same(adapter_files.read(str(tmp_path / "again")), adapter_files.read(str(tmp_path / "peft")))


def test_a_folder_of_the_trainer_goes_to_peft_and_back_bit_for_bit(tmp_path):
    tensors = {**pairs(QKV.format(0)), **pairs(PROJ.format(0), rows=HIDDEN, columns=12), **stacks()}
    step = write_step(tmp_path / "step", tensors, **LORA)
    convert_adapter(step, str(tmp_path / "peft"), "peft", heads=HEADS, architecture="qwen3_moe")
    convert_adapter(str(tmp_path / "peft"), str(tmp_path / "pn"), "pynative", heads=HEADS, architecture="qwen3_moe")
    again = stored(tmp_path / "pn")
    assert again.keys() == tensors.keys()
    for key, array in tensors.items():
        assert again[key].tobytes() == array.tobytes(), key


def test_doras_magnitudes_and_miss_blocks_are_read(tmp_path):
    dora = {**pairs(QKV.format(0)), f"{QKV.format(0)}.magnitude_lora_b": values(24)}
    miss = {f"{QKV.format(0)}.miss_block_lora_b": values(24, RANK)}
    for tensors, parts, alpha in ((dora, {"A", "B", "magnitude"}, 6), (miss, {"block"}, RANK)):
        adapter = adapter_files.read(write_step(tmp_path / str(alpha), tensors, **LORA))
        assert {part for _, part in adapter.tensors} >= parts
        # MiSS has no scale, whatever lora_config says.
        assert set(adapter.alphas.values()) == {alpha}
        for array in tensors.values():
            assert any(array.tobytes() == other.tobytes() for other in adapter.tensors.values())


def test_the_manifest_says_what_was_written(tmp_path):
    adapter = adapter_of(DENSE, layers=(0, 2), dropout=0.1, base_model="/models/qwen3")
    adapter.use_rslora = True
    convert_adapter(_written(adapter, tmp_path), str(tmp_path / "pn"), "pynative")
    manifest = json.loads((tmp_path / "pn" / MANIFEST).read_text())
    settings = manifest["lora_config"]
    # 6 / sqrt(2) at twice the rank is 16.97, and the trainer takes whole numbers alone.
    assert (settings["lora_rank"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 17, 0.1)
    assert (manifest["base_load_path"], manifest["base_fingerprint"]) == ("/models/qwen3", None)
    found = adapter_files.read(str(tmp_path / "pn"))
    for path in ("model.layers.0.feed_forward.w2", "model.layers.2.feed_forward.w2"):
        np.testing.assert_allclose(found.delta(path), adapter.delta(path), rtol=1e-5, atol=1e-6)
    paths = [f"model.decoder.layers.{layer}.mlp.{cell}" for layer in range(4) for cell in ("linear_fc1", "linear_fc2")]
    selected = [path for path in paths if re.search(settings["target_modules"], path)]
    assert selected == [path for path in paths if ".0." in path or ".2." in path]


def _written(adapter, tmp_path):
    adapter_files.write(adapter, str(tmp_path / "peft"))
    return str(tmp_path / "peft")


def test_the_regex_selects_exactly_the_cells():
    paths = ["decoder.layers.0.mlp.experts.weight1", "decoder.layers.0.mlp.experts.weight2"]
    paths += ["decoder.layers.1.mlp.linear_fc1", "decoder.layers.10.mlp.linear_fc1", "output_layer"]
    regex = re.compile(target_regex(paths))
    cells = ["decoder.layers.0.mlp.experts", *paths[2:]]
    others = ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.11.mlp.linear_fc1", "decoder.layers.1.mlp.experts"]
    # MindFormers 2.0 looks for a sibling of an adapted cell under this path.
    others += ["decoder.layers.1.mlp.linear_fc1.linear_fc2"]
    assert all(regex.search(f"model.{path}") for path in cells)
    assert not any(regex.search(f"model.{path}") for path in others)


def test_a_manifest_that_was_changed_afterwards_is_noticed(tmp_path):
    convert_adapter(_written(adapter_of(DENSE), tmp_path), str(tmp_path / "pn"), "pynative")
    path = tmp_path / "pn" / MANIFEST
    path.write_text(path.read_text().replace('"lora_alpha": 12', '"lora_alpha": 24'))
    with pytest.raises(AdapterFormatError, match="lora_config.lora_alpha is 24, and .* says 12. Set the one"):
        adapter_files.read(str(tmp_path / "pn"))


def test_what_the_trainer_has_no_place_for_is_refused(tmp_path):
    dora = adapter_of({"model.layers.{}.attention.wo": (HIDDEN, 12)})
    for path in dora.paths:
        dora.tensors[path, "magnitude"] = np.ones(HIDDEN, np.float32)
    saved = adapter_of(CELLS, saved_modules={"lm_head.weight": values(3, HIDDEN)})
    embedding = adapter_of({"model.tok_embeddings": (HIDDEN, 12)}, layers=(0,), embeddings={"model.tok_embeddings"})
    for adapter, message in [(dora, "use_dora"), (saved, "saved modules"), (embedding, "put no LoRA on cells such as")]:
        with pytest.raises(AdapterError, match=message):
            adapter_files.write(adapter, str(tmp_path / "pn"), "pynative")
    assert not os.path.lexists(tmp_path / "pn")


def test_a_folder_of_an_adapter_is_replaced_and_another_is_not(tmp_path):
    adapter = adapter_of(DENSE, layers=(0,))
    convert_adapter(_written(adapter, tmp_path), str(tmp_path / "pn"), "pynative")
    convert_adapter(str(tmp_path / "peft"), str(tmp_path / "pn"), "pynative", overwrite=True)
    (tmp_path / "pn" / "run").mkdir()
    with pytest.raises(Exception, match="a folder that holds more than an adapter"):
        convert_adapter(str(tmp_path / "peft"), str(tmp_path / "pn"), "pynative", overwrite=True)
