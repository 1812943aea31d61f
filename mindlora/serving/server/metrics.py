"""/metrics: figures of the server and its engine for Prometheus."""

import contextlib
from typing import Any, Callable, Dict, Iterator, List

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from mindlora.serving.server.request_log import RequestRecord

OTHER = "other"


_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

# Fields of EngineSnapshot, and their descriptions.
_GAUGES = {
    "waiting": ("mindlora_requests_waiting", "Requests that wait for their first step."),
    "running": ("mindlora_requests_running", "Requests that steps compute."),
    "blocks_total": ("mindlora_cache_blocks", "Blocks of the key-value cache."),
    "blocks_free": ("mindlora_cache_blocks_free", "Blocks that no running request holds."),
    "blocks_cached": ("mindlora_cache_blocks_reusable", "Free blocks whose keys and values can be used again."),
    "slots_total": ("mindlora_adapter_slots", "Adapters that fit on the device."),
    "slots_used": ("mindlora_adapter_slots_used", "Slots that hold an adapter."),
}
# Fields of Counts, for each tier of the adapter cache.
_TIERS = {
    "hits": ("mindlora_adapter_hits", "Adapters that the tier had when a request needed them."),
    "misses": ("mindlora_adapter_misses", "Adapters that had to be brought to the tier."),
    "loads": ("mindlora_adapter_loads", "Adapters that were brought to the tier."),
    "evictions": ("mindlora_adapter_evictions", "Adapters that made room for others."),
    "failures": ("mindlora_adapter_failures", "Adapters that could not be read."),
    "seconds": ("mindlora_adapter_load_seconds", "Time spent on bringing adapters to the tier."),
}
# The same for single adapters.
_SLOTS = {
    "hits": ("mindlora_adapter_slot_hits", "Requests that found a busy adapter in a slot."),
    "loads": ("mindlora_adapter_slot_loads", "How often a busy adapter was copied into a slot."),
    "evictions": ("mindlora_adapter_slot_evictions", "How often a busy adapter made room for another."),
}
_COUNTERS = {
    "steps": ("mindlora_steps", "Steps of the engine."),
    "preemptions": ("mindlora_preemptions", "Requests that lost their blocks and were computed again."),
    "prompt_tokens": ("mindlora_prompt_tokens", "Tokens of prompts."),
    "cached_tokens": ("mindlora_prompt_tokens_cached", "Tokens of prompts that were in the cache."),
    "generated_tokens": ("mindlora_generated_tokens", "Tokens of answers."),
    "drafted_tokens": ("mindlora_drafted_tokens", "Tokens of answers that prompt lookup guessed."),
    "accepted_tokens": ("mindlora_drafted_tokens_accepted", "Guessed tokens that were right."),
}


class Busiest:
    """Gives the ``count`` most used names their own labels, and all others "other".

    A name replaces another when it has clearly been used more. A counter's series then ends, and a new one begins at 0:
    no series ever falls, which Prometheus would take for a restart. ``forget`` gets each name that loses its label.
    """

    def __init__(self, count: int, forget: Callable[[str], None]):
        self._count = count
        self._forget = forget
        self._used: Dict[str, int] = {}
        self._shown: Dict[str, None] = {}

    @property
    def shown(self) -> List[str]:
        """The names that have their own labels."""
        return list(self._shown)

    def label(self, name: str) -> str:
        """Counts one use of a name, and returns its label."""
        used = self._used[name] = self._used.get(name, 0) + 1
        if name in self._shown:
            return name
        if len(self._shown) >= self._count:
            least = min(self._shown, key=lambda shown: self._used[shown])
            if used < 10 + 1.1 * self._used[least]:
                return OTHER
            del self._shown[least]
            self._forget(least)
        self._shown[name] = None
        return name


