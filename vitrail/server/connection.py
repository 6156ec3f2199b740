"""A connection of uvicorn's whose client may not take for ever to say what it wants, nor say any amount.

uvicorn bounds how long a connection may lie idle after an answer, but not how long the head of a request (its first
line and headers) may take or how large it may grow, nor how long a new connection may say nothing.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection(HttpToolsProtocol):
    """Closed where a head does not arrive within `seconds`, or within `largest` bytes and the packet that ends it."""

    seconds = 10.0
    largest = 16 * 1024
    _received = 0
    """Bytes of a head that is not complete."""
    _overdue: asyncio.TimerHandle | None = None
    """The clock, as long as a head is awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A client sent something."""
        super().data_received(data)
        if self._overdue is not None:
            self._received += len(data)
            if self._received > self.largest:
                self.transport.close()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._watch()

    def on_headers_complete(self) -> None:
        """A head has come."""
        self._forget()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """A client is gone."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self._overdue is None:
            self._received, self._overdue = 0, self.loop.call_later(self.seconds, self.transport.close)

    def _forget(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
