"""What is done to a quantized base is what would be done to the decoded one: quantized to NF4, and merged into."""

import json
import re

import numpy as np
import pytest

from mindlora import cli
from mindlora.core.errors import BaseMismatchError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.nf4 import TENSOR_NAMES, Nf4Array, dequantize, quantize
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.fingerprint import fingerprint_from, sampled_elements, sampled_paths
from mindlora.files.base.convert import convert_base, in_hugging_face_names
from mindlora.files.base.merge import merge_checkpoint
from mindlora.files.base.quantize import quantize_checkpoint
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.files.base.renaming import with_smaller_groups
from mindlora.models import names
from tests.support.llama_checkpoints import assert_same, llama, load, save_base
from tests.support.mcore_checkpoints import deepseek_v3
from tests.support.merged_checkpoints import pairs, save_adapter
from tests.support.quantized_checkpoints import FORMS, four_bits, fp8, quantized_llama, save_quantized

# The sizes of a Qwen3 whose rows are whole blocks of 64 numbers.
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 16, 64, 128
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
QWEN3 = {"model_type": "qwen3", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}


def in_nf4(seed=0, in_float=(), norms=()):
    """Returns the tensors of a model of one layer in bitsandbytes' NF4, and the decoded weights; some are in float."""
    rng = np.random.default_rng(seed)
    tensors = {name: np.ones(HIDDEN, "f4") for name in ("model.norm.weight", *norms)}
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] = rng.normal(size=(8, HIDDEN)).astype("f4")
    decoded = {}
    for cell, shape in SHAPES.items():
        path = f"model.layers.0.{cell}"
        made, weight = four_bits(path, shape, rng)
        if cell in in_float:
            weight = rng.normal(size=shape).astype("f4")
            made = {f"{path}.weight": weight}
        tensors.update(made)
        decoded[f"{path}.weight"] = weight
    return tensors, decoded


def array_of(tensors, weight, shape):
    """Returns the Nf4Array of a weight among named arrays."""
    path = weight.removesuffix("weight")
    return Nf4Array(**{field: tensors[path + leaf] for field, leaf in TENSOR_NAMES.items()}, shape=shape)


def test_nf4_of_bitsandbytes_becomes_mindlora_s_bit_by_bit(tmp_path):
    tensors, decoded = in_nf4(in_float=("mlp.up_proj",))
    folder = save_quantized(tmp_path / "base", "nf4", tensors)
    report = quantize_checkpoint(folder, str(tmp_path / "out.safetensors"))
    written = load(str(tmp_path / "out.safetensors"))
    for name, weight in decoded.items():
        array = array_of(written, names.parameter_to_mindformers(name), weight.shape)
        if "up_proj" in name:
            assert array.codes.tobytes() == quantize(weight).codes.tobytes()
        else:
            np.testing.assert_array_equal(dequantize(array), weight)
            assert 8 * array.nbytes / weight.size == 5.125
    assert len(with_smaller_groups({name: array.shape for name, array in written.items()})) == 6
    assert any(
        re.match("6 weights keep the values of their NF4 bit by bit, in 5.13 bits", note) for note in report.notes
    )
    assert "1 weights are rounded to NF4 from what they decode to: model.layers.0.feed_forward.w3." in report.notes


def test_joined_weights_keep_their_nf4_and_are_taken_apart_again(tmp_path):
    norms = [f"model.layers.0.self_attn.{part}_norm.weight" for part in "qk"]
    tensors, decoded = in_nf4(norms=norms)
    output = str(tmp_path / "out.safetensors")
    quantize_checkpoint(save_quantized(tmp_path / "base", "nf4", tensors, **QWEN3), output)
    with BaseCheckpoint(output) as base:
        assert "decoder.layers.0.self_attention.linear_qkv.weight_absmax" in base.tensors
        apart = in_hugging_face_names(base, HEADS, KV_HEADS)
        arrays = {tensor.name: tensor.rows(0, tensor.row_count) for tensor in apart}
    for name, weight in decoded.items():
        np.testing.assert_array_equal(dequantize(array_of(arrays, name, weight.shape)), weight)


