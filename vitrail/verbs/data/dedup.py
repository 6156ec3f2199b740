"""`vitrail data dedup`: find training images that are also test images, or duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import UsageError
from vitrail.verbs.data.check import Line, cores, some

if TYPE_CHECKING:
    from vitrail.data.check import Bad
    from vitrail.data.copies.dedup import HashedImages, Pairs, Shared
    from vitrail.data.item import DataSet

SHOWN = 10_000
"""Maximum number of pairs in the result; the CSV file contains all of them."""


@dataclass(frozen=True)
class Duplicates:
    """The result of a search for copies."""

    path: str
    images: int
    """Number of images that were compared with others."""
    shared: list[Shared]
    pairs: list[tuple[object, ...]]
    """The first 10,000: see `vitrail.data.copies.dedup.rows`."""
    found: int
    """Pairs in all."""
    remaining: int
    """Images of `images` that remain without the copies."""
    bad: list[Bad]
    """Images that cannot be read. They are not compared, and they remain."""
    written: list[str]
    """Files."""


def dedup(
    path: str | Path,
    *,
    against: tuple[str | Path, ...] = (),
    model: str | Path | None = None,
    distance: int | None = None,
    cosine: float = 0.95,
    mirrored: bool = False,
    out: str | Path | None = None,
    keep_list: str | Path | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "bf16", "float32"] = "auto",
) -> Duplicates:
    """Find training images that are also test images, or duplicates: exact, re-encoded or resized copies.

    Two perceptual hashes of 64 bits propose pairs; with a model, the features of both images confirm each pair. Your
    images are not changed: the results are lists of the copies and of the remaining images. All splits except test and
    validation are training images. Hashes are cached, so that a second call takes no time.

    Args:
        path: The training images, in any form that `vitrail train` takes.
        against: A data set whose test images (else validation images, else all) must not be among the training
            images. May be repeated (default: the images are compared with each other, within and across their
            splits).
        model: A run, weights or a name on the hub. A pair then counts only if its features are similar, too.
        distance: Maximum number of differing bits, of 64, between the hashes of two copies (default: 6, or 10 with
            a model).
        cosine: Minimum cosine similarity for two images to count as copies (needs --model).
        mirrored: Find mirror images, too.
        out: Write all pairs to this CSV file.
        keep_list: Write the remaining images and the other splits to this CSV file, for `vitrail train FILE`.
        batch_size: Number of images per batch (needs --model).
        workers: Number of threads that decode images (default: from the machine).
        device: Device to compute on with --model: cpu, cuda, cuda:1 or mps (default: the best available).
        precision: Number format of the computation with --model. 'auto' chooses bf16 if the device is fast at it.
    """
    from vitrail.data.copies.dedup import DISTANCE, WIDE, find_copies, remaining, rows, staying, write_pairs
    from vitrail.data.sources.lists import write_list
    from vitrail.data.sources.open import find

    if not 0 < cosine <= 1:
        raise UsageError(f"cosine is {cosine}: valid are numbers above 0 and at most 1")
    against = (against,) if isinstance(against, str | Path) else against
    files = _outside((out, keep_list), [str(path), *map(str, against)])
    found = find(str(path))
    left, right = _gathered(str(path), found, against, cores(workers))
    if distance is None:
        distance = DISTANCE if model is None else WIDE
    pairs = find_copies(left, right, distance=distance, mirrored=mirrored)
    other = left if right is None else right
    if model is not None:
        pairs = _confirmed(model, left, other, pairs, cosine, batch_size, cores(workers), device, precision)
    stays = staying(left, right, pairs)
    if files[0] is not None:
        write_pairs(files[0], left, other, pairs)
    if files[1] is not None:
        write_list(files[1], str(path), found, remaining(found, left, stays))
    return _result(str(path), left, right, pairs, list(rows(left, other, pairs.chosen(slice(SHOWN)))), stays, files)


def _outside(files: Sequence[str | Path | None], data: list[str]) -> list[Path | None]:
    """Return the paths of the output files. Raises UsageError or DataError, before any work, if one is not valid."""
    from vitrail.data.cache import refuse_within

    for file in files:
        for place in data:
            if file is not None:
                refuse_within(file, place)
        if file is not None and Path(file).suffix.lower() != ".csv":
            raise UsageError(f"{file}: lists are CSV files, so the name must end in .csv")
    return [None if file is None else Path(file).expanduser() for file in files]


def _gathered(
    path: str, found: DataSet, against: Sequence[str | Path], workers: int
) -> tuple[HashedImages, HashedImages | None]:
    """Return the images to clean, and the images to compare them with (None: with each other)."""
    from vitrail.data.copies.dedup import HashedImages, hashed, split_apart, training_splits
    from vitrail.data.sources.open import find

    choices: dict[str, Any] = dict(workers=workers, progress=Line("hashed"))
    if not against:
        return HashedImages(hashed(path, found, found.splits, **choices)), None
    left = HashedImages(hashed(path, found, training_splits(found), **choices))
    parts = []
    for data in map(str, against):
        other = find(data)
        parts += hashed(data, other, [split_apart(other)], **choices)
    return left, HashedImages(parts)


def _confirmed(
    model: str | Path,
    left: HashedImages,
    right: HashedImages,
    pairs: Pairs,
    least: float,
    batch_size: int,
    workers: int,
    device: str | None,
    precision: Literal["auto", "bf16", "float32"],
) -> Pairs:
    """Return the pairs whose features are similar as well."""
    from vitrail.device import choose_device
    from vitrail.evaluation.duplicates import cosines
    from vitrail.weights.load import load

    found = cosines(
        load(model),
        left,
        right,
        pairs,
        batch_size=batch_size,
        workers=workers // 2,
        device=choose_device(device),
        precision=precision,
        progress=Line("compared"),
    )
    return pairs.confirmed(found, least)


def _result(
    path: str,
    left: HashedImages,
    right: HashedImages | None,
    pairs: Pairs,
    shown: list[tuple[object, ...]],
    stays: Any,
    files: list[Path | None],
) -> Duplicates:
    from vitrail.data.copies.dedup import shared

    bad = [*left.bad, *(right.bad if right is not None else ())]
    written = [str(file) for file in files if file is not None]
    found = shared(left, right, pairs)
    return Duplicates(path, len(left), found, shown, len(pairs), int(stays.sum()), bad, written)


def show(result: Duplicates) -> Any:
    """Return the result as tables for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table("images of", "also in", "exact", "near", "copied there")
    for one in result.shared:
        ours, theirs = _split(one.data, one.split), _split(one.other_data, one.other_split)
        theirs = "the same, earlier" if ours == theirs else theirs
        table.add_row(ours, theirs, f"{one.exact:,}", f"{one.near:,}", f"{one.others:,}")
    lines = [f"bad: {bad.split}/{bad.id}: {bad.detail}" for bad in result.bad]
    lines = some(lines) + some([_line(pair) for pair in result.pairs], result.found)
    lines.append(f"{result.remaining:,} of {result.images:,} images remain without the copies")
    lines += [f"written to {file}" for file in result.written]
    return Group(*([table] if result.shared else []), Text("\n".join(lines)))


def _split(data: str, split: str) -> str:
    """Return the short name of a split: the last part of the path of its data set, and its own name."""
    name = Path(data).name or data
    return f"{name}, {split}" if split else name


def _line(pair: tuple[object, ...]) -> str:
    data, split, name, other_data, other_split, other, distance, exact, mirrored, cosine = map(str, pair)
    first = " ".join(filter(None, (split, name)))
    second = " ".join(filter(None, ("" if data == other_data else Path(other_data).name, other_split, other)))
    how = "same bytes" if exact == "1" else f"{distance} of 64 bits differ"
    how += ", mirrored" if mirrored == "1" else ""
    how += f", cosine {cosine}" if cosine else ""
    return f"{first} = {second}: {how}"


def as_json(result: Duplicates) -> Any:
    """Return the result as JSON values; `pairs` are the first 10,000."""
    from vitrail.config import plain
    from vitrail.data.copies.dedup import COLUMNS

    pairs = [dict(zip(COLUMNS, pair, strict=True)) for pair in result.pairs]
    bad = [bad._asdict() for bad in result.bad]
    return {**plain(result), "pairs": pairs, "bad": bad}
