"""AdapterMemory: read once by a thread of its own, kept while there is room, read again when the files change."""

import os
import shutil
import threading

import pytest

from mindlora.core.errors import AdapterError, AdapterFormatError, AdapterNotFoundError, TruncatedAdapterError
from mindlora.serving.adapter_memory import TRANSITIONS, AdapterMemory, Load
from mindlora.serving.adapter_registry import AdapterRegistry
from tests.support.refusals import part, refused
from tests.support.served_adapters import SECONDS, Packed, Reader, put, settled, until


@pytest.fixture
def made(tmp_path):
    """Returns a function that makes a memory for some adapters over the folder; a to f are 0 to 5."""
    memories = []
    for value, name in enumerate("abcdef"):
        put(tmp_path, name, value)

    def make(room=10, read=None, **options):
        reader = read or Reader()
        memories.append(AdapterMemory(AdapterRegistry(str(tmp_path)), reader, 10 * room, **options))
        return memories[-1], reader

    yield make
    for memory in memories:
        getattr(memory._prepare, "gate", threading.Event()).set()
        memory.close()


def arrive(memory, *names):
    """Requests for adapters come, one after the other is read."""
    for name in names:
        memory.prefetch(name)
        settled(memory)


def values(memory, names):
    """Returns what memory has for each name now, which asks for nothing."""
    return [packed.value if (packed := memory._entries[name].packed) else None for name in names]


def test_an_adapter_is_read_when_a_request_comes_and_not_before(made):
    ready = []
    memory, reader = made(on_ready=ready.append)
    assert reader.reads == [] and memory.version("a") is None
    arrive(memory, "b", "a", "b")
    assert reader.reads == ready == ["b", "a"]
    assert memory.take("b").packed.value == 1 and memory.take("b").version == memory.version("b") != memory.version("a")
    stats = memory.stats()
    assert (stats.resident, stats.nbytes, stats.max_bytes) == (2, 20, 100)
    assert (stats.counts.hits, stats.counts.misses, stats.counts.loads) == (1, 2, 2)
    assert stats.adapters["b"].hits == 1 and stats.adapters["b"].seconds > 0


def test_one_read_serves_all_who_wait_for_it(made):
    memory, reader = made()
    reader.gate.clear()
    callers = [threading.Thread(target=memory.load, args=("a",)) for _ in range(20)]
    for thread in callers:
        thread.start()
    reader.wait()
    memory.prefetch("a")
    assert memory.take("a") is None
    reader.gate.set()
    for thread in callers:
        thread.join()
    assert reader.reads == ["a"] and memory.take("a").packed.value == 0


def test_nothing_waits_for_a_read(made):
    memory, reader = made()
    arrive(memory, "a")
    reader.gate.clear()
    memory.prefetch("b")
    reader.wait()
    reader.wait()
    # The thread is in the middle of b; all of this returns.
    assert memory.take("a").packed.value == 0 and memory.take("b") is None and memory.version("b") is None
    memory.prefetch("a")
    memory.prefetch("c")
    memory.forget("b")
    assert memory.stats().resident == 1


def test_the_least_recently_used_make_room(made):
    memory, _ = made(room=3)
    for name in "acb":
        arrive(memory, name)
        memory.take(name)
    memory.take("a")
    arrive(memory, "d")
    assert values(memory, "abcd") == [0, 1, None, 3]
    memory.take("d")
    arrive(memory, "b", "e")
    assert values(memory, "abcde") == [None, 1, None, 3, 4]
    assert memory.stats().counts.evictions == 2 and memory.stats().adapters["c"].evictions == 1
    assert memory.stats().nbytes == 30


def test_what_was_announced_does_not_push_out_what_no_slot_has_taken(made):
    memory, reader = made(room=3)
    arrive(memory, "a", "b", "c", "d")
    assert reader.reads == ["a", "b"] and values(memory, "ab") == [0, 1]
    # A slot waits for it: then it is read all the same.
    assert memory.take("c") is None
    settled(memory)
    assert memory.take("c").packed.value == 2


def test_what_a_slot_waits_for_is_read_first(made):
    memory, reader = made()
    reader.gate.clear()
    memory.prefetch("a")
    reader.wait()
    for name in "bcde":
        memory.prefetch(name)
    memory.take("e")
    memory.take("f")
    reader.gate.set()
    settled(memory)
    assert reader.reads == ["a", "e", "f", "b", "c", "d"]


