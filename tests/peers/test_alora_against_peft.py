"""aLoRA against PEFT: logits and gradients of rows with the invocation tokens once, twice, at the end and nowhere."""

import json

import mindspore as ms
import numpy as np
import pytest

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.dialects.peft_config import Extras
from mindlora.network.invocation import FIELD
from mindlora.network.tree import lora_cells
from tests.conftest import in_mode
from tests.peers.test_load_from_peft import key_of
from tests.support.networks import randomize
from tests.support.peers import cases
from tests.support.peers.peer import arrays

INVOCATION = [44, 5, 44]
MODEL, RANK, ALPHA, DROPOUT = "grouped", 4, 12, 0.1


def rows(length):
    """Rows of tokens: with the invocation in the middle, twice and overlapping itself, at the end, cut, and without."""
    ids = np.random.default_rng(3).integers(45, cases.VOCABULARY, (5, length)).astype(np.int32)
    ids[0, 6:9] = INVOCATION
    ids[1, 2:5], ids[1, 9:14] = INVOCATION, [*INVOCATION, *INVOCATION[1:]]
    ids[2, 12:15] = INVOCATION
    ids[3, 7:9] = INVOCATION[:2]
    return ids


@pytest.fixture(scope="module")
def adapter(peer, made, tmp_path_factory):
    """The folder of an adapter that PEFT made."""
    folder = tmp_path_factory.mktemp("activated") / "adapter"
    config = {
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": DROPOUT,
        "target_modules": "all-linear",
        FIELD: INVOCATION,
    }
    case = {"kind": "LoraConfig", "config": config, "dtype": "float32", "safetensors": True, "embeddings": "auto"}
    peer.make_adapter(model=made.models[MODEL], folder=folder, seed=9, **case)
    return folder


def peft_logits(peer, made, adapter, path):
    peer.logits(model=made.models[MODEL], ids=rows(16).tolist(), path=path, adapter=adapter)
    return np.load(path)


# The gradients below are a graph's too.
@pytest.mark.parametrize("qkv_concat", [False, True], ids=["apart", "joined"])
def test_the_logits_are_the_same(pynative_mode, qkv_concat, peer, made, adapter, make_network, tmp_path):
    network = make_network(MODEL, qkv_concat)
    ids = ms.Tensor(rows(16))
    base = network(ids)[0].asnumpy()
    load_lora(network, str(adapter))
    network.set_train(False)
    found = network(ids)[0].asnumpy()
    expected = peft_logits(peer, made, adapter, tmp_path / "logits.npy")
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    # The adapter does something where it acts, and nothing elsewhere.
    for row, start in enumerate([6, 11, 12, 16, 16]):
        assert np.abs(found - base)[row, start:].max(initial=1) > 0.1
        np.testing.assert_array_equal(found[row, :start], base[row, :start])


def test_the_gradients_are_the_same(mode, peer, made, adapter, make_network, tmp_path):
    ids = rows(17)
    path = tmp_path / "gradients.safetensors"
    loss = peer.gradients(model=made.models[MODEL], adapter=adapter, ids=ids.tolist(), path=path)
    expected = arrays(path)
    network = make_network(MODEL)
    load_lora(network, str(adapter))
    freeze_base(network)
    network.set_train(True)
    for _, cell in lora_cells(network):
        cell.set_train(False)  # No dropout, which is random.
    parameters = network.trainable_params()
    ours, gradients = ms.value_and_grad(network, None, parameters)(ms.Tensor(ids))
    assert float(ours) == pytest.approx(loss, abs=2e-6)
    found = {key_of(parameter.name): gradient.asnumpy() for parameter, gradient in zip(parameters, gradients)}
    assert set(found) == set(expected)
    for key, gradient in expected.items():
        assert np.abs(gradient).max() > 1e-4
        np.testing.assert_allclose(found[key], gradient, rtol=0, atol=2e-6, err_msg=key)


def test_what_is_saved_here_acts_in_peft_as_here(peer, made, make_network, tmp_path):
    network = make_network(MODEL)
    config = LoraConfig(lora_rank=3, target_modules="all-linear", alora_invocation_tokens=INVOCATION)
    apply_lora(network, config)
    for number, (_, cell) in enumerate(lora_cells(network)):
        randomize(cell.lora_parameters(), number)
    save_lora(network, str(tmp_path / "adapter"))
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved[FIELD] == INVOCATION
    assert adapter_files.read(str(tmp_path / "adapter"), extras=Extras(invocation_tokens=True)).invocation_tokens
    network.set_train(False)
    with in_mode(ms.PYNATIVE_MODE):
        found = network(ms.Tensor(rows(16)))[0].asnumpy()
    expected = peft_logits(peer, made, tmp_path / "adapter", tmp_path / "logits.npy")
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
