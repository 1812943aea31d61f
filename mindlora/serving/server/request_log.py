"""One line of JSON for each request to the API."""

import dataclasses
import datetime
import json
import logging
import sys
import time
import uuid
from typing import Any, Callable, List, MutableMapping, Optional, TextIO

from mindlora.serving.server.errors import ApiError

logger = logging.getLogger("mindlora")


@dataclasses.dataclass
class RequestRecord:
    """The record of a request, which becomes its line. Fields are None if the request did not get that far.

    Attributes:
        time (str): Time of arrival, ISO 8601, UTC.
        id (str): Also in the answer's header X-Request-Id.
        key (str or None): Name of the key.
        model (str or None): The model that the request names.
        choices (int): Number of requested answers.
        prompt_tokens, cached_tokens, generated_tokens (int): Tokens; those of a prompt count once.
        queue_seconds (float): From its arrival at the engine to the computation of its first part.
        first_token_seconds (float): From its arrival at the engine to its first token.
        seconds (float): From the first byte to the last.
        status (int or None): HTTP status; None if the client had gone.
        reason (str or None): The reason for its end: stop, length, or an error's code.
        prompt (list or None): The prompts, if the operator logs them.
    """

    time: str
    id: str
    method: str
    path: str
    key: Optional[str] = None
    model: Optional[str] = None
    stream: bool = False
    choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_seconds: Optional[float] = None
    first_token_seconds: Optional[float] = None
    seconds: float = 0.0
    status: Optional[int] = None
    reason: Optional[str] = None
    prompt: Optional[List[Any]] = None

    def line(self) -> str:
        """Returns the record as JSON, without unknown fields."""
        fields = {}
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                fields[name] = round(value, 6) if isinstance(value, float) else value
        return json.dumps(fields)


class RequestLog:
    """The file to which lines are appended, or standard error if the path is None."""

    def __init__(self, path: Optional[str]):
        # Line-buffered: each line is written as soon as its request has ended.
        self._file: TextIO = open(path, "a", encoding="utf-8", buffering=1) if path else sys.stderr  # noqa: SIM115

    def write(self, record: RequestRecord) -> None:
        """Appends a record; a full disk does not prevent answers."""
        try:
            self._file.write(record.line() + "\n")
        except OSError as error:
            logger.error("The request log cannot be written: %s. Make room on its disk.", error)


class Recorder:
    """The outermost middleware: records each request, and answers if everything else failed.

    The log gets the records of the API's paths, ``count`` every record; ``told`` returns a client's error.
    """

    def __init__(
        self,
        app: Any,
        log: RequestLog,
        count: Callable[[RequestRecord], None],
        told: Callable[[BaseException], ApiError],
    ):
        self._app = app
        self._log = log
        self._count = count
        self._told = told

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        record = RequestRecord(now, uuid.uuid4().hex, scope["method"], scope["path"])
        state = scope.setdefault("state", {})
        began = time.monotonic()
        state["record"] = record

        async def noting(message):
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", record.id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            problem = self._told(error)
            record.reason = problem.code
            if record.status is None:
                await problem.response()(scope, receive, noting)
        finally:
            record.key = state.get("key")
            record.seconds = time.monotonic() - began
            self._count(record)
            if record.path.startswith("/v1/"):
                self._log.write(record)
