"""Requests to the server of a reward model or a teacher: JSON in both directions, repeated while it is busy."""

import json
import math
import socket
import time
from typing import Any, Callable, Mapping, Optional

from mindlora.core.errors import LoraError
from mindlora.core.text import shown

# A server's status while its queue is full or its model is loading.
_BUSY = (429, 503)
# Seconds before a request to a busy server is repeated.
_PAUSE = 0.5
_NO_SUCH_PATH = (404, 405)


def path_of(url: str, path: str) -> str:
    """Returns the address of a path on the server at ``url``, which may end with /v1."""
    return f"{url.rstrip('/').removesuffix('/v1')}/{path}"


def ask(
    address: str,
    body: Optional[Mapping[str, Any]],
    error: Callable[[str], LoraError],
    end: float = math.inf,
    limit: str = "",
    optional: bool = False,
    tell: Callable[[str], Any] = lambda said: None,
) -> Any:
    """Returns a server's JSON answer to a JSON body, which is sent again while the server is busy.

    Args:
        address (str): The address, including the path.
        body (mapping): The body to post. None: a GET request.
        error (callable): Makes an error from a message.
        end (float): The deadline, by time.monotonic(). Default: none.
        limit (str): The key that sets the deadline, for the message.
        optional (bool): Whether the server may lack the path; the answer is then None. Default: False.
        tell (callable): Called with a busy server's message before the request is repeated. Default: does nothing.

    Raises ``error`` if the server does not answer, refuses, or does not answer in time.
    """
    # Imported here: it brings ssl, which a command that only reads a YAML does not need.
    import urllib.error
    import urllib.request

    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    said = f"{address} gave no answer"
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise error(f"{said} in time. Raise {limit}, or give the server more room.")
        try:
            with urllib.request.urlopen(request, timeout=None if left == math.inf else left) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refusal:
            if optional and refusal.code in _NO_SUCH_PATH:
                return None
            said = f"{address} answered {refusal.code}: {shown(refusal.read().decode('utf-8', 'replace'))}"
            if refusal.code not in _BUSY:
                raise error(f"{said}. Check the server, and the name of the model.") from refusal
            tell(f"{said}. Asking again.")
            time.sleep(max(0.0, min(_PAUSE, end - time.monotonic())))
        except (OSError, ValueError) as problem:
            # A connection that takes too long raises a timeout directly, or as the reason of a URLError.
            if isinstance(getattr(problem, "reason", problem), socket.timeout):
                continue
            raise error(
                f"{address} does not answer: {problem}. Start the server (mindlora serve, or vLLM), or correct the "
                "address."
            ) from problem
