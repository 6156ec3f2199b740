"""Class folders: `root/class/*.jpg`, or `root/split/class/*.jpg`. Files are listed once; each is read when its image is
needed.

A name alone does not make a split: `train` is also a class of CIFAR-100. A folder is a split if its name contains a
usual name of a split as a word (`training_set`), or if a setting names it, and if it holds class folders.

One image in several class folders, through links, is an image with several labels.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.image_names import KINDS, ending_of, is_image_name, is_junk, other_files
from vitrail.data.images.work import within_memory
from vitrail.data.item import SYSTEM_FILE, DataSet, Findings, IndexedSource, Item, Reader, Subset, origin, role_of
from vitrail.data.labels.sets import Labels, LabelSets, named, order_classes
from vitrail.data.settings import ALL, PerImage, Selection
from vitrail.errors import DataError, DecodeError
from vitrail.files import open_regular, state_of
from vitrail.words import listing, with_slashes

FEWEST = 0.01
"""Share of the images that must lie in several class folders, so that images are taken to have several labels. A few
links exist without that: programs that replace copies by links make them if an image is in two classes by mistake."""


def _links(tree: _Tree) -> tuple[np.ndarray, LabelSets] | None:
    """Return the first name of each file, int64 [N], ascending, and the classes in whose folders the file lies.

    Returns None if no file lies in the folders of two classes.
    """
    files, labels, width = tree.files, tree.source.labels, len(tree.source.class_names)
    assert isinstance(labels, np.ndarray)
    if not len(files) or not files[:, 1].all() or len(np.unique(files[:, 1])) == len(files):
        return None
    _, first, group = np.unique(files, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(first), dtype=np.int64)
    place[order] = np.arange(len(first))
    sets = LabelSets.of_pairs(place[group.reshape(-1)], labels, len(first), width)
    return (np.sort(first), sets) if (sets.counts > 1).any() else None


MAX_BYTES = 2**30
"""Largest image file read: 134 million pixels of 16 bits, the decoder's limit, take 0.8 GB uncompressed."""

_WRAPPED = 3
"""Maximum number of folders between the folder of a split and its class folders."""
_BLOCK = 10_000
"""Number of names that are unpacked at once."""

EXPECTED = """expected is one folder per class, in split folders or not:
    photos/cat/1.jpg           photos/train/cat/1.jpg
    photos/cat/2.jpg           photos/train/dog/2.jpg
    photos/dog/3.jpg           photos/val/cat/3.jpg"""


class FileSource(Reader):
    """Images in separate files, named relative to `root`. The names take about 60 bytes per image (`packed_names`)."""

    def __init__(
        self, root: Path, names: np.ndarray, labels: Labels, sizes: np.ndarray, class_names: list[str]
    ) -> None:
        super().__init__(labels, sizes, class_names)
        self._root = os.fsencode(root)
        self._names = names

    def image(self, index: int) -> bytes:
        """See `Reader.image`."""
        return read_file(os.path.join(self._root, _unpacked(self._names[index])))

    def id(self, index: int) -> str:
        """See `IndexedSource.id`: the path below the root."""
        return os.fsdecode(_unpacked(self._names[index]))

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return Path(os.fsdecode(self._root)) / self.id(index)

    def state(self, index: int) -> str:
        """See `Reader.state`."""
        return state_of(self.path(index))

    def names(self) -> Iterator[str]:
        """Yield the path below the root of each image."""
        for begin in range(0, len(self._names), _BLOCK):
            yield from (os.fsdecode(_unpacked(name)) for name in self._names[begin : begin + _BLOCK].tolist())

    def at(self, rows: Sequence[int] | np.ndarray, labels: Labels, class_names: list[str]) -> FileSource:
        """Return the images at `rows` with these labels, one for each of the rows."""
        kept = np.asarray(rows, dtype=np.int64)
        return FileSource(Path(os.fsdecode(self._root)), self._names[kept], labels, self.sizes[kept], class_names)


def packed_names(names: Iterable[str]) -> np.ndarray:
    """Return names of files in one array, StringDType [N]. Each character stands for a byte, as names may hold any."""
    return np.array([os.fsencode(name).decode("latin-1") for name in names], dtype=np.dtypes.StringDType())


def _unpacked(name: str) -> bytes:
    """Return the bytes of a name in `packed_names`."""
    return name.encode("latin-1")


def unpacked_path(name: str) -> Path:
    """Return the path that is a name in `packed_names`."""
    return Path(os.fsdecode(_unpacked(name)))


