"""Images in separate files at any depth, without class folders: without labels, or with labels from `Data.label_from`.

Folders with train, val or test in their names are splits, if one of them is for training.
"""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path

from vitrail.data.image_names import images_among, is_junk
from vitrail.data.item import DataSet, Findings, IndexedSource, role_of, split_title, split_word
from vitrail.data.labels.label_from import ImageFiles, advice, labels_of
from vitrail.data.labels.sets import named
from vitrail.data.settings import ALL, Columns, Selection
from vitrail.data.sources.folder import (
    EXPECTED,
    FileSource,
    entries,
    file_source,
    folders_in,
    has_image,
    images_in,
    kind_below,
    layout,
    no_images,
    note_others,
)
from vitrail.errors import DataError
from vitrail.words import listing

_DEEPEST = 3
"""Maximum number of folders that hold nothing but the next folder."""
_SAMPLE = 100_000
"""Maximum number of images whose labels are looked for, to write an error."""


def read_unlabelled(path: Path, selection: Selection = ALL) -> DataSet | None:
    """Open a folder of images without class folders, at any depth: all are UNKNOWN.

    Returns None if there are class folders or no images."""
    splits = [folder for folder in folders_in(path) if role_of(folder.name) and layout(folder) == "images"]
    if not any(_trains(folder.name) for folder in splits):
        splits = []
    if not splits and not has_image(path):
        deep = (file for folder in folders_in(path) for file in images_in(folder, "", Findings("folder")))
        if any(layout(folder) != "empty" for folder in folders_in(path)) or next(deep, None) is None:
            return None
    findings = Findings("folder", warnings=["there are no class folders: the images have no labels"])
    parts = {part.name if splits else "": _listed(part, findings, selection) for part in splits or [path]}
    return DataSet(dict(parts), findings)


def read_labelled(path: Path, columns: Columns, *, labels: bool = True) -> DataSet:
    """Open the images at any depth below a folder, with their labels from `columns.label_from`.

    Images without a label are left out with a warning; they stay, as UNKNOWN, if `labels` is False. Raises DataError if
    there is no image or no label, and what reading the labels raises.
    """
    findings = Findings("labelled files")
    root = _first_fork(path)
    parts = _splits(root) or {"": root}
    if "" not in parts:
        note_others(root, list(parts.values()), findings)
    listed = {name: _listed(part, findings, columns.selection) for name, part in parts.items()}
    images = ImageFiles(path, [])
    for name, part in parts.items():
        prefix = "" if part == path else f"{part.relative_to(path).as_posix()}/"
        images.paths.extend(prefix + below for below in listed[name].names())
    if not images.paths:
        raise DataError(no_images(path, columns.selection))
    assert columns.label_from is not None
    cells = labels_of(images, columns.label_from, columns, findings)
    found: dict[str, IndexedSource] = {}
    for name, source in listed.items():
        its, cells = cells[: len(source)], cells[len(source) :]
        rows = [number for number, cell in enumerate(its) if cell is not None or not labels]
        without = [source.id(number) for number, cell in enumerate(its) if cell is None and labels]
        if rows:
            found[name] = source.at(rows, *named([its[number] for number in rows]))
        if rows and without:
            findings.warnings.append(
                f"{len(without):,} of {len(source):,} images of {split_title(name)} have no label: left out, such as "
                f"{listing(without, 3)}"
            )
        elif without:
            findings.warnings.append(f"no image of {split_title(name)} has a label: left out")
    return DataSet(found, findings)


def _listed(path: Path, findings: Findings, selection: Selection) -> FileSource:
    files = images_in(path, "", findings, kind_below(path, selection), selection)
    return file_source(path, [(name, None, file.size) for name, file in files])


def _first_fork(path: Path) -> Path:
    """Return the folder below `path` that holds more than the next folder: archives often hold their folder."""
    for _ in range(_DEEPEST):
        folders = folders_in(path)
        if len(folders) != 1 or has_image(path) or split_word(folders[0].name):
            return path
        path = folders[0]
    return path


def _splits(path: Path) -> dict[str, Path]:
    """Return the folders that are splits, by the word in their names ("train_images" is "train"); {} if none trains."""
    found: dict[str, Path] = {}
    for folder in folders_in(path):
        if (name := split_word(folder.name)) and layout(folder) != "empty":
            found.setdefault(name, folder)
    return found if any(map(_trains, found)) else {}


def refuse_flat(path: Path) -> None:
    """Raise DataError, with advice on where the labels may be, for a folder of images without class folders."""
    folders = [folder for folder in folders_in(path) if layout(folder) != "empty"]
    if not folders and has_image(path):
        count = len(_image_names(path))
        problem = f"{path} holds {count:,} image{'s' * (count != 1)} and no class folder with images"
    else:
        words = [split_word(folder.name) for folder in folders]
        if not all(words) or not any(map(_trains, words)) or any(layout(one) != "images" for one in folders):
            return
        problem = f"{path}: {' and '.join(f'{folder.name}/' for folder in folders)} hold images but no class folders"
    raise DataError(f"{problem}. {label_advice(path)}.\nWithout this setting, {EXPECTED}")


def _trains(word: str) -> bool:
    return role_of(word) == "train"


def label_advice(path: Path) -> str:
    """Return the sentence on where the labels of the images in a folder and in its folders may be."""
    below = (f"{place.name}/{name}" for place in folders_in(path) for name in _image_names(place))
    return advice(ImageFiles(path, list(islice(chain(_image_names(path), below), _SAMPLE))))


def _image_names(folder: Path) -> list[str]:
    paths = (str(folder / name) for name in entries(folder) if not is_junk(name))
    return [Path(path).name for path in images_among(paths)]
