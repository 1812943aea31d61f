"""Errors in the form of OpenAI's API: a status, and {"error": {"message", "type", "param", "code"}}."""

import json
import logging
from typing import Any, Dict, List, Mapping, Optional, Sequence

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mindlora.core.errors import (
    AdapterError,
    AdapterNotFoundError,
    LoraError,
    QueueFullError,
    RequestError,
    ServingError,
)
from mindlora.serving.adapter_registry import AdapterRegistry

logger = logging.getLogger("mindlora")

# Nobody reads it: the client is gone. The number is nginx's.
CLIENT_GONE = 499
_TYPES = {429: "rate_limit_error", 401: "authentication_error", 403: "permission_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}


class ApiError(ServingError):
    """An answer other than success, with HTTP's ``status``.

    ``code`` is one of OpenAI's words for programs; ``param`` is the wrong field of the request, and after
    ``retry_after`` seconds another try may succeed.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str = "invalid_value",
        param: Optional[str] = None,
        retry_after: Optional[int] = None,
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def content(self) -> Dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Optional[Mapping[str, str]] = None) -> Response:
        """Returns the answer to send."""
        headers = dict(headers or {})
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        # As ASCII, since a message may quote a field's name that no encoding can represent.
        return Response(json.dumps(self.content), self.status, headers, "application/json")

    async def answer(self, scope: Any, receive: Any, send: Any, headers: Optional[Mapping[str, str]] = None) -> None:
        """Answers a request with the error, and notes it for the request's line in the log."""
        note_error(scope, self)
        await self.response(headers)(scope, receive, send)


def as_api_error(error: BaseException, registry: AdapterRegistry) -> ApiError:
    """Returns the error that a client gets, without paths of the server's files, which the log has.

    Unexpected errors are written only to the log. ``registry`` knows the paths of adapters.
    """
    if isinstance(error, ApiError):
        return error
    message = registry.without_paths(str(error))
    if isinstance(error, AdapterNotFoundError):
        return ApiError(message, 404, "model_not_found", "model")
    if isinstance(error, QueueFullError):
        return ApiError(message, 429, "queue_full", retry_after=1)
    if isinstance(error, RequestError):
        return ApiError(message, 400, "invalid_value")
    if isinstance(error, AdapterError):
        return ApiError(message, 400, "adapter_refused", "model")
    if isinstance(error, LoraError):
        return ApiError(message, 500, "engine_error")
    logger.error("A request failed with %s: see the lines below.", type(error).__name__, exc_info=error)
    return ApiError("The server failed at this request; its log says why.", 500, "internal_error")


async def answer_error(request: Request, error: Exception) -> Response:
    """Answers with an error, and notes it for the request's line in the log."""
    if isinstance(error, RequestValidationError):
        problem = _invalid(error.errors())
    elif isinstance(error, HTTPException):
        code = _CODES.get(error.status_code, "invalid_body")
        problem = ApiError(f"{error.detail}: {request.method} {request.url.path}", error.status_code, code)
    else:
        problem = request.app.state.context.told(error)
    note_error(request.scope, problem)
    return problem.response(getattr(error, "headers", None))


def note_error(scope: Mapping[str, Any], error: ApiError) -> None:
    """Sets the reason in the request's record to the code of an error."""
    record = scope.get("state", {}).get("record")
    if record is not None:
        record.reason = error.code


def _invalid(errors: Sequence[Any]) -> ApiError:
    """Returns a description of pydantic's errors."""
    meant = _meant(errors)
    first = meant[0]
    param = _path(first["loc"]) or None
    if first["type"] == "json_invalid":
        return ApiError(f"The body is not JSON: {first['ctx']['error']}.", code="invalid_json")
    if first["type"] == "missing":
        return ApiError(f"{param or 'The body'} is missing.", code="missing_field", param=param)
    if param is None:
        return ApiError("The body must be a JSON object, with Content-Type: application/json.", code="invalid_body")
    texts = [error["msg"].removeprefix("Value error, ").replace("Input should", "should") for error in meant]
    return ApiError(f"{param} is not what it should be: {' or '.join(dict.fromkeys(texts))}.", param=param)


def _meant(errors: Sequence[Any]) -> List[Any]:
    """Returns the errors to report, as a field that takes several kinds of value has errors for each kind.

    The deepest belong to the kind that was meant; of several such kinds, the one with the fewest errors counts.
    """
    depth = max(len(error["loc"]) for error in errors)
    kinds: Dict[Any, List[Any]] = {}
    for error in errors:
        if len(error["loc"]) == depth:
            kinds.setdefault(error["loc"][:-1], []).append(error)
    fewest = min(kinds.values(), key=len)
    return [error for error in fewest if _path(error["loc"]) == _path(fewest[0]["loc"])]


def _path(loc: Sequence[Any]) -> str:
    """Returns the place of an error without pydantic's names of kinds, such as list[int]."""
    kinds = ("str", "int")
    parts = [part for part in loc[1:] if isinstance(part, int) or (part.isidentifier() and part not in kinds)]
    return ".".join(map(str, parts))
