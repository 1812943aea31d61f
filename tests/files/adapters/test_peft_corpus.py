"""PEFT's adapters as they are found in public: what becomes of each, and no command ends in a bare Python error."""

import itertools
import json
import logging

import numpy as np
import pytest

from mindlora import cli
from mindlora.core.errors import AdapterError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.joined_pairs import split_pairs
from mindlora.files.adapters.matching import CellShape, selected
from mindlora.files.adapters.servers import check_for_server
from tests.support import peft_corpus
from tests.support.llama_checkpoints import save_base
from tests.support.peft_corpus import FORMS, HIDDEN, INNER, VOCABULARY

COMMANDS = {
    "inspect": ["adapter", "inspect", "A"],
    "served": ["adapter", "inspect", "A", "--for", "vllm"],
    "peft": ["adapter", "convert", "A", "peft", "--to", "peft"],
    "ckpt": ["adapter", "convert", "A", "a.ckpt", "--to", "ckpt"],
    "slora": ["adapter", "convert", "A", "slora", "--to", "slora"],
    "mcore": ["adapter", "convert", "A", "m.safetensors", "--to", "mcore"],
    "resize": ["adapter", "resize", "A", "small", "--rank", "2"],
    "combine": ["adapter", "combine", "both", "--method", "cat", "--adapter", "A", "0.5", "--adapter", "A", "0.5"],
    "diff": ["adapter", "diff", "A", "A"],
    "merge": ["base", "merge", "--base", "BASE", "--adapter", "A", "--output", "merged"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for layer in range(2):
        start = f"model.layers.{layer}."
        shapes.update({f"{start}{name}.weight": (HIDDEN, HIDDEN) for name in peft_corpus.ATTENTION})
        shapes.update({f"{start}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")})
        shapes[f"{start}mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes[f"{start}input_layernorm.weight"] = (HIDDEN,)
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return save_base(tmp_path_factory.mktemp("base") / "base", tensors, num_attention_heads=4, num_key_value_heads=4)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_read(tmp_path, name, caplog):
    form, path = FORMS[name], str(tmp_path / "A")
    peft_corpus.write(path, form)
    if form.reads:
        with pytest.raises(AdapterError) as error:
            adapter_files.read(path)
        assert form.reads in str(error.value) and len(str(error.value)) < 700
        return
    with caplog.at_level(logging.WARNING, "mindlora"):
        adapter = adapter_files.read(path)
    expected = peft_corpus.tensors_of(form)
    assert len(adapter.tensors) + len(adapter.saved_modules) == len(expected)
    known = {array.tobytes() for array in expected.values()}
    assert {array.tobytes() for array in (*adapter.tensors.values(), *adapter.saved_modules.values())} == known
    # Only of fields that nobody knows.
    assert all("does not know" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", FORMS)
def test_every_command_does_it_or_says_in_a_line_why_not(tmp_path, name, base, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    peft_corpus.write("A", FORMS[name])
    done = {}
    for command, words in COMMANDS.items():
        done[command] = cli.main([base if word == "BASE" else word for word in words])
        error = capsys.readouterr().err.strip().splitlines()[-1:]
        assert done[command] == 0 or command == "served" or error[0].startswith("mindlora: error: ")
    form = FORMS[name]
    assert (done["peft"] == 0) is (not form.reads or name in ("trained tokens", "aLoRA"))
    assert (done["merge"] == 0) is peft_corpus.is_loaded(name)
    # It needs no network to be looked at: only what cannot be told from the files is refused.
    shown = {"no r, of another rank", "r is null", "dora without magnitudes", "a saved head that is not there"}
    assert (done["inspect"] == 0) is (name not in shown | {"IA3", "LoHa"})
    if done["peft"] == 0:
        before, after = (json.loads((tmp_path / at / "adapter_config.json").read_text()) for at in ("A", "peft"))
        kept = ("task_type", "base_model_name_or_path", "inference_mode", "unsloth_fixed", "peft_version")
        for field in (*kept, "alora_invocation_tokens"):
            assert after.get(field) == before.get(field), field


@pytest.mark.parametrize("name", ["corda", "lora_bias", "biases", "aLoRA", "of GPT-2", "trained tokens"])
def test_inspect_says_what_cannot_be_loaded(tmp_path, name, capsys):
    assert cli.main(["adapter", "inspect", peft_corpus.write(str(tmp_path / "A"), FORMS[name])]) == 0
    assert "warning" in capsys.readouterr().out


def test_there_are_enough():
    assert len(FORMS) >= 60


@pytest.mark.parametrize("name", ["of unsloth", "of swift"])
def test_a_regular_expression_for_several_models_is_no_reason_to_warn(tmp_path, name, caplog):
    """All of it loads: PEFT says nothing either."""
    adapter = adapter_files.read(peft_corpus.write(str(tmp_path / "A"), FORMS[name]))
    shapes = {path: CellShape(*reversed(adapter.weight_shape(path))) for path in adapter.paths}
    with caplog.at_level(logging.WARNING, "mindlora"):
        assert set(selected(adapter, shapes)) == set(shapes)
    assert not caplog.records


def test_a_server_refuses_a_bias_in_the_configuration(tmp_path):
    path = peft_corpus.write(str(tmp_path / "A"), FORMS["bias without biases"])
    (problem,) = check_for_server(path, "vllm").problems
    assert "bias 'lora_only', which is refused" in problem
    assert cli.main(["adapter", "convert", path, str(tmp_path / "served"), "--to", "peft"]) == 0
    assert check_for_server(str(tmp_path / "served"), "vllm").accepted


def test_megatron_has_gate_before_up(tmp_path):
    """MindSpeed-LLM's linear_fc1: all rows of gate, then all of up."""
    form = FORMS["of MindSpeed-LLM"]._replace(modules=["mlp.linear_fc1"])
    adapter = adapter_files.read(peft_corpus.write(str(tmp_path / "A"), form))
    path = "model.layers.0.feed_forward.w_gate_hidden"
    raw = peft_corpus.tensors_of(form)["base_model.model.decoder.layers.0.mlp.linear_fc1.lora_B.default.weight"]
    split_pairs(adapter, path)
    gate, up = (adapter.tensors[f"model.layers.0.feed_forward.{leaf}", "B"] for leaf in ("w1", "w3"))
    np.testing.assert_array_equal(np.concatenate([gate, up]), raw)


def test_a_base_with_transposed_weights_is_not_merged_into(tmp_path, capsys):
    """GPT-2's square c_proj would take the pair in either direction; its other weights tell."""
    random = np.random.default_rng(0)
    shapes = {"attn.c_proj": (HIDDEN, HIDDEN), "attn.c_attn": (HIDDEN, 3 * HIDDEN)}
    tensors = {}
    for layer, (name, shape) in itertools.product(range(2), shapes.items()):
        tensors[f"transformer.h.{layer}.{name}.weight"] = random.normal(size=shape).astype(np.float32)
        tensors[f"transformer.h.{layer}.{name}.bias"] = np.zeros(shape[1], np.float32)
    tensors["model.norm.weight"] = np.zeros(HIDDEN, np.float32)
    base = save_base(tmp_path / "base", tensors)
    adapter = peft_corpus.write(str(tmp_path / "A"), FORMS["of GPT-2"]._replace(modules=["attn.c_proj"]))
    words = ["base", "merge", "--base", base, "--adapter", adapter, "--output", str(tmp_path / "out")]
    assert cli.main(words) == 1
    assert "is stored transposed, [in, out], as GPT-2's Conv1D has it" in capsys.readouterr().err
