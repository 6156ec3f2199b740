"""Class folders: `root/class/*.jpg`, or `root/split/class/*.jpg`. Files are listed once; each is
read when its image is needed.

A name alone does not make a split: `train` is also a class of CIFAR-100. A folder is a split if it holds class
folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from vitrail.data.item import UNKNOWN, DataSet, Findings, Item, Listed, origin, role_of
from vitrail.errors import DataError, DecodeError

SUFFIXES = frozenset((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".mpo",
                      ".avif", ".jp2", ".ppm", ".pgm", ".pbm", ".pnm"))  # fmt: skip
MAX_BYTES = 2**30
"""Largest image file read: 134 million pixels of 16 bits, the decoder's limit, take 0.8 GB uncompressed."""
_JUNK = frozenset(("thumbs.db", "desktop.ini", "__macosx"))

EXPECTED = """expected is one folder per class, in split folders or not:
    photos/cat/1.jpg           photos/train/cat/1.jpg
    photos/cat/2.jpg           photos/train/dog/2.jpg
    photos/dog/3.jpg           photos/val/cat/3.jpg"""


class FileSource:
    """Images in separate files, named relative to `root`. Names are stored as packed bytes, about 50 per image."""

    def __init__(
        self, root: Path, names: pa.Array, labels: np.ndarray, sizes: np.ndarray, class_names: list[str]
    ) -> None:
        self._root = os.fsencode(root)
        self._names = names
        self.labels = labels
        self.sizes = sizes
        self.class_names = class_names

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        name = self._names[index].as_py()
        return Item(read_file(os.path.join(self._root, name)), int(self.labels[index]), os.fsdecode(name))

    def id(self, index: int) -> str:
        """See `Listed.id`: the path below the root."""
        return os.fsdecode(self._names[index].as_py())

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return Path(os.fsdecode(self._root)) / self.id(index)


def file_source(root: Path, files: Sequence[tuple[str, int, int]], class_names: list[str]) -> FileSource:
    """Return the images `files`, each (name below `root`, label or UNKNOWN, size in bytes)."""
    return FileSource(
        root,
        pa.array([os.fsencode(name) for name, _, _ in files], pa.large_binary()),
        np.array([label for _, label, _ in files], dtype=np.int64),
        np.array([size for _, _, size in files], dtype=np.int64),
        class_names,
    )


def named_file_source(root: Path, files: Sequence[tuple[str, str, int]], class_names: list[str]) -> FileSource:
    """Return the images `files`, each (name below `root`, class name, size in bytes)."""
    position = {name: index for index, name in enumerate(class_names)}
    return file_source(root, [(name, position[label], size) for name, label, size in files], class_names)


def file_of(source: Listed, index: int) -> Path | None:
    """Return the path of an image of any source; None if the image is not a separate file."""
    source, index = origin(source, index)
    return source.path(index) if isinstance(source, FileSource) else None


def read_file(path: str | bytes | Path) -> bytes:
    """Return the bytes of a file; a failed read is tried once more. Raises DecodeError "unreadable", "too-large"."""
    for attempt in range(2):
        try:
            with open(path, "rb") as file:
                refuse_large(os.fstat(file.fileno()).st_size, os.fsdecode(path))
                return file.read()
        except OSError as error:
            # a missing file stays missing; a network file system may recover from an input/output error
            if attempt or isinstance(error, FileNotFoundError | PermissionError):
                raise DecodeError(f"{os.fsdecode(path)}: {error.strerror}", reason="unreadable") from error
    raise AssertionError("unreachable")


def refuse_large(size: int, name: str) -> None:
    """Raise DecodeError "too-large" for more than MAX_BYTES bytes, before they are read into memory."""
    if size > MAX_BYTES:
        raise DecodeError(
            f"{name}: {size:,} bytes, more than the {MAX_BYTES:,} that an image file may have", reason="too-large"
        )


def is_junk(name: str) -> bool:
    """Return whether a name is of a hidden or system file: .DS_Store, ._x.jpg, __MACOSX, Thumbs.db, desktop.ini."""
    return name.startswith(".") or name.lower() in _JUNK


