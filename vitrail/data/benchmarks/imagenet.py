"""Test sets of ImageNet classifiers, opened from the folders they are published as. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vitrail.data.benchmarks import objectnet
from vitrail.data.benchmarks.imagenet_classes import part, wnids
from vitrail.data.benchmarks.imagenet_protocols import PROTOCOLS, Benchmark, Protocol
from vitrail.data.benchmarks.imagenet_validation import open_real, open_validation
from vitrail.data.item import Findings, Listed, View
from vitrail.data.sources.folder import is_junk, read_classes
from vitrail.errors import DataError, UsageError, did_you_mean


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
    places = [path, path.parent, *_below(path)] if labels is None else [labels]
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
    places = [place for place in (path, *_below(path)) if names.keys() & set(_entries(place))]
    if path in places:
        places = [path]
    if len(places) > 1:
        several = ", ".join(place.name for place in places)
        raise DataError(f"{path} holds several sets of {wanted.title}, {several}: name one of them")
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


def _below(path: Path) -> list[Path]:
    return [path / name for name in _entries(path) if not is_junk(name) and (path / name).is_dir()]


def _entries(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
