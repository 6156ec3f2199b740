"""Held-out images that are training images, too: counted before training, where that is cheap.

Only images of equal stored size can be equal, so a small data set is compared in full by reading a part of it.
`check` compares any data set, and `dedup` also finds copies that were encoded anew.
"""

from __future__ import annotations

import hashlib

import numpy as np

from vitrail.data.item import Listed
from vitrail.errors import DecodeError

READ_AT_MOST = 2**28
"""Bytes that are read to find out; a data set that takes more is not looked at."""


def digest(image: bytes | np.ndarray) -> bytes:
    """Return 16 bytes that are equal for equal contents: of a file, or of an array of pixels."""
    contents = image if isinstance(image, bytes) else np.ascontiguousarray(image).tobytes()
    return hashlib.blake2b(contents, digest_size=16).digest()


def leaked(train: Listed, held_out: Listed) -> list[str] | None:
    """Return the ids of held-out images whose contents are those of a training image, too.

    None where comparing them would take reading more than `READ_AT_MOST` bytes.
    """
    sizes = np.intersect1d(train.sizes, held_out.sizes)
    mine, theirs = (np.flatnonzero(np.isin(source.sizes, sizes)) for source in (train, held_out))
    if train.sizes[mine].sum() + held_out.sizes[theirs].sum() > READ_AT_MOST:
        return None
    known = {_digest(train, index) for index in mine.tolist()} - {None}
    return [held_out.id(index) for index in theirs.tolist() if _digest(held_out, index) in known]


def _digest(source: Listed, index: int) -> bytes | None:
    try:
        return digest(source[index].image)
    except DecodeError:  # the loader's to report
        return None
