"""The test sets of ImageNet classifiers, each evaluated as its authors do. Torch-free.

| protocol | images | a right answer is | the network chooses among |
|---|---|---|---|
| imagenet | 50,000, ILSVRC2012 validation | the class of the image | 1,000 classes |
| real | 46,837 of them, ImageNet ReaL | any of the image's classes | 1,000 |
| v2 | 10,000, ImageNet-V2 | the class of the image | 1,000 |
| a | 7,500, ImageNet-A | the class of the image | the set's 200 |
| r | 30,000, ImageNet-R | the class of the image | the set's 200 |
| objectnet | 18,574, ObjectNet | any ImageNet class of the object | 1,000 |

Sources: ILSVRC2012; "Are we done with ImageNet?" (Beyer et al., 2020); "Do ImageNet Classifiers Generalize to
ImageNet?" (Recht et al., 2019); "Natural Adversarial Examples" (Hendrycks et al., 2019); "The Many Faces of
Robustness" (Hendrycks et al., 2020); "ObjectNet" (Barbu et al., 2019). For ObjectNet the ViT paper (D.9) prepares
images as "Big Transfer" (Kolesnikov et al., 2019) does: resize the shorter side to 512 pixels and crop 480.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.benchmarks.catalog import packaged_tables
from vitrail.data.benchmarks.imagenet_labels import (
    LABEL_FILES,
    OVERLAP,
    AnswerKey,
    class_numbers,
    part,
    read_answers,
    read_mapping,
    read_real,
    right_answers,
    wnids,
)
from vitrail.data.image_names import is_image_name, is_junk
from vitrail.data.item import Findings, IndexedSource, Subset
from vitrail.data.labels.sets import one_label
from vitrail.data.sources.folder import (
    FileSource,
    entries,
    file_source,
    folders_in,
    read_classes,
)
from vitrail.errors import DataError, UsageError, did_you_mean


@dataclass(frozen=True)
class ImageNetProtocol:
    """A test set: its name and size, where to download it, and how its images are prepared."""

    name: str
    title: str
    images: int
    """Number of images of the complete set."""
    get: str
    """What to download, and from where."""
    layout: str
    """The files after unpacking, one line each."""
    border: int = 0
    """Number of pixels to cut from each side of an image before anything else."""
    crop: float | None = None
    """Side of the crop as a share of the resized shorter side; None for that of the network's card."""

    def missing(self, problem: str) -> DataError:
        """Return the error that says what is wrong, what to download and how to arrange the files."""
        lines = "\n".join(f"    {line}" for line in self.layout.splitlines())
        return DataError(f"{self.title}: {problem}. Get {self.get}; unpacked it is\n{lines}")


PROTOCOLS = {name: ImageNetProtocol(name=name, **fields) for name, fields in packaged_tables("imagenet.toml").items()}
"""Name -> test set."""


@dataclass(frozen=True)
class Benchmark:
    """An opened test set."""

    protocol: ImageNetProtocol
    source: IndexedSource
    """Each image that counts, once. Its labels are those of `key`; without a key they are indices of `class_names`."""
    class_names: list[str]
    """WordNet ids, or the names of ObjectNet's classes."""
    notes: list[str]
    """Which images were left out, and whether the set is complete."""
    columns: np.ndarray = field(default_factory=lambda: np.arange(1000))
    """int64: the ImageNet classes among which the network chooses, in the order of `key`'s outputs."""
    key: AnswerKey | None = None


def open_benchmark(protocol: str, path: str | Path, labels: str | Path | None = None) -> Benchmark:
    """Open the test set of a protocol. `labels` is a file of labels, or ObjectNet's mappings.

    Raises UsageError for an unknown name. Raises DataError if files are missing, and says what to download and where
    to put it.
    """
    if protocol not in PROTOCOLS:
        hint = did_you_mean(protocol, PROTOCOLS)
        raise UsageError(f"no protocol is called {protocol!r}: {', '.join(PROTOCOLS)}.{hint}")
    wanted, place = PROTOCOLS[protocol], Path(path).expanduser()
    given = None if labels is None else Path(labels).expanduser()
    openers = {"imagenet": _open_validation, "real": _open_real, "objectnet": _open_objectnet}
    if given is not None and protocol not in openers:
        raise UsageError(f"{wanted.title} has its labels in the names of its folders: leave --labels out")
    if not place.is_dir():
        raise wanted.missing(f"there is no folder {place}")
    opened = openers.get(protocol, _open_class_folders)(wanted, place, given)
    count = len(opened.source)
    if not count:
        raise wanted.missing(f"no image in {place} counts")
    if count != wanted.images:
        opened.notes.append(
            f"{count:,} images instead of {wanted.images:,}: the result is not comparable with others on {wanted.title}"
        )
    return opened


