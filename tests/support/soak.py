"""A soak: many clients for a while against a server, some of which vanish, while adapters change on the disk."""

import asyncio
import dataclasses
import json
import os
import random
import statistics
import tempfile
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support import soak_questions
from tests.support.soak_answers import ANSWERED, Answer, judge
from tests.support.soak_clients import Tally, clients, kill_and_spawn

MB = 1e6
WARM_UP = 0.2  # of the time
# How much more memory the server may have in the last fifth of the time than in the second: whichever is more.
GROWTH, GROWTH_BYTES = 0.03, 20 * MB
# Counters that are shown, as what they have counted meanwhile.
COUNTERS = {
    "prompt tokens": ("mindlora_prompt_tokens_total", {}),
    "prompt tokens from the cache": ("mindlora_prompt_tokens_cached_total", {}),
    "generated tokens": ("mindlora_generated_tokens_total", {}),
    "evictions from slots": ("mindlora_adapter_evictions_total", {"tier": "slots"}),
    "evictions from memory": ("mindlora_adapter_evictions_total", {"tier": "memory"}),
    "adapters read": ("mindlora_adapter_loads_total", {"tier": "memory"}),
    "adapters refused": ("mindlora_adapter_failures_total", {"tier": "memory"}),
    "preemptions": ("mindlora_preemptions_total", {}),
    "cancelled": ("mindlora_requests_total", {"reason": "disconnected"}),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long and how much.

    Attributes:
        clients (int): In all; a tenth of them, one at least, are processes that are killed.
        seconds (float): How long they ask.
        adapters (int): How many the server gets.
        questions (int): For each model, on completions and on chats; it is asked all else once (soak_kinds).
        seed (int): Of all that is random.
    """

    clients: int = 100
    seconds: float = 600.0
    adapters: int = 12
    questions: int = 8
    seed: int = 0


def soak(server, folder, base, plan):
    """Runs a soak; returns its figures, among which ``defects`` must be empty.

    Args:
        server (object): With ``url`` and ``pid``. Nobody else asks it.
        folder (str): Where its folder adapters/ is.
        base (str): The base's name.
        plan (Plan): How long and how much.
    """
    adapters, tally = soak_questions.Adapters(folder, plan.adapters), Tally()
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        _until_known(client, adapters.names)
        questions = soak_questions.questions(client, base, adapters, plan.questions, plan.seed)
        before = metrics(client)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump([dataclasses.asdict(question) for question in questions], file)
            file.flush()
            samples = asyncio.run(_together(server, plan, questions, base, adapters, tally, file.name))
        after = _idle(client)
        settled = _settled(client, questions, adapters)
    memory = memory_figures(samples, plan.seconds)
    return {
        "plan": dataclasses.asdict(plan),
        "questions": len(questions),
        "outcomes": {f"{kind}: {outcome}": count for (kind, outcome), count in sorted(tally.outcomes.items())},
        "requests": sum(tally.outcomes.values()),
        "tokens in whole answers": tally.tokens,
        "first token, seconds": {f"p{part}": _percentile(tally.first, part) for part in (50, 99)},
        "sent again": tally.again,
        "adapters changed": adapters.changes,
        "server": {name: value(after, *key) - value(before, *key) for name, key in COUNTERS.items()},
        "memory": memory,
        "defects": [*tally.defects, *_not_returned(before, after), *settled, *_grown(memory)],
    }


async def _together(server, plan, questions, base, adapters, tally, path):
    """Lets the clients ask, changes adapters and looks at the server's memory; returns what _watch saw."""
    end, killed = time.monotonic() + plan.seconds, max(1, plan.clients // 10)
    errors = soak_questions.errors(base)
    asking = [
        client.run(end) for client in clients(server.url, questions, errors, tally, plan.clients - killed, plan.seed)
    ]
    lives = (min(1.0, plan.seconds / 4), min(15.0, plan.seconds / 2))
    asking += [
        kill_and_spawn(server.url, path, tally, random.Random(f"{plan.seed} killed {number}"), end, lives)
        for number in range(killed)
    ]
    asking.append(_change(adapters, random.Random(f"{plan.seed} changes"), end))
    samples, *_ = await asyncio.gather(_watch(server.pid, plan.seconds, end), *asking)
    return samples


async def _change(adapters, rng, end):
    """Changes adapters on the disk, and leaves whole ones."""
    while time.monotonic() < end:
        await asyncio.to_thread(adapters.change, rng)
        await asyncio.sleep(max(0.0, min(rng.uniform(0.1, 1), end - time.monotonic())))
    for name in adapters.names:
        await asyncio.to_thread(adapters.write, name)


async def _watch(pid, seconds, end):
    """Returns (seconds since the beginning, resident bytes) of a process, 200 times until ``end``."""
    samples = []
    while time.monotonic() < end:
        samples.append((seconds - (end - time.monotonic()), resident(pid)))
        await asyncio.sleep(seconds / 200)
    return samples


def resident(pid):
    """Returns the bytes of memory in which a process is."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_figures(samples, seconds):
    """Returns what samples of (seconds, bytes) say, in MB: five points, medians of two fifths, and the slope."""
    late = [(moment, size) for moment, size in samples if moment >= WARM_UP * seconds]
    fifths = [
        statistics.median(size for moment, size in samples if part <= 5 * moment / seconds < part + 1) / MB
        for part in range(5)
    ]
    middle = statistics.mean(moment for moment, _ in late)
    spread = sum((moment - middle) ** 2 for moment, _ in late)
    slope = sum((moment - middle) * size for moment, size in late) / spread / MB
    points = [samples[round(part * (len(samples) - 1) / 4)] for part in range(5)]
    return {
        "MB at five points": [round(size / MB, 1) for _, size in points],
        "MB, medians of the fifths": [round(size, 1) for size in fifths],
        "MB a minute after the warm-up": round(60 * slope, 3),
        "MB, last fifth less the second": round(fifths[4] - fifths[1], 2),
    }


def _grown(memory):
    second, last = (memory["MB, medians of the fifths"][part] for part in (1, 4))
    limit = max(GROWTH * second, GROWTH_BYTES / MB)
    return [f"memory grew from {second} to {last} MB"] if last - second > limit else []


def metrics(client):
    """Returns what /metrics says, as {(name, frozenset of labels): number}."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


def value(found, name, labels):
    """Returns a metric, 0 for one that is not there."""
    return found.get((name, frozenset(labels.items())), 0.0)


def _idle(client):
    """Returns the metrics once no request runs or waits, or as they are after 20 seconds."""
    end = time.monotonic() + 20
    while True:
        found = metrics(client)
        busy = value(found, "mindlora_requests_running", {}) + value(found, "mindlora_requests_waiting", {})
        if not busy or time.monotonic() > end:
            return found
        time.sleep(0.05)


def _not_returned(before, after):
    """Returns what the server still holds, and the errors of its own that it has counted."""
    blocks, free = (value(after, f"mindlora_cache_blocks{which}", {}) for which in ("", "_free"))
    left = {
        "requests run": value(after, "mindlora_requests_running", {}),
        "requests wait": value(after, "mindlora_requests_waiting", {}),
        "blocks are missing": blocks - free,
        "slots are leased": value(after, "mindlora_adapter_slots_leased", {}),
    }
    for (name, labels), count in after.items():
        status = dict(labels).get("status", "")
        if name == "mindlora_http_responses_total" and status.startswith("5"):
            left[f"answers had status {status}"] = count - value(before, name, dict(labels))
    return [f"{count:g} {what}" for what, count in left.items() if count]


def _settled(client, questions, adapters):
    """Returns what is wrong with the answers to a question to each model afterwards, when its files are whole."""
    seen, defects = set(), []
    for question in questions:
        body = json.loads(question.content)
        if body["model"] not in seen:
            seen.add(body["model"])
            response = client.post(question.path, json=body)
            answer = Answer(response.status_code)
            answer.take_whole(response.content)
            # For the one whose weights alternate, the first ones are there again.
            if judge(dataclasses.replace(question, answers=question.answers[:1]), answer) != ANSWERED:
                defects.append(f"afterwards: {question}: {answer}")
    return defects + [f"{name} was asked nothing" for name in adapters.names if name not in seen]


def _until_known(client, names):
    """Waits until a server lists the adapters that were written into its folder."""
    end = time.monotonic() + 20
    while not set(names) <= {model["id"] for model in client.get("/v1/models").json()["data"]}:
        assert time.monotonic() < end, "the server does not list the adapters"
        time.sleep(0.05)


def _percentile(seconds, part):
    return round(sorted(seconds)[int(part / 100 * len(seconds))], 4) if seconds else None
