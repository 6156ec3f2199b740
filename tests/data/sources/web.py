"""A web server on this machine that answers byte ranges, counts what it is asked, and fails when told to."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Web:
    """Its address and what happened there."""

    address: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, Range header) of every GET."""
    failures: int = 0
    """Answers to come that are 503."""
    ranges: bool = True
    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    """Each GET waits here for others."""

    def ranges_of(self, suffix: str) -> list[str]:
        return [span for path, span in self.asked if path.endswith(suffix) and span is not None]


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body does not wait until the client has acknowledged the head

    def __init__(self, *arguments, web: Web, **options) -> None:
        self.web = web
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        span = self.headers.get("Range")
        self.web.asked.append((self.path, span))
        with suppress(threading.BrokenBarrierError):
            self.web.together.wait(5)
        if span is not None and self.web.failures:
            self.web.failures -= 1
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        if span is None or not self.web.ranges:
            super().do_GET()
            return
        begin, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", span).groups())
        data = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Range", f"bytes {begin}-{min(end, len(data) - 1)}/{len(data)}")
        self.send_header("Content-Length", str(len(data[begin : end + 1])))
        self.end_headers()
        self.wfile.write(data[begin : end + 1])

    def end_headers(self) -> None:
        if self.web.ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, *ignored) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[Web]:
    web = Web()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, web=web, directory=str(folder))) as server:
        web.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield web
        server.shutdown()
        thread.join()
