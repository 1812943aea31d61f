"""The base's weights from every kind of checkpoint, into a network for serving; what cannot be loaded is refused."""

import os

import numpy as np
import pytest
from mindspore import nn
from safetensors.numpy import load_file

from mindlora import LoraConfig, apply_lora
from mindlora.core.errors import CheckpointError, ConfigError
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.numerics.dtypes import BFLOAT16, dtype_name, from_float32, to_float32
from mindlora.files.base.convert import convert_base
from mindlora.files.base.quantize import quantize_checkpoint
from mindlora.network.load_base import load_base
from mindlora.network.quantize import quantize_base
from mindlora.network.tensors import to_array
from mindlora.network.tree import lora_cells
from mindlora.serving.network import build_network, linear_cells
from mindlora.serving.settings import EngineSettings
from tests.support import llama_checkpoints, mcore_networks
from tests.support import mcore_checkpoints as mcore
from tests.support.networks import as_array
from tests.support.tiny_serving import base_weights, model, save_base

SETTINGS = EngineSettings(seq_length=16, block_size=4, max_running=1, max_tokens_per_step=4)
FLOAT32 = np.dtype("<f4")


def build_llama(node):
    from mindformers.models.build_model import build_network as build
    from mindformers.tools.register import MindFormerConfig

    return build(MindFormerConfig(**node))


def network(quantize=False, **keys):
    made = build_network(model(**keys), SETTINGS)
    if quantize:
        quantize_base(made)
    return made


@pytest.fixture
def checkpoint(mindformers, tmp_path):
    """The base as a .ckpt."""
    return save_base(tmp_path / "base.ckpt", base_weights())


def assert_loaded(made, weights):
    """Every parameter but the cache has the weights' values."""
    found = {p.name: p for p in made.get_parameters() if not p.name.endswith("_cache")}
    assert found.keys() == weights.keys()
    for name, parameter in found.items():
        np.testing.assert_array_equal(as_array(parameter), weights[name], err_msg=name)


def test_an_mcore_model_takes_hugging_faces_folder_and_files_in_its_own_names(mindformers, tmp_path):
    sizes = {"vocab_size": mcore.VOCAB, "hidden_size": mcore.HIDDEN, "intermediate_size": mcore.INNER}
    folder, own, quantized = (str(tmp_path / name) for name in ("hf", "own.safetensors", "quantized.safetensors"))
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **mcore.CONFIG}
    llama_checkpoints.save_base(folder, mcore.qwen3(), **kind)
    convert_base(folder, own, None, "mcore")
    quantize_checkpoint(folder, quantized)
    stored = load_file(own)
    for path in (folder, own):
        made = mcore_networks.tiny_qwen3(num_hidden_layers=2, **sizes)
        load_base(made, path)
        assert {p.name for p in made.get_parameters()} == set(stored)
        for parameter in made.get_parameters():
            np.testing.assert_array_equal(as_array(parameter), to_float32(stored[parameter.name]))
    made = mcore_networks.tiny_qwen3(num_hidden_layers=2, **sizes)
    quantize_base(made)
    load_base(made, quantized)
    stored = load_file(quantized)
    assert stored["decoder.layers.1.mlp.linear_fc1.weight"].dtype == np.uint8
    for parameter in made.get_parameters():
        np.testing.assert_array_equal(as_array(parameter).ravel(), to_float32(stored[parameter.name]).ravel())


@pytest.mark.parametrize("form", ["hf", "llama.safetensors"])
def test_a_llama_is_no_base_of_an_mcore_model(mindformers, tmp_path, form):
    llama_checkpoints.save_base(tmp_path / "hf", llama_checkpoints.llama(), **llama_checkpoints.CONFIG)
    convert_base(str(tmp_path / "hf"), str(tmp_path / "llama.safetensors"), "hf", "mindformers")
    with pytest.raises(CheckpointError, match="lacks 11 parameters of the network: decoder.final_layernorm.weight"):
        load_base(mcore_networks.tiny_qwen3(), str(tmp_path / form))


