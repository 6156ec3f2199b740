"""Find held-out images that are also training images, before training, if that is cheap.

Only images of equal stored size can be equal, so comparing a small data set completely means reading a part of it.
`vitrail.data.check` compares any data set, and `dedup` also finds copies that were encoded again.
"""

from __future__ import annotations

import hashlib

import numpy as np

from vitrail.data.item import Listed
from vitrail.data.loading.prefetch import each_image, threads
from vitrail.errors import DecodeError

READ_AT_MOST = 2**28
"""Maximum number of bytes to read. A data set that needs more is not examined."""


def digest(image: bytes | np.ndarray) -> bytes:
    """Return 16 bytes that are equal for equal contents. The contents are a file or an array of pixels."""
    contents = image if isinstance(image, bytes) else np.ascontiguousarray(image).tobytes()
    return hashlib.blake2b(contents, digest_size=16).digest()


def leaked(train: Listed, held_out: Listed) -> list[str] | None:
    """Return the ids of held-out images with the contents of a training image.

    Return None if the comparison needs to read more than `READ_AT_MOST` bytes. Raises DataError for a read that hangs.
    """
    sizes = np.intersect1d(train.sizes, held_out.sizes)
    mine, theirs = (np.flatnonzero(np.isin(source.sizes, sizes)).tolist() for source in (train, held_out))
    if train.sizes[mine].sum() + held_out.sizes[theirs].sum() > READ_AT_MOST:
        return None
    with threads(1) as pool:  # without a thread, nobody would notice a read that hangs
        known = set(each_image(pool, _digest_of, train, mine)) - {None}
        found = each_image(pool, _digest_of, held_out, theirs)
        return [held_out.id(index) for index, one in zip(theirs, found, strict=True) if one in known]


def _digest_of(source: Listed, index: int) -> bytes | None:
    """Return the digest of an image; None for an unreadable one, which the loader reports."""
    try:
        return digest(source[index].image)
    except DecodeError:
        return None
