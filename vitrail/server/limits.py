"""The server's limits, and its refusals with their status. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

    `status` is one of `STATUSES`, `reason` a short stable word, `retry_after` whole seconds.
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
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Reserve a place within the block, and yield a function that reserves more. Both raise Refused 429."""
        reserved = 0

        def reserve(places: int) -> None:
            nonlocal reserved
            if self.inside + places > self.limit:
                message = f"the queue is full ({self.inside} of {self.limit} images); try again later"
                raise Refused(429, "busy", message, self.retry_after())
            self.inside += places
            reserved += places

        try:
            reserve(1)
            yield reserve
        finally:
            self.inside -= reserved

    def retry_after(self) -> int:
        """Return whole seconds until all current images should be done, at least 1."""
        return max(1, min(60, round(self.inside * self.seconds_each + 0.5)))

    def answered(self, images: int, seconds: float) -> None:
        """Record how long a batch took."""
        each = seconds / images
        self.seconds_each = each if not self.seconds_each else 0.9 * self.seconds_each + 0.1 * each
