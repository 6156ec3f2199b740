"""Images that the disk stops giving, because their folder is removed, renamed or unmounted while it is read."""

from __future__ import annotations

from vitrail.errors import DataError

MOST = 100
"""Number of consecutive images that the disk may refuse."""


class LostImages:
    """Counts consecutive images that cannot be read from the disk, so that no result records them as damaged.

    Images that are read but cannot be decoded do not count.
    """

    def __init__(self, count: int) -> None:
        self._most = min(MOST, count)
        self._consecutive = 0

    def see(self, image: str, reason: str | None) -> None:
        """Count an image, with the reason of its `DecodeError` or None.

        Raises DataError after `MOST` consecutive images that cannot be read, or if none of fewer images can be read.
        """
        self._consecutive = self._consecutive + 1 if reason == "unreadable" else 0
        if self._consecutive == self._most:
            raise DataError(
                f"{self._most} consecutive images cannot be read from the disk; the last is {image}. Check that the "
                "folder is still there and may be read, then run the same command again"
            )
