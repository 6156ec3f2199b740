"""What every request passes before anything is done for it: whose page sent it, how large it is, what is answered.

Plain ASGI, so that a body is measured while it arrives and nothing is held twice.

A page of another site can make a browser send requests to this machine. It cannot choose the Host header unless
its own name was made to point here (DNS rebinding), which is why only this server's names pass; and a browser
says in Origin and Sec-Fetch-Site whose page is asking, which is why a POST from elsewhere does not pass.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from vitrail.server.limits import Limits, Refused, too_large
from vitrail.server.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

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
"""Of every answer: the page may load nothing from elsewhere, whatever a class is called."""


class Hosts:
    """The names under which this server may be asked for.

    Bound to this machine alone, those are localhost's; bound to more, also the machine's own name and any IP
    address, since a page under an address cannot be rebound to another. `also` adds names, such as a proxy's.
    """

    def __init__(self, bound: str, also: Iterable[str] = ()) -> None:
        self.names = {name.lower() for name in (*LOOPBACK, bound, *also)}
        self.any_address = bound not in LOOPBACK
        if self.any_address:
            self.names.add(socket.gethostname().lower())

    def allow(self, header: str) -> bool:
        """Does a Host header name this server?"""
        name = host_name(header)
        return name in self.names or (self.any_address and _is_address(name))


def host_name(header: str) -> str:
    """Return the name in a Host header, without its port; "" where it is malformed."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def foreign(headers: dict[str, str]) -> bool:
    """Did a page of another origin make the browser send this?"""
    site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
    if site not in ("none", "same-origin"):
        return True
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


class Guard:
    """Wraps an application; `paths` are those that metrics tell apart."""

    def __init__(self, app: App, limits: Limits, hosts: Hosts, metrics: Metrics, paths: Iterable[str]) -> None:
        self.app, self.limits, self.hosts, self.metrics = app, limits, hosts, metrics
        self.paths = frozenset(paths)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one connection, as ASGI has it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        try:
            refused = self._refused(scope)
            if refused is None:
                await self.app(scope, self._measured(receive), noted)
            else:
                self.metrics.refused.add(refused.reason)
                await answer(noted, refused)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.add(path, str(status))
            if scope["method"] == "POST":
                self.metrics.seconds.observe(time.perf_counter() - began)

    def _refused(self, scope: MutableMapping[str, Any]) -> Refused | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not self.hosts.allow(headers.get("host", "")):
            return Refused(400, "host", "this server does not answer to that Host header (vitrail serve --allow-host)")
        if scope["method"] not in ("GET", "HEAD") and foreign(headers):
            return Refused(403, "cross-origin", "requests from pages of another origin are refused")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limits.body:
            return too_large(self.limits.body)
        return None

    def _measured(self, receive: Receive) -> Receive:
        """`receive` that raises Refused 413 for the byte too many, and 408 when the body takes too long."""
        size, until, ended = 0, time.monotonic() + self.limits.receive, False

        async def measured() -> Message:
            nonlocal size, ended
            if ended:  # what comes now is the client's leaving
                return await receive()
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise Refused(408, "slow", f"the body did not arrive in {self.limits.receive:g} seconds") from None
            size += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if size > self.limits.body:
                raise too_large(self.limits.body)
            return message

        return measured


async def answer(send: Send, refused: Refused) -> None:
    """Send a refusal as JSON. A body still on its way is read and dropped by the server, so that the answer arrives."""
    body = json.dumps({"error": refused.as_json()}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
