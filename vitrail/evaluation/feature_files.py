"""Features in files: `vitrail embed` writes them, `vitrail probe --features` reads them, from any program.

For a data set an .npz holds train_features, train_labels, test_features and test_labels, and class_names, train_ids and
test_ids if they are known. For single files it holds features and ids (paths), and labels and class_names if known.
blank_features are the network's features of a blank image, and network is a hash of its weights and its name: they tell
whose features these are.

Arrays that are larger than memory grow by rows while they are computed (`GrowingArrays`), so that memory holds one
batch and not the file. A file of an array states its shape before its values, and how many images are readable is known
only at the end. NumPy leaves room for the number of rows in the header of an .npy file, so each array grows in a file
of its own, whose header is completed at the end. `growing_npy` keeps these files, which `numpy.load(...,
mmap_mode="r")` opens without reading them. `growing_npz` moves them into an .npz, one after the other: at its peak the
disk holds all values once, and those of the largest array twice.
"""

from __future__ import annotations

import json
import logging
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vitrail.data.npz import Npz
from vitrail.disk import writing
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.features import Features, labelled_pair, unit_rows
from vitrail.files import beside, refuse_other_files, replacing, take_place
from vitrail.words import from_text

KEYS = ("train_features", "train_labels", "test_features", "test_labels")
BLANK = "blank_features"
NETWORK = "network"
ALIKE = 0.95
"""Minimum cosine similarity of two networks' features of a blank image at which they count as one network. Formats,
engines and int8 stay above it."""
SAME = 0.9999
"""Minimum cosine similarity at which the features of networks with other weights are the same: only the classifiers or
the formats differ."""

log = logging.getLogger("vitrail")


