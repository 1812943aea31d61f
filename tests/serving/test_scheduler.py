"""What the scheduler plans: next tokens, chunks of prompts, admissions; what it refuses, preempts and gives back."""

import pytest

from mindlora.core.errors import QueueFullError, RequestError
from mindlora.serving.request import State
from tests.support.served_requests import Engine, FakeAdapters, request, scheduler


def planned(parts):
    return [(part.request.number, part.start, part.count) for part in parts]


def test_a_prompt_is_computed_and_then_token_by_token():
    engine, one = Engine(scheduler()), request(prompt=5, new=3)
    engine.add(one)
    assert one.state is State.WAITING and engine.scheduler.waiting == [one]
    assert [planned(engine.step()) for _ in range(4)] == [
        [(one.number, 0, 5)],
        [(one.number, 5, 1)],
        [(one.number, 6, 1)],
        [],
    ]
    assert (one.state, one.finish_reason, len(one.generated)) == (State.FINISHED, "length", 3)
    assert one.arrived <= one.admitted <= one.finished
    assert engine.scheduler.running == [] and engine.scheduler.waiting_count == 0


def test_a_request_joins_those_that_run_at_the_next_step():
    engine, first, second = Engine(scheduler()), request(5, 9), request(3, 9, adapter="a")
    engine.add(first)
    engine.step()
    engine.add(second)
    assert planned(engine.step()) == [(first.number, 5, 1), (second.number, 0, 3)]
    assert planned(engine.step()) == [(first.number, 6, 1), (second.number, 3, 1)]


def test_a_long_prompt_comes_in_chunks_beside_the_next_tokens_of_others():
    engine, short, long = Engine(scheduler(step=8)), request(2, 50), request(range(30), 2)
    engine.add(short)
    engine.step()
    engine.add(long)
    steps = [planned(engine.step()) for _ in range(5)]
    assert [step[0][0] for step in steps] == [short.number] * 5
    assert [step[1] for step in steps] == [(long.number, start, count) for start, count in
                                           [(0, 7), (7, 7), (14, 7), (21, 7), (28, 2)]]  # fmt: skip
    assert planned(engine.step())[1] == (long.number, 30, 1)


def test_a_short_prompt_does_not_wait_until_a_long_one_is_done():
    engine, long, short = Engine(scheduler(step=16)), request(range(100), 2), request(range(200, 204), 2)
    engine.add(long)
    assert planned(engine.step()) == [(long.number, 0, 16)]
    engine.add(short)
    assert planned(engine.step()) == [(long.number, 16, 12), (short.number, 0, 4)], "what one leaves, the other takes"


def test_prompts_share_a_step_the_oldest_taking_half():
    engine = Engine(scheduler(blocks=400, running=8, step=32, block_size=2))
    prompts = [request(range(100 * i, 100 * i + 50), 2) for i in range(8)]
    engine.add(*prompts)
    assert [part.count for part in engine.step()] == [16, 8, 4, 2, 2]
    assert engine.scheduler.waiting == prompts[5:]


def test_no_more_run_than_max_running_and_a_step_is_never_larger_than_its_limit():
    engine = Engine(scheduler(running=2, step=2))
    engine.add(*[request(prompt=[i, i, i], new=3) for i in range(5)])
    sizes = []
    while engine.scheduler.waiting_count or engine.scheduler.running:
        sizes.append(sum(part.count for part in engine.step()))
        assert len(engine.scheduler.running) <= 2
    assert max(sizes) == 2 and len(engine.ended) == 5


def test_blocks_are_taken_as_tokens_come():
    engine, one = Engine(scheduler(block_size=4, step=6)), request(range(10), 5)
    engine.add(one)
    used = []
    for _ in range(5):
        engine.step()
        used.append((one.computed, len(one.blocks)))
    assert used == [(6, 2), (10, 3), (11, 3), (12, 3), (13, 4)]


def test_one_adapter_is_first_come_first_served():
    engine = Engine(scheduler(running=1))
    requests = [request(prompt=[i] * 3, new=2, adapter="a") for i in range(6)]
    engine.add(*requests)
    engine.drain()
    assert engine.ended == requests


def test_the_same_beginning_is_computed_once():
    engine, prompt = Engine(scheduler(block_size=4)), list(range(11))
    first, second = request(prompt, 2), request(prompt + [50, 51, 52], 2)
    engine.add(first)
    engine.drain()
    engine.add(second)
    assert planned(engine.step()) == [(second.number, 8, 6)]
    assert (first.cached, second.cached, engine.scheduler.pool.hits) == (0, 8, 2)


