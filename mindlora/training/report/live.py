"""The live page of runs, served to this machine's browsers, which refresh it when a run has written more."""

import http.server
import os
import secrets
import sys
import threading
from typing import Any, Sequence, Tuple

from mindlora.core.errors import ConfigError, LoraError
from mindlora.training.report.history import FILE_NAME, read_history
from mindlora.training.report.page import render

_ADDRESS = "127.0.0.1"
# Another site can make its own host name resolve to this server; it must not see the runs.
_NAMES = (_ADDRESS, "localhost")


class LiveReport(http.server.ThreadingHTTPServer):
    """A server of the page of some runs at /, built from the current histories at each request.

    Args:
        directories (sequence of str): The folder of each run that holds its metrics.jsonl.
        port (int): Port of 127.0.0.1 to listen on; 0 for any free port.

    Raises:
        DataError: A folder has no metrics.jsonl, or it is damaged.
        ConfigError: The server cannot listen on the port, or Jinja2 is missing.
    """

    daemon_threads = True

    def __init__(self, directories: Sequence[str], port: int):
        self._directories = list(directories)
        # Browsers apply only styles and scripts with this mark, which are the page's own.
        self._nonce = secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self._made: Tuple[str, bytes] = ("", b"")
        self.page()
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"Port {port} cannot be listened on: {error}. Choose another --port.") from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_ADDRESS}:{self.server_address[1]}"

    @property
    def policy(self) -> str:
        """The page's Content-Security-Policy, which limits what browsers may do."""
        own = f"'nonce-{self._nonce}'"
        return (
            f"default-src 'none'; script-src {own}; style-src {own}; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def page(self) -> Tuple[str, bytes]:
        """Returns (tag, page); the tag changes with the histories.

        Raises DataError if one of them cannot be read.
        """
        with self._lock:
            tag = f'"{"-".join(map(_version, self._directories))}"'
            if tag != self._made[0]:
                histories = [read_history(directory) for directory in self._directories]
                self._made = (tag, render(histories, live=self._nonce).encode())
            return self._made

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a browser that disconnects before it has the page."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _version(directory: str) -> str:
    """Returns a text that changes whenever a history is written to."""
    try:
        status = os.stat(os.path.join(directory, FILE_NAME))
    except FileNotFoundError:
        return "none"
    return f"{status.st_mtime_ns:x}.{status.st_size:x}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LiveReport

    def do_GET(self) -> None:
        """Answers with the page, with 304 if the browser has it, or with the reason for its absence."""
        if self.headers.get("Host", "").split(":")[0] not in _NAMES:
            self._send(403, f"Open {self.server.url}.")
        elif self.path != "/":
            self._send(404, f"There is nothing here. Open {self.server.url}.")
        else:
            self._send_page()

    def log_message(self, *_: Any) -> None:
        """Writes nothing: a page sends a request every other second."""

    def _send_page(self) -> None:
        try:
            tag, page = self.server.page()
        except LoraError as error:
            self._send(503, str(error))
            return
        if self.headers.get("If-None-Match") == tag:
            self.send_response(304)
            self.end_headers()
            return
        self._send(200, page, "text/html", {"ETag": tag, "Content-Security-Policy": self.server.policy})

    def _send(self, status: int, content: Any, kind: str = "text/plain", headers: Any = None) -> None:
        content = content if isinstance(content, bytes) else content.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
