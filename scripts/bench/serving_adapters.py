"""Many adapters, for the benchmark serving: loaded from disk, switched, registered by the thousand, and under load."""

import asyncio
import os
import time
from typing import Any, Callable, Dict, Iterator, List

import numpy as np

from bench.serving_engine import Answers, Ratio, answer, compare, resident, timed_answers, timed_step
from bench.serving_model import SHAPES, Files, Size, popularity, prompts
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.engine import Engine
from mindlora.serving.server.run import create_app
from mindlora.serving.server.settings import ServerSettings

# 30 MB, with a Llama of width 1024 and four layers.
LARGE_RANK = 96
FEW, MANY, USED = 10, 10_000, 8
PROMPT, NEW_TOKENS = 16, 13
# Of a load.
ADAPTERS, SLOTS, RUNNING = 64, 16, 16
NAMES = [f"r16-{number}" for number in range(ADAPTERS)]
# More than the engine can handle, so that tokens/s measure its capacity and not the demand.
OFFERED = 1.2


def adapters(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of the adapter cache."""
    for table in (from_disk, switching):
        yield table(files, size)
    yield from registered(files, size)


def from_disk(files: Files, size: Size) -> Dict[str, Any]:
    """Returns the table of the time to the first token with an adapter on disk and with one in a slot."""
    cycle = [f"large-{number}" for number in range(4)]
    paths = files.adapters(size, dict.fromkeys(["resident", *cycle], LARGE_RANK))
    nbytes = os.path.getsize(os.path.join(paths["resident"], "adapter_model.safetensors"))
    # Memory holds two adapters and the slots three, one of them pinned: with four in rotation, none is present when its
    # turn comes.
    engine = files.engine(
        size, AdapterRegistry(None, paths), slots=3, max_rank=LARGE_RANK, adapter_memory=5 * nbytes // 2
    ).start()
    seeds = iter(range(1 << 30))
    turns = 0

    def first_token(adapter: str) -> float:
        # All prompts differ, so that none is in the cache.
        request = answer(engine, prompts(size, 1, PROMPT, next(seeds)), [adapter], [1]).requests[0]
        return request.first_token - request.arrived

    def disk() -> float:
        nonlocal turns
        turns += 1
        return first_token(cycle[turns % len(cycle)])

    try:
        engine.adapters.pin("resident")
        sides = {"resident": lambda: first_token("resident"), "from disk": disk}
        ratios = {"ms, from disk - resident": Ratio("from disk", "resident", "goal: at most 50", "difference")}
        title = f"time to the first token, prompt of {PROMPT} tokens, adapter of {nbytes / 1e6:.1f} MB, float32"
        remark = "from disk: read, checked, packed and written to a slot; its files are in the page cache"
        what = "milliseconds to the first token"
        table = compare(title, sides, size.rounds, 1, ratios, remark, what)
        loads = engine.adapters.stats().memory.counts.loads
        assert loads == turns + 1, f"{turns} turns read {loads} adapters"
        return table
    finally:
        engine.stop()


def switching(files: Files, size: Size) -> Dict[str, Any]:
    """Returns the table of steps with the previous step's adapter and of steps with another."""
    names = ["r16-0", "r16-1"]
    context = size.contexts[0]
    registry = AdapterRegistry(None, files.adapters(size, dict.fromkeys(names, 16)))
    engine = files.engine(size, registry, slots=2, max_rank=16)
    engine.runner.warm_up()
    leases = resident(engine, names)
    # Two requests, so that both sides build the arrays anew.
    same, again, other = (
        timed_step(engine.runner, [leases[name]], context, size) for name in (names[0], names[0], names[1])
    )
    # Each side ends with the first adapter, with which the next side begins or from which it switches.
    sides = {
        "the adapter of the step before": lambda: (again() + same()) / 2,
        "another resident adapter": lambda: (other() + same()) / 2,
    }
    first, second = sides
    ratios = {"ms, another - the same": Ratio(second, first, "goal: below 0.1", "difference")}
    title = f"a step of batch 1 after one with another adapter, context {context}, float32, rank 16"
    try:
        return compare(title, sides, 4 * size.rounds, 1, ratios, "means of two steps")
    finally:
        engine.adapters.memory.close()


def registered(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of the engine's steps and of /v1/models, with few and with many registered adapters."""
    engines = {
        f"{count:,} registered": files.engine(
            size, AdapterRegistry(adapter_folder(files, size, count)), slots=USED, max_rank=16
        ).start()
        for count in (FEW, MANY)
    }
    few, many = engines
    used = [f"a-{number:05d}" for number in range(USED)]
    try:
        sides = {
            name: timed_answers(engine, prompts(size, USED, size.contexts[0]), used, NEW_TOKENS)
            for name, engine in engines.items()
        }
        ratios = {f"{many} / {few}": Ratio(many, few, "goal: at most 1.05")}
        title = f"the whole engine, batch {USED} with {USED} adapters, contexts from {size.contexts[0]}, float32"
        yield compare(title, sides, size.rounds, USED, ratios, "the adapters of a folder")
        yield model_lists(engines, 25 * size.rounds)
    finally:
        for engine in engines.values():
            engine.stop()


def adapter_folder(files: Files, size: Size, count: int) -> str:
    """Returns a folder with ``count`` adapters: those in use are random, the others are links to one of them."""
    folder = os.path.join(files.folder, f"registered-{count}")
    os.makedirs(folder)
    random = files.adapters(size, {f"r16-{number}": 16 for number in range(USED)})
    for number in range(count):
        source = random[f"r16-{number % USED}"]
        path = os.path.join(folder, f"a-{number:05d}")
        os.mkdir(path)
        for file in os.listdir(source):
            os.link(os.path.join(source, file), os.path.join(path, file))
    return folder


def model_lists(engines: Dict[str, Engine], rounds: int) -> Dict[str, Any]:
    """Returns the table of GET /v1/models, called through ASGI, with the 99th percentiles."""
    loop = asyncio.new_event_loop()
    taken: Dict[str, List[float]] = {name: [] for name in engines}
    sizes: Dict[str, int] = {}

    def side(name: str) -> Callable[[], float]:
        app = create_app(engines[name], ServerSettings(request_log="requests.txt"))

        def run() -> float:
            begin = time.perf_counter()
            status, sizes[name] = loop.run_until_complete(get(app, "/v1/models"))
            taken[name].append(time.perf_counter() - begin)
            assert status == 200, f"/v1/models answered {status}"
            return taken[name][-1]

        return run

    few, many = engines
    try:
        sides = {name: side(name) for name in engines}
        ratios = {f"{many} / {few}": Ratio(many, few)}
        table = compare("GET /v1/models", sides, rounds, 1, ratios, "", "milliseconds of a call")
    finally:
        loop.close()
    p99 = {name: percentile(seconds[-rounds:], 99) for name, seconds in taken.items()}
    table["ratios"][f"99th percentile, {many} / {few}"] = {"value": p99[many] / p99[few], "goal": "goal: at most 1.05"}
    table["more"] = {name: {"99th percentile, ms": 1e3 * p99[name], "bytes": sizes[name]} for name in engines}
    table["remark"] = "the app without sockets; the client accepts gzip; tokens/s here are calls/s"
    return table


async def get(app: Callable[..., Any], path: str) -> List[int]:
    """Returns the status and bytes of an ASGI app's answer."""
    sent: List[Dict[str, Any]] = []

    async def receive() -> Dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"accept-encoding", b"gzip, deflate")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http"}
    scope.update(path=path, raw_path=path.encode(), query_string=b"", root_path="", headers=headers)
    await app({**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000)}, receive, send)
    return [sent[0]["status"], sum(len(message.get("body", b"")) for message in sent)]


