"""Runs the server until it is asked to stop."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from typing import Any, Callable, Iterator, List, MutableMapping, Optional

import h11
import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from mindlora import __version__
from mindlora.core.errors import ConfigError, LoraError
from mindlora.serving.server import chat, completions, metrics, models, responses, schemas, texts
from mindlora.serving.server.access import BodyLimit, FramingCheck, HostCheck, KeyCheck
from mindlora.serving.server.context import Context, context_of
from mindlora.serving.server.errors import ApiError, answer_error
from mindlora.serving.server.generation import check_ready, still_starting
from mindlora.serving.server.page import page
from mindlora.serving.server.request_log import Recorder
from mindlora.serving.server.settings import ServerSettings

# Connection: one connection of a client, which is closed when it has waited too long for the head of a request.


class Connection(H11Protocol):
    """uvicorn's connection, with one time for all waits between requests: timeout_keep_alive of its configuration.

    uvicorn's own timer runs only after an answer, and ends with the first byte. This one also runs from the beginning
    of the connection, until the head of the next request is complete.
    """

    _waiting: Optional[asyncio.TimerHandle] = None

    def connection_made(self, transport: Any) -> None:
        """Starts waiting for the first request."""
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        """Takes data, which may complete a head."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Starts waiting for the next request."""
        super().on_response_complete()
        # The connection is ready for the next one a moment later.
        self.loop.call_soon(self._look)

    def connection_lost(self, exc: Optional[Exception]) -> None:
        """Stops waiting."""
        super().connection_lost(exc)
        self._stop()

    def _look(self) -> None:
        """Starts or ends the timer, depending on whether a head is expected."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


# The app: routes and middleware; and the app that answers while the model is loaded.

# /tokenize and /detokenize: from a prompt or a conversation to the model's tokens, and back, as in vLLM.


def _add_token_routes(router: APIRouter) -> None:
    """Adds both routes. They do not use the engine, so they answer while it is busy."""

    @router.post("/tokenize", response_model=schemas.Tokens)
    def tokenize(body: schemas.TokenizeRequest, request: Request) -> schemas.Tokens:
        body.check_extra()
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(
                "The body of /tokenize has both prompt and messages, or neither: give one of them.", param="prompt"
            )
        context = context_of(request)
        _check_model(request, body.model)
        if body.prompt is not None:
            tokens = context.prompts.tokens(body.prompt, body.add_special_tokens is not False)
        else:
            tokens = context.prompts.chat(body.messages or [], body.tools, body.chat_template_kwargs)
        texts = [context.texts.text(token) for token in tokens] if body.return_token_strs else None
        length = context.engine.seq_length
        return schemas.Tokens(count=len(tokens), max_model_len=length, tokens=tokens, token_strs=texts)

    @router.post("/detokenize", response_model=schemas.Detokenized)
    def detokenize(body: schemas.DetokenizeRequest, request: Request) -> schemas.Detokenized:
        body.check_extra()
        _check_model(request, body.model)
        return schemas.Detokenized(prompt=context_of(request).prompts.text(body.tokens))


def _check_model(request: Request, model: Optional[str]) -> None:
    if model is not None:
        context_of(request).models.check(model)


_ERRORS: Any = {status: {"model": schemas.ErrorAnswer} for status in (400, 401, 404, 413, 429, 503, 504)}


def create_app(engine: Any, settings: ServerSettings) -> FastAPI:
    """Builds the ASGI app that serves an engine, which is started and stopped elsewhere.

    Raises ConfigError if the file of keys cannot be used.
    """
    context = Context(engine, settings)
    app = FastAPI(title="mindlora", version=__version__, docs_url=None, redoc_url=None)
    app.state.context = context
    for kind in (RequestValidationError, HTTPException, LoraError):
        app.add_exception_handler(kind, answer_error)
    router = APIRouter(responses=_ERRORS)
    for part in (models, completions, chat, responses, texts, metrics):
        part.add_routes(router)
    _add_token_routes(router)
    _add_health(router)
    if settings.page:
        _add_page(router)
    app.include_router(router)
    # From the innermost to the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
    app.add_middleware(KeyCheck, keys=context.keys)
    if context.keys is None and not settings.no_auth:
        app.add_middleware(HostCheck)
    app.add_middleware(HeadAsGet)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            # Clients send their own headers, such as openai's X-Stainless-Lang.
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Not-Enforced", "X-Request-Id"],
        )
    app.add_middleware(FramingCheck)
    app.add_middleware(Recorder, log=context.log, count=context.metrics.count, told=context.told)
    return app


class HeadAsGet:
    """Middleware that answers HEAD like GET; the server omits the body."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class AnswersWhileLoading:
    """The app while the model is loaded: /health reports a live process, and everything else a starting server.

    The page is already served, and waits.
    """

    def __init__(self, settings: ServerSettings):
        self._page = settings.page

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        answer: Response = still_starting().response()
        if scope["path"] == "/health":
            answer = PlainTextResponse("ok")
        elif self._page and scope["path"] == "/":
            answer = _page()
        await answer(scope, receive, send)