def file_source(
    root: Path, files: Sequence[tuple[str, str | Sequence[str] | None, int]], class_names: Sequence[str] | None = None
) -> FileSource:
    """Return the images `files`, each (name below `root`, label, size in bytes).

    A label is the name of a class, the names of a set, or None if it is not known (see `named`).
    """
    labels, class_names = named([label for _, label, _ in files], class_names)
    sizes = np.array([size for _, _, size in files], dtype=np.int64)
    return FileSource(root, packed_names(name for name, _, _ in files), labels, sizes, class_names)


def file_of(source: IndexedSource, index: int) -> Path | None:
    """Return the path of an image of any source; None if the image is not a separate file."""
    source, index = origin(source, index)
    return source.path(index) if isinstance(source, FileSource) else None


@within_memory()
def read_file(path: str | bytes | Path) -> bytes:
    """Return the bytes of a file; a failed read is tried once more. Raises DecodeError "unreadable", "too-large".

    A pipe or a device is unreadable, also where it took the place of a file after the files were listed.
    """
    for attempt in range(2):
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                refuse_large(size, os.fsdecode(path))
                content = file.read(size + 1)
                if len(content) > size:  # it grows, or its file system does not know its size
                    content += file.read(MAX_BYTES + 1 - len(content))
                    refuse_large(len(content), os.fsdecode(path))
                return content
        except OSError as error:
            # a missing file stays missing; a network file system may recover from an input/output error
            if attempt or isinstance(error, FileNotFoundError | PermissionError):
                raise DecodeError(f"{os.fsdecode(path)}: {error.strerror}", reason="unreadable") from error
    raise AssertionError("unreachable")