def is_image_name(name: str) -> bool:
    """Return whether a name ends in an image suffix."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def is_class_tree(path: Path) -> bool:
    """Return whether there are two folders with images, or a split folder.

    A single folder may hold the images of a table."""
    folders = folders_in(path)
    return bool(_split_folders(folders)) or sum(_layout(folder) != "empty" for folder in folders) > 1


def read_folder(path: Path) -> DataSet:
    """Open a tree of class folders. Raises DataError, which shows the expected tree, if there is none."""
    findings = Findings("folder")
    folders = folders_in(path)
    splits = _split_folders(folders)
    if splits:
        for name in entries(path):
            if is_junk(name) or not (path / name).is_dir():
                findings.ignore("hidden or system file" if is_junk(name) else "file beside the split folders")
        for folder in folders:
            if folder not in splits:
                findings.warnings.append(f"folder {folder.name!r} is no split with class folders: left out")
        return DataSet({folder.name: read_classes(folder, findings) for folder in splits}, findings)
    direct = [folder.name for folder in folders if _layout(folder) == "images"]
    if direct and all(role_of(name) for name in direct) and any(role_of(name) == "train" for name in direct):
        names = " and ".join(f"{name}/" for name in direct)
        raise DataError(f"{path}: {names} hold images but no class folders; {EXPECTED}")
    if not any(_layout(folder) != "empty" for folder in folders):
        loose = sum(is_image_name(name) and not is_junk(name) for name in entries(path))
        what = f"{loose} images and no class folder with images" if loose else "no images"
        raise DataError(f"{path} holds {what}; {EXPECTED}")
    return DataSet({"": read_classes(path, findings)}, findings)


def read_unlabelled(path: Path) -> DataSet | None:
    """Open a folder of images without class folders, at any depth, for training without labels: all are UNKNOWN.

    Folders named train, val or test are splits. Returns None if there are class folders or no images."""
    folders = folders_in(path)
    splits = [folder for folder in folders if role_of(folder.name) and _layout(folder) == "images"]
    if not any(role_of(folder.name) == "train" for folder in splits):
        splits = []
    if not splits and not _has_image(path):
        return None
    findings = Findings("folder", warnings=["there are no class folders: the images have no labels"])
    return DataSet({part.name if splits else "": _unlabelled(part, findings) for part in splits or [path]}, findings)


def _unlabelled(path: Path, findings: Findings) -> Listed:
    return file_source(path, [(name, UNKNOWN, size) for name, size in _images(path, "", findings)], [])


def read_classes(path: Path, findings: Findings) -> Listed:
    """List `path/class/**/image`; classes are the sorted folder names. An empty class folder causes a warning."""
    names: list[pa.Array] = []
    labels: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    class_names: list[str] = []
    for name in entries(path):
        if is_junk(name) or not (path / name).is_dir():
            findings.ignore("hidden or system file" if is_junk(name) else "file beside the class folders")
            continue
        files = list(_images(path / name, name, findings))
        if not files:
            findings.warnings.append(f"class folder {name!r} in {path} holds no images: left out")
            continue
        names.append(pa.array([os.fsencode(file) for file, _ in files], pa.large_binary()))
        labels.append(np.full(len(files), len(class_names), dtype=np.int64))
        sizes.append(np.array([size for _, size in files], dtype=np.int64))
        class_names.append(name)
    if not class_names:
        raise DataError(f"{path} holds no images; {EXPECTED}")
    return FileSource(path, pa.concat_arrays(names), np.concatenate(labels), np.concatenate(sizes), class_names)


def _split_folders(folders: list[Path]) -> list[Path]:
    """The folders that are splits: named like one and holding class folders, not images."""
    splits = [folder for folder in folders if role_of(folder.name) and _layout(folder) == "classes"]
    classes_beside = any(_layout(folder) == "images" and not role_of(folder.name) for folder in folders)
    # one such folder among class folders is a class with sub-folders; two of them are splits
    return splits if len(splits) > 1 or not classes_beside else []


def _layout(folder: Path) -> str:
    """Does a folder hold "images", "classes" (folders that hold images), or is it "empty"?"""
    if _has_image(folder):
        return "images"
    return "classes" if any(_has_image(child) for child in folders_in(folder)) else "empty"


def _has_image(folder: Path) -> bool:
    try:
        with os.scandir(folder) as found:  # stops at the first image: a class may hold millions
            return any(is_image_name(entry.name) and not is_junk(entry.name) for entry in found)
    except OSError:
        return False


def entries(folder: Path) -> list[str]:
    """Return the sorted names in a folder; none where it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def folders_in(path: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden or a system's, sorted."""
    return [path / name for name in entries(path) if not is_junk(name) and (path / name).is_dir()]


def _images(folder: Path, prefix: str, findings: Findings) -> Iterator[tuple[str, int]]:
    """Yield (name below the split, size in bytes) of every image in a class folder, in a fixed order."""
    pending: list[tuple[Path, str, tuple[tuple[int, int], ...]]] = [(folder, prefix, ())]
    while pending:
        directory, below, above = pending.pop()
        try:
            status = directory.stat()
            here = (status.st_dev, status.st_ino)
            if here in above:
                findings.drop(below, "symbolic link to a folder it lies in")
                continue
            found = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            findings.drop(below, f"unreadable folder: {error.strerror}")
            continue
        for entry in found:
            name = f"{below}/{entry.name}" if below else entry.name
            if is_junk(entry.name):
                findings.ignore("hidden or system file")
            elif _is_dir(entry) and not is_image_name(entry.name):
                pending.append((directory / entry.name, name, (*above, here)))
            elif not is_image_name(entry.name):
                findings.ignore(f"not an image ({os.path.splitext(entry.name)[1].lower() or 'no extension'})")
            else:
                size = _file_size(entry, name, findings)
                if size is not None:
                    yield name, size


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that points at itself
        return False


def _file_size(entry: os.DirEntry[str], name: str, findings: Findings) -> int | None:
    """Return the size of a regular file; anything else with an image's name is listed as dropped."""
    try:
        if entry.is_file():
            return entry.stat().st_size
        reason = "a folder" if entry.is_dir() else "dangling link" if entry.is_symlink() else "not a regular file"
    except OSError as error:
        reason = error.strerror or "unreadable"
    findings.drop(name, reason)
    return None


class Files:
    """The files at `paths`, in this order; the id of each is its path. A `Listed` source without labels."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = [os.fspath(path) for path in paths]
        self.class_names: list[str] = []
        self.labels = np.full(len(self._paths), UNKNOWN, dtype=np.int64)
        self.sizes = np.zeros(len(self._paths), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Item:
        return Item(read_file(self._paths[index]), UNKNOWN, self._paths[index])

    def id(self, index: int) -> str:
        """See `Listed.id`."""
        return self._paths[index]