@pytest.mark.parametrize("dtype", [FLOAT32, np.dtype("<f2"), BFLOAT16], ids=dtype_name)
def test_a_mapped_base_stays_in_its_file(mindformers, tmp_path, dtype):
    path = str(tmp_path / "base.safetensors")
    weights = base_weights()
    held = {name: from_float32(array, dtype) if array.ndim > 1 else array for name, array in weights.items()}
    write_arrays(path, held)
    stored = (tmp_path / "base.safetensors").read_bytes()
    made = network(param_init_type=dtype_name(dtype))
    load_base(made, path, mapped=True)
    assert_loaded(made, {name: to_float32(array) for name, array in held.items()})
    with open("/proc/self/smaps", encoding="ascii") as file:
        maps = [line for line in file if line.rstrip().endswith(path)]
    assert maps, "nothing holds the file"
    begin, end = (int(word, 16) for word in maps[0].split()[0].split("-"))
    for parameter in made.get_parameters():
        if not parameter.name.endswith("_cache"):
            assert begin <= parameter.asnumpy().ctypes.data < end, parameter.name
    # What is written to a parameter stays here.
    made.lm_head.weight.asnumpy()[:] = 3
    assert (tmp_path / "base.safetensors").read_bytes() == stored


def memory():
    """Returns the bytes of this process: its own, all, and all at the peak since the last call of forget_peak."""
    with open("/proc/self/status", encoding="ascii") as file:
        sizes = dict(line.split(":") for line in file if line.startswith(("RssAnon", "VmRSS", "VmHWM")))
    return [1024 * int(sizes[name].split()[0]) for name in ("RssAnon", "VmRSS", "VmHWM")]


def forget_peak():
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_no_second_copy_is_made_of_a_base_in_bfloat16(mindformers, tmp_path, mapped):
    tables, width = ("model.tok_embeddings.embedding_weight", "lm_head.weight"), 2**18
    path = str(tmp_path / "base.safetensors")
    weights = {name: from_float32(array, BFLOAT16) for name, array in base_weights().items() if name not in tables}
    # In bfloat16 too.
    halves = np.arange(32 * width, dtype=np.uint32).astype(np.uint16).view(BFLOAT16).reshape(width, 32)
    write_arrays(path, {**weights, **dict.fromkeys(tables, halves)})
    size = os.path.getsize(path)
    made = network(vocab_size=width, param_init_type="bfloat16")
    forget_peak()
    own, whole, _ = memory()
    load_base(made, path, mapped=mapped)
    later_own, _, peak = memory()
    assert later_own - own < (0.1 if mapped else 1.1) * size
    assert peak - whole < 1.2 * size
    np.testing.assert_array_equal(to_array(made.lm_head.weight)["bfloat16"], halves["bfloat16"])


@pytest.mark.parametrize("form", ["ckpt", "safetensors", "folder", "hf"])
def test_every_form_of_a_checkpoint_is_loaded(checkpoint, tmp_path, form):
    path = checkpoint
    if form != "ckpt":
        path = str(tmp_path / "hf")
        convert_base(checkpoint, path, "mindformers", "hf")
    if form in ("safetensors", "folder"):
        path = str(tmp_path / ("again" if form == "folder" else "again.safetensors"))
        convert_base(str(tmp_path / "hf"), path, "hf", "mindformers")
    made = network()
    load_base(made, path)
    assert_loaded(made, base_weights())


def test_no_weight_is_drawn_that_the_base_replaces(checkpoint):
    made = network()
    of_base = [p for p in made.get_parameters() if not p.name.endswith("_cache")]
    assert all(parameter.has_init for parameter in of_base)
    load_base(made, checkpoint)
    assert not any(parameter.has_init for parameter in of_base)


def test_nothing_is_loaded_from_a_checkpoint_that_does_not_suit(mindformers, tmp_path):
    weights, _ = damaged(base_weights(), "shape")
    made = network()
    with pytest.raises(CheckpointError):
        load_base(made, save_base(tmp_path / "base.ckpt", weights))
    assert all(parameter.has_init for parameter in made.get_parameters())


def test_bfloat16_is_widened_without_a_change(mindformers, tmp_path):
    tensors = llama_checkpoints.llama(BFLOAT16)
    path = llama_checkpoints.save_base(tmp_path / "hf", tensors, 1, **llama_checkpoints.CONFIG)
    made = network(vocab_size=llama_checkpoints.VOCAB)
    load_base(made, path)
    cell = linear_cells(made)["model.layers.1.feed_forward.w2"]
    expected = to_float32(tensors["model.layers.1.mlp.down_proj.weight"])
    np.testing.assert_array_equal(as_array(cell.weight), expected)


