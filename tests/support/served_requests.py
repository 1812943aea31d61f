"""An engine without a network: adapters, requests and a cache of which every entry says whose it is, all by a seed."""

import collections
import itertools
import random

import numpy as np

from mindlora.core.errors import AdapterError, QueueFullError
from mindlora.serving.blocks import BlockPool
from mindlora.serving.request import Lease, Request, Sampling, State
from mindlora.serving.runner import step_inputs
from mindlora.serving.scheduler import Scheduler


class FakeAdapters:
    """Slots that are bounded, written once a step and kept while leased; loads take some steps; some names fail.

    ``invocations`` has the invocation tokens of those adapters that act from these on.
    """

    def __init__(self, slots=2, load_steps=lambda: 0, broken=(), invocations=None):
        self.load_steps, self.broken, self.invocations = load_steps, set(broken), invocations or {}
        self.holds = [None] * slots  # (name, version) in each slot
        self.recent = list(range(slots))  # slots, the least recently used first
        self.leases = collections.Counter()  # by slot
        self.versions = collections.defaultdict(itertools.count(1).__next__)
        self.ready_at, self.now, self.written = {}, 0, False
        self.given = []  # names in the order in which they got slots

    def begin_step(self):
        self.now, self.written = self.now + 1, False

    def prefetch(self, name):
        if name not in self.ready_at:
            self.ready_at[name] = self.now + self.load_steps()

    def replace(self, name):
        """The files of an adapter change on the disk."""
        self.versions.pop(name, None)

    def acquire(self, name):
        if name in self.broken:
            raise AdapterError(f"{name} is damaged.")
        wanted = (name, self.versions[name])
        if wanted not in self.holds:
            idle = [slot for slot in self.recent if not self.leases[slot]]
            if self.now < self.ready_at[name] or self.written or not idle:
                return None
            self.holds[idle[0]] = wanted
            self.written = True
            self.given.append(name)
        slot = self.holds.index(wanted)
        self.recent.append(self.recent.pop(self.recent.index(slot)))
        self.leases[slot] += 1
        return Lease(name, slot, wanted[1], self.invocations.get(name, ()))

    def release(self, lease):
        assert self.holds[lease.slot] == (lease.name, lease.version)
        assert self.leases[lease.slot] > 0
        self.leases[lease.slot] -= 1

    def lacks_slot(self, name):
        return self.now >= self.ready_at[name] and all(self.leases[slot] for slot in self.recent)


def request(prompt=4, new=4, adapter=None, token=1):
    """Returns a request; ``prompt`` is a list of tokens or how many there are."""
    tokens = [token] * prompt if isinstance(prompt, int) else list(prompt)
    return Request(tokens, Sampling(max_tokens=new), adapter)


def scheduler(
    blocks=64, block_size=4, running=4, step=32, waiting=10_000, length=256, adapters=None, lookup=0, drafted=64
):
    """Returns a small scheduler."""
    pool = BlockPool(blocks, block_size)
    return Scheduler(pool, adapters or FakeAdapters(), running, step, waiting, length, lookup, drafted)


