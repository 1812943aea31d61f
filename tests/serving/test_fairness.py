"""Fairness between adapters: who gets how much, who waits how long, and what a missing slot means."""

import collections
import random

import pytest

from mindlora.core.errors import AdapterError
from mindlora.serving.request import State
from tests.support.served_requests import Engine, FakeAdapters, request, scheduler


def flood(adapter, count=400, prompt=6, new=6, seed=0):
    """Returns many requests of one adapter, of many lengths."""
    rng = random.Random(f"{adapter} {seed}")
    return [
        request([rng.randrange(1000) for _ in range(rng.randint(1, prompt))], rng.randint(1, new), adapter)
        for _ in range(count)
    ]


def service(engine):
    """Returns the tokens that each adapter had: of prompts, those that were not in the cache."""
    had = collections.Counter()
    for one in engine.added:
        if one.state is not State.WAITING:
            had[one.adapter] += len(one.prompt) - one.cached + len(one.generated)
    return had


@pytest.mark.parametrize("sizes", [(6, 6), (60, 6), (6, 60)])
def test_adapters_that_wait_all_the_time_get_the_same_service(sizes):
    running, (prompt, new) = 4, sizes
    engine = Engine(scheduler(blocks=200, running=running, step=16, adapters=FakeAdapters(slots=4)))
    # Requests of one adapter come at first, and those of the others come later and are of other lengths.
    engine.add(*flood("a", 400))
    for _ in range(30):
        engine.step()
    engine.add(*flood("b", 150, prompt, new), *flood(None, 250, 2, 2))
    before, worst = service(engine), 0
    for _ in range(120):
        engine.step()
        had = [service(engine)[name] - before[name] for name in ("a", "b", None)]
        worst = max(worst, max(had) - min(had))
    assert min(had) > 200, "all of them had service"
    assert {one.adapter for one in engine.scheduler.waiting} == {"a", "b", None}, "all of them waited all the time"
    # One prompt that is admitted, and the answers of those that run.
    assert worst <= max(prompt, 6) + running * max(new, 6)


def test_a_newcomer_is_next_however_many_wait():
    engine = Engine(scheduler(running=2, adapters=FakeAdapters(slots=4)))
    engine.add(*flood("a", 200))
    for _ in range(100):
        engine.step()
    one = request(4, 2, "b")
    engine.add(one)
    before = [other for other in engine.added if other.admitted]
    engine.until(lambda: one.state is State.RUNNING)
    after = sorted((other for other in engine.added if other.admitted), key=lambda other: other.admitted)
    assert after[len(before)] is one


def test_an_adapter_that_was_idle_has_saved_nothing():
    """After long idleness, b shares with a from then on: it does not first get all that a had meanwhile."""
    engine = Engine(scheduler(running=2, adapters=FakeAdapters(slots=4)))
    engine.add(*flood("b", 3), *flood("a", 400))
    for _ in range(200):
        engine.step()
    engine.add(*flood("b", 100))
    before = service(engine)
    for _ in range(100):
        engine.step()
    had = service(engine)
    a, b = had["a"] - before["a"], had["b"] - before["b"]
    assert a > 0.7 * b and b > 0.7 * a


def test_an_adapter_that_sends_one_request_at_a_time_is_not_served_before_all_others():
    engine = Engine(scheduler(running=1, adapters=FakeAdapters(slots=4)))
    engine.add(*flood("a", 300, 4, 4))
    last = None
    for _ in range(300):
        if last is None or last.state is State.FINISHED:
            last = request(list(range(20)), 10, "b")
            engine.add(last)
        engine.step()
    had = service(engine)
    assert had["a"] > 0.7 * had["b"]


def test_tokens_that_were_in_the_cache_are_no_service():
    engine = Engine(scheduler(blocks=200, running=1, step=40, adapters=FakeAdapters(slots=2)))
    alike = [request(range(40), 4, "a") for _ in range(40)]
    engine.add(*alike, *[request(range(100 * i, 100 * i + 40), 4, "b") for i in range(1, 20)])
    for _ in range(100):
        engine.step()
    ended = collections.Counter(one.adapter for one in engine.ended)
    assert ended["a"] > 3 * ended["b"] > 0, "4 of 40 tokens are left to compute, and 4 new ones"


def test_a_request_whose_adapter_is_not_loaded_holds_up_nobody():
    adapters = FakeAdapters(load_steps=lambda: 40)
    adapters.ready_at["a"] = 0
    engine = Engine(scheduler(running=2, adapters=adapters))
    slow, others = request(3, 2, "slow"), flood("a", 60)
    engine.add(slow, *others)
    for _ in range(39):
        assert engine.step(), "others are computed"
    assert slow.state is State.WAITING and len(engine.ended) > 5
    engine.until(lambda: slow.state is State.RUNNING, limit=8)


def test_nothing_to_do_until_an_adapter_is_loaded_is_an_empty_step():
    engine = Engine(scheduler(adapters=FakeAdapters(load_steps=lambda: 5)))
    engine.add(request(3, 2, "a"))
    assert [bool(engine.step()) for _ in range(6)] == [False] * 4 + [True, True]


def test_an_adapter_that_cannot_be_used_fails_its_own_requests_alone():
    engine = Engine(scheduler(adapters=FakeAdapters(broken=["bad"])))
    bad, good = [request(3, 2, "bad") for _ in range(3)], [request(3, 2, "good"), request(3, 2)]
    engine.add(bad[0], good[0], bad[1], good[1], bad[2])
    engine.scheduler.plan()
    assert engine.scheduler.failed == bad and engine.scheduler.running == good
    for one in bad:
        assert (one.state, one.finish_reason, str(one.error)) == (State.FINISHED, "error", "bad is damaged.")
    engine.drain()