@pytest.mark.parametrize("keys", [{}, {"use_vera": True}], ids=["LoRA", "VeRA"])
def test_an_adapter_s_parameters_stay_as_they_are(checkpoint, keys):
    made = build_llama(model())
    apply_lora(made, LoraConfig(lora_rank=4, target_modules=".*wq", **keys))
    _, cell = next(lora_cells(made))
    parameters = (*cell.shared_parts().values(), *cell.lora_parameters())
    before = [as_array(parameter) for parameter in parameters]
    load_base(made, checkpoint)
    for parameter, array in zip(parameters, before):
        np.testing.assert_array_equal(as_array(parameter), array)
    np.testing.assert_array_equal(as_array(cell.weight), base_weights()["model.layers.0.attention.wq.weight"])


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_of_hugging_face_is_loaded_as_it_is(mindformers, tmp_path, shards):
    tensors = llama_checkpoints.llama(FLOAT32)
    path = llama_checkpoints.save_base(tmp_path / "hf", tensors, shards, **llama_checkpoints.CONFIG)
    made = network(vocab_size=llama_checkpoints.VOCAB)
    load_base(made, path)
    cell = linear_cells(made)["model.layers.1.attention.wk"]
    np.testing.assert_array_equal(as_array(cell.weight), tensors["model.layers.1.self_attn.k_proj.weight"])


@pytest.mark.parametrize("form", ["ckpt", "hf"])
def test_joined_cells_take_their_rows_from_tensors_that_are_apart(checkpoint, tmp_path, form):
    joined = str(tmp_path / "joined.safetensors")
    convert_base(checkpoint, str(tmp_path / "hf"), "mindformers", "hf")
    convert_base(str(tmp_path / "hf"), joined, "hf", "mindformers", concat=True, heads=4, kv_heads=2)
    expected = llama_checkpoints.load(joined)
    made = network(qkv_concat=True)
    load_base(made, checkpoint if form == "ckpt" else str(tmp_path / "hf"))
    assert_loaded(made, expected)
    again = network(qkv_concat=True)
    load_base(again, joined)
    assert_loaded(again, expected)


def test_a_base_in_nf4_is_loaded_into_quantized_cells(checkpoint, tmp_path):
    path = str(tmp_path / "nf4.safetensors")
    quantize_checkpoint(checkpoint, path)
    made = network(quantize=True)
    load_base(made, path)
    assert_loaded(made, llama_checkpoints.load(path))


def test_weights_take_the_network_s_dtype(checkpoint):
    made = network(param_init_type="float16")
    load_base(made, checkpoint)
    name, weights = "model.layers.0.attention.wq", base_weights()
    expected = weights[f"{name}.weight"].astype(np.float16)
    np.testing.assert_array_equal(linear_cells(made)[name].weight.asnumpy(), expected)


def test_tied_embeddings_need_no_head(mindformers, tmp_path):
    weights = base_weights()
    del weights["lm_head.weight"]
    made = network(tie_word_embeddings=True)
    load_base(made, save_base(tmp_path / "base.ckpt", weights))
    assert_loaded(made, weights)


def test_what_is_not_there_is_refused(mindformers, tmp_path):
    for path, message in (("", "load_checkpoint is empty"), (str(tmp_path / "none"), "none does not exist")):
        with pytest.raises(ConfigError, match=message):
            load_base(network(), path)


def damaged(weights, change):
    """Returns weights after one change, and what the error must say."""
    wq = "model.layers.1.attention.wq.weight"
    if change == "missing":
        del weights[wq], weights["model.norm_out.weight"]
        return weights, r"lacks 2 parameters of the network: model.layers.1.attention.wq.weight, model.norm_out.weight"
    if change == "shape":
        weights[wq] = weights[wq][:-1]
        return weights, r"model.layers.1.attention.wq.weight is \[31, 32\] of float32, but the network needs \[32, 32\]"
    return {name: array for name, array in weights.items() if "layers.1" not in name}, "lacks 9 parameters"


@pytest.mark.parametrize("change", ["missing", "shape", "shorter"])
def test_a_checkpoint_of_another_model_is_refused(mindformers, tmp_path, change):
    weights, message = damaged(base_weights(), change)
    with pytest.raises(CheckpointError, match=message):
        load_base(network(), save_base(tmp_path / "base.ckpt", weights))


def test_a_quantized_base_and_one_in_float_are_not_taken_for_each_other(checkpoint, tmp_path):
    path = str(tmp_path / "nf4.safetensors")
    quantize_checkpoint(checkpoint, path)
    with pytest.raises(CheckpointError, match="and quantize_base as the checkpoint is"):
        load_base(network(), path)
    with pytest.raises(CheckpointError, match="lacks .* parameters of the network"):
        load_base(network(quantize=True), checkpoint)


def test_the_cells_are_those_of_the_layers_and_the_head(mindformers):
    cells = linear_cells(network())
    assert len(cells) == 15 and all(isinstance(cell, nn.Cell) for cell in cells.values())
    assert "lm_head" in cells
    assert len(linear_cells(network(qkv_concat=True))) == 9
