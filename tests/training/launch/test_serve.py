"""build_engine refuses what it cannot serve before it builds anything. tests/cli/test_with_a_model.py has it serve."""

import os

import pytest

from mindlora.core.errors import ConfigError
from mindlora.serving.adapter_registry import AdapterRegistry
from tests.support.served_llama import write_llama

MODEL = "--model.model_config."
# What the tiny Llama needs to be served on Ascend: 16 bits, and heads of 16 numbers.
ON_ASCEND = (
    *("--context.device_target", "Ascend", f"{MODEL}compute_dtype", "float16"),
    *(f"{MODEL}num_heads", "2", f"{MODEL}n_kv_heads", "1"),
)
NO_DEVICE = RuntimeError("Unsupported device.\n\n- Device load error:\n...")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(str(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def refused(folder, mindformers, monkeypatch):
    """Returns a function that gives the message with which a command line is refused."""
    from mindlora.training.launch import serve

    # Where nothing is wrong, the last thing before the network is built.
    def message(*overrides, tokenizer=None, problem=NO_DEVICE):
        def no_context(config):
            message.use_past = config.get_value("model.model_config.use_past")
            raise problem

        monkeypatch.setattr(serve, "build_context", no_context)
        with pytest.raises(ConfigError) as caught:
            serve.build_engine(os.path.join(folder, "run.yaml"), overrides, tokenizer)
        return str(caught.value)

    return message


def test_a_device_that_the_machine_has_not_is_one_line(refused):
    assert refused(*ON_ASCEND) == (
        "The YAML's context cannot be used here: Unsupported device. Set --device_target CPU to run on a CPU."
    )


def test_nobody_is_sent_to_a_cpu_who_is_there_or_whose_yaml_is_wrong(refused):
    wrong = "The YAML's context cannot be used here: {} Correct the YAML's node context."
    assert refused() == wrong.format("Unsupported device.")
    jit = ValueError("jit_level O2 needs infer_boost off.")
    assert refused(*ON_ASCEND, problem=jit) == wrong.format(jit)


@pytest.mark.parametrize("trained_with", ["True", "False"])
def test_mindformers_prepares_its_inference_on_ascend_whatever_the_yaml_trains_with(refused, trained_with):
    cache = (f"{MODEL}use_past", trained_with, f"{MODEL}use_flash_attention", "True")
    refused(*ON_ASCEND, *cache)
    assert refused.use_past is True
    # Nor does its check of flash attention without a cache refuse what a CPU serves.
    refused(*cache)
    assert refused.use_past is None


def test_what_ascend_cannot_serve_is_said_before_anything_is_loaded(refused):
    message = refused(*ON_ASCEND, f"{MODEL}compute_dtype", "float32", f"{MODEL}num_heads", "4")
    assert "compute_dtype is float32, and on Ascend" in message
    assert "hidden_size 32 and num_heads 4 make heads of 8 numbers" in message


def test_a_folder_that_is_still_empty_is_watched(folder, mindformers, monkeypatch, tmp_path):
    from mindlora.training.launch import serve

    registry = AdapterRegistry(str(tmp_path))
    monkeypatch.setattr(serve, "set_up_context", lambda yaml: None)
    monkeypatch.setattr(serve, "make_engine", lambda model, base, tokenizer, registry, *_, **__: registry)
    assert serve.build_engine(os.path.join(folder, "run.yaml"), registry=registry) is registry


def test_several_devices_are_refused(refused):
    assert refused("--use_parallel", "True") == (
        "use_parallel is True: mindlora serves on one device. Set use_parallel: False (--use_parallel False)."
    )


def test_a_model_that_is_not_served_is_named(refused):
    assert refused("--use_legacy", "False", "--model.model_config.model_type", "deepseek_v3").startswith(
        "DeepseekV3ForCausalLM is one of MindFormers' mcore models (use_legacy: False), of which mindlora serves "
        "Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen2ForCausalLM, Glm4ForCausalLM."
    )


def test_a_tokenizer_must_be_named_or_be_beside_the_base(refused, folder, tmp_path):
    elsewhere = str(tmp_path / "base.ckpt")
    assert refused("--load_checkpoint", elsewhere).startswith("The YAML names no tokenizer (processor.tokenizer.")
    base = os.path.join(folder, "base")
    assert "context cannot be used" in refused("--load_checkpoint", elsewhere, tokenizer=base)
    named = ("--processor.tokenizer.tokenizer_file", os.path.join(base, "tokenizer.json"))
    assert "context cannot be used" in refused("--load_checkpoint", elsewhere, *named)


def test_what_a_cpu_cannot_compute_is_listed(refused):
    assert refused("--model.model_config.compute_dtype", "bfloat16") == (
        "context.device_target is CPU, where this model cannot be served. Set: model.model_config.compute_dtype: "
        "float32 (found bfloat16)."
    )


def test_weights_and_embedding_may_have_16_bits(refused):
    held = ("--model.model_config.param_init_type", "bfloat16")
    assert "context cannot be used" in refused(*held)
    assert "context cannot be used" in refused(*held, "--model.model_config.tie_word_embeddings", "True")
