"""Runs the server until it is told to stop."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from typing import Any, Callable, Iterator, List, Optional

import uvicorn

from mindlora.core.errors import ConfigError
from mindlora.serving.server.app import answer_while_loading, create_app
from mindlora.serving.server.connections import Connection
from mindlora.serving.server.settings import ServerSettings

logger = logging.getLogger("mindlora")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# For the last bytes to reach clients once the engine has stopped.
_LAST_SECONDS = 5


def run(
    make_engine: Callable[[], Any], settings: ServerSettings, listening: Optional[Callable[[Any, str], None]] = None
) -> Any:
    """Makes an engine, starts it and serves it on HTTP. Returns it after SIGTERM or SIGINT, when requests have ended.

    The address is listened on first: while the engine is made, which loads the model, /health answers and everything
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
    """Answers from a thread of its own, while the context lasts and this thread loads a model."""
    listener = _listener(answer_while_loading, settings)
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
    """uvicorn without its way of taking signals, which is to close the door before running requests are done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
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
        # asyncio sends small packets at once only on sockets that know their protocol: else each answer takes 40 ms.
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
