"""The test sets of ImageNet classifiers, each as its authors evaluate it. Torch-free.

| protocol | images | right is | the network chooses among |
|---|---|---|---|
| imagenet | 50,000, ILSVRC2012 validation | the class of the image | 1,000 classes |
| real | 46,837 of them, ImageNet ReaL | any of the image's classes | 1,000 |
| v2 | 10,000, ImageNet-V2 | the class of the image | 1,000 |
| a | 7,500, ImageNet-A | the class of the image | the set's 200 |
| r | 30,000, ImageNet-R | the class of the image | the set's 200 |
| objectnet | 18,574, ObjectNet | any ImageNet class of the object | 1,000 |

Sources: ILSVRC2012; "Are we done with ImageNet?" (Beyer et al., 2020); "Do ImageNet Classifiers Generalize to
ImageNet?" (Recht et al., 2019); "Natural Adversarial Examples" (Hendrycks et al., 2019); "The Many Faces of
Robustness" (Hendrycks et al., 2020); "ObjectNet" (Barbu et al., 2019), for which the ViT paper (D.9) takes the view
of "Big Transfer" (Kolesnikov et al., 2019): the shorter side is resized to 512 pixels, of which 480 are seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.benchmarks import objectnet
from vitrail.data.benchmarks.imagenet_labels import LABEL_FILES, AnswerKey, part, read_labels, read_real, wnids
from vitrail.data.item import Findings, Listed, View
from vitrail.data.sources.folder import (
    FileSource,
    entries,
    file_source,
    folders_in,
    is_image_name,
    is_junk,
    read_classes,
)
from vitrail.errors import DataError, UsageError, did_you_mean

IMAGES = "https://image-net.org (an account is needed)"
HENDRYCKS = "https://people.eecs.berkeley.edu/~hendrycks"


@dataclass(frozen=True)
class Protocol:
    """A test set: its name and size, where to download it, and how its images are prepared."""

    title: str
    images: int
    """Number of images of the complete set."""
    get: str
    """What to download, and from where."""
    layout: str
    border: int = 0
    """Pixels cut from each side of an image before anything else."""
    crop: float | None = None
    """Share of the resized shorter side in the crop; None: as the network's card says."""

    def missing(self, problem: str) -> DataError:
        """Return the error that says what is wrong, what to download and how it should lie."""
        lines = "\n".join(f"    {line}" for line in self.layout.splitlines())
        return DataError(f"{self.title}: {problem}. Get {self.get}; unpacked it is\n{lines}")


PROTOCOLS: dict[str, Protocol] = {
    "imagenet": Protocol(
        "ImageNet (ILSVRC2012, validation)",
        50_000,
        f"ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from {IMAGES}",
        "val/ILSVRC2012_val_00000001.JPEG, ... and ILSVRC2012_devkit_t12/ beside val/ (or labels named with --labels)\n"
        "or val/n01440764/*.JPEG, ... one folder for each class",
    ),
    "real": Protocol(
        "ImageNet ReaL",
        46_837,
        f"ILSVRC2012_img_val.tar from {IMAGES} and real.json from\n"
        "https://github.com/google-research/reassessed-imagenet",
        "val/ILSVRC2012_val_00000001.JPEG, ... in class folders or not\n"
        "val/real.json, or beside val/, or named with --labels",
    ),
    "v2": Protocol(
        "ImageNet-V2",
        10_000,
        "imagenetv2-matched-frequency.tar.gz from https://huggingface.co/datasets/vaishaal/ImageNetV2",
        "imagenetv2-matched-frequency-format-val/0/*.jpeg to .../999/*.jpeg: folders are numbers of classes",
    ),
    "a": Protocol(
        "ImageNet-A",
        7_500,
        f"{HENDRYCKS}/imagenet-a.tar",
        "imagenet-a/n01498041/*.jpg, ... 200 folders",
    ),
    "r": Protocol(
        "ImageNet-R",
        30_000,
        f"{HENDRYCKS}/imagenet-r.tar",
        "imagenet-r/n01443537/*.jpg, ... 200 folders",
    ),
    "objectnet": Protocol(
        "ObjectNet",
        18_574,
        "objectnet-1.0.zip from https://objectnet.dev",
        "objectnet-1.0/images/alarm_clock/*.png, ...\n"
        f"objectnet-1.0/mappings/{objectnet.FOLDERS}, {objectnet.OVERLAP},\n"
        f"    {objectnet.NUMBERS}, {objectnet.LABELS} (or name mappings/ with --labels)",
        border=objectnet.BORDER,
        crop=480 / 512,
    ),
}


