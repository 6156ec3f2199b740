"""An HTTP connection with limits on the time and size of a request's head, and on the number of connections.

uvicorn limits how long a connection may be idle after a response. It does not limit the time or the size of the head
of a request (its first line and headers), nor how long a new connection may send nothing. If there are too many
connections, it refuses every further request; here the connection that has waited longest for its client is closed.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection(HttpToolsProtocol):
    """A connection that is closed if a head takes more than `seconds`, or `largest` bytes and one packet."""

    seconds = 10.0
    largest = 16 * 1024
    most = 1_000
    """Maximum number of connections of the server."""
    _since = 0.0
    """When the server began to wait for what it waits for: a request, or the rest of one."""
    _received = 0
    """Bytes received of an incomplete head."""
    _timer: asyncio.TimerHandle | None = None
    """The timer, while a head is expected."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for a new client."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._start_timer()
        if len(self.connections) > self.most:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that waits longest for a request, else for the rest of a request; else this one."""
        others = [
            one for one in self.connections if isinstance(one, Connection) and one is not self and one.waits_for_client
        ]
        oldest = min(others, key=lambda one: (one.works, one._since), default=self)
        oldest.transport.abort()  # closing waits until the client has read everything

    @property
    def works(self) -> bool:
        """Whether a request is inside: its head has arrived, and its response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits_for_client(self) -> bool:
        """Whether the next thing to happen is up to the client."""
        return not self.transport.is_closing() and (not self.works or self.cycle.more_body)

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
        self._since = self.loop.time()
        self._start_timer()

    def on_headers_complete(self) -> None:
        """Stop the timer: the head is complete."""
        self._stop_timer()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._since = self.loop.time()
        super().on_response_complete()

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
