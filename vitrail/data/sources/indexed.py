"""Data sets of torch's kind: objects with a length that return (image, label) by number.

An image is a PIL picture, the bytes of an image file, uint8 [H, W] or [H, W, 1 or 3] of numpy, or a uint8 tensor
[1 or 3, H, W]. Where other bands are read, pictures keep theirs, and arrays and tensors may have any. A label is a
whole number or a name, or several labels: a list of these, or an array with 1 for each class of the image and 0 for the
others. For regression a label is a number, or an array or a list of them. Labels are read from `targets` or `labels`
if the data set has them, otherwise from every item once. Class names are in `classes` or `class_names`; otherwise
labels are their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.images.decode import pillow_channels, pillow_pixels
from vitrail.data.item import UNKNOWN, DataSet, Findings, IndexedSource, Reader
from vitrail.data.labels.numbers import Numbers, target_names
from vitrail.data.labels.sets import Named, named
from vitrail.data.settings import Columns
from vitrail.data.sources.folder import read_file
from vitrail.errors import DataError
from vitrail.words import shown

_Value = int | str | list[Any]
"""A class, or several."""
VALID = (
    "Valid are PIL pictures, bytes of an image file, uint8 arrays [H, W] or [H, W, 1 or 3], and uint8 tensors "
    "[1 or 3, H, W], before any normalisation; with data.channels or data.bits arrays and tensors of these bands, too"
)


def data_set(found: Any, columns: Columns = Columns(), *, bands: bool = False) -> DataSet:
    """Return what `Data.find` found as a `DataSet`. Raises DataError for anything that is not a data set.

    columns: If labels are numbers, `columns.per_image` says so. bands: Images keep their bands and bits.
    """
    if isinstance(found, DataSet):
        return found
    splits = found if isinstance(found, Mapping) else {"train": found}
    sources = {str(name): source_of(str(name), split, columns, bands=bands) for name, split in splits.items()}
    return DataSet(sources, Findings("own"))


def source_of(name: str, found: Any, columns: Columns = Columns(), *, bands: bool = False) -> IndexedSource:
    """Return one split as a source. Raises DataError if it has no length or no items by number."""
    if isinstance(found, IndexedSource):
        return found
    if not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
        raise DataError(
            f"the split {name!r} is {shown(found)}; it must have a length and return (image, label) by number"
        )
    return TorchSource(name, found, columns, bands=bands)


class TorchSource(Reader):
    """One data set of torch's kind as a source (see the module)."""

    def __init__(self, name: str, items: Any, columns: Columns = Columns(), *, bands: bool = False) -> None:
        self._items, self._read = items, _banded if bands else _image
        names = getattr(items, "classes", None) or getattr(items, "class_names", None)
        found = _labels(name, items)
        numbers = _numbers(name, found, columns) if columns.per_image == "numbers" else None
        labels, class_names = numbers or _named(name, found, names)
        super().__init__(labels, np.zeros(len(labels), dtype=np.int64), class_names, name)

    def image(self, index: int) -> bytes | np.ndarray:
        """See `Reader.image`."""
        item = self._items[int(index)]
        return self._read(item[0] if isinstance(item, tuple | list) else item, self.id(index))


