"""The server's limits, and its refusals with their status. Torch-free.

| status | when |
|---|---|
| 400 | a Host header that is not allowed, or a form that cannot be read |
| 403 | a POST request from a page of another origin |
| 408 | the body does not arrive in time |
| 413 | the body has too many bytes or too many images |
| 415 | the media type or the first bytes are not those of a supported image |
| 422 | an image cannot be decoded or has too many pixels, or a query value is wrong |
| 429 | the queue is full; Retry-After says when to try again |
| 499 | the client has left; this status is only counted |
| 500 | the network failed on this image |
| 503 | the server is not ready yet, or is shutting down |
| 504 | the result was not ready before the deadline; work that has not started is dropped |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vitrail.errors import DecodeError

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
    """Images and unread bodies in the server at once, from the first byte to the response."""
    batch: int = 8
    """Images in one batch of the network."""
    receive: float = 15.0
    """Seconds for a body to arrive."""
    deadline: float = 30.0
    """Maximum seconds until the result."""
    drain: int = 20
    """Seconds to finish open requests after SIGTERM."""


class Refused(Exception):
    """A request, or one image of it, that is refused.

    `status` is from the table above, `reason` a short stable word, `retry_after` whole seconds.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after = status, reason, retry_after

    def as_json(self) -> dict[str, str]:
        """Return the description that the client gets."""
        return {"reason": self.reason, "message": str(self)}


def undecodable(error: DecodeError) -> Refused:
    """Return the refusal of a file that cannot be decoded."""
    return Refused(415 if error.reason in NOT_AN_IMAGE else 422, error.reason, str(error))


def too_large(limit: int) -> Refused:
    """Return the refusal of a body of more than `limit` bytes."""
    return Refused(413, "too-large", f"the request is larger than the maximum of {limit:,} bytes")


class Gate:
    """Counts images in the server and refuses more than `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.inside = limit, 0
        self.seconds_each = 0.0
        """Recent mean seconds per image, for Retry-After."""

    @contextmanager
    def hold(self) -> Iterator[Reservation]:
        """Reserve a place for one request within the block. Raises Refused 429 if there is none."""
        reserved = Reservation(self)
        reserved.grow(1)
        try:
            yield reserved
        finally:
            self.inside -= reserved.count

    def retry_after(self) -> int:
        """Return whole seconds until all current images should be done, at least 1."""
        return max(1, min(60, round(self.inside * self.seconds_each + 0.5)))

    def answered(self, images: int, seconds: float) -> None:
        """Record how long a batch took."""
        each = seconds / images
        self.seconds_each = each if not self.seconds_each else 0.9 * self.seconds_each + 0.1 * each


@dataclass
class Reservation:
    """The places that one request has reserved."""

    gate: Gate
    count: int = 0

    def grow(self, by: int) -> None:
        """Reserve `by` more places. Raises Refused 429 if there are not enough."""
        gate = self.gate
        if gate.inside + by > gate.limit:
            message = f"the queue is full ({gate.inside} of {gate.limit} images); try again later"
            raise Refused(429, "busy", message, gate.retry_after())
        gate.inside += by
        self.count += by
