"""The engine on a real network: an answer is what it would be alone, whatever else happens at the same time."""

import os
import random

import numpy as np
import pytest

from mindlora.core.errors import AdapterNotFoundError, LoraError, RequestError, TruncatedAdapterError
from mindlora.serving.request import Sampling
from tests.conftest import in_mode
from tests.support import tiny_serving
from tests.support.mixed_kinds import known
from tests.support.mixed_models import MARKED, Llama
from tests.support.mixed_requests import Answer, Job, MixedServing, returned
from tests.support.tiny_serving import SEQ_LENGTH, adapter, merged, save_adapter, vocabulary

CHANGING = adapter(60), adapter(61)


@pytest.fixture(scope="module")
def served(library, mindformers, tmp_path_factory):
    """An engine with few blocks and slots, and adapters of many kinds; some are there for one test."""
    folder = tmp_path_factory.mktemp("served")
    path = save_adapter(folder / "adapters", "damaged", adapter(50))
    file = os.path.join(path, "adapter_model.safetensors")
    os.truncate(file, os.path.getsize(file) - 10)
    save_adapter(folder / "adapters", "large", adapter(51, {"attention.wq": 17}))
    save_adapter(folder / "adapters", "changing", CHANGING[0])
    with in_mode(0), pytest.MonkeyPatch.context() as patch:
        # So that the graph of many tokens has work too.
        patch.setattr("mindlora.serving.network.FEW_TOKENS", 6)
        patch.setattr("mindlora.serving.build.FEW_TOKENS", 6)
        found = MixedServing(folder, Llama(others=True), known(), fixed_batches=(1, 3))
        found.engine.start()
        yield found
        found.engine.stop()


@pytest.fixture(autouse=True)
def _all_is_given_back(served):
    yield
    assert returned(served.engine) == []


def prompt(length, seed=0):
    return tuple(random.Random(seed).choices(range(3, vocabulary()), k=length))


def test_each_of_a_hundred_mixed_requests_is_answered_as_if_alone(served):
    # Fast enough that requests wait for blocks, whatever the machine.
    verdict = served.judge(served.jobs(100, seed=0, seconds=0.4))
    assert verdict.defects == []
    assert all(verdict.provoked.values()), verdict.provoked
    assert sorted(verdict.kinds) == sorted(known()) and verdict.ties < 10 and verdict.tokens > 400


def test_marked_adapters_say_their_mark_and_nobody_else_does(served):
    """The same prompt for all at once, again and again: slots are written over, blocks change hands."""
    for turn in range(3):
        jobs = [Job(prompt(10 + turn), name, 9) for name in random.Random(turn).sample([*MARKED, None] * 3, 12)]
        for answer in served.together(jobs):
            if answer.job.adapter:
                assert answer.tokens == [served.model.marks[answer.job.adapter]] * 9
            else:
                left = served.of_model(answer.job, answer.tokens)
                assert left is None or left[1]
                assert len(set(answer.tokens)) > 2


def test_beginnings_come_from_the_cache_for_the_same_adapter_alone(served):
    tokens, names = prompt(17, seed=3), ("adapter-0", None, MARKED[0])
    for name in names:
        served.alone(Job(tokens, name, 2))  # with an empty cache
    again = Answer(served.engine, Job(tokens, names[-1], 2)).wait()
    other = Answer(served.engine, Job(tokens, names[0], 2)).wait()
    assert (again.stream.request.cached, other.stream.request.cached) == (16, 0)


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 1.7, "top_p": 0.8, "top_k": 50}])
def test_a_seed_gives_the_same_tokens_in_any_batch(served, sampling):
    jobs = [Job(prompt(3 + 2 * number, number), served.names[number % 9], 8) for number in range(8)]
    answers = [Answer(served.engine, job, seed=number, **sampling) for number, job in enumerate(jobs)]
    together = [answer.wait().tokens for answer in answers]
    assert [served.alone(job, seed=number, **sampling) for number, job in enumerate(jobs)] == together
    assert [served.alone(job, seed=number + 9, **sampling) for number, job in enumerate(jobs)] != together


