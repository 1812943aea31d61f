"""save_lora and load_lora: what is written, what is refused, and that nothing is ever half done."""
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import load_file, save_file

from mindlora import LoRADense, LoraConfig, LoraError, apply_lora, load_lora, merge_lora, save_lora, unmerge_lora
from mindlora.errors import (AdapterFormatError, BaseMismatchError, MissingTensorsError, NotFiniteError,
                             RankMismatchError, ScaleMismatchError, ShapeMismatchError, TruncatedAdapterError,
                             UnexpectedTensorsError)
from mindlora.fingerprint import base_fingerprint
from tests import killed_saves
from tests.helpers import HuggingFaceLayer, TinyModel, adapters, as_array, randomize, snapshot

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FORMS = [("peft", "adapter"), ("ckpt", "adapter.ckpt")]


def network(target_modules=("wq", "wk"), seed=1, base=5, cell=TinyModel, **fields):
    """Returns a network with LoRA whose base and adapters are normal, told by their seeds."""
    result = cell()
    randomize(result.get_parameters(), base)
    apply_lora(result, LoraConfig(**{"lora_rank": 2, "lora_alpha": 3, "target_modules": target_modules, **fields}))
    randomize(adapters(result).values(), seed)
    return result


def key(layer, leaf, half):
    return f"base_model.model.model.layers.{layer}.self_attn.{leaf}.lora_{half}.weight"


def refused(target, path, error, message, **arguments):
    """Asserts the class and the message of an error of load_lora, and that no byte of the network has changed."""
    before = snapshot(target)
    with pytest.raises(error) as caught:
        load_lora(target, path, **arguments)
    assert type(caught.value) is error and isinstance(caught.value, LoraError)
    assert message.replace("PATH", str(path)) in str(caught.value)
    assert snapshot(target) == before


def edited(path, edit, metadata=None):
    """Rewrites the tensors of an adapter folder after ``edit`` has changed their dict."""
    tensors = load_file(os.path.join(path, WEIGHTS))
    edit(tensors)
    save_file(tensors, os.path.join(path, WEIGHTS), metadata)


@pytest.fixture
def saved(tmp_path):
    """An adapter folder of ``network(seed=2)``."""
    path = str(tmp_path / "adapter")
    save_lora(network(seed=2), path)
    return path


@pytest.fixture
def saved_ckpt(tmp_path):
    """The same as a .ckpt file."""
    path = str(tmp_path / "adapter.ckpt")
    save_lora(network(seed=2), path, format="ckpt")
    return path


# The round trip -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form, name", FORMS)
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, form, name, param_init_type):
    source = network("all-linear", seed=2, param_init_type=param_init_type)
    target = network("all-linear", seed=3, param_init_type=param_init_type)
    path = tmp_path / "deeper" / name  # any kind of path will do
    save_lora(source, path, format=form)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(target, path)
    assert snapshot(target) == snapshot(source)
    assert all(p.dtype == getattr(ms, param_init_type) for p in adapters(target).values())


@pytest.mark.parametrize("form, name", FORMS)
def test_saving_changes_nothing_in_the_network(tmp_path, form, name):
    source = network()
    before = snapshot(source)
    save_lora(source, str(tmp_path / name), format=form)
    assert snapshot(source) == before


@pytest.mark.parametrize("written, read", [("float32", "float16"), ("float16", "float32"), ("bfloat16", "float32"),
                                           ("float32", "bfloat16")])
@pytest.mark.parametrize("form, name", FORMS)
def test_another_dtype_is_cast_to_the_network_s_own(tmp_path, form, name, written, read):
    source, target = network(seed=2, param_init_type=written), network(seed=3, param_init_type=read)
    save_lora(source, str(tmp_path / name), format=form)
    load_lora(target, str(tmp_path / name))
    for parameter, original in zip(adapters(target).values(), adapters(source).values()):
        assert parameter.dtype == getattr(ms, read)
        np.testing.assert_array_equal(as_array(parameter), as_array(original.astype(getattr(ms, read))))


