"""Find copies: pairs with similar hashes whose pixels are similar, too.

Hashes of 64 bits cannot tell images apart that are grey, dark and of one kind. So the pixels of each pair are compared:
grey thumbnails are laid over each other and correlated (`align`). Only images in pairs are read, and `SAMPLE` others,
whose mean picture shows what is common to all images of the data set.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.bands.picture import picture
from vitrail.data.check import OnProgress
from vitrail.data.contact_sheet import Frame, write_contact_sheet
from vitrail.data.copies.align import SIDE, correlations, details
from vitrail.data.copies.dedup import DISTANCE, HashedImages, Pairs, candidates
from vitrail.data.item import Listed
from vitrail.data.loading.prefetch import ThreadPool, each_image, threads
from vitrail.errors import DecodeError

CORRELATION = 0.8
"""Minimum correlation of the details of two copies."""
PAIRS = 1 << 12
"""Number of pairs compared at a time; the thumbnails of at most twice as many images are in memory, 16 KiB each."""
SAMPLE = 256
"""Maximum number of images whose mean is taken."""
EQUAL = 1
"""Maximum number of differing bits of two images that count as one picture in the mean."""
FEWEST = 2.0
"""Smallest number of different pictures whose mean is taken: the mean of copies of one picture is that picture."""
_TOGETHER = 32  # pairs in one product of matrices


def find_copies(
    left: HashedImages,
    right: HashedImages | None,
    *,
    distance: int = DISTANCE,
    mirrored: bool = False,
    crops: bool = False,
    workers: int = 0,
    progress: OnProgress | None = None,
) -> Pairs:
    """Return the `candidates` whose stored bytes are equal, or whose pixels are similar.

    Images are read with `workers` threads. Raises what `candidates` raises.
    """
    pairs = candidates(
        left, right, distance=distance, mirrored=mirrored, crops=crops, workers=workers, progress=progress
    )
    near = np.flatnonzero(~pairs.exact)
    found = np.full(len(pairs), np.nan, np.float32)
    other = left if right is None else right
    if len(near):
        with threads(workers) as pool:
            found[near] = _compared(left, other, pairs.chosen(near), pool, progress)
    return replace(pairs, correlation=found).chosen(pairs.exact | (found >= CORRELATION))


def _compared(
    left: HashedImages, right: HashedImages, pairs: Pairs, pool: ThreadPool | None, progress: OnProgress | None
) -> np.ndarray:
    """Return the correlation of each pair, float32 [P]; NaN if an image can no longer be read."""
    common = _common(right, pairs, within=left is right, pool=pool)
    found = np.full(len(pairs), np.nan, np.float32)
    order = np.argsort(pairs.left, kind="stable")  # so that few images are read twice
    for begin in range(0, len(pairs), PAIRS):
        places = order[begin : begin + PAIRS]
        ours, our_rows = _thumbnails(left, pairs.left[places], pool)
        theirs, their_rows = _thumbnails(right, pairs.right[places], pool)
        for start in range(0, len(places), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            other = theirs[their_rows[part]]
            other = np.where(pairs.mirrored[places[part], None, None], other[:, :, ::-1], other)
            found[places[part]] = correlations(ours[our_rows[part]], other, common)
        if progress is not None:
            progress(begin + len(places), len(pairs))
    return found


def _common(images: HashedImages, pairs: Pairs, *, within: bool, pool: ThreadPool | None) -> np.ndarray:
    """Return the details of the mean picture of a sample, float32 [SIDE, SIDE]; zeros if there are too few pictures.

    `images` are the right ones of the pairs, and the left ones, too, if they are `within` one data set. An image counts
    less the more images have its hash, so that many copies of one picture count about as much as one.
    """
    readable = np.flatnonzero(images.hashes.hashed)
    chosen = readable[np.linspace(0, len(readable) - 1, min(len(readable), SAMPLE)).astype(np.int64)]
    equal = pairs.chosen(pairs.distance <= EQUAL)
    partners = np.bincount(np.append(equal.right, equal.left if within else []).astype(np.int64), minlength=len(images))
    weights = 1 / (1 + partners[chosen])
    thumbnails, rows = _thumbnails(images, chosen, pool)
    found = details(thumbnails[rows])
    weights = np.where(np.isnan(found).any(axis=(1, 2)), 0, weights)
    if weights.sum() < FEWEST:
        return np.zeros((SIDE, SIDE), np.float32)
    return np.tensordot(weights / weights.sum(), np.nan_to_num(found), 1).astype(np.float32)


def _thumbnails(images: HashedImages, numbers: np.ndarray, pool: ThreadPool | None) -> tuple[np.ndarray, np.ndarray]:
    """Return grey thumbnails float32 [K, SIDE, SIDE] of the distinct images, NaN if unreadable, and the row of each."""
    distinct, rows = np.unique(numbers, return_inverse=True)
    found = np.empty((len(distinct), SIDE, SIDE), np.float32)
    parts = images.part_of(distinct)
    for part in np.unique(parts).tolist():
        mine = np.flatnonzero(parts == part)
        inside = (distinct[mine] - images.numbers(part).start).tolist()
        read = each_image(pool, _thumbnail, images.parts[part].source, inside)
        for row, small in zip(mine.tolist(), read, strict=True):
            found[row] = small
    return found, rows


def _thumbnail(source: Listed, index: int) -> np.ndarray | float:
    """Return the grey thumbnail of an image, float32 [SIDE, SIDE], not rounded to whole levels; NaN if unreadable."""
    try:
        stored = source[index].image
        image = picture(stored, short_side=2 * SIDE)
    except DecodeError:
        return np.nan
    grey = Image.fromarray(image).convert("L").convert("F")
    return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def pairs_sheet(file: Path, left: HashedImages, right: HashedImages, pairs: Pairs) -> None:
    """Draw pairs side by side, the most doubtful first. Raises UsageError if the file cannot be written."""
    order = np.argsort(np.where(pairs.exact, 2, pairs.correlation), kind="stable")

    def frame(place: int) -> Frame:
        one, two = int(pairs.left[place]), int(pairs.right[place])
        how = "same bytes" if pairs.exact[place] else f"correlation {pairs.correlation[place]:.3f}"
        how += ", mirrored" if pairs.mirrored[place] else ""
        return Frame((left.place(one), right.place(two)), (left.name(one).id, right.name(two).id, how))

    title = f"{len(pairs):,} pairs of copies, the least similar first"
    write_contact_sheet(file, title, map(frame, order.tolist()))
