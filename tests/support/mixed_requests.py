"""Many requests to a real engine at once, by a seed: each answer against that of the request alone and of the model.

The engine is too small for them on purpose: requests lose their blocks, adapters their slots, callers their patience.
"""

import dataclasses
import itertools
import os
import random
import threading
import time
from typing import Dict, List, Optional, Tuple

import numpy as np

from mindlora.serving.request import Sampling
from tests.support import tiny_serving
from tests.support.tiny_serving import (
    LAYERS,
    SHAPES,
    Plain,
    adapter,
    base_weights,
    merged,
    vocabulary,
    with_magnitudes,
    with_tables,
)

PATIENCE = 120  # Seconds that no answer takes but for a defect.
# Two logits that are nearer than this are a tie: rounding may let either win.
TIE = 1e-3
MARKED = ("marked-0", "marked-1", "marked-2")


@dataclasses.dataclass(frozen=True)
class Job:
    """A request to come: after ``arrives`` seconds, and it is cancelled after so many tokens, if at all."""

    prompt: Tuple[int, ...]
    adapter: Optional[str]
    new: int
    arrives: float = 0.0
    cancelled_after: Optional[int] = None


class Answer:
    """Collects what comes for a job.

    Every other one that is cancelled is so by a thread of its own, while the engine computes its next step.
    """

    def __init__(self, engine, job, **sampling):
        self.job, self.tokens, self.reason, self.error, self._ended = job, [], None, None, threading.Event()
        self.text, self.logprobs = "", []
        self.from_outside = bool(job.cancelled_after and job.cancelled_after % 2)
        settings = Sampling(**{"max_tokens": job.new, "temperature": 0.0, "ignore_eos": True, **sampling})
        self.stream = engine.submit(list(job.prompt), settings, job.adapter)
        self.stream.add_listener(self._take)
        if job.cancelled_after == 0:
            self.stream.cancel()

    def _take(self, piece):
        self.tokens += piece.tokens
        self.text += piece.text
        self.logprobs += piece.logprobs or ()
        if piece.finish_reason is not None:
            self.reason, self.error = piece.finish_reason, piece.error
            self._ended.set()
        elif len(self.tokens) == self.job.cancelled_after:
            if self.from_outside:
                threading.Timer(0.001 * (1 + len(self.job.prompt) % 4), self.stream.cancel).start()
            else:
                self.stream.cancel()

    def wait(self):
        """Waits for the end; returns the answer itself."""
        assert self._ended.wait(PATIENCE), f"{self.job} was not answered"
        return self

    def wait_for(self, tokens):
        """Waits until so many tokens have come."""
        end = time.monotonic() + PATIENCE
        while len(self.tokens) < tokens:
            assert time.monotonic() < end
            time.sleep(0.001)


@dataclasses.dataclass
class Verdict:
    """What was found. ``provoked`` must all be above zero, and ``defects`` empty."""

    answers: int = 0
    tokens: int = 0
    ties: int = 0
    provoked: Dict[str, int] = dataclasses.field(default_factory=dict)
    defects: List[str] = dataclasses.field(default_factory=list)


