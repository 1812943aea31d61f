"""Streamed answers: server-sent events, one chunk each, and [DONE] at the end."""

import json
from typing import Any, AsyncGenerator, MutableMapping

from starlette.responses import Response

from mindlora.serving.server.calls import Call
from mindlora.serving.server.errors import as_api_error

_DONE = b"data: [DONE]\n\n"


async def stream_answer(call: Call, form: Any, include_usage: bool) -> Response:
    """Returns a streamed answer as soon as there is something to send, so that errors until then have their status."""
    events = _events(call, form, include_usage)
    try:
        first = await events.__anext__()
    except BaseException:
        call.close()
        raise
    return EventStream(call, first, events)


async def _events(call: Call, form: Any, include_usage: bool) -> AsyncGenerator[bytes, None]:
    # With include_usage every chunk has the field, and it is null in all but the last.
    usage = {"usage": None} if include_usage else {}
    async for choice, piece in call.pieces():
        for part in form.chunks(choice, piece):
            yield _event(form.chunk([part], **usage))
    if include_usage:
        yield _event(form.chunk([], usage=call.usage()))


def _event(chunk: Any) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class EventStream(Response):
    """An answer that is sent while it is made. An error in the middle of it becomes an event.

    Args:
        call (Call): Closed when the answer has been sent, or cannot be.
        first (bytes): The first event.
        events (async generator): The others.
    """

    media_type = "text/event-stream"

    def __init__(self, call: Call, first: bytes, events: AsyncGenerator[bytes, None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._call, self._first, self._rest = call, first, events

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await _send(send, self._first)
                async for event in self._rest:
                    await _send(send, event)
            except Exception as error:
                found = as_api_error(error)
                self._call.failed(found)
                await _send(send, b"data: " + json.dumps(found.content).encode() + b"\n\n")
            await send({"type": "http.response.body", "body": _DONE, "more_body": False})
        finally:
            self._call.close()
            await self._rest.aclose()


async def _send(send: Any, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})
