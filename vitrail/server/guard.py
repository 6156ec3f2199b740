"""Checks on every request before the application sees it: its origin, its size, and the time it takes.

This is plain ASGI, so a body is measured while it arrives and is never stored twice. Every response gets the request's
id, and is counted and logged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from vitrail.server.clients import Clients
from vitrail.server.limits import Bodies, Body, Limits, Refused, too_large
from vitrail.server.logs import REQUEST_ID, Exchange, current, request_id
from vitrail.server.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

SINGLE = ("host", "origin", "sec-fetch-site", "content-length", "content-type")
"""Headers that a request may have once: of two, a proxy and this server might each believe another."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every response. The page may load nothing from other servers, whatever a class is called."""
ALWAYS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """An ASGI application around another. Metrics count the requests of each path in `paths`."""

    def __init__(
        self, app: App, limits: Limits, clients: Clients, metrics: Metrics, bodies: Bodies, paths: Iterable[str]
    ) -> None:
        self.app, self.limits, self.clients, self.metrics, self.bodies = app, limits, clients, metrics, bodies
        self.paths = frozenset(paths)
        self._open: App = self._checked
        if clients.origins:
            self._open = CORSMiddleware(
                self._checked,  # type: ignore[arg-type]
                allow_origins=clients.origins,
                allow_methods=("GET", "POST"),
                allow_headers=("X-Request-Id",),
                expose_headers=("X-Request-Id", "Retry-After"),
            )  # type: ignore[assignment]

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        token = current.set(exchange)
        own = [(REQUEST_ID, exchange.id.encode()), *ALWAYS]
        if not self.clients.keep_alive:
            own.append((b"connection", b"close"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                given = [(name, self._relative(name, value)) for name, value in message.get("headers", [])]
                message = {**message, "headers": given + own}
            else:
                exchange.bytes += len(message.get("body", b""))
            await send(message)

        try:
            with self.bodies.hold(self.limits.receive) as body:
                await self._open(scope, self._measured(receive, body), send_with_headers)
        finally:
            current.reset(token)
            path = self.clients.path(scope["path"])
            self.metrics.requests.labels(path if path in self.paths else "other", str(exchange.status)).inc()
            if exchange.method == "POST":
                self.metrics.seconds.observe(time.perf_counter() - exchange.began)
            exchange.write(path)

    async def _checked(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request to the application, or refuse it."""
        refused = self._refused(scope)
        if refused is None:
            await self.app({**scope, "root_path": self.clients.root_path}, receive, send)
        else:
            self.metrics.refused.labels(refused.reason).inc()
            # the server still reads the body and drops it, so that the client gets the response
            await as_response(refused)(scope, receive, send)

    def _relative(self, name: bytes, value: bytes) -> bytes:
        """Return the value of a header; an address of this server becomes a path below the prefix.

        Behind a proxy, the server knows neither the scheme nor the port that the client uses.
        """
        if name != b"location":
            return value
        address = urlsplit(value.decode("latin-1"))
        path = self.clients.root_path + self.clients.path(address.path)
        return (f"{path}?{address.query}" if address.query else path).encode("latin-1")

    def _refused(self, scope: MutableMapping[str, Any]) -> Refused | None:
        sent = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(sent)
        if repeated := [name for name in SINGLE if sum(name == other for other, _ in sent) > 1]:
            return Refused(400, "header", f"the request has more than one {repeated[0]} header; send one")
        if not self.clients.hosts.allow(headers.get("host", "")):
            return Refused(
                400, "host", "this Host header is not allowed; allow it with vitrail serve --allow-host NAME"
            )
        if scope["method"] not in ("GET", "HEAD") and self.clients.foreign(headers):
            message = "requests from pages of another origin are refused; allow it with vitrail serve --allow-origin"
            return Refused(403, "cross-origin", message)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limits.body:
            return too_large(self.limits.body)
        return None

    def _measured(self, receive: Receive, body: Body) -> Receive:
        """Return `receive` with limits: it raises Refused 413 for too many bytes and 408 for too much time."""

        async def measured() -> Message:
            if body.arrived:  # the next message says that the client has left
                return await receive()
            if body.dropped:
                raise self._too_slow(body)
            body.wanted = True
            try:
                async with asyncio.timeout(max(0.0, body.until - time.monotonic())) as body.waiting:
                    message = await receive()
            except TimeoutError:
                raise self._too_slow(body) from None
            finally:
                body.waiting = None
            if not body.dropped:
                self.bodies.add(body, len(message.get("body", b"")))
            if body.dropped:
                raise self._too_slow(body)
            body.arrived = not message.get("more_body", False)
            if body.size > self.limits.body:
                raise too_large(self.limits.body)
            return message

        return measured

    def _too_slow(self, body: Body) -> Refused:
        if body.dropped:
            message = "the body arrived too slowly while the memory of the server was needed for others; send it again"
            return Refused(408, "slow", message, 1)
        return Refused(408, "slow", f"the body did not arrive within {self.limits.receive:g} seconds")


def as_response(refused: Refused) -> JSONResponse:
    """Return the response that tells a client about a refusal."""
    headers = {} if refused.retry_after is None else {"Retry-After": str(refused.retry_after)}
    if refused.status == 408:  # do not wait for the rest of the body
        headers["Connection"] = "close"
    return problem_response(refused.status, refused.as_json(), headers)


def problem_response(status: int, problem: dict[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error response: `problem` says what is wrong; the request's id is beside it."""
    return JSONResponse({"error": problem, "request_id": request_id()}, status, headers)
