"""Find copies and look-alikes: pairs with similar hashes whose pixels are similar, too.

Hashes of 64 bits cannot tell images apart that are grey, dark and of one kind. So the pixels of each pair are compared:
grey thumbnails are laid over each other and correlated (`correlations`). Only images in pairs are read, and `SAMPLE`
others, whose mean picture shows what is common to all images of the data set.

Pictures that are no copies may be alike, too: neighbouring slices of a scan, one part photographed twice, T-shirts of
two colours. So a pair is a copy only from a correlation on that was measured to be certain, and data with many such
pictures raise it (`certainty`). The other pairs are look-alikes.

A copy may be cropped, resized, squashed, brighter or grey. So the transformation has four parameters, a scale and a
shift in each direction, and brightness and contrast are free. It is found by least squares on the pixels (Lucas and
Kanade 1981), on a blurred picture first.

Pictures of one kind, such as scans of one organ, are alike in most of their pixels. So two things are taken off before
the pictures are correlated: their blurred selves, and the part that they share with the mean picture of the data set
(the correlation is partial). Measured on dark grey scans, the correlation without the mean picture is above 0.9 for all
pairs of different scans; with it, below 0.5 (`python -m benchmarks.dedup`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.check import OnProgress
from vitrail.data.contact_sheet import Frame, write_contact_sheet
from vitrail.data.copies.dedup import DISTANCE, HashedImages, Pairs, candidates
from vitrail.data.images.pixels import picture
from vitrail.data.item import IndexedSource, evenly_spaced
from vitrail.data.loading.prefetch import ThreadPool, each_image, threads
from vitrail.errors import DecodeError

SIDE = 64
"""Side in pixels of the pictures that are compared."""
BLURS = (6.0, 3.0, 1.5)
"""Standard deviation in pixels of the blur of each level of the search."""
STEPS = 6
"""Number of steps of the search on each level."""
SMALLEST = 0.7
"""Smallest scale in one direction, so that a copy may be cropped by 30 %; the largest scale is its inverse."""
COARSE = 3.0
"""Standard deviation in pixels of the blurred picture that is taken off."""
FINE = 0.7
"""Standard deviation in pixels of the blur of details, which removes most of the noise of compression."""
SOFT = 0.5
"""The same in pixels of the smaller stored image, if its side is below `SIDE`: what it cannot show is not compared."""
LONGEST_STEP = 0.2
"""Largest change of a parameter in one step, in units of half a picture."""


@cache
def _blur(deviation: float) -> np.ndarray:
    """Return float32 [SIDE, SIDE] that blurs the columns of a picture by a product from the left."""
    apart = np.subtract.outer(np.arange(SIDE), np.arange(SIDE))
    weights = np.exp(-np.square(apart / deviation) / 2)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


_GRID = np.linspace(-1, 1, SIDE, dtype=np.float32)
_LEVELS = [_blur(deviation) for deviation in BLURS]


def details(pictures: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Return pictures float32 [P, SIDE, SIDE] without their blurred selves, and without what `sides` cannot show.

    sides: int64 [P], shorter side in pixels of the smaller image that each one is compared with, or is; at most SIDE.
    """
    scales = (SIDE / sides).tolist()
    fine = np.stack([_blur(max(FINE, SOFT * scale)) for scale in scales])
    coarse = np.stack([_blur(COARSE * scale) for scale in scales])
    return fine @ pictures @ fine.transpose(0, 2, 1) - coarse @ pictures @ coarse.transpose(0, 2, 1)


