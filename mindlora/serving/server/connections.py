"""Connection: one connection of a client, which is closed when it has waited too long for the head of a request."""

import asyncio
from typing import Any, Optional

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's connection, with one time for all waits between requests: timeout_keep_alive of its configuration.

    uvicorn's own timer runs behind an answer alone, and ends with the first byte. This one also runs from the beginning
    of the connection, and until the head of the next request is whole.
    """

    _waiting: Optional[asyncio.TimerHandle] = None

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        """Takes what may be the rest of a head."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        super().on_response_complete()
        # The connection is ready for it a moment later.
        self.loop.call_soon(self._look)

    def connection_lost(self, exc: Optional[Exception]) -> None:
        """Ends the wait."""
        super().connection_lost(exc)
        self._stop()

    def _look(self) -> None:
        """Starts or ends the timer, by whether a head is still to come."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
