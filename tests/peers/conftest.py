"""Fixtures: PEFT's process, models and adapters made by PEFT, and MindFormers' networks for these models.

Without an environment that has PEFT, the tests are skipped; on CI they fail instead, so that no run passes unchecked.
"""

import types

import numpy as np
import pytest

from tests.support.peers import cases
from tests.support.peers.peer import Peer, python_of, read_json

TOKENS = 16


@pytest.fixture(scope="session")
def peer(tmp_path_factory):
    """PEFT's process; its methods are the verbs of peft_side.py."""
    python = python_of("MINDLORA_PEERS_PYTHON", "PEFT", "tests/peers")
    process = Peer(python, tmp_path_factory.mktemp("peer") / "stderr.txt")
    yield process
    process.close()


@pytest.fixture(scope="session")
def made(peer, tmp_path_factory):
    """PEFT's models and adapters: ``models`` and ``adapters`` are name -> folder, ``ids`` are tokens [1, TOKENS].

    ``safetensors`` is like ``adapters``, but with those in .bin saved again by PEFT as safetensors.
    """
    folder = tmp_path_factory.mktemp("made")
    ids = np.random.default_rng(0).integers(3, cases.VOCABULARY, (1, TOKENS)).astype(np.int32)
    result = types.SimpleNamespace(models={}, adapters={}, safetensors={}, ids=ids)
    for index, (name, (shard_size, config)) in enumerate(cases.MODELS.items()):
        result.models[name] = folder / name
        peer.make_model(folder=folder / name, seed=index, shard_size=shard_size, **config)
    for index, (name, case) in enumerate(cases.ADAPTERS.items()):
        result.adapters[name] = folder / "adapters" / name
        peer.make_adapter(
            folder=result.adapters[name], seed=100 + index, **{**case, "model": result.models[case["model"]]}
        )
        result.safetensors[name] = result.adapters[name]
        if not case["safetensors"]:
            result.safetensors[name] = folder / "safetensors" / name
            peer.save_again(
                model=result.models[case["model"]], adapter=result.adapters[name], folder=result.safetensors[name]
            )
    return result


@pytest.fixture(scope="session")
def peft_logits(peer, made, tmp_path_factory):
    """Returns a function that returns PEFT's logits for a model and an adapter folder, or for the base alone."""
    folder, known = tmp_path_factory.mktemp("logits"), {}

    def compute(model, adapter=None):
        key = (model, str(adapter))
        if key not in known:
            path = folder / f"{len(known)}.npy"
            peer.logits(model=made.models[model], ids=made.ids.tolist(), path=path, adapter=adapter)
            known[key] = np.load(path)
        return known[key]

    return compute


@pytest.fixture(scope="session")
def checkpoints(made, tmp_path_factory):
    """Returns a function that returns the file of a model's weights for MindFormers, converted by mindlora.

    ``tied`` is whether lm_head.weight is left out, by default where the model's embeddings are tied.
    """
    from mindlora.files.base.convert import convert_base

    folder = tmp_path_factory.mktemp("checkpoints")

    def convert(model, concat=False, tied=None):
        if tied is None:
            tied = cases.MODELS[model][1]["tie_word_embeddings"]
        path = folder / f"{model}-{concat}-{tied}.safetensors"
        if not path.exists():
            convert_base(str(made.models[model]), str(path), "hf", "mindformers", concat=concat, tied=tied)
        return path

    return convert


@pytest.fixture(scope="session")
def make_network(made, checkpoints, make_llama):
    """Returns a function that builds MindFormers' network for a model, with the converted weights."""
    import mindspore as ms

    def make(model, qkv_concat=False, tied=None):
        keys = llama_keys(made.models[model])
        if tied is not None:
            keys["tie_word_embeddings"] = tied
        network = make_llama(**keys, qkv_concat=qkv_concat)
        weights = ms.load_checkpoint(str(checkpoints(model, qkv_concat, tied)), format="safetensors")
        missing, unexpected = ms.load_param_into_net(network, weights)
        assert not missing and not unexpected
        return network.set_train(False)

    return make


@pytest.fixture
def logits_of(made):
    """Returns a function that returns a network's logits for the same tokens, in PyNative, which does not compile."""
    import mindspore as ms

    def compute(network, mode=ms.PYNATIVE_MODE):
        before = ms.get_context("mode")
        ms.set_context(mode=mode)
        network.set_train(False)
        logits = network(ms.Tensor(made.ids))[0].asnumpy()
        ms.set_context(mode=before)
        return logits

    return compute


def llama_keys(folder):
    """Returns MindFormers' LlamaConfig keys for a model of transformers."""
    config = read_json(folder, "config.json")
    return {
        "seq_length": TOKENS,
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "rms_norm_eps": config["rms_norm_eps"],
        "theta": config["rope_parameters"]["rope_theta"],
        **{key: config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "tie_word_embeddings")},
    }
