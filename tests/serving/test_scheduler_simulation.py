"""Whole lives of a scheduler by seed: tiny caches that preempt all the time, few slots, failures, cancellations.

tests/support/served_requests.py looks after every call whether everything is as it must be.
"""

import random

import pytest

from tests.support.served_requests import Engine, FakeAdapters, request, scheduler

NAMES = (None, "a", "b", "c", "d", "e", "bad")


class Life:
    """Callers of all kinds, by a seed."""

    def __init__(self, seed, steps):
        self.random, self.steps = random.Random(seed), steps
        choose = self.random.choice
        size, blocks, running = choose([1, 2, 3, 4, 8]), choose([4, 6, 10, 16, 40]), choose([2, 3, 4, 8])
        invocations = {"c": (1,), "d": (0, 1)}
        self.adapters = FakeAdapters(choose([1, 2, 3]), lambda: choose([0, 0, 1, 5, 30]), {"bad"}, invocations)
        budget, waiting = running + choose([0, 1, 5, 30]), choose([3, 1000])
        lookup, drafted = choose([0, 0, 3, 9]), choose([running, 7, 64])
        self.scheduler = scheduler(blocks, size, running, budget, waiting, 200, self.adapters, lookup, drafted)
        self.engine = Engine(self.scheduler, seed)
        self.room = min(blocks * size + 1, 200)

    def request(self):
        choose, size = self.random.randint, self.scheduler.pool.block_size
        length = choose(1, self.room - 1)
        if self.random.random() < 0.6:
            length = min(length, 2 * size + 1)
        alike = self.random.random() < 0.5
        prompt = [1] * length if alike else [self.random.randrange(2) for _ in range(length)]
        return request(prompt, choose(1, min(self.room - length, 40)), self.random.choice(NAMES))

    def disturb(self):
        """What may happen at any moment, while a step is computed too."""
        live = self.scheduler.running + self.scheduler.waiting
        if live and self.random.random() < 0.05:
            self.engine.cancel(self.random.choice(live))
        if self.random.random() < 0.1:
            self.engine.add(self.request())
        if self.random.random() < 0.03:
            self.adapters.replace(self.random.choice("abc"))

    def run(self):
        for _ in range(self.steps):
            if self.random.random() < 0.3:
                self.engine.add(*[self.request() for _ in range(self.random.choice([1, 1, 5]))])
            self.disturb()
            self.engine.step(self.disturb)
        self.engine.drain()


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_every_request_ends_once_reads_its_own_tokens_and_gives_everything_back(first):
    lives = [Life(seed, steps=80) for seed in range(first, first + 10)]
    for life in lives:
        life.run()
    # What these lives are for has happened in them.
    assert sum(life.scheduler.preemptions for life in lives) > 10
    assert sum(life.scheduler.pool.hits for life in lives) > 50
    assert sum(life.scheduler.pool.evictions for life in lives) > 100
    assert sum(life.engine.accepted for life in lives) > 100
    reasons = [one.finish_reason for life in lives for one in life.engine.ended]
    assert min(reasons.count(reason) for reason in ("length", "cancelled", "error")) > 20