@pytest.mark.filterwarnings("ignore:lora_alpha is")
@pytest.mark.parametrize("alpha", [1, 2.3, 1 / 3, 1e6])
@pytest.mark.parametrize("form, name", FORMS)
def test_every_scale_makes_the_round_trip(tmp_path, form, name, alpha):
    save_lora(network(lora_alpha=alpha, seed=2), str(tmp_path / name), format=form)
    load_lora(network(lora_alpha=alpha), str(tmp_path / name))


@pytest.mark.parametrize("form, name", FORMS)
def test_an_adapter_takes_the_place_of_another(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network("all-linear", seed=2), path, format=form)
    save_lora(network(seed=4), path, format=form)
    target = network()
    load_lora(target, path)
    assert snapshot(target) == snapshot(network(seed=4)) and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("form, name", FORMS)
def test_a_network_under_hugging_face_names(tmp_path, form, name):
    source, target = (network("all-linear", seed=seed, cell=HuggingFaceLayer) for seed in (2, 3))
    save_lora(source, str(tmp_path / name), format=form)
    load_lora(target, str(tmp_path / name))
    assert snapshot(target) == snapshot(source)


@pytest.mark.parametrize("form, name", FORMS)
def test_a_bare_cell(tmp_path, form, name):
    source, target = LoRADense(6, 5, 2, 3, lora_b_init="ones"), LoRADense(6, 5, 2, 3)
    save_lora(source, str(tmp_path / name), format=form)
    load_lora(target, str(tmp_path / name), on_base_mismatch="ignore")
    for mine, original in zip(target.lora_parameters(), source.lora_parameters()):
        np.testing.assert_array_equal(mine.asnumpy(), original.asnumpy())


def test_a_network_whose_values_are_not_there_yet(tmp_path, saved, semi_auto_parallel, caplog):
    target = TinyModel()
    apply_lora(target, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "wk"]))
    assert all(p.has_init for p in adapters(target).values())
    with caplog.at_level(logging.WARNING, "mindlora"):
        load_lora(target, saved)
    assert [record.getMessage() for record in caplog.records] == [
        f"{saved}: the base has no values yet, so whether it is the one the adapter was trained on was not checked."]
    target.init_parameters_data()
    loaded = adapters(target)
    for name, parameter in adapters(network(seed=2)).items():
        np.testing.assert_array_equal(loaded[name].asnumpy(), parameter.asnumpy())


# What is written ------------------------------------------------------------------------------------------------

def test_a_folder_holds_two_files_and_its_config_is_peft_s(tmp_path):
    path = tmp_path / "adapter"
    save_lora(network(["wq", "w2"], lora_dropout=0.1), str(path), base_model="meta-llama/Llama-2-7b")
    assert sorted(os.listdir(path)) == [CONFIG, WEIGHTS]
    assert json.loads((path / CONFIG).read_text()) == {
        "alpha_pattern": {}, "base_model_name_or_path": "meta-llama/Llama-2-7b", "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "lora_alpha": 3,
        "lora_dropout": 0.1, "modules_to_save": None, "peft_type": "LORA", "r": 2, "rank_pattern": {},
        "target_modules": ["down_proj", "q_proj"], "task_type": "CAUSAL_LM", "use_dora": False,
        "use_rslora": False}


def test_cells_that_are_not_all_of_their_name_are_listed_by_their_paths(tmp_path):
    save_lora(network(["layers.0.attention.wq", "lm_head"]), str(tmp_path / "adapter"))
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert config["target_modules"] == ["lm_head", "model.layers.0.self_attn.q_proj"]
    assert config["base_model_name_or_path"] is None


