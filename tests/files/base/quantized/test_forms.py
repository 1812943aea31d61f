"""Bases in quantized forms: each is read as if its weights were stored in float, by every door."""

import hashlib
import json
import tracemalloc

import numpy as np
import pytest

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.base.convert import convert_base
from mindlora.files.base.reader import BaseCheckpoint
from tests.support.llama_checkpoints import HUGGING_FACE, assert_same, llama, load, save_base
from tests.support.quantized_checkpoints import FORMS, GROUP, awq, gptq, quantized_llama, save_quantized

FLOAT32 = np.dtype("<f4")
GPTQMODEL = {
    3: ["7bc2b401a64ccfd5", "d038309808f54747", "e01ef7c86b15a3db"],
    4: ["d46d44a54a3d01b7", "8602ad52ab257e57", "2bab1d165cbf7cc7"],
    "awq": ["2cee107c6e6a7756", "b52f27420bcd5459", "c03bd814da513d9a"],
}
WEIGHT = "model.layers.0.mlp.down_proj.weight"
# More rows than codes of 4 bits are in four words.
TALL = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_decoded_exactly_in_every_range_of_rows(form, tmp_path):
    tensors, decoded = quantized_llama(form)
    with BaseCheckpoint(save_quantized(tmp_path / "base", form, tensors), decode_to=FLOAT32) as base:
        assert base.tensors.keys() == decoded.keys() and "quantization_config" not in base.config
        for name, array in decoded.items():
            assert base.tensors[name][:2] == (array.dtype, array.shape), name
            assert base.read_rows(name, 0, len(array)).tobytes() == array.tobytes(), name
        for name in (WEIGHT, TALL):
            for begin, end in ((0, 1), (3, 11), (11, 19), (len(decoded[name]) - 5, len(decoded[name]))):
                assert base.read_rows(name, begin, end).tobytes() == decoded[name][begin:end].tobytes()


@pytest.mark.parametrize("bits", [3, 4])
def test_the_words_of_gptq_are_those_of_gptqmodel(bits):
    """The digests are of what GPTQModel 7.7.0 packs (pack_cols) and decodes (convert_gptq_file) of the same codes."""
    tensors, weight = gptq("cell", (32, 64), np.random.default_rng(bits), bits, in_turn=False)
    assert [digest(tensors["cell.qweight"]), digest(tensors["cell.qzeros"]), digest(weight)] == GPTQMODEL[bits]


def test_the_words_of_awq_are_those_of_gptqmodel():
    """The digests are of what GPTQModel 7.7.0 packs (pack_awq) and decodes (dequantize_gemm) of the same codes."""
    tensors, weight = awq("cell", (32, 64), np.random.default_rng(0))
    assert [digest(tensors["cell.qweight"]), digest(tensors["cell.qzeros"]), digest(weight)] == GPTQMODEL["awq"]


def test_a_bias_of_zeros_that_the_quantizing_program_added_is_left_out(tmp_path):
    tensors, _ = quantized_llama("gptq")
    names = [f"model.layers.{layer}.mlp.down_proj.bias" for layer in range(2)]
    biases = {names[0]: np.zeros(32, "f2"), names[1]: np.ones(32, "f2")}
    with BaseCheckpoint(save_quantized(tmp_path / "base", "gptq", {**tensors, **biases})) as base:
        assert names[0] not in base.tensors and names[1] in base.tensors


def test_settings_of_bitsandbytes_need_not_name_it(tmp_path):
    tensors, decoded = quantized_llama("int8")
    folder = save_quantized(tmp_path / "base", "int8", tensors, settings={"load_in_8bit": True})
    with BaseCheckpoint(folder, decode_to=FLOAT32) as base:
        assert base.read_rows(WEIGHT, 0, 32).tobytes() == decoded[WEIGHT].tobytes()


def test_codes_of_three_bits_go_on_in_the_next_word(tmp_path):
    rng = np.random.default_rng(3)
    tensors = {name: array for name, array in llama().items() if "layers.1" not in name and "q_proj" not in name}
    made, weight = gptq("model.layers.0.self_attn.q_proj", (32, 64), rng, 3)
    settings = {"quant_method": "gptq", "bits": 3, "group_size": GROUP}
    folder = save_quantized(tmp_path / "base", "gptq", {**tensors, **made}, settings=settings)
    with BaseCheckpoint(folder, decode_to=FLOAT32) as base:
        assert base.read_rows("model.layers.0.self_attn.q_proj.weight", 5, 29).tobytes() == weight[5:29].tobytes()


@pytest.mark.parametrize("pattern", [r".*\.down_proj", r"+:.*\.down_proj", "model.layers.0.mlp.down_proj"])
def test_dynamic_has_other_settings_for_some_weights(pattern, tmp_path):
    """As GPTQModel writes it, which quantizes lm_head to 8 bits unless told otherwise."""
    rng = np.random.default_rng(4)
    tensors, decoded = quantized_llama("gptq")
    paths = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2) if "layers.0" not in pattern or not layer]
    for path in paths:
        made, decoded[f"{path}.weight"] = gptq(path, decoded[f"{path}.weight"].shape, rng, 8)
        tensors.update(made)
    rules = {r"-:.*\.k_norm": {}, pattern: {"bits": 8}, r"+:.*\.(mlp|self_attn)\..*": {"bits": 4}}
    settings = {**FORMS["gptq"][2], "bits": 2, "dynamic": rules}
    with BaseCheckpoint(
        save_quantized(tmp_path / "base", "gptq", tensors, settings=settings), decode_to=FLOAT32
    ) as base:
        for name, array in decoded.items():
            assert base.read_rows(name, 0, len(array)).tobytes() == array.tobytes(), name


