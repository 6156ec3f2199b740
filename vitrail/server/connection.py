"""An HTTP connection with limits on the time and size of a request's head.

uvicorn limits how long a connection may be idle after a response. It does not limit the time or the size of the head
of a request (its first line and headers), nor how long a new connection may send nothing.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection(HttpToolsProtocol):
    """A connection that is closed if a head takes more than `seconds`, or `largest` bytes and one packet."""

    seconds = 10.0
    largest = 16 * 1024
    _received = 0
    """Bytes received of an incomplete head."""
    _timer: asyncio.TimerHandle | None = None
    """The timer, while a head is expected."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for a new client."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Count the bytes of the head."""
        super().data_received(data)
        if self._timer is not None:
            self._received += len(data)
            if self._received > self.largest:
                self.transport.close()

    def on_message_begin(self) -> None:
        """Start the timer for a new request."""
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        """Stop the timer: the head is complete."""
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer: the client has left."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._received, self._timer = 0, self.loop.call_later(self.seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
