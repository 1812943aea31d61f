"""Requests that arrive at random, for bench_serving.py: many popular and unpopular adapters against one."""

import time
from typing import Any, Callable, Dict, Iterator, List

import numpy as np
from bench_serving_adapters import percentile
from bench_serving_engine import Answers, answer
from bench_serving_model import SHAPES, Files, Ratio, Size, compare, popularity

from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.engine import Engine

ADAPTERS, SLOTS, RUNNING = 64, 16, 16
NAMES = [f"r16-{number}" for number in range(ADAPTERS)]
# More than the engine can do, so that tokens/s are what it does and not what it is asked for.
OFFERED = 1.2


class Load:
    """The same lengths and moments for every side, and other tokens each time, so that nothing is in the cache."""

    def __init__(self, size: Size):
        rng = np.random.default_rng(0)
        self.size, self.count = size, max(2, size.contexts[0] // 21) * RUNNING
        longest = min(96, max(size.contexts))
        self.lengths = rng.integers(longest // 6, longest + 1, self.count)
        self.new_tokens = rng.integers(longest // 12, longest // 2 + 1, self.count).tolist()
        self.gaps = rng.exponential(1.0, self.count)
        self.total = sum(self.new_tokens)
        self._tokens = np.random.default_rng(1)

    def prompts(self) -> List[List[int]]:
        """Returns prompts that were not there before."""
        return [self._tokens.integers(3, self.size.vocabulary, length).tolist() for length in self.lengths]

    def moments(self, tokens_per_second: float) -> List[float]:
        """Returns when requests arrive that ask for so many tokens a second: a Poisson process."""
        return np.cumsum(self.gaps * self.total / self.count / tokens_per_second).tolist()


def load(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the table of a load by popularity of its adapters."""
    registry = AdapterRegistry(None, files.adapters(size, dict.fromkeys(NAMES, 16)))
    engine = files.engine(size, registry, slots=SLOTS, max_rank=16, max_running=RUNNING).start()
    try:
        for name in NAMES:
            engine.adapters.memory.load(name)
        yield by_popularity(engine, Load(size), max(1, size.rounds // 10))
    finally:
        engine.stop()


def by_popularity(engine: Engine, load: Load, rounds: int) -> Dict[str, Any]:
    """Returns the table of a load, a side for each popularity."""
    one = popularity("identical", load.count, NAMES)
    begin = time.perf_counter()
    for _ in range(2):  # the first one is slower
        begin = time.perf_counter()
        answer(engine, load.prompts(), one, load.new_tokens)
    capacity = load.total / (time.perf_counter() - begin)
    moments = load.moments(OFFERED * capacity)
    seen: Dict[str, List[Answers]] = {shape: [] for shape in SHAPES}
    counted: Dict[str, Dict[str, int]] = {shape: dict.fromkeys(_counts(engine), 0) for shape in SHAPES}

    def side(shape: str) -> Callable[[], float]:
        def run() -> float:
            names = popularity(shape, load.count, NAMES, len(seen[shape]))
            before = _counts(engine)
            answers = answer(engine, load.prompts(), names, load.new_tokens, moments)
            seen[shape].append(answers)
            for key, value in _counts(engine).items():
                counted[shape][key] += value - before[key]
            return max(times[-1] for times in answers.times) - answers.begin - moments[0]

        return run

    first = SHAPES[0]
    goals = {"zipf": "goal: at least 0.9"}
    ratios = {
        f"tokens/s, {shape} / {first}": Ratio(shape, first, goals.get(shape, ""), "tokens") for shape in SHAPES[1:]
    }
    title = f"{load.count} requests, Poisson arrivals, {ADAPTERS} adapters of rank 16 over {SLOTS} slots, float32"
    remark = (
        f"prompts of {min(load.lengths)} to {max(load.lengths)} tokens, answers of {min(load.new_tokens)} to "
        f"{max(load.new_tokens)}; {OFFERED * capacity:.0f} tokens/s asked for, {OFFERED:g} of what the engine gave one "
        f"adapter when all came at once; at most {RUNNING} run; all adapters fit into host memory; {first}: one adapter"
    )
    sides = {shape: side(shape) for shape in SHAPES}
    table = compare(title, sides, rounds, load.total, ratios, remark, "milliseconds of the load", warm_up=0)
    table["more"] = {shape: {**_shares(counted[shape]), **_first_tokens(seen[shape])} for shape in SHAPES}
    return table


def _counts(engine: Engine) -> Dict[str, int]:
    stats = engine.adapters.stats()
    slots, memory = stats.counts, stats.memory.counts
    return {
        "slot hits": slots.hits,
        "slot misses": slots.misses,
        "memory hits": memory.hits,
        "memory misses": memory.misses,
        "evictions": slots.evictions,
        "preemptions": engine.snapshot().preemptions,
    }


def _shares(counts: Dict[str, int]) -> Dict[str, float]:
    """Returns the hit rate of each tier, and how often adapters and requests had to make room."""
    rates = {
        f"{tier} hit rate": counts[f"{tier} hits"] / max(1, counts[f"{tier} hits"] + counts[f"{tier} misses"])
        for tier in ("slot", "memory")
    }
    return {**rates, "evictions": counts["evictions"], "preemptions": counts["preemptions"]}


def _first_tokens(answers: List[Answers]) -> Dict[str, float]:
    """Returns percentiles of the time to the first token."""
    seconds = [request.first_token - request.arrived for one in answers for request in one.requests]
    return {f"first token p{percent}, ms": 1e3 * percentile(seconds, percent) for percent in (50, 99)}