@pytest.mark.parametrize("param_init_type, dtype", [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_the_header_names_lora_tensors_alone(tmp_path, param_init_type, dtype):
    source = network(param_init_type=param_init_type)
    save_lora(source, str(tmp_path / "adapter"))
    raw = (tmp_path / "adapter" / WEIGHTS).read_bytes()
    header = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
    metadata = header.pop("__metadata__")
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {
        key(layer, leaf, half): (dtype, shape) for layer in range(2) for leaf, half, shape in [
            ("q_proj", "A", [2, 6]), ("q_proj", "B", [6, 2]), ("k_proj", "A", [2, 6]), ("k_proj", "B", [4, 2])]}
    assert metadata["format"] == "pt"
    assert json.loads(metadata["mindlora"]) == {"base_fingerprint": base_fingerprint(source)}


def test_the_tensors_are_not_transposed(saved):
    a = network(seed=2).model.layers[1].attention.wk.mindpet_delta_lora_a
    np.testing.assert_array_equal(load_file(os.path.join(saved, WEIGHTS))[key(1, "k_proj", "A")], a.asnumpy())


def test_a_ckpt_holds_lora_tensors_under_mindformers_names_and_a_record_of_ours(saved_ckpt):
    content = ms.load_checkpoint(saved_ckpt)
    source = adapters(network(seed=2))
    assert content.keys() == {"mindlora_begin", *source, "mindlora"}
    for name, parameter in source.items():
        np.testing.assert_array_equal(content[name].asnumpy(), parameter.asnumpy())
    assert json.loads(str(content["mindlora"])) == {
        "alphas": {f"model.layers.{layer}.attention.{leaf}": 3.0 for layer in range(2) for leaf in ("wq", "wk")},
        "base_fingerprint": base_fingerprint(network(seed=2)), "base_model": None, "dropout": 0.0, "selection": {},
        "embeddings": [], "use_dora": False, "use_rslora": False, "whole": []}


def test_mindspore_loads_a_ckpt_into_the_network(saved_ckpt):
    target = network()
    ms.load_checkpoint(saved_ckpt, target)
    assert snapshot(target) == snapshot(network(seed=2))


# Refusals of save_lora ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form, name, message", [
    ("safetensors", "adapter", "format is 'safetensors', which is not known. Known: ckpt, mindformers, peft, slora."),
    ("ckpt", "adapter", "path is 'adapter': format 'ckpt' writes a file that ends in .ckpt."),
    ("mindformers", "adapter", "path is 'adapter': format 'mindformers' writes a file that ends in .safetensors."),
    ("slora", "adapter.safetensors", "path is 'adapter.safetensors': format 'slora' writes a folder."),
    ("peft", "adapter.ckpt", "path is 'adapter.ckpt': format 'peft' writes a folder.")])
def test_a_format_must_be_known_and_fit_the_path(tmp_path, form, name, message):
    with pytest.raises(LoraError) as error:
        save_lora(network(), name, format=form)
    assert str(error.value) == message and not os.listdir(tmp_path)


def test_a_folder_does_not_replace_a_file_nor_a_file_a_folder(tmp_path):
    (tmp_path / "adapter").write_text("mine")
    (tmp_path / "adapter.ckpt").mkdir()
    with pytest.raises(LoraError) as error:
        save_lora(network(), "adapter")
    assert str(error.value) == ("path is 'adapter', where a file stands, which an adapter with format 'peft' cannot "
                                "replace. Remove it, or give another path.")
    with pytest.raises(LoraError) as error:
        save_lora(network(), "adapter.ckpt", format="ckpt")
    assert str(error.value) == ("path is 'adapter.ckpt', where a folder stands, which an adapter with format 'ckpt' "
                                "cannot replace. Remove it, or give another path.")
    assert (tmp_path / "adapter").read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["adapter", "adapter.ckpt"]


def test_without_adapters_there_is_nothing_to_save(tmp_path):
    with pytest.raises(LoraError) as error:
        save_lora(TinyModel(), str(tmp_path / "other"))
    assert str(error.value) == ("The network holds no LoRADense cell, so there is no adapter to save. Call apply_lora "
                                "first.")
    assert not os.listdir(tmp_path)


