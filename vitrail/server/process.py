"""The server process: it takes its port first, finishes open requests after SIGTERM, and ends."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from vitrail.errors import UsageError
from vitrail.server.connection import Connection
from vitrail.server.guard import App

if TYPE_CHECKING:
    from vitrail.server.service import Service

IDLE_SECONDS = 5
"""Seconds until an idle connection is closed."""


def take_port(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that a port conflict shows before models load. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=256)
        # connections inherit it: without it each answer but the first of a connection is 40 ms late
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = (
                f"port {port} of {host} is used by another program. Choose another with --port, or 0 for any free port."
            )
        else:
            why = f"cannot listen at {host}, port {port}: {error.strerror or error}. Check --host and --port."
        raise UsageError(why) from error
    except OverflowError as error:
        raise UsageError(f"--port is {port}; it must be between 0 and 65535") from error


class Server(uvicorn.Server):
    """The server of uvicorn. At a signal it tells the service to become not ready, then finishes open requests."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: accept no new requests."""
        self.service.draining = True
        super().handle_exit(sig, frame)


def run(app: App, service: Service, listening: socket.socket) -> None:
    """Serve until a signal comes, then finish open requests within `limits.drain` seconds.

    uvicorn raises the signal again at the end: after SIGTERM the process ends with exit code 143. After Ctrl-C this
    function returns.
    """
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Connection,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=service.limits.drain,
    )
    with suppress(KeyboardInterrupt):
        Server(config, service).run(sockets=[listening])
