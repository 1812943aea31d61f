"""Engine: takes requests from any thread, and computes their answers together in one thread."""

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from typing import Any, Deque, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.core.errors import RequestError, ServingError
from mindlora.serving.adapter_slots import AdapterSlots, AdapterStats
from mindlora.serving.answer import Piece, Stream, joined
from mindlora.serving.detokenizer import Detokenizer, Stopping, TextDecoder
from mindlora.serving.network import FEW_TOKENS
from mindlora.serving.request import Part, Request, Sampling, State
from mindlora.serving.runner import ModelRunner, read_texts, vectors_of
from mindlora.serving.sampling import Sampled, Sampler, sample_batch, score_token
from mindlora.serving.scheduler import Scheduler
from mindlora.serving.score_head import ScoreHead


class Turns:
    """Gives turns to threads, first come, first served.

    Two MindSpore graphs that run at once in one process wait for each other forever, and with a plain lock a thread
    that asks again immediately would always be first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: Deque[object] = collections.deque()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until all earlier threads have had their turns; later ones wait until the context ends."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket)
        try:
            yield
        finally:
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


# The log-probabilities of prompts' tokens, for requests that score a given text.


def score_prompts(runner: ModelRunner, parts: Sequence[Part]) -> Dict[Request, ServingError]:
    """Fills prompt_logprobs of requests from the last step of ``runner``, which had these parts.

    The logits exist for FEW_TOKENS tokens at a time. Returns the requests that fail, with the reason.
    """
    wanted = _wanted(parts)
    failed: Dict[Request, ServingError] = {}
    for begin in range(0, len(wanted), FEW_TOKENS):
        chunk = wanted[begin : begin + FEW_TOKENS]
        logits = runner.logits_after([row for row, _, _ in chunk])
        for row_logits, (_, request, index) in zip(logits, chunk):
            try:
                count = request.sampling.prompt_logprobs
                request.prompt_logprobs[index] = score_token(request.prompt[index], row_logits, count, request.adapter)
            except ServingError as error:
                failed[request] = error
    return failed


def scores_of(request: Request) -> Optional[List[Sampled]]:
    """Returns a score for each token of a prompt, without log-probability before scored_from; None unless requested."""
    if request.sampling.prompt_logprobs is None:
        return None
    return [request.prompt_logprobs.get(index, Sampled(token)) for index, token in enumerate(request.prompt)]


def _wanted(parts: Sequence[Part]) -> List[Tuple[int, Request, int]]:
    """Returns which token of the step predicts which token of which prompt."""
    wanted = []
    first = 0
    for part in parts:
        wanted += [(first + index - 1 - part.start, part.request, index) for index in part.scores]
        first += len(part.tokens)
    return wanted


logger = logging.getLogger("mindlora")

# Seconds after which the engine checks again whether an adapter is ready, even without a notification.
_LOOK_AGAIN = 0.1


class _Answer(NamedTuple):
    """The state of a request while it is answered."""

    stream: Stream
    sampler: Sampler
    stopping: Stopping


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """The engine's state at one moment, and its counts since it was created.

    Attributes:
        waiting, running (int): Requests.
        blocks_total, blocks_free, blocks_cached (int): Blocks of the cache; blocks that no request holds, and of these
            those whose keys and values can be used again.
        slots_total, slots_used (int): Slots for adapters, and those that hold one.
        steps, preemptions (int): Steps, and requests that lost their blocks and were recomputed.
        prompt_tokens, cached_tokens, generated_tokens (int): Tokens of prompts, those that were already in the cache,
            and tokens of answers.
        drafted_tokens, accepted_tokens (int): Guessed tokens of answers, and those that were right.
    """

    waiting: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    slots_total: int
    slots_used: int
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    adapters: AdapterStats


class Engine:
    """Continuous batching of requests to one base with many adapters.

    One thread, which start() starts, runs the network, a step at a time. Another thread that computes with MindSpore in
    this process does so within ``turns.turn()``, in parts about as long as a step. Everything else can be
    called from any thread and never waits for a step of the network.

    ``ends`` are tokens that end an answer (see end_tokens), ``adapters`` the scheduler's; callers name the base
    ``model_name``, and ``base_folder`` is its folder, if it has one; ``base_notes`` are the result of load_base.
    A prompt and its answer have ``seq_length`` tokens at most.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        adapters: AdapterSlots,
        tokenizer: Any,
        ends: FrozenSet[int],
        model_name: str = "base",
        base_folder: Optional[str] = None,
        base_notes: Tuple[str, ...] = (),
    ):
        self.runner = runner
        self.scheduler = scheduler
        self.adapters = adapters
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.base_folder = base_folder
        self.base_notes = base_notes
        self.seq_length = scheduler.seq_length
        self.turns = Turns()
        self._decoder = TextDecoder(tokenizer)
        self._ends = ends
        # Guards the scheduler and the attributes below. It is not held while the network computes.
        self._changed = threading.Condition()
        self._answers: Dict[int, _Answer] = {}
        self._thread = threading.Thread(target=self._serve, name="mindlora-engine", daemon=True)
        self._open = self._stopping = False
        self._ready = threading.Event()
        self._steps = self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._drafted_tokens = self._accepted_tokens = 0
        adapters.memory.on_ready = lambda name: self._wake()

    def start(self, many_tokens: bool = True, scores: bool = True, adapters: bool = True) -> "Engine":
        """Starts serving: compiles the graphs, and returns when the first request can be taken.

        Raises ServingError if the network cannot compute a step.

        Args:
            many_tokens (bool): Whether to compile the graph for steps of many tokens now. If not, the first such step
                does.
            scores (bool): The same for prompts whose tokens are scored.
            adapters (bool): The same for requests that name an adapter.
        """
        self._warm_up = functools.partial(self.runner.warm_up, many_tokens, scores, adapters)
        self._thread.start()
        while not self._ready.wait(0.1):
            if not self._thread.is_alive():
                raise ServingError(f"{self.model_name} could not compute its first step: see the log for the reason.")
        self._open = True
        return self

    def stop(self, grace: float = 0.0) -> None:
        """Takes no more requests; ends when the current ones are answered, or cancelled after ``grace`` seconds."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not self._answers, timeout=grace)
            rest = [answer.stream for answer in self._answers.values()]
        for stream in rest:
            stream.cancel()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self.adapters.memory.close()

    @property
    def alive(self) -> bool:
        """Whether the engine takes and answers requests."""
        return self._open and self._thread.is_alive()

    def submit(self, prompt: Sequence[int], sampling: Sampling, adapter: Optional[str] = None) -> Stream:
        """Requests an answer to the tokens of a prompt from an adapter, or from the base if it is None.

        With ``sampling.prompt_logprobs``, request.prompt_logprobs of the result is complete when the answer
        begins; with max_tokens 0 as well, there is no answer, and only the prompt is computed. With
        ``sampling.reading`` and max_tokens 0, the one piece of the answer has vectors.

        Raises:
            RequestError: The prompt or a number of ``sampling`` cannot be used.
            QueueFullError: Too many requests wait.
            AdapterNotFoundError: There is no adapter of that name.
            ServingError: The engine takes no requests.
        """
        wrong = [token for token in prompt if not 0 <= token < self.runner.vocab_size]
        if wrong:
            raise RequestError(
                f"The prompt has token {wrong[0]}, but the model knows 0 to {self.runner.vocab_size - 1}: tokenize "
                "with this model's tokenizer."
            )
        unknown = [token for token, _ in sampling.logit_bias if not 0 <= token < self.runner.vocab_size]
        if unknown:
            raise RequestError(
                f"logit_bias names token {unknown[0]}, but the model knows 0 to {self.runner.vocab_size - 1}: leave it "
                "out."
            )
        request = Request(list(prompt), sampling, adapter)
        room = self.seq_length - len(prompt)
        stopping = Stopping(sampling, Detokenizer(self._decoder, request.prompt), self._ends, room)
        sampler = Sampler(sampling, request.prompt, adapter, stopping.ends)
        stream = Stream(request, self._cancel)
        with self._changed:
            if not self.alive:
                raise ServingError(
                    f"The engine of {self.model_name} takes no requests: it is stopping, or has not been started. "
                    "Start it, or ask again in a while."
                )
            self.scheduler.add(request)
            self._answers[request.number] = _Answer(stream, sampler, stopping)
            self._changed.notify_all()
        return stream

    def forget_texts(self) -> None:
        """Forgets the keys and values of texts that have been answered.

        The next requests within a turn then give the same bits, whatever was requested before.
        """
        with self._changed:
            self.scheduler.pool.forget()

    def score_head(self, adapter: Optional[str]) -> Optional[ScoreHead]:
        """Returns the head of an adapter, reading its files if needed; None for the base and for generating adapters.

        Raises LoraError if there is no such adapter, or it cannot be used.
        """
        if adapter is None:
            return None
        loaded = None
        while loaded is None:  # others may have evicted it meanwhile
            self.adapters.memory.load(adapter)
            loaded = self.adapters.memory.take(adapter)
        return loaded.packed.score

    def snapshot(self) -> EngineSnapshot:
        """Returns the engine's current state and its counts."""
        stats = self.adapters.stats()
        with self._changed:
            pool = self.scheduler.pool
            return EngineSnapshot(
                waiting=self.scheduler.waiting_count,
                running=len(self.scheduler.running),
                blocks_total=pool.num_blocks,
                blocks_free=pool.blocks_available,
                blocks_cached=pool.blocks_cached,
                slots_total=stats.slots,
                slots_used=stats.used,
                steps=self._steps,
                preemptions=self.scheduler.preemptions,
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                generated_tokens=self._generated_tokens,
                drafted_tokens=self._drafted_tokens,
                accepted_tokens=self._accepted_tokens,
                adapters=stats,
            )

    def _wake(self):
        with self._changed:
            self._changed.notify_all()

    def _cancel(self, request: Request) -> None:
        with self._changed:
            answer = self._answers.get(request.number)
            if answer and self.scheduler.cancel(request):
                self._forget(request)
        if answer:
            answer.stream.put(Piece(finish_reason="cancelled"))

    def _forget(self, request):
        del self._answers[request.number]
        self._changed.notify_all()

    def _serve(self) -> None:
        """The engine's thread. When it fails, it ends all waiting requests."""
        try:
            self._run()
        except Exception as error:
            logger.exception("The engine has stopped.")
            problem = ServingError(f"The engine has stopped on an error: {_first_line(error)}")
            with self._changed:
                self._open = False
                streams = [answer.stream for answer in self._answers.values()]
                self._answers.clear()
                self._changed.notify_all()
            for stream in streams:
                stream.put(Piece(finish_reason="error", error=problem))

    def _run(self) -> None:
        with self.turns.turn():
            self._warm_up()
        self._ready.set()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._answers)
                if self._stopping:
                    return
            # The plan writes adapters into their slots, which also runs a graph.
            with self.turns.turn():
                with self._changed:
                    self.adapters.begin_step()
                    parts = self.scheduler.plan()
                    pieces = self._failed()
                if parts:
                    pieces += self._step(parts)
            for stream, piece in pieces:
                stream.put(piece)
            if not parts and not pieces:
                with self._changed:
                    self._changed.wait(_LOOK_AGAIN)

    def _step(self, parts: List[Part]) -> List[Tuple[Stream, Piece]]:
        try:
            logits = self.runner.forward(parts)
            failed = {**score_prompts(self.runner, parts), **read_texts(self.runner, parts)}
        except Exception as error:  # whatever the error is, the other requests continue
            logger.exception("A step failed.")
            return self._fail(parts, error)
        with self._changed:
            self.scheduler.advance(parts)
            self._steps += 1
            sampling = []
            rows: List[int] = []
            row = 0
            for part in parts:
                begin, row = row, row + part.samples + len(part.drafts)
                if part.samples and part.request.state is State.RUNNING:
                    sampling.append((part, self._answers[part.request.number]))
                    rows += range(begin, row)
        if not rows and not failed:
            return []
        runs = sample_batch(
            [answer.sampler for _, answer in sampling],
            logits if len(rows) == len(logits) else logits[rows],
            [part.request.generated for part, _ in sampling],
            [part.drafts for part, _ in sampling],
        )
        with self._changed:
            pieces = [
                (self._answers[request.number].stream, self._end(request, "error", error=error))
                for request, error in failed.items()
                if request.state is State.RUNNING
            ]
            return pieces + [
                (answer.stream, self._take_run(part, answer, run))
                for (part, answer), run in zip(sampling, runs)
                if part.request.state is State.RUNNING
            ]

    def _take_run(self, part: Part, answer: _Answer, run: Sequence[Any]) -> Piece:
        """Appends tokens, the first of them drafted, to a request, and returns its caller's piece."""
        request = part.request
        pieces: List[Piece] = []
        for sampled in run:
            if pieces:
                self.scheduler.accept(request)
            pieces.append(self._take(request, answer, sampled))
            if request.state is not State.RUNNING:
                break
        if part.drafts:
            request.lookup.note(len(pieces) - 1)
            self._drafted_tokens += len(part.drafts)
            self._accepted_tokens += len(pieces) - 1
        return joined(pieces)

    def _take(self, request: Request, answer: _Answer, sampled: Any) -> Piece:
        """Appends a token to a request and returns its caller's piece."""
        if isinstance(sampled, Exception):
            return self._end(request, "error", error=sampled)
        prompt_logprobs = None
        if not request.first_token:
            request.first_token = time.monotonic()
            self._prompt_tokens += len(request.prompt)
            self._cached_tokens += request.cached
            prompt_logprobs = scores_of(request)
        if request.sampling.max_tokens == 0:
            return self._end(request, "length", prompt_logprobs=prompt_logprobs, vectors=vectors_of(request))
        request.tokens.append(sampled.token)
        self._generated_tokens += 1
        text, reason = answer.stopping.add(sampled.token)
        logprobs = None if sampled.logprob is None else [sampled]
        if reason:
            tokens = [sampled.token]
            return self._end(
                request, reason, text=text, tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
            )
        return Piece(text, [sampled.token], logprobs, prompt_logprobs)

    def _end(self, request: Request, reason: str, **piece: Any) -> Piece:
        self.scheduler.finish(request, reason, piece.get("error"))
        self._forget(request)
        return Piece(finish_reason=reason, **piece)

    def _failed(self) -> List[Tuple[Stream, Piece]]:
        """Returns the last pieces of requests whose adapters cannot be used."""
        pieces = []
        for request in self.scheduler.failed:
            pieces.append((self._answers[request.number].stream, Piece(finish_reason="error", error=request.error)))
            self._forget(request)
        self.scheduler.failed.clear()
        return pieces

    def _fail(self, parts: Sequence[Part], error: Exception) -> List[Tuple[Stream, Piece]]:
        problem = ServingError(f"The network could not compute a step: {_first_line(error)}")
        with self._changed:
            return [
                (self._answers[part.request.number].stream, self._end(part.request, "error", error=problem))
                for part in parts
                if part.request.state is State.RUNNING
            ]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
