"""adapter_files.read and write: each form makes the round trip bit for bit, with all that is known of the adapter."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.adapters import files as adapter_files
from mindlora.adapters.adapter import Adapter
from mindlora.errors import (
    AdapterError,
    AdapterFormatError,
    LoraError,
    MissingTensorsError,
    NotFiniteError,
    ScaleMismatchError,
    UnexpectedTensorsError,
)
from mindlora.numerics.dtypes import BFLOAT16, from_float32
from tests.support import torch_zip
from tests.support.adapter_samples import (
    CONFIG,
    WEIGHTS,
    K,
    Q,
    assert_same,
    ckpt_records,
    folder,
    header_of,
    key,
    make,
    peft_tensors,
    record,
    safetensors,
    text,
)

FINGERPRINT = {"shapes": "0123456789abcdef", "values": "fedcba9876543210"}
NAMES = {"peft": "adapter", "mindformers": "adapter.safetensors", "ckpt": "adapter.ckpt", "slora": "slora"}
RANKS = {Q: 2, K: 3, "model.layers.1.attention.wq": 1, "lm_head": 2}


def rich(dtype=np.dtype("<f4"), **fields):
    """An adapter of which there is everything to lose."""
    whole = {
        "model.norm_out.weight": from_float32(np.arange(6, dtype=np.float32), dtype),
        "model.tok_embeddings.embedding_weight": np.ones((8, 6), np.float32),
    }
    return make(
        RANKS,
        dict(zip(RANKS, (3.0, 2.5, 7.0, 3.0))),
        dtype,
        **{
            "use_rslora": True,
            "dropout": 0.25,
            "saved_modules": whole,
            "base_model": "meta-llama/Llama-2-7b",
            "fingerprint": FINGERPRINT,
            "selection": {"target_modules": ["q_proj", "k_proj", "lm_head"], "layers_to_transform": [0, 1]},
            **fields,
        },
    )


@pytest.mark.parametrize("dtype", ["<f4", "<f2", BFLOAT16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", ["peft", "mindformers", "ckpt"])
def test_every_form_keeps_every_bit_and_every_fact(tmp_path, form, dtype):
    path = str(tmp_path / NAMES[form])
    adapter_files.write(rich(np.dtype(dtype)), path, form)
    found = adapter_files.read(path)
    assert_same(found, rich(np.dtype(dtype)))
    # And from there into each of the others.
    for other in ("peft", "mindformers", "ckpt"):
        adapter_files.write(found, str(tmp_path / ("again" + NAMES[other])), other)
        assert_same(adapter_files.read(str(tmp_path / ("again" + NAMES[other]))), rich(np.dtype(dtype)))


@pytest.mark.parametrize("form", ["peft", "mindformers", "ckpt"])
def test_the_least_that_can_be_known(tmp_path, form):
    path = str(tmp_path / NAMES[form])
    adapter = make({Q: 1}, {Q: 0.3})
    adapter_files.write(adapter, path, form)
    adapter.selection = {"target_modules": ["model.layers.0.self_attn.q_proj"]} if form == "peft" else {}
    assert_same(adapter_files.read(path), adapter)


@pytest.mark.parametrize("form", ["peft", "mindformers", "ckpt"])
@pytest.mark.parametrize("path", ["", "0", "a-b.c_1.dense", "größe.fc"])
def test_paths_of_any_network(tmp_path, form, path):
    target = str(tmp_path / NAMES[form])
    adapter_files.write(make({path: 2}), target, form)
    assert adapter_files.read(target).paths == [path]


def test_peft_has_no_concatenated_cells(tmp_path):
    adapter = make(
        {
            "model.layers.0.attention.w_qkv": 2,
            "model.layers.1.attention.w_qkv": 2,
            Q: 2,
            "model.layers.0.feed_forward.w_gate_hidden": 2,
        }
    )
    with pytest.raises(AdapterError) as error:
        adapter_files.write(adapter, str(tmp_path / "adapter"))
    assert str(error.value) == (
        "PEFT has no joined modules such as model.layers.{0..1}.attention.w_qkv, "
        "model.layers.0.feed_forward.w_gate_hidden. Split them first: give the model's n_kv_heads and head size."
    )
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("form", ["mindformers", "ckpt", "slora"])
def test_mindformers_has_no_place_for_single_experts(tmp_path, form):
    adapter = make({"model.layers.0.mlp.experts.1.up_proj": 2})
    with pytest.raises(AdapterError) as error:
        adapter_files.write(adapter, str(tmp_path / NAMES[form]), form)
    assert str(error.value) == (
        f"Format {form!r} cannot hold adapters of single experts: "
        "model.layers.0.mlp.experts.1.up_proj. Write format 'peft'."
    )
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("form", NAMES)
def test_nothing_is_written_without_alpha_or_with_nan(tmp_path, form):
    adapter = make()
    adapter.alphas.pop(K)
    with pytest.raises(ScaleMismatchError, match="does not say lora_alpha, so the scale of .*wk is"):
        adapter_files.write(adapter, str(tmp_path / NAMES[form]), form)
    adapter = make()
    adapter.tensors[K, "B"][1, 1] = np.nan
    with pytest.raises(NotFiniteError, match="The adapter holds tensors with NaN or infinity: .*wk B"):
        adapter_files.write(adapter, str(tmp_path / NAMES[form]), form)
    assert not os.listdir(tmp_path)


# slora ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<f4", BFLOAT16], ids=["float32", "bfloat16"])
def test_slora_keeps_the_bits_where_all_scales_are_one(tmp_path, dtype):
    adapter = make({Q: 2, K: 4}, {Q: 3.0, K: 6.0}, np.dtype(dtype), dropout=0.5, base_model="b")
    adapter_files.write(adapter, str(tmp_path / "s"), "slora")
    assert sorted(os.listdir(tmp_path / "s")) == [CONFIG, "adapter_model.ckpt"]
    assert_same(adapter_files.read(str(tmp_path / "s")), adapter)


@pytest.mark.parametrize("rslora", [False, True])
def test_slora_keeps_each_update_where_scales_differ(tmp_path, rslora):
    adapter = make({Q: 4, K: 1}, {Q: 3.0, K: 5.0}, use_rslora=rslora)
    adapter_files.write(adapter, str(tmp_path / "s"), "slora")
    found = adapter_files.read(str(tmp_path / "s"))
    assert found.scale(Q) == pytest.approx(found.scale(K), rel=1e-12) and not found.use_rslora
    for path in (Q, K):
        np.testing.assert_allclose(found.delta(path), adapter.delta(path), rtol=1e-5, atol=1e-6)


# What is read ---------------------------------------------------------------------------------------------------


def test_the_weights_of_a_folder_find_their_config(tmp_path):
    path = folder(tmp_path / "a", peft_tensors(make()), use_rslora=True, lora_alpha=5)
    found = adapter_files.read(os.path.join(path, WEIGHTS))
    assert_same(found, adapter_files.read(path))
    assert found.alphas == {Q: 5.0, K: 5.0} and found.use_rslora
    # Alone, it does not say lora_alpha.
    os.unlink(os.path.join(path, CONFIG))
    alone = adapter_files.read(os.path.join(path, WEIGHTS))
    assert alone.alphas == {} and alone.paths == [Q, K]
    # Under another name, a config beside it is another adapter's.
    path = pathlib.Path(folder(tmp_path / "b", peft_tensors(make())))
    (path / WEIGHTS).rename(path / "other.safetensors")
    assert adapter_files.read(str(path / "other.safetensors")).alphas == {}


def test_mindformers_2_s_folder_with_its_manifest(tmp_path):
    path = tmp_path / "step_4"
    path.mkdir()
    adapter = make()
    tensors = {
        f"decoder.layers.0.self_attention.linear_{path[-1]}.lora_{half.lower()}": array
        for (path, half), array in adapter.tensors.items()
    }
    (path / "model-0.safetensors").write_bytes(safetensors(*header_of(tensors)))
    (path / "model-opt-0.safetensors").write_bytes(b"the optimizer's state, which is not looked at")
    manifest = path / "mindformers_adapter_config.json"
    manifest.write_text(json.dumps({"lora_config": {"lora_alpha": 5, "lora_rank": 2}}))
    found = adapter_files.read(str(path))
    adapter.alphas = {Q: 5.0, K: 5.0}
    assert_same(found, adapter)
    assert found.dialect == "MindFormers 2's LoRA"
    for content, shown in [
        ({"lora_config": {}}, "None"),
        ({}, "None"),
        ({"lora_config": [1]}, "None"),
        ({"lora_config": {"lora_alpha": float("nan")}}, "nan"),
        ({"lora_config": {"lora_alpha": float("inf")}}, "inf"),
        ({"lora_config": {"lora_alpha": "5"}}, "'5'"),
        ({"lora_config": {"lora_alpha": 0}}, "0"),
        ({"lora_config": {"lora_alpha": True}}, "True"),
        ({"lora_config": {"lora_alpha": 10**310}}, "1" + "0" * 199 + "..."),
    ]:
        manifest.write_text(json.dumps(content))
        with pytest.raises(AdapterFormatError) as error:
            adapter_files.read(str(path))
        assert str(error.value) == f"{manifest}: lora_config.lora_alpha is {shown}, it must be a number above 0."
    (path / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(AdapterFormatError) as error:
        adapter_files.read(str(path))
    assert str(error.value) == (
        f"{path} holds mindformers_adapter_config.json with 2 .safetensors files: "
        "model-0.safetensors, model-1.safetensors. Name the folder of one step, with the "
        "adapter in one file."
    )


def test_a_bin_is_read_only_where_it_is_allowed(tmp_path):
    adapter = make(dtype=BFLOAT16)
    path = pathlib.Path(folder(tmp_path / "a", {}))
    (path / WEIGHTS).unlink()
    torch_zip.save(path / "adapter_model.bin", peft_tensors(adapter))
    for name in (path, path / "adapter_model.bin"):
        with pytest.raises(AdapterFormatError) as error:
            adapter_files.read(str(name))
        assert str(error.value) == (
            f"{path / 'adapter_model.bin'} is a pickle, which can run programs. Ask for "
            "safetensors, or allow it with allow_pickle (--allow-pickle): only tensors are "
            "then taken from it."
        )
        adapter.selection = {"target_modules": ["q_proj", "k_proj"]}
        assert_same(adapter_files.read(str(name), allow_pickle=True), adapter)


def test_experts_of_mindformers_2_become_pairs_of_single_experts(tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 4, 2)).astype(np.float32), rng.normal(size=(3, 2, 10)).astype(np.float32)
    holder = "decoder.layers.1.mlp.experts.weight1_lora_"
    (tmp_path / "a.safetensors").write_bytes(safetensors(*header_of({holder + "a": a, holder + "b": b})))
    found = adapter_files.read(str(tmp_path / "a.safetensors"))
    assert len(found.paths) == 6
    found.set_alpha(4)
    x = rng.normal(size=(5, 4)).astype(np.float32)
    for expert in range(3):
        rows = [x @ found.delta(f"model.layers.1.mlp.experts.{expert}.{part}").T for part in ("gate_proj", "up_proj")]
        np.testing.assert_allclose(
            np.concatenate(rows, axis=1), 4 / 2 * (x @ a[expert] @ b[expert]), rtol=1e-4, atol=1e-5
        )
    # PEFT has modules for them.
    adapter_files.write(found, str(tmp_path / "peft"))
    assert adapter_files.read(str(tmp_path / "peft")).paths == sorted(found.paths)


def test_tensors_of_the_base_and_of_the_optimizer_are_passed_over(tmp_path):
    adapter = make()
    tensors = {f"{path}.mindpet_delta_lora_{half.lower()}": array for (path, half), array in adapter.tensors.items()}
    others = {"adam_m." + name: array + 1 for name, array in tensors.items()} | {"lm_head.weight": np.ones(3, np.int64)}
    (tmp_path / "a.safetensors").write_bytes(safetensors(*header_of(tensors | others)))
    adapter.alphas = {}
    assert_same(adapter_files.read(str(tmp_path / "a.safetensors")), adapter)


def test_two_forms_in_one_file_are_refused(tmp_path):
    tensors = {
        f"{Q}.mindpet_delta_lora_a": np.ones((2, 6), np.float32),
        f"{Q}.mindpet_delta_lora_b": np.ones((6, 2), np.float32),
        f"{K}.tk_delta_lora_a": np.ones(2, np.float32),
    }
    (tmp_path / "a.safetensors").write_bytes(safetensors(*header_of(tensors)))
    with pytest.raises(UnexpectedTensorsError) as error:
        adapter_files.read(str(tmp_path / "a.safetensors"))
    assert str(error.value) == (
        f"{tmp_path / 'a.safetensors'} holds LoRA tensors in more than one form: those of "
        f"MindFormers' LoRA (mindpet_delta_lora), and {K}.tk_delta_lora_a. Keep one form in a file."
    )


@pytest.mark.parametrize(
    "first, second, message",
    [
        (f"{Q}.mindpet_delta_lora_a", f"{Q}.mindpet_delta_lora_A", f"holds the A of {Q} twice, under two names."),
        (
            key(Q, "B"),
            "base_model.model.model.layers.0.attention.wq.lora_B.weight",
            f"holds the B of {Q} twice, under two names.",
        ),
        (
            "base_model.model.lm_head.weight",
            "base_model.model.lm_head.base_layer.weight",
            "holds lm_head.weight twice, under two names.",
        ),
    ],
)
def test_one_tensor_under_two_names_is_refused(tmp_path, first, second, message):
    tensors = {} if "mindpet" in first else peft_tensors(make())
    tensors.update({first: np.ones((6, 2), np.float32), second: np.zeros((6, 2), np.float32)})
    path = folder(tmp_path / "a", tensors, modules_to_save=["lm_head"])
    with pytest.raises(AdapterFormatError) as error:
        adapter_files.read(path)
    assert str(error.value) == f"{os.path.join(path, WEIGHTS)} {message}"


def test_modules_to_save_that_are_not_there(tmp_path):
    path = folder(tmp_path / "a", peft_tensors(make()), modules_to_save=["lm_head"])
    with pytest.raises(MissingTensorsError) as error:
        adapter_files.read(path)
    assert str(error.value) == f"{path}: modules_to_save names 'lm_head', and no tensor belongs to it."


def test_the_weight_of_the_base_beside_an_adapted_head_is_no_strange_tensor(tmp_path):
    adapter = make({"lm_head": 2})
    weight = np.ones((6, 6), np.float32)
    path = folder(
        tmp_path / "a",
        {
            **{f"base_model.model.lm_head.lora_{half}.weight": array for (_, half), array in adapter.tensors.items()},
            "base_model.model.lm_head.base_layer.weight": weight,
        },
        target_modules=["lm_head"],
    )
    np.testing.assert_array_equal(adapter_files.read(path).saved_modules["lm_head.weight"], weight)


# The record in a .ckpt or .safetensors --------------------------------------------------------------------------


def test_a_pair_that_the_record_names_and_the_file_lost(tmp_path):
    facts = {"alphas": {Q: 3, K: 3}, "whole": []}
    records = [each for each in ckpt_records(make()) if K not in each[0]]
    (tmp_path / "a.ckpt").write_bytes(record(*records, ("mindlora", *text(json.dumps(facts)))))
    with pytest.raises(MissingTensorsError) as error:
        adapter_files.read(str(tmp_path / "a.ckpt"))
    assert str(error.value) == f"{tmp_path / 'a.ckpt'} lacks tensors that mindlora's metadata in it names: '{K}'."


def test_a_whole_module_that_the_record_names_and_the_file_lost(tmp_path):
    facts = {"alphas": {Q: 3, K: 3}, "whole": ["lm_head.weight"]}
    (tmp_path / "a.ckpt").write_bytes(record(*ckpt_records(make()), ("mindlora", *text(json.dumps(facts)))))
    with pytest.raises(MissingTensorsError, match=r"metadata in it names: 'lm_head.weight'\."):
        adapter_files.read(str(tmp_path / "a.ckpt"))


def test_a_record_that_is_silent_of_a_pair(tmp_path):
    facts = json.dumps({"alphas": {Q: 3}})
    (tmp_path / "a.ckpt").write_bytes(record(*ckpt_records(make()), ("mindlora", *text(facts))))
    with pytest.raises(AdapterFormatError) as error:
        adapter_files.read(str(tmp_path / "a.ckpt"))
    assert str(error.value) == (
        f"mindlora's metadata in {tmp_path / 'a.ckpt'} is damaged: it has no lora_alpha for {K}."
    )


def test_large_tensors_of_a_ckpt_come_in_pieces(tmp_path):
    adapter = make(alphas={})
    pieces = []
    for name, dtype, dims, content in ckpt_records(adapter):
        pieces += [(name, dtype, dims, content[:8]), (name, dtype, dims, content[8:])]
    (tmp_path / "a.ckpt").write_bytes(record(*pieces))
    adapter.alphas = {}
    assert_same(adapter_files.read(str(tmp_path / "a.ckpt")), adapter)


def test_mindspore_s_checksum_is_checked(tmp_path):
    import mindspore as ms

    from mindlora.errors import TruncatedAdapterError

    path = tmp_path / "a.ckpt"
    ms.save_checkpoint(
        [{"name": f"{Q}.mindpet_delta_lora_{half}", "data": ms.Tensor(np.ones((2, 2), np.float32))} for half in "ab"],
        str(path),
        crc_check=True,
    )
    assert adapter_files.read(str(path)).rank(Q) == 2
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content.replace(np.float32(1).tobytes(), np.float32(2).tobytes(), 1))
    with pytest.raises(TruncatedAdapterError) as error:
        adapter_files.read(str(path))
    assert str(error.value) == f"{path} is damaged: its checksum is that of other bytes. Copy or save it again."


# Without MindSpore ----------------------------------------------------------------------------------------------


def test_safetensors_forms_need_no_mindspore(tmp_path):
    program = """