def percentile(values: List[float], percent: float) -> float:
    """Returns the smallest value that at least ``percent`` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0.0


class Load:
    """Requests with the same lengths and times for every side, but new tokens each time, so that none is cached."""

    def __init__(self, size: Size):
        rng = np.random.default_rng(0)
        self.size = size
        self.count = max(2, size.contexts[0] // 21) * RUNNING
        longest = min(96, max(size.contexts))
        self.lengths = rng.integers(longest // 6, longest + 1, self.count)
        self.new_tokens = rng.integers(longest // 12, longest // 2 + 1, self.count).tolist()
        self.gaps = rng.exponential(1.0, self.count)
        self.total = sum(self.new_tokens)
        self._tokens = np.random.default_rng(1)

    def prompts(self) -> List[List[int]]:
        """Returns prompts that did not occur before."""
        return [self._tokens.integers(3, self.size.vocabulary, length).tolist() for length in self.lengths]

    def moments(self, tokens_per_second: float) -> List[float]:
        """Returns the arrival times of requests for ``tokens_per_second`` tokens per second: a Poisson process."""
        return np.cumsum(self.gaps * self.total / self.count / tokens_per_second).tolist()


def load(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the table of a load, by its adapters' popularity."""
    registry = AdapterRegistry(None, files.adapters(size, dict.fromkeys(NAMES, 16)))
    engine = files.engine(size, registry, slots=SLOTS, max_rank=16, max_running=RUNNING).start()
    try:
        for name in NAMES:
            engine.adapters.memory.load(name)
        yield by_popularity(engine, Load(size), max(1, size.rounds // 10))
    finally:
        engine.stop()


def by_popularity(engine: Engine, load: Load, rounds: int) -> Dict[str, Any]:
    """Returns the table of a load, with a side for each popularity."""
    one = popularity("identical", load.count, NAMES)
    begin = time.perf_counter()
    for _ in range(2):  # The first load is slower.
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
    slots = stats.counts
    memory = stats.memory.counts
    return {
        "slot hits": slots.hits,
        "slot misses": slots.misses,
        "memory hits": memory.hits,
        "memory misses": memory.misses,
        "evictions": slots.evictions,
        "preemptions": engine.snapshot().preemptions,
    }


def _shares(counts: Dict[str, int]) -> Dict[str, float]:
    """Returns each tier's hit rate, and how often adapters and requests were evicted."""
    rates = {
        f"{tier} hit rate": counts[f"{tier} hits"] / max(1, counts[f"{tier} hits"] + counts[f"{tier} misses"])
        for tier in ("slot", "memory")
    }
    return {**rates, "evictions": counts["evictions"], "preemptions": counts["preemptions"]}


def _first_tokens(answers: List[Answers]) -> Dict[str, float]:
    """Returns percentiles of the time to the first token."""
    seconds = [request.first_token - request.arrived for one in answers for request in one.requests]
    return {f"first token p{percent}, ms": 1e3 * percentile(seconds, percent) for percent in (50, 99)}
