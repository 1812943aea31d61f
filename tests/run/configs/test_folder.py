"""What cannot be carried from a model's folder into a YAML is refused by name, and nothing is dropped."""

import json
import os
import re

import pytest

from mindlora.core.errors import ConfigError, TokenizerError
from mindlora.run.configs.folder import CPU, read_folder, seq_length_of, served_content
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.llama_checkpoints import HUGGING_FACE, VOCAB, llama, save_base

CONFIG = {**HUGGING_FACE, "vocab_size": VOCAB, "max_position_embeddings": 128}
YARN = {"type": "yarn", "factor": 4.0}


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(CHATML)


@pytest.fixture
def make(tmp_path, tokenizer):
    """Returns a function that writes a model's folder: a Llama, but for the settings that are given."""

    def write(tied=False, biases=False, **config):
        folder = save_base(tmp_path / "model", llama(tied=tied, biases=biases), **{**CONFIG, **config})
        tokenizer.save_pretrained(folder)
        return folder

    return write


def refusal(folder, to_train=False):
    with pytest.raises(ConfigError) as caught:
        read_folder(folder, to_train)
    return str(caught.value)


def test_what_config_json_says_is_in_model_config(make):
    model = read_folder(make(tied=True, tie_word_embeddings=True, rope_theta=5e5, eos_token_id=[3, 4]))
    assert model.model_config["tie_word_embeddings"] is True and model.model_config["theta"] == 5e5
    assert model.ends == [3, 4] and model.name == "model" and model.architecture.title == "Llama and Qwen2"


@pytest.mark.parametrize("tied", [False, True], ids=["a head of its own", "tied"])
def test_a_cpu_serves_weights_in_the_dtype_in_which_they_are_stored(make, tied):
    model = read_folder(make(tied=tied, tie_word_embeddings=tied))
    config = served_content(model, CPU)["model"]["model_config"]
    assert (config["param_init_type"], config["embedding_init_type"]) == ("bfloat16", "bfloat16")
    assert config["compute_dtype"] == "float32" and model.stored == "bfloat16"


def test_generation_config_says_which_tokens_end_an_answer(make):
    folder = make(eos_token_id=3)
    with open(os.path.join(folder, "generation_config.json"), "w", encoding="utf-8") as file:
        json.dump({"eos_token_id": [3, 5]}, file)
    assert read_folder(folder).ends == [3, 5]


def test_a_model_that_only_predicts_is_not_for_training(make):
    with pytest.raises(ConfigError, match="MindFormers has GLM4 for prediction alone"):
        read_folder(make(model_type="glm4"), to_train=True)


def test_the_models_that_are_offered_are_those_of_the_purpose(make):
    folder = make(model_type="gemma2")
    for to_train in (True, False):
        with pytest.raises(ConfigError, match="Choose one of model_type llama, .*qwen3") as refused:
            read_folder(folder, to_train=to_train)
        assert ("glm4" in str(refused.value)) is not to_train
        assert ("deepseek_v3" in str(refused.value)) is to_train


def test_a_model_that_is_trained_alone_is_not_served(make):
    assert "mindlora does not serve DeepSeek-V3. Serve it with vLLM" in refusal(make(model_type="deepseek_v3"))


def test_a_scaled_rotary_embedding_is_carried(make):
    settings = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = read_folder(make(rope_scaling={**settings, "original_max_position_embeddings": 64}))
    assert model.model_config["extend_method"] == "LLAMA3"
    expected = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    assert model.model_config["scaling_factor"] == expected


@pytest.mark.parametrize(
    "config, said",
    [
        (
            {"model_type": "gemma2"},
            r"says model_type 'gemma2', architectures \['LlamaForCausalLM'\]: such a model cannot be taken",
        ),
        ({"model_type": "glm4", "hidden_act": "gelu"}, r"hidden_act is 'gelu', and MindFormers' GLM4 has silu alone"),
        ({"model_type": "glm4", "rope_scaling": YARN}, r"does not scale the rotary embedding of GLM4"),
        ({"head_dim": 16}, r"head_dim is 16, and the heads of MindFormers' Llama have .* 8 elements here"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
        ({"mlp_bias": True}, r"mlp_bias is True"),
        ({"attention_dropout": 0.1}, r"attention_dropout is 0.1"),
        ({"vocab_size": None}, r"has no vocab_size"),
        ({"num_hidden_layers": "2"}, r"num_hidden_layers is '2', and it must be a whole number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_scaling is .*rope_type dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, r"rope_parameters is .*rope_type longrope"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, r"has no attention_factor for rope_type yarn"),
        ({"rope_scaling": {**YARN, "mscale": 0.7}}, r"must have both mscale and mscale_all_dim"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_type linear needs factor"),
        ({"model_type": "qwen3", "rope_scaling": YARN}, r"does not scale the rotary embedding of Qwen3"),
        ({"model_type": "qwen3", "attention_bias": True}, r"attention_bias is True"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"model_type": "deepseek_v3", "rope_interleave": False}, r"rope_interleave is False"),
        ({"model_type": "deepseek_v3", "tie_word_embeddings": True}, r"tie_word_embeddings is True"),
    ],
)
def test_a_setting_that_mindformers_has_not_is_refused_by_name(config, said, make):
    # A DeepSeek-V3 is trained, and not served.
    assert re.search(said, refusal(make(**config), config.get("model_type") == "deepseek_v3"))


def test_weights_that_are_not_the_models_are_refused(make):
    assert re.search(r"weights have tensors that the model lacks: .*attention.w[kqv].bias", refusal(make(biases=True)))
    assert re.search(r"wq.bias", refusal(make_again(make, attention_bias=True)))
    assert re.search(r"lack lm_head.weight, but config.json does not say", refusal(make_again(make, tied=True)))
    assert re.search(r"w1.weight has the shape", refusal(make_again(make, intermediate_size=40)))
    assert re.search(r"weights lack .*layers.2", refusal(make_again(make, num_hidden_layers=3)))


def make_again(make, **changes):
    """Writes another folder in the place of the last one."""
    import shutil

    shutil.rmtree("model", ignore_errors=True)
    return make(**changes)


def test_a_folder_without_its_parts_is_an_error(make, tmp_path):
    assert "is not a folder: name the folder" in refusal(str(tmp_path / "nowhere"))
    folder = make()
    os.remove(os.path.join(folder, "tokenizer.json"))
    with pytest.raises(TokenizerError, match="No tokenizer in the folder"):
        read_folder(folder)
    os.remove(os.path.join(folder, "config.json"))
    assert "has no config.json" in refusal(folder)


@pytest.mark.parametrize(
    "config, window",
    [
        ({"model_type": "mistral", "sliding_window": 32}, 32),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "llama", "sliding_window": 32}, None),
        ({"model_type": "llama", "sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}, 32),
    ],
)
def test_rows_are_no_longer_than_a_sliding_window(config, window, make):
    folder = read_folder(make(**config))
    assert seq_length_of(folder, None) == (window or 128) and seq_length_of(folder, 32) == 32
    if window:
        with pytest.raises(ConfigError, match="sliding_window is 32, .* rows of 33 tokens are longer"):
            seq_length_of(folder, 33)
    else:
        assert seq_length_of(folder, 33) == 33