def test_cells_that_scale_in_two_ways_do_not_go_into_one_file(tmp_path):
    source = nn.SequentialCell(LoRADense(6, 5, 2, 3), LoRADense(5, 4, 2, 3, use_rslora=True))
    with pytest.raises(LoraError) as error:
        save_lora(source, str(tmp_path / "adapter"))
    assert str(error.value) == ("Some cells of the network scale with use_rslora and some without. One adapter has one "
                                "of them.")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form, name", FORMS)
def test_nan_is_not_saved_and_the_old_adapter_stays(tmp_path, form, name, param_init_type, value):
    path = str(tmp_path / name)
    source = network(seed=2, param_init_type=param_init_type)
    save_lora(source, path, format=form)
    b = source.model.layers[1].attention.wk.mindpet_delta_lora_b
    values = np.ones(b.shape, np.float32)
    values[-1, -1] = value
    b.set_data(Tensor(values, b.dtype))
    with pytest.raises(NotFiniteError) as error:
        save_lora(source, path, format=form)
    assert str(error.value) == ("The network holds LoRA tensors with NaN or infinity, so nothing was saved: "
                                "model.layers.1.attention.wk B.")
    target = network(param_init_type=param_init_type)
    load_lora(target, path)
    assert snapshot(target) == snapshot(network(seed=2, param_init_type=param_init_type))
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("form, name", FORMS)
def test_an_error_while_writing_leaves_the_old_adapter(tmp_path, monkeypatch, form, name):
    path = str(tmp_path / name)
    save_lora(network(seed=2), path, format=form)

    def full(*arguments, **keys):
        raise OSError("no space left on device")

    monkeypatch.setattr("mindlora.atomic._sync", full)
    with pytest.raises(OSError, match="no space left"):
        save_lora(network(seed=4), path, format=form)
    monkeypatch.undo()
    target = network()
    load_lora(target, path)
    assert snapshot(target) == snapshot(network(seed=2)) and os.listdir(tmp_path) == [name]


# Refusals of load_lora: tensors ---------------------------------------------------------------------------------

@pytest.mark.parametrize("form, name", FORMS)
def test_missing_and_unexpected_tensors(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network(["wq", "wk"]), path, format=form)
    k, v = (f"model.layers.{{0..1}}.attention.{leaf} A, model.layers.{{0..1}}.attention.{leaf} B"
            for leaf in ("wk", "wv"))
    unexpected = "PATH holds {} LoRA tensors that the network has no place for: {}. Check target_modules."
    missing = "PATH lacks {} LoRA tensors of the network: {}. Check target_modules."
    refused(network(["wq", "wk", "wv"]), path, MissingTensorsError, missing.format(4, v))
    refused(network(["wq"]), path, UnexpectedTensorsError, unexpected.format(4, k))
    refused(network(["wq", "wv"]), path, MissingTensorsError, unexpected.format(4, k) + " " + missing.format(4, v))
    refused(network(["wv"]), path, MissingTensorsError, "PATH holds 8 LoRA tensors that the network has no place for")


def test_a_single_missing_tensor_is_named(saved):
    edited(saved, lambda tensors: tensors.pop(key(1, "k_proj", "B")))
    refused(network(), saved, MissingTensorsError,
            "PATH lacks half of 1 pairs: it holds model.layers.1.attention.wk A without its other half.")


def test_a_wrong_shape_is_named_with_both_shapes(saved):
    def edit(tensors):
        tensors[key(0, "q_proj", "A")] = np.ones((2, 7), np.float32)
        tensors[key(1, "k_proj", "B")] = np.ones((5, 2), np.float32)
    edited(saved, edit)
    refused(network(), saved, ShapeMismatchError,
            "PATH: 2 tensors have another shape: model.layers.0.attention.wq A is [2, 7], the network's is [2, 6]; "
            "model.layers.1.attention.wk B is [5, 2], the network's is [4, 2].")