def correlations(left: np.ndarray, right: np.ndarray, common: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Return the correlation, -1 to 1, of the details of each left picture, laid over its right one; float32 [P].

    The pictures are float32 [P, SIDE, SIDE]. `common` float32 [SIDE, SIDE] is a mean picture; what the details of the
    pictures share with its details does not count. `sides` are those of `details`.
    """
    moved = np.tile(np.array([1, 0, 1, 0], np.float32), (len(left), 1))  # scale and shift of columns, then of rows
    left, right = _standardised(left), _standardised(right)
    for blur in _LEVELS:
        ours, theirs = blur @ left @ blur.T, blur @ right @ blur.T
        for _ in range(STEPS):
            moved = _step(ours, theirs, moved)
    warped, mask = _warped(left, moved)
    shared = details(np.broadcast_to(common, right.shape), sides)
    one, two = (_without(details(pictures, sides), shared, mask) for pictures in (warped, right))
    size = np.sqrt((one**2).sum(axis=(1, 2)) * (two**2).sum(axis=(1, 2)))
    return (one * two).sum(axis=(1, 2)) / (size + 1e-6)


def _standardised(pictures: np.ndarray) -> np.ndarray:
    """Return pictures of mean 0 and standard deviation 1, or 0 for a flat one: least squares are well-conditioned."""
    deviation = pictures.std(axis=(1, 2), keepdims=True)
    return (pictures - pictures.mean(axis=(1, 2), keepdims=True)) / np.maximum(deviation, 0.1)


def _step(left: np.ndarray, right: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Return the transformations [P, 4] after one step of least squares."""
    warped, mask = _warped(left, moved)
    down, across = np.gradient(warped, 2 / (SIDE - 1), axis=(1, 2))
    columns = [across * _GRID, across, down * _GRID[:, None], down, warped, np.ones_like(warped)]
    design = np.stack(columns, axis=-1).reshape(len(left), SIDE * SIDE, 6)
    weighed = (design * mask.reshape(len(left), -1, 1)).transpose(0, 2, 1)
    normal, asked = weighed @ design, weighed @ right.reshape(len(left), -1, 1)
    damping = 1e-3 * np.eye(6, dtype=np.float32) * (normal + 1e-6)
    found = np.linalg.solve(normal + damping, asked)[..., 0]
    contrast = np.where(np.abs(found[:, 4:5]) > 0.1, found[:, 4:5], 1)
    change = np.clip(found[:, :4] / contrast, -LONGEST_STEP, LONGEST_STEP)
    scales, shifts = moved[:, ::2], moved[:, 1::2]
    new = np.empty_like(moved)
    new[:, ::2] = np.clip(scales * (1 + change[:, ::2]), SMALLEST, 1 / SMALLEST)
    new[:, 1::2] = np.clip(shifts + scales * change[:, 1::2], SMALLEST - 1, 1 - SMALLEST)
    return new


def _warped(pictures: np.ndarray, moved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the transformed pictures, and 1 where a pixel comes from inside the picture, else 0."""
    columns, inside_columns = _resampling(moved[:, 0], moved[:, 1])
    rows, inside_rows = _resampling(moved[:, 2], moved[:, 3])
    return rows @ pictures @ columns.transpose(0, 2, 1), inside_rows[:, :, None] * inside_columns[:, None, :]


def _resampling(scale: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [P, SIDE, SIDE] that resamples linearly by a product from the left, and [P, SIDE]: 1 inside, else 0."""
    place = (scale[:, None] * _GRID + shift[:, None] + 1) * ((SIDE - 1) / 2)
    inside = (place > -0.5) & (place < SIDE - 0.5)
    weights = 1 - np.abs(place.clip(0, SIDE - 1)[:, :, None] - np.arange(SIDE, dtype=np.float32))
    return weights.clip(min=0), inside.astype(np.float32)


def _without(pictures: np.ndarray, common: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the masked pictures without their mean, and without what they share with `common` or its mirror image."""
    one, two, found = (_centred(part, mask) for part in (common, common[..., ::-1], pictures))
    two = two - _share(two, one)
    return found - _share(found, one) - _share(found, two)


def _centred(pictures: np.ndarray, mask: np.ndarray) -> np.ndarray:
    count = np.maximum(mask.sum(axis=(1, 2), keepdims=True), 1)
    return mask * (pictures - (mask * pictures).sum(axis=(1, 2), keepdims=True) / count)


def _share(pictures: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the part of each picture that is a multiple of the other one."""
    product, size = ((other * part).sum(axis=(1, 2), keepdims=True) for part in (pictures, other))
    return product / (size + 1e-6) * other


CORRELATION = 0.8
"""Minimum correlation of the details of two look-alikes."""
CERTAIN = (0.97, 0.98, 0.985, 0.99, 0.993, 0.995, 0.997, 0.998, 0.999)
"""Minimum correlations of copies; `certainty` chooses one. Among different scans of brains, T-shirts, photographs and
solar cells no pair reaches the first; nine tenths of the copies do (`python -m benchmarks.dedup`)."""
DOUBT = 0.25
"""Maximum number of pairs just below the correlation of copies, as a share of the copies. As look-alikes become fewer
towards a correlation of 1, far less than this share of the copies are look-alikes."""
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

    `Pairs.copy` tells copies from look-alikes. Images are read with `workers` threads. Raises what `candidates` raises.
    """
    pairs = candidates(
        left, right, distance=distance, mirrored=mirrored, crops=crops, workers=workers, progress=progress
    )
    near = np.flatnonzero(~pairs.exact)
    found = np.full(len(pairs), np.nan, np.float32)
    other = left if right is None else right
    if len(near):
        with threads(workers) as pool:
            found[near] = _compared(left, other, pairs.rows_at(near), pool, progress)
    copy = pairs.exact | (found >= certainty(found))
    return replace(pairs, correlation=found, copy=copy).rows_at(pairs.exact | (found >= CORRELATION))


def certainty(correlations: np.ndarray) -> float:
    """Return the correlation from which pairs of these images are copies; above 1 if no correlation is certain.

    It is the first of `CERTAIN` with few pairs just below it, in a stretch as long as that above. Where there are as
    many pairs below as above, the images are of one kind, and the correlation does not tell copies from others.
    """
    for least in CERTAIN:
        below = np.count_nonzero((correlations >= 2 * least - 1) & (correlations < least))
        if below <= DOUBT * np.count_nonzero(correlations >= least):
            return least
    return np.inf


def _compared(
    left: HashedImages, right: HashedImages, pairs: Pairs, pool: ThreadPool | None, progress: OnProgress | None
) -> np.ndarray:
    """Return the correlation of each pair, float32 [P]; NaN if an image can no longer be read."""
    common = _common(right, pairs, within=left is right, pool=pool)
    found = np.full(len(pairs), np.nan, np.float32)
    order = np.argsort(pairs.left, kind="stable")  # so that few images are read twice
    for begin in range(0, len(pairs), PAIRS):
        places = order[begin : begin + PAIRS]
        ours, our_sides, our_rows = _thumbnails(left, pairs.left[places], pool)
        theirs, their_sides, their_rows = _thumbnails(right, pairs.right[places], pool)
        sides = np.minimum(our_sides[our_rows], their_sides[their_rows])
        for start in range(0, len(places), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            other = theirs[their_rows[part]]
            other = np.where(pairs.mirrored[places[part], None, None], other[:, :, ::-1], other)
            found[places[part]] = correlations(ours[our_rows[part]], other, common, sides[part])
        if progress is not None:
            progress(begin + len(places), len(pairs))
    return found


def _common(images: HashedImages, pairs: Pairs, *, within: bool, pool: ThreadPool | None) -> np.ndarray:
    """Return the mean picture of a sample, float32 [SIDE, SIDE]; zeros if there are too few pictures.

    `images` are the right ones of the pairs, and the left ones, too, if they are `within` one data set. An image counts
    less the more images have its hash, so that many copies of one picture count about as much as one.
    """
    readable = np.flatnonzero(images.hashes.hashed)
    chosen = readable[evenly_spaced(len(readable), SAMPLE)]
    equal = pairs.rows_at(pairs.distance <= EQUAL)
    partners = np.bincount(np.append(equal.right, equal.left if within else []).astype(np.int64), minlength=len(images))
    weights = 1 / (1 + partners[chosen])
    thumbnails, _, rows = _thumbnails(images, chosen, pool)
    found = thumbnails[rows]
    weights = np.where(np.isnan(found).any(axis=(1, 2)), 0, weights)
    if weights.sum() < FEWEST:
        return np.zeros((SIDE, SIDE), np.float32)
    return np.tensordot(weights / weights.sum(), np.nan_to_num(found), 1).astype(np.float32)


def _thumbnails(
    images: HashedImages, numbers: np.ndarray, pool: ThreadPool | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return thumbnails and sides of the distinct images, as `_thumbnail` does, and the row of each image."""
    distinct, rows = np.unique(numbers, return_inverse=True)
    found = np.empty((len(distinct), SIDE, SIDE), np.float32)
    sides = np.empty(len(distinct), np.int64)
    for source, mine, indices in images.by_part(distinct):
        read = each_image(pool, _thumbnail, source, indices.tolist())
        for row, (small, side) in zip(mine.tolist(), read, strict=True):
            found[row], sides[row] = small, side
    return found, sides, rows


def _thumbnail(source: IndexedSource, index: int) -> tuple[np.ndarray | float, int]:
    """Return the grey thumbnail of an image, float32 [SIDE, SIDE], not rounded to whole levels; NaN if unreadable.

    Return its shorter side in pixels, at most SIDE, too.
    """
    try:
        stored = source[index].image
        image = picture(stored, short_side=2 * SIDE)
    except DecodeError:
        return np.nan, SIDE
    grey = Image.fromarray(image).convert("L").convert("F")
    return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BILINEAR)), min(SIDE, *image.shape[:2])


def pairs_sheet(file: Path, left: HashedImages, right: HashedImages, pairs: Pairs) -> None:
    """Draw pairs side by side: copies, the least similar first, then look-alikes, the most similar first.

    Raises UsageError if the file cannot be written.
    """
    similarity = np.where(pairs.exact, 2, pairs.correlation)
    order = np.lexsort((np.where(pairs.copy, similarity, -similarity), ~pairs.copy))

    def frame(place: int) -> Frame:
        one, two = int(pairs.left[place]), int(pairs.right[place])
        how = "same bytes" if pairs.exact[place] else f"correlation {pairs.correlation[place]:.3f}"
        how += ", mirrored" if pairs.mirrored[place] else ""
        how += "" if pairs.copy[place] else ", look-alike"
        return Frame((left.place(one), right.place(two)), (left.name(one).id, right.name(two).id, how))

    copies = np.count_nonzero(pairs.copy)
    title = f"{copies:,} pairs of copies, the least similar first; then {len(pairs) - copies:,} pairs of look-alikes"
    write_contact_sheet(file, title, map(frame, order.tolist()))
