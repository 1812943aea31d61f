"""The app: routes and the parts around them; and what answers before there is one."""

from typing import Any, MutableMapping

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mindlora import __version__
from mindlora.core.errors import LoraError
from mindlora.serving.server import chat, completions, metrics, models, responses, schemas, texts, tokens
from mindlora.serving.server.access import BodyLimit, FramingCheck, HostCheck, KeyCheck
from mindlora.serving.server.context import Context, context_of
from mindlora.serving.server.errors import answer_error
from mindlora.serving.server.generation import check_ready, still_starting
from mindlora.serving.server.request_log import Recorder
from mindlora.serving.server.settings import ServerSettings

_ERRORS: Any = {status: {"model": schemas.ErrorAnswer} for status in (400, 401, 404, 413, 429, 503, 504)}


def create_app(engine: Any, settings: ServerSettings) -> FastAPI:
    """Makes the ASGI app that serves an engine, which is started and stopped elsewhere.

    Raises ConfigError if the file of keys cannot be used.
    """
    context = Context(engine, settings)
    app = FastAPI(title="mindlora", version=__version__, docs_url=None, redoc_url=None)
    app.state.context = context
    for kind in (RequestValidationError, HTTPException, LoraError):
        app.add_exception_handler(kind, answer_error)
    router = APIRouter(responses=_ERRORS)
    for part in (models, completions, chat, responses, texts, tokens, metrics):
        part.add_routes(router)
    _add_health(router)
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
            # Clients send headers of their own, such as openai's X-Stainless-Lang.
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Not-Enforced", "X-Request-Id"],
        )
    app.add_middleware(FramingCheck)
    app.add_middleware(Recorder, log=context.log, count=context.metrics.count, told=context.told)
    return app


class HeadAsGet:
    """The part of the app that answers HEAD as GET; the server sends no body with it."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


async def answer_while_loading(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    """The app while the model is loaded: /health says that the process lives, all else that the server starts."""
    answer: Response = PlainTextResponse("ok") if scope["path"] == "/health" else still_starting().response()
    await answer(scope, receive, send)


def _add_health(router: APIRouter) -> None:
    @router.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        return PlainTextResponse("ok")

    @router.get("/ready", response_class=PlainTextResponse)
    async def ready(request: Request) -> Response:
        check_ready(context_of(request))
        return PlainTextResponse("ok")
