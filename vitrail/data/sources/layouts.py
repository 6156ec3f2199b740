"""Detect the layout of a folder of data.

A folder is what most of it is. If it holds several kinds of data, such as class folders and the archive they came from,
one kind is opened, and a warning names all kinds with their numbers of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.item import DataSet, origin, role_of
from vitrail.data.labels.sets import class_counts
from vitrail.data.masks import are_masked, read_masked, refuse_mask_folders
from vitrail.data.settings import Columns
from vitrail.data.sources import flat, folder, table
from vitrail.data.sources.arrow import open_saved, read_parquet
from vitrail.data.sources.lists import index_lists, read_index_lists
from vitrail.data.sources.shards import packed_folders, read_packed, read_shards
from vitrail.data.sources.tfds import prepared_folders, read_tfds
from vitrail.errors import DataError, UsageError
from vitrail.words import listing

_LISTS = ("csv", "parquet", "lists")
"""Kinds that can name images in separate files of the same folder."""
_OF_PACKED = "shards of packed"
"""Kind of tar shards that stand in an index. They are read only if the index cannot be used."""
_LEVELS, _FOLDERS = 2, 200
"""Levels below a folder in which a data set is looked for, and maximum number of folders of a level."""


class FolderLayout(NamedTuple):
    """One kind of data in a folder."""

    kind: str
    """See `Findings.kind`."""
    what: str
    """Name of the kind, for messages."""
    read: Callable[[], DataSet]


def open_folder(path: Path, columns: Columns, labels: bool) -> DataSet:
    """Open a folder as what most of it is; a warning names the other kinds of data in it. Raises DataError.

    A folder that holds nothing but the data set in a folder one or two levels below is opened as that data set.
    """
    columns = columns._replace(selection=columns.selection._replace(root=str(path)))
    if columns.label_from is not None:
        found = flat.read_labelled(path, columns, labels=labels)
        refuse_mask_folders(path, found)
        return found
    if are_masked(path):
        return read_masked(path, columns, labels=labels)
    layouts = list(_layouts(path, columns, labels))
    if (meant := _meant(path, layouts)) is not None:
        found = open_folder(meant, columns, labels)
        found.findings.warnings.append(f"{path} holds no data set itself: the one in {meant} is used")
        return found
    return _open_layouts(path, layouts)


def _meant(path: Path, layouts: list[FolderLayout]) -> Path | None:
    """Return the one folder one or two levels below that holds a data set; None if `path` does, or if none does.

    Raises DataError that names the folders if there are several.
    """
    if _holds_data(path, layouts) or folder.has_image(path):
        return None
    level = [path]
    for _ in range(_LEVELS):
        level = [child for parent in level for child in folder.folders_in(parent)]
        if len(level) > _FOLDERS:
            return None
        if len(found := [child for child in level if _holds_data(child, _layouts(child, Columns(), True))]) == 1:
            return found[0]
        if found:
            raise DataError(
                f"{path} holds no data set itself, and {len(found)} of the folders below it do: "
                f"{listing(list(map(str, found)), quoted=False)}. Give one of them in its place"
            )
    return None


def _holds_data(path: Path, layouts: Iterable[FolderLayout]) -> bool:
    """Return whether there are class folders in a folder, or data of another kind than images."""
    return folder.is_class_tree(path) or any(layout.kind != "folder" for layout in layouts)


def _open_layouts(path: Path, layouts: list[FolderLayout]) -> DataSet:
    if len(layouts) == 1:
        try:
            return layouts[0].read()
        except DataError as error:
            if layouts[0].kind == "csv" and folder.has_images(path):
                raise DataError(f"{error}. {flat.label_advice(path)}") from error
            raise
    opened: list[tuple[FolderLayout, DataSet]] = []
    failed: list[tuple[FolderLayout, str]] = []
    for layout in layouts:
        if layout.kind == _OF_PACKED and any(one.kind == "packed" for one, _ in opened):
            continue
        try:
            opened.append((layout, layout.read()))
        except (DataError, UsageError, OSError) as error:
            # lists are written by hand to say which images count; columns are named by the user, but of no stray table
            if layout.kind == "lists" or (isinstance(error, UsageError) and layout.kind != "csv"):
                raise
            failed.append((layout, str(error).splitlines()[0]))
    if not opened:
        reasons = "; ".join(f"{layout.what}: {reason}" for layout, reason in failed)
        raise DataError(f"{path} holds {len(layouts)} kinds of data, and none can be used: {reasons}")
    kind, chosen = max(opened, key=lambda layout: _weight(*layout))
    others = [f"{layout.what} ({_size(found)})" for layout, found in opened if found is not chosen]
    others += [f"{layout.what} (which cannot be used: {reason})" for layout, reason in failed if layout.kind != "csv"]
    if others and not (kind.kind in _LISTS and _names_all(chosen, opened, failed)):
        chosen.findings.warnings.append(
            f"{path} holds {1 + len(others)} kinds of data: {kind.what} ({_size(chosen)}), {', '.join(others)}. Only "
            f"{kind.what} are used. To use another kind, move it to a folder of its own"
        )
    return chosen


def _layouts(path: Path, columns: Columns, labels: bool) -> Iterator[FolderLayout]:
    """Yield every kind of data in a folder, the most specific first. Always yields at least one."""
    found: list[FolderLayout] = []
    if packed := packed_folders(path):
        where = "" if "" in packed else f" in {listing(list(packed), 3, quoted=False)}"
        found.append(FolderLayout("packed", f"packed shards{where}", partial(read_packed, packed)))
    if lists := index_lists(path):
        read = partial(read_index_lists, path, lists, columns)
        found.append(FolderLayout("lists", _named("index lists", list(lists.values()), path), read))
    if prepared_folders(path):
        found.append(FolderLayout("tfds", "files of TensorFlow Datasets", partial(read_tfds, path, columns)))
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        found.append(FolderLayout("hub", "files of a saved hub data set", partial(open_saved, path, columns)))
    elif parquet := _files(path, ".parquet"):
        read = partial(read_parquet, path, parquet, columns)
        found.append(FolderLayout("parquet", _named("parquet files", parquet, path), read))
    every, own = _files(path, ".tar"), {file for place in packed.values() for file in place.glob("shard-?????.tar")}
    for kind, indexed in (("shards", False), (_OF_PACKED, True)):
        if tars := [file for file in every if (file in own) == indexed]:
            found.append(FolderLayout(kind, _named("tar shards", tars, path), partial(read_shards, path, tars)))
    tables = [
        file
        for file in sorted(path.iterdir())
        if file.suffix.lower() in table.TABLE_SUFFIXES and not folder.is_junk(file.name) and file.is_file()
    ]
    if tables:
        read = partial(table.read_tables, path, tables, columns)
        found.append(FolderLayout("csv", _named("tables", tables, path), read))
    yield from found
    # tables and lists may name the images of a single folder
    if not found or folder.is_class_tree(path) or (not tables and not lists and folder.has_images(path)):
        what = "class folders" if labels else "image folders"
        yield FolderLayout("folder", what, partial(_read_images, path, labels, columns))


def _files(path: Path, suffix: str) -> list[Path]:
    """Return the files in `path` and in its folders that end in `suffix`, without hidden ones."""
    found = (file for pattern in (f"*{suffix}", f"*/*{suffix}") for file in path.glob(pattern))
    return sorted(
        file
        for file in found
        if not folder.is_junk(file.name) and not folder.is_junk(file.parent.name) and file.is_file()
    )


def _named(what: str, files: list[Path], path: Path) -> str:
    return f"{what} {listing([str(file.relative_to(path)) for file in files], 3, quoted=False)}"


def _read_images(path: Path, labels: bool, columns: Columns) -> DataSet:
    if labels:
        flat.refuse_flat(path)
    elif (plain := flat.read_unlabelled(path, columns.selection)) is not None:
        return plain
    found = folder.read_folder(path, columns.per_image, columns.selection, columns.splits)
    refuse_mask_folders(path, found)
    return found


def _weight(layout: FolderLayout, found: DataSet) -> tuple[bool, bool, int, bool]:
    """Return what decides between kinds: data to train a classifier on, lists by hand, the number of images."""
    trains = any(
        (not name or role_of(name) == "train") and np.count_nonzero(class_counts(source.labels, 0)) > 1
        for name, source in found.splits.items()
    )
    return trains, layout.kind == "lists", found.count, layout.kind == "folder"


def _size(found: DataSet) -> str:
    """Return the numbers of images and classes of a data set in words."""
    classes = {name for source in found.splits.values() for name in source.class_names}
    of = f"of {len(classes):,} class{'es' * (len(classes) != 1)}" if classes else "without labels"
    return f"{found.count:,} image{'s' * (found.count != 1)} {of}"


def _names_all(
    chosen: DataSet, opened: list[tuple[FolderLayout, DataSet]], failed: list[tuple[FolderLayout, str]]
) -> bool:
    """Return whether `chosen` lists the images of the folder, all of them, and nothing else is there."""
    others = [layout for layout, found in opened if found is not chosen] + [layout for layout, _ in failed]
    if [layout.kind for layout in others] != ["folder"]:
        return False
    sources = [source for source in chosen.splits.values() if len(source)]
    in_files = all(isinstance(origin(source, 0)[0], folder.FileSource) for source in sources)
    return in_files and chosen.count >= sum(found.count for _, found in opened if found is not chosen)
