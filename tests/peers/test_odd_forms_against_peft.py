"""PEFT's rarer adapters, made, edited and judged by PEFT: the logits of load_lora and of a merged checkpoint."""

import json
import shutil

import mindspore as ms
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora import load_lora, save_lora
from mindlora.files.adapters.convert import convert_adapter
from mindlora.files.base.merge import merge_checkpoint
from tests.support import peft_corpus
from tests.support.peers import cases
from tests.support.peers.peer import stored

_Q = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
_JOINED = {**_Q, "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "o_proj"], "rank_pattern": {"k_proj": 3}}
# Name -> (model, keys of LoraConfig).
FORMS = {
    "pissa": ("plain", {**_Q, "init_lora_weights": "pissa"}),
    "olora": ("grouped", {**_Q, "init_lora_weights": "olora", "use_rslora": True}),
    "pissa-joined": ("grouped", {**_JOINED, "init_lora_weights": "pissa", "alpha_pattern": {"v_proj": 9}}),
    "olora-joined": ("grouped", {**_JOINED, "init_lora_weights": "olora", "alpha_pattern": {"q_proj": 2}}),
    "kasa": ("plain", {**_Q, "kasa_config": {"beta": 1e-4, "gamma": 1e-3}}),
    "kasa-joined": ("grouped", {**_JOINED, "kasa_config": {"beta": 1e-4}, "alpha_pattern": {"v_proj": 9}}),
    # B is not trained, and the base stays as it was.
    "mica": ("plain", {**_Q, "init_lora_weights": "mica"}),
    "dora-joined": (
        "grouped",
        {**_Q, "target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": "olora", "use_dora": True},
    ),
    # PEFT saves the weight of an adapted head too: the changed one.
    "pissa-head": ("plain", {**_Q, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": "pissa"}),
    "saved-mlp": ("plain", {**_Q, "target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
    "tokens": ("plain", {**_Q, "trainable_token_indices": [3, 60, 7]}),
    "tokens-tied": ("tied", {**_Q, "trainable_token_indices": {"embed_tokens": [5, 2]}}),
    "tokens-tied-both": ("tied", {**_Q, "trainable_token_indices": {"embed_tokens": [5, 2], "lm_head": [5, 2]}}),
    "tied-saved": ("tied", {**_Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "bias-without-tensors": ("plain", {**_Q, "bias": "lora_only"}),
}
JOINED = [name for name in FORMS if name.endswith("-joined")]
APART = [name for name in FORMS if name not in JOINED]


@pytest.fixture(scope="module")
def adapters(peer, made, tmp_path_factory):
    """Returns a function that returns the folder of one of FORMS."""
    folder = tmp_path_factory.mktemp("odd")

    def make(name):
        model, config = FORMS[name]
        if not (folder / name).exists():
            peer.make_odd_adapter(model=made.models[model], folder=folder / name, seed=7, config=config)
        return folder / name

    return make


@pytest.fixture
def judged(peer, made, tmp_path):
    """Returns a function that returns PEFT's logits, whatever it warns of."""

    def logits(model, adapter):
        peer.odd_logits(model=made.models[model], adapter=adapter, ids=made.ids.tolist(), path=tmp_path / "odd.npy")
        return np.load(tmp_path / "odd.npy")

    return logits


@pytest.mark.parametrize("name", JOINED)
def test_initial_pairs_follow_from_the_rows_of_joined_weights(
    name, adapters, judged, make_network, logits_of, peft_logits, checkpoints, tmp_path
):
    """In a network, and merged into its checkpoint: as PEFT computes them for q_proj, k_proj and so on."""
    expected = judged("grouped", adapters(name))
    assert np.abs(expected - peft_logits("grouped")).max() > 0.1
    network = make_network("grouped", qkv_concat=True)
    load_lora(network, str(adapters(name)))
    np.testing.assert_allclose(logits_of(network), expected, rtol=0, atol=3e-5)
    base, merged = str(checkpoints("grouped", concat=True)), str(tmp_path / "merged.safetensors")
    merge_checkpoint(base, str(adapters(name)), merged, kv_heads=2)
    network = make_network("grouped", qkv_concat=True)
    ms.load_param_into_net(network, ms.load_checkpoint(merged, format="safetensors"))
    np.testing.assert_allclose(logits_of(network), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", APART)
def test_the_logits_are_peft_s(name, adapters, judged, make_network, logits_of, peft_logits):
    model = FORMS[name][0]
    expected = judged(model, adapters(name))
    assert np.abs(expected - peft_logits(model)).max() > 0.1
    network = make_network(model)
    load_lora(network, str(adapters(name)))
    np.testing.assert_allclose(logits_of(network), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", APART)
def test_a_merged_checkpoint_gives_peft_s_logits(name, adapters, judged, made, peer, tmp_path):
    model = FORMS[name][0]
    merge_checkpoint(str(made.models[model]), str(adapters(name)), str(tmp_path / "merged"))
    peer.logits(model=tmp_path / "merged", ids=made.ids.tolist(), path=tmp_path / "logits.npy")
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), judged(model, adapters(name)), rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["tied-saved", "tokens", "pissa"])
def test_what_a_network_saves_again_gives_the_same_in_peft(name, adapters, judged, make_network, tmp_path):
    """A table for embedding and head is saved as both, so that PEFT does not untie them."""
    model = FORMS[name][0]
    network = make_network(model)
    load_lora(network, str(adapters(name)))
    save_lora(network, str(tmp_path / "again"))
    np.testing.assert_allclose(judged(model, tmp_path / "again"), judged(model, adapters(name)), rtol=0, atol=3e-5)


def test_trained_rows_come_back_from_a_conversion(adapters, tmp_path):
    source = adapters("tokens")
    convert_adapter(str(source), str(tmp_path / "again"), "peft")
    assert stored(tmp_path / "again" / cases.WEIGHTS) == stored(source / cases.WEIGHTS)
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert config["trainable_token_indices"] == [3, 60, 7]


@pytest.mark.parametrize("model, tied", [("plain", False), ("tied", True)])
def test_a_vocabulary_that_grew_is_merged_as_peft_merges_it(model, tied, peer, made, tmp_path):
    """Two tokens more: the tables are PEFT's, and config.json says so."""
    peer.grow(model=made.models[model], folder=tmp_path / "grown", adapter=tmp_path / "adapter", tokens=2, config=_Q)
    report = merge_checkpoint(str(made.models[model]), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert "The vocabulary has 66 tokens" in str(report)
    ids = [[64, 3, 65, 9]]
    peer.logits(model=tmp_path / "merged", ids=ids, path=tmp_path / "ours.npy")
    peer.odd_logits(model=tmp_path / "grown", adapter=tmp_path / "adapter", ids=ids, path=tmp_path / "theirs.npy")
    ours = np.load(tmp_path / "ours.npy")
    assert ours.shape[-1] == 66
    np.testing.assert_allclose(ours, np.load(tmp_path / "theirs.npy"), rtol=0, atol=3e-5)


def edited(source, folder, rename=lambda key: key, **fields):
    """Copies an adapter with other keys and other fields; a field that is ... is taken out."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / cases.WEIGHTS)
    save_file({rename(key): array for key, array in tensors.items()}, folder / cases.WEIGHTS)
    config = {**json.loads((folder / "adapter_config.json").read_text()), **fields}
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return str(folder)


@pytest.mark.parametrize(
    "name, rename, fields",
    [
        ("attention", lambda key: key.replace(".weight", ".default.weight"), {}),
        ("dora", lambda key: key.replace("magnitude_vector", "magnitude_vector.weight"), {}),
        ("dora", lambda key: key.replace("magnitude_vector", "magnitude_vector.default.weight"), {}),
        ("attention", lambda key: key, {"fan_in_fan_out": True}),
        ("attention", lambda key: key, {"bias": "all"}),
    ],
    ids=["named", "magnitude.weight", "named magnitude", "fan_in_fan_out", "bias"],
)
def test_flags_and_spellings_that_change_nothing(
    name, rename, fields, made, make_network, logits_of, peft_logits, tmp_path
):
    model = cases.ADAPTERS[name]["model"]
    network = make_network(model)
    load_lora(network, edited(made.adapters[name], tmp_path / "odd", rename, **fields))
    np.testing.assert_allclose(logits_of(network), peft_logits(model, made.adapters[name]), rtol=0, atol=2e-5)


# Forms that differ from others in fields alone of which neither side takes notice.
ALIKE = (
    "of PEFT",
    "of 2023",
    "of trl",
    "of unsloth,",
    "full",
    "a regular",
    "gaussian",
    "not",
    "orthogonal",
    "features",
)
CORPUS = [name for name in peft_corpus.FORMS if peft_corpus.is_loaded(name) and not name.startswith(ALIKE)]


@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus(name, judged, make_network, logits_of, peft_logits, tmp_path):
    """A form that is loaded gives PEFT's logits, also where PEFT needs another spelling of the keys."""
    form = peft_corpus.FORMS[name]
    path = theirs = peft_corpus.write(str(tmp_path / "A"), form)
    if name in ("the adapter's name in keys", "of MindSpeed-LLM"):
        # PEFT loads nothing of such keys, without a word.
        plain = form._replace(rename=str) if form.stem == "model.layers" else peft_corpus.FORMS["plain"]
        theirs = peft_corpus.write(str(tmp_path / "B"), plain)
    expected = judged("plain", theirs)
    network = make_network("plain")
    load_lora(network, path)
    found = logits_of(network)
    if name == "of MindSpeed-LLM":
        assert np.abs(found - peft_logits("plain")).max() > 0.01
        return
    assert np.abs(expected - peft_logits("plain")).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)