@dataclass(frozen=True)
class Benchmark:
    """An opened test set."""

    protocol: Protocol
    source: Listed
    """Each image that counts, once; its labels are those of `key`, or without one numbers of `class_names`."""
    class_names: list[str]
    """WordNet ids, or names of ObjectNet's."""
    columns: np.ndarray
    """int64: the numbers of ImageNet's classes among which the network chooses, in the order of `key`'s outputs."""
    key: AnswerKey | None
    notes: list[str]
    """Images that were left out, and whether the set is complete."""


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


def open_validation(protocol: Protocol, path: Path, labels: Path | None) -> Benchmark:
    """Open the images with ILSVRC2012's labels: of their folders' or files' names, or from a file of labels.

    Raises DataError where nothing says which class an image has.
    """
    root, files = _listed(protocol, path)
    notes: list[str] = []
    if labels is None and all(file.wnid for file in files):
        position = {wnid: number for number, wnid in enumerate(wnids())}
        found = [position.get(file.wnid, -1) for file in files]
        if -1 in found:
            raise DataError(f"{root}: {files[found.index(-1)].wnid!r} is no class of ILSVRC2012")
    else:
        given = labels or _beside(root, LABEL_FILES)
        if given is None:
            raise protocol.missing(f"nothing says which classes the images in {root} have")
        classes = read_labels(given)
        files = _numbered(root, files, notes)
        if lacking := [file.name for file in files if file.number not in classes]:
            raise DataError(f"{given} has no label for {lacking[0]} ({len(lacking)} images)")
        found = [classes[file.number] for file in files]
    names = list(wnids())
    return Benchmark(protocol, _source(root, files, found, names), names, np.arange(1000), None, notes)


def open_real(protocol: Protocol, path: Path, labels: Path | None) -> Benchmark:
    """Open the images with the labels of ImageNet ReaL, which are sets; images with an empty set are left out.

    An image of several classes is listed under the first of them. Raises DataError.
    """
    root, files = _listed(protocol, path)
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
    numbers: dict[tuple[int, ...], int] = {}
    found = [numbers.setdefault(classes[file.number - 1], len(numbers)) for file in counted]
    right = np.zeros((len(numbers), 1000), dtype=bool)
    for valid, number in numbers.items():
        right[number, list(valid)] = True
    key = AnswerKey(right, np.array([valid[0] for valid in numbers], dtype=np.int64), np.arange(1000))
    sets = [" or ".join(wnids()[one] for one in valid) for valid in numbers]
    return Benchmark(protocol, _source(root, counted, found, sets), list(wnids()), np.arange(1000), key, notes)


def _source(root: Path, files: list[_File], labels: list[int], class_names: list[str]) -> FileSource:
    rows = [(file.name, label, file.size) for file, label in zip(files, labels, strict=True)]
    return file_source(root, rows, class_names)


def _listed(protocol: Protocol, path: Path) -> tuple[Path, list[_File]]:
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
    """Those whose names have numbers. Raises DataError where two have the same: each image counts once."""
    numbered = [file for file in files if file.number]
    if len(numbered) < len(files):
        notes.append(f"ignored {len(files) - len(numbered):,} images not called ILSVRC2012_val_NNNNNNNN.JPEG")
    names: dict[int, str] = {}
    for file in numbered:
        if names.setdefault(file.number, file.name) != file.name:
            raise DataError(f"{root} has image {file.number} twice: {names[file.number]} and {file.name}")
    return numbered


def _beside(root: Path, names: tuple[str, ...]) -> Path | None:
    return next((place / name for place in (root, root.parent) for name in names if (place / name).exists()), None)


