"""Arrays: an .npz of images and labels, and the handwritten digits that come with scikit-learn."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path

import numpy as np

from vitrail.data.images.stored import DEPTHS, bands_first
from vitrail.data.item import DataSet, Findings, Reader, Subset
from vitrail.data.labels.numbers import Numbers, target_names
from vitrail.data.labels.sets import Labels, LabelSets, Named, named, order_classes
from vitrail.data.npz import DAMAGED_ZIP, read_array_header
from vitrail.data.settings import Columns
from vitrail.data.split import hold_out
from vitrail.errors import DataError
from vitrail.files import open_regular

LARGE = 1 << 30
"""Size in bytes up to which any array may unpack; above it, the ratio must hold."""
RATIO = 200
"""Maximum ratio of unpacked to packed size. Zeros reach a thousand; black and white drawings a few dozen."""
_PAIRS = {
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "validation": (("x_val", "y_val"), ("x_valid", "y_valid"), ("val_images", "val_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
    "": (("images", "labels"), ("x", "y"), ("X", "y"), ("data", "target")),
}


class ArraySource(Reader):
    """Images that are rows of one array [N, H, W, bands]; uint8 [N, H, W] is grey, copied to three channels."""

    def __init__(self, name: str, images: np.ndarray, labels: Labels, class_names: list[str]) -> None:
        super().__init__(labels, np.full(len(images), images[:1].nbytes, dtype=np.int64), class_names, name)
        self._images = images

    def state(self, index: int) -> str:
        """See `Reader.state`: the name of the array has the checksum of its pixels."""
        return self.id(index)

    def image(self, index: int) -> np.ndarray:
        """See `Reader.image`."""
        image = np.asarray(self._images[index])
        if image.ndim == 2 and image.dtype == np.uint8:
            image = np.repeat(image[:, :, None], 3, axis=2)
        return np.ascontiguousarray(image)


def read_digits() -> DataSet:
    """The 1,797 handwritten digits of scikit-learn (8x8, 16 grey levels), as uint8 [8, 8, 3] in 0..255.

    The set has no official split: a stratified fifth, always the same one, is its test split.
    """
    from sklearn.datasets import load_digits  # a second to import, and only this data set needs it

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    source = ArraySource("digits", images, digits.target.astype(np.int64), [str(name) for name in digits.target_names])
    train, test = hold_out(source, 0.2, seed=0)
    return DataSet({"train": Subset(source, train), "test": Subset(source, test)}, Findings("digits"))


def read_npz(path: Path, columns: Columns = Columns()) -> DataSet:
    """Open an .npz with images/labels, x_train/y_train (and _val, _test) or train_images/train_labels.

    Labels of numbers are targets if `columns.per_image` is "numbers": [N], or [N, targets].

    Arrays stored uncompressed (`np.savez`) are memory-mapped; compressed ones are unpacked into memory.
    Raises DataError for other names, a dtype that no image has, or lengths that differ.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = {name.removesuffix(".npy"): name for name in archive.namelist()}
            pairs = {split: next((p for p in pairs if set(p) <= set(members)), None) for split, pairs in _PAIRS.items()}
            wanted = {split: pair for split, pair in pairs.items() if pair is not None}
            if not wanted:
                raise DataError(
                    f"{path} holds {', '.join(members)}; expected images and labels, "
                    "or x_train, y_train, x_test, y_test"
                )
            arrays = {name: _load(path, file, archive, members[name]) for pair in wanted.values() for name in pair}
            checks = {name: archive.getinfo(members[name]).CRC for pair in wanted.values() for name in pair}
    except DAMAGED_ZIP as error:
        raise DataError(f"{path} is not a readable .npz: {error}") from error
    labelled = {name: arrays[name] for _, name in wanted.values()}
    numbers = columns.per_image == "numbers" and all(array.dtype.kind in "iuf" for array in labelled.values())
    read = _number_reader(path, labelled, columns) if numbers else _label_reader(path, labelled)
    found = DataSet({}, Findings("arrays"))
    for split, (x, y) in wanted.items():
        images, (labels, class_names) = _channels_last(path, x, arrays[x]), read(arrays[y])
        if len(images) != len(labels):
            raise DataError(f"{path}: {x} has {len(images)} images and {y} has {len(labels)} labels")
        # the checksum makes the id, and with it the fingerprint, speak of the pixels too
        found.splits[split] = ArraySource(f"{split or path.stem}-{checks[x]:08x}", images, labels, class_names)
    return found