@pytest.mark.parametrize("shape, problem", [
    ((3, 6), "A [r, in] and B [out, r] have no rank r in common"), ((6, 2), "A is transposed: it must be [r, in]"),
    ((12,), "A and B must be matrices"), ((1, 2, 6), "A and B must be matrices"), ((), "A and B must be matrices"),
    ((2, 0), "A or B is empty")])
def test_one_tensor_of_another_rank_or_dimension_is_a_wrong_shape(saved, shape, problem):
    edited(saved, lambda tensors: tensors.update({key(0, "q_proj", "A"): np.ones(shape, np.float32)}))
    refused(network(), saved, ShapeMismatchError,
            f"PATH: {problem}, at model.layers.0.attention.wq (A {list(shape)}, B [6, 2]).")


@pytest.mark.parametrize("form, name", FORMS)
def test_a_wrong_rank_says_which_to_set(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network(["wq"], lora_rank=4), path, format=form)
    refused(network(["wq"]), path, RankMismatchError,
            "PATH has rank 4, the network was built with lora_rank 2: set lora_rank to 4.")


def test_a_rank_that_is_declared_but_not_there_is_refused(saved):
    configured(saved, r=4)
    refused(network(), saved, RankMismatchError,
            "PATH: the configuration declares rank 4 and the tensors have 2, at model.layers.{0..1}.attention.wk (A "
            "[2, 6], B [4, 2]), model.layers.{0..1}.attention.wq (A [2, 6], B [6, 2]).")


@pytest.mark.parametrize("form, name", FORMS)
def test_a_wrong_alpha_says_which_to_set(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network(lora_alpha=4.5), path, format=form)
    refused(network(), path, ScaleMismatchError,
            "PATH was trained with lora_alpha 4.5, the network was built with 3: set lora_alpha to 4.5, or its effect "
            "is scaled wrongly.")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nan_is_not_loaded(saved, value, dtype):
    def edit(tensors):
        tensors[key(1, "k_proj", "A")] = np.array([[1] * 5 + [value], [1] * 6], dtype)
    edited(saved, edit)
    refused(network(), saved, NotFiniteError,
            "PATH holds tensors with NaN or infinity: model.layers.1.attention.wk A.")


# Refusals of load_lora: files -----------------------------------------------------------------------------------

def configured(path, **fields):
    """Changes fields of an adapter_config.json."""
    file = pathlib.Path(path, CONFIG)
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_cut_anywhere_in_the_tensors_is_noticed(saved):
    file = pathlib.Path(saved, WEIGHTS)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    target = network()
    cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1, *range(0, len(whole), 61)}
    for cut in sorted(cuts):
        file.write_bytes(whole[:cut])
        refused(target, saved, TruncatedAdapterError,
                f"{file} is truncated or damaged: its {cut} bytes are not what its header declares (")
    file.write_bytes(whole)
    load_lora(target, saved)


def test_a_cut_anywhere_in_a_ckpt_is_noticed(saved_ckpt):
    file = pathlib.Path(saved_ckpt)
    whole = file.read_bytes()
    target = network()
    messages = set()
    # Every one of its bytes, as a cut between two records leaves what MindSpore takes for a whole file.
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        refused(target, saved_ckpt, TruncatedAdapterError, "PATH is truncated")
        with pytest.raises(TruncatedAdapterError) as error:
            load_lora(target, saved_ckpt, strict=False)
        messages.add(str(error.value).split(":", 1)[0] + (" last" if "last record" in str(error.value) else ""))
    assert messages == {f"{file} is truncated", f"{file} is truncated last", f"{file} is truncated or no MindSpore "
                        "checkpoint"}
    file.write_bytes(whole)
    load_lora(target, saved_ckpt)


