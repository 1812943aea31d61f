"""PEFT's adapter folder: its keys, and its adapter_config.json."""
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindlora.dialects import peft
from mindlora.errors import AdapterFormatError

PATHS = st.sampled_from(["model.layers.0.attention.wq", "model.layers.31.feed_forward.w2", "lm_head", "fc.0",
                         "model.layers.0.attention.w_qkv", "attention.wo", ""])


@pytest.mark.parametrize("path, half, key", [
    ("model.layers.3.attention.wq", "A", "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"),
    ("model.layers.3.attention.wo", "B", "base_model.model.model.layers.3.self_attn.o_proj.lora_B.weight"),
    ("model.layers.0.feed_forward.w2", "B", "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"),
    ("lm_head", "A", "base_model.model.lm_head.lora_A.weight")])
def test_keys_are_peft_s(path, half, key):
    assert peft.tensor_key(path, half) == key
    assert peft.parse_key(key) == (path, half)


@given(PATHS, st.sampled_from("AB"))
def test_keys_make_the_round_trip(path, half):
    assert peft.parse_key(peft.tensor_key(path, half)) == (path, half)


@pytest.mark.parametrize("key", [
    "model.layers.0.self_attn.q_proj.lora_A.weight", "base_model.model.lm_head.weight",
    "base_model.model.lm_head.lora_embedding_A", "base_model.model.lm_head.lora_magnitude_vector",
    "base_model.model.lm_head.lora_A.bias", "base_model.model.lm_head.lora_a.weight",
    "base_model.model.lm_head.lora_A.default.weight", "lm_head.mindpet_delta_lora_a", ""])
def test_other_keys_are_none_of_it(key):
    assert peft.parse_key(key) is None


@pytest.mark.parametrize("alpha, kept", [(16, 16), (16.0, 16), (2.5, 2.5)])
def test_config_has_the_stable_fields(alpha, kept):
    config = peft.adapter_config(8, alpha, 0.1, {"v_proj", "q_proj"}, "meta-llama/Llama-2-7b")
    assert config == {
        "base_model_name_or_path": "meta-llama/Llama-2-7b", "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "lora_alpha": kept, "lora_dropout": 0.1,
        "modules_to_save": None, "peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM"}
    assert isinstance(config["lora_alpha"], type(kept))


def written(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "adapter_config.json"
    path.write_bytes(text.encode(encoding))
    return str(path)


@pytest.mark.parametrize("content, rank_and_alpha", [
    ({"r": 8, "lora_alpha": 16}, (8, 16.0)), ({"r": 1, "lora_alpha": 0.5, "peft_type": "LORA"}, (1, 0.5)),
    ({"r": 8, "lora_alpha": 16, "use_rslora": False, "alpha_pattern": {}, "rank_pattern": None}, (8, 16.0))])
def test_rank_and_alpha_are_read(tmp_path, content, rank_and_alpha):
    assert peft.read_rank_and_alpha(written(tmp_path, json.dumps(content))) == rank_and_alpha


def test_what_is_written_is_read(tmp_path):
    config = peft.adapter_config(4, 2.3, 0.0, ["q_proj"], None)
    assert peft.read_rank_and_alpha(written(tmp_path, json.dumps(config))) == (4, 2.3)


@pytest.mark.parametrize("text, message", [
    ("", "is not JSON: Expecting value: line 1 column 1 (char 0)."),
    ("r: 8", "is not JSON: Expecting value: line 1 column 1 (char 0)."),
    ('{"r": 8, "lora_alpha": 16', "is not JSON: Expecting ',' delimiter: line 1 column 26 (char 25)."),
    ("[8, 16]", "holds a list and not a JSON object."),
    ("8", "holds a int and not a JSON object."),
    ("{}", ": r is None, it must be a number above 0."),
    ('{"r": 8}', ": lora_alpha is None, it must be a number above 0."),
    ('{"lora_alpha": 16}', ": r is None, it must be a number above 0."),
    ('{"r": 0, "lora_alpha": 16}', ": r is 0, it must be a number above 0."),
    ('{"r": true, "lora_alpha": 16}', ": r is True, it must be a number above 0."),
    ('{"r": 8, "lora_alpha": "16"}', ": lora_alpha is '16', it must be a number above 0."),
    ('{"r": 8, "lora_alpha": -1}', ": lora_alpha is -1, it must be a number above 0."),
    ('{"r": 8, "lora_alpha": 16, "use_rslora": true}',
     ": use_rslora is True, so the scale is not lora_alpha / r in every cell, which is not supported: its effect would "
     "be scaled wrongly."),
    ('{"r": 8, "lora_alpha": 16, "alpha_pattern": {"q_proj": 32}}',
     ": alpha_pattern is {'q_proj': 32}, so the scale is not lora_alpha / r in every cell, which is not supported: its "
     "effect would be scaled wrongly.")])
def test_another_content_is_refused(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(AdapterFormatError) as error:
        peft.read_rank_and_alpha(path)
    assert str(error.value) == path + (message if message[0] == ":" else " " + message)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(AdapterFormatError, match="is not JSON: 'utf-8' codec can't decode byte"):
        peft.read_rank_and_alpha(written(tmp_path, '{"r": "é"}', "latin-1"))


def test_a_missing_config_is_said_to_be_missing(tmp_path):
    path = str(tmp_path / "adapter_config.json")
    with pytest.raises(AdapterFormatError) as error:
        peft.read_rank_and_alpha(path)
    assert str(error.value) == f"{path} is missing: an adapter folder holds it beside adapter_model.safetensors."
