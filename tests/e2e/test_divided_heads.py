"""A Llama divided between two processes, its head among it, trains as in one: head and loss in pieces on both sides."""

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


@pytest.mark.parametrize("name", divided_heads.MODELS)
def test_losses_and_weights_are_those_of_one_process(runs, name):
    alone, divided, _ = runs
    trained, parts = divided_heads.assert_same(alone, divided, name)
    of_head = {key for key in trained if key.startswith("lm_head")}
    if name == "LoRA on the head":
        assert of_head == {"lm_head.mindpet_delta_lora_a", "lm_head.mindpet_delta_lora_b"}
        assert of_head & parts == {"lm_head.mindpet_delta_lora_b"}
    else:
        assert of_head == ({"lm_head.weight"} if name.endswith("trains") else set())
        assert of_head & parts == ({"lm_head.weight"} if name == "a head that trains" else set())
    assert any("attention.wq" in key for key in parts)


def test_the_log_says_that_no_logits_of_all_tokens_are_made(runs):
    assert all("Head and loss: 40 tokens at a time" in log for log in runs[2])