def test_what_is_no_adapter_at_all(tmp_path):
    (tmp_path / "adapter.bin").write_bytes(b"PK")
    (tmp_path / "adapter.pth").write_bytes(b"PK")
    (tmp_path / "no.safetensors").write_bytes(b"this is no safetensors file, but it is long enough to be one")
    (tmp_path / "no.ckpt").write_bytes(b"this is no checkpoint of MindSpore's, but it is long enough to be one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.bin").touch()
    (tmp_path / "other" / "a.txt").touch()
    target = network()
    for name, message in [
            ("absent", "PATH does not exist."), ("absent.ckpt", "PATH does not exist."),
            ("adapter.pth", "PATH is neither an adapter folder nor a .safetensors, .ckpt or .bin file."),
            ("adapter.bin", "PATH is a pickle, which can run programs."),
            ("empty", "PATH holds no adapter_model.safetensors. It holds: nothing."),
            ("other", "PATH holds no adapter_model.safetensors. It holds: a.txt, b.bin.")]:
        refused(target, tmp_path / name, AdapterFormatError, message)
    refused(target, tmp_path / "no.ckpt", TruncatedAdapterError, "PATH is truncated or no MindSpore checkpoint: ")
    refused(target, tmp_path / "no.safetensors", AdapterFormatError, "PATH is not a safetensors file: ")


def test_a_folder_without_a_config(saved):
    os.unlink(os.path.join(saved, CONFIG))
    refused(network(), saved, AdapterFormatError,
            f"{os.path.join(saved, CONFIG)} is missing: an adapter folder holds it beside its weights.")


@pytest.mark.parametrize("text, message", [
    ('{"r": 2', f"{CONFIG} is not JSON: "), ("", f"{CONFIG} is not JSON: "),
    ("[2, 3]", f"{CONFIG} holds a list and not a JSON object."),
    ('{"lora_alpha": 3}', f"{CONFIG}: r is None, it must be a whole number of at least 1."),
    ('{"r": 2, "lora_alpha": 3, "use_bdlora": true}', f"{CONFIG}: use_bdlora is True, which is not supported")])
def test_a_config_that_cannot_be_used(saved, text, message):
    pathlib.Path(saved, CONFIG).write_text(text)
    refused(network(), saved, AdapterFormatError, message)


def test_a_safetensors_file_without_lora_tensors(saved):
    base = {f"model.layers.{i}.weight": np.ones(2, np.float32) for i in range(7)}
    save_file(base, os.path.join(saved, WEIGHTS))
    refused(network(), saved, AdapterFormatError,
            f"{WEIGHTS} holds no LoRA tensor. It holds: model.layers.0.weight, model.layers.1.weight, "
            "model.layers.2.weight, model.layers.3.weight, model.layers.4.weight, ....")
    save_file({}, os.path.join(saved, WEIGHTS))
    refused(network(), saved, AdapterFormatError, f"{WEIGHTS} holds no LoRA tensor. It holds: nothing.")


def test_a_ckpt_without_lora_tensors(tmp_path):
    path = str(tmp_path / "base.ckpt")
    ms.save_checkpoint(TinyModel(), path)
    refused(network(), path, AdapterFormatError,
            "PATH holds no LoRA tensor: no name in it is one of an adapter's.")


