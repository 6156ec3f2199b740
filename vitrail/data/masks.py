"""Images with masks: a folder `images/` and a folder `masks/` with a PNG of the same name for each image.

```
photos/images/train/1.jpg    photos/masks/train/1.png    the value of a pixel is the number of its class
photos/images/val/2.jpg      photos/masks/val/2.png
photos/classes.txt           optional: the names of the classes 0, 1, ..., one on each line
```

Without the folders train and val a share of the images is held out. A mask is a PNG with a palette (as Pascal VOC's) or
with 8-bit grey values (as ADE20K's, whose folder `annotations/` is found, too). Nothing is written there.

Masks among photographs are recognised: files of equal names beside them, or in a folder `masks/` or `trimaps/`. Such
files look like images to label, and a network that learns from them learns nonsense.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import pairwise
from pathlib import Path, PurePath

import numpy as np

from vitrail.data.image_names import in_junk, is_image_name
from vitrail.data.images.decode import decode, upright_size
from vitrail.data.item import DataSet, Findings, IndexedSource, role_of
from vitrail.data.labels.masks import Masks, mask_values
from vitrail.data.labels.sets import named
from vitrail.data.settings import ALL, IGNORED, Columns, Selection
from vitrail.data.sources.flat import label_advice
from vitrail.data.sources.folder import FileSource, file_source, folders_in, images_in, note_others, read_file
from vitrail.errors import DataError, DecodeError
from vitrail.files import read_text
from vitrail.words import listing

FOLDERS = frozenset((
    "mask", "masks", "trimap", "trimaps", "annotation", "annotations", "label", "labels", "gt", "groundtruth",
    "ground_truth", "seg", "segmentation", "segmentations", "segmentationclass", "segmentationobject",
))  # fmt: skip
"""Usual names of folders of masks, in lower case."""
_JPEG = (".jpg", ".jpeg")
_SHARE = 0.9
"""Share of the files of a folder that have the names of images elsewhere, from which they are masks."""
_LOOKED_AT = 3
"""Number of files of a folder whose colours are counted."""
_COLOURS = 64
"""Maximum number of colours of a mask. Photographs have thousands."""


def masks_beside(sources: Iterable[IndexedSource]) -> Iterator[str]:
    """Yield a warning for each source of files in which half of the images or more have the name of another one."""
    for source in sources:
        if not isinstance(source, FileSource):
            continue
        names = pairwise(map(os.path.splitext, source.names()))  # files of one folder are sorted by name
        first = [row for row, (one, two) in enumerate(names) if one[0] == two[0]]
        if 4 * len(first) < len(source) or not first:
            continue
        stem, *pair = *os.path.splitext(source.id(first[0])), os.path.splitext(source.id(first[0] + 1))[1]
        large = int(source.sizes[first].sum() < source.sizes[np.array(first) + 1].sum())
        jpeg = [ending.lower() in _JPEG for ending in pair]
        image = pair[large if jpeg[0] == jpeg[1] else jpeg.index(True)]
        (mask,) = {*pair} - {image}
        yield (
            f"{2 * len(first):,} of {len(source):,} images have a name that occurs with two endings, such as "
            f"{stem}{image} and {mask}: the {mask} files are probably masks of the photographs. To use the photographs "
            f"alone, add --data.include '*{image}'"
        )


def refuse_mask_folders(path: Path, found: DataSet) -> None:
    """Raise DataError if folders of masks would count as photographs, or as a class."""
    for split, source in found.splits.items():
        if isinstance(source, FileSource) and (folders := _mask_folders(source)):
            root = path / split
            others = {PurePath(name).parts[0] for name in source.names()} - {*folders}
            patterns = " ".join(f"--data.exclude {folder}" for folder in folders)
            advice = f"leave them out: {patterns}"
            if len(others) == 1 and found.findings.kind == "folder":
                (images,) = others
                advice = f"give the folder of the images alone, {root / images}. {label_advice(root / images)}"
            raise DataError(
                f"the images in {listing([f'{root / folder}/' for folder in folders], quoted=False)} are masks: they "
                f"have the names of images in other folders, and few colours. To learn from the photographs, {advice}. "
                "To learn from the masks, call the folders images/ and masks/"
            )


def _mask_folders(source: FileSource) -> list[str]:
    """Return the names of the folders of masks within the folder of a source."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(source.names()):
        parts = name.split("/")[:-1]
        groups[next((part for part in parts if part.lower() in FOLDERS), "")].append(row)
    if len(groups) < 2 or "" not in groups:
        return []
    images = {_stem(source, row) for row in groups.pop("")}
    return [
        folder
        for folder, rows in sorted(groups.items())
        if sum(_stem(source, row) in images for row in rows) >= _SHARE * len(rows) and _few_colours(source, rows)
    ]


