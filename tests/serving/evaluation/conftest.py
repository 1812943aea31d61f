"""A small Llama on an engine with two adapters, and what numpy makes of the logits that it has without a cache."""

import types

import numpy as np
import pytest

from tests.conftest import in_mode
from tests.support import tiny_serving
from tests.support.tiny_serving import adapter, base_weights, merged, save_adapter, save_base

MODELS = {None: None, "first": adapter(1), "second": adapter(2, size=0.1)}


@pytest.fixture(scope="session")
def evaluated(library, mindformers, tmp_path_factory):
    """A started engine, and ``logprobs``: tokens and model -> log-probabilities [tokens, vocabulary] after each."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name, made in MODELS.items():
        if name is not None:
            save_adapter(folder / "adapters", name, made)
    with in_mode(0):
        # Few requests may wait, so that most are asked when others have ended.
        path = save_base(folder / "base.ckpt", base_weights())
        engine = tiny_serving.engine(path, folder / "adapters", max_waiting=5).start()
        plain = tiny_serving.Plain()
        weights = {name: merged(base_weights(), made) for name, made in MODELS.items()}

        def logprobs(tokens, model):
            logits = plain.logits(weights[model], tokens).astype(np.float64)
            shifted = logits - logits.max(-1, keepdims=True)
            return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

        yield types.SimpleNamespace(engine=engine, logprobs=logprobs, models=list(MODELS))
        engine.stop()


@pytest.fixture(scope="module", autouse=True)
def _in_graph_mode(_each_module_begins_in_pynative):
    with in_mode(0):
        yield
