"""DoRA's magnitudes: in files of every format, matched to networks, merged and compared."""

import json

import numpy as np
import pytest
from mindspore import Tensor

from mindlora import (
    LoraConfig,
    apply_lora,
    combine_adapters,
    compare_adapters,
    convert_adapter,
    inspect_adapter,
    load_lora,
    save_lora,
)
from mindlora.core.errors import (
    AdapterError,
    ConfigError,
    MergeError,
    MissingTensorsError,
    ShapeMismatchError,
    UnexpectedTensorsError,
)
from mindlora.core.numerics.dtypes import BFLOAT16
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import joined_pairs
from mindlora.files.adapters.convert import Heads
from mindlora.files.adapters.dialects import mindformers, peft
from mindlora.files.base.merge import merge_checkpoint
from mindlora.models.architectures import joined_rows
from mindlora.models.variants.dora import DORA
from mindlora.network.merge import merge_lora
from mindlora.network.tree import lora_cells
from mindlora.network.variants.dora import DoRADense
from tests.support.adapter_samples import CONFIG, WEIGHTS, K, Q, assert_same, make
from tests.support.networks import TinyModel, as_array, randomize
from tests.support.refusals import refused

PATHS = {"peft": "adapter", "mindformers": "adapter.safetensors", "ckpt": "adapter.ckpt"}
V = "model.layers.0.attention.wv"


def model(use_dora=True, seed=1, targets=("wq", "w2")):
    """A network whose base is the same for each seed, with normal adapters."""
    network = TinyModel()
    randomize(network.get_parameters(), seed=5)
    apply_lora(network, LoraConfig(lora_rank=2, lora_alpha=3, use_dora=use_dora, target_modules=list(targets)))
    randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed)
    return network


FLOAT32 = np.dtype("<f4")


def dora_adapter(dtype=FLOAT32, paths=(Q, K), **fields):
    adapter = make(dict.fromkeys(paths, 2), dtype=dtype, **fields)
    rng = np.random.default_rng(9)
    for path in paths:
        rows = len(adapter.tensors[path, "B"])
        adapter.tensors[path, "magnitude"] = (
            rng.normal(size=rows).astype(np.float32).astype(dtype if dtype != BFLOAT16 else np.float32)
        )
        if dtype == BFLOAT16:
            adapter.tensors[path, "magnitude"] = (rng.integers(0, 2**14, rows)).astype("<u2").view(BFLOAT16)
    return adapter


# Networks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", PATHS)
@pytest.mark.parametrize("bare", [True, False])
def test_saved_and_loaded(form, bare, tmp_path):
    source, path = model(), str(tmp_path / PATHS[form])
    save_lora(source, path, form)
    target = TinyModel() if bare else model(seed=2)
    load_lora(target, path, on_base_mismatch="ignore")
    for (_, mine), (_, other) in zip(lora_cells(target), lora_cells(source)):
        assert type(mine) is DoRADense and mine.parts().keys() == {"A", "B", "magnitude"}
        for part, parameter in mine.parts().items():
            np.testing.assert_array_equal(parameter.asnumpy(), other.parts()[part].asnumpy())
            assert parameter.name == other.parts()[part].name
    target.set_train()  # Does not replace magnitudes that were loaded.
    save_lora(target, str(tmp_path / "again"))
    save_lora(source, str(tmp_path / "peft"))
    report = compare_adapters(str(tmp_path / "again"), str(tmp_path / "peft"))
    assert report.equal


def test_peft_s_keys_and_configuration(tmp_path):
    save_lora(model(targets=["wq"]), str(tmp_path / "a"))
    assert json.loads((tmp_path / "a" / CONFIG).read_text())["use_dora"] is True
    adapter = adapter_files.read(str(tmp_path / "a"))
    assert [peft.tensor_key(*key) for key in adapter.tensors][0].endswith("q_proj.lora_A.weight")
    assert peft.tensor_key(Q, "magnitude") == "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    assert peft.parse_key(peft.tensor_key(Q, "magnitude")) == (Q, "magnitude")
    assert mindformers.tensor_key(Q, "magnitude") == f"{Q}.mindpet_delta_lora_magnitude"


