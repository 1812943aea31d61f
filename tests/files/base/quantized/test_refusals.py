"""Quantized bases that cannot be decoded: one error that names the tensor or the setting, and says what to do."""

import json
import re

import numpy as np
import pytest

from mindlora.core.errors import CheckpointError, LoraError, TruncatedAdapterError
from mindlora.files.base.quantized.decode import FORMS as READABLE
from mindlora.files.base.reader import BaseCheckpoint
from tests.support.llama_checkpoints import HUGGING_FACE, llama, save_base
from tests.support.quantized_checkpoints import FORMS, quantized_llama, save_quantized

# A cell of [32, 48].
PATH = "model.layers.0.mlp.down_proj"
STATE = f"{PATH}.weight.quant_state.bitsandbytes__nf4"


def without(part):
    return lambda tensors: tensors.pop(f"{PATH}.{part}")


def instead(part, change):
    """Changes a tensor."""

    def apply(tensors):
        tensors[f"{PATH}.{part}"] = change(tensors[f"{PATH}.{part}"])

    return apply


def with_state(**changes):
    """Changes what bitsandbytes says of the weight."""

    def apply(tensors):
        state = {**json.loads(tensors[STATE].tobytes()), **changes}
        tensors[STATE] = np.frombuffer(json.dumps(state).encode(), "u1")

    return apply


def cut(axis):
    return lambda array: np.delete(array, -1, axis).copy()


def as_int64(array):
    return array.astype("<i8")


def beyond(array):
    return array + np.int32(40)


# form, what is done to its tensors, and what the error says, after the folder.
TENSORS = [
    ("fp8-blocks", without("weight_scale_inv"), r"holds .*down_proj.weight and lacks .*weight_scale_inv or .*_scale,"),
    (
        "fp8-blocks",
        instead("weight_scale_inv", cut(0)),
        r"weight_scale_inv is float32 \[1, 2\], and .* needs .*\[2, 2\]",
    ),
    (
        "fp8-blocks",
        instead("weight_scale_inv", as_int64),
        r"weight_scale_inv is int64 .* needs it as float64 or float32",
    ),
    (
        "fp8-blocks",
        lambda t: t.update({f"{PATH}.weight_scale": np.ones(1, "f4")}),
        r"holds both .* one of them is wrong",
    ),
    ("fp8-rows", instead("weight_scale", cut(0)), r"weight_scale is float32 \[31, 1\], .* \[32\] or \[32, 1\]"),
    ("fp8-rows", instead("weight", lambda array: array[None]), r"weight is float8_e4m3 \[1, 32, 48\], and only"),
    ("nf4", without("weight.absmax"), r"holds .*down_proj.weight and lacks .*weight.absmax, without which"),
    ("nf4", without("weight.nested_absmax"), r"lacks .*weight.nested_absmax"),
    ("nf4", without("weight.quant_map"), r"lacks .*weight.quant_map"),
    ("nf4", without("weight"), r"does not describe a matrix .*down_proj.weight in nf4 or fp4"),
    ("nf4", instead("weight", cut(0)), r"down_proj.weight has 767 bytes, and the \[32, 48\] .* need 768"),
    ("nf4", instead("weight.absmax", cut(0)), r"weight.absmax is uint8 \[23\], .* \[24\]"),
    ("nf4", with_state(blocksize=0), r"bitsandbytes__nf4 says .*'blocksize': 0.*does not describe"),
    ("nf4", with_state(shape=[32, -48]), r"does not describe a matrix"),
    ("nf4", with_state(quant_type="af4"), r"'quant_type': 'af4'.*does not describe"),
    ("nf4", with_state(nested_offset="x"), r"nested_offset 'x', which are not two numbers"),
    ("nf4", lambda t: t.update({STATE: t[STATE][:-3]}), r"quant_state.bitsandbytes__nf4"),
    ("fp8-tensor", instead("weight", lambda array: array[:0]), r"weight is \[0, 48\], which is not a matrix"),
    ("int8", without("SCB"), r"lacks .*down_proj.SCB"),
    ("int8", instead("SCB", cut(0)), r"SCB is float32 \[31\]"),
    ("int8", instead("weight_format", lambda array: array + np.uint8(2)), r"weight_format says .*order of a GPU's"),
    ("gptq", without("scales"), r"holds .*qweight and lacks .*scales"),
    ("gptq", without("qzeros"), r"lacks .*qzeros"),
    ("gptq", instead("scales", cut(0)), r"scales is float16 \[2, 32\], .*qweight in 4 bits needs it as .*\[3, 32\]"),
    ("gptq", instead("qzeros", as_int64), r"qzeros is int64 .* needs it as int32"),
    ("gptq", instead("qweight", as_int64), r"qweight is int64"),
    ("gptq", instead("qweight", cut(0)), r"qweight has 40 in_channels, which group_size 16 does not divide"),
    ("gptq", instead("qweight", lambda array: array[0]), r"qweight is \[32\], which is not a matrix"),
    ("gptq", instead("g_idx", beyond), r"g_idx has groups 40 to 42, and .* has 3 groups"),
    ("gptq", instead("g_idx", cut(0)), r"g_idx is int32 \[47\]"),
    ("awq", without("qzeros"), r"lacks .*qzeros"),
    ("awq", instead("scales", cut(1)), r"scales is float16 \[3, 31\]"),
    ("packed-zeros", without("weight_shape"), r"lacks .*weight_shape"),
    ("packed-zeros", without("weight_scale"), r"lacks .*weight_scale"),
    ("packed-zeros", instead("weight_shape", beyond), r"which are not the \[72, 88\] that .*weight_shape says"),
    ("packed-zeros", without("weight_zero_point"), r"lacks .*weight_zero_point"),
    ("w8a8-zeros", without("weight_zero_point"), r"lacks .*weight_zero_point"),
    ("packed-zeros", instead("weight_zero_point", cut(1)), r"weight_zero_point is int32 \[4, 2\]"),
    ("packed-zeros", instead("weight_scale", cut(1)), r"weight_scale has 2 groups for the 48 .* group_size .* \[16\]"),
    ("gptq-order", without("g_idx"), r"lacks .*g_idx, without which it cannot be decoded"),
    ("packed-order", without("weight_g_idx"), r"lacks .*weight_g_idx"),
    ("packed-order", instead("weight_g_idx", beyond), r"weight_g_idx has groups 40 to 42"),
    ("w8a8", without("weight_scale"), r"lacks .*weight_scale"),
    ("w8a8-zeros", instead("weight_zero_point", cut(0)), r"weight_zero_point is int8 \[31, 1\]"),
    ("modelslim", without("weight_offset"), r"lacks .*weight_offset"),
    ("modelslim", instead("weight_scale", cut(0)), r"weight_scale is float32 \[31, 1\]"),
    ("modelslim-groups", without("weight_scale"), r"lacks .*weight_scale"),
    ("modelslim-groups", instead("weight_offset", cut(1)), r"weight_offset is float32 \[32, 1\]"),
    ("modelslim-groups", instead("weight_scale", lambda a: np.repeat(a, 16, 1)), r"32 groups, which do not divide"),
    ("modelslim-static", without("deq_scale"), r"lacks .*deq_scale"),
    ("modelslim-static", without("input_scale"), r"lacks .*input_scale"),
    ("modelslim-static", instead("deq_scale", cut(0)), r"deq_scale is int64 \[31\]"),
    (
        "modelslim",
        lambda t: t.update({"model.layers.0.self_attn.o_proj.heads_rotation": np.eye(4, dtype="f4")}),
        r"holds .*o_proj.heads_rotation, by which msModelSlim's model changes its activations",
    ),
    (
        "gptq",
        lambda t: t.update({f"{PATH}.weight": np.ones((32, 48), "f4")}),
        r"down_proj.weight, and .*qweight, which",
    ),
    ("gptq", lambda t: t.update({f"{PATH}.g_idy": np.zeros(3, "<i4")}), r"is in GPTQ and holds .*g_idy as int32"),
]


