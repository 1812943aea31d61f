"""Call: the engine's requests behind one HTTP request, and all that can end them."""

import asyncio
import contextlib
import dataclasses
import time
from typing import Any, AsyncIterator, Dict, List, Optional, Sequence, Tuple

from starlette.requests import Request

from mindlora.errors import ServingError
from mindlora.serving.request import Sampling
from mindlora.serving.server.context import Context, context_of
from mindlora.serving.server.errors import ApiError, as_api_error, note_error
from mindlora.serving.server.limits import client_gone
from mindlora.serving.server.schemas import CachedTokens, Usage

# Seconds in which another server may be there.
_SOON = 10


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a request asks the engine for.

    Attributes:
        model (str): The base or an adapter.
        prompts (list of list of int): Token ids.
        samplings (list of Sampling): For each prompt.
        n (int): Answers to each prompt.
    """

    model: str
    prompts: Sequence[List[int]]
    samplings: Sequence[Sampling]
    n: int


class Call:
    """Submits what is asked for, and hands out the pieces of all answers as they come.

    The second and further answers to a
    prompt are submitted when the first one has its first token, so that they find the prompt's keys and values in the
    cache.

    Args:
        request (Request): The HTTP request; its body has been read.
        asked (Asked): What it asks for.
    """

    def __init__(self, request: Request, asked: Asked):
        self._request, self.asked = request, asked
        self._context: Context = context_of(request)
        self.count = len(asked.prompts) * asked.n
        self._streams: Dict[int, Any] = {}
        self._reasons: Dict[int, str] = {}
        self._last: Dict[int, float] = {}
        self._closed = False
        # Why the call ends early.
        self._end: Optional[ApiError] = None
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._on_close = contextlib.ExitStack()

    async def begin(self) -> None:
        """Submits the first answer to each prompt.

        Raises:
            ApiError: A limit of the key is reached, or the server is about to stop.
            ServingError: The engine does not take it.
        """
        check_ready(self._context)
        try:
            self._on_close.enter_context(self._context.limits.hold(self._request.scope["state"].get("key")))
            watcher = self._loop.create_task(self._watch())
            self._on_close.callback(watcher.cancel)
            seconds = self._context.settings.request_seconds
            timer = self._loop.call_later(seconds, self._finish_early, _out_of_time(seconds))
            self._on_close.callback(timer.cancel)
            await self._submit(range(0, self.count, self.asked.n))
        except BaseException:
            self.close()
            raise

    async def pieces(self) -> AsyncIterator[Tuple[int, Any]]:
        """Yields (choice, piece) until all answers are complete.

        Raises:
            ApiError: An answer failed, the client is gone, or the time is over.
        """
        waiting = set(range(0, self.count, self.asked.n)) if self.asked.n > 1 else set()
        while len(self._reasons) < self.count:
            event = await self._events.get()
            if self._end is not None:
                raise self._end
            choice, piece, now = event
            self._check(piece)
            self._measure(choice, piece, now)
            if choice in waiting:
                waiting.remove(choice)
                await self._submit(range(choice + 1, choice + self.asked.n))
            if piece.finish_reason is not None:
                self._reasons[choice] = piece.finish_reason
            yield choice, piece

    def close(self) -> None:
        """Cancels what still runs, and completes the request's record. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._cancel()
        self._on_close.close()
        self._fill(self._request.scope["state"]["record"])

    def usage(self) -> Usage:
        """Returns the tokens of all answers and, once each, of the prompts."""
        firsts = [stream.request for choice, stream in list(self._streams.items()) if choice % self.asked.n == 0]
        prompt = sum(len(request.prompt) for request in firsts)
        generated = sum(len(stream.request.generated) for stream in list(self._streams.values()))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(request.cached for request in firsts)),
        )

    def failed(self, error: ApiError) -> None:
        """Notes why the call failed, where no other part of the app will."""
        note_error(self._request.scope, error)

    async def _submit(self, choices: Sequence[int]) -> None:
        # In a thread, because the engine may be in the middle of a step.
        await asyncio.to_thread(self._submit_now, choices)

    def _submit_now(self, choices):
        adapter = self._context.models.adapter(self.asked.model)
        for choice in choices:
            prompt, number = divmod(choice, self.asked.n)
            sampling = self.asked.samplings[prompt]
            if sampling.seed is not None:
                sampling = dataclasses.replace(sampling, seed=(sampling.seed + number) % 2**64)
            try:
                stream = self._context.engine.submit(self.asked.prompts[prompt], sampling, adapter=adapter)
            except ServingError:
                check_ready(self._context)  # it may have been told to stop meanwhile
                raise
            self._streams[choice] = stream
            if self._closed:  # meanwhile
                stream.cancel()
                return
            stream.add_listener(lambda piece, choice=choice: self._post(choice, piece))

    def _post(self, choice, piece):
        """Called in the engine's thread, which nothing of the server's may stop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (choice, piece, time.monotonic()))

    async def _watch(self):
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._finish_early(client_gone())

    def _finish_early(self, error: ApiError) -> None:
        self._end = error
        self._events.put_nowait(None)
        self._cancel()

    def _cancel(self):
        for choice, stream in list(self._streams.items()):
            if choice not in self._reasons:
                stream.cancel()

    def _check(self, piece):
        if piece.error is not None:
            raise as_api_error(piece.error)
        if piece.finish_reason == "cancelled":
            raise ApiError(
                "The server was told to stop before the answer was complete: ask again in a while.",
                503,
                "shutting_down",
                retry_after=_SOON,
            )

    def _measure(self, choice: int, piece: Any, now: float) -> None:
        if not piece.tokens:
            return
        last = self._last.get(choice)
        if last is None:
            self._context.metrics.first_token(now - self._streams[choice].request.arrived)
        else:
            self._context.metrics.between_tokens((now - last) / len(piece.tokens), len(piece.tokens))
        self._last[choice] = now

    def _fill(self, record):
        usage = self.usage()
        record.prompt_tokens, record.generated_tokens = usage.prompt_tokens, usage.completion_tokens
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if record.reason is None and self._reasons:
            record.reason = ",".join(sorted(set(self._reasons.values())))
        first = self._streams[0].request if 0 in self._streams else None
        record.queue_seconds = _since(first, "admitted")
        record.first_token_seconds = _since(first, "first_token")


def _since(request: Optional[Any], moment: str) -> Optional[float]:
    reached = getattr(request, moment, 0.0)
    return max(reached - request.arrived, 0.0) if request is not None and reached else None


def check_ready(context: Context) -> None:
    """Checks that the server takes requests.

    Raises:
        ApiError: 503, it does not.
    """
    if context.draining:
        raise ApiError("The server is shutting down: ask again in a while.", 503, "shutting_down", retry_after=_SOON)
    if context.starting:
        raise ApiError("The server is starting: ask again in a while.", 503, "starting", retry_after=_SOON)
    if not context.engine.alive:
        raise ApiError("The engine's thread has ended: the log says why. Start the server again.", 503, "not_ready")


def _out_of_time(seconds: float) -> ApiError:
    return ApiError(f"The answer took longer than {seconds:g} seconds, the limit.", 504, "timeout")