def _add_health(router: APIRouter) -> None:
    @router.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        return PlainTextResponse("ok")

    @router.get("/ready", response_class=PlainTextResponse)
    async def ready(request: Request) -> Response:
        check_ready(context_of(request))
        return PlainTextResponse("ok")


def _add_page(router: APIRouter) -> None:
    @router.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return _page()


def _page() -> Response:
    content, headers = page()
    return HTMLResponse(content, headers=headers)


logger = logging.getLogger("mindlora")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Time for the last bytes to reach clients after the engine has stopped.
_LAST_SECONDS = 5


def run(
    make_engine: Callable[[], Any], settings: ServerSettings, listening: Optional[Callable[[Any, str], None]] = None
) -> Any:
    """Builds and starts an engine and serves it by HTTP. Returns it after SIGTERM or SIGINT, when requests have ended.

    It listens on the address first: while the engine is built, which loads the model, /health answers and everything
    else is 503. From the first signal on, new requests are answered with 503, and running ones get settings.grace
    seconds; a second signal ends those too. ``listening`` is called with the engine and the server's URL once it takes
    requests.

    Raises:
        ConfigError: The address cannot be listened on, the file of keys cannot be used, or an adapter has the base's
            name.
        ServingError: The engine cannot start.
    """
    with contextlib.closing(_bind(settings)) as listening_socket:
        with _answering_meanwhile(listening_socket, settings):
            engine = make_engine()
            app = create_app(engine, settings)
        asyncio.run(_serve(app, engine, listening_socket, listening))
    return engine


@contextlib.contextmanager
def _answering_meanwhile(listening_socket: socket.socket, settings: ServerSettings) -> Iterator[None]:
    """Answers from a separate thread within the context, while this thread loads a model."""
    listener = _listener(AnswersWhileLoading(settings), settings)
    # It closes the sockets that it gets.
    serving = listener.serve(sockets=[listening_socket.dup()])
    thread = threading.Thread(target=asyncio.run, args=(serving,))
    thread.start()
    try:
        yield
    finally:
        listener.should_exit = True
        thread.join()


def _listener(app: Any, settings: ServerSettings) -> "_Listener":
    return _Listener(
        uvicorn.Config(
            app,
            http=Connection,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_keep_alive=settings.idle_seconds,  # type: ignore[arg-type]  parts of a second count too
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
    )


async def _serve(app, engine, listening_socket, listening):
    listener = _listener(app, app.state.context.settings)
    signals = _Signals()
    serving = asyncio.ensure_future(listener.serve(sockets=[listening_socket]))
    try:
        await _start(engine, app.state.context)
        if listening is not None:
            listening(engine, _url(listening_socket))
        await asyncio.wait([serving, signals.first], return_when=asyncio.FIRST_COMPLETED)
        await _drain(app.state.context, signals.second)
    finally:
        listener.should_exit = True
        await serving


async def _start(engine, context):
    """Starts the engine, which compiles, while /health answers already."""
    context.starting = True
    try:
        await asyncio.to_thread(engine.start)
    finally:
        context.starting = False


async def _drain(context, hurry: "asyncio.Future[None]"):
    """Takes no more requests, and waits until those that run have ended, or for ``hurry``."""
    context.draining = True
    grace = context.settings.grace
    logger.info("The server stops: running requests have %g seconds.", grace)
    stopping = asyncio.ensure_future(asyncio.to_thread(context.engine.stop, grace=grace))
    await asyncio.wait([stopping, hurry], return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        await asyncio.to_thread(context.engine.stop, grace=0.0)
        await stopping


class _Listener(uvicorn.Server):
    """uvicorn without its signal handling, which refuses connections before running requests have finished."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signals."""
        yield


class _Signals:
    """The first and the second signal to stop, as futures."""

    def __init__(self):
        loop = asyncio.get_running_loop()
        self.first = loop.create_future()
        self.second = loop.create_future()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take)

    def _take(self):
        future = self.second if self.first.done() else self.first
        if not future.done():
            future.set_result(None)


def _bind(settings: ServerSettings) -> socket.socket:
    try:
        addresses: List[Any] = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
        family, kind, protocol, _, address = addresses[0]
        # asyncio sends small packets immediately only on sockets with a known protocol: otherwise each answer takes 40
        # ms.
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except OSError as error:
        raise ConfigError(
            f"The server cannot listen on {settings.host}, port {settings.port}: {error}. Choose another --host or "
            "--port."
        ) from error
    made.setblocking(False)
    return made


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
