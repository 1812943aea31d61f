"""Which tokens can be drawn, and how likely: against transformers' generation from the same logits."""

import numpy as np
import pytest

from mindlora.serving.request import Sampling
from mindlora.serving.sampling import Sampler

PROMPT, GENERATED = [3, 5, 5, 900], [7, 3, 7, 7]


@pytest.mark.parametrize("size, scale", [(1003, 2.0), (32000, 1.0), (32000, 4.0)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 1003},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5, "temperature": 1.5, "top_p": 0.99},
        {"temperature": 0.6, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.1},
    ],
)
def test_the_same_tokens_are_kept_with_the_same_probabilities(peer, tmp_path, size, scale, settings):
    logits = np.random.default_rng(size).normal(0, scale, size).astype(np.float32)
    logits[[3, 7, 900]] = logits.max() + [0.5, 0.25, -1.0]
    np.save(tmp_path / "logits.npy", logits)
    output = tmp_path / "probabilities.npy"
    peer.next_probabilities(tokens=PROMPT + GENERATED, settings=settings, path=tmp_path / "logits.npy", output=output)
    expected = np.load(output)
    tokens, probabilities = Sampler(Sampling(**settings), PROMPT).kept(logits, GENERATED)
    assert tokens.tolist() == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose(probabilities, expected[tokens], rtol=2e-5)
    assert len(tokens) == size or settings.keys() & {"top_k", "top_p"}


def test_equal_logits_at_the_border_of_top_k_are_all_kept(peer, tmp_path):
    logits = np.random.default_rng(1).integers(0, 9, 500).astype(np.float32)
    np.save(tmp_path / "logits.npy", logits)
    peer.next_probabilities(
        tokens=[0], settings={"top_k": 5}, path=tmp_path / "logits.npy", output=tmp_path / "probabilities.npy"
    )
    tokens, _ = Sampler(Sampling(top_k=5), [0]).kept(logits, [])
    assert tokens.tolist() == np.flatnonzero(np.load(tmp_path / "probabilities.npy")).tolist() and len(tokens) > 5
