"""`predict --out FOLDER` of a network that predicts the class of each pixel: a PNG for each image."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.disk import writing
from vitrail.errors import DataError, UsageError
from vitrail.files import check_writable, read_text, replacing, replacing_text
from vitrail.words import listing

if TYPE_CHECKING:
    from vitrail.data.images.tiles import Tiling
    from vitrail.evaluation.classify import Predict
    from vitrail.tasks.prediction import Summary
    from vitrail.verbs.flags.compute import Compute

CLASSES, ERRORS = "classes.txt", "errors.csv"


def write_masks(
    network: Any, paths: Sequence[str | Path], out: Path, predict: Predict, compute: Compute, tiles: Tiling | None
) -> Summary:
    """Write a mask for each image into the folder `out`, and return the counts of images.

    A mask is a PNG with a palette, of the image's size, in the place below `out` that the image has below the common
    folder of all images. The value of a pixel is the number of its class, and classes.txt names the classes. So the
    folder is one of masks as `vitrail train` reads them. Raises UsageError for a folder that holds other files or other
    masks, for that of the images or of their labels, and for images that would have one name.
    """
    from vitrail.data.cache import refuse_within
    from vitrail.data.labels.masks import mask_png
    from vitrail.data.sources.files import find_images
    from vitrail.data.spreadsheet import SafeWriter
    from vitrail.tasks.predict_masks import predict_masks
    from vitrail.tasks.prediction import Summary, Unreadable
    from vitrail.tasks.task import shown_names

    files = list(find_images(paths))
    refuse_within(out, *{path.parent for path in files})
    targets = _targets(files, out)
    ours = {*targets.values(), out / CLASSES, out / ERRORS}
    if (
        others := []
        if not out.exists()
        else [path.name for path in out.rglob("*") if path.is_file() and path not in ours]
    ):
        raise UsageError(
            f"{out} holds other files ({listing(others, 3, quoted=False)}), and nothing is written among them. Choose "
            "a new folder"
        )
    summary, names = Summary(), shown_names(network.card)
    classes = "".join(f"{name}\n" for name in names)
    _refuse_labels(files, out, targets.values(), classes)
    check_writable(out, DataError, folder=True)
    with writing(out, UsageError):
        with replacing_text(out / CLASSES) as file:  # before the masks: it tells them from those of others
            file.write(classes)
        (out / ERRORS).unlink(missing_ok=True)
        for found in predict_masks(
            network, files, predict, batch_size=compute.batch_size, workers=compute.threads(), tiles=tiles
        ):
            if isinstance(found, Unreadable):
                summary.unreadable.append(found)
                continue
            with replacing(targets[found.path]) as temporary:
                temporary.write_bytes(mask_png(found.mask, len(names)))
            summary.predicted += 1
        if summary.unreadable:
            summary.errors = out / ERRORS
            with replacing_text(summary.errors) as file:
                SafeWriter(file).writerows([Unreadable._fields, *summary.unreadable])
    return summary


def _refuse_labels(files: Sequence[Path], out: Path, targets: Iterable[Path], classes: str) -> None:
    """Raise UsageError if `out` is for the labels of the images, or holds masks that no network with `classes` wrote.

    classes: The text of classes.txt.
    """
    from vitrail.data.masks import MASKS

    place = out.resolve()
    above = {folder for parent in {path.parent for path in files} for folder in (parent.resolve() / "_").parents}
    labels = {images.with_name(name) for images in above if images.name == "images" for name in MASKS}
    if found := [folder for folder in labels & {place, *place.parents} if folder.exists()]:
        raise UsageError(
            f"{out} is, or lies in, {found[0]}, whose masks may be the labels of these images. Choose a new folder"
        )
    written = out / CLASSES
    there = written.exists() or any(target.exists() for target in targets)
    if there and not (written.is_file() and read_text(written, UsageError) == classes):
        raise UsageError(
            f"{out} holds masks, and no {CLASSES} of this network: it did not write them. Choose a new folder"
        )


def _targets(files: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Return the PNG of each file. Raises UsageError if two files would have the same."""
    root = os.path.commonpath([path.absolute().parent for path in files])
    found = {path: out / path.absolute().relative_to(root).with_suffix(".png") for path in files}
    seen: dict[Path, Path] = {}
    for path, target in found.items():
        if (other := seen.setdefault(target, path)) != path:
            raise UsageError(f"{other} and {path} would have the same mask, {target}. Predict them into two folders")
        if target.absolute() in {file.absolute() for file in (path, other)}:
            raise UsageError(f"the mask of {path} would take its place. Choose a folder that does not hold the images")
    return found