class _File(NamedTuple):
    name: str
    """Path below the root folder."""
    size: int
    number: int
    """Number in the file name, from 1; 0 if it has none."""
    wnid: str
    """WordNet id from the folder or the file name; "" if neither has one."""


_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?:_(n\d{8}))?\.", re.IGNORECASE)
_WNID = re.compile(r"n\d{8}")


def _open_validation(protocol: ImageNetProtocol, path: Path, labels: Path | None) -> Benchmark:
    """Open the images with ILSVRC2012's labels, from the names of folders or files, or from a file of labels."""
    root, files = _images_below(protocol, path)
    notes: list[str] = []
    if labels is None and all(file.wnid for file in files):
        if strange := [file.wnid for file in files if file.wnid not in class_numbers()]:
            raise DataError(f"{root}: {strange[0]!r} is not a class of ILSVRC2012")
        found = [class_numbers()[file.wnid] for file in files]
    else:
        given = labels or _beside(root, LABEL_FILES)
        if given is None:
            raise protocol.missing(f"nothing says which classes the images in {root} have")
        classes = read_answers(given)
        files = _numbered(root, files, notes)
        if lacking := [file.name for file in files if file.number not in classes]:
            raise DataError(f"{given} has no label for {lacking[0]} ({len(lacking)} images)")
        found = [classes[file.number] for file in files]
    return Benchmark(protocol, _source(root, files, found, list(wnids())), list(wnids()), notes)


def _open_real(protocol: ImageNetProtocol, path: Path, labels: Path | None) -> Benchmark:
    """Open the images with the labels of ImageNet ReaL, which are sets. Images with an empty set are left out.

    An image of several classes is listed under the first of them.
    """
    root, files = _images_below(protocol, path)
    given = labels or _beside(root, ("real.json",))
    if given is None:
        raise protocol.missing(f"no real.json in {root} or beside it")
    classes = read_real(given)
    notes: list[str] = []
    files = _numbered(root, files, notes)
    if beyond := [file.name for file in files if not 1 <= file.number <= len(classes)]:
        raise DataError(f"{given} has no entry for {beyond[0]}: it has {len(classes):,}")
    counted = [file for file in files if classes[file.number - 1]]
    if len(counted) < len(files):
        notes.append(f"{len(files) - len(counted):,} images that show none of the 1,000 classes: not counted")
    valid = [classes[file.number - 1] for file in counted]
    label_of = {one: label for label, one in enumerate(dict.fromkeys(valid))}
    key = AnswerKey(right_answers(label_of), np.array([one[0] for one in label_of], dtype=np.int64), np.arange(1000))
    names = [" or ".join(wnids()[number] for number in one) for one in label_of]
    source = _source(root, counted, [label_of[one] for one in valid], names)
    return Benchmark(protocol, source, list(wnids()), notes, key=key)


def _source(root: Path, files: list[_File], labels: list[int], class_names: list[str]) -> FileSource:
    rows = [(file.name, class_names[label], file.size) for file, label in zip(files, labels, strict=True)]
    return file_source(root, rows, class_names)


def _images_below(protocol: ImageNetProtocol, path: Path) -> tuple[Path, list[_File]]:
    """Return the folder of the images, `path` or its val/, and the images in it and in its class folders."""
    for root in (path, path / "val", path / "validation"):
        if not root.is_dir():
            continue
        files = _images(root, "", "")
        for name in sorted(filter(_WNID.fullmatch, os.listdir(root))):
            files += _images(root / name, f"{name}/", name)
        if files:
            return root, files
    raise protocol.missing(f"no images in {path}")