def test_of_several_threads_one_reads_an_adapter(made):
    gates, reads = {name: threading.Semaphore(0) for name in "abcd"}, []

    def read(path):
        reads.append(path[-1])
        assert gates[path[-1]].acquire(timeout=SECONDS)
        return Packed(1)

    memory, _ = made(read=read, threads=2)
    for name in "abcd":
        memory.prefetch(name)
    until(lambda: reads == ["a", "b"] or reads == ["b", "a"])
    # Now c is in both queues.
    memory.take("c")
    gates["a"].release()
    until(lambda: reads[2:] == ["c"])
    gates["b"].release()
    until(lambda: reads[3:] == ["d"])
    gates["c"].release()
    gates["d"].release()
    settled(memory)
    assert sorted(reads) == ["a", "b", "c", "d"] and memory.stats().resident == 4


def test_what_a_slot_holds_need_not_be_in_memory(made):
    memory, reader = made(room=1)
    arrive(memory, "a")
    held = memory.version("a")
    memory.take("a")
    arrive(memory, "b")
    memory.prefetch("a", held)
    settled(memory)
    assert reader.reads == ["a", "b"] and memory.version("a") == held and values(memory, "a") == [None]
    memory.prefetch("a", held - 1)
    assert memory.take("a") is None
    settled(memory)
    assert reader.reads == ["a", "b", "a"] and memory.version("a") > held


def test_an_adapter_larger_than_the_memory_is_refused(made):
    memory, _ = made(read=lambda path: Packed(1, 101))
    message = "needs 101 bytes of host memory, but adapter_memory is 100: serve with --adapter-memory 101 or more."
    refused(AdapterError, part(message), memory.load, "a")
    assert memory.stats().nbytes == 0


# Failures -------------------------------------------------------------------------------------------------------


def test_a_damaged_adapter_fails_alone_and_is_not_read_again_until_it_changes(made, tmp_path):
    memory, reader = made()
    path = put(tmp_path, "a", 7, end="")
    for call in (memory.load, memory.version, memory.take, memory.load):
        refused(TruncatedAdapterError, f"{path} is truncated.", call, "a")
    memory.prefetch("a")
    arrive(memory, "b")
    assert reader.reads == ["a", "b"] and memory.take("b").packed.value == 1
    assert memory.stats().adapters["a"].failures == memory.stats().counts.failures == 1
    put(tmp_path, "a", 8)
    arrive(memory, "a")
    assert memory.take("a").packed.value == 8


@pytest.mark.parametrize("error", [OSError("no such device"), MemoryError(), KeyError("a")])
def test_whatever_goes_wrong_in_a_read_concerns_that_adapter_alone(made, tmp_path, error, caplog):
    def read(path):
        if path.endswith("a"):
            raise error
        return Packed(5)

    memory, _ = made(read=read)
    refused(AdapterFormatError, part(f"{tmp_path / 'a'} cannot be read: {type(error).__name__}: "), memory.load, "a")
    arrive(memory, "b")
    assert memory.take("b").packed.value == 5
    assert "an adapter could not be read" in caplog.text


def test_an_unknown_adapter_is_refused_at_once(made, tmp_path):
    memory, reader = made()
    with pytest.raises(AdapterNotFoundError):
        memory.prefetch("g")
    shutil.rmtree(tmp_path / "a")
    refused(AdapterFormatError, part("cannot be read: FileNotFoundError"), memory.load, "a")
    put(tmp_path, "a", 9)
    arrive(memory, "a")
    assert memory.take("a").packed.value == 9


# Changed files --------------------------------------------------------------------------------------------------


def test_changed_files_are_a_new_version(made, tmp_path):
    memory, reader = made()
    arrive(memory, "a")
    first = memory.take("a")
    put(tmp_path, "a", 10)
    # What is known stays until a request comes; nothing looks at the disk in between.
    assert memory.take("a") == first and memory.version("a") == first.version
    reader.gate.clear()
    memory.prefetch("a", first.version)
    assert memory.version("a") is None and memory.take("a") is None and memory.stats().nbytes == 0
    reader.gate.set()
    settled(memory)
    second = memory.take("a")
    assert second.packed.value == 10 and second.version > first.version


def test_files_beside_the_adapter_s_are_no_change(made, tmp_path):
    memory, reader = made()
    arrive(memory, "a")
    (tmp_path / "a" / "README.md").write_text("notes")
    (tmp_path / "a" / "checkpoint-5").mkdir()
    arrive(memory, "a")
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    arrive(memory, "a")
    assert reader.reads == ["a", "a"]


