"""AdapterSlots: what requests use stays in its slot, the least recently used rest makes room, one write a step."""

import itertools
import shutil
import time

import pytest

from mindlora.core.errors import AdapterNotFoundError, RequestError, TruncatedAdapterError
from mindlora.serving.adapter_memory import stamp_of
from tests.support.refusals import part, refused
from tests.support.served_adapters import cache, lease, put, settled


@pytest.fixture
def made(tmp_path):
    """Returns a function that makes a cache of some size over the folder; its adapters a to f are 0 to 5."""
    caches = []
    for value, name in enumerate("abcdef"):
        put(tmp_path, name, value)

    def make(slots=2, room=10, **registry):
        caches.append(cache(tmp_path, slots, room, **registry))
        return caches[-1]

    yield make
    for slots, _, reader in caches:
        reader.gate.set()
        slots.memory.close()


def use(slots, *names):
    """Requests come and go, one after the other."""
    for name in names:
        slots.release(lease(slots, name))


def test_a_lease_is_of_a_slot_that_holds_the_adapter(made):
    slots, pools, _ = made()
    first, second = lease(slots, "c"), lease(slots, "b")
    assert (first.name, pools.values[first.slot]) == ("c", 2) and (second.name, pools.values[second.slot]) == ("b", 1)
    assert first.slot != second.slot and first.version != second.version
    assert slots.acquire("c") == first and pools.writes == 2
    stats = slots.stats()
    assert (stats.registered, stats.slots, stats.used, stats.leased) == (6, 2, 2, 2)
    assert (stats.counts.hits, stats.counts.misses, stats.counts.loads) == (1, 2, 2)
    assert stats.adapters["c"].hits == 1 and stats.memory.counts.loads == 2


def test_nothing_is_read_before_a_request_comes(made):
    slots, _, reader = made()
    assert slots.registry.names() == list("abcdef") and slots.stats().used == 0
    assert slots.acquire("a") is None  # Not announced: it is read now.
    settled(slots.memory)
    assert reader.reads == ["a"]
    assert slots.acquire("a").name == "a"


def test_the_least_recently_used_adapter_makes_room(made):
    slots, pools, _ = made()
    use(slots, "a", "b", "a", "c")
    assert sorted(pools.values) == [0, 2]
    use(slots, "b")
    assert sorted(pools.values) == [1, 2] and slots.stats().counts.evictions == 2
    assert slots.stats().adapters["a"].evictions == 1
    use(slots, "a")
    assert sorted(pools.values) == [0, 1] and slots.stats().memory.counts.loads == 3


def test_an_adapter_in_a_slot_is_not_read_again_when_memory_has_dropped_it(made):
    slots, pools, reader = made(slots=2, room=1)
    use(slots, "a", "b", "a", "b")
    settled(slots.memory)
    assert reader.reads == ["a", "b"] and pools.writes == 2


def test_an_adapter_in_use_keeps_its_slot(made):
    slots, pools, reader = made()
    held = lease(slots, "a"), lease(slots, "b"), lease(slots, "b")
    slots.prefetch("c")
    settled(slots.memory)
    for _ in range(3):
        slots.begin_step()
        assert slots.acquire("c") is None and slots.lacks_slot("c")
    slots.release(held[1])
    slots.begin_step()
    assert slots.acquire("c") is None
    slots.release(held[2])
    slots.begin_step()
    assert not slots.lacks_slot("c")
    assert slots.acquire("c").slot == held[1].slot and pools.values[held[0].slot] == 0
    with pytest.raises(RuntimeError, match="released already"):
        slots.release(held[2])


def test_what_could_get_no_slot_is_not_read(made):
    slots, _, reader = made()
    lease(slots, "a")
    slots.begin_step()
    # One slot can be had, so one adapter is read.
    assert [slots.acquire(name) for name in "bcdef"] == [None] * 5
    settled(slots.memory)
    assert reader.reads == ["a", "b"]
    lease(slots, "b")
    slots.begin_step()
    assert slots.acquire("c") is None
    settled(slots.memory)
    assert reader.reads == ["a", "b"]