def _stem(source: FileSource, row: int) -> str:
    return PurePath(source.id(row)).stem


def _few_colours(source: FileSource, rows: list[int]) -> bool:
    """Return whether the first files that can be read have as few colours as masks."""
    for row in rows[:_LOOKED_AT]:
        try:
            image = decode(source[row].image)  # type: ignore[arg-type]
        except DecodeError:
            continue
        if len(np.unique(image.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32))) > _COLOURS:
            return False
    return True


log = logging.getLogger("vitrail")
MASKS = ("masks", "annotations")
CLASSES = "classes.txt"
EXPECTED = "Expected are images/NAME.jpg and masks/NAME.png, or images/train, images/val, masks/train and masks/val"


@dataclass(frozen=True)
class MaskedImages:
    """Images of one split with the path of each one's mask."""

    images: FileSource
    masks: list[Path]

    def __len__(self) -> int:
        return len(self.masks)

    def at(self, rows: Sequence[int]) -> MaskedImages:
        """Return the images at `rows`."""
        return MaskedImages(self.images.at(rows, *named([None] * len(rows))), [self.masks[row] for row in rows])


def _table(values: list[int]) -> np.ndarray:
    """Return the class of each value of a mask, uint8 [256]; IGNORED for values that are none of these."""
    table = np.full(256, IGNORED, dtype=np.uint8)
    table[values] = np.arange(len(values))
    return table


def are_masked(root: Path) -> bool:
    """Return whether a folder holds a folder of images, and one of masks in the same folders as the images."""
    masks, images = _masks_in(root), root / "images"
    if masks is None or not images.is_dir():
        return False
    files = (path.relative_to(masks) for path in masks.rglob("*") if is_image_name(path.name))
    return any(not in_junk(file.as_posix()) and (images / file.parent).is_dir() for file in files)


def read_masked(root: Path, columns: Columns, *, labels: bool) -> DataSet:
    """Return the images in a folder with their masks as labels. All masks are read once, to check them.

    Pixels with a value in `Data.ignore` do not count. The classes are those of classes.txt, else all other values in
    the masks. Masks without any pixel that counts are left out with a warning. Without `labels` the masks are not read.
    Raises DataError with the file and the problem.
    """
    if columns.per_image != "auto":
        raise DataError(
            f"data.labels_per_image is {columns.per_image!r}, and the labels of {root} are the masks in "
            f"{_folders(root)[1]}. Leave it out, or give the folder {root / 'images'} alone"
        )
    images, masks = _folders(root)
    findings = Findings("masks")
    named_splits = [one.name for one in folders_in(images) if role_of(one.name) or one.name in columns.splits]
    if named_splits:
        note_others(images, [images / name for name in named_splits], findings)
    pairs = {name: _paired(images / name, masks, name, findings, columns.selection) for name in named_splits or [""]}
    if not labels:
        return DataSet({name: each.images for name, each in pairs.items()}, findings)
    checked, values, titles = _checked(root, masks, pairs, columns.ignore)
    table = _table(values)
    splits: dict[str, IndexedSource] = {}
    for name, (each, pixels) in checked.items():
        found = Masks.of_files(pixels[:, values], each.masks, table)
        splits[name] = each.images.at(np.arange(len(each)), found, titles)
    return DataSet(splits, findings)


def _masks_in(root: Path) -> Path | None:
    return next((root / name for name in MASKS if (root / name).is_dir()), None)


def _folders(root: Path) -> tuple[Path, Path]:
    """Return the folders of images and of masks. Raises DataError if one is missing."""
    images, masks = root / "images", _masks_in(root)
    if not images.is_dir() or masks is None:
        missing = "images/" if not images.is_dir() else "masks/"
        raise DataError(f"{root} has no folder {missing}. {EXPECTED}")
    return images, masks


def _checked(
    root: Path, masks: Path, splits: dict[str, MaskedImages], ignore: Sequence[int]
) -> tuple[dict[str, tuple[MaskedImages, np.ndarray]], list[int], list[str]]:
    """Return the images of each split with pixels that count, the values of the classes, and their names.

    Beside the images of a split is the number of pixels of each value in their masks, int64 [images, 256].
    """
    names = _names(root / CLASSES)
    counts, checked = np.zeros(256, dtype=np.int64), {}
    for split, pairs in splits.items():
        found = _counts(pairs, names, ignore)
        counts += found.sum(axis=0)
        good = found.sum(axis=1) > 0
        checked[split] = _with_pixels(pairs, good, ignore), found[good]
    values = [value for value in range(len(names) if names else 256) if value not in ignore]
    if not names:
        values = [value for value in values if counts[value]]
    if len(values) < 2:
        raise DataError(f"the masks in {masks} hold {len(values)} class, and at least 2 are needed. Ignored: {ignore}")
    if len(values) > IGNORED:
        raise DataError(f"the masks in {masks} hold {len(values)} classes, and {IGNORED} are possible. Ignore a value")
    return checked, values, [names[value] if names else str(value) for value in values]


