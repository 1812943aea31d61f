"""A Llama divided between two processes, its head among it, trains as in one: head and loss in pieces on both sides."""

import pytest

from tests.support import divided_heads
from tests.support.ranks import run_ranks

RANKS = 2
# What runs with each change, and what before a release: in test_divided_mcore, a divided head trains and one has LoRA.
ALWAYS = ("a frozen head", "a whole head that trains")
LONG = tuple(name for name in divided_heads.MODELS if name not in ALWAYS)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """What two ranks have trained, and what one process has: folders, and the logs of the two."""
    alone, divided = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("divided")
    logs = run_ranks(RANKS, divided, divided_heads.__file__, divided, *request.param)
    run_ranks(1, alone, divided_heads.__file__, alone, *request.param)
    return alone, divided, logs


@pytest.mark.parametrize(
    "runs, name",
    [*((ALWAYS, name) for name in ALWAYS), *(pytest.param(LONG, name, marks=pytest.mark.long) for name in LONG)],
    ids=[*ALWAYS, *LONG],
    indirect=["runs"],
    scope="module",
)
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
    assert any("feed_forward.w2" in key for key in parts)
    assert any("attention.wq" in key for key in parts) == (name == "a frozen head")


@pytest.mark.parametrize("runs", [ALWAYS], ids=["log"], indirect=True, scope="module")
def test_the_log_says_that_no_logits_of_all_tokens_are_made(runs):
    assert all("Head and loss: 40 tokens at a time" in log for log in runs[2])
