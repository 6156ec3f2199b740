"""Which clients may use the server, and how they reach it: host names, origins of pages, a prefix, proxies.

A page of another site can make a browser send requests to this machine. It can choose the Host header only if its own
name points here (DNS rebinding), so only this server's names are accepted. Browsers say in Origin and Sec-Fetch-Site
which page sends a request, so a POST request from another site is refused unless its origin is allowed.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from vitrail.errors import UsageError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY = "*"
"""Allows the pages of every origin."""
ROOT_PATH = re.compile(r"(/[\w.~-]+)*", re.ASCII)


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


@dataclass(frozen=True)
class Clients:
    """The clients of a server. Raises UsageError for an origin, a prefix or a proxy that cannot be."""

    hosts: Hosts = field(default_factory=lambda: Hosts(LOOPBACK[0]))
    origins: tuple[str, ...] = ()
    """Origins of pages of other sites that may send requests and read the responses; "*" allows every page."""
    root_path: str = ""
    """Prefix of all addresses behind a proxy, such as /vit; the proxy may remove it or leave it."""
    proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed."""
    keep_alive: int = 5
    """Seconds until an idle connection is closed; 0 closes it after each response."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "origins", tuple(map(_origin, self.origins)))
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        if not ROOT_PATH.fullmatch(self.root_path) or {".", ".."} & set(self.root_path.split("/")):
            raise UsageError(
                f"--root-path is {self.root_path!r}; it must begin with a slash and consist of letters, digits and "
                "the characters / . _ ~ -, such as /vit"
            )
        for proxy in self.proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise UsageError(
                    f"--forwarded-allow-ips is {proxy!r}, which is not an address or a network. Name the proxy's "
                    f"address, such as 127.0.0.1, or its network, such as 172.16.0.0/12 ({error})"
                ) from error

    def path(self, path: str) -> str:
        """Return a path without the prefix, if it has it."""
        return path.removeprefix(self.root_path) if path.startswith(f"{self.root_path}/") else path

    def foreign(self, headers: dict[str, str]) -> bool:
        """Return whether a page of another origin, which is not allowed, made the browser send this."""
        site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
        if ANY in self.origins or (origin is not None and origin.lower() in self.origins):
            return False
        if site not in ("none", "same-origin"):
            return True
        try:
            return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
        except ValueError:  # the header is malformed
            return True


def _origin(text: str) -> str:
    """Return an origin as browsers write it. Raises UsageError for text that is not an origin."""
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises ValueError for a port that cannot be
        fine = bool(parts.scheme and parts.hostname) and "@" not in parts.netloc and text.isascii()
    except ValueError:
        fine = False
    if text != ANY and (not fine or parts.path not in ("", "/") or parts.query or parts.fragment):
        raise UsageError(
            f"--allow-origin is {text!r}; it must be a scheme and a host, as a browser sends them: "
            f"https://app.example or http://localhost:3000, or {ANY} for every page"
        )
    return text.rstrip("/").lower()