def test_all_requests_that_wait_for_an_adapter_fail_when_it_cannot_be_loaded():
    adapters = FakeAdapters(load_steps=lambda: 3)
    engine = Engine(scheduler(adapters=adapters))
    waiting = [request(3, 2, "bad") for _ in range(5)]
    engine.add(*waiting)
    engine.step()
    adapters.broken.add("bad")
    engine.step()
    assert engine.ended == waiting


def test_no_slot_is_written_for_a_request_for_which_there_are_no_blocks():
    adapters = FakeAdapters()
    engine = Engine(scheduler(blocks=4, block_size=2, adapters=adapters))
    engine.add(request(7, 2, "a"), request(1, 1, "b"))
    for _ in range(2):
        engine.step()
        assert adapters.given == ["a"]
    engine.drain()


def test_an_adapter_that_turns_out_damaged_while_it_waits_for_a_slot_fails_its_request():
    class Damaged(FakeAdapters):
        def lacks_slot(self, name):
            raise AdapterError(f"{name} has just been read.")

    engine, one, other = Engine(scheduler(adapters=Damaged(slots=1))), request(3, 9, "a"), request(3, 2, "b")
    engine.add(one, other)
    engine.step()
    assert str(other.error) == "b has just been read." and one.state is State.RUNNING


@pytest.mark.parametrize("slots", [1, 2])
def test_requests_that_come_without_end_do_not_keep_their_slot_for_ever(slots):
    """Requests of popular adapters overlap, so that their slots are never free by themselves."""
    popular, running = [f"popular {i}" for i in range(slots)], 4
    engine = Engine(scheduler(running=running, step=16, adapters=FakeAdapters(slots=slots)))
    for name in popular:
        engine.add(*flood(name, 300))
    for _ in range(50):
        engine.step()
    rare = request(4, 3, "rare")
    engine.add(rare)
    admitted = len([one for one in engine.added if one.admitted])
    engine.until(lambda: rare.state is State.RUNNING)
    overtook = len([one for one in engine.added if one.admitted]) - admitted - 1
    assert 0 < overtook <= running, "others are admitted meanwhile, but not without end"


def test_the_base_needs_no_slot_and_is_not_held_up_when_one_is_missing():
    engine = Engine(scheduler(running=4, step=16, adapters=FakeAdapters(slots=1)))
    long = request(2, 150, "a")
    engine.add(long, request(4, 3, "b"), *flood("a", 50))
    for _ in range(60):
        engine.step()
    assert engine.scheduler.running == [long], "b waits for the slot of a, whose other requests wait for b"
    base = request(4, 3)
    engine.add(base)
    engine.until(lambda: base.state is State.FINISHED, limit=5)
    engine.drain()


def test_the_next_slot_that_becomes_free_is_the_longest_waiting_ones():
    adapters = FakeAdapters(slots=1)
    engine = Engine(scheduler(running=2, adapters=adapters))
    first = request(2, 30, "first")
    engine.add(first)
    engine.step()
    waiting = [f"w{i}" for i in range(8)]
    for name in waiting:
        engine.add(request(2, 2, name))
        engine.step()
    engine.drain()
    assert adapters.given == ["first", *waiting]


def test_while_no_slot_is_free_one_adapter_is_asked_and_not_all_that_wait():
    class Counting(FakeAdapters):
        asked = 0

        def acquire(self, name):
            self.asked += 1
            return super().acquire(name)

    adapters = Counting(slots=1)
    engine = Engine(scheduler(running=4, adapters=adapters))
    engine.add(request(2, 20, "a"), *[request(2, 2, f"w{i}") for i in range(50)])
    engine.step()
    assert adapters.asked == 51
    for _ in range(10):
        engine.step()
    assert adapters.asked == 61
    engine.drain()


def test_who_waits_longest_for_a_slot_has_it_before_one_that_had_less_service():
    adapters = FakeAdapters(slots=1)
    engine = Engine(scheduler(running=4, adapters=adapters))
    engine.add(request(4, 30, "served"))
    engine.drain()
    engine.add(request(2, 9, "first"))
    engine.step()
    for name in ("served", "new"):
        engine.add(request(2, 2, name))
        engine.step()
    engine.drain()
    assert adapters.given == ["served", "first", "served", "new"]


def test_requests_of_the_base_overtake_nobody_who_waits_for_a_slot():
    engine = Engine(scheduler(running=4, step=16, adapters=FakeAdapters(slots=1)))
    engine.add(request(2, 100, "a"), request(2, 2, "b"), *flood(None, 20))
    for _ in range(60):
        engine.step()
    again = request(2, 2, "a")
    engine.add(again)
    engine.step()
    assert again.state is State.RUNNING


def test_many_adapters_over_few_slots_all_get_their_turn():
    adapters = FakeAdapters(slots=3)
    engine = Engine(scheduler(running=6, step=24, adapters=adapters))
    rng = random.Random(1)
    names = rng.choices([f"a{i}" for i in range(20)], [1 / (i + 1) for i in range(20)], k=400)
    steps_waited = collections.defaultdict(int)
    requests = [request([rng.randrange(99) for _ in range(4)], rng.randint(1, 8), name) for name in names]
    for one in requests:
        engine.add(one)
        engine.step()
        for waiting in {other.adapter for other in engine.scheduler.waiting}:
            steps_waited[waiting] += 1
        for running in engine.scheduler.running:
            steps_waited[running.adapter] = 0
        assert max(steps_waited.values(), default=0) < 150, "an adapter with waiting requests has none running"
    engine.drain()