@pytest.mark.parametrize("form, change, said", TENSORS)
def test_a_wrong_tensor_is_named(form, change, said, tmp_path):
    tensors, _ = quantized_llama(form)
    change(tensors)
    assert re.search(said, refusal(save_quantized(tmp_path / "base", form, tensors)))


# form, quantization_config in place of its own, and what the error says.
SETTINGS = [
    (
        "gptq",
        {"quant_method": "hqq"},
        r"quant_method 'hqq', which cannot be read: fp8 \(FP8\), .*Take the original model",
    ),
    ("gptq", {}, r"quant_method None, which cannot be read"),
    ("gptq", "gptq", r"quantization_config is 'gptq', not an object"),
    ("gptq", {"quant_method": "awq", "group_size": 16}, r"qweight has 6 in_channels, which group_size 16"),
    ("gptq", {"quant_method": "gptq", "bits": 5, "group_size": 16}, r"GPTQ with bits 5, and 2, 3, 4, 8 can be read"),
    ("gptq", {"quant_method": "gptq", "bits": 8, "group_size": 16}, r"qweight has 24 in_channels, which group_size 16"),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 0}, r"group_size of its quantization is 0"),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 20}, r"which group_size 20 does not divide"),
    ("gptq", {**FORMS["gptq"][2], "checkpoint_format": "marlin"}, r"checkpoint_format 'marlin', and gptq, gptq_v2 can"),
    ("gptq", {**FORMS["gptq"][2], "dynamic": {".*down_proj": {"bits": 5}}}, r"with bits 5, and 2, 3, 4, 8 can be read"),
    ("gptq", {**FORMS["gptq"][2], "dynamic": {"+:(": {}}}, r"dynamic of its quantization is .* Copy config.json again"),
    ("gptq", {**FORMS["gptq"][2], "dynamic": [1]}, r"dynamic of its quantization is \[1\], which is not an object"),
    (
        "awq",
        {**FORMS["awq"][2], "dynamic": {".*down_proj": {"group_size": 20}}},
        r"which group_size 20 does not divide",
    ),
    ("awq", {**FORMS["awq"][2], "version": "gemv"}, r"AWQ with version 'gemv', and gemm can be read"),
    ("awq", {**FORMS["awq"][2], "bits": 3}, r"AWQ with bits 3, and 4 can be read"),
    ("fp8-blocks", {"quant_method": "fp8", "weight_block_size": [0, 16]}, r"weight_block_size .* is \[0, 16\]"),
    ("fp8-blocks", {"quant_method": "fp8"}, r"weight_scale_inv is float32 \[2, 2\], and .* needs it as .*\[32, 1\]"),
    (
        "packed",
        {**FORMS["packed"][2], "format": "nvfp4-pack-quantized"},
        r"format 'nvfp4-pack-quantized', which cannot",
    ),
    (
        "packed",
        {**FORMS["packed"][2], "config_groups": {"a": {"weights": {"type": "int", "block_structure": [16, 16]}}}},
        r"with integers in blocks, which cannot be read",
    ),
    ("packed", {**FORMS["packed"][2], "config_groups": [1]}, r"config_groups of config.json is \[1\], not an object"),
    (
        "packed",
        {**FORMS["packed"][2], "sparsity_config": {"format": "sparse-24"}},
        r"with sparsity_config, which cannot",
    ),
    (
        "packed",
        {**FORMS["packed"][2], "transform_config": {"config_groups": {"a": 1}}},
        r"with transform_config, which",
    ),
    ("packed", {**FORMS["packed"][2], "config_groups": {"a": {"weights": {"num_bits": 4.0}}}}, r"config.json, \[\]"),
    ("packed", FORMS["packed-3"][2], r"which are not the \[32, 48\] .* num_bits of config.json, \[3\]"),
]


