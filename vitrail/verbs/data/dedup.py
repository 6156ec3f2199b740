"""`vitrail data dedup`: find training images that are also test images, or duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from vitrail.data.settings import Data
from vitrail.device import Precision
from vitrail.ranges import Count, Part, Range, Threads, checked
from vitrail.terminal import ProgressLine, first_lines, page, table
from vitrail.verbs.data.outputs import output_files
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.verbs.flags.reading import read_settings
from vitrail.words import counted, one_line

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.check import BadImage
    from vitrail.data.copies.dedup import HashedImages, Pairs, Shared
    from vitrail.data.item import DataSet

SHOWN = 10_000
"""Maximum number of pairs in the result; the CSV file contains all of them."""


@one_line
@dataclass(frozen=True)
class Duplicates:
    """The result of a search for copies."""

    path: str
    images: int
    """Number of images that were compared with others."""
    shared: list[Shared]
    pairs: list[tuple[object, ...]]
    """The first 10,000: see `vitrail.data.copies.dedup.pair_rows`."""
    found: int
    """Pairs in all."""
    alike: int
    """Pairs of these that are look-alikes: their images remain."""
    remaining: int
    """Images of `images` that remain without the copies."""
    bad: list[BadImage]
    """Images that cannot be read. They are not compared, and they remain."""
    written: list[str]
    """Files."""


@checked
def dedup(
    path: str | Path,
    *,
    against: tuple[str | Path, ...] = (),
    model: str | Path | None = None,
    distance: Annotated[int, Range(0, 64)] | None = None,
    cosine: Part = 0.95,
    mirrored: bool = False,
    crops: bool = False,
    out: str | Path | None = None,
    keep_list: str | Path | None = None,
    sheet: str | Path | None = None,
    raw: bool = False,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    **reading: Unpack[DataKeywords],
) -> Duplicates:
    """Find training images that are also test images, or duplicates: exact, re-encoded, resized or cropped copies.

    Two perceptual hashes of 64 bits propose pairs. Their pixels confirm a pair: the images are laid over each other and
    correlated. A pair that is similar, but not certainly a copy, is listed as look-alikes, and so is a pair of one data
    set with different labels; look-alikes remain. With a model, the features of both images must be similar, too. Your
    images are not changed: the results are lists of the copies and of the remaining images. All splits except test and
    validation are training images. Hashes are cached, so that a second call reads only the images of pairs.
    --batch-size, --device and --precision are settings of the model.

    Args:
        path: The training images, in any form that `vitrail train` takes.
        against: A data set whose test images (else validation images, else all) must not be among the training
            images. May be repeated (default: the images are compared with each other, within and across their
            splits).
        model: A run, weights or a name on the hub. A pair then counts only if its features are similar, too.
        distance: Maximum number of differing bits, of 64, between the hashes of two copies (default: 6, or 10 with
            a model). A larger distance finds copies that differ more, and takes longer.
        cosine: Minimum cosine similarity for two images to count as copies (needs --model).
        mirrored: Find mirror images, too.
        crops: Find copies that lost up to a fifth of each side, too. Every image is read once more, and a search takes
            about 100 times as many comparisons.
        out: Write all pairs to this CSV file.
        keep_list: Write the remaining images and the other splits to this CSV file, for `vitrail train FILE`.
        sheet: Draw the two images of each pair in this PNG file, the least similar copies first, then look-alikes (at
            most 60).
    """
    compute = Compute(None, batch_size, workers, device, precision)
    from vitrail.data.copies.confirm import find_copies, pairs_sheet
    from vitrail.data.copies.dedup import DISTANCE, WIDE, pair_rows, remaining, shared, staying, write_pairs
    from vitrail.data.sources.lists import write_list
    from vitrail.data.sources.open import open_and_warn

    against = (against,) if isinstance(against, str | Path) else against
    files = output_files({".csv": (out, keep_list), ".png": (sheet,)}, [str(path), *map(str, against)])
    threads = compute.threads(alone=True)
    data = read_settings(reading, path)
    found = open_and_warn(data)
    left, right = _hashed(str(path), found, against, threads)
    other = left if right is None else right
    if distance is None:
        distance = DISTANCE if model is None else WIDE
    progress = ProgressLine("compared")
    choices: dict[str, Any] = dict(distance=distance, mirrored=mirrored, crops=crops)
    pairs = find_copies(left, right, **choices, workers=threads, progress=progress)
    if model is not None:
        pairs = pairs.confirmed(_cosines(model, left, other, pairs, compute), cosine)
    if right is None:  # another data set names its classes in its own way
        pairs = pairs.with_equal_labels(left)
    stays = staying(left, right, pairs)
    if files[0] is not None:
        write_pairs(files[0], left, other, pairs, raw=raw)
    if files[1] is not None:
        write_list(files[1], str(path), found, remaining(found, left, stays), label_from=data.label_from, raw=raw)
    if files[2] is not None:
        pairs_sheet(files[2], left, other, pairs)
    return Duplicates(
        path=str(path),
        images=len(left),
        shared=shared(left, right, pairs),
        pairs=list(pair_rows(left, other, pairs.rows_at(slice(SHOWN)))),
        found=len(pairs),
        alike=int((~pairs.copy).sum()),
        remaining=int(stays.sum()),
        bad=[*left.bad, *(right.bad if right is not None else ())],
        written=[str(file) for file in files if file is not None],
    )


def _hashed(
    path: str, found: DataSet, against: Sequence[str | Path], workers: int
) -> tuple[HashedImages, HashedImages | None]:
    """Return the images to clean, and the images to compare them with (None: with each other)."""
    from vitrail.data.copies.dedup import HashedImages, hashed, split_apart, splits_to_clean
    from vitrail.data.sources.open import open_and_warn

    choices: dict[str, Any] = dict(workers=workers, progress=ProgressLine("hashed"))
    if not against:
        return HashedImages(hashed(path, found, found.splits, **choices)), None
    left = HashedImages(hashed(path, found, splits_to_clean(found), **choices))
    parts = []
    for data in map(str, against):
        other = open_and_warn(Data(path=data))
        parts += hashed(data, other, [split_apart(other)], **choices)
    return left, HashedImages(parts)


def _cosines(model: str | Path, left: HashedImages, right: HashedImages, pairs: Pairs, compute: Compute) -> np.ndarray:
    """Return the cosine similarity of the features of each pair's two images."""
    from vitrail.evaluation.duplicates import cosines
    from vitrail.weights.load import load

    how = dict(batch_size=compute.batch_size, workers=compute.threads(), precision=compute.precision)
    device, progress = compute.place(), ProgressLine("compared")
    return cosines(load(model), left, right, pairs, **how, device=device, progress=progress)  # type: ignore[arg-type]


