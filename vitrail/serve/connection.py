"""A connection of uvicorn's whose client may not take for ever to say what it wants.

uvicorn bounds the size of a request's head (request line and headers) and how long a connection may lie idle
after an answer, but not how long a head may take, nor how long a new connection may say nothing.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Closed where a head does not arrive within `seconds`, of the first request and of each after it."""

    seconds = 10.0
    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A client sent something."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """A client is gone."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock where a head is awaited, and stop it where one has come."""
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._overdue is None:
            self._overdue = self.loop.call_later(self.seconds, self.transport.close)

    def _forget(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
