"""`vitrail search`: find the images that are most like given ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vitrail.device import Precision
from vitrail.errors import DataError, DecodeError, UsageError
from vitrail.exports.kinds import EngineName
from vitrail.files import check_writable, replacing_text
from vitrail.ranges import Count, InputSize, Threads, checked
from vitrail.terminal import page, table, unreadable_json, unreadable_lines
from vitrail.verbs.features import Embedder, open_every_image, paths_or_images
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords, ImageLike, ImagesLike
from vitrail.version import need
from vitrail.words import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from vitrail.data.item import IndexedSource

PICTURES = (".png", ".pdf", ".svg")
ITSELF = 0.999
"""Smallest cosine similarity of two features of one image, which may have been computed in other precisions."""
DRAWN = 20
"""Maximum number of images in a picture."""


@dataclass(frozen=True)
class Match:
    """An image that was found."""

    image: str
    """Path of the file, or the image's name in a data set."""
    similarity: float
    """Cosine similarity of the features, from -1 to 1."""


@one_line
@dataclass(frozen=True)
class Matches:
    """The result of a search."""

    like: list[str]
    images: int
    """Number of images that were searched."""
    matches: list[Match]
    """The most similar image first."""
    unreadable: list[tuple[str, str]]
    """(image, reason) of each image that could not be read."""
    out: str | None


@checked
def search(
    model: str | Path,
    *paths: ImagesLike,
    like: tuple[ImageLike, ...] = (),
    features: str | Path | None = None,
    top: Count = 10,
    out: str | Path | None = None,
    raw: bool = False,
    image_size: InputSize | None = None,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    engine: EngineName = "auto",
    **reading: Unpack[DataKeywords],
) -> Matches:
    """Find the images that are most like one or several given images, by the cosine similarity of their features.

    With several images in --like, those are found that are like all of them: features are compared with the mean of
    theirs. The given images themselves are left out. To search the same images often, write their features once with
    `vitrail embed MODEL PHOTOS --out FEATURES.npz` (or a folder) and give them with --features.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        paths: The images to search: files, folders and patterns such as 'photos/**/*.jpg', any number of them; or one
            data set. In Python also images in memory, as `vitrail.predict` takes them.
        like: Image to compare with. May be repeated.
        features: An .npz file or a folder that `vitrail embed` wrote with the same model, in place of the images to
            search.
        top: Number of images to find.
        out: Write the images to this .csv file, or draw the first 20 in this .png, .pdf or .svg file.
    """
    compute = Compute(image_size, batch_size, workers, device, precision, engine)
    files, held = paths_or_images(paths, out=out, **reading)
    like_files, like_held = paths_or_images(like if isinstance(like, tuple) else [like], out=out)
    wanted = [*like_files, *like_held]
    if not wanted:
        raise UsageError(f"no image to compare with: vitrail search {model} PHOTOS --like IMAGE")
    if bool(paths) == (features is not None):
        raise UsageError(
            f"give either images to search (vitrail search {model} PHOTOS --like IMAGE) or the features of images "
            f"(vitrail search {model} --features FEATURES.npz --like IMAGE)"
        )
    if out is not None:
        if Path(out).suffix.lower() not in (".csv", *PICTURES):
            raise UsageError(f"{out}: the name must end in .csv, {', '.join(PICTURES)}")
        if Path(out).suffix.lower() in PICTURES:
            need("matplotlib")
        check_writable(Path(out), UsageError)
    _check_readable(like_files)
    embedder = Embedder(model, compute)
    given = embedder.source(wanted)
    asked = embedder(given)
    if features is not None:
        names, rows, unreadable = _read(features, embedder)
    else:
        sources = {"": embedder.source(held)} if held else open_every_image(files, reading, embedder.network.card)
        names, rows, unreadable = _embed(embedder, sources)
    found = _nearest(asked.features, rows, names, like_files, top)
    like_names = [given.id(number) for number in range(len(given))]
    if out is not None:
        _write(Path(out), like_names, found, embedder, raw)
    return Matches(like_names, len(names), found, unreadable, None if out is None else str(out))


def _check_readable(like: tuple[str | Path, ...]) -> None:
    """Raise DataError with the file if an image to compare with cannot be read."""
    from vitrail.data.images.decode import decode
    from vitrail.data.sources.folder import read_file

    for path in like:
        try:
            decode(read_file(path))
        except DecodeError as error:
            what = f"the image to compare with, {path}, cannot be read: {error.reason}"
            raise DataError(f"{what} ({error})") from error


