"""A small Llama for the tests of serving: its weights, adapters for it, and what it gives without a cache."""

import functools
import os

import numpy as np
from mindspore import Tensor

from mindlora.core.formats import ckpt_file
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.build import make_engine
from mindlora.serving.settings import EngineSettings
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.cpu_llama import ON_CPU

HIDDEN, KV, FFN, LAYERS = 32, 16, 48, 2
SEQ_LENGTH, BLOCK_SIZE = 64, 4
# [out, in] of each linear cell of a layer.
SHAPES = {
    "attention.wq": (HIDDEN, HIDDEN),
    "attention.wk": (KV, HIDDEN),
    "attention.wv": (KV, HIDDEN),
    "attention.wo": (HIDDEN, HIDDEN),
    "feed_forward.w1": (FFN, HIDDEN),
    "feed_forward.w2": (HIDDEN, FFN),
    "feed_forward.w3": (FFN, HIDDEN),
}


@functools.lru_cache(1)
def tokenizer():
    """Returns a tokenizer with a chat template."""
    return chat_tokenizer(CHATML)


def vocabulary():
    """Returns how many tokens there are."""
    return len(tokenizer())


def model(**keys):
    """Returns the node ``model`` of a YAML; keys override its LlamaConfig's."""
    config = {
        "type": "LlamaConfig",
        "batch_size": 1,
        "seq_length": SEQ_LENGTH,
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": vocabulary(),
        "intermediate_size": FFN,
        "pad_token_id": 0,
        **ON_CPU,
        **keys,
    }
    return {"model_config": config, "arch": {"type": "LlamaForCausalLM"}}


def base_weights(seed=0):
    """Returns the base's parameters under MindFormers' names, as large as to give decided answers: logits of about 3.

    The first number of each token's vector is the same and stays so, which leaves marked() something to hold on to.
    """
    rng = np.random.default_rng(seed)

    def normal(scale, *shape):
        return rng.normal(0, scale, shape).astype(np.float32)

    embeddings = normal(1, vocabulary(), HIDDEN)
    embeddings[:, 0] = 2
    weights = {
        "model.tok_embeddings.embedding_weight": embeddings,
        "model.norm_out.weight": 1 + normal(0.1, HIDDEN),
        "lm_head.weight": normal(0.5, vocabulary(), HIDDEN),
    }
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        for leaf, shape in SHAPES.items():
            weights[f"{start}{leaf}.weight"] = normal(shape[1] ** -0.5, *shape)
        for leaf in ("attention.wo", "feed_forward.w2"):
            weights[f"{start}{leaf}.weight"][0] = 0
        for norm in ("attention_norm", "ffn_norm"):
            weights[f"{start}{norm}.weight"] = 1 + normal(0.1, HIDDEN)
    return weights


def save_base(path, weights):
    """Writes weights to a .ckpt; returns its path."""
    ckpt_file.write_arrays(str(path), weights.items())
    return str(path)


def adapter(seed, ranks=None, alphas=None, size=0.5, layers=range(LAYERS), **fields):
    """Returns an adapter that changes answers: ranks by leaf (SHAPES), 4 on all of them by default."""
    rng, made = np.random.default_rng([9, seed]), Adapter({}, **fields)
    for layer in layers:
        for leaf, rank in (ranks or dict.fromkeys(SHAPES, 4)).items():
            path, (out, wide) = f"model.layers.{layer}.{leaf}", SHAPES[leaf]
            made.tensors[path, "A"] = rng.normal(0, wide**-0.5, (rank, wide)).astype(np.float32)
            made.tensors[path, "B"] = rng.normal(0, size * rank**-0.5, (out, rank)).astype(np.float32)
            made.alphas[path] = (alphas or {}).get(leaf, 2.0 * rank)
    return made


def with_head(made, rank=3):
    """Adds a pair of the output head to an adapter, and returns it."""
    rng = np.random.default_rng(rank)
    made.tensors["lm_head", "A"] = rng.normal(0, HIDDEN**-0.5, (rank, HIDDEN)).astype(np.float32)
    made.tensors["lm_head", "B"] = rng.normal(0, 0.2, (vocabulary(), rank)).astype(np.float32)
    made.alphas["lm_head"] = 2.0 * rank
    return made


def with_tables(made, seed=0, base=None):
    """Gives an adapter an embedding and a head of its own, near those of a base (base_weights), and returns it."""
    base = base or base_weights()
    rng = np.random.default_rng(seed)
    for name in ("model.tok_embeddings.embedding_weight", "lm_head.weight"):
        made.saved_modules[name] = base[name] + 0.3 * rng.normal(size=base[name].shape).astype(np.float32)
    return made


def with_score(made, hidden=HIDDEN, of_tokens=False):
    """Makes a classifier of an adapter, with three labels, and returns it."""
    rng = np.random.default_rng(hidden)
    made.saved_modules["score.weight"] = rng.normal(size=(3, hidden)).astype(np.float32)
    if of_tokens:
        made.saved_modules["score.bias"] = rng.normal(size=3).astype(np.float32)
    return made


def with_magnitudes(made, seed=0):
    """Makes a DoRA of an adapter, and returns it."""
    rng = np.random.default_rng(seed)
    for path in made.paths:
        made.tensors[path, "magnitude"] = rng.uniform(0.5, 1.5, len(made.tensors[path, "B"])).astype(np.float32)
    return made


def save_adapter(folder, name, made):
    """Writes an adapter into a folder of adapters, in one step; returns its path."""
    path = os.path.join(str(folder), name)
    files.write(made, path)
    return path


def merged(weights, made):
    """Returns the weights with an adapter merged; None leaves them."""
    result = dict(weights)
    for path in made.paths if made is not None else ():
        weight = weights[f"{path}.weight"] + made.delta(path)
        magnitude = made.tensors.get((path, "magnitude"))
        if magnitude is not None:
            weight *= (magnitude / np.linalg.norm(weight, axis=1))[:, None]
        result[f"{path}.weight"] = weight
    return {**result, **(made.saved_modules if made is not None else {})}


class Plain:
    """MindFormers' network as it predicts without a cache: the oracle of served logits."""

    def __init__(self):
        from mindformers.models.build_model import build_network
        from mindformers.tools.register import MindFormerConfig

        # No token is a padding, which this network would leave out of the attention: one with a cache does not.
        self._network = build_network(MindFormerConfig(**model(pad_token_id=-1))).set_train(False)
        self._parameters = {parameter.name: parameter for parameter in self._network.get_parameters()}
        self._held = None

    def logits(self, weights, tokens):
        """Returns the logits after each token, [tokens, vocabulary]. It is fast where ``weights`` stay the same."""
        if self._held is not weights:
            assert weights.keys() == self._parameters.keys()
            for name, array in weights.items():
                self._parameters[name].set_data(Tensor(array))
            self._held = weights
        padded = np.zeros((1, SEQ_LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = self._network(Tensor(padded))[0].asnumpy()
        return logits.reshape(SEQ_LENGTH, -1)[: len(tokens)]


def engine(checkpoint, adapters, node=None, **sizes):
    """Returns an engine over a base, of base_weights unless there is a node, not started, with a folder's adapters."""
    sizes = {"max_running": 8, "max_tokens_per_step": 24, "max_waiting": 2000, "slots": 3, "max_rank": 16, **sizes}
    settings = EngineSettings(seq_length=SEQ_LENGTH, block_size=BLOCK_SIZE, **sizes)
    return make_engine(node or model(), checkpoint, tokenizer(), AdapterRegistry(str(adapters)), settings)
