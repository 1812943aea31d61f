"""A Llama divided between two processes, its head among it, trains as in one: head and loss in pieces on both sides."""

import numpy as np
import pytest

from tests.support import divided_heads
from tests.support.ranks import run_ranks

RANKS = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What two ranks have trained, and what one process has: folders, and the logs of the two."""
    alone, divided = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("divided")
    logs = run_ranks(RANKS, divided, divided_heads.__file__, divided, *divided_heads.MODELS)
    run_ranks(1, alone, divided_heads.__file__, alone, *divided_heads.MODELS)
    return alone, divided, logs


def joined(parts, whole):
    """Returns what the parts of a tensor on the ranks make up."""
    axis = next((axis for axis, size in enumerate(whole.shape) if parts[0].shape[axis] != size), None)
    if axis is None:
        np.testing.assert_array_equal(parts[0], parts[1])
        return parts[0]
    return np.concatenate(parts, axis)


@pytest.mark.parametrize("name", divided_heads.MODELS)
def test_losses_and_weights_are_those_of_one_process(runs, name):
    alone, divided, _ = runs
    expected = np.load(alone / f"{name}-0.npz")
    ranks = [np.load(divided / f"{name}-{rank}.npz") for rank in range(RANKS)]
    losses = expected["losses"]
    assert len(set(losses)) == divided_heads.STEPS
    for rank in ranks:
        assert rank.files == expected.files
        np.testing.assert_allclose(rank["losses"], losses, rtol=1e-6)
    trained = [key for key in expected.files if key != "losses"]
    assert any(key.startswith("lm_head") for key in trained) == name.endswith("trains")
    divided_tensors = [key for key in trained if ranks[0][key].shape != expected[key].shape]
    assert divided_tensors and ("lm_head.weight" in divided_tensors) == (name == "a head that trains")
    for key in trained:
        found = joined([rank[key] for rank in ranks], expected[key])
        scale = np.abs(expected[key]).max()
        np.testing.assert_allclose(found, expected[key], rtol=0, atol=1e-6 * scale, err_msg=key)


def test_the_log_says_that_no_logits_of_all_tokens_are_made(runs):
    assert all("Head and loss: 5 tokens at a time" in log for log in runs[2])
