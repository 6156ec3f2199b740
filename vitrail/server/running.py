"""A server as a process: takes its port first, drains on SIGTERM, and ends."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from vitrail.allocator import keep_freed_memory
from vitrail.errors import UsageError
from vitrail.server.connection import Connection
from vitrail.server.guard import App

if TYPE_CHECKING:
    from vitrail.server.engine import Engine

IDLE = 5
"""Seconds that an idle connection is kept."""
KEPT = 32 * 2**20
"""Freed buffers of up to so many bytes are kept for the next batch; larger ones, of large pictures, are given back."""


def take_port(host: str, port: int) -> socket.socket:
    """Return a listening socket, before anything slow is done. Raises UsageError where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} of {host} is taken by another program: choose one with --port, or 0 for any free one"
        else:
            why = f"cannot listen at {host}, port {port}: {error.strerror or error}"
        raise UsageError(why) from error
    except OverflowError as error:
        raise UsageError(f"port is {port}; ports go from 0 to 65535") from error


class Server(uvicorn.Server):
    """uvicorn's, which tells the engine when it is asked to end: no longer ready, then drained, then gone."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        self.engine.draining = True
        super().handle_exit(sig, frame)


def run(app: App, engine: Engine, listening: socket.socket) -> None:
    """Serve until a signal comes, then finish what is inside, for at most `limits.drain` seconds of the engine.

    uvicorn raises the signal again when all is done: after SIGTERM the process ends as it was asked to, with 143;
    Ctrl-C is how a server is ended by hand, and returns.
    """
    keep_freed_memory(KEPT)
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Connection,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=engine.limits.drain,
    )
    with suppress(KeyboardInterrupt):
        Server(config, engine).run(sockets=[listening])