class GivenImages(Reader):
    """Images that a caller in Python holds: those of the module, and paths of files.

    labels: One for each image, as in the module (None: unknown). Whole numbers are those of `class_names`.
    The id of a path is the path, that of another image its place among all: images[3]. For a network of `bands` images
    keep theirs. Raises DataError for labels of another number or kind.
    """

    def __init__(
        self,
        images: Sequence[Any],
        *,
        bands: bool = False,
        labels: Sequence[Any] | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        self._images, self._bands = images, bands
        known = Named(np.full(len(images), UNKNOWN, dtype=np.int64), [])
        if labels is not None:
            if len(labels) != len(images):
                raise DataError(
                    f"there are {len(images)} images and {len(labels)} labels. Give one label for each image"
                )
            known = _named("labels", list(labels), class_names or None)
        super().__init__(known.labels, np.zeros(len(images), dtype=np.int64), known.class_names, "images")

    def image(self, index: int) -> bytes | np.ndarray:
        """See `Reader.image`."""
        image = self._images[index]
        if isinstance(image, str | Path):
            return read_file(image)
        return (_banded if self._bands else _image)(image, self.id(index))

    def id(self, index: int) -> str:
        """See `IndexedSource.id`."""
        image = self._images[index]
        return str(image) if isinstance(image, str | Path) else super().id(index)


def one_by_one(images: Iterable[Any]) -> Iterator[Any]:
    """Yield each image of lists, of arrays [N, H, W, C] and of tensors [N, C, H, W]; paths as they are."""
    for image in images:
        if isinstance(image, list | tuple) or (hasattr(image, "ndim") and image.ndim == 4):
            yield from one_by_one(image)
        else:
            yield image


def _named(name: str, found: Sequence[Any], names: Iterable[Any] | None) -> Named:
    """Return the labels of images as labels of named classes. Raises DataError."""
    width = _marked_classes(name, found)
    values = [_plain(value) for value in found]
    if names is None and width is not None:
        names = range(width)
    if names is None:
        return named([_texts(value) for value in values])
    names = [str(class_name) for class_name in names]
    _check_numbers(name, values, len(names), width)
    return named([_texts(value, names) for value in values], names)


def _numbers(name: str, found: Sequence[Any], columns: Columns) -> Named | None:
    """Return labels that are numbers, one or several for each image; None stands for unknown ones.

    None if a label is something else: names are read as numbers later. Raises DataError for other numbers of targets,
    and for a number that is not finite.
    """
    rows = [None if value is None else np.atleast_1d(np.asarray(value)) for value in found]
    there = [row for row in rows if row is not None]
    if not there or any(row.dtype.kind not in "iuf" or row.ndim > 1 for row in there):
        return None
    width = len(there[0])
    for index, row in enumerate(rows):
        if row is not None and (len(row) != width or not np.isfinite(row).all()):
            raise DataError(
                f"{name}[{index}] has the label {shown(found[index])}; valid are {width} finite numbers for each image"
            )
    values = np.array([np.full(width, np.nan) if row is None else row for row in rows], dtype=np.float64)
    return Named(Numbers(values), target_names(width, columns.label, columns.classes))


def _labels(name: str, items: Any) -> Sequence[Any]:
    """Return the label of each item."""
    for place in ("targets", "labels"):
        if (found := getattr(items, place, None)) is not None and len(found) == len(items):
            return list(found)
    return [_label(name, items, items[index]) for index in range(len(items))]


def _label(name: str, items: Any, item: Any) -> Any:
    """Return the label of an item. Raises DataError if it is not a pair."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[1]
    kind = f"a {type(item).__name__} of {len(item)}" if isinstance(item, tuple | list | dict) else shown(item)
    splits = " Give several splits by name: {'train': ..., 'test': ...}" if isinstance(items, tuple | list) else ""
    raise DataError(f"the items of {name!r} are not pairs (image, label): one is {kind}.{splits}")


def _marked_classes(name: str, values: Sequence[Any]) -> int | None:
    """Return the length of labels that are arrays of zeros and ones; None if labels are something else.

    Raises DataError for a label of another length or kind. None may stand for labels that are not known.
    """
    lengths = {index: len(value) for index, value in enumerate(values) if _is_array(value)}
    if not lengths:
        return None
    first, width = next(iter(lengths.items()))
    for index, value in enumerate(values):
        if value is not None and lengths.get(index) != width:
            raise DataError(
                f"{name}[{index}] has the label {shown(value)}, and that of {name}[{first}] is an array of {width}. "
                "Arrays of zeros and ones need one value for each class, for every image"
            )
    return width


def _is_array(value: Any) -> bool:
    """Return whether a label is an array or a tensor of several values."""
    return hasattr(value, "shape") and len(value.shape) == 1 and math.prod(value.shape) != 1


def _check_numbers(name: str, values: Sequence[_Value], classes: int, width: int | None) -> None:
    """Raise DataError for the number of a class that has no name, and for arrays of `width` and another length."""
    if width is not None and width != classes:
        raise DataError(f"{name}: labels are arrays of {width} zeros and ones, and there are {classes} class names")
    numbers = (one for value in values for one in (value if isinstance(value, list) else [value]))
    largest = max((one for one in numbers if isinstance(one, int)), default=UNKNOWN)
    if largest >= classes:
        raise DataError(f"{name}: label {largest}, but there are only {classes} class names")


def _texts(value: _Value, names: Sequence[str] | None = None) -> str | list[str] | None:
    """Return the name of a class, the names of a set, or None; a number is the number of one of `names`, if given."""
    if isinstance(value, list):
        return [text for one in value if isinstance(text := _texts(one, names), str)]
    if isinstance(value, str):
        return value
    return None if value == UNKNOWN else str(value) if names is None else names[value]


def _plain(value: Any) -> _Value:
    """Return a label as a whole number or a name, several labels as a list; None is an unknown class.

    An array or a tensor of several zeros and ones marks the classes of an image."""
    if value is None:
        return UNKNOWN
    if _is_array(value):
        marks = np.asarray(value)
        if not np.isin(marks, (0, 1)).all():
            raise DataError(f"a label is {shown(value)}; an array marks the classes of an image by zeros and ones")
        return np.flatnonzero(marks).tolist()
    if isinstance(value, list | tuple | set | frozenset):
        several = [_plain(one) for one in value]
        if any(isinstance(one, list) or one == UNKNOWN for one in several):
            raise DataError(f"a label is {shown(value)}; valid in a list are whole numbers from 0 and names of classes")
        return several
    value = value.item() if hasattr(value, "item") and math.prod(np.shape(value)) == 1 else value
    if isinstance(value, str):
        return value
    if not isinstance(value, int) or value < UNKNOWN:
        raise DataError(f"a label is {shown(value)}; valid are whole numbers from 0 and names of classes")
    return value


def _image(image: Any, id: str) -> bytes | np.ndarray:
    """Return an image as bytes or uint8 [H, W, 3]. Raises DataError for anything else."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        return pillow_pixels(image)
    pixels = image if isinstance(image, np.ndarray) else getattr(image, "numpy", lambda: None)()
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        kind = f"{image.dtype} of shape {tuple(image.shape)}" if hasattr(image, "dtype") else shown(image)
        raise DataError(f"{id} is {kind}. {VALID}")
    if pixels.ndim == 3 and not isinstance(image, np.ndarray):  # tensors have their channels first
        pixels = pixels.transpose(1, 2, 0)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise DataError(f"{id} has the shape {tuple(image.shape)}. {VALID}")
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def _banded(image: Any, id: str) -> bytes | np.ndarray:
    """Return an image with the bands that it has, as bytes or an array. Raises DataError for anything else."""
    if isinstance(image, bytes | np.ndarray):
        return image
    if isinstance(image, Image.Image):
        return pillow_channels(image)
    pixels = getattr(image, "numpy", lambda: None)()
    if not isinstance(pixels, np.ndarray):
        raise DataError(f"{id} is {shown(image)}. {VALID}")
    return pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels  # tensors have their channels first
