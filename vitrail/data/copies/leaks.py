"""Find held-out images that are also training images, before training, if that is cheap.

Only images of equal stored size can be equal, so a small data set is compared in full by reading a part of it.
`check` compares any data set, and `dedup` also finds copies that were encoded anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from vitrail.data.item import Listed
from vitrail.data.loading.prefetch import ordered, stuck, threads
from vitrail.errors import DecodeError

READ_AT_MOST = 2**28
"""Maximum number of bytes to read; a data set that needs more is not examined."""


def digest(image: bytes | np.ndarray) -> bytes:
    """Return 16 bytes that are equal for equal contents: of a file, or of an array of pixels."""
    contents = image if isinstance(image, bytes) else np.ascontiguousarray(image).tobytes()
    return hashlib.blake2b(contents, digest_size=16).digest()


def leaked(train: Listed, held_out: Listed) -> list[str] | None:
    """Return the ids of held-out images whose contents equal those of a training image.

    None where comparing them would take reading more than `READ_AT_MOST` bytes. Raises DataError for a read that hangs.
    """
    sizes = np.intersect1d(train.sizes, held_out.sizes)
    mine, theirs = (np.flatnonzero(np.isin(source.sizes, sizes)).tolist() for source in (train, held_out))
    if train.sizes[mine].sum() + held_out.sizes[theirs].sum() > READ_AT_MOST:
        return None
    known = set(_digests(train, mine)) - {None}
    return [held_out.id(i) for i, found in zip(theirs, _digests(held_out, theirs), strict=True) if found in known]


def _digests(source: Listed, rows: list[int]) -> Iterator[bytes | None]:
    """Yield the digest of each of these images; None for one that cannot be read, which the loader reports."""

    def one(index: int) -> bytes | None:
        try:
            return digest(source[index].image)
        except DecodeError:
            return None

    with threads(1) as pool:  # so that a read that hangs is noticed
        yield from ordered(pool, one, rows, ahead=16, hung=lambda index: stuck(source.id(index)))