def test_a_network_that_was_never_trained_saves_the_norms(tmp_path):
    network = TinyModel()
    apply_lora(network, LoraConfig(use_dora=True, target_modules=["wq"]))
    randomize(network.get_parameters())  # the base, loaded late; and the adapter
    for _, cell in lora_cells(network):
        cell.mindpet_delta_lora_magnitude.set_data(Tensor(np.full(6, np.nan, np.float32)))
        cell.mindpet_delta_lora_b.set_data(Tensor(np.zeros((6, 8), np.float32)))
    save_lora(network, str(tmp_path / "a"))
    weight = network.model.layers[0].attention.wq.weight.asnumpy()
    np.testing.assert_allclose(
        adapter_files.read(str(tmp_path / "a")).tensors[Q, "magnitude"], np.linalg.norm(weight, axis=1), rtol=1e-6
    )


@pytest.mark.parametrize("trained", [True, False])
def test_dora_and_lora_are_told_apart(trained, tmp_path):
    path = str(tmp_path / "a")
    save_lora(model(trained), path)
    refused(
        MissingTensorsError if not trained else UnexpectedTensorsError,
        f"{path} was trained with use_dora {trained}, but the network was built with {not trained}, at "
        "model.layers.{0..1}.feed_forward.w2, model.layers.{0..1}.attention.wq: set use_dora to "
        f"{trained}.",
        load_lora,
        model(not trained),
        path,
    )


# Files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.dtype("<f4"), np.dtype("<f2"), BFLOAT16], ids=str)
@pytest.mark.parametrize("form", PATHS)
def test_every_form_and_dtype(form, dtype, tmp_path):
    adapter = dora_adapter(dtype)
    assert adapter.variant is DORA and list(adapter.parts(Q)) == ["A", "B", "magnitude"]
    adapter_files.write(adapter, str(tmp_path / PATHS[form]), form)
    found = adapter_files.read(str(tmp_path / PATHS[form]))
    adapter.selection = found.selection
    assert_same(found, adapter)


def test_conversion_and_back(tmp_path):
    adapter_files.write(dora_adapter(), str(tmp_path / "a"))
    convert_adapter(str(tmp_path / "a"), str(tmp_path / "b.ckpt"), "ckpt")
    convert_adapter(str(tmp_path / "b.ckpt"), str(tmp_path / "c"), "peft")
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "c" / WEIGHTS).read_bytes()
    refused(
        AdapterError,
        "slora does not serve DoRA magnitudes (use_dora). Merge the adapter into its base, or write format 'peft'.",
        convert_adapter,
        str(tmp_path / "a"),
        str(tmp_path / "d"),
        "slora",
    )


def rewritten(path, change=None, **fields):
    """Writes an adapter whose tensors were changed after its configuration was."""
    adapter = dora_adapter()
    adapter_files.write(adapter, str(path))
    config = {**json.loads((path / CONFIG).read_text()), **fields}
    (path / CONFIG).write_text(json.dumps(config))
    if change:
        from safetensors.numpy import load_file, save_file

        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS)
    return str(path)


ONE_SAVE = "Use the tensors and the configuration of one save."
SAVE = "Save the adapter again with the program that trained it."
QK = "base_model.model.model.layers.0.self_attn.{}_proj.lora_magnitude_vector"