def test_the_same_beginning_is_computed_once_by_requests_that_come_together():
    engine, prompt = Engine(scheduler(block_size=4, step=8)), list(range(17))
    first, same, short, other = request(prompt, 3), request(prompt, 3), request(prompt[:6], 3), request([9, 9], 3)
    engine.add(first, same, short, other)
    assert planned(engine.step()) == [(first.number, 0, 6), (other.number, 0, 2)], "others need not wait"
    assert planned(engine.step()) == [(other.number, 2, 1), (first.number, 6, 5), (short.number, 4, 2)]
    engine.drain()
    assert (first.cached, same.cached, short.cached) == (0, 16, 4)
    assert engine.scheduler.pool.hits == 5


def test_a_request_does_not_wait_for_the_blocks_of_another_adapter():
    engine, prompt = Engine(scheduler(block_size=4, step=40)), list(range(10))
    engine.add(request(prompt, 3, "a"), request(prompt, 3))
    assert [part.count for part in engine.step()] == [10, 10]


def test_a_request_does_not_wait_for_the_blocks_of_one_that_was_cancelled():
    engine, prompt = Engine(scheduler(block_size=4, step=8)), list(range(30))
    first, same = request(prompt, 3), request(prompt, 3)
    engine.add(first, same)
    assert planned(engine.step()) == [(first.number, 0, 8)]
    engine.cancel(first)
    assert planned(engine.step()) == [(same.number, 8, 8)]


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_in_the_cache():
    engine, prompt = Engine(scheduler(block_size=4)), list(range(8))
    for cached in (0, 4):
        one = request(prompt, 2)
        engine.add(one)
        engine.drain()
        assert one.cached == cached


def test_an_answer_is_the_beginning_of_the_next_turn():
    engine, first = Engine(scheduler(block_size=4)), request(range(6), 7)
    engine.add(first)
    engine.drain()
    second = request(first.tokens + [90, 91], 2)
    engine.add(second)
    engine.step()
    assert second.cached == 12, "of 13 tokens the last was never computed"


@pytest.mark.parametrize("adapter, other", [("a", "b"), ("a", None), (None, "a")])
def test_a_beginning_is_not_shared_between_adapters(adapter, other):
    engine, prompt = Engine(scheduler(block_size=4)), list(range(11))
    for name, cached in ((adapter, 0), (other, 0), (adapter, 8), (other, 8)):
        one = request(prompt, 2, adapter=name)
        engine.add(one)
        engine.drain()
        assert one.cached == cached


def test_a_beginning_is_not_shared_between_versions_of_an_adapter():
    adapters = FakeAdapters()
    engine = Engine(scheduler(block_size=4, adapters=adapters))
    for cached in (0, 8, 0, 8):
        one = request(range(11), 2, adapter="a")
        engine.add(one)
        engine.drain()
        assert one.cached == cached
        if cached:
            adapters.replace("a")


def activated(**sizes):
    """Returns an engine whose adapters ``a`` and ``b`` act from 7, 7 on, and ``c`` from 8 on."""
    invocations = {"a": (7, 7), "b": (7, 7), "c": (8,)}
    return Engine(scheduler(block_size=4, adapters=FakeAdapters(4, invocations=invocations), **sizes))


def test_what_comes_before_the_first_adapted_token_is_the_bases():
    engine, common = activated(), list(range(20, 33))
    cached = []
    for name, prompt in (
        (None, [*common, 1]),
        ("a", [*common, 7, 7, 3]),
        ("b", [*common, 7, 7, 3, 4]),
        ("b", [*common, 7, 7, 3, 4, 5, 6]),
        ("c", [*common, 7, 7, 3, 8, 1]),
        (None, [*common, 7, 7, 3, 4, 5, 6]),
    ):
        one = request(prompt, 3, adapter=name)
        engine.add(one)
        engine.drain()
        cached.append(one.cached)
    # The block of tokens 12 to 15 is b's own; c's is the base's, which nobody had computed before.
    assert cached == [0, 12, 12, 16, 12, 16]


def test_an_adapter_acts_from_the_last_invocation_on():
    engine, first = activated(), request([1, 8, 2], 2, adapter="c")
    engine.add(first)
    engine.step()
    first.tokens[-1] = 8
    engine.drain()
    assert (first.adapted_from, first.computed) == (1, 4)
    again = request([1, 8, 2, 8, 5, 6], 2, adapter="c")
    engine.add(again)
    engine.drain()
    assert (again.adapted_from, again.cached) == (3, 0), "the same tokens, but one of them is the base's now"