def _number_reader(path: Path, arrays: Mapping[str, np.ndarray], columns: Columns) -> Callable[[np.ndarray], Named]:
    """Return the function from an array of numbers, [N] or [N, targets], to labels. Raises DataError for others."""
    widths = {array.shape[1] if array.ndim == 2 else 1 for array in arrays.values()}
    for name, array in arrays.items():
        if array.ndim not in (1, 2) or len(widths) > 1 or 0 in widths:
            raise DataError(
                f"{path}: {name} has shape {array.shape}. Targets are [N] or [N, targets], with the same number of "
                "targets in all arrays"
            )
        finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        if (missing := np.flatnonzero(~finite)).size:
            raise DataError(
                f"{path}: {name}[{missing[0]}] has no finite number; {missing.size} rows lack one. Give each image its "
                "numbers, or remove the row"
            )
    names = target_names(widths.pop(), columns.label, columns.classes)
    return lambda array: Named(Numbers(array.reshape(len(array), -1).astype(np.float64)), names)


def _label_reader(path: Path, arrays: Mapping[str, np.ndarray]) -> Callable[[np.ndarray], Named]:
    """Return the function from an array of labels to labels: [N] or [N, 1], or [N, classes] of zeros and ones."""
    for array in arrays.values():
        if array.dtype.kind not in "biuU":
            hint = "; for numbers to predict, add --data.labels-per-image numbers" if array.dtype.kind == "f" else ""
            raise DataError(f"{path}: labels are {array.dtype}; valid are integers and text{hint}")
    widths = {name: array.shape[1] if array.ndim == 2 else 1 for name, array in arrays.items()}
    wide = {name: array for name, array in arrays.items() if array.ndim > 2 or widths[name] > 1}
    if not wide:
        class_names = order_classes({str(value) for array in arrays.values() for value in np.unique(array)})
        return lambda array: named([str(label) for label in array.reshape(-1).tolist()], class_names)
    for name, array in arrays.items():
        if array.ndim != 2 or widths[name] != max(widths.values()) or not np.isin(array, (0, 1)).all():
            raise DataError(
                f"{path}: {name} has shape {array.shape}. Labels are [N] or [N, 1] for one class for each image, or "
                "[N, classes] of zeros and ones, with the same number of classes in all arrays, for several"
            )
    names = [str(number) for number in range(max(widths.values()))]
    return lambda array: Named(LabelSets.of_marks(array.astype(bool)), names)


def _channels_last(path: Path, name: str, images: np.ndarray) -> np.ndarray:
    """Return a view [N, H, W] or [N, H, W, bands] of the usual layouts; one band has no axis of its own."""
    if images.dtype.name not in DEPTHS:
        raise DataError(f"{path}: {name} is {images.dtype}; images must be {', '.join(DEPTHS)}")
    if images.ndim == 3:
        return images
    if images.ndim != 4:
        raise DataError(f"{path}: {name} has shape {images.shape}; valid are [N, H, W], [N, H, W, C] and [N, C, H, W]")
    usual = (1, 3)
    if images.shape[-1] not in usual and (images.shape[1] in usual or bands_first(images.shape[1:])):
        images = images.transpose(0, 2, 3, 1)
    return images[..., 0] if images.shape[-1] == 1 else images


def _load(path: Path, file: BufferedReader, archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """Return one array of an .npz, through a memory map if it is stored uncompressed.

    The header is compared with the member, and the member with the file, before anything is allocated.
    """
    info = archive.getinfo(member)
    if info.file_size > max(LARGE, RATIO * info.compress_size):
        raise DataError(
            f"{path}: {member} has {info.compress_size:,} bytes and claims to unpack to {info.file_size:,}: no images "
            "compress like that"
        )
    with archive.open(info) as stream:
        try:
            header = read_array_header(stream)
        except ValueError as error:
            raise DataError(f"{path}: the header of {member} cannot be read: {error}") from error
    shape, dtype = header.shape, header.dtype
    if dtype.hasobject:
        raise DataError(f"{path}: {member} holds Python objects, which are not read; images and labels are numbers")
    if min(shape, default=0) < 0 or header.length + math.prod(shape) * dtype.itemsize != info.file_size:
        raise DataError(
            f"{path}: the header of {member} claims {dtype} of shape {shape}, but "
            f"{info.file_size - header.length:,} bytes are there"
        )
    if info.compress_type != zipfile.ZIP_STORED:
        with archive.open(info) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)
    file.seek(info.header_offset + 26)  # the data follow a local header whose name and extra fields vary in length
    name_length, extra_length = np.frombuffer(file.read(4), "<u2")
    offset = info.header_offset + 30 + int(name_length) + int(extra_length) + header.length
    return np.memmap(file, dtype, "r", offset, shape, "F" if header.fortran else "C")
