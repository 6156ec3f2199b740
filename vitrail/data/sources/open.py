"""Open any data set from one argument: `open_data` detects the layout of a path or name and opens it.

Classes are matched by name, never by position. Everything that was left out is listed in `Splits.report`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from pathlib import Path

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.benchmarks.vtab_source import PREFIX, read_task
from vitrail.data.image_names import FORMATS, is_readable, missing_packages
from vitrail.data.item import DataSet, IndexedSource, Subset, split_title
from vitrail.data.labels.answers import read_answers
from vitrail.data.labels.kind import alike_classes, of_one_kind
from vitrail.data.labels.label_from import ENDINGS, is_list_file
from vitrail.data.labels.sets import known
from vitrail.data.masks import masks_beside
from vitrail.data.roles import Splits, named_split, of_role, split_data_set
from vitrail.data.settings import Columns, Data
from vitrail.data.sources import table
from vitrail.data.sources.arrays import read_digits, read_npz
from vitrail.data.sources.arrow import hub_cached, open_hub, read_parquet
from vitrail.data.sources.folder import FileSource, has_image, is_class_tree
from vitrail.data.sources.indexed import data_set
from vitrail.data.sources.layouts import open_folder
from vitrail.data.sources.lists import read_index_lists, read_list, refers_to, select_images
from vitrail.data.sources.remote import find_remote
from vitrail.data.sources.shard_files import is_address
from vitrail.data.sources.shards import read_shards
from vitrail.errors import DataError, did_you_mean
from vitrail.import_path import is_own

log = logging.getLogger("vitrail")

_HUB = "hf://datasets/"
_KINDS = (
    "a folder of class folders, a CSV, a list of paths and labels, parquet files, tar shards, packed shards, an .npz, "
    "a folder with index lists, a folder prepared by TensorFlow Datasets, vtab:TASK:DIR, a hub data set on disk "
    f"or {_HUB}owner/name, packed or tar shards at an address such as s3://bucket/folder, 'digits', "
    f"or one of {', '.join(CATALOG)}"
)


def open_data(
    data: Data | str | Path, *, seed: int = 0, labels: bool = True, known_classes: Sequence[str] = ()
) -> Splits:
    """Open `data.path` and split it for training. `seed` draws the held-out images.

    known_classes: See `split_data_set`.

    If `labels` is False, images may be unlabelled, and a folder needs no class folders. Raises DataError (missing or
    empty data, a single class, unknown labels, classes that training lacks) and UsageError (no such split or column).
    """
    if not isinstance(data, Data):
        data = Data(path=str(data))
    return split_data_set(open_data_set(data, labels=labels), data, seed, labels=labels, known_classes=known_classes)


class OpenedData:
    """The data of a command, which are opened only once, also if they are split in several ways."""

    def __init__(self) -> None:
        self._found: dict[object, DataSet] = {}
        self._splits: dict[object, Splits] = {}

    def splits(self, data: Data, seed: int, labels: bool = True, known_classes: Sequence[str] = ()) -> Splits:
        """Return what `open_data` returns for these arguments. Raises DataError and UsageError."""
        place = data if is_own(type(data)) else (data.path, data.columns), labels
        if place not in self._found:
            self._found[place] = open_data_set(data, labels=labels)
        key = (data, seed, labels, tuple(known_classes))
        if key not in self._splits:
            found = self._found[place]
            findings = replace(found.findings, warnings=[*found.findings.warnings])  # splitting adds warnings
            opened = replace(found, findings=findings)
            self._splits[key] = split_data_set(opened, data, seed, labels=labels, known_classes=known_classes)
        return self._splits[key]


def open_split(
    data: Data | str | Path, split: str | None = None, class_names: list[str] | None = None
) -> IndexedSource:
    """Open one split for evaluation. Its labels are indices into `class_names` (a model's), matched by name.

    Default for `split`: the test split if there is one, else validation, else the only split. Raises DataError, with
    a list, for classes that `class_names` lacks, and UsageError for a split that does not exist."""
    data = data if isinstance(data, Data) else Data(path=str(data))
    found = open_and_warn(data)
    if split is not None:
        name = named_split(found, split, data.path)
    else:
        named = [*of_role(found, "test"), *of_role(found, "validation"), *found.splits]
        name = next(name for name in named if len(named) == 1 or known(found.splits[name].labels).any())
    return found.splits[name] if class_names is None else Subset(found.splits[name], class_names=class_names)


def open_path(path: str, columns: Columns = Columns(), *, labels: bool = True) -> DataSet:
    """Return the data set at `path`: its splits by their own names, and what was left out.

    If `labels` is False, a folder of images without class folders is accepted. Raises DataError if there is no
    readable data set: the message says where it was looked for and what would be valid. A path such as
    'photos/*/*.jpg' is the data set photos/, of which the images are used that fit the pattern.
    """
    if has_magic(path) and not is_address(path) and not Path(path).expanduser().exists():
        parts = Path(path).parts
        first = next(number for number, part in enumerate(parts) if has_magic(part))
        path, pattern = str(Path(*parts[:first])), "/".join(parts[first:])
        columns = columns._replace(selection=columns.selection._replace(given=pattern))
    try:
        found = _read(path, columns, labels)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error} ({error.filename})") from error
    return with_labels_of_one_kind(path, found, columns)


def open_data_set(data: Data, *, labels: bool = True) -> DataSet:
    """Return the data set that `data` describes, of the user's own class too. Raises DataError as `open_path` does."""
    found = data_set(data.find(labels=labels), data.columns, bands=data.banded)
    return with_labels_of_one_kind(data.path, found, data.columns) if is_own(type(data)) else found


def open_whole(data: Data, *, labels: bool = True) -> DataSet:
    """Return what `open_data_set` returns. Raises as it does, and DataError with `data.strict` for a defect.

    This is for a caller that does not split the data, which may be strict about more (`split_data_set`).
    """
    found = open_data_set(data, labels=labels)
    if data.strict:
        found.findings.require_whole(data.path)
    return found


def open_and_warn(data: Data, *, labels: bool = True) -> DataSet:
    """Return what `open_whole` returns, and log its warnings, for a caller that does not show the findings."""
    found = open_whole(data, labels=labels)
    for line in found.findings.notes:
        log.info("%s", line)
    for line in found.findings.warnings:
        log.warning("%s", line)
    return found


def open_to_predict(data: Data) -> DataSet:
    """Return what `open_whole` returns, for a caller that uses labels only where there are any; log what was left out.

    A folder that holds images itself, or far below, is opened without labels, with every image.
    """
    place = Path(data.path).expanduser()
    unlabelled = place.is_dir() and data.label_from is None and has_image(place) and not is_class_tree(place)
    try:
        found = open_whole(data, labels=not unlabelled)
    except DataError as error:
        try:
            found = open_whole(data, labels=False)
        except DataError:
            raise error from None
    for line in found.findings.lines():
        log.warning("%s", line)
    return found


def with_labels_of_one_kind(path: str, found: DataSet, columns: Columns) -> DataSet:
    """Return the data set without splits that hold no image, with labels of one kind (`of_one_kind`).

    Raises DataError if no split is left, and for images that cannot be read without a package."""
    there = found.count
    found = select_images(found, columns.selection)
    kept = {name: source for name, source in found.splits.items() if len(source)}
    if not kept and there:
        raise DataError(f"none of the images of {path} is left by {columns.selection}. Change or remove a pattern")
    if not kept:
        raise DataError(f"{path} ({found.findings.kind}) holds no images. Valid are {_KINDS}")
    _refuse_unreadable(path, kept)
    findings = found.findings
    listed = findings.kind == "list"  # the data set that it refers to was read here
    kept = kept if listed or columns.answers is None else read_answers(path, kept, columns)
    warnings = [] if listed else [*masks_beside(kept.values())]
    if findings.outside and not listed:
        what = "image lies" if findings.outside == 1 else "images lie"
        warnings.append(
            f"{findings.outside:,} {what} outside {path}, through links or paths that leave it, the first "
            f"{findings.first_outside}. They are used, but `vitrail data pack` does not copy them unasked"
        )
    warnings += [] if listed else alike_classes(kept.values())
    warnings += [f"{split_title(name)} holds no images: left out" for name in found.splits if name not in kept]
    findings.warnings += warnings
    return of_one_kind(DataSet(kept, findings), columns)


def _refuse_unreadable(path: str, splits: Mapping[str, IndexedSource]) -> None:
    """Raise DataError, before any work, for files whose format needs a package that is not installed."""
    if all(map(is_readable, FORMATS.values())):
        return
    files = [source for source in splits.values() if isinstance(source, FileSource)]
    endings = Counter(os.path.splitext(name)[1].lower() for source in files for name in source.names())
    wrong = {name: count for name, count in endings.items() if name in FORMATS and not is_readable(FORMATS[name])}
    if wrong:
        counts = " and ".join(f"{count:,} {ending}" for ending, count in wrong.items())
        patterns = " ".join(f"--data.exclude '*{ending}'" for ending in wrong)
        without = f", or leave them out: {patterns}" if sum(wrong.values()) < endings.total() else ""
        raise DataError(f"{counts} images of {path} cannot be read. {'. '.join(missing_packages(wrong))}{without}")


def _read(path: str, columns: Columns, labels: bool) -> DataSet:
    """Return the data set at `path` as its reader gives it."""
    place = Path(path).expanduser()
    if columns.label_from is not None:
        _require_folder(path, place, columns.label_from)
    if path == "digits":
        return read_digits()
    if is_address(path) and not path.startswith(_HUB):
        return find_remote(path)
    if path and place.is_dir():
        return open_folder(place, columns, labels)
    if place.is_file():
        return _read_file(place, columns)
    if path.startswith(PREFIX):
        return read_task(path, open_path)
    if path in CATALOG:
        entry = CATALOG[path]
        if entry.hub is None:
            raise DataError(
                f"{path} is not on the hub. Download it and give its folder instead. It comes from: {entry.source}"
            )
        image, label = columns.image or entry.image_column, columns.label or entry.label_column
        return open_hub(entry.hub, columns._replace(image=image, label=label))
    if path.startswith(_HUB):
        return open_hub(path.removeprefix(_HUB), columns)
    if hub_cached(path):
        return open_hub(path, columns)
    raise _missing(path, place)


def _require_folder(path: str, place: Path, label_from: str) -> None:
    """Raise DataError for data whose labels are not looked for elsewhere. A missing path is another error."""
    of_list = place.is_file() and place.suffix.lower() in table.TABLE_SUFFIXES and refers_to(place) is not None
    if not place.is_dir() and not of_list and (place.exists() or path == "digits" or path in CATALOG or ":" in path):
        raise DataError(
            f"data.label_from ({label_from!r}) is valid for a folder of images only, and {path} is something else: "
            "remove it. Columns of a table are named by data.image_column and data.label_column"
        )


def _missing(path: str, place: Path) -> DataError:
    """Return the error for a path without data: how far the path exists, and similar names. Needs no network."""
    if path and place.exists():
        return DataError(
            f"no data at {place.absolute()}: it is neither a folder nor a regular file. Valid are {_KINDS}"
        )
    if place.is_symlink():
        return DataError(f"no data at {path!r}: it is a link to {os.readlink(place)}, where nothing is")
    parent = next((p for p in place.absolute().parents if p.is_dir()), Path("/"))
    try:
        missing = place.absolute().relative_to(parent).parts[0]
        known_names = [*CATALOG, "digits"] if len(Path(path).parts) == 1 else []
        near = did_you_mean(missing, {*os.listdir(parent), *known_names} - {missing})
    except OSError:
        near = ""
    hub = f" For a data set of the hub write {_HUB}{path}." if path.count("/") == 1 and path[0] not in "./~" else ""
    return DataError(
        f"no data at {path!r}: looked for {place.absolute()} (the path exists up to {parent})."
        f"{near}{hub} Valid are {_KINDS}"
    )


def _read_file(path: Path, columns: Columns) -> DataSet:
    suffix = path.suffix.lower()
    if suffix in ENDINGS and is_list_file(path):
        return read_index_lists(path.parent, {"": path}, columns)
    if suffix in table.TABLE_SUFFIXES and (listed := refers_to(path)) is not None:
        try:
            selection = columns.selection._replace(lists=())  # they name images of the list
            label_from = listed.label_from or columns.label_from
            found = open_path(listed.data, columns._replace(label_from=label_from, selection=selection))
        except DataError as error:
            raise DataError(f"{path} lists images of {listed.data}, which cannot be opened: {error}") from error
        return read_list(path, found)
    if suffix in table.TABLE_SUFFIXES:
        return table.read_tables(path, [path], columns)
    if suffix == ".parquet":
        return read_parquet(path, [path], columns)
    if suffix == ".npz":
        return read_npz(path, columns)
    if suffix == ".tar":
        return read_shards(path, [path])
    raise DataError(f"{path} is a file of no known kind. Valid are {_KINDS}")