def test_one_slot_is_written_in_a_step(made):
    slots, pools, _ = made(slots=3)
    for name in "abc":
        slots.prefetch(name)
    settled(slots.memory)
    slots.begin_step()
    given = [slots.acquire(name) for name in "abcab"]
    assert [bool(found) for found in given] == [True, False, False, True, False] and pools.writes == 1
    slots.begin_step()
    assert [bool(slots.acquire(name)) for name in "abc"] == [True, True, False] and pools.writes == 2


def test_a_write_that_fails_leaves_the_slot_empty(made):
    slots, pools, _ = made(slots=1)
    use(slots, "a")
    slots._write = lambda slot, packed: 1 / 0
    with pytest.raises(ZeroDivisionError):
        lease(slots, "b")
    slots._write = pools.write
    assert slots.stats().used == 0
    use(slots, "a", "b")
    assert pools.values == [1]


# Pins -----------------------------------------------------------------------------------------------------------


def test_a_pinned_adapter_stays(made):
    slots, pools, _ = made()
    slots.pin("a")
    use(slots, "a", "b", "c", "d")
    assert sorted(pools.values) == [0, 3] and slots.stats().pinned == ["a"]
    refused(
        RequestError, "2 slots cannot hold 2 pinned adapters and others too: serve with more (--slots).", slots.pin, "d"
    )
    slots.pin("a")
    with pytest.raises(AdapterNotFoundError):
        slots.pin("x")


def test_pinned_in_its_slot_and_replaced_on_disk(made, tmp_path):
    slots, pools, _ = made()
    use(slots, "a")
    slots.pin("a")
    lease(slots, "b")
    put(tmp_path, "a", 30)
    use(slots, "a")
    assert sorted(pools.values) == [1, 30]


# Replaced and damaged files -------------------------------------------------------------------------------------


def test_a_replaced_adapter_goes_into_another_slot_while_the_old_one_drains(made, tmp_path):
    slots, pools, _ = made(slots=3)
    old = lease(slots, "a")
    put(tmp_path, "a", 40)
    new = lease(slots, "a")
    assert new.slot != old.slot and new.version > old.version
    assert (pools.values[old.slot], pools.values[new.slot]) == (0, 40)
    assert slots.acquire("a") == new
    slots.release(old)
    lease(slots, "b")
    # The old version's slot was the next to be written, before the one that was never used.
    assert pools.values[old.slot] == 1 and slots.stats().counts.evictions == 0


def test_a_replaced_adapter_that_nobody_uses_takes_its_own_slot(made, tmp_path):
    slots, pools, _ = made()
    use(slots, "a", "b")
    put(tmp_path, "a", 40)
    use(slots, "a")
    assert sorted(pools.values) == [1, 40]


def test_files_are_looked_at_when_a_request_comes_and_not_in_a_step(made, tmp_path, monkeypatch):
    slots, _, _ = made()
    first = lease(slots, "a")
    put(tmp_path, "a", 50)
    looks = []
    monkeypatch.setattr("mindlora.serving.adapter_memory.stamp_of", lambda path: looks.append(path) or stamp_of(path))
    slots.begin_step()
    assert slots.acquire("a") == first and not looks
    slots.prefetch("a")
    assert looks
    settled(slots.memory)
    assert slots.acquire("a").version != first.version


def test_a_damaged_adapter_fails_alone_and_is_healed_when_replaced(made, tmp_path):
    slots, pools, _ = made()
    running = lease(slots, "a")
    path = put(tmp_path, "a", 60, end="")
    slots.prefetch("a")
    settled(slots.memory)
    for _ in range(2):
        refused(TruncatedAdapterError, f"{path} is truncated.", slots.acquire, "a")
    use(slots, "b")
    assert pools.values[running.slot] == 0
    slots.release(running)
    put(tmp_path, "a", 61)
    assert pools.values[lease(slots, "a").slot] == 61
    assert slots.stats().memory.adapters["a"].failures == 1


# Unregistered ---------------------------------------------------------------------------------------------------