@pytest.mark.parametrize(
    "kind, message, change, fields",
    [
        (
            UnexpectedTensorsError,
            ": use_dora is False, but the adapter has DoRA magnitudes. " + ONE_SAVE,
            None,
            {"use_dora": False},
        ),
        (
            UnexpectedTensorsError,
            ": use_dora is False, but the adapter has DoRA magnitudes. " + ONE_SAVE,
            None,
            {"use_dora": None},
        ),
        (
            MissingTensorsError,
            ": use_dora is True, but the adapter has no DoRA magnitudes. " + ONE_SAVE,
            lambda tensors: [tensors.pop(QK.format(cell)) for cell in "qk"],
            {},
        ),
        (
            MissingTensorsError,
            " has a magnitude at some cells but none at model.layers.0.attention.wq. Copy or save the adapter again.",
            lambda tensors: tensors.pop(QK.format("q")),
            {},
        ),
        (
            MissingTensorsError,
            " lacks half of 1 pairs: it holds model.layers.0.attention.wv magnitude without its other half. Copy or "
            "save the adapter again.",
            lambda tensors: tensors.update({QK.format("v"): np.ones(4, np.float32)}),
            {},
        ),
        (
            ShapeMismatchError,
            ": the magnitude is [5] and must be [out], at model.layers.0.attention.wq (A [2, 6], B [6, 2]). " + SAVE,
            lambda tensors: tensors.update({QK.format("q"): np.ones(5, np.float32)}),
            {},
        ),
        (
            ShapeMismatchError,
            ": the magnitude is [6, 1] and must be [out], at model.layers.0.attention.wq (A [2, 6], B [6, 2]). " + SAVE,
            lambda tensors: tensors.update({QK.format("q"): np.ones((6, 1), np.float32)}),
            {},
        ),
    ],
)
def test_tensors_that_do_not_belong_together(kind, message, change, fields, tmp_path):
    path = rewritten(tmp_path / "a", change, **fields)
    refused(kind, path + message, adapter_files.read, path)


def test_all_magnitudes_lost(tmp_path):
    path = str(tmp_path / "adapter.safetensors")
    adapter_files.write(dora_adapter(), path, "mindformers")
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with safe_open(path, "np") as file:
        metadata, keys = file.metadata(), list(file.keys())
        save_file({key: file.get_tensor(key) for key in keys if "magnitude" not in key}, path, metadata)
    refused(
        MissingTensorsError,
        f"{path} lacks the DoRA magnitudes that mindlora's metadata in it names. Copy or save the file again.",
        adapter_files.read,
        path,
    )


def test_combining_is_refused():
    refused(
        AdapterError,
        "Adapter 2 is a DoRA adapter (use_dora), which cannot be combined: several magnitudes of one row have no "
        "defined sum. Merge the adapters into the base one after the other instead.",
        combine_adapters,
        [make(), dora_adapter()],
        [1, 1],
        "cat",
    )


# Joined cells ---------------------------------------------------------------------------------------------


def test_rows_of_joined_cells_keep_their_magnitudes():
    path = "model.layers.0.attention.w_qkv"
    adapter = dora_adapter(paths=(Q, K, V), rows={Q: 8, K: 4, V: 4})
    separate = {part: adapter.tensors[part, "magnitude"] for part in (Q, K, V)}
    before = {key: array.copy() for key, array in adapter.tensors.items()}
    joined_pairs.join_pairs(adapter, path, 16, 2)
    assert adapter.paths == [path]
    np.testing.assert_array_equal(
        adapter.tensors[path, "magnitude"], joined_rows.join_rows(list(separate.values()), groups=2)
    )
    joined_pairs.split_pairs(adapter, path, 2, 2)
    assert {key: array.tobytes() for key, array in adapter.tensors.items()} == {
        key: array.tobytes() for key, array in before.items()
    }
    for part in ("A", "B", "magnitude"):
        del adapter.tensors[K, part]
    refused(
        AdapterError,
        f"{path} joins {Q}, {K}, {V}, but the DoRA adapter has no pair for {K}: the DoRA magnitudes "
        "of those rows are known only from the base. Build the model with qkv_concat: False.",
        joined_pairs.join_pairs,
        adapter,
        path,
        16,
        2,
    )


def test_gate_rows_and_mixed_dtypes():
    w1, w3 = (f"model.layers.0.feed_forward.{leaf}" for leaf in ("w1", "w3"))
    adapter = dora_adapter(paths=(w1, w3), rows={w1: 4, w3: 4})
    adapter.tensors[w3, "A"] = adapter.tensors[w3, "A"].astype(np.float16)
    sizes = [adapter.tensors[path, "magnitude"] for path in (w1, w3)]
    joined_pairs.join_pairs(adapter, "model.layers.0.feed_forward.w_gate_hidden", 8)
    np.testing.assert_array_equal(
        adapter.tensors["model.layers.0.feed_forward.w_gate_hidden", "magnitude"], np.stack(sizes, 1).reshape(-1)
    )