def _embed(
    embedder: Embedder, sources: Mapping[str, IndexedSource]
) -> tuple[list[str], np.ndarray, list[tuple[str, str]]]:
    """Return the names of the readable images, their features [N, width], and the unreadable images."""
    import numpy as np

    from vitrail.data.sources.folder import file_of

    names: list[str] = []
    rows: list[np.ndarray] = []
    unreadable: list[tuple[str, str]] = []
    for split, source in sources.items():
        part, prefix = embedder(source), f"{split}/" if split else ""
        for number in part.index.tolist():
            file = file_of(source, number)
            names.append(f"{prefix}{source.id(number)}" if file is None else str(file))
        rows.append(part.features)
        unreadable += part.bad
    return names, np.concatenate(rows), unreadable


def _read(file: str | Path, embedder: Embedder) -> tuple[list[str], np.ndarray, list[tuple[str, str]]]:
    """Return what `_embed` returns, from a file of features. Raises DataError if they are another network's."""
    from vitrail.evaluation.feature_files import load_named_features, load_shard_features

    if Path(file).is_dir():
        return *load_shard_features(Path(file), embedder.width, embedder.identity[0]), []
    return *load_named_features(file, embedder.blank_features, embedder.identity[0]), []


def _nearest(
    asked: np.ndarray, rows: np.ndarray, names: list[str], like: tuple[str | Path, ...], top: int
) -> list[Match]:
    """Return the `top` images whose features are most similar to the mean direction of `asked` [n, width]."""
    from vitrail.evaluation.features import unit_rows
    from vitrail.evaluation.knn import neighbours

    unit = unit_rows(asked)
    ((similarity, numbers),) = neighbours(rows, unit.mean(axis=0, keepdims=True), min(top + len(like), len(names)))
    given = list(zip(map(str, like), unit, strict=False))
    ranked = zip(numbers[0].tolist(), similarity[0].tolist(), strict=True)
    found = (Match(names[row], value) for row, value in ranked if not _is_given(names[row], rows[row], given))
    return list(islice(found, top))


def _is_given(name: str, row: np.ndarray, given: Sequence[tuple[str, np.ndarray]]) -> bool:
    """Return whether an image, with its features [width], is one of those that are `given`, with theirs of length 1.

    Its name may be a path below a data set, which stored features do not know: then the features must be those, too.
    """
    from vitrail.evaluation.features import unit_rows

    real, below = os.path.realpath(name), f"{os.sep}{os.path.normpath(name)}"
    (unit,) = unit_rows(row[None])
    return any(
        real == os.path.realpath(path)
        or ((os.path.abspath(path).endswith(below) or os.path.realpath(path).endswith(below)) and unit @ own > ITSELF)
        for path, own in given
    )


def _write(out: Path, like: list[str], found: list[Match], embedder: Embedder, raw: bool) -> None:
    """Write the images that were found as a table, or draw them beside the given ones."""
    if out.suffix.lower() == ".csv":
        from vitrail.data.spreadsheet import SafeWriter

        with replacing_text(out, UsageError) as stream:
            writer = SafeWriter(stream, raw=raw)
            writer.writerow(["image", "similarity"])
            writer.writerows([match.image, f"{match.similarity:.6f}"] for match in found)
        return
    from vitrail.data.sources.indexed import GivenImages
    from vitrail.inspection.figures.embedding import draw_matches
    from vitrail.inspection.figures.page import Folder
    from vitrail.inspection.pictures import Pictures

    files = [*like, *(match.image for match in found[:DRAWN])]
    pictures = Pictures(GivenImages(files), embedder.transform)
    shown = [pictures.read(number) for number in range(len(files))]
    near = [
        (picture, f"{match.similarity:.2f}")
        for picture, match in zip(shown[len(like) :], found, strict=False)
        if picture is not None
    ]
    given = [picture for picture in shown[: len(like)] if picture is not None]
    if not near:
        raise UsageError(f"{out} cannot be drawn: the images that were found are not files here. Write a .csv file")
    figure = draw_matches("Most similar images, with the cosine similarity of their features", given, near)
    Folder(out.parent, (out.suffix.lower()[1:],)).figure(out.stem, figure)  # type: ignore[arg-type]


def show(result: Matches) -> Any:
    """Return the result as a table for a terminal."""
    found = table(("similarity", "image"), ((f"{match.similarity:.3f}", match.image) for match in result.matches))
    what = f"{len(result.matches)} of {result.images:,} images, like {', '.join(result.like)}"
    written = [f"written: {result.out}"] if result.out else []
    return page(what, found, [*written, *unreadable_lines(result.unreadable)])


def as_json(result: Matches) -> Any:
    """Return the result as JSON values."""
    matches = [{"image": match.image, "similarity": match.similarity} for match in result.matches]
    unreadable = unreadable_json(result.unreadable)
    return {"like": result.like, "images": result.images, "matches": matches, "unreadable": unreadable}
