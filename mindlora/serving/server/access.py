"""Who may use the server and how much: keys, hosts, bytes and time of a body, requests of a key."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import math
import time
from typing import Any, Dict, Iterator, Mapping, Optional

from mindlora.core.errors import ConfigError
from mindlora.serving.server.errors import CLIENT_GONE, ApiError

# Paths for load balancers reveal nothing about users, and neither does the page, which asks for a key itself.
_OPEN = ("/", "/health", "/ready")


class ApiKeys:
    """The keys in a file, one "name key" per line; empty lines and lines that begin with # are ignored.

    Raises ConfigError if it cannot be read, holds no key, or a line is not a name and a key, or repeats one.
    """

    def __init__(self, path: str):
        try:
            with open(path, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--api-key-file {path} cannot be read: {error}. Correct the path, its permissions or its encoding."
            ) from error
        self._digests: Dict[str, bytes] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise ConfigError(f"--api-key-file {path}, line {number}: write a name, a space and its key.")
            name = words[0]
            digest = _digest(words[1].encode())
            if name in self._digests or digest in self._digests.values():
                raise ConfigError(
                    f"--api-key-file {path}, line {number} repeats a name or a key that is above it. Remove the line."
                )
            self._digests[name] = digest
        if not self._digests:
            raise ConfigError(f"--api-key-file {path} holds no key: write a name, a space and its key in each line.")

    def name_of(self, key: bytes) -> Optional[str]:
        """Returns the name of a key, or None for one that is not in the file; takes equally long for every key."""
        digest = _digest(key)
        owner = None
        for name, digest_of_name in self._digests.items():
            if hmac.compare_digest(digest, digest_of_name):
                owner = name
        return owner


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyCheck:
    """Middleware that lets requests pass if they have a key, and records its name. Without keys, all pass."""

    def __init__(self, app: Any, keys: Optional[ApiKeys]):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if self._keys is not None and scope["type"] == "http" and scope["path"] not in _OPEN:
            name = self._keys.name_of(_bearer(scope))
            if name is None:
                error = ApiError(
                    "This server asks for a key: send it as Authorization: Bearer KEY.", 401, "invalid_api_key"
                )
                await error.answer(scope, receive, send)
                return
            scope["state"]["key"] = name
        await self._app(scope, receive, send)


class HostCheck:
    """Middleware that makes a server without keys answer only this machine.

    A web page of another site can make its own name resolve to 127.0.0.1 (DNS rebinding). Its requests then come from
    a browser on this machine, but name that site as their host.
    """

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        host = dict(scope["headers"]).get(b"host", b"localhost").decode("latin-1") if scope["type"] == "http" else ""
        if host and not _is_address(host):
            error = ApiError(
                "This server has no keys and answers as localhost or by an address: use one of these, or start it with "
                "--api-key-file or --no-auth.",
                403,
                "host_not_allowed",
            )
            await error.answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_address(host: str) -> bool:
    """Returns whether the host of a request is localhost or an IP address, with any port."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    try:
        return name.lower() == "localhost" or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


def _bearer(scope: Mapping[str, Any]) -> bytes:
    """Returns the key in the header Authorization, or "" if there is none."""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
    return b""


class FramingCheck:
    """Middleware that refuses a request with two lengths, and closes its connection.

    A body by Content-Length, as a proxy read it, may contain another request by Transfer-Encoding (request smuggling).
    """

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if {b"content-length", b"transfer-encoding"} <= names:
            error = ApiError(
                "The request has both Content-Length and Transfer-Encoding: send one of them.", 400, "invalid_framing"
            )
            await error.answer(scope, receive, send, {"Connection": "close"})
            return
        await self._app(scope, receive, send)


class BodyLimit:
    """Middleware that reads the whole body of a request before anything else does.

    A body of more than max_bytes is answered with 413, one that takes longer than ``seconds`` with 408.
    """

    def __init__(self, app: Any, max_bytes: int, seconds: float):
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            messages = [await self._read(scope, receive)]
        except ApiError as error:
            await error.answer(scope, receive, send, {"Connection": "close"})
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
        body = bytearray()
        more = True
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
            raise ApiError(
                f"The body is larger than {self._max_bytes} bytes, the limit. Send a shorter one.",
                413,
                "body_too_large",
            )


def client_gone() -> ApiError:
    """Returns the exception that ends a request whose client is gone."""
    return ApiError("The client closed the connection.", CLIENT_GONE, "disconnected")


class KeyLimits:
    """Counts requests by key. Without keys, all clients count as one.

    ``at_once`` limits requests that run or wait, ``per_minute`` requests sent in a minute, of which unused ones may
    come at once (a token bucket). None sets no limit.
    """

    def __init__(self, at_once: Optional[int], per_minute: Optional[int]):
        self._at_once = at_once
        self._per_minute = per_minute
        self._open: Dict[Optional[str], int] = {}
        self._buckets: Dict[Optional[str], _Bucket] = {}

    @contextlib.contextmanager
    def hold(self, key: Optional[str], now: Optional[float] = None) -> Iterator[None]:
        """Counts one request of a key within the context; raises ApiError, 429, if the key has reached a limit."""
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
        self._size = size
        self._level = float(size)
        self._filled = now

    def take(self, now: float) -> float:
        """Takes one token and returns 0, or returns the seconds until there is one."""
        rate = self._size / 60
        self._level = min(self._size, self._level + (now - self._filled) * rate)
        self._filled = now
        if self._level < 1:
            return (1 - self._level) / rate
        self._level -= 1
        return 0.0