class MixedServing:
    """A small base with adapters of many kinds, the engine that serves them, and the merged models as an oracle.

    Args:
        folder (str): Where to write base and adapters.
        adapters (int): How many, besides the marked ones. Default: 4, pairs alone; from the fifth on DoRAs and
            own tables are among them, for which further graphs are compiled.
        sizes: EngineSettings'.
    """

    def __init__(self, folder, adapters=4, **sizes):
        self.base = base_weights()
        self.folder = os.path.join(str(folder), "adapters")
        made = {f"adapter-{number}": _kind(number) for number in range(adapters)}
        self.marks = {}
        for name, (mark, one) in zip(MARKED, _marked(self.base)):
            made[name], self.marks[name] = one, mark
        for name, one in made.items():
            tiny_serving.save_adapter(self.folder, name, one)
        self.names = [None, *made]
        self._weights = {name: merged(self.base, one) for name, one in made.items()}
        self._weights[None] = self.base
        checkpoint = tiny_serving.save_base(os.path.join(str(folder), "base.ckpt"), self.base)
        self.engine = tiny_serving.engine(checkpoint, self.folder, **{"num_blocks": 24, **sizes})
        self.plain = Plain()

    def jobs(self, count, seed, seconds):
        """Returns requests that arrive within so many seconds, ordered by time."""
        rng = random.Random(seed)
        beginnings = [_tokens(rng, 13) for _ in range(3)]
        result = []
        for arrives in sorted(rng.uniform(0, seconds) for _ in range(count)):
            prompt = rng.choice([(), (), *beginnings]) + _tokens(rng, rng.randint(1, 17))
            new = rng.randint(1, 18)
            cancelled = rng.randrange(new) if rng.random() < 0.15 else None
            result.append(Job(prompt, rng.choice(self.names), new, arrives, cancelled))
        return result

    def together(self, jobs):
        """Sends requests at their times; returns the answers when all have come."""
        begun, answers = time.monotonic(), []
        for job in jobs:
            time.sleep(max(0.0, begun + job.arrives - time.monotonic()))
            answers.append(Answer(self.engine, job))
        return [answer.wait() for answer in answers]

    def alone(self, job, **sampling):
        """Returns the tokens of a request that has the engine, with an empty cache, for itself."""
        pool = self.engine.scheduler.pool
        pool.free(pool.allocate(pool.blocks_available))
        answer = Answer(self.engine, dataclasses.replace(job, cancelled_after=None), **sampling).wait()
        assert answer.stream.request.cached == 0
        return answer.tokens

    def of_model(self, job, tokens):
        """Returns (at, is a tie) of the first token that is not the merged model's or where its logits tie, or None."""
        return self.of_weights(self._weights[job.adapter], job, tokens)

    def of_weights(self, weights, job, tokens):
        """As of_model, for weights that are given."""
        logits = self.plain.logits(weights, [*job.prompt, *tokens[:-1]])[len(job.prompt) - 1 :]
        for at, (row, token) in enumerate(zip(logits, tokens)):
            second, first = np.partition(row, -2)[-2:]
            if first - second < TIE or row.argmax() != token:
                return at, first - second < TIE
        return None

    def judge(self, jobs):
        """Answers requests together and then each alone, and compares."""
        before, verdict = self.engine.snapshot(), Verdict(len(jobs))
        answers = self.together(jobs)
        after = self.engine.snapshot()
        verdict.provoked = {
            "preemptions": after.preemptions - before.preemptions,
            "evictions": after.adapters.counts.evictions - before.adapters.counts.evictions,
            "tokens from the cache": after.cached_tokens - before.cached_tokens,
            "cancelled before an answer": sum(a.reason == "cancelled" and not a.tokens for a in answers),
            "cancelled within one": sum(a.reason == "cancelled" and bool(a.tokens) for a in answers),
        }
        for answer in sorted(answers, key=lambda answer: str(answer.job.adapter)):
            self._compare(answer, verdict)
        verdict.defects += returned(self.engine)
        return verdict

    def _compare(self, answer, verdict):
        job, tokens = answer.job, answer.tokens
        verdict.tokens += len(tokens)
        ends = {"length"} if job.cancelled_after is None else {"cancelled"}
        # One from outside may come too late.
        ends |= {"length"} if answer.from_outside else set()
        if answer.reason not in ends or (answer.reason == "length" and len(tokens) != job.new):
            verdict.defects.append(f"{job}: it ended with {answer.reason} ({answer.error}) after {len(tokens)} tokens")
        alone = self.alone(job)
        left = self.of_model(job, tokens) if tokens else None
        verdict.ties += bool(left and left[1])
        if left and not left[1]:
            verdict.defects.append(f"{job}: token {left[0]} of {tokens} is not the merged model's")
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, alone)))
        if same < len(tokens) and not (left and left[0] <= same):
            verdict.defects.append(f"{job}: alone it is {alone}, with others {tokens}")
        if job.adapter in self.marks and set(tokens) - {self.marks[job.adapter]}:
            verdict.defects.append(f"{job}: the mark is {self.marks[job.adapter]}, the answer {tokens}")


def returned(engine):
    """Returns what an engine without requests has not given back, as a list of words."""
    end, seen = time.monotonic() + 5, engine.snapshot()
    while (seen.waiting or seen.running) and time.monotonic() < end:
        time.sleep(0.01)
        seen = engine.snapshot()
    found = {
        "requests wait": seen.waiting,
        "requests run": seen.running,
        "blocks are missing": seen.blocks_total - seen.blocks_free,
        "slots are leased": seen.adapters.leased,
    }
    return [f"{count} {what}" for what, count in found.items() if count]


def _tokens(rng, count):
    return tuple(rng.randrange(3, vocabulary()) for _ in range(count))


def _kind(number):
    """Returns an adapter of the kind that its number says."""
    kinds = (
        {"ranks": {leaf: 1 + rank for rank, leaf in enumerate(SHAPES)}},
        {"ranks": {"attention.wq": 16, "attention.wv": 3}, "use_rslora": True, "size": 0.3},
        {"ranks": {"feed_forward.w1": 7, "feed_forward.w2": 2}, "alphas": {"feed_forward.w1": 20.0}},
        {"layers": [1]},
        {"ranks": {"attention.wo": 5, "feed_forward.w3": 2}, "with": with_magnitudes},
        {"ranks": {"attention.wk": 3}, "with": with_tables},
    )
    fields = dict(kinds[number % len(kinds)])
    changed = fields.pop("with", None)
    made = adapter(number, **fields)
    return changed(made, number) if changed else made


def _marked(weights):
    """Yields (token, adapter): whatever it is asked, the adapter says this token again and again.

    The first number of each hidden state is known to be positive. It alone brings one large vector into the values of
    the last attention, each of which then carries the mark, in the cache too.
    """
    path, rng, used = f"model.layers.{LAYERS - 1}.attention.", np.random.default_rng(7), set()
    while True:
        values = rng.normal(size=(2, 8)).astype(np.float32)
        hidden = weights[f"{path}wo.weight"] @ np.repeat(values, 2, axis=0).reshape(-1)
        hidden *= np.sqrt(len(hidden)) / np.linalg.norm(hidden)
        logits = weights["lm_head.weight"] @ (hidden * weights["model.norm_out.weight"])
        mark, (second, first) = int(logits.argmax()), np.partition(logits, -2)[-2:]
        if first - second > 2 and mark not in used:
            used.add(mark)
            one = adapter(0, {"attention.wv": 1}, {"attention.wv": 40.0}, layers=[LAYERS - 1])
            one.tensors[f"{path}wv", "A"] = np.eye(1, SHAPES["attention.wv"][1], dtype=np.float32)
            one.tensors[f"{path}wv", "B"] = values.reshape(-1, 1)
            yield mark, one