def test_conversion_joins(tmp_path):
    adapter_files.write(dora_adapter(paths=(Q, K, V), rows={Q: 8, K: 4, V: 4}), str(tmp_path / "a"))
    convert_adapter(str(tmp_path / "a"), str(tmp_path / "b.ckpt"), "ckpt", heads=Heads(4, 2, 2), concatenate=True)
    convert_adapter(str(tmp_path / "b.ckpt"), str(tmp_path / "c"), "peft", heads=Heads(4, 2, 2))
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "c" / WEIGHTS).read_bytes()


# Merging and comparing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_checkpoint_is_merged_as_a_network_is(dtype, tmp_path):
    from safetensors.numpy import load_file, save_file

    network = model()
    base = {p.name: p.asnumpy().astype(dtype) for p in network.get_parameters() if "lora" not in p.name}
    for parameter in network.get_parameters():
        if parameter.name in base:
            parameter.set_data(Tensor(base[parameter.name].astype(np.float32)))
    save_file(base, tmp_path / "base.safetensors")
    save_lora(network, str(tmp_path / "a"))
    merge_checkpoint(str(tmp_path / "base.safetensors"), str(tmp_path / "a"), str(tmp_path / "merged.safetensors"))
    merge_lora(network)
    merged = load_file(tmp_path / "merged.safetensors")
    for parameter in network.get_parameters():
        if parameter.name in base:
            np.testing.assert_allclose(
                merged[parameter.name].astype(np.float64),
                as_array(parameter),
                rtol=2e-3 if dtype == "float16" else 1e-5,
                atol=1e-6,
                err_msg=parameter.name,
            )
    assert np.abs(merged[f"{Q}.weight"] - base[f"{Q}.weight"]).max() > 0.1


def test_a_row_of_zeros_cannot_be_merged(tmp_path):
    from safetensors.numpy import save_file

    adapter = dora_adapter(paths=(Q,))
    adapter.tensors[Q, "B"][:] = 0
    adapter_files.write(adapter, str(tmp_path / "a"))
    weight = np.ones((6, 6), np.float32)
    weight[2] = 0
    save_file({f"{Q}.weight": weight}, tmp_path / "base.safetensors")
    with pytest.raises(MergeError, match=r"wq.weight, row 2: the result on a random probe is nan off"):
        merge_checkpoint(str(tmp_path / "base.safetensors"), str(tmp_path / "a"), str(tmp_path / "m.safetensors"))
    assert not (tmp_path / "m.safetensors").exists()


def test_the_inspection_of_it(tmp_path):
    adapter = dora_adapter()
    adapter_files.write(adapter, str(tmp_path / "a"))
    adapter.tensors[Q, "magnitude"] = adapter.tensors[Q, "magnitude"] + np.float32(0.5)
    adapter_files.write(adapter, str(tmp_path / "b"))
    report = inspect_adapter(str(tmp_path / "a"))
    assert report.variant == "DoRA" and "yes, with a magnitude for each row" in str(report)
    diff = compare_adapters(str(tmp_path / "a"), str(tmp_path / "b"))
    same, changed = diff.cells
    assert (same.path, changed.path) == (K, Q)
    assert not diff.equal and same.equal and same.difference_magnitude == 0 and not changed.equal
    assert changed.difference_a == changed.difference_b == 0
    assert changed.difference_magnitude == pytest.approx(0.5 * 6**0.5, rel=1e-5)
    assert "|dm|" in str(diff)
    adapter_files.write(make(), str(tmp_path / "plain"))
    diff = compare_adapters(str(tmp_path / "a"), str(tmp_path / "plain"))
    assert not diff.equal and diff.settings["DoRA"] == ("yes", "no") and diff.cells[0].difference_magnitude is None
    assert "|dm|" not in str(diff)


def test_use_dora_must_be_true_or_false():
    refused(ConfigError, "use_dora is 'yes': it must be True or False.", LoraConfig, use_dora="yes")
