"""Quantized models: weights, logits and adapters are those of the program that quantized them."""

import numpy as np
import pytest

from mindlora import load_lora
from mindlora.files.base.convert import convert_base
from mindlora.network.load_base import load_base
from tests.peers.conftest import llama_keys
from tests.support.peers.peer import arrays

FORMS = (
    *("nf4", "nf4-single", "fp4", "int8", "fp8"),
    *("packed", "packed-zeros", "packed-3", "w8a8", "w8a8-zeros", "float-rows", "float-tensor"),
)
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def quantized(peer, tmp_path_factory):
    """Returns a function that has the peer quantize a model; it returns the folder and the decoded linear weights."""
    folder = tmp_path_factory.mktemp("quantized")
    peer.make_folder(folder=folder / "model", kind="llama", config=SIZES, seed=2)
    known = {}

    def make(form):
        if form not in known:
            weights = folder / f"{form}.safetensors"
            peer.quantize_folder(model=folder / "model", folder=folder / form, form=form, weights=weights)
            known[form] = folder / form, arrays(weights)
        return known[form]

    return make


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_decoded_to_the_bits_of_its_own_program(form, quantized, tmp_path):
    folder, expected = quantized(form)
    convert_base(str(folder), str(tmp_path / "base"), None, "hf", dtype="float32")
    decoded = arrays(tmp_path / "base" / "model.safetensors")
    assert len(expected) == 7 and expected.keys() < decoded.keys()
    for name, array in expected.items():
        assert array.tobytes() == decoded[name].tobytes(), name


@pytest.mark.parametrize("form", ["nf4", "fp8", "packed"])
def test_the_logits_of_a_quantized_model_are_those_of_the_decoded_one(form, quantized, peer, made, tmp_path):
    folder, _ = quantized(form)
    convert_base(str(folder), str(tmp_path / "base"), None, "hf", dtype="float32")
    ids = made.ids.tolist()
    peer.quantized_logits(model=folder, ids=ids, path=tmp_path / "quantized.npy")
    peer.logits(model=tmp_path / "base", ids=ids, path=tmp_path / "decoded.npy")
    quantized_logits = np.load(tmp_path / "quantized.npy")
    assert np.abs(quantized_logits - np.load(tmp_path / "decoded.npy")).max() <= 1e-5 * np.abs(quantized_logits).max()


def test_an_adapter_of_peft_on_bitsandbytes_nf4_is_the_same_on_the_decoded_base(
    quantized, peer, made, make_llama, logits_of, tmp_path
):
    folder, _ = quantized("nf4")
    adapter, path = tmp_path / "adapter", tmp_path / "logits.npy"
    settings = {"kind": "LoraConfig", "dtype": "float32", "safetensors": True, "embeddings": False}
    peer.make_adapter(model=folder.parent / "model", folder=adapter, seed=3, config=LORA, **settings)
    peer.quantized_logits(model=folder, ids=made.ids.tolist(), path=path, adapter=adapter)
    network = make_llama(**llama_keys(folder))
    notes = load_base(network, str(folder))
    base = logits_of(network)
    load_lora(network, str(adapter))
    expected = np.load(path)
    assert notes == ["7 weights are decoded from bitsandbytes' NF4 to float32."]
    assert np.abs(logits_of(network) - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(base - expected).max() > 0.01 * np.abs(expected).max()
