"""Small mcore models that MindFormers has for prediction alone; RUN_MODE must be predict while they are built."""

import importlib

from tests.support.mcore_networks import TINY, mcore_context

QWEN2 = {key: value for key, value in TINY.items() if key != "head_dim"}
GLM4 = {**TINY, "position_embedding_type": "partial_rope"}
_MODELS = {
    "qwen2": ("Qwen2Config", "InferenceQwen2ForCausalLM", QWEN2),
    "glm4": ("Glm4Config", "InferenceGlm4ForCausalLM", GLM4),
}


def tiny_predicting(name, **keys):
    """Returns "qwen2" or "glm4" as MindFormers predicts with it."""
    config, network, sizes = _MODELS[name]
    package = f"mindformers.models.{name}"
    config = getattr(importlib.import_module(f"{package}.configuration_{name}"), config)
    network = getattr(importlib.import_module(f"{package}.modeling_{name}_infer"), network)
    with mcore_context():
        return network(config(**{**sizes, **keys}))
