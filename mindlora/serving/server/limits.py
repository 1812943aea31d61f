"""Limits: bytes of a body and the time it takes, requests of a key."""

import asyncio
import contextlib
import math
import time
from typing import Any, Dict, Iterator, Mapping, Optional

from mindlora.serving.server.errors import CLIENT_GONE, ApiError, note_error


class BodyLimit:
    """The part of the app that reads a request's body whole before anything else does.

    Args:
        app: The ASGI app behind it.
        max_bytes (int): Bytes at most; more is answered with 413.
        seconds (float): Time in which the body must be there; else 408 is answered.
    """

    def __init__(self, app: Any, max_bytes: int, seconds: float):
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            messages = [await self._read(scope, receive)]
        except ApiError as error:
            note_error(scope, error)
            await error.response({"Connection": "close"})(scope, receive, send)
            return

        async def read_before():
            return messages.pop() if messages else await receive()

        await self._app(scope, read_before, send)

    async def _read(self, scope, receive):
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        self._check(int(declared) if declared.isdigit() else 0)
        try:
            body = await asyncio.wait_for(self._chunks(receive), self._seconds)
        except asyncio.TimeoutError:
            error = ApiError(f"The body took longer than {self._seconds:g} seconds.", 408, "body_timeout")
            raise error from None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _chunks(self, receive):
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise client_gone()
            body += message.get("body", b"")
            self._check(len(body))
            more = message.get("more_body", False)
        return bytes(body)

    def _check(self, size):
        if size > self._max_bytes:
            raise ApiError(f"The body is larger than {self._max_bytes} bytes, the limit.", 413, "body_too_large")


def client_gone() -> ApiError:
    """Returns what ends a request whose client is gone."""
    return ApiError("The client closed the connection.", CLIENT_GONE, "disconnected")


class KeyLimits:
    """Counts requests by key. Without keys, all clients count as one.

    Args:
        at_once (int or None): Requests of a key that may run or wait at the same time.
        per_minute (int or None): Requests that a key may send in a minute; unused ones may come at once (a bucket of
            tokens).
    """

    def __init__(self, at_once: Optional[int], per_minute: Optional[int]):
        self._at_once, self._per_minute = at_once, per_minute
        self._open: Dict[Optional[str], int] = {}
        self._buckets: Dict[Optional[str], _Bucket] = {}

    @contextlib.contextmanager
    def hold(self, key: Optional[str], now: Optional[float] = None) -> Iterator[None]:
        """Counts one request of a key while the context lasts.

        Raises:
            ApiError: 429, the key has reached a limit.
        """
        running = self._open.get(key, 0)
        if self._at_once is not None and running >= self._at_once:
            raise ApiError(
                f"This key has {running} requests running or waiting, as many as it may: wait for one to end.",
                429,
                "too_many_requests",
                retry_after=1,
            )
        self._take(key, time.monotonic() if now is None else now)
        self._open[key] = running + 1
        try:
            yield
        finally:
            self._open[key] -= 1

    def _take(self, key, now):
        if self._per_minute is None:
            return
        bucket = self._buckets.setdefault(key, _Bucket(self._per_minute, now))
        wait = bucket.take(now)
        if wait:
            raise ApiError(
                f"This key may send {self._per_minute} requests a minute, and has: wait {math.ceil(wait)} s.",
                429,
                "rate_limit_exceeded",
                retry_after=math.ceil(wait),
            )


class _Bucket:
    """Fills evenly up to ``size`` in a minute."""

    def __init__(self, size: int, now: float):
        self._size, self._level, self._filled = size, float(size), now

    def take(self, now: float) -> float:
        """Takes one out, and returns 0; or returns the seconds until there is one."""
        rate = self._size / 60
        self._level = min(self._size, self._level + (now - self._filled) * rate)
        self._filled = now
        if self._level < 1:
            return (1 - self._level) / rate
        self._level -= 1
        return 0.0