def show(result: Duplicates) -> Any:
    """Return the result as tables for a terminal."""
    rows = []
    for one in result.shared:
        ours, theirs = _split(one.data, one.split), _split(one.other_data, one.other_split)
        theirs = "the same, earlier" if ours == theirs else theirs
        rows.append((ours, theirs, *(f"{count:,}" for count in (one.exact, one.near, one.others, one.alike))))
    copies, alike = ([pair for pair in result.pairs if pair[-1] == copy] for copy in (1, 0))
    note = "of look-alikes, which may be different pictures, or have different labels; their images remain"
    return page(
        table(("images of", "also in", "exact", "near", "copied there", "look-alikes"), rows),
        first_lines([f"bad: {bad.split}/{bad.id}: {bad.detail}" for bad in result.bad]),
        [f"{counted(result.found - result.alike, 'pair')} of copies:"] if copies else [],
        first_lines([_line(pair) for pair in copies], result.found - result.alike),
        [f"{counted(result.alike, 'pair')} {note}:"] if alike else [],
        first_lines([_line(pair) for pair in alike], result.alike),
        f"{result.remaining:,} of {result.images:,} images remain without the copies",
        [f"written to {file}" for file in result.written],
    )


def _split(data: str, split: str) -> str:
    """Return the short name of a split: the last part of the path of its data set, and its own name."""
    name = Path(data).name or data
    return f"{name}, {split}" if split else name


def _line(pair: tuple[object, ...]) -> str:
    *names, distance, correlation, exact, mirrored, cosine, copy = map(str, pair)
    data, split, name, other_data, other_split, other = names
    first = " ".join(filter(None, (split, name)))
    second = " ".join(filter(None, ("" if data == other_data else Path(other_data).name, other_split, other)))
    how = "same bytes" if exact == "1" else f"{distance} of 64 bits differ, correlation {correlation}"
    how += ", mirrored" if mirrored == "1" else ""
    how += f", cosine {cosine}" if cosine else ""
    return f"{first} {'=' if copy == '1' else '~'} {second}: {how}"


def as_json(result: Duplicates) -> Any:
    """Return the result as JSON values; `pairs` are the first 10,000."""
    from vitrail.config import plain
    from vitrail.data.copies.dedup import COLUMNS

    pairs = [dict(zip(COLUMNS, pair, strict=True)) for pair in result.pairs]
    bad = [bad._asdict() for bad in result.bad]
    return {**plain(result), "pairs": pairs, "bad": bad}