def save_features(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to an .npz, replaced atomically, without copying them. Raises DataError if it cannot be written."""
    path = Path(path)
    with replacing(path, DataError) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load_features(path: str | Path) -> tuple[Features, Features]:
    """Return the features of the training images and of the test images.

    Without class_names, the names are the classes' numbers. Raises DataError with the array and the problem: it is
    missing, damaged or not finite, has a wrong type or shape, or holds Python objects, which are never read.
    """
    path = Path(path)
    npz = Npz(path, DataError, only=(*KEYS, "class_names"))
    if missing := [key for key in KEYS if key not in npz.headers]:
        if any("tokens_" in name for name in npz.zip.namelist()):
            raise DataError(
                f"{path} holds the tokens of images (vitrail embed --tokens), and one vector per image is needed: "
                "vitrail embed MODEL DATA --out FEATURES.npz"
            )
        there = ", ".join(sorted(name.removesuffix(".npy") for name in npz.zip.namelist())) or "nothing"
        raise DataError(
            f"{path} lacks {', '.join(missing)}: it holds {there}. It must hold {', '.join(KEYS)}; `vitrail embed` "
            "writes them for a data set with splits, such as photos/train and photos/test. Without splits, give the "
            "network and the images in place of --features; a tenth of the images is then held out"
        )
    arrays = [_split(npz, split) for split in ("train", "test")]
    names = _class_names(npz, max(int(labels.max()) for _, labels in arrays))
    npz.close()
    train, test = (Features(features, labels, np.arange(len(labels)), names) for features, labels in arrays)
    try:
        labelled_pair(train, test)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return train, test


def load_named_features(path: str | Path, blank: np.ndarray, network: str = "") -> tuple[list[str], np.ndarray]:
    """Return the names of all images of a file, and their features, float32 [N, width].

    `blank` [width] are the features of a blank image by the network that the file must be from, and `network` is the
    hash of its weights ("": not known). Raises DataError if the file is another network's, and like `load_features`.
    Logs a warning if it may be another's: features of networks that were fine-tuned from the same weights are alike.
    """
    path = Path(path)
    prefixes = ("", "train_", "test_")
    parts = [f"{prefix}{part}" for prefix in prefixes for part in ("features", "ids")]
    npz = Npz(path, DataError, only=[*parts, BLANK, NETWORK])
    names: list[str] = []
    rows: list[np.ndarray] = []
    for prefix in prefixes:
        features, ids = (npz.headers.get(f"{prefix}{part}") for part in ("features", "ids"))
        if features is None or ids is None:
            continue
        if len(features.shape) != 2 or ids.dtype.kind != "U" or ids.shape != features.shape[:1]:
            raise DataError(
                f"{path}: {prefix}features has the shape {features.shape} and {prefix}ids is {ids.dtype} of shape "
                f"{ids.shape}; they must be numbers [images, features] and text [images]"
            )
        names += [str(name) for name in npz.read(f"{prefix}ids", kinds="U")]
        rows.append(npz.read(f"{prefix}features", kinds="fiu").astype(np.float32, copy=False))
    written = npz.read(BLANK, kinds="f").ravel() if BLANK in npz.headers else blank
    by = [str(text) for text in npz.read(NETWORK, kinds="U").ravel()] if NETWORK in npz.headers else []
    checked = BLANK in npz.headers
    npz.close()
    if not names or len({part.shape[1] for part in rows}) > 1:
        raise DataError(
            f"{path} does not hold features and ids of images, all of one width. `vitrail embed MODEL PHOTOS --out "
            "FEATURES.npz` writes them"
        )
    anew = "Write the file with the same model: vitrail embed MODEL PHOTOS --out FEATURES.npz"
    if rows[0].shape[1] != len(blank):
        raise DataError(
            f"{path} holds {rows[0].shape[1]} features for each image, and the model computes {len(blank)}. {anew}"
        )
    pair = (
        unit_rows(np.stack([written.astype(np.float32), blank])) if written.shape == blank.shape else np.zeros((2, 1))
    )
    if (alike := float(pair[0] @ pair[1])) < ALIKE:
        raise DataError(
            f"{path} holds the features of another network, or of images of another size: a blank image's features "
            f"have the cosine similarity {alike:.2f} with the model's, and at least {ALIKE} is needed. {anew}"
        )
    if not checked:
        log.warning("%s does not say which network its features are from. %s", path, anew)
    elif len(by) == 2 and network not in ("", by[0]) and alike < SAME:
        log.warning(
            "%s was written with %s, and this model has other weights. Their features are alike (cosine similarity "
            "%.3f for a blank image), so the search continues, but it is right only for the same network in another "
            "format. %s",
            path, by[1], alike, anew,
        )  # fmt: skip
    return names, np.concatenate(rows)


def load_shard_features(folder: Path, width: int, network: str) -> tuple[list[str], np.ndarray]:
    """Return the names of all images and their features, float32 [N, width], of a folder that bulk `embed` wrote.

    network: The hash of the weights of the network that they must be from. Raises DataError if the folder holds
    something else, is not complete, or is another network's.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from vitrail.evaluation.bulk import COMPLETE, JOB

    anew = f"vitrail embed MODEL DATA --out {folder} writes them"
    try:
        about = json.loads((folder / JOB).read_text(encoding="utf-8"))
        names, rows = list[str](), list[np.ndarray]()
        for file in sorted(folder.glob("*.parquet")):
            table = pq.read_table(file, columns=["id", "features"])
            table.validate(full=True)
            names += map(from_text, table["id"].to_pylist())
            rows += [part.flatten().to_numpy(zero_copy_only=False) for part in table["features"].chunks]
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{folder} does not hold features of a data set ({error}): {anew}") from error
    if not (folder / COMPLETE).exists():
        raise DataError(f"{folder} is not complete. Repeat the command that writes it, which continues")
    if about.get("weights") != network:
        raise DataError(f"{folder} holds the features of another network: {anew}, with the same model")
    return names, np.concatenate([np.empty(0, np.float32), *rows]).reshape(-1, width).astype(np.float32, copy=False)


def _split(npz: Npz, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return features as float32 [N, width] and labels as int64 [N]. Raises DataError if they are anything else."""
    path, features, labels = npz.path, npz.headers[f"{split}_features"], npz.headers[f"{split}_labels"]
    if len(features.shape) != 2 or features.dtype.kind not in "fiu" or 0 in features.shape:
        raise DataError(
            f"{path}: {split}_features is {features.dtype} of shape {features.shape}; it must be numbers "
            "[images, features], with at least one image and at least one feature"
        )
    if len(labels.shape) != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: {split}_labels is {labels.dtype} of shape {labels.shape}; it must be integers [images], "
            "0 or larger, or -1 for an unknown class"
        )
    if labels.shape[0] != features.shape[0]:
        raise DataError(f"{path}: {split}_features has {features.shape[0]} rows and {split}_labels {labels.shape[0]}")
    values = npz.read(f"{split}_labels").astype(np.int64, copy=False)
    if values.min() < -1:
        raise DataError(
            f"{path}: {split}_labels holds {values.min()}; a label is 0 or larger, or -1 for an unknown class"
        )
    return npz.read(f"{split}_features").astype(np.float32, copy=False), values


def _class_names(npz: Npz, largest: int) -> list[str]:
    """Return the names of the classes up to label `largest`. Raises DataError for invalid or missing names."""
    if "class_names" not in npz.headers:
        return [str(number) for number in range(largest + 1)]
    header = npz.headers["class_names"]
    if len(header.shape) != 1 or header.dtype.kind != "U":
        raise DataError(f"{npz.path}: class_names is {header.dtype} of shape {header.shape}; it must be text [classes]")
    if largest >= header.shape[0]:
        raise DataError(f"{npz.path}: label {largest} has no name: class_names holds {header.shape[0]}")
    return [str(name) for name in npz.read("class_names", kinds="U")]


class GrowingArrays:
    """Arrays that grow by rows, each in an .npy file of `folder`, until `save` makes them the result at `path`."""

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path
        self._types: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        self._rows: dict[str, int] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of each array -> its shape."""
        return {name: (self._rows[name], *shape) for name, (shape, _) in self._types.items()}

    def append(self, prefix: str, parts: Mapping[str, np.ndarray]) -> None:
        """Add rows [n, ...] to the arrays whose names are `prefix` and those of the parts. Raises DataError."""
        with writing(self._path, DataError):
            for name, rows in parts.items():
                self._append(prefix + name, rows)

    def save(self, others: Mapping[str, np.ndarray]) -> None:
        """Write all arrays, and `others` after them, to the result, which appears as a whole. Raises DataError."""
        raise NotImplementedError

    def _append(self, name: str, rows: np.ndarray) -> None:
        known = self._types.setdefault(name, (rows.shape[1:], rows.dtype))
        if known != (rows.shape[1:], rows.dtype):
            raise ValueError(f"rows of {name} are {rows.dtype} {rows.shape[1:]}, and the first ones {known}")
        if name not in self._rows:
            self._rows[name] = 0
            self._write_header(name, "wb")
        with self._file(name).open("ab") as file:
            np.ascontiguousarray(rows).tofile(file)
        self._rows[name] += len(rows)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def _write_header(self, name: str, mode: str) -> None:
        """Write the header of an array, which has the same length for any number of rows."""
        header = np.lib.format.header_data_from_array_1_0(np.empty((0, *self._types[name][0]), self._types[name][1]))
        with self._file(name).open(mode) as file:
            np.lib.format.write_array_header_1_0(file, {**header, "shape": self.shapes[name]})  # type: ignore[arg-type]


class _GrowingNpz(GrowingArrays):
    def save(self, others: Mapping[str, np.ndarray]) -> None:
        """See GrowingArrays: the result is an .npz file, replaced atomically."""
        with replacing(self._path, DataError) as temporary, zipfile.ZipFile(temporary, "w", allowZip64=True) as archive:
            for name in self._types:
                self._write_header(name, "r+b")
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member, self._file(name).open("rb") as file:
                    shutil.copyfileobj(file, member, 1 << 20)
                self._file(name).unlink()
            for name, array in others.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


class _GrowingNpy(GrowingArrays):
    def save(self, others: Mapping[str, np.ndarray]) -> None:
        """See GrowingArrays: the result is a folder of .npy files, which moves to its place when it is complete."""
        with writing(self._path, DataError):
            for name in self._types:
                self._write_header(name, "r+b")
            for name, array in others.items():
                np.save(self._file(name), np.asanyarray(array), allow_pickle=False)
            take_place(self._folder, self._path)


@contextmanager
def growing_npz(path: Path) -> Iterator[GrowingArrays]:
    """Context of arrays that become the .npz at `path` by `save`. Afterwards nothing else is left beside it."""
    with writing(path, DataError), beside(path) as folder:
        folder.mkdir()
        yield _GrowingNpz(folder, path)


@contextmanager
def growing_npy(path: Path) -> Iterator[GrowingArrays]:
    """Context of arrays that become a folder of .npy files at `path` by `save`.

    Afterwards nothing else is left beside it. Raises UsageError if `path` is a file or a folder that is not empty.
    """
    refuse_other_files(path, lambda _: False, UsageError)
    with writing(path, DataError), beside(path) as folder:
        folder.mkdir()
        yield _GrowingNpy(folder, path)