def test_requests_that_come_together_share_the_bases_part():
    engine, common = activated(), list(range(20, 32))
    first, second = request([*common, 7, 7], 2, adapter="a"), request([*common, 7, 7, 9], 2, adapter="b")
    engine.add(first, second)
    engine.drain()
    assert (first.cached, second.cached) == (0, 12)


def test_a_prompt_that_does_not_invoke_its_adapter_is_refused_by_name():
    engine = activated()
    one, other = request([7, 1, 7], 2, adapter="a"), request([1], 2)
    engine.add(one, other)
    engine.drain()
    assert str(one.error) == (
        "The prompt lacks the tokens [7, 7], from which on 'a' acts (alora_invocation_tokens): add their text, or ask "
        "the base."
    )
    assert (one.finish_reason, other.finish_reason) == ("error", "length")


def test_when_blocks_run_out_the_newest_loses_its_own_and_is_computed_again():
    engine = Engine(scheduler(blocks=6, block_size=2, running=4))
    first, second = request([1, 1, 1], 9, adapter="a"), request([2, 2, 2], 8, adapter="b")
    engine.add(first, second)
    engine.until(lambda: second.preemptions)
    assert (first.preemptions, engine.scheduler.preemptions, second.state) == (0, 1, State.WAITING)
    assert second.lease is not None and second.blocks == [] and second.computed == 0
    generated = len(second.generated)
    assert generated > 0, "its tokens are kept"
    engine.add(request([3], 2))
    assert engine.scheduler.waiting[0] is second, "it stands before those that never ran"
    engine.drain()
    assert engine.ended[0] is first and len(second.generated) == 8


def test_of_several_preempted_requests_the_oldest_comes_back_first():
    engine = Engine(scheduler(blocks=6, block_size=2))
    first, second, third = request([1, 1], 11), request([2, 2], 10), request([3, 3], 10)
    engine.add(first, second, third)
    engine.until(lambda: second.preemptions and third.preemptions)
    assert engine.scheduler.running == [first] and engine.scheduler.waiting == [second, third]
    engine.drain()


def test_a_preempted_request_finds_what_is_left_of_its_own_tokens():
    engine = Engine(scheduler(blocks=8, block_size=2))
    first, second = request([1] * 4, 13, adapter="a"), request([2] * 6, 11, adapter="b")
    engine.add(first, second)
    engine.until(lambda: second.preemptions)
    engine.cancel(first)
    parts = engine.step()
    assert parts[0].request is second and parts[0].start == 8, "first took only the block that was not full"
    assert second.cached == 0, "cached speaks of the time when it came"


def test_a_request_is_not_admitted_to_be_preempted_at_once():
    engine = Engine(scheduler(blocks=4, block_size=2))
    first, second = request([1, 1, 1], 4), request([2, 2, 2], 2)
    engine.add(first, second)
    engine.step()
    assert engine.scheduler.running == [first], "two blocks are left, and first needs one of them soon"
    engine.drain()
    assert engine.scheduler.preemptions == 0


def test_prompts_that_hold_all_blocks_between_them_do_not_wait_for_each_other():
    engine = Engine(scheduler(blocks=8, block_size=2, running=3, step=4))
    decoding, older, newer = request([1] * 2, 13), request([2] * 5, 5), request([3] * 5, 4)
    engine.add(decoding, older, newer)
    engine.drain(limit=60)


def test_drafts_fill_a_step_evenly_and_end_with_the_answer():
    engine = Engine(scheduler(lookup=9, drafted=12))
    first, second, short = request([1, 2] * 4, 20), request([3, 4, 5] * 3, 20), request([6, 7] * 3, 3)
    engine.add(first, second, short)
    parts = engine.step()
    assert [part.drafts for part in parts] == [()] * 3, "prompts have none"
    for one in (first, second, short):
        one.tokens[-1] = one.prompt[0]
    parts = engine.scheduler.plan()
    assert [part.drafts for part in parts] == [(2, 1, 2), (4, 5, 3), (7,)], "nine tokens are left, and short needs one"
    engine.scheduler.prompt_lookup = 0
    assert [part.drafts for part in engine.scheduler.plan()] == [()] * 3