def test_a_single_file_is_an_adapter_too(tmp_path):
    file = tmp_path / "one.ckpt"
    file.write_text("1")
    memory = AdapterMemory(AdapterRegistry(None, {"one": str(file)}), lambda p: Packed(len(open(p).read())), 100)  # noqa: SIM115
    arrive(memory, "one", "one")
    assert memory.stats().counts.loads == 1
    file.write_text("12")
    arrive(memory, "one")
    assert memory.take("one").packed.value == 2
    (tmp_path / "adapter_config.json").write_text("{}")
    arrive(memory, "one")
    assert memory.stats().counts.loads == 3
    memory.close()


def test_files_that_change_while_they_are_read_are_read_again(made, tmp_path):
    memory, reader = made()
    reader.gate.clear()
    memory.prefetch("a")
    reader.wait()
    put(tmp_path, "a", 20)
    reader.gate.set()
    settled(memory)
    assert reader.reads == ["a", "a"] and memory.take("a").packed.value == 20


def test_files_that_never_stay_the_same_are_not_served(made, tmp_path):
    def read(path):
        put(tmp_path, "a", len(reads))
        reads.append(path)
        return Packed(1)

    reads = []
    memory, _ = made(read=read)
    words = f"{tmp_path / 'a'} changes while it is read. Send the request again once it has been saved."
    refused(AdapterFormatError, words, memory.load, "a")
    assert 3 <= len(reads) <= 9 and memory.stats().nbytes == 0


def test_a_request_that_saw_newer_files_gets_them(made, tmp_path, monkeypatch):
    memory, reader = made()
    from mindlora.serving import adapter_memory

    stamp, looks = adapter_memory.stamp_of, []

    def stamp_of(path):
        looks.append(found := stamp(path))
        if len(looks) == 3:
            # The thread has looked a second time, and the adapter is not yet in memory: now the files change.
            put(tmp_path, "a", 21)
            looks.append("request")
            memory.prefetch("a")
        return found

    monkeypatch.setattr(adapter_memory, "stamp_of", stamp_of)
    memory.prefetch("a")
    settled(memory)
    assert memory.take("a").packed.value == 21


def test_files_out_of_reach_for_a_moment_leave_what_was_known(made, tmp_path):
    memory, reader = made()
    arrive(memory, "a")
    os.rename(tmp_path / "a", tmp_path / ".a")
    arrive(memory, "a")
    assert memory.take("a").packed.value == 0 and reader.reads == ["a"]


# Forgotten ------------------------------------------------------------------------------------------------------


def test_what_is_forgotten_is_read_anew(made):
    memory, reader = made()
    arrive(memory, "a")
    version = memory.version("a")
    memory.forget("a")
    memory.forget("never seen")
    assert memory.version("a") is None and memory.stats().nbytes == 0
    reader.gate.clear()
    memory.prefetch("a")
    reader.wait()
    reader.wait()
    memory.forget("a")
    memory.prefetch("a")
    reader.gate.set()
    settled(memory)
    assert reader.reads == ["a"] * 3 and memory.take("a").version > version and memory.stats().nbytes == 10


def test_who_waits_for_an_adapter_hears_that_it_is_gone(made):
    memory, reader = made()
    reader.gate.clear()
    memory.prefetch("b")
    reader.wait()
    ended = []

    def wait():
        with pytest.raises(AdapterNotFoundError):
            memory.load("a")
        ended.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: "a" in memory._entries and memory._entries["a"].load is Load.URGENT)
    memory.registry.unregister("a")
    memory.forget("a")
    waiting.join(SECONDS)
    assert ended


def test_adapters_that_come_and_go_leave_nothing_behind(tmp_path):
    registry = AdapterRegistry(str(tmp_path))
    memory = AdapterMemory(registry, lambda path: Packed(1), 1000)
    put(tmp_path, "files", 1)
    for number in range(300):
        registry.register(f"a{number}", "files")
        memory.load(f"a{number}")
        registry.unregister(f"a{number}")
    assert len(memory._entries) < 100 and len(memory.stats().adapters) < 100
    assert memory.stats().counts.loads == 300 and memory.stats().nbytes == 10 * memory.stats().resident
    memory.close()


def test_a_load_takes_only_the_ways_of_the_table(made):
    memory, _ = made()
    memory.load("a")
    entry = memory._entries["a"]
    for before in Load:
        for after in Load:
            entry.load = before
            if after in TRANSITIONS[before]:
                with memory._changed:
                    memory._move(entry, after)
                assert entry.load is after
                continue
            with pytest.raises(RuntimeError, match=f"cannot go from {before.name} to {after.name}"):
                memory._move(entry, after)
    entry.load = Load.IDLE
