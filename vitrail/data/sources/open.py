"""Open any data set from one argument: `open_data` detects the layout of a path or name and opens it.

Classes are matched by name, never by position. Everything that was left out is listed in `Splits.report`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.benchmarks.vtab_source import PREFIX, read_task
from vitrail.data.item import DataSet, Findings, Item, Joined, Listed, Source, View
from vitrail.data.roles import matched, named_split, of_role, test_split, training_splits, validation_split
from vitrail.data.settings import Data
from vitrail.data.sources import folder, table
from vitrail.data.sources.address import is_address
from vitrail.data.sources.arrays import read_digits, read_npz
from vitrail.data.sources.arrow import hub_cached, open_hub, open_saved, read_parquet
from vitrail.data.sources.index_lists import index_lists, read_index_lists
from vitrail.data.sources.lists import read_list, refers_to
from vitrail.data.sources.remote import find_remote
from vitrail.data.sources.shards import packed_folders, read_packed, read_shards
from vitrail.data.sources.tfds import prepared_folders, read_tfds
from vitrail.data.split import fingerprint, hold_out, subset
from vitrail.errors import DataError, did_you_mean

__all__ = ["Item", "Listed", "Source", "Splits", "find", "open_data", "open_split"]

_HUB = "hf://datasets/"
_KINDS = (
    "a folder of class folders, a CSV, parquet files, tar shards, packed shards, an .npz, "
    "a folder with index lists, a folder prepared by TensorFlow Datasets, vtab:TASK:DIR, a hub data set on disk "
    f"or {_HUB}owner/name, packed or tar shards at an address such as s3://bucket/folder, 'digits', "
    f"or one of {', '.join(CATALOG)}"
)


@dataclass
class Splits:
    """Data opened for training. The labels of all splits are indices into `class_names`."""

    train: Listed
    validation: Listed | None
    test: Listed | None
    class_names: list[str]
    report: Findings
    fingerprint: str
    held_out: dict[str, Any] = field(default_factory=dict)
    """Origin of the validation images: {"validation": split name} if the data have such a split, else
    {"seed", "share", "from", "ids": [...]} of the images held out."""


def open_data(data: Data | str | Path, *, seed: int = 0, labels: bool = True) -> Splits:
    """Open `data.path` and split it for training. `seed` draws the held-out images.

    If `labels` is False, images may be unlabelled, and a folder needs no class folders. Raises DataError (missing or
    empty data, a single class, unknown labels, classes that training lacks) and UsageError (no such split or column).
    """
    if not isinstance(data, Data):
        data = Data(path=str(data))
    found = find(data.path, data.image_column, data.label_column, labels=labels)
    return split_found(found, data, seed, labels=labels)


def split_found(found: DataSet, data: Data, seed: int = 0, *, labels: bool = True) -> Splits:
    """Split what `find` returned for `data.path` for training. Raises as `open_data` does."""
    findings = found.findings
    names = training_splits(found, data)
    name = "+".join(names)
    train = found.splits[name] if len(names) == 1 else Joined({part: found.splits[part] for part in names})
    class_names = train.class_names
    if labels and len(class_names) < 2:
        tree = f"; {folder.EXPECTED}" if findings.kind == "folder" else ""
        raise DataError(
            f"{data.path} has one class only, {class_names[0]!r}. A classifier needs at least two classes{tree}"
        )
    unlabelled = int(np.count_nonzero(train.labels < 0))
    if labels and unlabelled:
        raise DataError(
            f"{unlabelled} of {len(train)} images of split {name!r} of {data.path} have no label. "
            "Label them, remove them, or choose a recipe that needs no labels"
        )
    mark = fingerprint(found.splits)
    measured = test_split(found, data, names)
    chosen = validation_split(found, data, names, measured, labels=labels)
    asked = {chosen, measured if data.test is not None else None}
    others = {
        split: matched(found, split, class_names, required=split in asked, labels=labels)
        for split in found.splits
        if split not in names
    }
    if data.strict:
        findings.require_whole(data.path)
    test = None if measured is None else others[measured]
    if chosen is not None:
        validation, held = others[chosen], dict[str, Any](validation=chosen)
    elif data.holdout > 0:
        remaining, out = hold_out(train, data.holdout, seed)
        ids = [train.id(int(index)) for index in out]
        held = {"seed": seed, "share": data.holdout, "from": name, "ids": ids}
        train, validation = View(train, remaining), View(train, out)
    else:
        validation, held = None, {}
    if data.subset is not None:
        train = View(train, subset(train, data.subset, seed))
    return Splits(train, validation, test, list(class_names), findings, mark, held)


def open_split(
    path: str | Path,
    split: str | None = None,
    class_names: list[str] | None = None,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
) -> Listed:
    """Open one split for evaluation. Its labels are indices into `class_names` (a model's), matched by name.

    Default for `split`: the test split if there is one, else validation, else the only split. Raises DataError, with
    a list, for classes that `class_names` lacks, and UsageError for a split that does not exist."""
    found = find(str(path), image_column, label_column)
    if split is not None:
        name = named_split(found, split, str(path))
    else:
        named = [*of_role(found, "test"), *of_role(found, "validation"), *found.splits]
        name = next(name for name in named if len(named) == 1 or np.any(found.splits[name].labels >= 0))
    return found.splits[name] if class_names is None else View(found.splits[name], class_names=class_names)


def find(
    path: str, image_column: str | None = None, label_column: str | None = None, *, labels: bool = True
) -> DataSet:
    """Return the data set at `path`: its splits by their own names, and what was left out.

    If `labels` is False, a folder of images without class folders is accepted. Raises DataError if there is no
    readable data set: the message says where it was looked for and what would be valid.
    """
    try:
        return _find(path, image_column, label_column, labels)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error} ({error.filename})") from error


def _find(path: str, image_column: str | None, label_column: str | None, labels: bool) -> DataSet:
    if path == "digits":
        return read_digits()
    if is_address(path) and not path.startswith(_HUB):
        return find_remote(path)
    place = Path(path).expanduser()
    if path and place.is_dir():
        return _find_in_folder(place, image_column, label_column, labels)
    if place.is_file():
        return _find_file(place, image_column, label_column)
    if path.startswith(PREFIX):
        return read_task(path, find)
    if path in CATALOG:
        entry = CATALOG[path]
        if entry.hub is None:
            raise DataError(
                f"{path} is not on the hub. Download it and give its folder instead. It comes from: {entry.source}"
            )
        return open_hub(entry.hub, image_column or entry.image_column, label_column or entry.label_column)
    if path.startswith(_HUB):
        return open_hub(path.removeprefix(_HUB), image_column, label_column)
    if hub_cached(path):
        return open_hub(path, image_column, label_column)
    raise _missing(path, place)


def _missing(path: str, place: Path) -> DataError:
    """Return the error for a path without data: how far the path exists, and similar names. Needs no network."""
    parent = next((p for p in place.absolute().parents if p.is_dir()), Path("/"))
    try:
        missing = place.absolute().relative_to(parent).parts[0]
        near = did_you_mean(missing, [*os.listdir(parent), *CATALOG, "digits"])
    except OSError:
        near = ""
    hub = f" For a data set of the hub write {_HUB}{path}." if path.count("/") == 1 and path[0] not in "./~" else ""
    return DataError(
        f"no data at {path!r}: looked for {place.absolute()} (the path exists up to {parent})."
        f"{near}{hub} Valid are {_KINDS}"
    )


def _find_file(path: Path, image_column: str | None, label_column: str | None) -> DataSet:
    suffix = path.suffix.lower()
    if suffix in table.SUFFIXES and (listed := refers_to(path)) is not None:
        return read_list(path, _listed(path, listed, image_column, label_column))
    if suffix in table.SUFFIXES:
        return table.read_tables(path, [path], image_column, label_column)
    if suffix == ".parquet":
        return read_parquet(path, [path], image_column, label_column)
    if suffix == ".npz":
        return read_npz(path)
    if suffix == ".tar":
        return read_shards(path, [path])
    raise DataError(f"{path} is a file of no known kind. Valid are {_KINDS}")


def _listed(path: Path, data: str, image_column: str | None, label_column: str | None) -> DataSet:
    """Open the data set that a list of images refers to."""
    try:
        return find(data, image_column, label_column)
    except DataError as error:
        raise DataError(f"{path} lists images of {data}, which cannot be opened: {error}") from error


def _find_in_folder(path: Path, image_column: str | None, label_column: str | None, labels: bool) -> DataSet:
    """Detect the layout of a folder, the most specific layout first."""
    if packed_folders(path):
        return read_packed(path)
    if index_lists(path):
        return read_index_lists(path)
    if prepared_folders(path):
        return read_tfds(path, image_column, label_column)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return open_saved(path, image_column, label_column)
    for suffix in ("parquet", "tar"):
        files = sorted(
            file
            for pattern in (f"*.{suffix}", f"*/*.{suffix}")
            for file in path.glob(pattern)
            if not folder.is_junk(file.name) and not folder.is_junk(file.parent.name)
        )
        if files and suffix == "parquet":
            return read_parquet(path, files, image_column, label_column)
        if files:
            return read_shards(path, files)
    tables = [file for file in sorted(path.iterdir()) if file.suffix.lower() in table.SUFFIXES]
    if tables and not folder.is_class_tree(path):
        return table.read_tables(path, tables, image_column, label_column)
    plain = None if labels else folder.read_unlabelled(path)
    return plain or folder.read_folder(path)