import sys
import numpy as np
from mindlora.adapters import files as adapter_files
from mindlora.adapters.adapter import Adapter
adapter = Adapter({("fc", "A"): np.ones((2, 3), np.float32), ("fc", "B"): np.ones((4, 2), np.float32)}, {"fc": 3.0})
for form, path in (("peft", "a"), ("mindformers", "a.safetensors")):
    adapter_files.write(adapter, path, form)
    assert adapter_files.read(path).alphas == {"fc": 3.0}
heavy = {"mindspore", "torch", "mindformers"} & set(sys.modules)
assert not heavy, heavy
"""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert run.returncode == 0, run.stderr


# write ----------------------------------------------------------------------------------------------------------


def test_what_stands_in_the_files(tmp_path):
    adapter_files.write(rich(), str(tmp_path / "adapter"))
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    assert set(tensors) == {
        *(key(*place) for place in rich().tensors),
        "base_model.model.model.norm.weight",
        "base_model.model.model.embed_tokens.weight",
    }
    for place, array in rich().tensors.items():
        np.testing.assert_array_equal(tensors[key(*place)], array)
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 3, True)
    assert config["layers_to_transform"] == [0, 1]
    assert config["modules_to_save"] == ["model.embed_tokens", "model.norm"]
    adapter_files.write(rich(), str(tmp_path / "a.safetensors"), "mindformers")
    assert set(load_file(tmp_path / "a.safetensors")) == {
        *(f"{path}.mindpet_delta_lora_{half.lower()}" for path, half in rich().tensors),
        *rich().saved_modules,
    }


def test_the_output_must_fit_the_form(tmp_path):
    for form, path, message in [
        ("lora", "a", "format is 'lora', which is not known."),
        ("peft", "a.bin", "path is 'a.bin': format 'peft' writes a folder."),
        ("mindformers", "a", "path is 'a': format 'mindformers' writes a file that ends in .safetensors."),
    ]:
        with pytest.raises(LoraError) as error:
            adapter_files.write(make(), path, form)
        assert str(error.value).startswith(message)
    assert not os.listdir(tmp_path)


def test_an_adapter_without_pairs_is_not_written(tmp_path):
    for form, name in NAMES.items():
        with pytest.raises(AdapterError) as error:
            adapter_files.write(Adapter({}), str(tmp_path / name), form)
        assert str(error.value) == "The adapter holds no pair, so there is nothing to write."
    assert not os.listdir(tmp_path)