def _paired(images: Path, masks: Path, split: str, findings: Findings, selection: Selection = ALL) -> MaskedImages:
    """Return the images below a folder with their masks. Raises DataError if an image has none."""
    place = masks / split
    files = [(name, None, file.size) for name, file in images_in(images, "", findings, selection=selection)]
    if not files:
        raise DataError(f"{images} holds no images. {EXPECTED}")
    found = [path for path in place.rglob("*") if path.suffix.lower() == ".png"]
    capital = {path.with_suffix(".png"): path for path in found if path.suffix != ".png"}
    usual = [place / Path(name).with_suffix(".png") for name, _, _ in files]
    paths = [path if path.is_file() else capital.get(path, path) for path in usual]
    if missing := [name for (name, _, _), path in zip(files, paths, strict=True) if not path.is_file()]:
        which = "no image" if len(missing) == len(files) else f"{len(missing):,} of {len(files):,} images"
        has = "has a mask" if len(missing) == len(files) else "have no mask"
        wanted = place / Path(missing[0]).with_suffix(".png")
        other = next((path.name for path in wanted.parent.glob(f"{escape(wanted.stem)}.*") if path.is_file()), None)
        raise DataError(
            f"{which} in {images} {has}: {listing(missing, 3)}. Expected is a PNG of the same name, such as {wanted}"
            + f". {other} beside it is none: JPEG, for example, changes the numbers of classes" * bool(other)
        )
    there = {path for path in found if not in_junk(path.relative_to(place).as_posix())}
    if (others := there - set(paths)) and not selection.patterns:
        log.warning("%d masks in %s have no image, and are not used: %s", len(others), place, _some(others))
    return MaskedImages(file_source(images, files), paths)


def _counts(pairs: MaskedImages, names: list[str], ignore: Sequence[int]) -> np.ndarray:
    """Return the number of pixels of each mask with each value, int64 [masks, 256]; 0 for ignored values.

    Raises DataError for a mask that cannot be read, has another size than its image, or a value without a class.
    """
    found = np.zeros((len(pairs), 256), dtype=np.int64)
    for row, path in enumerate(pairs.masks):
        values = mask_values(path)
        _check_size(pairs.images, row, path, values.shape)
        found[row] = np.bincount(values.reshape(-1), minlength=256)
        found[row, list(ignore)] = 0
        wrong = [int(value) for value in np.flatnonzero(found[row]) if names and value >= len(names)]
        if wrong:
            raise DataError(
                f"{path} holds the value {wrong[0]}, and {CLASSES} names the classes 0 to {len(names) - 1}. Add its "
                f"name there, or ignore the values {' '.join(map(str, [*ignore, *wrong[:3]]))} (data.ignore)"
            )
    return found


def _check_size(images: FileSource, row: int, path: Path, shape: tuple[int, ...]) -> None:
    try:
        height, width = upright_size(read_file(images.path(row)))
    except DecodeError:
        return  # it is listed as unreadable when its tokens are computed
    if shape != (height, width):
        raise DataError(
            f"{path} has {shape[1]} x {shape[0]} pixels, and its image {images.path(row)} has {width} x {height}. Both "
            "must have one size"
        )


def _with_pixels(pairs: MaskedImages, good: np.ndarray, ignore: Sequence[int]) -> MaskedImages:
    """Return the images whose masks have pixels that count. Raises DataError if there are none."""
    if good.all():
        return pairs
    empty = [path for path, fine in zip(pairs.masks, good, strict=True) if not fine]
    if not good.any():
        raise DataError(f"every pixel of all {len(empty):,} masks is ignored: {_some(empty)}. Ignored: {ignore}")
    log.warning("%d images are left out, because every pixel of their masks is ignored: %s", len(empty), _some(empty))
    return pairs.at(np.flatnonzero(good).tolist())


def _names(file: Path) -> list[str]:
    """Return the names in classes.txt; none without the file. Raises DataError for an empty or a repeated name."""
    if not file.is_file():
        return []
    names = [line.strip() for line in read_text(file, DataError).removeprefix("\ufeff").rstrip().split("\n")]
    if wrong := next((row for row, name in enumerate(names) if not name or name in names[:row]), None):
        raise DataError(f"{file}, line {wrong + 1}: {names[wrong]!r} is empty or a name that is already there")
    if not names[0] or len(names) > 256:
        raise DataError(f"{file} has {len(names)} lines, and must have a name for each class, 256 at most")
    return names


def _some(paths: Iterable[Path]) -> str:
    return listing(sorted(path.name for path in paths), 3)
