"""PEFT's adapters on MindFormers' networks: the same logits as PEFT's, and what is saved again is what was loaded."""

import mindspore as ms
import numpy as np
import pytest

from mindlora import apply_lora, freeze_base, load_lora, save_lora
from mindlora.models import names
from mindlora.network import tree
from tests.support.peers import cases, trained
from tests.support.peers.peer import arrays, stored

TOLERANCE = 2e-5


def assert_same(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def load(network, name, made):
    """Loads an adapter that PEFT made."""
    load_lora(network, str(made.adapters[name]), allow_pickle=not cases.ADAPTERS[name]["safetensors"])


@pytest.mark.parametrize("qkv_concat", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("model", cases.MODELS)
def test_base_gives_the_same_logits(model, qkv_concat, make_network, logits_of, peft_logits):
    """Before any adapter: rotation, norms, heads and the converted weights equal those of transformers."""
    expected = peft_logits(model)
    assert np.abs(expected).max() > 1
    assert_same(logits_of(make_network(model, qkv_concat)), expected)


def test_tied_model_gives_the_same_logits_with_a_separate_head(make_network, logits_of, peft_logits):
    """If the network's configuration does not tie the embeddings, convert_base copies the embedding to the head."""
    assert_same(logits_of(make_network("tied", tied=False)), peft_logits("tied"))


@pytest.mark.parametrize("name", cases.ADAPTERS)
def test_adapter_gives_the_same_logits(name, made, make_network, logits_of, peft_logits):
    model = cases.ADAPTERS[name]["model"]
    expected = peft_logits(model, made.adapters[name])
    assert np.abs(expected - peft_logits(model)).max() > 0.1
    network = make_network(model)
    load(network, name, made)
    assert_same(logits_of(network), expected)


@pytest.mark.parametrize(
    "name", ["grouped", "all-linear", "patterns-rslora", "regex", "one-layer", "dora-grouped", "miss-grouped"]
)
def test_adapter_gives_the_same_logits_on_joined_cells(name, made, make_network, logits_of, peft_logits):
    """With qkv_concat, MindFormers has one cell for q, k and v and one for gate and up, their rows interleaved."""
    model = cases.ADAPTERS[name]["model"]
    network = make_network(model, qkv_concat=True)
    load(network, name, made)
    assert_same(logits_of(network), peft_logits(model, made.adapters[name]))


@pytest.mark.parametrize("name", ["attention", "patterns", "patterns-rslora", "whole"])
def test_adapter_gives_the_same_logits_on_adapted_cells(name, made, make_network, logits_of, peft_logits):
    """The adapter matches cells that apply_lora made from the same configuration."""
    model, config = trained.CONFIGS[name]
    network = make_network(model)
    apply_lora(network, config)
    load(network, name, made)
    assert_same(logits_of(network), peft_logits(model, made.adapters[name]))


def test_adapter_gives_the_same_logits_in_graph_mode(made, make_network, logits_of, peft_logits):
    network = make_network("grouped")
    load(network, "grouped", made)
    assert_same(logits_of(network, ms.GRAPH_MODE), peft_logits("grouped", made.adapters["grouped"]))


@pytest.mark.parametrize("name", cases.ADAPTERS)
def test_adapter_is_the_same_after_a_network(name, peer, made, make_network, tmp_path):
    """PEFT -> load_lora -> save_lora -> PEFT: the same keys, dtypes and bits, and the same scale of each module.

    Saved modules take the dtype of the base's weights, which they replace.
    """
    model = cases.ADAPTERS[name]["model"]
    network = make_network(model)
    load(network, name, made)
    save_lora(network, str(tmp_path / "again"))
    expected = stored(made.safetensors[name] / cases.WEIGHTS)
    for key, (dtype, shape, content) in expected.items():
        if ".lora_" not in key and ".miss_" not in key and dtype == "BF16":
            expected[key] = ("F32", shape, b"".join(b"\0\0" + content[i : i + 2] for i in range(0, len(content), 2)))
    assert stored(tmp_path / "again" / cases.WEIGHTS) == expected
    asked = {"model": made.models[model]}
    assert peer.describe(adapter=tmp_path / "again", **asked) == peer.describe(adapter=made.adapters[name], **asked)


@pytest.mark.parametrize(
    "name",
    [
        "all-linear",
        "grouped",
        "patterns-rslora",
        "whole-norms",
        "dora",
        "dora-grouped",
        "embedding-alone",
        "vera",
        "vera-grouped",
        "miss",
        "miss-grouped",
    ],
)
def test_gradients_are_the_same(name, peer, made, make_network, tmp_path):
    """One batch gives PyTorch's loss and its gradients of each A, B and saved module."""
    model = cases.ADAPTERS[name]["model"]
    # MindFormers trains on rows with one token more than its network sees.
    ids = np.concatenate([made.ids, made.ids[:, 3:4]], axis=1)
    loss = peer.gradients(
        model=made.models[model], adapter=made.adapters[name], ids=ids.tolist(), path=tmp_path / "gradients.safetensors"
    )
    expected = arrays(tmp_path / "gradients.safetensors")
    network = make_network(model)
    load(network, name, made)
    freeze_base(network)
    network.set_train(True)
    for _, cell in tree.lora_cells(network):
        cell.set_train(False)  # No dropout, which is random.
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    parameters = network.trainable_params()
    ours, gradients = ms.value_and_grad(network, None, parameters)(ms.Tensor(ids))
    ms.set_context(mode=before)
    assert float(ours.asnumpy()) == pytest.approx(loss, abs=5e-6)
    found = {key_of(parameter.name): gradient.asnumpy() for parameter, gradient in zip(parameters, gradients)}
    # PEFT's block of MiSS is [r, out].
    found = {key: gradient.T if key.endswith(".miss_block") else gradient for key, gradient in found.items()}
    assert set(found) == set(expected)
    for key, gradient in expected.items():
        assert np.abs(gradient).max() > 1e-4
        np.testing.assert_allclose(found[key], gradient, rtol=0, atol=2e-6, err_msg=key)


def ending_of(path, part):
    """Returns the end of PEFT's key for a part of the adapter at a path."""
    if part == "magnitude":
        return "lora_magnitude_vector"
    if part in ("block", "miss_block"):
        return "miss_block"
    if part.startswith("lambda"):
        return f"vera_{part}"
    return f"lora_embedding_{part}" if path.endswith("tok_embeddings") else f"lora_{part}.weight"


def key_of(name):
    """Returns PEFT's key of a trained parameter."""
    path, _, leaf = name.rpartition(".")
    if leaf.startswith("mindpet_delta_lora_"):
        own = leaf.removeprefix("mindpet_delta_lora_")
        part = own.upper() if own in "ab" else own
        return f"base_model.model.{names.to_hugging_face(path)}.{ending_of(path, part)}"
    return f"base_model.model.{names.parameter_to_hugging_face(name)}"