def open_benchmark(protocol: str, path: str | Path, labels: str | Path | None = None) -> Benchmark:
    """Open a test set by the name of its protocol; `labels` names a file of labels, or ObjectNet's mappings.

    Raises UsageError for another name, and DataError where something is missing: what to download, and where to
    put it.
    """
    if protocol not in PROTOCOLS:
        hint = did_you_mean(protocol, PROTOCOLS)
        raise UsageError(f"no protocol is called {protocol!r}: {', '.join(PROTOCOLS)}.{hint}")
    wanted, place = PROTOCOLS[protocol], Path(path).expanduser()
    given = None if labels is None else Path(labels).expanduser()
    if given is not None and protocol in ("v2", "a", "r"):
        raise UsageError(f"{wanted.title} has its labels in the names of its folders: leave --labels out")
    if not place.is_dir():
        raise wanted.missing(f"there is no folder {place}")
    if protocol in ("imagenet", "real"):
        found = (open_validation if protocol == "imagenet" else open_real)(wanted, place, given)
    elif protocol == "objectnet":
        found = _objectnet(wanted, place, given)
    else:
        found = _by_class(protocol, place)
    if not len(found.source):
        raise wanted.missing(f"no image that counts is in {place}")
    if len(found.source) != wanted.images:
        found.notes.append(f"{len(found.source):,} of the {wanted.images:,} images: not a number of {wanted.title}")
    return found


def _by_class(protocol: str, path: Path) -> Benchmark:
    """V2, whose folders are the numbers of classes, and A and R, whose folders are the WordNet ids of their 200."""
    wanted = PROTOCOLS[protocol]
    columns = np.arange(1000) if protocol == "v2" else part(protocol)
    names = [wnids()[number] for number in columns]
    folders = {str(number) if protocol == "v2" else name: name for number, name in enumerate(names)}
    source, notes = _class_folders(wanted, path, folders)
    return Benchmark(wanted, source, names, columns, None, notes)


def _objectnet(wanted: Protocol, path: Path, labels: Path | None) -> Benchmark:
    places = [path, path.parent, *folders_in(path)] if labels is None else [labels]
    folders = [folder for place in places for folder in (place, place / "mappings")]
    folder = next((folder for folder in folders if (folder / objectnet.OVERLAP).is_file()), None)
    if folder is None:
        raise wanted.missing(f"no {objectnet.OVERLAP} at {labels or path}")
    mapping = objectnet.read_mapping(folder)
    by_folder = dict(zip(mapping.folders, mapping.names, strict=True))
    source, notes = _class_folders(wanted, path, by_folder, others=True)
    return Benchmark(wanted, source, mapping.names, np.arange(1000), mapping.key(), notes)


def _class_folders(
    wanted: Protocol, path: Path, names: Mapping[str, str], *, others: bool = False
) -> tuple[Listed, list[str]]:
    """Return the images of the folders `names` (folder -> class), and what was left out.

    The folders lie in `path`, or in one folder of it. Other folders are an error, unless there may be `others`.
    """
    places = [place for place in (path, *folders_in(path)) if names.keys() & set(entries(place))]
    if path in places:
        places = [path]
    if len(places) > 1:
        several = ", ".join(place.name for place in places)
        raise DataError(f"{path} holds several sets of {wanted.title}, {several}: give the path of one of them")
    if not places:
        raise wanted.missing(f"none of its class folders, such as {min(names)}/, is in {path}")
    findings = Findings("folder")
    source = read_classes(places[0], findings)
    strangers = [name for name in source.class_names if name not in names]
    if strangers and not others:
        raise wanted.missing(f"{places[0]} has a folder {strangers[0]}/, which is none of its {len(names):,} classes")
    counted = np.array([name in names for name in source.class_names])[source.labels]
    notes = findings.lines()
    if strangers:
        left = len(source) - int(counted.sum())
        notes.append(f"{left:,} images of {len(strangers)} classes that ImageNet does not have: not counted")
    source.class_names = [names.get(name, name) for name in source.class_names]
    return View(View(source, np.flatnonzero(counted)), class_names=list(names.values())), notes
