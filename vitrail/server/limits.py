"""The server's limits, and its refusals with their status. Torch-free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vitrail.errors import DecodeError

STATUSES = {
    400: "Malformed request, or a Host header that is not allowed",
    403: "The request comes from a page of another origin",
    404: "There is no model with this name",
    408: "The body did not arrive in time",
    413: "The request has too many bytes or images",
    415: "The body is not an image of a supported type",
    422: "The image cannot be decoded or has too many pixels, or a query value is wrong",
    429: "The queue is full; Retry-After says when to try again",
    499: "The client has left; this status is only counted",
    500: "The network failed on this image",
    503: "The server is not ready, or is shutting down",
    504: "The result was not ready before the deadline",
}
"""When a request is refused with each status."""
NOT_AN_IMAGE = ("not-an-image", "unsupported")
"""Reasons of `DecodeError` that concern the type of a file and not its content."""


@dataclass(frozen=True)
class Limits:
    """Maximum sizes, numbers and times."""

    body: int = 10_000_000
    """Bytes of a request."""
    images: int = 32
    """Images in one request."""
    pixels: int = 2**27
    """Pixels of one image, as in `vitrail.data.images.decode`."""
    queue: int = 64
    """Images in the server at once, from the last byte of their request to the response."""
    batch: int = 8
    """Images in one batch of the network."""
    receive: float = 15.0
    """Seconds for a body to arrive."""
    deadline: float = 30.0
    """Maximum seconds until the result."""
    drain: int = 20
    """Seconds to finish open requests after SIGTERM."""
    decoders: int = 4
    """Images decoded at once. The largest need up to two gigabytes each."""

    @property
    def bodies(self) -> int:
        """Bytes of all bodies in the server at once."""
        return self.queue * self.body


def sized(kind: str, cores: int, free: float, pixels: int) -> tuple[int, int, str]:
    """Return the number of images decoded at once, that of a batch, and the reason, for a kind of device.

    On a CPU decoders and network share the cores: four decoders keep a network busy, and batches of more than 8 images
    are not faster, only later. An accelerator leaves all cores to the decoders, as far as the free memory (bytes) holds
    their largest images (16 bytes a pixel), and computes 64 images in little more time than one.
    """
    if kind == "cpu":
        return min(4, cores), 8, f"the network computes on the same {cores} cores"
    decoders = max(1, min(cores, int(free / 2 / (16 * pixels))))
    return decoders, 64, f"the network computes on {kind}, and {cores} cores decode in {free / 2**30:.0f} GiB"


class Refused(Exception):
    """A request, or one image of it, that is refused.

    `status` is one of `STATUSES`, `reason` a short stable word, `retry_after` whole seconds.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after = status, reason, retry_after

    def as_json(self) -> dict[str, Any]:
        """Return the description that the client gets."""
        again = {} if self.retry_after is None else {"retry_after": self.retry_after}
        return {"reason": self.reason, "message": str(self), **again}


def refuse_undecodable(error: DecodeError) -> Refused:
    """Return the refusal of a file that cannot be decoded."""
    return Refused(415 if error.reason in NOT_AN_IMAGE else 422, error.reason, str(error))


def too_large(limit: int) -> Refused:
    """Return the refusal of a body of more than `limit` bytes."""
    return Refused(413, "too-large", f"the request is larger than the maximum of {limit:,} bytes")


@dataclass(eq=False)
class Body:
    """The body of one request, from its first byte to the response."""

    until: float
    """When it must have arrived (time.monotonic)."""
    began: float = field(default_factory=time.monotonic)
    size: int = 0
    wanted: bool = False
    """Whether the application has begun to read it."""
    arrived: bool = False
    dropped: bool = False
    waiting: asyncio.Timeout | None = None
    """The wait for its next bytes."""

    def drop(self) -> None:
        """End the wait for the rest of it."""
        self.dropped = True
        if self.waiting is not None:
            self.waiting.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """The bodies in the server, of at most `limit` bytes together: beyond that, the slowest is dropped.

    A client that sends its body slowly, or stops sending it, holds nothing that another one needs.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.inside: set[Body] = set()

    @property
    def arriving(self) -> int:
        """Number of bodies that have not arrived completely."""
        return sum(body.wanted and not body.arrived for body in self.inside)

    @contextmanager
    def hold(self, seconds: float) -> Iterator[Body]:
        """Yield a body that has to arrive within `seconds`, and forget it after the block."""
        body = Body(time.monotonic() + seconds)
        self.inside.add(body)
        try:
            yield body
        finally:
            self.inside.discard(body)
            self.size -= 0 if body.dropped else body.size

    def add(self, body: Body, count: int) -> None:
        """Count more bytes of a body, and drop the slowest bodies while there are too many."""
        now = time.monotonic()
        body.size += count
        self.size += count
        while self.size > self.limit:
            arriving = [one for one in self.inside if one.size and not (one.arrived or one.dropped)]
            if not arriving:
                break
            slowest = min(arriving, key=lambda one: one.size / max(now - one.began, 0.001))
            self.size -= slowest.size
            slowest.drop()


class Gate:
    """Counts images in the server and refuses more than `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.inside = limit, 0
        self.seconds_each = 0.0
        """Recent mean seconds per image, for Retry-After."""

    def check(self, places: int = 1) -> None:
        """Raise Refused 429 if there are not as many free places."""
        if self.inside + places > self.limit:
            message = f"the queue is full ({self.inside} of {self.limit} images); try again later"
            raise Refused(429, "busy", message, self.retry_after())

    @contextmanager
    def hold(self, places: int) -> Iterator[None]:
        """Reserve places within the block. Raises Refused 429 if there are not as many."""
        self.check(places)
        self.inside += places
        try:
            yield
        finally:
            self.inside -= places

    def retry_after(self) -> int:
        """Return whole seconds until all current images should be done, at least 1."""
        return max(1, min(60, round(self.inside * self.seconds_each + 0.5)))

    def answered(self, images: int, seconds: float) -> None:
        """Record how long a batch took."""
        each = seconds / images
        self.seconds_each = each if not self.seconds_each else 0.9 * self.seconds_each + 0.1 * each
