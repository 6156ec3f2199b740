"""What the server says about each request: an id that the client may choose, and one line of the log.

The log is text, or one JSON object per line. Both hold the same: an access line has the time, the client, the method,
the path, the status, the bytes of the response's body, the milliseconds, the request's id and the model.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote

LogFormat = Literal["text", "json"]

log = logging.getLogger("vitrail.access")

REQUEST_ID = b"x-request-id"
VALID_ID = re.compile(rb"[!-~]{1,128}")
"""Ids that are taken from clients: printable ASCII without spaces, so that no id breaks a line of the log."""
PROBES = ("/livez", "/readyz", "/metrics")
"""Paths that monitors ask for every few seconds; successful requests are logged only with --verbose."""
LINES = 10_000
"""Maximum number of lines of the log that wait to be written."""
TOGETHER = 0.05
"""Seconds in which lines are collected and then written together: a thread that wakes up for each costs more."""
LONGEST = 200
"""Maximum number of characters of a path in the log."""


@dataclass
class Exchange:
    """One request and its response."""

    id: str
    client: str
    method: str
    path: str
    status: int = 499
    bytes: int = 0
    """Bytes of the response's body."""
    model: str | None = None
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, scope: MutableMapping[str, Any]) -> Exchange:
        """Return the exchange that an ASGI request begins. Its id is the client's, if there is one and it is valid."""
        given = [value for name, value in scope["headers"] if name.lower() == REQUEST_ID]
        valid = len(given) == 1 and VALID_ID.fullmatch(given[0])
        client = (scope.get("client") or ("-",))[0]
        return cls(
            given[0].decode("ascii") if valid else os.urandom(16).hex(),
            quote(client, safe=":.%-")[:64],  # a client may write anything into X-Forwarded-For
            scope["method"],
            quote(scope["path"], safe="/!$&'()*+,;=:@")[:LONGEST],
        )

    def write(self, path: str) -> None:
        """Write the line of the log. `path` is the request's path without a prefix."""
        level = logging.DEBUG if path in PROBES and self.status == 200 else logging.INFO
        if not log.isEnabledFor(level):
            return
        took = round(1000 * (time.perf_counter() - self.began), 1)
        asked = {"client": self.client, "method": self.method, "path": self.path}
        answered = {"status": self.status, "bytes": self.bytes, "ms": took, "request_id": self.id, "model": self.model}
        log.log(
            level,
            "%s %s %s %s %d %d B %s ms %s %s",
            *(_now(time.time()), *asked.values(), self.status, self.bytes, took, self.id, self.model or "-"),
            extra={"fields": {"message": "request", **asked, **answered}},
        )


current: ContextVar[Exchange | None] = ContextVar("current", default=None)
"""The exchange that this task works for, if it works for one."""


def request_id() -> str | None:
    """Return the id of the request that this task works for."""
    exchange = current.get()
    return None if exchange is None else exchange.id


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, message, and what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        own: dict[str, Any] | None = getattr(record, "fields", None)
        line: dict[str, Any] = {"time": _now(record.created), "level": record.levelname.lower()}
        line |= {"message": record.getMessage()} if own is None else own
        if own is None and (known := getattr(record, "request_id", None)) is not None:
            line["request_id"] = known
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_as_json() -> None:
    """Write everything that this process logs to standard error as JSON, warnings and uncaught errors included.

    The level of the `vitrail` logger stays as it is.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("", "vitrail"):  # libraries log to the root
        logging.getLogger(name).handlers = [handler]
    logging.getLogger("vitrail").propagate = False
    logging.captureWarnings(True)

    def uncaught(*info: Any) -> None:
        logging.getLogger("vitrail").critical("%s: %s", info[0].__name__, info[1], exc_info=info)

    sys.excepthook = uncaught


class LogThread:
    """Writes the log from a thread of its own, so that no request waits for a slow disk or a pipe that nobody reads.

    Lines are dropped while `LINES` of them wait. Use: `start`, then `stop`.
    """

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[list[logging.Handler], logging.LogRecord] | None] = queue.Queue(LINES)
        self._before = {name: logging.getLogger(name).handlers for name in ("", "vitrail", "uvicorn")}
        self._thread = threading.Thread(target=self._write, name="vitrail-log", daemon=True)

    def start(self) -> None:
        """Put the thread between the loggers and their handlers."""
        for name, handlers in self._before.items():
            logging.getLogger(name).handlers = [_Behind(self._waiting, handlers)] if handlers else []
        self._thread.start()

    def stop(self) -> bool:
        """Give the loggers their handlers back. Return whether all lines were written, within a second."""
        for name, handlers in self._before.items():
            logging.getLogger(name).handlers = handlers
        with suppress(queue.Full):
            self._waiting.put(None, timeout=1)
        self._thread.join(1)
        return not self._thread.is_alive()

    def _write(self) -> None:
        while True:
            batch = [self._waiting.get()]
            time.sleep(TOGETHER)
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            for item in batch:
                if item is None:
                    return
                handlers, record = item
                for handler in handlers:
                    handler.handle(record)


class _Behind(logging.Handler):
    """Hands records to the thread that writes them with `handlers`."""

    def __init__(self, waiting: queue.Queue[Any], handlers: list[logging.Handler]) -> None:
        super().__init__()
        self._waiting, self._handlers = waiting, handlers

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        record.request_id = request_id()
        with suppress(queue.Full):
            self._waiting.put_nowait((self._handlers, record))


def is_json() -> bool:
    """Return whether `log_as_json` was called."""
    return any(isinstance(one.formatter, JsonLines) for one in logging.getLogger("vitrail").handlers)


def _now(seconds: float) -> str:
    """Return a time in UTC: 2026-03-01T12:00:00.123Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