def _images(folder: Path, prefix: str, wnid: str) -> list[_File]:
    found = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if is_image_name(entry.name) and not is_junk(entry.name) and entry.is_file():
            match = _NAME.match(entry.name)
            number, named = (int(match[1]), match[2] or "") if match else (0, "")
            found.append(_File(prefix + entry.name, entry.stat().st_size, number, wnid or named))
    return found


def _numbered(root: Path, files: list[_File], notes: list[str]) -> list[_File]:
    """Return the files with a number in their names. Raises DataError if two have the same number."""
    numbered = [file for file in files if file.number]
    if len(numbered) < len(files):
        notes.append(f"ignored {len(files) - len(numbered):,} images not called ILSVRC2012_val_NNNNNNNN.JPEG")
    names: dict[int, str] = {}
    for file in numbered:
        if names.setdefault(file.number, file.name) != file.name:
            raise DataError(f"{root} has image {file.number} twice: {names[file.number]} and {file.name}")
    return numbered


def _beside(root: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of these files that exists in a folder or in its parent."""
    return next((place / name for place in (root, root.parent) for name in names if (place / name).exists()), None)


def _open_class_folders(protocol: ImageNetProtocol, path: Path, labels: Path | None) -> Benchmark:
    """Open V2, A or R. V2's folders are the numbers of classes, those of A and R are the WordNet ids of their 200."""
    columns = np.arange(1000) if protocol.name == "v2" else part(protocol.name)
    names = [wnids()[number] for number in columns]
    folders = map(str, columns) if protocol.name == "v2" else names
    source, notes = _class_folders(protocol, path, dict(zip(folders, names, strict=True)))
    return Benchmark(protocol, source, names, notes, columns)


def _open_objectnet(protocol: ImageNetProtocol, path: Path, labels: Path | None) -> Benchmark:
    """Open ObjectNet's images of classes that ImageNet has, too."""
    places = [path, path.parent, *folders_in(path)] if labels is None else [labels]
    folders = [folder for place in places for folder in (place, place / "mappings")]
    folder = next((folder for folder in folders if (folder / OVERLAP).is_file()), None)
    if folder is None:
        raise protocol.missing(f"no {OVERLAP} at {labels or path}")
    mapping = read_mapping(folder)
    by_folder = dict(zip(mapping.folders, mapping.names, strict=True))
    source, notes = _class_folders(protocol, path, by_folder, others=True)
    return Benchmark(protocol, source, mapping.names, notes, key=mapping.key())


def _class_folders(
    protocol: ImageNetProtocol, path: Path, names: Mapping[str, str], *, others: bool = False
) -> tuple[IndexedSource, list[str]]:
    """Return the images of the folders `names` (folder -> class), and notes about everything left out.

    The folders lie in `path`, or in one folder of it. Other folders are an error unless `others` is set.
    """
    places = [place for place in (path, *folders_in(path)) if names.keys() & set(entries(place))]
    if path in places:
        places = [path]
    if len(places) > 1:
        several = ", ".join(place.name for place in places)
        raise DataError(f"{path} holds several sets of {protocol.title}, {several}: give the path of one of them")
    if not places:
        raise protocol.missing(f"none of its class folders, such as {min(names)}/, is in {path}")
    findings = Findings("folder")
    source = read_classes(places[0], findings)
    strangers = [name for name in source.class_names if name not in names]
    if strangers and not others:
        raise protocol.missing(f"{places[0]} has a folder {strangers[0]}/, which is none of its {len(names):,} classes")
    labels = one_label(source.labels, "a test set of ImageNet")
    counted = np.array([name in names for name in source.class_names])[labels]
    notes = findings.lines()
    if strangers:
        left = len(source) - int(counted.sum())
        notes.append(f"{left:,} images of {len(strangers)} classes that ImageNet does not have: not counted")
    source.class_names = [names.get(name, name) for name in source.class_names]
    return Subset(Subset(source, np.flatnonzero(counted)), class_names=list(names.values())), notes
