"""From a request for completions to its answer: Call, its requests to the engine, and sending the answer."""

import asyncio
import contextlib
import dataclasses
import json
import time
from typing import (
    Any,
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    MutableMapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mindlora.core.errors import ServingError
from mindlora.serving.constraints import Constraint, ConstraintError, Grammar
from mindlora.serving.detokenizer import TokenTexts
from mindlora.serving.request import Sampling
from mindlora.serving.server import schemas
from mindlora.serving.server.access import client_gone
from mindlora.serving.server.context import Context, context_of
from mindlora.serving.server.errors import ApiError, note_error
from mindlora.serving.server.schemas import CachedTokens, Usage

Body = Union[schemas.CompletionRequest, schemas.ChatRequest]
# Tokenizes a request's prompts.
Prepare = Callable[[Context], List[List[int]]]
# Seconds after which another server may be available.
_SOON = 10
# Maximum length of a header, which clients limit.
_LONGEST_HEADER = 2000


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request's needs from the engine: ``n`` answers to each prompt's token ids, with a sampling for each prompt."""

    model: str
    prompts: Sequence[List[int]]
    samplings: Sequence[Sampling]
    n: int


class Call:
    """Submits requests to the engine, and yields the pieces of all answers as they arrive.

    The second and further answers to a prompt are submitted when the first one has its first token, so that they find
    the prompt's keys and values in the cache. The body of the HTTP request has been read.
    """

    def __init__(self, request: Request, asked: Asked):
        self._request = request
        self.asked = asked
        self._context: Context = context_of(request)
        self.count = len(asked.prompts) * asked.n
        self._streams: Dict[int, Any] = {}
        self._reasons: Dict[int, str] = {}
        self._last: Dict[int, float] = {}
        self._closed = False
        # The reason why the call ends early.
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
            too_long = ApiError(f"The answer took longer than {seconds:g} seconds, the limit.", 504, "timeout")
            timer = self._loop.call_later(seconds, self._finish_early, too_long)
            self._on_close.callback(timer.cancel)
            await self._submit(range(0, self.count, self.asked.n))
        except BaseException:
            self.close()
            raise

    async def pieces(self) -> AsyncIterator[Tuple[int, Any]]:
        """Yields (choice, piece) until all answers are complete.

        Raises ApiError if an answer failed, the client is gone, or the time is over.
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
        """Cancels running requests, and completes the request's record. May be called again."""
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

    def failed(self, error: Exception) -> ApiError:
        """Records why the call failed, if no other part of the app will; returns the client's error."""
        problem = self._context.told(error)
        note_error(self._request.scope, problem)
        return problem

    async def _submit(self, choices: Sequence[int]) -> None:
        # In a thread, since the engine may be in the middle of a step.
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
                check_ready(self._context)  # it may have been asked to stop meanwhile
                raise
            self._streams[choice] = stream
            if self._closed:  # meanwhile
                stream.cancel()
                return
            stream.add_listener(lambda piece, choice=choice: self._post(choice, piece))

    def _post(self, choice, piece):
        """Called in the engine's thread, which the server must not block."""
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
            raise self._context.told(piece.error)
        if piece.finish_reason == "cancelled":
            raise ApiError(
                f"The server was told to stop before the answer was complete: ask again in {_SOON} seconds.",
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
        record.prompt_tokens = usage.prompt_tokens
        record.generated_tokens = usage.completion_tokens
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
    """Raises ApiError, 503, if the server does not take requests."""
    if context.draining:
        message = f"The server is shutting down: ask again in {_SOON} seconds."
        raise ApiError(message, 503, "shutting_down", retry_after=_SOON)
    if context.starting:
        error = still_starting()
        raise error
    if not context.engine.alive:
        message = f"The engine of {context.engine.model_name} has ended: see the server's log, and start it again."
        raise ApiError(message, 503, "not_ready")


def still_starting() -> ApiError:
    """Returns the error for clients before the engine takes requests."""
    return ApiError(f"The server is starting: ask again in {_SOON} seconds.", 503, "starting", retry_after=_SOON)


async def _stream_answer(call: Call, form: "Form", include_usage: bool, headers: Mapping[str, str]) -> Response:
    """Returns a streamed answer as soon as there is something to send, so that errors until then have their status."""
    events = _events(call, form, include_usage)
    try:
        first = await events.__anext__()
    except BaseException:
        call.close()
        raise
    return _EventStream(call, form, first, events, headers)


async def _events(call: Call, form: "Form", include_usage: bool) -> AsyncGenerator[bytes, None]:
    form.includes_usage = include_usage
    async for choice, piece in call.pieces():
        for event in form.events(choice, piece):
            yield event
    for event in form.last_events(call.usage()):
        yield event


def _event(chunk: Any) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class _EventStream(Response):
    """An answer that is sent while it is generated. An error in the middle of it becomes an event.

    The call is closed when the answer has been sent or cannot be sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, call: Call, form: "Form", first: bytes, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._call = call
        self._form = form
        self._first = first
        self._rest = events

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await _send(send, self._first)
                async for event in self._rest:
                    await _send(send, event)
            except Exception as error:
                problem = self._call.failed(error)
                await _send(send, self._form.failure(problem))
            await send({"type": "http.response.body", "body": self._form.ending, "more_body": False})
        finally:
            self._call.close()
            await self._rest.aclose()


async def _send(send: Any, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})


class Form:
    """The form of answers of one of the APIs.

    Attributes:
        prefix (str): The beginning of the answer's id.
        head (dict): The first fields of the whole answer and of each chunk.
        prompt_ids (list of list of int, or None): The prompt's token ids for each choice, if ids are shown.
        ending (bytes): The end of a stream.
        includes_usage (bool): Whether a stream ends with a chunk of usage.
    """

    prefix = ""
    ending = b"data: [DONE]\n\n"
    includes_usage = False

    def __init__(self, model: str, texts: TokenTexts):
        self.texts = texts
        self.prompt_ids: Optional[List[List[int]]] = None
        self.head: Dict[str, Any] = {"model": model}

    def begin(self, identity: str, created: int) -> None:
        """Takes the server's facts about the answer."""
        self.head.update(id=f"{self.prefix}-{identity}", created=created)

    def constrained(self, constraint: Optional[Constraint]) -> Optional[Constraint]:
        """Returns the constraint on a whole answer whose shown text is constrained; called once there are prompts."""
        return constraint

    def chunks(self, choice: int, piece: Any) -> List[Any]:
        """Returns the choices, zero or more, that show a piece of an answer."""
        raise NotImplementedError

    def chunk(self, choices: Sequence[Any], **usage: Any) -> BaseModel:
        """Returns a chunk of a streamed answer."""
        raise NotImplementedError

    def events(self, choice: int, piece: Any) -> List[bytes]:
        """Returns the events of a stream that show a piece of an answer."""
        # With usage, every chunk has the field, which is null in all except the last.
        usage = {"usage": None} if self.includes_usage else {}
        return [_event(self.chunk([part], **usage)) for part in self.chunks(choice, piece)]

    def last_events(self, usage: schemas.Usage) -> List[bytes]:
        """Returns the events of a stream when all answers are complete."""
        return [_event(self.chunk([], usage=usage))] if self.includes_usage else []

    def failure(self, problem: ApiError) -> bytes:
        """Returns the event for an error in the middle of a stream."""
        return b"data: " + json.dumps(problem.content).encode() + b"\n\n"

    def whole(self, choices: Sequence[Sequence[Any]], usage: schemas.Usage) -> BaseModel:
        """Returns the answer; ``choices`` has the results of ``chunks`` for each."""
        raise NotImplementedError

    def ids(self, tokens: Iterable[int]) -> Dict[str, Any]:
        """Returns the field of a choice for its token ids, if they are shown."""
        return {} if self.prompt_ids is None else {"token_ids": list(tokens)}

    def joined_ids(self, choices: Sequence[Any]) -> Dict[str, Any]:
        """Returns the token ids of a whole answer from the choices that show its pieces."""
        return self.ids(token for choice in choices for token in choice.token_ids or ())


def joined_logprobs(choices: Sequence[Any]) -> Optional[Any]:
    """Returns the logprobs of an answer from those of the choices that show its pieces; None without any."""
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    if not parts:
        return None
    kind = type(parts[0])
    lists: Dict[str, List[Any]] = {name: [] for name in kind.model_fields}
    for part in parts:
        for name, entries in lists.items():
            entries += getattr(part, name)
    return kind(**lists)


def note_asked(request: Request, model: str, choices: int, texts: List[Any]) -> Context:
    """Records a request for the log; returns the context."""
    context = context_of(request)
    record = request.scope["state"]["record"]
    record.model = model
    record.choices = choices
    if context.settings.log_prompts:
        record.prompt = texts
    return context


def accept(request: Request, body: Body, prompts: int, texts: List[Any]) -> Context:
    """Records a request for the log, and makes the checks that schemas cannot.

    Raises ApiError, 400, if a field needs a feature that this server lacks, or two fields contradict each other.
    """
    context = note_asked(request, body.model, prompts * (body.n or 1), texts)
    record = request.scope["state"]["record"]
    record.stream = bool(body.stream)
    body.check_extra()
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options is only for stream: true. Set stream too.", param="stream_options")
    if record.choices > context.settings.max_choices:
        raise ApiError(
            f"{record.choices} answers are asked for (prompts times n), but this server gives "
            f"{context.settings.max_choices} at most. Ask for fewer.",
            param="n",
        )
    return context


def _compiled(context: Context, constraint: Optional[Constraint]) -> Optional[Grammar]:
    """Returns the compiled constraint on answers; raises ApiError, 400, if it cannot be used."""
    if constraint is None:
        return None
    try:
        return context.constraints.compile(constraint)
    except ConstraintError as error:
        raise ApiError(str(error), param=error.field) from error


def _said_of(grammar: Optional[Grammar]) -> Dict[str, str]:
    """Returns the headers of an answer that name the unenforced parts of its constraint."""
    if grammar is None or not grammar.loosened:
        return {}
    text = "; ".join(grammar.loosened).encode("ascii", "backslashreplace").decode()
    return {"X-Not-Enforced": text[:_LONGEST_HEADER]}


async def answer(
    request: Request,
    body: Body,
    form: Form,
    prepare: Prepare,
    constraint: Optional[Constraint],
    max_tokens: Optional[int],
    default: Optional[int],
) -> Response:
    """Answers a request whose body has been checked; ``prepare`` makes the tokens of the prompts, in a thread.

    Where the request gives no max_tokens, it gets ``default``: None for all that there is room for.
    """
    context = context_of(request)

    def asked():
        context.models.check(body.model)
        prompts = prepare(context)
        sampling = body.sampling(context.prompts.ends)
        sampling = dataclasses.replace(sampling, bad_words=context.prompts.bad_words(body.bad_words or ()))
        grammar = _compiled(context, form.constrained(constraint))
        rooms = [context.prompts.room(tokens, max_tokens, default) for tokens in prompts]
        samplings = [dataclasses.replace(sampling, max_tokens=room, grammar=grammar) for room in rooms]
        return Asked(body.model, prompts, samplings, body.n or 1), _said_of(grammar)

    what, headers = await asyncio.to_thread(asked)
    call = Call(request, what)
    form.begin(request.scope["state"]["record"].id, int(time.time()))
    if body.return_token_ids:
        form.prompt_ids = [prompt for prompt in what.prompts for _ in range(what.n)]
    await call.begin()
    if body.stream:
        return await _stream_answer(call, form, body.include_usage, headers)
    try:
        parts: List[List[Any]] = [[] for _ in range(call.count)]
        async for choice, piece in call.pieces():
            parts[choice] += form.chunks(choice, piece)
        content = form.whole(parts, call.usage()).model_dump_json(exclude_unset=True)
        return Response(content, headers=headers, media_type="application/json")
    finally:
        call.close()