@pytest.mark.parametrize("form", ["gptq", "fp8-blocks", "nf4"])
def test_what_is_not_in_blocks_of_nf4_is_rounded_to_it(form, tmp_path):
    """The rows of this nf4 have 32 and 48 numbers, so that its blocks cross them."""
    tensors, decoded = quantized_llama(form)
    report = quantize_checkpoint(save_quantized(tmp_path / "base", form, tensors), str(tmp_path / "out.safetensors"))
    written = load(str(tmp_path / "out.safetensors"))
    for name in (name for name in decoded if "_proj" in name):
        packed = quantize(decoded[name])
        found = array_of(written, names.parameter_to_mindformers(name), packed.shape)
        assert all(getattr(found, field).tobytes() == getattr(packed, field).tobytes() for field in TENSOR_NAMES)
    assert any(note.startswith("14 weights are rounded to NF4") for note in report.notes)
    assert any(note.startswith("14 weights are decoded from") and note.endswith("to float32.") for note in report.notes)


def test_deepseek_v3_in_fp8_is_converted_as_the_decoded_one(tmp_path):
    """Experts of their own, and latent projections whose rows are not whole blocks."""
    rng = np.random.default_rng(0)
    decoded = {name: to_float32(array) for name, array in deepseek_v3().items()}
    tensors = dict(decoded)
    for name in [name for name in decoded if "_proj" in name]:
        del tensors[name]
        made, decoded[name] = fp8(name.removesuffix(".weight"), decoded[name].shape, rng)
        tensors.update(made)
    folder = save_quantized(tmp_path / "base", "fp8-blocks", tensors, model_type="deepseek_v3")
    convert_base(folder, str(tmp_path / "new.safetensors"), None, "mindformers", dtype="float32")
    convert_base(save_base(tmp_path / "decoded", decoded), str(tmp_path / "expected.safetensors"), None, "mindformers")
    assert_same(load(str(tmp_path / "new.safetensors")), load(str(tmp_path / "expected.safetensors")))


def test_an_adapter_is_merged_as_into_the_decoded_base(tmp_path):
    tensors, _ = quantized_llama("gptq")
    folder = save_quantized(tmp_path / "base", "gptq", tensors)
    convert_base(folder, str(tmp_path / "decoded"), None, "hf")
    adapter = save_adapter(tmp_path / "adapter", pairs())
    report = merge_checkpoint(folder, adapter, str(tmp_path / "merged"))
    merge_checkpoint(str(tmp_path / "decoded"), adapter, str(tmp_path / "expected"))
    assert_same(load(str(tmp_path / "merged")), load(str(tmp_path / "expected")))
    config = json.loads((tmp_path / "merged" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    assert "14 weights are decoded from GPTQ in 4 bits to bfloat16." in report.notes
    assert any("does not say quantization_config any more" in note for note in report.notes)


def test_an_adapter_of_the_decoded_base_is_recognised(tmp_path):
    tensors, decoded = quantized_llama("gptq")
    folder = save_quantized(tmp_path / "base", "gptq", tensors)
    found = pairs()
    weights = {names.to_mindformers(path): decoded[f"{path}.weight"] for path in found}
    samples = {path: sampled_elements(weights[path]) for path in sampled_paths(weights)}
    adapter = adapter_files.read(save_adapter(tmp_path / "plain", found))
    adapter.fingerprint = fingerprint_from({path: array.shape for path, array in weights.items()}, samples)
    adapter_files.write(adapter, str(tmp_path / "adapter"))
    merge_checkpoint(folder, str(tmp_path / "adapter"), str(tmp_path / "merged"))
    other, _ = quantized_llama("gptq", seed=1)
    another = save_quantized(tmp_path / "another", "gptq", other)
    with pytest.raises(BaseMismatchError, match="was trained on another base"):
        merge_checkpoint(another, str(tmp_path / "adapter"), str(tmp_path / "out"))


def test_the_command_converts_to_the_dtype_that_is_asked(tmp_path, capsys):
    tensors, decoded = quantized_llama("awq")
    folder = save_quantized(tmp_path / "base", "awq", tensors)
    words = ["base", "convert", folder, str(tmp_path / "new"), "--to", "hf", "--dtype", "float16"]
    assert cli.main(words) == 0
    assert "14 weights are decoded from AWQ in 4 bits to float16." in capsys.readouterr().out
    found = load(str(tmp_path / "new"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert found[name].tobytes() == decoded[name].astype("f2").tobytes()
    np.testing.assert_array_equal(to_float32(found["lm_head.weight"]), to_float32(llama()["lm_head.weight"]))


def test_the_forms_of_these_tests_are_all_that_can_be_read():
    from mindlora.files.base.quantized.decode import FORMS as READABLE

    methods = {(settings or {"quant_method": "msmodelslim"})["quant_method"] for _, _, settings in FORMS.values()}
    assert methods == set(READABLE)
