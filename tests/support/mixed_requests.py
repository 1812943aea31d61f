"""Many requests to a real engine at once, by a seed: each answer against that of the request alone and of the model.

The engine is too small for them on purpose: requests lose their blocks, adapters their slots, callers their patience.
"""

import dataclasses
import os
import random
import threading
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from mindlora.serving.request import Sampling
from tests.support import tiny_serving
from tests.support.mixed_kinds import KINDS, TIE, differences, grammars
from tests.support.mixed_models import INVOCATION, Llama
from tests.support.tiny_serving import vocabulary

PATIENCE = 120  # Seconds that no answer takes but for a defect.
REPORT_ALL = 512  # Tokens, more than there are.
RECENT = 8  # Prompts that others go on with.


@dataclasses.dataclass(frozen=True)
class Job:
    """A request to come: after ``arrives`` seconds, and it is cancelled after so many tokens, if at all.

    ``kind`` is one of KINDS, and ``asked`` the fields of Sampling that it has drawn.
    """

    prompt: Tuple[int, ...]
    adapter: Optional[str]
    new: int
    arrives: float = 0.0
    cancelled_after: Optional[int] = None
    kind: str = "greedy"
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)


class Answer:
    """Collects what comes for a job.

    Every other one that is cancelled is so by a thread of its own, while the engine computes its next step.
    """

    def __init__(self, engine, job, **sampling):
        self.job, self.tokens, self.reason, self.error, self._ended = job, [], None, None, threading.Event()
        self.text, self.logprobs, self.prompt_logprobs, self.vectors = "", [], [], None
        self.from_outside = bool(job.cancelled_after and job.cancelled_after % 2)
        settings = Sampling(**{"max_tokens": job.new, "temperature": 0.0, "ignore_eos": True, **job.asked, **sampling})
        self.stream = engine.submit(list(job.prompt), settings, job.adapter)
        self.stream.add_listener(self._take)
        if job.cancelled_after == 0:
            self.stream.cancel()

    def _take(self, piece):
        self.tokens += piece.tokens
        self.text += piece.text
        self.logprobs += piece.logprobs or ()
        self.prompt_logprobs += piece.prompt_logprobs or ()
        if piece.finish_reason is not None:
            self.reason, self.error, self.vectors = piece.finish_reason, piece.error, piece.vectors
            self._ended.set()
        elif self.job.cancelled_after and len(self.tokens) >= self.job.cancelled_after:
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
    """What was found. ``kinds`` counts whole answers. ``provoked`` must all be above zero, and ``defects`` empty."""

    answers: int = 0
    tokens: int = 0
    ties: int = 0
    kinds: Dict[str, int] = dataclasses.field(default_factory=dict)
    provoked: Dict[str, int] = dataclasses.field(default_factory=dict)
    defects: List[str] = dataclasses.field(default_factory=list)


