"""What the server says about each request: an id that the client may choose, and one line of the log.

The log is text, or one JSON object per line. Both hold the same: an access line has the time, the client, the method,
the path, the status, the bytes of the response's body, the milliseconds, the request's id and the model.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import MutableMapping
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
        fields = {
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "bytes": self.bytes,
            "ms": took,
            "request_id": self.id,
            "model": self.model,
        }
        log.log(
            level,
            "%s %s %s %s %d %d B %s ms %s %s",
            _now(time.time()),
            self.client,
            self.method,
            self.path,
            self.status,
            self.bytes,
            took,
            self.id,
            self.model or "-",
            extra={"fields": {"message": "request", **fields}},
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
        if own is None and (known := request_id()) is not None:
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


def is_json() -> bool:
    """Return whether `log_as_json` was called."""
    return any(isinstance(one.formatter, JsonLines) for one in logging.getLogger("vitrail").handlers)


def _now(seconds: float) -> str:
    """Return a time in UTC: 2026-03-01T12:00:00.123Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
