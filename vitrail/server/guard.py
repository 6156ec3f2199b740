"""Checks on every request before the application sees it: its origin, its size, and the time it takes.

This is plain ASGI, so a body is measured while it arrives and is never stored twice.

A page of another site can make a browser send requests to this machine. It can choose the Host header only if its own
name points here (DNS rebinding), so only this server's names are accepted. Browsers say in Origin and Sec-Fetch-Site
which page sends a request, so a POST request from another site is refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

from vitrail.server.limits import Limits, Refused, too_large
from vitrail.server.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

SINGLE = ("host", "origin", "sec-fetch-site", "content-length", "content-type")
"""Headers that a request may have once: of two, a proxy and this server might each believe another."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
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


class Hosts:
    """The host names that requests may use.

    A server that listens only to this machine accepts the names of localhost. One that listens to other machines also
    accepts the machine's own name and any IP address, because an address cannot be rebound. `also` adds names, such as
    that of a proxy.
    """

    def __init__(self, bound: str, also: Iterable[str] = ()) -> None:
        self.names = {name.lower() for name in (*LOOPBACK, bound, *also)}
        self.any_address = bound not in LOOPBACK
        if self.any_address:
            self.names.add(socket.gethostname().lower())

    def allow(self, header: str) -> bool:
        """Return whether a Host header names this server."""
        try:
            parts = urlsplit(f"//{header}")
            name = parts.hostname or ""
            if parts.netloc != header or parts.username is not None:
                return False
            _ = parts.port  # raises ValueError for a port that cannot be
            return name in self.names or (self.any_address and bool(ipaddress.ip_address(name)))
        except ValueError:  # the header is malformed, or the name is not an address
            return False


def foreign(headers: dict[str, str]) -> bool:
    """Return whether a page of another origin made the browser send this."""
    site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
    if site not in ("none", "same-origin"):
        return True
    try:
        return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    except ValueError:  # the header is malformed
        return True


class Guard:
    """An ASGI application around another. Metrics count the requests of each path in `paths`."""

    def __init__(self, app: App, limits: Limits, hosts: Hosts, metrics: Metrics, paths: Iterable[str]) -> None:
        self.app, self.limits, self.hosts, self.metrics = app, limits, hosts, metrics
        self.paths = frozenset(paths)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        try:
            refused = self._refused(scope)
            if refused is None:
                await self.app(scope, self._measured(receive), send_with_headers)
            else:
                self.metrics.refused.labels(refused.reason).inc()
                # the server still reads the body and drops it, so that the client gets the response
                await as_response(refused)(scope, receive, send_with_headers)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, str(status)).inc()
            if scope["method"] == "POST":
                self.metrics.seconds.observe(time.perf_counter() - began)

    def _refused(self, scope: MutableMapping[str, Any]) -> Refused | None:
        sent = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(sent)
        if repeated := [name for name in SINGLE if sum(name == other for other, _ in sent) > 1]:
            return Refused(400, "header", f"the request has more than one {repeated[0]} header; send one")
        if not self.hosts.allow(headers.get("host", "")):
            return Refused(
                400, "host", "this Host header is not allowed; allow it with vitrail serve --allow-host NAME"
            )
        if scope["method"] not in ("GET", "HEAD") and foreign(headers):
            return Refused(403, "cross-origin", "requests from pages of another origin are refused")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limits.body:
            return too_large(self.limits.body)
        return None

    def _measured(self, receive: Receive) -> Receive:
        """Return `receive` with limits: it raises Refused 413 for too many bytes and 408 for too much time."""
        size, until, ended = 0, time.monotonic() + self.limits.receive, False

        async def measured() -> Message:
            nonlocal size, ended
            if ended:  # the next message says that the client has left
                return await receive()
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise Refused(408, "slow", f"the body did not arrive within {self.limits.receive:g} seconds") from None
            size += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if size > self.limits.body:
                raise too_large(self.limits.body)
            return message

        return measured


def as_response(refused: Refused) -> JSONResponse:
    """Return the response that tells a client about a refusal."""
    headers = {} if refused.retry_after is None else {"Retry-After": str(refused.retry_after)}
    if refused.status == 408:  # do not wait for the rest of the body
        headers["Connection"] = "close"
    return JSONResponse({"error": refused.as_json()}, refused.status, headers)
