"""What products in bfloat16 cost on stories260K, held in bfloat16, beside what transformers' own bfloat16 costs.

Each side is compared with itself in float32, on the same rounded weights and the tokens of five stories.
"""

import argparse
import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from mindlora.cli.engine import add_engine_options, build
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.request import Sampling
from tests.conftest import in_mode
from tests.support import stories260k

TOKENS = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model in bfloat16."""
    folder = stories260k.write_folder(tmp_path_factory.mktemp("hub") / "stories260K")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}), encoding="utf-8")
    path = folder / "model.safetensors"
    tensors = {name: from_float32(array, BFLOAT16) for name, array in load_file(path).items()}
    write_arrays(str(path), tensors, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def stories(folder):
    """The first tokens of each story, int32 [5, TOKENS]."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return np.array([one.ids[:TOKENS] for one in tokenizer.encode_batch(stories260k.stories())])


@pytest.fixture(scope="module")
def ours(folder, stories, library, mindformers):
    """dtype of products -> (log-probability of each token but the first, the likeliest one there)."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        parser = argparse.ArgumentParser()
        add_engine_options(parser, {})
        arguments = parser.parse_args(["--model", str(folder), "--product-dtype", dtype])
        arguments.overrides = []
        with in_mode(0):
            engine = build(arguments, AdapterRegistry()).start()
            asked = [engine.submit(story.tolist(), Sampling(max_tokens=1, prompt_logprobs=1)) for story in stories]
            scores = [(list(stream), stream.request.prompt_logprobs)[1] for stream in asked]
            engine.stop()
        rows = [[row[index] for index in range(1, TOKENS)] for row in scores]
        found[dtype] = tuple(np.array([[read(one) for one in row] for row in rows]) for read in (_own, _likeliest))
    return found


def _own(sampled):
    return sampled.logprob


def _likeliest(sampled):
    return sampled.top[0][0]


@pytest.fixture(scope="module")
def theirs(folder, stories, peer, tmp_path_factory):
    """The same of transformers: dtype of the model -> ..."""
    found, path = {}, tmp_path_factory.mktemp("logits") / "logits.npy"
    for dtype in ("float32", "bfloat16"):
        peer.logits(model=str(folder), ids=stories.tolist(), path=str(path), dtype=dtype)
        logits = np.load(path)[:, :-1].astype(np.float64)
        own = np.take_along_axis(logits, stories[:, 1:, None], -1)[..., 0] - np.log(np.exp(logits).sum(-1))
        found[dtype] = own, logits.argmax(-1)
    return found


def cost(side):
    """Returns the mean and the largest difference of log-probabilities, the share of other tokens, that of the loss."""
    (exact, likeliest), (rounded, chosen) = side["float32"], side["bfloat16"]
    differences = np.abs(rounded - exact)
    return differences.mean(), differences.max(), (chosen != likeliest).mean(), abs(rounded.mean() - exact.mean())


def test_they_cost_less_than_transformers_own_bfloat16(ours, theirs):
    np.testing.assert_allclose(ours["float32"][0], theirs["float32"][0], atol=2e-4)
    (mean, largest, other, loss), (their_mean, their_largest, their_other, _) = cost(ours), cost(theirs)
    # The last bits of either side are those of the processor.
    assert 0 < mean < their_mean / 2 and largest < their_largest / 2 and other < their_other
    assert mean < 0.006 and other < 0.01 and loss < 1e-3