def test_a_file_of_peft_with_foreign_tensors(saved):
    edited(saved, lambda tensors: tensors.update({
        "lm_head.weight": np.ones(2, np.float32),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight": np.ones(6, np.float32)}))
    refused(network(), saved, UnexpectedTensorsError,
            f"{WEIGHTS} holds tensors that are not LoRA's: base_model.model.model.layers.0.self_attn.q_proj."
            "lora_magnitude_vector.weight, lm_head.weight.")


def test_a_file_of_peft_with_a_base_weight_that_modules_to_save_does_not_name(saved):
    edited(saved, lambda tensors: tensors.update({
        f"base_model.model.model.layers.{i}.input_layernorm.weight": np.ones(6, np.float32) for i in range(2)}))
    refused(network(), saved, UnexpectedTensorsError, "PATH holds tensors that are neither LoRA's nor of "
            "modules_to_save: model.layers.{0..1}.attention_norm.weight.")


# strict=False ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form, name", FORMS)
def test_not_strict_loads_what_fits_and_says_the_rest(tmp_path, form, name, caplog):
    path = str(tmp_path / name)
    save_lora(network(["wq", "wk"], seed=2), path, format=form)
    target = network(["wq", "wv"], seed=3)
    with caplog.at_level(logging.WARNING, "mindlora"):
        load_lora(target, path, strict=False, on_base_mismatch="ignore")
    q, v = network(["wq", "wk"], seed=2), network(["wq", "wv"], seed=3)
    for parameter_name, parameter in adapters(target).items():
        source = q if ".wq." in parameter_name else v
        np.testing.assert_array_equal(parameter.asnumpy(), adapters(source)[parameter_name].asnumpy())
    k, v = (f"model.layers.{{0..1}}.attention.{leaf} A, model.layers.{{0..1}}.attention.{leaf} B" for leaf in (
        "wk", "wv"))
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} holds 4 LoRA tensors that the network has no place for: {k}. Check target_modules. Loading the rest, "
        "as strict is False.",
        f"{path} lacks 4 LoRA tensors of the network: {v}. Check target_modules. Loading the rest, as strict is "
        "False."]


def test_not_strict_needs_one_tensor_at_least(saved):
    refused(network(["wv"]), saved, MissingTensorsError, "PATH shares no LoRA tensor with the network. PATH holds 8 ",
            strict=False)


def test_not_strict_still_checks_what_it_loads(saved):
    refused(network(["wq", "wv"], lora_rank=3), saved, RankMismatchError, "PATH has rank 2", strict=False)
    refused(network(["wq", "wv"], lora_alpha=4), saved, ScaleMismatchError, "lora_alpha 3", strict=False)
    edited(saved, lambda tensors: tensors.update({key(0, "q_proj", "A"): np.full((2, 6), np.nan, np.float32)}))
    refused(network(["wq", "wv"]), saved, NotFiniteError, "model.layers.0.attention.wq A.", strict=False)


# Another base ---------------------------------------------------------------------------------------------------

MISMATCH = ("PATH was trained on another base: the adapted weights have other values (another checkpoint, or another "
            "dtype). Load the base checkpoint it was trained on.")


@pytest.mark.parametrize("form, name", FORMS)
def test_another_base_is_warned_of(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network(seed=2), path, format=form)
    target = network(base=6)
    with pytest.warns(UserWarning) as caught:
        load_lora(target, path)
    assert [str(warning.message) for warning in caught] == [MISMATCH.replace("PATH", path)]
    assert caught[0].filename == __file__
    loaded = adapters(target)
    for parameter_name, parameter in adapters(network(seed=2)).items():
        np.testing.assert_array_equal(loaded[parameter_name].asnumpy(), parameter.asnumpy())


@pytest.mark.parametrize("form, name", FORMS)
def test_another_base_is_an_error_where_that_is_asked_for(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network(seed=2), path, format=form)
    refused(network(base=6), path, BaseMismatchError, MISMATCH, on_base_mismatch="error")
    load_lora(network(), path, on_base_mismatch="error")


def test_another_base_can_be_ignored(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(network(base=6), saved, on_base_mismatch="ignore")


def test_a_file_that_knows_no_base_is_loaded_in_silence(saved):
    edited(saved, lambda tensors: None, metadata={"format": "pt"})  # as PEFT itself writes it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(network(base=6), saved, on_base_mismatch="error")


def test_an_unknown_way_to_treat_it_is_refused(saved):
    with pytest.raises(LoraError) as error:
        load_lora(network(), saved, on_base_mismatch="raise")
    assert str(error.value) == "on_base_mismatch is 'raise': it must be 'warn', 'error' or 'ignore'."


# MindFormers' own LoRA ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_a_checkpoint_of_a_whole_training_gives_its_adapter(tmp_path, form):
    source = network(seed=2)
    content = [{"name": p.name, "data": Tensor(p.asnumpy())} for p in source.get_parameters()]
    content += [{"name": prefix + name, "data": Tensor(np.full(p.shape, 7, np.float32))}
                for prefix in ("adam_m.", "adam_v.") for name, p in adapters(source).items()]
    path = str(tmp_path / f"llama_rank_0-4_2.{form}")
    facts = {"epoch_num": 4, "step_num": 8, "loss_scale": 1.0} if form == "ckpt" else None
    ms.save_checkpoint(content, path, append_dict=facts, format=form)
    target = network(base=6)
    base = {name: value for name, value in snapshot(target).items() if name not in adapters(target)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(target, path)
    after = snapshot(target)
    assert {name: after[name] for name in base} == base
    for name in adapters(source):
        assert after[name] == snapshot(source)[name]


@pytest.mark.parametrize("extra, error", [(["wv"], UnexpectedTensorsError), ([], None)])
def test_such_a_checkpoint_is_loaded_strictly_too(tmp_path, extra, error):
    source = network(["wq", "wk"] + extra)
    path = str(tmp_path / "whole.ckpt")
    ms.save_checkpoint(source, path)
    if error:
        refused(network(), path, error, "PATH holds 4 LoRA tensors that the network has no place for: ")
    else:
        load_lora(network(seed=3), path)


def test_capital_letters_of_a_bare_cell(tmp_path):
    path = str(tmp_path / "cell.ckpt")
    a, b = np.arange(12, dtype=np.float32).reshape(2, 6), np.arange(10, dtype=np.float32).reshape(5, 2)
    ms.save_checkpoint([{"name": "mindpet_delta_lora_A", "data": Tensor(a)},
                        {"name": "mindpet_delta_lora_B", "data": Tensor(b)}], path)
    target = LoRADense(6, 5, 2, 3)
    load_lora(target, path)
    np.testing.assert_array_equal(target.mindpet_delta_lora_a.asnumpy(), a)
    np.testing.assert_array_equal(target.mindpet_delta_lora_b.asnumpy(), b)


# Merged ---------------------------------------------------------------------------------------------------------

def test_a_merged_adapter_is_neither_saved_nor_replaced(tmp_path, saved):
    target = network()
    target.set_train(False)
    merge_lora(target)
    refused(target, saved, LoraError, "The adapter is merged into the base, at model.layers.{0..1}.attention.wq, "
            "model.layers.{0..1}.attention.wk. Call unmerge_lora first.")
    with pytest.raises(LoraError, match="Call unmerge_lora first."):
        save_lora(target, str(tmp_path / "other"))
    assert os.listdir(tmp_path) == ["adapter"]
    unmerge_lora(target)
    load_lora(target, saved)
    assert snapshot(target) == snapshot(network(seed=2))


# Kills ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", ["peft", "ckpt", "fallback"])
def test_after_each_of_fifty_kills_there_is_one_whole_adapter(tmp_path, form):
    run = subprocess.run([sys.executable, killed_saves.__file__, str(tmp_path), form, "50"], capture_output=True,
                         text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert run.returncode == 0, run.stdout + run.stderr
    half_written = int(run.stdout.splitlines()[-1])
    print(f"{half_written} of 50 kills left half an adapter beside the whole one")
    assert half_written > 5  # else the kills came at the wrong time, and nothing was tested
    # What they left does no harm to the next reader and the next writer.
    path = str(tmp_path / ("adapter.ckpt" if form == "ckpt" else "adapter"))
    target = killed_saves.network(1)
    target[0].mindpet_delta_lora_a.set_data(target[0].mindpet_delta_lora_a * 0)
    save_lora(killed_saves.network(1), path, "ckpt" if form == "ckpt" else "peft")
    load_lora(target, path, on_base_mismatch="ignore")
    assert killed_saves.read(path, form) == {1.0} and as_array(target[0].mindpet_delta_lora_a).all()


def test_the_old_adapter_is_loaded_after_a_kill_between_two_renames(tmp_path, saved):
    shutil.move(saved, tmp_path / ".adapter.replaced")
    target = network()
    load_lora(target, saved)
    assert snapshot(target) == snapshot(network(seed=2)) and os.listdir(tmp_path) == ["adapter"]
