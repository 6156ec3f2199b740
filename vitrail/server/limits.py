"""What the server refuses, with which status, and how much of anything it takes at once. Torch-free.

| status | when |
|---|---|
| 400 | a Host header that is not this server's; a query value that makes no sense; a torn multipart body |
| 403 | a POST that a page of another origin sent |
| 408 | a body that does not arrive in time |
| 413 | a body of too many bytes, or of too many images |
| 415 | a media type, or first bytes, of something that is no image we read |
| 422 | an image that cannot be decoded, or has too many pixels |
| 429 | as many images inside as the queue takes; Retry-After says when to come back |
| 499 | the client went away: nobody reads this, it is counted |
| 500 | the network failed on this image |
| 503 | not ready yet, or shutting down |
| 504 | no answer before the deadline; what was not begun is dropped |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vitrail.errors import DecodeError

NOT_AN_IMAGE = ("not-an-image", "unsupported")
"""Reasons of `DecodeError` that say something about the type of a file rather than about its content."""
UNDECLARED = ("", "application/octet-stream")
"""Media types that claim nothing: the first bytes decide."""


@dataclass(frozen=True)
class Limits:
    """How much of anything is taken at once."""

    body: int = 10_000_000
    """Bytes of a request."""
    images: int = 32
    """Images in one request."""
    pixels: int = 2**27
    """Of one image; as in `vitrail.data.images.decode`."""
    queue: int = 64
    """Images and unread bodies inside at once, from the first byte to the answer."""
    batch: int = 8
    """Images the network sees at once, at most."""
    receive: float = 15.0
    """Seconds for a body to arrive."""
    deadline: float = 30.0
    """Seconds for an answer."""
    drain: int = 20
    """Seconds that requests inside get to finish after SIGTERM."""


class Refused(Exception):
    """A request, or one image of it, that gets no answer.

    `status` is that of the table above, `reason` a short stable word, `retry_after` whole seconds.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after = status, reason, retry_after

    def as_json(self) -> dict[str, str]:
        """Return what the client is told."""
        return {"reason": self.reason, "message": str(self)}


def undecodable(error: DecodeError) -> Refused:
    """Return the refusal of a file that did not become an image."""
    return Refused(415 if error.reason in NOT_AN_IMAGE else 422, error.reason, str(error))


def too_large(limit: int) -> Refused:
    """Return the refusal of a body of more than `limit` bytes."""
    return Refused(413, "too-large", f"the request is larger than the {limit:,} bytes allowed")


def check_media_type(content_type: str, what: str) -> None:
    """Raise Refused 415 where `content_type` declares something other than an image."""
    declared = content_type.partition(";")[0].strip().lower()
    if declared not in UNDECLARED and not declared.startswith("image/"):
        message = f"{what} is declared as {declared!r}; send an image (image/jpeg, image/png, ...)"
        raise Refused(415, "media-type", message)


class Gate:
    """Counts what is inside, and refuses what is beyond `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.inside = limit, 0
        self.seconds_each = 0.0
        """Recent mean time between two answers while busy, for Retry-After."""

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """Count one request in, until the block is left. Raises Refused 429 where there is no room."""
        held = Held(self)
        held.grow(1)
        try:
            yield held
        finally:
            self.inside -= held.count

    def retry_after(self) -> int:
        """Whole seconds until those inside should be out, at least 1."""
        return max(1, min(60, round(self.inside * self.seconds_each + 0.5)))

    def answered(self, images: int, seconds: float) -> None:
        """Note how long a batch took."""
        each = seconds / images
        self.seconds_each = each if not self.seconds_each else 0.9 * self.seconds_each + 0.1 * each


@dataclass
class Held:
    """The places that one request has taken."""

    gate: Gate
    count: int = 0

    def grow(self, by: int) -> None:
        """Take `by` more places. Raises Refused 429 where there are not as many."""
        gate = self.gate
        if gate.inside + by > gate.limit:
            message = f"{gate.inside} images are being worked on, and {gate.limit} is the most; try again later"
            raise Refused(429, "busy", message, gate.retry_after())
        gate.inside += by
        self.count += by