@within_memory()
def read_pipe(path: Path) -> bytes:
    """Return what comes out of a pipe until its end. Raises DecodeError "unreadable", "too-large"."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DecodeError(f"{path}: {error.strerror}", reason="unreadable") from error
    refuse_large(len(content), str(path))
    return content


def refuse_large(size: int, name: str) -> None:
    """Raise DecodeError "too-large" for more than MAX_BYTES bytes, before they are read into memory."""
    if size > MAX_BYTES:
        raise DecodeError(
            f"{name}: {size:,} bytes, more than the {MAX_BYTES:,} that an image file may have", reason="too-large"
        )


def is_class_tree(path: Path) -> bool:
    """Return whether there are two folders with images, or a split folder.

    A single folder may hold the images of a table."""
    folders = folders_in(path)
    return bool(_split_folders(folders)) or sum(layout(folder) != "empty" for folder in folders) > 1


def no_images(path: Path, selection: Selection = ALL) -> str:
    """Return the error for a folder without images: the files it holds instead, and what to do."""
    if selection.patterns and next(images_in(path, "", Findings("folder"), kind_below(path)), None) is not None:
        return f"none of the images in {path} is left by {selection}. Change or remove a pattern"
    return f"{path} holds no images{other_files(path)}; {EXPECTED}"


def has_images(path: Path) -> bool:
    """Return whether there are images in a folder, in its folders, or in theirs."""
    return has_image(path) or any(layout(folder) != "empty" for folder in folders_in(path))


def read_folder(
    path: Path, per_image: PerImage = "one", selection: Selection = ALL, named: Collection[str] = ()
) -> DataSet:
    """Open a tree of class folders. Raises DataError, which shows the expected tree, if there is none.

    per_image: See `Data.labels_per_image`. named: Folders that are splits by `Data.train`, `validation` and `test`."""
    findings = Findings("folder")
    folders = folders_in(path)
    splits = _split_folders(folders, named)
    if splits:
        note_others(path, splits, findings)
        trees = {folder.name: _listed_classes(_inner(folder), findings, selection) for folder in splits}
        return _with_links(trees, findings, per_image)
    if not any(layout(folder) != "empty" for folder in folders):
        raise DataError(no_images(path))
    findings.warnings += _nested(path, folders)
    return _with_links({"": _listed_classes(path, findings, selection)}, findings, per_image)


def note_others(path: Path, splits: list[Path], findings: Findings) -> None:
    """List what lies beside the folders of splits and is not used."""
    for name in entries(path):
        if is_junk(name) or not (path / name).is_dir():
            findings.ignore(SYSTEM_FILE if is_junk(name) else "file beside the split folders", name)
        elif path / name not in splits:
            findings.warnings.append(f"folder {name!r} is not a split: left out")


def read_classes(path: Path, findings: Findings) -> FileSource:
    """List `path/class/**/image`; classes are the folder names, in the order of `order_classes`.

    An empty class folder causes a warning."""
    return _listed_classes(path, findings).source


class _File(NamedTuple):
    """The file behind a name, whatever links lead to it."""

    size: int
    """Bytes."""
    device: int
    number: int


class _Tree(NamedTuple):
    """A tree of class folders."""

    source: FileSource
    files: np.ndarray
    """int64 [N, 2]: device and number of the file behind each name; zeros where the system has no such numbers."""


def _listed_classes(path: Path, findings: Findings, selection: Selection = ALL) -> _Tree:
    is_image = kind_below(path, selection)
    names: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    found: list[np.ndarray] = []
    class_names: list[str] = []
    for name in entries(path):
        if is_junk(name) or not (path / name).is_dir():
            findings.ignore(SYSTEM_FILE if is_junk(name) else "file beside the class folders", name)
            continue
        files = list(images_in(path / name, name, findings, is_image, selection))
        if not files:
            which = " that the patterns leave" if selection.patterns else ""
            findings.warnings.append(f"class folder {name!r} in {path} holds no images{which}: left out")
            continue
        names.append(packed_names(file for file, _ in files))
        labels.append(np.full(len(files), len(class_names), dtype=np.int64))
        numbers = chain.from_iterable(file for _, file in files)
        found.append(np.fromiter(numbers, np.uint64, 3 * len(files)).reshape(-1, 3))
        class_names.append(name)
    if not class_names:
        raise DataError(no_images(path, selection))
    columns = np.concatenate(found).view(np.int64)  # numbers of files may use all 64 bits; only equality counts
    ordered = order_classes(set(class_names))
    place = np.array([ordered.index(name) for name in class_names])  # images stay in the order of their paths
    source = FileSource(path, np.concatenate(names), place[np.concatenate(labels)], columns[:, 0].copy(), ordered)
    return _Tree(source, columns[:, 1:])


def _with_links(trees: dict[str, _Tree], findings: Findings, per_image: PerImage) -> DataSet:
    """Return the splits; an image that lies in several class folders through links has several labels.

    That is so if `per_image` says it, or, with "auto", if it is true for a part of the images (`FEWEST`).
    """
    found = {name: _links(tree) for name, tree in trees.items()}
    several = sum(int(np.count_nonzero(links[1].counts > 1)) for links in found.values() if links is not None)
    share = several / sum(len(tree.source) for tree in trees.values())
    use = per_image == "several" or (per_image == "auto" and share >= FEWEST)
    if several and not use and per_image == "auto":
        findings.warnings.append(
            f"{several} images lie in several class folders, as links to one file. They are used as one image for "
            "each class. If they have several labels, set data.labels_per_image to 'several'"
        )
    sources = {name: tree.source for name, tree in trees.items()}
    for name, links in found.items():
        if use and links is not None:
            sources[name] = sources[name].at(*links, sources[name].class_names)
    return DataSet(dict(sources), findings)


def _split_folders(folders: list[Path], named: Collection[str] = ()) -> list[Path]:
    """The folders that are splits: named like one, or in `named`, and holding class folders, not images."""
    called = [folder for folder in folders if folder.name in named or role_of(folder.name)]
    splits = [folder for folder in called if layout(_inner(folder)) == "classes"]
    if any(folder.name in named for folder in splits):
        return splits
    classes_beside = any(layout(folder) == "images" and not role_of(folder.name) for folder in folders)
    # one such folder among class folders is a class with sub-folders; two of them are splits
    return splits if len(splits) > 1 or not classes_beside else []


def _inner(split: Path) -> Path:
    """Return the folder with the classes of a split: the folder itself, or the only one in it (`train/images/cat`)."""
    for _ in range(_WRAPPED):
        if layout(split) != "empty" or len(inner := [one for one in folders_in(split) if folders_in(one)]) != 1:
            return split
        split = inner[0]
    return split


def _nested(path: Path, folders: list[Path]) -> Iterator[str]:
    """Yield a warning if class folders hold nothing but several folders with images, which may be the classes."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        if not has_image(folder):
            inner = [child.name for child in folders_in(folder) if has_image(child)]
            if len(inner) > 1:
                found[folder.name] = inner
    if not found:
        return
    first = next(iter(found))
    shown = "; ".join(f"{name!r} holds {listing(inner, 3)}" for name, inner in list(found.items())[:3])
    more = f", and {len(found) - 3} more such folders" if len(found) > 3 else ""
    yield (
        f"class folders hold only folders: {shown}{more}. The images of each are one class, named {first!r} and so on. "
        f"If the inner folders are the classes, give {path / first}, or move them up one level. If {first!r} is a "
        f"split, say so: --data.train {shlex.quote(first)} (also --data.validation, --data.test)"
    )


