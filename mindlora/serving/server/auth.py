"""Keys: who may use the server."""

import hashlib
import hmac
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


def _bearer(scope: Mapping[str, Any]) -> bytes:
    """Returns the key in the header Authorization, empty if there is none."""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
    return b""


def _refusal() -> ApiError:
    return ApiError("This server asks for a key: send it as Authorization: Bearer KEY.", 401, "invalid_api_key")