@pytest.mark.parametrize("form, settings, said", SETTINGS)
def test_a_wrong_setting_is_named(form, settings, said, tmp_path):
    tensors, _ = quantized_llama(form)
    assert re.search(said, refusal(save_quantized(tmp_path / "base", form, tensors, settings=settings)))


def test_every_form_that_can_be_read_is_offered(tmp_path):
    tensors, _ = quantized_llama("gptq")
    said = refusal(save_quantized(tmp_path / "base", "gptq", tensors, settings={"quant_method": "eetq"}))
    assert len(READABLE) == 6 and all(f"{method} ({form.title})" in said for method, form in READABLE.items())


def test_a_config_that_says_so_of_weights_in_float_is_contradicted(tmp_path):
    folder = save_base(tmp_path / "base", llama(), **HUGGING_FACE, quantization_config=FORMS["gptq"][2])
    assert re.search(r"config.json says that the weights are in GPTQ, and .* holds none of them", refusal(folder))


def test_a_kind_of_modelslim_that_cannot_be_read_is_named(tmp_path):
    tensors, _ = quantized_llama("modelslim")
    folder = save_quantized(tmp_path / "base", "modelslim", tensors)
    path = tmp_path / "base" / "quant_model_description.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, f"{PATH}.weight": "W4A8_DYNAMIC"}), encoding="utf-8")
    assert re.search(r"says 'W4A8_DYNAMIC' of model.layers.0.mlp.down_proj.weight, and FLOAT, W8A8", refusal(folder))


@pytest.mark.parametrize("form", ["fp8-blocks", "nf4", "gptq", "awq", "packed-zeros", "modelslim"])
def test_a_file_that_was_cut_off_is_an_error(form, tmp_path):
    tensors, _ = quantized_llama(form)
    folder = save_quantized(tmp_path / "base", form, tensors)
    file = tmp_path / "base" / "model-0.safetensors"
    whole = file.read_bytes()
    with BaseCheckpoint(folder) as base:
        file.write_bytes(whole[: len(whole) // 8])
        with pytest.raises(TruncatedAdapterError, match="became shorter while it was read"):
            for name, info in base.tensors.items():
                base.read_rows(name, 0, info.shape[0])
    with pytest.raises(TruncatedAdapterError, match="is truncated or damaged"):
        BaseCheckpoint(folder)


def test_a_weight_in_float8_without_a_scale_is_an_error(tmp_path):
    tensors, _ = quantized_llama("fp8-tensor")
    tensors.pop(f"{PATH}.weight_scale")
    assert "lacks" in refusal(save_base(tmp_path / "base", tensors))


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        BaseCheckpoint(folder)
    assert isinstance(caught.value, LoraError)
    return str(caught.value)
