"""Saved embeddings on a network whose output head is the embedding's table."""

import json

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from safetensors.numpy import load_file

from mindlora import LoraConfig, apply_lora, load_lora, save_lora
from mindlora.core.errors import AdapterError, UnexpectedTensorsError
from mindlora.network.tree import mark_saved_module
from tests.support.adapter_samples import folder, make, peft_tensors
from tests.support.networks import Attention, randomize
from tests.support.refusals import part, refused_unchanged

EMBEDDING, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"
OURS = "model.tok_embeddings.embedding_weight"


class Table(nn.Cell):
    """An embedding as MindFormers has it."""

    def __init__(self):
        super().__init__()
        self.embedding_weight = Parameter(Tensor(np.zeros((8, 6), np.float32)))


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.attention = Attention()


class Model(nn.Cell):
    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.layers = Table(), nn.CellList([Layer()])


class Tied(nn.Cell):
    """The head shares the table, as in MindFormers' LlamaForCausalLM."""

    def __init__(self):
        super().__init__()
        self.model, self.lm_head = Model(), nn.Dense(6, 8, has_bias=False)
        self.lm_head.weight = self.model.tok_embeddings.embedding_weight


def tied():
    network = Tied()
    randomize(network.get_parameters())
    return network


def saved(tmp_path, tensors, modules, **fields):
    """Writes an adapter of wq and wk with saved modules; returns its path."""
    return folder(tmp_path / "a", {**peft_tensors(make()), **tensors}, modules_to_save=modules, **fields)


def table(seed):
    return np.random.default_rng(seed).normal(size=(8, 6)).astype(np.float32)


def test_an_embedding_alone_is_refused_because_peft_unties_the_head(tmp_path):
    path = saved(tmp_path, {EMBEDDING: table(1)}, ["embed_tokens"])
    message = part(f"{path} holds {OURS} alone (modules_to_save), beside which the output head stays as it was")
    refused_unchanged(tied(), AdapterError, message, load_lora, tied(), path)


def test_a_head_alone_is_refused(tmp_path):
    path = saved(tmp_path, {HEAD: table(1)}, ["lm_head"])
    message = part("a saved module (modules_to_save), which the network does not have: its embeddings are tied. Merge")
    refused_unchanged(tied(), UnexpectedTensorsError, message, load_lora, tied(), path)


def head_of(tmp_path, weight):
    """Writes an adapter of the head, with the weight of the head that PEFT saves beside it."""
    a, b = np.ones((2, 6), np.float32), np.ones((8, 2), np.float32)
    stem = "base_model.model.lm_head"
    tensors = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b, f"{stem}.base_layer.weight": weight}
    return folder(tmp_path / "a", tensors, target_modules=["lm_head"])


def test_an_adapted_head_of_another_weight_than_the_table_is_refused(tmp_path):
    """As PiSSA changes it; or the adapter is of a model whose head is not tied."""
    path = head_of(tmp_path, table(1))
    message = part(f"{path} holds lm_head.weight, the weight that the adapter of the output head is for, but the")
    refused_unchanged(tied(), AdapterError, message, load_lora, tied(), path)
    network = tied()
    load_lora(network, head_of(tmp_path / "same", network.lm_head.weight.asnumpy() * np.float32(1.003)))
    assert type(network.lm_head).__name__ == "LoRADense"


def test_different_weights_are_refused(tmp_path):
    path = saved(tmp_path, {EMBEDDING: table(1), HEAD: table(2)}, ["embed_tokens", "lm_head"])
    message = part(f"{path} holds different weights for {OURS} and lm_head.weight")
    refused_unchanged(tied(), AdapterError, message, load_lora, tied(), path)


@pytest.mark.parametrize(
    "tensors, modules, fields",
    [
        ({HEAD: table(1)}, ["embed_tokens", "lm_head"], {"ensure_weight_tying": True}),
        ({HEAD: table(1)}, ["embed_tokens", "lm_head"], {}),
        ({}, ["embed_tokens"], {"ensure_weight_tying": True}),
        # PEFT's save_embedding_layers: loaded into the model's own table.
        ({}, None, {}),
    ],
    ids=["tied", "equal", "tied alone", "the base's own"],
)
def test_one_table_for_both_is_loaded(tmp_path, tensors, modules, fields):
    network = tied()
    load_lora(network, saved(tmp_path, {EMBEDDING: table(1), **tensors}, modules, **fields))
    np.testing.assert_array_equal(network.lm_head.weight.asnumpy(), table(1))


def test_a_tied_network_saves_both_so_that_peft_keeps_them_equal(tmp_path):
    network = tied()
    apply_lora(network, LoraConfig(lora_rank=2, target_modules=["wq"], modules_to_save=["tok_embeddings"]))
    save_lora(network, str(tmp_path / "a"))
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    np.testing.assert_array_equal(tensors[EMBEDDING], tensors[HEAD])
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["ensure_weight_tying"], config["modules_to_save"]) == (True, ["lm_head", "model.embed_tokens"])
    again = tied()
    load_lora(again, str(tmp_path / "a"))
    np.testing.assert_array_equal(again.lm_head.weight.asnumpy(), tensors[EMBEDDING])


@pytest.mark.parametrize("halves", [("A",), ("B",)])
def test_the_wider_dtype_of_a_pair_is_kept(tmp_path, halves):
    """float16 for one half and float32 for the other: nothing is rounded."""
    adapter = make()
    for path in adapter.paths:
        for half in halves:
            adapter.tensors[path, half] = adapter.tensors[path, half].astype(np.float16)
    network = tied()
    load_lora(network, folder(tmp_path / "a", peft_tensors(adapter)))
    cell = network.model.layers[0].attention.wq
    for half, array in zip("AB", cell.pair()):
        np.testing.assert_array_equal(array, adapter.tensors["model.layers.0.attention.wq", half])


def test_the_table_of_an_adapted_embedding_is_saved_alone(make_llama, tmp_path):
    """PEFT saves it beside the adapter, and stops at a head that modules_to_save names too."""
    network = make_llama(tie_word_embeddings=True)
    apply_lora(network, LoraConfig(lora_rank=2, target_modules=["tok_embeddings"]))
    mark_saved_module(network.model.tok_embeddings.embedding_weight)
    save_lora(network, str(tmp_path / "a"))
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert "base_model.model.model.embed_tokens.base_layer.weight" in tensors and HEAD not in tensors
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["modules_to_save"] is None