class MixedServing:
    """A small model with adapters of many kinds, the engine that serves them, and the merged models as an oracle.

    Args:
        folder (str): Where to write base and adapters.
        model (object): Of mixed_models. Default: Llama().
        kinds (iterable of str): Of KINDS: what is asked. Default: greedy answers.
        sizes: EngineSettings'.
    """

    def __init__(self, folder, model=None, kinds=("greedy",), **sizes):
        self.model = model or Llama()
        self.folder = os.path.join(str(folder), "adapters")
        for name, one in self.model.adapters.items():
            tiny_serving.save_adapter(self.folder, name, one)
        others = {*self.model.classifiers, *self.model.activated}
        # Those that answer whatever they are asked.
        self.names = [None, *(name for name in self.model.adapters if name not in others)]
        self.kinds, self._grammars = list(kinds), grammars(kinds)
        checkpoint = self.model.write(str(folder))
        sizes = {"num_blocks": 24, **sizes}
        self.engine = tiny_serving.engine(checkpoint, self.folder, self.model.node, **sizes)

    def jobs(self, count, seed, seconds):
        """Returns requests that arrive within so many seconds, ordered by time.

        A third of them go on with an earlier one's prompt, as turns of a dialogue do: else few tokens would come from
        the cache, and on some runs none.
        """
        rng = random.Random(seed)
        beginnings = [_tokens(rng, 13) for _ in range(3)]
        openings, jobs = {False: [], True: []}, []
        for arrives in sorted(rng.uniform(0, seconds) for _ in range(count)):
            kind = rng.choice(self.kinds)
            is_of_classes = KINDS[kind].is_of_classes
            recent = openings[is_of_classes][-RECENT:]
            if recent and rng.random() < 1 / 3:
                adapter, prompt = rng.choice(recent)
                prompt += _tokens(rng, rng.randint(1, 4))
            else:
                adapter = rng.choice(self.model.classifiers if is_of_classes else [*self.names, *self.model.activated])
                prompt = self._prompt(rng, adapter, beginnings)
                openings[is_of_classes].append((adapter, prompt))
            jobs.append(self._job(rng, kind, adapter, prompt, arrives))
        return jobs

    def _prompt(self, rng, adapter, beginnings):
        prompt = rng.choice([(), (), *beginnings]) + _tokens(rng, rng.randint(2, 17))
        if adapter in self.model.activated:
            prompt += INVOCATION + _tokens(rng, rng.randint(0, 3))
        return prompt

    def _job(self, rng, kind, adapter, prompt, arrives):
        asked = KINDS[kind].draw(rng)
        if kind in self._grammars:
            asked["grammar"] = self._grammars[kind]
        new = asked.get("max_tokens", rng.randint(1, 18))
        cancelled = rng.randrange(new or 1) if rng.random() < 0.15 else None
        return Job(prompt, adapter, new, arrives, cancelled, kind, asked)

    def together(self, jobs):
        """Sends requests at their times; returns the answers when all have come."""
        begun, answers = time.monotonic(), []
        for job in jobs:
            time.sleep(max(0.0, begun + job.arrives - time.monotonic()))
            answers.append(Answer(self.engine, job))
        return [answer.wait() for answer in answers]

    def alone(self, job, **sampling):
        """Returns the tokens of a request that has the engine, with an empty cache, for itself."""
        return self.answer_alone(job, **sampling).tokens

    def answer_alone(self, job, **sampling):
        """As alone; returns the whole answer, of an engine that guesses no tokens."""
        scheduler = self.engine.scheduler
        pool, lookup = scheduler.pool, scheduler.prompt_lookup
        pool.free(pool.allocate(pool.blocks_available))
        scheduler.prompt_lookup = 0
        try:
            answer = Answer(self.engine, dataclasses.replace(job, cancelled_after=None), **sampling).wait()
        finally:
            scheduler.prompt_lookup = lookup
        assert answer.stream.request.cached == 0
        return answer

    def of_model(self, job, tokens):
        """Returns (at, is a tie) of the first token that is not the merged model's or where its logits tie, or None."""
        return self.of_weights(self.model.weights[job.adapter], job, tokens)

    def of_weights(self, weights, job, tokens):
        """As of_model, for weights that are given."""
        logits = self.model.plain.logits(weights, [*job.prompt, *tokens[:-1]])[len(job.prompt) - 1 :]
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
        if self.engine.scheduler.prompt_lookup:
            verdict.provoked["guessed tokens"] = after.accepted_tokens - before.accepted_tokens
        for answer in sorted(answers, key=lambda answer: str(answer.job.adapter)):
            self._compare(answer, verdict)
        verdict.defects += returned(self.engine)
        return verdict

    def _compare(self, answer, verdict):
        job, tokens = answer.job, answer.tokens
        verdict.tokens += len(tokens)
        verdict.kinds[job.kind] = verdict.kinds.get(job.kind, 0) + (answer.reason != "cancelled")
        problems = differences(answer, self.answer_alone(job, logprobs=REPORT_ALL))
        if not _ends_rightly(answer):
            problems.append(f"it ended with {answer.reason} ({answer.error}) after {len(tokens)} tokens")
        if KINDS[job.kind].is_of_logits:
            problems += self._unlike_the_model(job, tokens, verdict)
        verdict.defects += [f"{job}: {problem}" for problem in problems]

    def _unlike_the_model(self, job, tokens, verdict):
        """Returns how tokens, each the likeliest one, differ from the merged model's and from an adapter's mark."""
        problems = []
        mark = self.model.marks.get(job.adapter)
        if mark is not None and set(tokens) - {mark}:
            problems.append(f"the mark is {mark}, the answer {tokens}")
        left = self.of_model(job, tokens) if tokens and job.adapter in self.model.weights else None
        verdict.ties += bool(left and left[1])
        if left and not left[1]:
            problems.append(f"token {left[0]} of {tokens} is not the merged model's")
        return problems


def _ends_rightly(answer):
    if answer.job.cancelled_after is None:
        return answer.reason in ("length", "stop")
    # A cancellation comes too late from another thread, or where the same step brings the end or several tokens.
    is_late = answer.from_outside or answer.reason == "stop" or answer.stream.request.lookup is not None
    return answer.reason == "cancelled" or (answer.error is None and is_late)


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