def test_prompt_lookup_changes_no_token_whatever_is_asked(served):
    """Many adapters in one batch, greedy, drawn and penalized, with log-probabilities and stop strings."""
    asked = (
        {},
        {"logprobs": 2},
        {"stop": ("e",)},
        {"repetition_penalty": 1.3, "logit_bias": ((5, 1.0),)},
        {"temperature": 1.2, "top_p": 0.9, "seed": 3},
        {"frequency_penalty": 0.5, "presence_penalty": 0.2},
    )
    names = [*served.names, *MARKED]
    scheduler = served.engine.scheduler

    def answers():
        jobs = [Job(prompt(4, number) * 3, name, 30) for number, name in enumerate(names)]
        sent = [Answer(served.engine, job, **asked[place % len(asked)]) for place, job in enumerate(jobs)]
        logprobs = [[entry.logprob for entry in answer.logprobs] for answer in map(Answer.wait, sent)]
        return [(answer.tokens, answer.text, answer.reason) for answer in sent], logprobs

    plain, expected = answers()
    before = served.engine.snapshot()
    assert before.drafted_tokens == 0
    scheduler.prompt_lookup = 5
    try:
        drafted, logprobs = answers()
    finally:
        scheduler.prompt_lookup = 0
    after = served.engine.snapshot()
    assert drafted == plain
    for one, other in zip(logprobs, expected):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert after.drafted_tokens > after.accepted_tokens > 40
    assert after.steps - before.steps < before.steps


def test_a_damaged_adapter_fails_alone(served):
    jobs = [Job(prompt(5, 1), name, 6) for name in ("adapter-1", "damaged", None, "damaged", "adapter-2")]
    answers = served.together(jobs)
    assert [answer.reason for answer in answers] == ["length", "error", "length", "error", "length"]
    for answer in answers:
        if answer.job.adapter == "damaged":
            assert isinstance(answer.error, TruncatedAdapterError) and "/damaged" in str(answer.error)
        else:
            assert answer.tokens == served.alone(answer.job)


def test_an_adapter_that_does_not_fit_is_refused_by_name(served):
    answer = Answer(served.engine, Job(prompt(5), "large", 2)).wait()
    assert isinstance(answer.error, LoraError) and "has rank 17 at" in str(answer.error)


def test_an_adapter_that_is_replaced_on_disk_serves_new_requests(served, tmp_path):
    """The request that runs meanwhile ends with the adapter that it began with."""
    # Written before: the request must not end while the new files are being written.
    replacement, path = save_adapter(tmp_path, "replacement", CHANGING[1]), os.path.join(served.folder, "changing")
    job = Job(prompt(6, 2), "changing", SEQ_LENGTH - 6)
    old = Answer(served.engine, job)
    old.wait_for(2)
    os.rename(path, tmp_path / "replaced")
    os.rename(replacement, path)
    assert old.reason is None
    new = Answer(served.engine, job).wait()
    assert old.wait().tokens != new.tokens and new.stream.request.cached == 0
    for answer, made in zip((old, new), CHANGING):
        left = served.of_weights(merged(served.model.base, made), job, answer.tokens)
        assert left is None or left[1]


def test_what_cannot_be_answered_is_refused_at_once(served):
    submit, sampling = served.engine.submit, Sampling(max_tokens=4)
    for tokens, words in (
        ([], "The prompt has 0 tokens"),
        ([3, vocabulary()], f"has token {vocabulary()}, but the model knows 0 to {vocabulary() - 1}"),
        ([-1], "has token -1"),
        (prompt(SEQ_LENGTH - 3), "are 65 together, but a sequence has at most 64"),
    ):
        with pytest.raises(RequestError, match=words):
            submit(tokens, sampling)
    with pytest.raises(AdapterNotFoundError, match="adapter-1"):
        submit([3], sampling, "adaptor-1")


def test_text_and_tokens_are_those_of_the_tokenizer(served):
    stream = served.engine.submit(list(prompt(4)), Sampling(max_tokens=9, temperature=0.0, logprobs=2), "adapter-0")
    pieces = list(stream)
    tokens = [token for piece in pieces for token in piece.tokens]
    text = "".join(piece.text for piece in pieces)
    decoded = tiny_serving.tokenizer().decode(tokens, skip_special_tokens=True)
    assert len(tokens) == len([piece for piece in pieces if piece.tokens]) == 9
    assert text.strip() == decoded.strip()
    for piece in pieces:
        (sampled,) = piece.logprobs
        assert sampled.token == piece.tokens[0] and sampled.logprob <= 0


def test_the_snapshot_counts_what_was_done(served):
    before = served.engine.snapshot()
    answers = served.together([Job(prompt(9, 20 + n), name, 5) for n, name in enumerate((None, "adapter-1", None))])
    after = served.engine.snapshot()
    assert after.generated_tokens - before.generated_tokens == 15
    assert after.prompt_tokens - before.prompt_tokens == 27
    assert after.cached_tokens - before.cached_tokens == sum(a.stream.request.cached for a in answers)
    assert after.steps > before.steps and after.preemptions >= before.preemptions
    assert (after.slots_total, after.blocks_total, after.waiting, after.running) == (3, 24, 0, 0)