class Metrics:
    """Counts events, by name for ``labels`` adapters, and asks the engine for the rest when it is read."""

    def __init__(self, engine: Any, labels: int):
        self._engine = engine
        self.registry = CollectorRegistry()
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self._between = self._histogram("time_between_tokens_seconds", "Between two tokens of an answer.", _BETWEEN)
        self._whole = self._histogram("request_seconds", "From a request's first byte to its answer's last.", _WHOLE)
        self._queue = self._histogram("queue_seconds", "From arrival until the first part is computed.", _FIRST)
        self._ended = self._counter("requests", "Requests for answers, by how they ended.", ["reason"])
        self._answers = self._counter("http_responses", "Answers to HTTP requests, by status.", ["status"])
        self._by_adapter = [
            self._counter("adapter_requests", "Requests for answers, the busiest adapters apart.", ["adapter"]),
            self._counter("adapter_prompt_tokens", "Tokens of prompts, the busiest adapters apart.", ["adapter"]),
            self._counter("adapter_generated_tokens", "Tokens of answers, the busiest adapters apart.", ["adapter"]),
        ]
        self._busiest = Busiest(labels, self._forget)
        self.registry.register(_EngineCollector(engine, self._busiest))

    def first_token(self, seconds: float) -> None:
        """Counts the time that an answer's first token took."""
        self._first.observe(seconds)

    def between_tokens(self, seconds: float, count: int) -> None:
        """Counts the time between the tokens of a piece."""
        for _ in range(count):
            self._between.observe(seconds)

    def count(self, record: RequestRecord) -> None:
        """Counts a request that has ended."""
        self._answers.labels(str(record.status or 499)).inc()
        if record.model is None:
            return
        self._ended.labels(record.reason or "unknown").inc()
        self._whole.observe(record.seconds)
        if record.queue_seconds is not None:
            self._queue.observe(record.queue_seconds)
        # A name that the engine has not accepted may be anything.
        if record.prompt_tokens:
            label = self._busiest.label(record.model)
            for counter, amount in zip(self._by_adapter, (1, record.prompt_tokens, record.generated_tokens)):
                counter.labels(label).inc(amount)

    def _forget(self, name):
        for counter in self._by_adapter:
            with contextlib.suppress(KeyError):
                counter.remove(name)

    def _histogram(self, name, text, buckets):
        return Histogram(f"mindlora_{name}", text, buckets=buckets, registry=self.registry)

    def _counter(self, name, text, labels):
        return Counter(f"mindlora_{name}", text, labels, registry=self.registry)


class _EngineCollector:
    """The engine's own counts."""

    def __init__(self, engine: Any, busiest: Busiest):
        self._engine = engine
        self._busiest = busiest

    def describe(self) -> Iterator[Metric]:
        """Returns no names, so that registering does not ask the engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the engine's snapshot."""
        snapshot = self._engine.snapshot()
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(snapshot, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(snapshot, field))
        yield from _tiers(snapshot.adapters)
        yield from _slots(snapshot.adapters, self._busiest.shown)


def _tiers(stats: Any) -> Iterator[Metric]:
    yield GaugeMetricFamily("mindlora_adapter_slots_leased", "Slots whose adapter requests use.", value=stats.leased)
    yield GaugeMetricFamily("mindlora_adapters_registered", "Adapters that requests can name.", value=stats.registered)
    yield GaugeMetricFamily("mindlora_adapters_in_memory", "Adapters in host memory.", value=stats.memory.resident)
    yield GaugeMetricFamily("mindlora_adapter_memory_bytes", "Bytes that they take.", value=stats.memory.nbytes)
    for field, (name, text) in _TIERS.items():
        family = CounterMetricFamily(name, text, labels=["tier"])
        for tier, counts in (("memory", stats.memory.counts), ("slots", stats.counts)):
            family.add_metric([tier], getattr(counts, field))
        yield family


def _slots(stats: Any, shown: List[str]) -> Iterator[Metric]:
    for field, (name, text) in _SLOTS.items():
        family = CounterMetricFamily(name, text, labels=["adapter"])
        for adapter in shown:
            if adapter in stats.adapters:
                family.add_metric([adapter], getattr(stats.adapters[adapter], field))
        yield family


def add_routes(router: APIRouter) -> None:
    """Adds /metrics."""

    @router.get("/metrics")
    def show_metrics(request: Request) -> Response:
        text = generate_latest(request.app.state.context.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)