def layout(folder: Path) -> str:
    """Return whether a folder holds "images", "classes" (folders that hold images), or is it "empty"."""
    if has_image(folder):
        return "images"
    return "classes" if any(has_image(child) for child in folders_in(folder)) else "empty"


def has_image(folder: Path) -> bool:
    """Return whether an image of any of `KINDS` lies directly in a folder."""
    return any(_has(folder, is_image) for is_image in KINDS)


def kind_below(path: Path, selection: Selection = ALL) -> Callable[[str], bool]:
    """Return the first of `KINDS` that has an image at any depth below a folder; the first of all if none has."""
    for is_image in KINDS:
        if not selection.patterns and any(_has(folder, is_image) for folder in folders_in(path)):
            return is_image
        if next(images_in(path, "", Findings("folder"), is_image, selection), None) is not None:
            return is_image
    return is_image_name


def _has(folder: Path, is_image: Callable[[str], bool]) -> bool:
    try:
        with os.scandir(folder) as found:  # stops at the first image: a class may hold millions
            return any(is_image(entry.path) and not is_junk(entry.name) for entry in found)
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


def images_in(
    folder: Path,
    prefix: str,
    findings: Findings,
    is_image: Callable[[str], bool] = is_image_name,
    selection: Selection = ALL,
) -> Iterator[tuple[str, _File]]:
    """Yield (name below the split, its file) of every image in a class folder, in a fixed order."""
    root = os.path.realpath(selection.root or (folder.parent if prefix else folder))
    pending: list[tuple[Path, str, tuple[tuple[int, int], ...], bool]] = [(folder, prefix, (), _leaves(folder, root))]
    while pending:
        directory, below, above, away = pending.pop()
        try:
            about = directory.stat()
            here = (about.st_dev, about.st_ino)
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
                findings.ignore(SYSTEM_FILE, name)
            elif _is_dir(entry) and not is_image(entry.path):
                leads = away or (entry.is_symlink() and _leaves(entry.path, root))
                pending.append((directory / entry.name, name, (*above, here), leads))
            elif not is_image(entry.path):
                findings.ignore(f"not an image ({ending_of(entry.name)})", name)
            elif selection.patterns and (reason := selection.reason(entry.path)):
                findings.ignore(reason, name)
            elif (file := _file(entry, name, findings)) is not None:
                if away or (entry.is_symlink() and _leaves(entry.path, root)):
                    findings.lies_outside(entry.path)
                yield name, file


def _leaves(path: str | Path, root: str) -> bool:
    """Return whether a path leads out of the folder `root`, which is without links itself."""
    real = os.path.realpath(path)
    return real != root and not real.startswith(os.path.join(root, ""))


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that points at itself
        return False


def _file(entry: os.DirEntry[str], name: str, findings: Findings) -> _File | None:
    """Return a regular file; anything else with an image's name is listed as dropped."""
    try:
        if entry.is_file():
            status = entry.stat()
            return _File(status.st_size, status.st_dev, status.st_ino)
        reason = "a folder" if entry.is_dir() else "dangling link" if entry.is_symlink() else "not a regular file"
    except OSError as error:
        reason = error.strerror or "unreadable"
    findings.drop(name, reason)
    return None


class Located(Subset):
    """A split whose ids are paths below the data set: "train/a/1.png" for a/1.png of the folder train.

    path: The data set, as the user named it; of a table it is the folder of the table that ids are relative to. An
    image that is not a file of its own has the id "<split>/<id in the split>".
    """

    def __init__(self, source: IndexedSource, split: str, path: str | Path) -> None:
        super().__init__(source)
        place = Path(path).expanduser()
        self._base = place if place.is_dir() else place.parent
        self._prefix = f"{split}/" if split else ""

    def __getitem__(self, index: int) -> Item:
        return super().__getitem__(index)._replace(id=self.id(index))

    def id(self, index: int) -> str:
        """See `IndexedSource.id`."""
        source, place = self.within(index)
        file = file_of(source, place)
        return f"{self._prefix}{source.id(place)}" if file is None else with_slashes(os.path.relpath(file, self._base))

    def ids(self, indices: np.ndarray) -> list[str]:
        """Return the ids of several images."""
        return [self.id(int(index)) for index in indices]