def test_an_unregistered_adapter_serves_those_who_run_and_no_others(made):
    slots, pools, _ = made()
    held = lease(slots, "a")
    slots.unregister("a")
    for call in (slots.acquire, slots.prefetch, slots.unregister):
        refused(AdapterNotFoundError, part("There is no adapter 'a'"), call, "a")
    use(slots, "b", "c")
    assert pools.values[held.slot] == 0 and slots.stats().leased == 1
    slots.release(held)
    assert slots.stats().used == 1
    use(slots, "b")
    assert sorted(pools.values) == [1, 2] and "a" not in slots.registry.names()


def test_an_adapter_that_is_unregistered_while_its_slot_is_written_serves_that_one_request(made):
    slots, pools, _ = made()

    def write(slot, packed):
        pools.write(slot, packed)
        slots.unregister("a")

    slots._write = write
    held = lease(slots, "a")
    assert pools.values[held.slot] == 0 and slots.stats().used == 1
    slots._write = pools.write
    slots.release(held)
    assert slots.stats().used == 0
    slots.register("a", "a")
    assert lease(slots, "a").version > held.version


def test_another_adapter_under_an_old_name_is_another_version(made, tmp_path):
    slots, pools, _ = made()
    put(tmp_path / "a", "inside", 70)
    old = lease(slots, "a")
    slots.unregister("a")
    slots.register("a", "a/inside")
    new = lease(slots, "a")
    assert (pools.values[old.slot], pools.values[new.slot]) == (0, 70) and new.version > old.version
    slots.release(old)
    assert slots.acquire("a") == new


def test_an_adapter_that_cannot_be_used_is_not_registered(made, tmp_path):
    slots, pools, _ = made()
    put(tmp_path / "a", "bad", 1, end="")
    refused(TruncatedAdapterError, f"{tmp_path / 'a' / 'bad'} is truncated.", slots.register, "new", "a/bad")
    assert "new" not in slots.registry.names()
    refused(RequestError, part("There is an adapter 'a' already"), slots.register, "a", "a/bad")
    assert pools.values[lease(slots, "a").slot] == 0


def test_an_adapter_is_replaced_in_place_or_stays(made, tmp_path):
    slots, pools, _ = made()
    put(tmp_path / "a", "new", 80)
    put(tmp_path / "a", "bad", 1, end="")
    old = lease(slots, "a")
    slots.register("a", "a/new", replace=True)
    new = lease(slots, "a")
    assert (pools.values[old.slot], pools.values[new.slot]) == (0, 80) and slots.registry.names() == list("abcdef")
    slots.release(old)
    refused(TruncatedAdapterError, part("is truncated."), slots.register, "a", "a/bad", replace=True)
    assert pools.values[lease(slots, "a").slot] == 80
    slots.register("g", "a/new", replace=True)
    assert slots.registry.names() == list("abcdefg")


def test_a_folder_that_is_gone_is_a_404_for_new_requests(made, tmp_path):
    seconds = itertools.count(step=2)
    slots, pools, _ = made(clock=lambda: next(seconds))
    held = lease(slots, "a")
    shutil.rmtree(tmp_path / "a")
    slots.prefetch("b")
    refused(AdapterNotFoundError, part("There is no adapter 'a'"), slots.acquire, "a")
    assert pools.values[held.slot] == 0
    slots.release(held)
    use(slots, "b", "c")
    assert sorted(pools.values) == [1, 2]


def test_ten_thousand_names_cost_a_step_nothing(made, tmp_path):
    caches, took = {}, {10: [], 10_000: []}
    for count in took:
        caches[count], _, _ = made(4, paths={f"tenant-{number}": str(tmp_path / "a") for number in range(count)})
        use(caches[count], "tenant-7")
    for count, slots in list(caches.items()) * 30:
        begin = time.perf_counter()
        for _ in range(50):
            slots.begin_step()
            slots.prefetch("tenant-7")
            slots.release(slots.acquire("tenant-7"))
        took[count].append(time.perf_counter() - begin)
    assert min(took[10_000]) < 1.5 * min(took[10])
