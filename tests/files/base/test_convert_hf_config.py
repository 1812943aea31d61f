"""The config.json that base convert writes for transformers from a MindFormers YAML."""

import json
import os

import pytest

from mindlora import cli
from mindlora.core.errors import CheckpointError
from mindlora.files.base.convert import convert_base
from mindlora.models.architectures import qwen
from mindlora.models.architectures.hugging_face import HuggingFaceConfig
from tests.support import mcore_checkpoints
from tests.support.llama_checkpoints import FFN, HEADS, HIDDEN, KV_HEADS, VOCAB, llama, save_base

YAML = {"type": "LlamaConfig", "num_heads": HEADS, "n_kv_heads": KV_HEADS, "hidden_size": HIDDEN, "seq_length": 64}


def converted(tmp_path, model_config=None, biases=False):
    convert_base(save_base(tmp_path / "hf", llama(biases=biases)), str(tmp_path / "mf"), "hf", "mindformers")
    report = convert_base(str(tmp_path / "mf"), str(tmp_path / "out"), None, "hf", model_config=model_config)
    path = tmp_path / "out" / "config.json"
    return json.loads(path.read_text()) if path.exists() else None, report


@pytest.mark.parametrize("biases, kind", [(False, "Llama"), (True, "Qwen2")])
def test_sizes_are_those_of_the_tensors_and_the_rest_is_the_yamls(tmp_path, biases, kind):
    config, _ = converted(tmp_path, {**YAML, "theta": 5e5, "eos_token_id": 7}, biases)
    assert (config["architectures"], config["model_type"]) == ([f"{kind}ForCausalLM"], kind.lower())
    sizes = [config[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")]
    assert sizes == [VOCAB, HIDDEN, FFN, 2]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["rope_theta"], config["eos_token_id"], config["max_position_embeddings"]) == (5e5, 7, 64)
    assert config["tie_word_embeddings"] is False


QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": mcore_checkpoints.VOCAB,
    "hidden_size": mcore_checkpoints.HIDDEN,
    "intermediate_size": mcore_checkpoints.INNER,
    "num_hidden_layers": 2,
    **mcore_checkpoints.CONFIG,
    "rope_theta": 1e6,
    "pad_token_id": 3,
    "seq_length": 64,
}


def of_qwen3(tmp_path, model_config, **tensors):
    """Returns the config.json of a Qwen3, which MindFormers' names do not describe."""
    save_base(tmp_path / "hf", mcore_checkpoints.qwen3(**tensors), **mcore_checkpoints.CONFIG)
    heads = {"heads": mcore_checkpoints.HEADS, "kv_heads": mcore_checkpoints.KV_HEADS}
    convert_base(str(tmp_path / "hf"), str(tmp_path / "mcore.safetensors"), "hf", "mcore", **heads)
    convert_base(
        str(tmp_path / "mcore.safetensors"), str(tmp_path / "out"), None, "hf", **heads, model_config=model_config
    )
    return json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("tied", [False, True])
def test_that_of_a_qwen3_is_read_back_as_the_yaml_that_it_was_made_from(tmp_path, tied):
    config = of_qwen3(tmp_path, {**QWEN3, "tie_word_embeddings": tied}, tied=tied)
    assert (config["architectures"], config["model_type"]) == (["Qwen3ForCausalLM"], "qwen3")
    read = qwen.from_hugging_face(HuggingFaceConfig("config.json", config))
    assert {**read, **QWEN3, "max_position_embeddings": 64} == {**QWEN3, **read}
    assert (read["tie_word_embeddings"], config["pad_token_id"], config["torch_dtype"]) == (tied, 3, "bfloat16")


def test_that_of_a_qwen3_moe_has_its_experts(tmp_path):
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": mcore_checkpoints.EXPERT_INNER}
    config = of_qwen3(tmp_path, {**QWEN3, **sizes, "model_type": "qwen3_moe", "norm_topk_prob": True}, experts=3)
    read = qwen.from_hugging_face_moe(HuggingFaceConfig("config.json", config))
    assert {key: read[key] for key in sizes} == sizes and read["norm_topk_prob"] is True


def test_a_yaml_of_a_qwen3_beside_another_model_is_refused(tmp_path):
    """A Qwen3-MoE has no feed-forward network, and a YAML of a Qwen3 says that it has."""
    with pytest.raises(
        CheckpointError, match=r"lacks model.layers.0.mlp.gate_proj.weight, and the YAML describes a Qw"
    ):
        of_qwen3(tmp_path, QWEN3, experts=3)
    assert not os.path.exists(tmp_path / "out")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 40}, "The YAML has hidden_size 40, and the checkpoint 20"),
        ({"num_hidden_layers": 3}, "The YAML has num_hidden_layers 3, and the checkpoint 2"),
        ({"head_dim": 10}, "The YAML has num_attention_heads 4 and num_key_value_heads 2, and the checkpoint 48 rows"),
    ],
)
def test_a_yaml_of_another_qwen3_is_refused(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        of_qwen3(tmp_path, {**QWEN3, **change})


def test_that_of_the_source_is_copied(tmp_path):
    save_base(tmp_path / "hf", llama(), num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    convert_base(str(tmp_path / "hf"), str(tmp_path / "mf"), "hf", "mindformers")
    original = (tmp_path / "hf" / "config.json").read_bytes()
    (tmp_path / "mf" / "config.json").write_bytes(original)
    convert_base(str(tmp_path / "mf"), str(tmp_path / "out"), None, "hf", model_config=YAML)
    assert (tmp_path / "out" / "config.json").read_bytes() == original


def test_without_a_yaml_the_report_says_what_is_missing(tmp_path):
    config, report = converted(tmp_path)
    assert config is None and "The checkpoint lacks a config.json, which transformers and vLLM need" in str(report)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 4096}, "The YAML has hidden_size 4096, and the checkpoint"),
        ({"num_layers": 3}, "The YAML has num_layers 3, and the checkpoint 2"),
        ({"n_kv_heads": HEADS}, "rows of q and .* of k: name the YAML of this model"),
        ({"type": "ChatGLM2Config"}, "No config.json can be made for model_config.type ChatGLM2Config"),
        ({"extend_method": "NTK"}, "No config.json can be made for extend_method NTK"),
    ],
)
def test_a_yaml_of_another_model_is_refused_and_nothing_is_written(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path, {**YAML, **change})
    assert not os.path.exists(tmp_path / "out")


def test_the_command_takes_the_yaml(tmp_path, capsys):
    convert_base(save_base(tmp_path / "hf", llama()), str(tmp_path / "mf"), "hf", "mindformers")
    (tmp_path / "run.yaml").write_text(json.dumps({"model": {"model_config": YAML}}))
    words = ["base", "convert", str(tmp_path / "mf"), str(tmp_path / "out"), "--to", "hf"]
    assert cli.main([*words, "--config", str(tmp_path / "run.yaml")]) == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "config.json").exists()
