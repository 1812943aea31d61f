"""The adapter cache under requests, replacements and removals by chance: every lease shows its own adapter."""

import collections
import itertools
import random
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from mindlora.core.errors import AdapterNotFoundError, LoraError, TruncatedAdapterError
from tests.support.served_adapters import SECONDS, Reader, cache, put, settled


class Model:
    """What AdapterSlots must do, said plainly: names in the order of their last use, and how many use each."""

    def __init__(self, slots):
        self.slots, self.users, self.recent = slots, collections.Counter(), []

    def acquire(self, name):
        """Returns whether there is a lease, and the name that makes room for it."""
        victim = None
        if name not in self.recent:
            idle = [other for other in self.recent if not self.users[other]]
            if len(self.recent) == self.slots and not idle:
                return False, None
            if len(self.recent) == self.slots:
                victim = idle[0]
                self.recent.remove(victim)
            self.recent.append(name)
        self.users[name] += 1
        return True, victim

    def release(self, name):
        self.users[name] -= 1
        if not self.users[name]:
            self.recent.remove(name)
            self.recent.append(name)


@given(
    slots=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(["acquire", "release"]), st.sampled_from("abcde")), max_size=40),
)
@settings(max_examples=30, deadline=None)
def test_slots_are_given_in_the_order_of_last_use(tmp_path_factory, slots, steps):
    folder = tmp_path_factory.mktemp("adapters")
    for value, name in enumerate("abcde"):
        put(folder, name, value)
    tried, pools, _ = cache(folder, slots)
    model, leases, evicted = Model(slots), collections.defaultdict(list), 0
    try:
        for name in "abcde":
            tried.prefetch(name)
            settled(tried.memory)
        for what, name in steps:
            tried.begin_step()
            if what == "acquire":
                given_, victim = model.acquire(name)
                found, evicted = tried.acquire(name), evicted + (victim is not None)
                assert bool(found) == given_
                if found:
                    leases[name].append(found)
            elif leases[name]:
                tried.release(leases[name].pop())
                model.release(name)
            for held in (lease for some in leases.values() for lease in some):
                assert pools.values[held.slot] == "abcde".index(held.name)
            resident = {pools.values[slot.number] for slot in tried._slots if slot.name}
            assert resident == {"abcde".index(name) for name in model.recent}
            assert tried.stats().counts.evictions == evicted
    finally:
        tried.memory.close()


class Disturbances(threading.Thread):
    """Replaces, damages, removes and restores adapters until it is told to end."""

    def __init__(self, folder, slots, names):
        super().__init__()
        self.folder, self.slots, self.names, self.ended, self.problem = folder, slots, names, threading.Event(), None
        self.versions = itertools.count(1)

    def run(self):
        rng = random.Random(5)
        try:
            while not self.ended.wait(0.0005):
                name = rng.choice(self.names)
                what = rng.choice(("replace", "replace", "damage", "unregister"))
                if what != "unregister":
                    put(
                        self.folder,
                        name,
                        next(self.versions) * 100 + self.names.index(name),
                        "" if what == "damage" else ".",
                    )
                elif name in self.slots.registry:
                    self.slots.unregister(name)
                    put(self.folder, name, next(self.versions) * 100 + self.names.index(name))
                    self.slots.register(name, name)
                self.slots.stats()
        except LoraError as error:
            # Between a replacement and the read of it, another disturbance may have damaged it.
            self.problem = None if isinstance(error, (TruncatedAdapterError, AdapterNotFoundError)) else error
        except BaseException as error:
            self.problem = error


def test_no_lease_ever_shows_another_adapter_while_files_change_under_requests(tmp_path):
    names = [f"n{number}" for number in range(12)]
    for index, name in enumerate(names):
        put(tmp_path, name, index)
    slots, pools, _ = cache(tmp_path, slots=4, room=5)
    storm = Disturbances(tmp_path, slots, names)
    storm.start()
    rng, held, shown, outcomes = random.Random(3), [], {}, collections.Counter()
    try:
        for _ in range(3000):
            slots.begin_step()
            for name in rng.sample(names, 3):
                try:
                    slots.prefetch(name)
                    found = slots.acquire(name)
                except LoraError as error:
                    outcomes[type(error).__name__] += 1
                    continue
                outcomes[bool(found)] += 1
                if found:
                    held.append(found)
                    value = pools.values[found.slot]
                    # One version is one content, and the name's own.
                    assert value % 100 == names.index(name) and shown.setdefault(found.version, value) == value
            for lease_ in held:
                assert pools.values[lease_.slot] == shown[lease_.version]
            assert slots.memory.stats().nbytes <= 50
            while held and (len(held) > 8 or rng.random() < 0.3):
                slots.release(held.pop(rng.randrange(len(held))))
    finally:
        storm.ended.set()
        storm.join(SECONDS)
    assert not storm.problem and outcomes[True] > 100 and outcomes["TruncatedAdapterError"], outcomes
    while held:
        slots.release(held.pop())
    settled(slots.memory)
    stats = slots.stats()
    assert stats.leased == 0 and len(slots._idle) == 4
    assert stats.memory.nbytes == 10 * stats.memory.resident == 10 * len(slots.memory._recent)
    slots.memory.close()


def test_sixty_four_adapters_over_few_slots_all_get_their_turn(tmp_path):
    for number in range(64):
        put(tmp_path, f"n{number:02}", number)
    reader = Reader()
    slots, pools, _ = cache(tmp_path, slots=4, room=6, reader=reader)
    waiting = collections.deque(f"n{number % 64:02}" for number in range(192))
    for name in waiting:
        slots.prefetch(name)
    running, steps, end = collections.deque(), 0, time.monotonic() + SECONDS
    while waiting:
        slots.begin_step()
        steps += 1
        found = slots.acquire(waiting[0])
        if found:
            assert pools.values[found.slot] == int(found.name[1:])
            running.append(found)
            waiting.popleft()
        if len(running) > 2 or not found and running and steps % 3 == 0:
            slots.release(running.popleft())
        assert time.monotonic() < end and slots.memory.stats().nbytes <= 60
        time.sleep(0.0001)
    # What was announced and pushed out was read again, and nothing else was.
    assert 64 <= len(reader.reads) <= 192 + 6
    slots.memory.close()
