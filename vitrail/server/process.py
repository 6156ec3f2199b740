"""The server process: it takes its port first, finishes open requests after SIGTERM, and ends."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from vitrail.errors import UsageError
from vitrail.server.clients import Clients
from vitrail.server.connection import Connection
from vitrail.server.guard import App
from vitrail.server.hang_ups import HangUps
from vitrail.server.logs import LogThread, is_json

if TYPE_CHECKING:
    from vitrail.server.service import Service

log = logging.getLogger("vitrail")


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


LEAVING = 5
"""Seconds after the time for open requests in which the server has to end."""


def end_after(seconds: int, number: int) -> Callable[[], None]:
    """End this process after a time with the exit code of a signal, whatever a thread still computes.

    Return a function that takes this back.

    A decoder may hold the lock of the interpreter, so that no thread of Python runs. Then the kernel ends the process a
    second later.
    """
    timer = threading.Timer(seconds, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()
    if sys.platform != "win32":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds + 1)

    def cancel() -> None:
        timer.cancel()
        if sys.platform != "win32":
            signal.alarm(0)

    return cancel


class Server(uvicorn.Server):
    """The server of uvicorn. At a signal it tells the service to become not ready, then finishes open requests.

    SIGHUP loads the models anew. If the server was started from a terminal that has gone since, SIGHUP ends it.
    """

    def __init__(self, config: uvicorn.Config, service: Service, hang_ups: HangUps) -> None:
        super().__init__(config)
        self.service, self.hang_ups = service, hang_ups
        self.ended_in_time: Callable[[], None] = lambda: None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGHUP, too."""
        with super().capture_signals():
            if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
                yield
                return
            before = signal.getsignal(signal.SIGHUP)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self._hung_up)
            try:
                yield
            finally:
                loop.remove_signal_handler(signal.SIGHUP)
                signal.signal(signal.SIGHUP, before or signal.SIG_DFL)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then answer a SIGHUP that came while the models were read."""
        await super().startup(sockets)
        if self.hang_ups.waiting:
            self._hung_up()

    def _hung_up(self) -> None:
        if sys.platform != "win32" and self.hang_ups.of_terminal:
            self.handle_exit(signal.SIGHUP, None)
        else:
            self.service.reload()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish open requests, and say so: a handler of signals must not write."""
        inside, seconds = self.service.gate.inside, self.service.limits.drain
        log.info("draining: open requests are finished first, for at most %d s (%d images inside)", seconds, inside)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: accept no new requests."""
        self.service.draining = True
        if not self.should_exit:
            self.ended_in_time = end_after(self.service.limits.drain + LEAVING, sig)
        super().handle_exit(sig, frame)


def _most_connections() -> int:
    """Return how many connections there may be: half of the files that this process may open."""
    if sys.platform == "win32":
        return Connection.most
    import resource

    return min(Connection.most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def serve_until_signal(
    app: App, service: Service, listening: socket.socket, clients: Clients, hang_ups: HangUps
) -> None:
    """Serve until a signal comes, then finish open requests within `limits.drain` seconds.

    `hang_ups` holds SIGHUP since before the models were read.
    uvicorn raises the signal again at the end: after SIGTERM the process ends with exit code 143. After Ctrl-C this
    function returns.
    """
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=type("Limited", (Connection,), {"most": _most_connections()}),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=bool(clients.proxies),
        forwarded_allow_ips=list(clients.proxies),
        ws="none",
        lifespan="on",
        timeout_keep_alive=clients.keep_alive,
        timeout_graceful_shutdown=service.limits.drain,
    )
    if is_json():  # uvicorn has set up its own loggers
        for name in ("uvicorn", "uvicorn.error"):
            logging.getLogger(name).handlers, logging.getLogger(name).propagate = [], True
    server, behind = Server(config, service, hang_ups), LogThread()
    behind.start()
    try:
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    finally:
        if behind.stop():  # else the interpreter would wait for the thread at its end
            server.ended_in_time()