class Engine:
    """Steps a scheduler as the engine does, and looks after each call whether everything is as it must be.

    The cache is an array with one number for each token: a fingerprint of the adapter's version and of all tokens up
    to this one. Each step writes those of its tokens where slot_mapping says, and then reads what block_tables says.
    """

    def __init__(self, scheduler, seed=0):
        self.scheduler, self.random = scheduler, random.Random(seed)
        self.cache = np.full(scheduler.pool.num_blocks * scheduler.pool.block_size, -1, np.int64)
        self.added, self.live, self.ended, self.accepted = [], [], [], 0

    def add(self, *requests):
        for one in requests:
            try:
                self.scheduler.add(one)
            except QueueFullError:
                continue
            self.added.append(one)
            self.live.append(one)
        self.check()

    def cancel(self, one):
        if self.scheduler.cancel(one):
            self.ended.append(one)
        self.check()

    def step(self, between=lambda: None):
        """One step; ``between`` is called while the network would be computing. Returns the parts."""
        adapters = self.scheduler.adapters
        adapters.begin_step()
        alone = [r for r in self.scheduler.running if len(r.tokens) - r.computed == 1]
        parts = self.scheduler.plan()
        self.ended += self.scheduler.failed
        self.scheduler.failed.clear()
        self.check_parts(parts, alone)
        if parts:
            self.compute(parts)
        sampling = [part for part in parts if part.samples]
        between()
        self.scheduler.advance(parts)
        self.check()
        for part in sampling:
            if part.request.state is State.RUNNING:
                self.take(part)
        self.check()
        return parts

    def take(self, part):
        """Appends the tokens that a step gave to a request; mostly its drafts are right."""
        one, right = part.request, 0
        while right < len(part.drafts) and self.random.random() < 0.8:
            one.tokens.append(part.drafts[right])
            self.scheduler.accept(one)
            right += 1
        one.tokens.append(self.random.randrange(3))
        if part.drafts:
            one.lookup.note(right)
            self.accepted += right
        if len(one.generated) == one.sampling.max_tokens:
            assert self.scheduler.finish(one, "length")
            self.ended.append(one)

    def until(self, condition, limit=200):
        """Steps until a condition holds, which must be within ``limit`` steps."""
        while not condition():
            self.step()
            limit -= 1
            assert limit > 0, "it does not come to that"

    def drain(self, limit=10_000):
        """Steps until nothing is left, which must be within ``limit`` steps, then checks that all is given back."""
        self.until(lambda: not self.scheduler.running and not self.scheduler.waiting_count, limit)
        assert sorted(r.number for r in self.ended) == sorted(r.number for r in self.added)
        assert all(r.state is State.FINISHED and not r.blocks and r.lease is None for r in self.added)
        assert self.scheduler.pool.blocks_available == self.scheduler.pool.num_blocks
        assert not +self.scheduler.adapters.leases

    def compute(self, parts):
        """Writes the fingerprints of the step's tokens, then reads those of all tokens of its requests."""
        pool, expected = self.scheduler.pool, [fingerprints(part) for part in parts]
        inputs = step_inputs(parts, pool.block_size, pool.num_blocks)
        slots = [part.request.slot for part in parts]
        acting = inputs.positions >= np.repeat([part.request.adapted_from for part in parts], inputs.query_lengths)
        assert inputs.slots.tolist() == np.where(acting, np.repeat(slots, inputs.query_lengths), -1).tolist()
        # Of a slot that there is not, the pools' kernel on Ascend could not say that there is none.
        assert set(slots) <= {-1, *range(len(self.scheduler.adapters.holds))}
        written = [np.array(e[p.start : p.start + len(p.tokens)]) for e, p in zip(expected, parts)]
        assert len(set(inputs.slot_mapping.tolist())) == len(inputs.slot_mapping), "two tokens in one place"
        self.cache[inputs.slot_mapping] = np.concatenate(written)
        places = inputs.block_tables[:, :, None] * pool.block_size + np.arange(pool.block_size)
        for row, wanted, length in zip(places.reshape(len(parts), -1), expected, inputs.context_lengths):
            assert self.cache[row[:length]].tolist() == wanted[:length], "a request reads what is not its own"

    def check_parts(self, parts, alone):
        plan, size = self.scheduler, self.scheduler.pool.block_size
        assert len({part.request.number for part in parts}) == len(parts)
        assert sum(len(part.tokens) for part in parts) <= plan.max_tokens_per_step
        if any(part.drafts for part in parts):
            assert sum(len(part.tokens) for part in parts) <= plan.drafted_tokens
        for part in parts:
            assert part.start == part.request.computed and part.count >= 1
            assert part.start + part.count <= len(part.request.tokens)
            needed = -(-(part.start + len(part.tokens)) // size)
            assert len(part.request.blocks) == needed or (plan.prompt_lookup and len(part.request.blocks) > needed)
            assert len(part.request.generated) + len(part.drafts) < max(1, part.request.sampling.max_tokens)
            assert part.request.state is State.RUNNING
        # Those that need one token come first, and all of them but those that were preempted.
        kept = [one for one in alone if one.state is State.RUNNING]
        assert [part.request.number for part in parts[: len(kept)]] == [one.number for one in kept]

    def check(self):
        plan, pool = self.scheduler, self.scheduler.pool
        assert len(plan.running) <= plan.max_running
        self.live = live = [one for one in self.live if one.state is not State.FINISHED]
        assert {one.number for one in live} == {one.number for one in plan.running + plan.waiting}
        assert len(live) == len(plan.running) + plan.waiting_count
        users = collections.Counter(block for one in live for block in one.blocks)
        assert [pool.users(block) for block in range(pool.num_blocks)] == [users[b] for b in range(pool.num_blocks)]
        assert pool.blocks_free + pool.blocks_cached == pool.blocks_available == pool.num_blocks - len(users)
        assert all(one.state is State.RUNNING for one in plan.running)
        assert sum(one.state is State.RUNNING for one in live) == len(plan.running)
        assert all(one.computed <= len(one.tokens) and one.cached < len(one.prompt) for one in plan.running)
        assert not any(one.computed or one.blocks for one in plan.waiting)
        leases = collections.Counter(one.lease.slot for one in live if one.lease is not None)
        assert +plan.adapters.leases == leases
        assert all(one.lease is not None for one in plan.running if one.adapter is not None)


def fingerprints(part):
    """Returns a number for each token of a request and its drafts: of the adapter's version and all tokens up to it.

    Those before the first token that the adapter acts on are the base's.
    """
    one = part.request
    value, found = 0, []
    for place, token in enumerate([*one.tokens, *part.drafts]):
        if one.lease is not None and place == one.adapted_from:
            value = hash((value, one.lease.name, one.lease.version))
        value = hash((value, token)) >> 1
        found.append(value)
    return found
