"""adapter_files.read and write: each form makes the round trip bit for bit, with all the adapter's metadata."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.core.errors import AdapterError, LoraError, NotFiniteError, ScaleMismatchError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from tests.support.adapter_samples import CONFIG, FLOAT32, WEIGHTS, K, Q, assert_same, key, make

FINGERPRINT = {"shapes": "0123456789abcdef", "values": "fedcba9876543210"}
NAMES = {"peft": "adapter", "mindformers": "adapter.safetensors", "ckpt": "adapter.ckpt", "slora": "slora"}
RANKS = {Q: 2, K: 3, "model.layers.1.attention.wq": 1, "lm_head": 2}


def rich(dtype=FLOAT32, **fields):
    """An adapter with a value in every field."""
    saved_modules = {
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
            "saved_modules": saved_modules,
            "base_model": "meta-llama/Llama-2-7b",
            "fingerprint": FINGERPRINT,
            "selection": {"target_modules": ["q_proj", "k_proj", "lm_head"], "layers_to_transform": [0, 1]},
            **fields,
        },
    )


@pytest.mark.parametrize("dtype", ["<f4", "<f2", BFLOAT16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", ["peft", "mindformers", "ckpt"])
def test_every_form_keeps_every_bit_and_all_metadata(tmp_path, form, dtype):
    path = str(tmp_path / NAMES[form])
    adapter_files.write(rich(np.dtype(dtype)), path, form)
    found = adapter_files.read(path)
    assert_same(found, rich(np.dtype(dtype)))
    # And from there to each of the other forms.
    for other in ("peft", "mindformers", "ckpt"):
        adapter_files.write(found, str(tmp_path / ("again" + NAMES[other])), other)
        assert_same(adapter_files.read(str(tmp_path / ("again" + NAMES[other]))), rich(np.dtype(dtype)))


@pytest.mark.parametrize("form", ["peft", "mindformers", "ckpt"])
def test_an_adapter_with_the_least_metadata(tmp_path, form):
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


def test_peft_has_no_joined_cells(tmp_path):
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
def test_the_forms_of_mindformers_cannot_hold_single_experts(tmp_path, form):
    adapter = make({"model.layers.0.mlp.experts.1.up_proj": 2})
    with pytest.raises(AdapterError) as error:
        adapter_files.write(adapter, str(tmp_path / NAMES[form]), form)
    assert str(error.value) == (
        f"Format {form!r} cannot hold adapters of single experts: "
        "model.layers.0.mlp.experts.1.up_proj. Write format 'peft', or stack them (mindlora adapter convert --experts "
        "stacked)."
    )
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("form", NAMES)
def test_nothing_is_written_without_alpha_or_with_nan(tmp_path, form):
    adapter = make()
    adapter.alphas.pop(K)
    with pytest.raises(ScaleMismatchError, match="does not state lora_alpha, so the scale of .*wk is"):
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


# Without MindSpore ----------------------------------------------------------------------------------------------


def test_safetensors_forms_need_no_mindspore(tmp_path):
    program = """
import sys
import numpy as np
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
adapter = Adapter({("fc", "A"): np.ones((2, 3), np.float32), ("fc", "B"): np.ones((4, 2), np.float32)}, {"fc": 3.0})
for form, path in (("peft", "a"), ("mindformers", "a.safetensors")):
    adapter_files.write(adapter, path, form)
    assert adapter_files.read(path).alphas == {"fc": 3.0}
heavy = {"mindspore", "torch", "mindformers"} & set(sys.modules)
assert not heavy, heavy
"""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert run.returncode == 0, run.stderr


# write ----------------------------------------------------------------------------------------------------------


def test_the_content_of_the_files(tmp_path):
    adapter_files.write(rich(), str(tmp_path / "adapter"))
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    assert set(tensors) == {
        *(key(*part_key) for part_key in rich().tensors),
        "base_model.model.model.norm.weight",
        "base_model.model.model.embed_tokens.weight",
    }
    for part_key, array in rich().tensors.items():
        np.testing.assert_array_equal(tensors[key(*part_key)], array)
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 3, True)
    assert config["layers_to_transform"] == [0, 1]
    assert config["modules_to_save"] == ["model.embed_tokens", "model.norm"]
    adapter_files.write(rich(), str(tmp_path / "a.safetensors"), "mindformers")
    assert set(load_file(tmp_path / "a.safetensors")) == {
        *(f"{path}.mindpet_delta_lora_{half.lower()}" for path, half in rich().tensors),
        *rich().saved_modules,
    }


def test_the_output_must_match_the_form(tmp_path):
    for form, path, message in [
        ("lora", "a", "format is 'lora', which is not known."),
        ("peft", "a.bin", "path is 'a.bin': format 'peft' writes a folder."),
        ("mindformers", "a", "path is 'a': format 'mindformers' writes a file that ends in .safetensors."),
    ]:
        with pytest.raises(LoraError) as error:
            adapter_files.write(make(), path, form)
        assert str(error.value).startswith(message)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("inside", ["notes.txt", "checkpoint-5/notes.txt"])
def test_a_folder_with_more_than_an_adapter_is_not_replaced(tmp_path, inside):
    path = str(tmp_path / "a")
    for _ in range(2):
        adapter_files.write(make(), path)
    (tmp_path / "a" / inside).parent.mkdir(exist_ok=True)
    (tmp_path / "a" / inside).write_text("precious")
    if inside == "notes.txt":
        for name in (CONFIG, WEIGHTS):
            (tmp_path / "a" / name).unlink()
    with pytest.raises(LoraError, match=f"more than an adapter: {inside.partition('/')[0]}. It would be replaced"):
        adapter_files.write(make(), path)
    assert (tmp_path / "a" / inside).read_text() == "precious"


def test_an_adapter_without_pairs_is_not_written(tmp_path):
    for form, name in NAMES.items():
        path = str(tmp_path / name)
        with pytest.raises(AdapterError) as error:
            adapter_files.write(Adapter({}), path, form)
        assert str(error.value) == (
            f"The adapter for {path} holds no pair A and B: give one that adapts at least one cell."
        )
    assert not os.listdir(tmp_path)