def test_drafts_take_no_block_that_others_need_soon():
    engine = Engine(scheduler(blocks=5, block_size=4, lookup=9))
    one, other = request([1, 2, 1], 12), request([3] * 7, 2)
    engine.add(one)
    engine.step()
    one.tokens[-1] = 2
    assert [len(part.drafts) for part in engine.scheduler.plan()] == [9] and len(one.blocks) == 4
    engine = Engine(scheduler(blocks=5, block_size=4, lookup=9))
    one = request([1, 2, 1], 12)
    engine.add(one, other)
    engine.step()
    one.tokens[-1] = 2
    assert [len(part.drafts) for part in engine.scheduler.plan()] == [0, 0], "two of five blocks are left, one each"
    assert len(engine.scheduler.running) == 2


def test_right_drafts_are_found_by_the_next_turn():
    engine = Engine(scheduler(block_size=4, lookup=3))
    one = request([1, 2, 1, 2, 1], 6)
    engine.add(one)
    engine.step()
    one.tokens[-1] = 2
    (part,) = engine.scheduler.plan()
    assert part.drafts == (1, 2, 1)
    engine.compute([part])
    engine.scheduler.advance([part])
    for token in part.drafts:
        one.tokens.append(token)
        engine.scheduler.accept(one)
    assert one.computed == 9 and len(engine.scheduler.pool.find(None, [1, 2] * 5)) == 2


@pytest.mark.parametrize("moment", ["waiting", "prompt", "answer", "preempted", "computing", "finished"])
def test_a_request_can_be_cancelled_at_any_moment(moment):
    engine = Engine(scheduler(blocks=6, block_size=2, step=4))
    other, one = request([1] * 3, 9, adapter="a"), request([2] * 6, 3, adapter="b")
    engine.add(other, one)
    reached = {
        "waiting": lambda: True,
        "prompt": lambda: 0 < one.computed < 6,
        "answer": lambda: one.generated,
        "preempted": lambda: one.preemptions,
        "computing": lambda: one.generated,
        "finished": lambda: one.state is State.FINISHED,
    }[moment]
    engine.until(reached)
    if moment == "computing":
        engine.step(between=lambda: engine.cancel(one))
    else:
        engine.cancel(one)
    assert one.state is State.FINISHED and one.blocks == [] and one.lease is None
    assert one.finish_reason == ("length" if moment == "finished" else "cancelled")
    assert engine.scheduler.cancel(one) is False
    engine.drain()
    assert other.finish_reason == "length"


def test_what_a_cancelled_request_was_computing_is_not_found_by_others():
    engine, one = Engine(scheduler(block_size=4)), request(range(9), 2)
    engine.add(one)
    engine.step(between=lambda: engine.cancel(one))
    assert engine.scheduler.pool.find(None, list(range(9))) == []


def test_an_error_ends_a_request_with_its_reason():
    engine, one, error = Engine(scheduler()), request(), ValueError("no")
    engine.add(one)
    engine.step()
    assert engine.scheduler.finish(one, "error", error) is True
    assert (one.finish_reason, one.error) == ("error", error)
    assert engine.scheduler.finish(one, "stop") is False and one.finish_reason == "error"


@pytest.mark.parametrize(
    "prompt, new, message",
    [
        (0, 1, "The prompt has 0 tokens: give it at least one."),
        (1, 0, "max_tokens is 0: ask for at least one token."),
        (20, 13, "The prompt's 20 tokens and max_tokens, 13, are 33 together, but a sequence has at most 32: shorten "
                 "the prompt or lower max_tokens."),
        (20, 6, "The request needs 7 blocks of the cache for 20 prompt tokens and 6 new ones, but there are 6: shorten "
                "the prompt, lower max_tokens or serve with more (--num-blocks)."),
    ],
)  # fmt: skip
def test_what_can_never_be_finished_is_refused_with_the_numbers(prompt, new, message):
    plan = scheduler(blocks=6, block_size=4, length=32)
    with pytest.raises(RequestError) as refusal:
        plan.add(request(prompt, new))
    assert str(refusal.value) == message
    assert plan.waiting_count == 0 and plan.adapters.ready_at == {}


def test_what_just_fits_is_finished():
    engine = Engine(scheduler(blocks=6, block_size=4, length=32))
    engine.add(request(20, 5), request(1, 24), request(24, 1))
    engine.drain()
    engine = Engine(scheduler(blocks=8, block_size=4, length=32))
    engine.add(request(20, 12))
    engine.drain()


def test_a_full_queue_is_said_to_be_full_and_has_room_again_later():
    engine = Engine(scheduler(running=1, waiting=2))
    first, second, third = request(), request(), request()
    engine.add(first, second)
    with pytest.raises(QueueFullError, match="2 requests wait already, and max_waiting is 2: send it again later"):
        engine.scheduler.add(third)
    engine.step()
    engine.add(third)
    engine.drain()
    assert engine.ended == [first, second, third]
