"""The models that mixed requests are for: a base, adapters of many kinds, and where there is one, an oracle."""

import os

import numpy as np

from tests.support import mcore_serving, tiny_serving
from tests.support.llama_checkpoints import save_base
from tests.support.tiny_serving import (
    LAYERS,
    SEQ_LENGTH,
    SHAPES,
    Plain,
    adapter,
    base_weights,
    merged,
    with_magnitudes,
    with_score,
    with_tables,
)

MARKED = ("marked-0", "marked-1", "marked-2")
# The adapters that act from these tokens on.
INVOCATION = (44, 5)


class Llama:
    """A small Llama, with adapters of which some say one token whatever they are asked (``marks``).

    Args:
        count (int): Adapters, besides the marked ones. Default: 4, pairs alone; from the fifth on DoRAs and own tables
            are among them, for which further graphs are compiled.
        others (bool): Whether classifiers and an adapter that acts from its invocation tokens on are there too.
    """

    def __init__(self, count=4, others=False):
        self.node, self.base, self.plain = tiny_serving.model(), base_weights(), Plain()
        self.adapters = {f"adapter-{number}": _of_llama(number) for number in range(count)}
        self.marks = {}
        for name, (mark, one) in zip(MARKED, _marked(self.base)):
            self.adapters[name], self.marks[name] = one, mark
        # What it says is compared with the model that it is merged into.
        self.weights = {None: self.base, **{name: merged(self.base, one) for name, one in self.adapters.items()}}
        self.classifiers = self.activated = ()
        if others:
            self.classifiers, self.activated = ("texts", "words"), ("activated",)
            self.adapters["activated"] = adapter(70, invocation_tokens=INVOCATION)
            self.adapters["texts"] = with_score(adapter(71))
            self.adapters["words"] = with_score(adapter(72, {"attention.wv": 4}), of_tokens=True)

    def write(self, folder):
        """Writes the base into a folder; returns its path."""
        return tiny_serving.save_base(os.path.join(folder, "base.ckpt"), self.base)


class Mcore:
    """A small Qwen3-MoE, with adapters of attention and experts, or a GLM4, with such of its joined cells.

    Args:
        kind (str): Of mcore_serving.FEED_FORWARD.
        count (int): Adapters. Default: 12.
    """

    marks, weights = {}, {}

    def __init__(self, kind, count=12):
        self._kind = kind
        self.node = mcore_serving.node(kind, max_position_embeddings=SEQ_LENGTH)
        self.adapters = {f"adapter-{number}": _of_mcore(number, kind) for number in range(count)}
        self.classifiers, self.activated = ("texts", "words"), ("activated",)
        attention = dict.fromkeys(mcore_serving.ATTENTION, 4)
        self.adapters["activated"] = mcore_serving.adapter(70, attention, invocation_tokens=INVOCATION)
        self.adapters["texts"] = with_score(mcore_serving.adapter(71, attention), mcore_serving.HIDDEN)
        self.adapters["words"] = with_score(mcore_serving.adapter(72, attention), mcore_serving.HIDDEN, of_tokens=True)

    def write(self, folder):
        """Writes the base into a folder; returns its path."""
        return save_base(os.path.join(folder, "base"), mcore_serving.checkpoint(self._kind), **mcore_serving.COMMON)


MODELS = {
    "llama": lambda count: Llama(count, others=True),
    "qwen3-moe": lambda count: Mcore("qwen3-moe", count),
    "glm4": lambda count: Mcore("glm4", count),
}


def hold_in_bfloat16(model):
    """Holds a model's linear cells and embedding in bfloat16. What it says is then not compared with merged weights."""
    legacy = {"param_init_type": "bfloat16"}
    model.node["model_config"].update(legacy if "type" in model.node["model_config"] else {"params_dtype": "bfloat16"})
    model.weights = {}


def _of_llama(number):
    """Returns an adapter of the kind that its number says."""
    kinds = (
        {"ranks": {leaf: 1 + rank for rank, leaf in enumerate(SHAPES)}},
        {"ranks": {"attention.wq": 16, "attention.wv": 3}, "use_rslora": True, "size": 0.3},
        {"ranks": {"feed_forward.w1": 7, "feed_forward.w2": 2}, "alphas": {"feed_forward.w1": 20.0}},
        {"layers": [1]},
        {"ranks": {"attention.wo": 5, "feed_forward.w3": 2}, "with": with_magnitudes},
        {"ranks": {"attention.wk": 3}, "with": with_tables},
    )
    fields = dict(kinds[number % len(kinds)])
    changed = fields.pop("with", None)
    made = adapter(number, **fields)
    return changed(made, number) if changed else made


def _of_mcore(number, kind):
    """Returns an adapter of the kind that its number says."""
    attention, others = mcore_serving.ATTENTION, mcore_serving.FEED_FORWARD[kind]
    kinds = (
        {"ranks": dict.fromkeys((*attention, *others), 4)},
        {"ranks": {"attention.wq": 16, "attention.wv": 3}, "use_rslora": True},
        {"ranks": {others[0]: 2, others[1]: 5}},
        {"ranks": dict.fromkeys((*attention, *others), 3), "layers": [1]},
        {"ranks": {"attention.wo": 5, "attention.wq": 2}, "with": with_magnitudes},
        {"ranks": {"attention.wk": 3}, "with": lambda made, seed: with_tables(made, seed, _tables(kind))},
    )
    fields = dict(kinds[number % len(kinds)])
    changed = fields.pop("with", None)
    made = mcore_serving.adapter(number, **fields)
    return changed(made, number) if changed else made


def _tables(kind):
    tensors = mcore_serving.checkpoint(kind)
    return {
        "model.tok_embeddings.embedding_weight": tensors["model.embed_tokens.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }


def _marked(weights):
    """Yields (token, adapter): whatever it is asked, the adapter says this token again and again.

    The first number of each hidden state is known to be positive. It alone brings one large vector into the values of
    the last attention, each of which then carries the mark, in the cache too.
    """
    path, rng, used = f"model.layers.{LAYERS - 1}.attention.", np.random.default_rng(7), set()
    while True:
        values = rng.normal(size=(2, 8)).astype(np.float32)
        hidden = weights[f"{path}wo.weight"] @ np.repeat(values, 2, axis=0).reshape(-1)
        hidden *= np.sqrt(len(hidden)) / np.linalg.norm(hidden)
        logits = weights["lm_head.weight"] @ (hidden * weights["model.norm_out.weight"])
        mark, (second, first) = int(logits.argmax()), np.partition(logits, -2)[-2:]
        if first - second > 2 and mark not in used:
            used.add(mark)
            one = adapter(0, {"attention.wv": 1}, {"attention.wv": 40.0}, layers=[LAYERS - 1])
            one.tensors[f"{path}wv", "A"] = np.eye(1, SHAPES["attention.wv"][1], dtype=np.float32)
            one.tensors[f"{path}wv", "B"] = values.reshape(-1, 1)
            yield mark, one