def test_weights_are_rounded_once_to_the_dtype_of_config_json(tmp_path):
    tensors, decoded = quantized_llama("gptq")
    read = load(save_quantized(tmp_path / "base", "gptq", tensors))
    assert_same(
        read, {name: from_float32(array, BFLOAT16) if "_proj" in name else array for name, array in decoded.items()}
    )


@pytest.mark.parametrize("form", ["fp8-blocks", "nf4", "gptq", "packed-zeros"])
def test_the_parts_of_a_weight_may_be_in_different_files(form, tmp_path):
    tensors, decoded = quantized_llama(form)
    with BaseCheckpoint(save_quantized(tmp_path / "base", form, tensors, shards=3), decode_to=FLOAT32) as base:
        assert base.read_rows(WEIGHT, 0, 32).tobytes() == decoded[WEIGHT].tobytes()


def test_a_bare_model_gets_the_names_of_the_model_with_a_head(tmp_path):
    tensors, decoded = quantized_llama("awq")
    bare = {name.removeprefix("model."): array for name, array in tensors.items() if name != "lm_head.weight"}
    with BaseCheckpoint(save_quantized(tmp_path / "base", "awq", bare), decode_to=FLOAT32) as base:
        assert base.read_rows(WEIGHT, 0, 32).tobytes() == decoded[WEIGHT].tobytes()


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_the_settings_may_be_in_a_file_of_their_own(name, tmp_path):
    form = "gptq" if name == "quantize_config.json" else "awq"
    tensors, decoded = quantized_llama(form)
    folder = save_base(tmp_path / "base", tensors, **HUGGING_FACE)
    settings = {key: value for key, value in FORMS[form][2].items() if key != "quant_method"}
    (tmp_path / "base" / name).write_text(json.dumps(settings), encoding="utf-8")
    with BaseCheckpoint(folder) as base:
        assert base.read_rows(WEIGHT, 0, 32).tobytes() == decoded[WEIGHT].tobytes()


@pytest.mark.parametrize("form", ["nf4", "fp8-rows"])
def test_weights_that_say_themselves_what_they_are_need_no_config(form, tmp_path):
    tensors, decoded = quantized_llama(form)
    with BaseCheckpoint(save_base(tmp_path / "base", tensors)) as base:
        assert base.read_rows(WEIGHT, 0, 32).tobytes() == decoded[WEIGHT].tobytes()


def test_a_decoded_base_is_written_under_the_same_names(tmp_path):
    tensors, decoded = quantized_llama("w8a8")
    folder = save_quantized(tmp_path / "base", "w8a8", tensors)
    report = convert_base(folder, str(tmp_path / "new"), None, "hf", dtype="float32")
    assert_same(load(str(tmp_path / "new")), decoded)
    config = json.loads((tmp_path / "new" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config and config["torch_dtype"] == "float32"
    assert "14 weights are decoded from compressed-tensors' 8-bit integers to float32." in report.notes
    assert any("14 tensors: " in note and "input_scale" in note for note in report.notes)
    assert any("does not say quantization_config any more" in note for note in report.notes)


def test_a_decoded_base_gets_mindformers_names(tmp_path):
    tensors, decoded = quantized_llama("gptq-order")
    output = str(tmp_path / "new.safetensors")
    convert_base(
        save_quantized(tmp_path / "base", "gptq-order", tensors), output, "hf", "mindformers", True, dtype="float32"
    )
    with BaseCheckpoint(output) as base:
        joined = base.read_rows("model.layers.0.feed_forward.w_gate_hidden.weight", 0, 96)
    up, gate = (decoded[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("up", "gate"))
    assert {joined[0::2].tobytes(), joined[1::2].tobytes()} == {up.tobytes(), gate.tobytes()}


def test_dtype_is_of_a_quantized_base_alone(tmp_path):
    folder = save_base(tmp_path / "base", llama(), **HUGGING_FACE)
    with pytest.raises(CheckpointError, match="holds no quantized weights: each tensor keeps its dtype"):
        convert_base(folder, str(tmp_path / "new"), None, "mindformers", dtype="float32")


@pytest.mark.parametrize("method", ["gptq", "hqq"])
def test_a_file_beside_a_quantized_folder_s_config_is_read_as_it_is(method, tmp_path):
    """As a converted base that was written into the folder of its source."""
    folder = save_base(
        tmp_path / "base", llama(), **HUGGING_FACE, quantization_config={"quant_method": method, "bits": 4}
    )
    assert_same(load(f"{folder}/model-0.safetensors"), llama())


@pytest.mark.parametrize("form", ["fp8-rows", "nf4", "gptq", "awq"])
def test_decoding_takes_a_part_of_the_weight_s_memory(form, tmp_path):
    """Blocks of rows pass through, whether the codes of a row are in a row of the file or in a column."""
    tensors = {name: array for name, array in llama().items() if "_proj" not in name}
    make, options, _ = FORMS[form]
    made, weight = make(WEIGHT.removesuffix(".weight"), (512, 512), np.random.default_rng(0), **options)
    with BaseCheckpoint(save_quantized(tmp_path / "base", form, {**tensors, **made}), decode_to=FLOAT32) as base:
        base.read_rows(WEIGHT, 0, 1)
        tracemalloc.start()
        for begin in range(0, 512, 32):
            assert base.read_rows(WEIGHT, begin, begin + 32).tobytes() == weight[begin : begin + 32].tobytes()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < weight.nbytes / 2


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
