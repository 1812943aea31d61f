"""Keys: who may use the server."""

import hashlib
import hmac
import ipaddress
from typing import Any, Dict, Mapping, Optional

from mindlora.errors import ConfigError
from mindlora.serving.server.errors import ApiError, note_error

# What a load balancer asks tells nothing about anyone.
_OPEN = ("/health", "/ready")


class ApiKeys:
    """The keys in a file, one "name key" a line; empty lines and those that begin with # count for nothing.

    Args:
        path (str): The file.

    Raises:
        ConfigError: It cannot be read, holds no key, or a line is not a name and a key, or has one that was there.
    """

    def __init__(self, path: str):
        try:
            with open(path, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from error
        self._digests: Dict[str, bytes] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise ConfigError(f"--api-key-file {path}, line {number}: write a name, a space and its key.")
            name, digest = words[0], _digest(words[1].encode())
            if name in self._digests or digest in self._digests.values():
                raise ConfigError(f"--api-key-file {path}, line {number} repeats a name or a key that is above it.")
            self._digests[name] = digest
        if not self._digests:
            raise ConfigError(f"--api-key-file {path} holds no key.")

    def name_of(self, key: bytes) -> Optional[str]:
        """Returns the name of a key, or None for one that is not in the file; takes equally long for every key."""
        digest, found = _digest(key), None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyCheck:
    """The part of the app that lets requests pass if they have a key, and notes whose it is.

    Args:
        app: The ASGI app behind it.
        keys (ApiKeys or None): The keys; None lets everyone pass.
    """

    def __init__(self, app: Any, keys: Optional[ApiKeys]):
        self._app, self._keys = app, keys

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if self._keys is not None and scope["type"] == "http" and scope["path"] not in _OPEN:
            name = self._keys.name_of(_bearer(scope))
            if name is None:
                error = _refusal()
                note_error(scope, error)
                await error.response()(scope, receive, send)
                return
            scope["state"]["key"] = name
        await self._app(scope, receive, send)


class HostCheck:
    """The part of the app of a server without keys that answers this machine alone.

    A web page of another site can have its own name resolve to 127.0.0.1 (DNS rebinding), and its requests then come
    from a browser on this machine. They name that site as their host.

    Args:
        app: The ASGI app behind it.
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
            note_error(scope, error)
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_address(host: str) -> bool:
    """Tells whether the host of a request is localhost or an IP address, whatever its port."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    try:
        return name.lower() == "localhost" or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


def _bearer(scope: Mapping[str, Any]) -> bytes:
    """Returns the key in the header Authorization, empty if there is none."""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
    return b""


def _refusal() -> ApiError:
    return ApiError("This server asks for a key: send it as Authorization: Bearer KEY.", 401, "invalid_api_key")
