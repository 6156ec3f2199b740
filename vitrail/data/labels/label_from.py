"""Where the labels of images are written if not in the names of folders: `Data.label_from`, "KIND: ARGUMENT".

- "name: PATTERN": in the names of files; the one group ( ) of the pattern is the class.
- "json: KEY": in a JSON file beside each image, for photo.jpg in photo.json or photo.jpg.json. A dotted key leads into
  objects ("annotation.species"). Of a list of objects, the value of each is a label ("shapes.label", as LabelMe
  writes); a number chooses one item ("objects.0.name").
- "list: FILE": in a list without a header, a path and a label in each line. Between them stand spaces ("val/1.jpg 3",
  as in lists of ImageNet), a tab, or a comma.
- "table: FILE ID -> LABEL": in a table with a header, where ID and LABEL are columns. Without columns ("table:
  labels.csv"), those with usual names are used, and columns of zeros and ones may be classes.

Each row of a list or a table is assigned to the image whose path ends in its id.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.image_names import SUFFIXES, is_image_name
from vitrail.data.item import Findings
from vitrail.data.labels.cells import MISSING, names_in, read_cells, unsplit
from vitrail.data.labels.numbers import numbers_text
from vitrail.data.labels.sets import distinct_names
from vitrail.data.settings import Columns
from vitrail.data.sources.table import IMAGE_COLUMNS, LABEL_COLUMNS, TABLE_SUFFIXES, read_rows, read_table
from vitrail.data.spreadsheet import PREDICTIONS
from vitrail.errors import DataError, UsageError, did_you_mean
from vitrail.files import open_regular, read_json, regular_descriptor
from vitrail.words import listing, shown

FoundLabel = str | tuple[str, ...] | None
"""Label of an image: text, several names, or None if there is none."""


_SMALL = 64 << 20
"""Largest number of bytes of a file that is read for a proposal."""


class ImageFiles(NamedTuple):
    """The image files of a folder."""

    folder: Path
    paths: list[str]
    """Path of each image below `folder`, with "/"."""


class Kind(NamedTuple):
    """A kind of place."""

    form: str
    """How it is written, for messages: "name: PATTERN"."""
    read: Callable[[str, ImageFiles, Columns, Findings], list[FoundLabel]]
    """Function of the argument that returns the label of each image. Raises UsageError and DataError."""
    propose: Callable[[ImageFiles], str | None]
    """Function that returns the argument that seems to fit these images; None if none does."""


def read_texts(
    cells: Sequence[FoundLabel],
    columns: Columns,
    where: Callable[[int], str],
    findings: Findings,
    missing: Collection[str] = MISSING,
) -> list[FoundLabel]:
    """Return labels whose texts are read as those of tables: a name, or several names (`read_cells`).

    where: Number of a label -> its place, for messages. Raises DataError for a text that stands for a `missing` label
    (in lower case), unless an image may have no label.
    """
    texts = [number for number, cell in enumerate(cells) if isinstance(cell, str)]
    read = read_cells([str(cells[number]) for number in texts], columns, lambda number: where(texts[number]))
    findings.warnings += unsplit(read, columns)
    found = list(cells)
    for number, names in zip(texts, read, strict=True):
        if isinstance(names, str) and names.strip().lower() in missing:
            raise DataError(
                f"{where(number)}: no label (found {names!r}). Give it a label or remove it. If images have several "
                "labels or none, set data.labels_per_image to 'several'"
            )
        found[number] = names.strip() if isinstance(names, str) else names
    return found


def find_file(name: str, folder: Path, what: str) -> Path:
    """Return the file `name`, looked for in the folder of the images, then in the current folder. Raises DataError."""
    places = [folder / Path(name).expanduser(), Path(name).expanduser()]
    for place in places:
        if place.is_file():
            return place
    near = did_you_mean(name, [one.name for one in folder.iterdir()] if folder.is_dir() else [])
    looked = " and ".join(dict.fromkeys(str(place.absolute()) for place in places))
    raise DataError(f"there is no {what} {name!r} (data.label_from): looked for {looked}.{near}")


def _first_near(
    images: ImageFiles, endings: tuple[str, ...], fitting: Callable[[Path, Lookup], str | None]
) -> str | None:
    """Return the first fitting small file in the folder of the images, or in the folder above: the argument for it.

    fitting: Function of a file that returns what follows its path in the argument; None if the file does not fit.
    """
    lookup = Lookup(images)
    for place in (images.folder, Path(os.path.abspath(images.folder)).parent):
        for file in sorted(place.iterdir()):
            try:
                small = file.suffix.lower() in endings and file.is_file() and file.stat().st_size <= _SMALL
                if small and (rest := fitting(file, lookup)) is not None:
                    return os.path.relpath(file, images.folder) + rest
            except (DataError, OSError):
                continue
    return None


class LabelRow(NamedTuple):
    """One row of a table or a list."""

    where: str
    """"row 3", "line 3"."""
    id: str
    """Path of the image or its end, with or without the extension."""
    label: str | tuple[str, ...]


class Lookup:
    """Images by the ends of their paths."""

    def __init__(self, images: ImageFiles) -> None:
        self._images = images
        self._above = Path(os.path.abspath(images.folder)).parts
        self._named: dict[str, list[int]] = defaultdict(list)
        self._stems: dict[str, list[int]] = defaultdict(list)
        for number, path in enumerate(images.paths):
            name = os.path.basename(path)
            self._named[name].append(number)
            self._stems[os.path.splitext(name)[0]].append(number)

    def images_named(self, id: str) -> list[int]:
        """Return the images whose path ends in `id`, with or without the extension; if it is a whole path below the
        folder, that image alone."""
        parts = tuple(part for part in id.replace("\\", "/").split("/") if part not in ("", "."))
        if not parts:
            return []
        for candidates in (self._named, self._stems):
            found = [
                number
                for number in candidates.get(parts[-1], ())
                if (*self._above, *self._images.paths[number].split("/"))[-len(parts) : -1] == parts[:-1]
            ]
            whole = [number for number in found if self._images.paths[number].count("/") == len(parts) - 1]
            if found:
                return whole if len(whole) == 1 else found
        return []


def assigned(
    rows: Sequence[LabelRow], file: Path, images: ImageFiles, columns: Columns, findings: Findings
) -> list[FoundLabel]:
    """Return the label of each image by the rows of `file`; None for an image that no row names.

    A row without an image is dropped, with its place. Several rows of one image are several labels, if images have
    several labels by `columns`. Raises DataError for a row without an id or a label, an id that fits several images, an
    image with two labels, and if no row has an image.
    """
    read = read_texts([row.label for row in rows], columns, lambda number: f"{file}, {rows[number].where}", findings)
    lookup = Lookup(images)
    labels: list[FoundLabel] = [None] * len(images.paths)
    first: dict[int, str] = {}
    for row, label in zip(rows, read, strict=True):
        assert label is not None
        number = _image_of(row, file, lookup, images)
        if number is None:
            findings.drop(row.id, f"{file.name}, {row.where}: no such image in {images.folder}")
        elif number not in first:
            labels[number], first[number] = label, row.where
        elif columns.per_image == "several":
            both = (labels[number], label)
            labels[number] = tuple(chain.from_iterable([one] if isinstance(one, str) else one or () for one in both))
        elif labels[number] == label:
            findings.drop(row.id, f"{file.name}, {row.where}: listed before, in {first[number]}")
        else:
            raise DataError(
                f"{file}, {row.where}: {row.id!r} has the label {shown(label)}, and {shown(labels[number])} in "
                f"{first[number]}. Remove one of the rows. If images have several labels, set data.labels_per_image to "
                "'several'"
            )
    if not first:
        ids = f"its ids are {listing([row.id for row in rows], 3)}" if rows else "it has no rows"
        raise DataError(
            f"{file} names none of the {len(labels):,} images in {images.folder}: {ids}, and the images are "
            f"{listing(images.paths, 3)}. An id is a path or a name, with or without the extension"
        )
    return labels


def _image_of(row: LabelRow, file: Path, lookup: Lookup, images: ImageFiles) -> int | None:
    if not row.id:
        raise DataError(f"{file}, {row.where}: no id, for the label {shown(row.label)}. Add the id or remove the row")
    found = lookup.images_named(row.id)
    if len(found) > 1:
        raise DataError(
            f"{file}, {row.where}: {row.id!r} fits {len(found)} images: "
            f"{listing(sorted(images.paths[number] for number in found), 3)}. Write the path below {images.folder}"
        )
    return found[0] if found else None


_USUAL = (
    r"^(.+)_[0-9]+\.",  # Abyssinian_100.jpg, n01440764_10026.JPEG
    r"^(.+)-[0-9]+\.",
    r"^(.+)\.[0-9]+\.",  # cat.0.jpg
    r"^(.+) \([0-9]+\)\.",  # cat (12).jpg, as a file manager renames
    r"^(.*[^0-9 ]) ?[0-9]+\.",  # cat001.jpg, cat 1.jpg
    r"^[0-9]+[-_. ](.+)\.",  # 001_cat.jpg
    r"^([^_]+)_",  # cat_a81bc81b.jpg
    r"^([^-]+)-",
    r"_([^_]+)\.[^.]+$",  # holiday_a81bc81b_cat.jpg
    r"-([^-]+)\.[^.]+$",
)
"""Patterns that are tried on the names of images without labels, the most usual first."""


def _read_names(argument: str, images: ImageFiles, columns: Columns, findings: Findings) -> list[FoundLabel]:
    pattern = compiled(argument, "data.label_from", "the class, as in 'name: ^(.+)_[0-9]+'")
    cells = [text_in_name(pattern, path) for path in images.paths]
    wrong = [path for path, cell in zip(images.paths, cells, strict=True) if cell is None]
    if wrong:
        fitting = _propose_names(images)
        better = f"The pattern {fitting!r} does. " if fitting and fitting != argument else ""
        raise DataError(
            f"the pattern {argument!r} (data.label_from) finds no label in {len(wrong):,} of {len(cells):,} names of "
            f"images in {images.folder}: {listing(wrong, 3)}. The pattern must match every name. {better}Change the "
            "pattern, or move these images to another folder"
        )
    return read_texts(cells, columns, lambda number: images.paths[number], findings, missing=())


def compiled(argument: str, setting: str, around: str) -> re.Pattern[str]:
    """Return the pattern of a `setting`, whose one group ( ) stands around something, with an example.

    Raises UsageError for another number of groups, and for what is no pattern.
    """
    try:
        pattern = re.compile(argument)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{setting}: {shown(argument)} is not a regular expression ({error}). Valid is, for example, "
            f"{around.rpartition(' as in ')[2]}"
        ) from error
    if pattern.groups != 1:
        raise UsageError(
            f"{setting}: the pattern {shown(argument)} has {pattern.groups} groups ( ), and exactly one must stand "
            f"around {around}. Other parentheses are written (?: )"
        )
    return pattern


def text_in_name(pattern: re.Pattern[str], path: str) -> str | None:
    """Return what the group of a pattern finds in the name of a file; None if it finds nothing, or no character."""
    match = pattern.search(os.path.basename(path))
    return match[1] or None if match else None


def _propose_names(images: ImageFiles) -> str | None:
    """Return the first usual pattern that divides all names into classes of two images or more on average."""
    for argument in _USUAL:
        pattern = re.compile(argument)
        labels = {text_in_name(pattern, path) for path in images.paths}
        if None not in labels and 2 <= len(labels) <= len(images.paths) / 2:
            return argument
    return None


_DEEPEST = 3
"""Maximum number of names in a key that is proposed."""


def _read_json(argument: str, images: ImageFiles, columns: Columns, findings: Findings) -> list[FoundLabel]:
    if not argument:
        raise UsageError("data.label_from names no key. Valid is, for example, 'json: annotation.species'")
    files = [_beside(images, path) for path in images.paths]
    if not any(files):
        raise DataError(
            f"none of the {len(files):,} images in {images.folder} has a JSON file beside it (data.label_from): the "
            f"labels of {images.paths[0]} would stand in {os.path.splitext(images.paths[0])[0]}.json"
        )
    cells = [None if file is None else _label_in_json(file, argument, columns) for file in files]
    return read_texts(cells, columns, lambda number: str(files[number]), findings, missing=("",))


def _beside(images: ImageFiles, path: str) -> Path | None:
    image = images.folder / path
    return next((file for file in (Path(f"{image}.json"), image.with_suffix(".json")) if file.is_file()), None)


def _label_in_json(file: Path, key: str, columns: Columns) -> str | tuple[str, ...]:
    """Return the text or the names at a key of a JSON file; numbers as a text. Raises DataError."""
    value = _at(read_json(file, DataError), key, str(file))
    where = f"{file}, {key!r}"
    if columns.per_image == "numbers" and (text := numbers_text(value)) is not None:
        return text
    if isinstance(value, list):
        return names_in(value, where)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{where}: a label is {shown(value)}; valid are names, whole numbers, and lists of these")
    return names_in([value], where)[0] if value != "" else ""


def _at(value: Any, key: str, where: str) -> Any:
    """Return the value at a dotted key; of a list without a number in the key, the list of the values in its items."""
    if not key:
        return value
    if isinstance(value, dict) and key in value:  # also a key that contains a dot
        return value[key]
    first, _, rest = key.partition(".")
    if isinstance(value, dict) and first in value:
        return _at(value[first], rest, where)
    if isinstance(value, list) and first.isdecimal() and len(first) < 10 and int(first) < len(value):
        return _at(value[int(first)], rest, where)
    if isinstance(value, list) and not first.isdecimal():
        return [_at(item, key, where) for item in value]
    names = list(value) if isinstance(value, dict) else []
    there = f"its keys are {listing(names)}.{did_you_mean(first, names)}" if names else f"there is {shown(value)}"
    raise DataError(f"{where} has no key {first!r} (data.label_from): {there}")


def _propose_json(images: ImageFiles) -> str | None:
    """Return the first key of the first JSON file whose last name is usual for a label."""
    file = next(filter(None, (_beside(images, path) for path in images.paths)), None)
    try:
        keys = [] if file is None else list(_keys(read_json(file, DataError)))
    except DataError:
        return None
    return next((key for key in keys if key.rpartition(".")[2].lower() in LABEL_COLUMNS), None)


def _keys(value: Any, depth: int = 1) -> Iterator[str]:
    """Yield the dotted keys of an object, and of the first item of a list."""
    value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, dict) or depth > _DEEPEST:
        return
    for name, inner in value.items():
        yield name
        yield from (f"{name}.{key}" for key in _keys(inner, depth + 1))


ENDINGS = (".txt", ".lst", ".list", ".csv", ".tsv")
"""Endings of the names of files that may be lists."""
_LOOKED_AT = 4096
"""Number of bytes of a file that decide whether it is a list."""
_ROWS = 100
"""Number of rows that decide whether a list names some images."""
_IMAGE_THEN_SPACE = re.compile(rf"(.*(?:{'|'.join(map(re.escape, sorted(SUFFIXES)))}))\s+(\S.*)", re.IGNORECASE)


def is_list_file(file: Path) -> bool:
    """Return whether a file begins with a line of a path and a label, whose path is that of an image."""
    try:
        with open_regular(file) as stream:
            first = stream.read(_LOOKED_AT).decode("utf-8", "replace").lstrip("\ufeff").split("\n")[0].strip()
    except OSError:
        return False
    found = _separate([first])(first)
    return found is not None and is_image_name(found[0])


def list_rows(file: Path) -> list[LabelRow]:
    """Return the rows of a list; the label is text. Raises DataError for a line without a path and a label."""
    try:
        with open(regular_descriptor(file), newline="", encoding="utf-8-sig") as stream:
            lines = stream.read().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error
    filled = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    separate = _separate([line for _, line in filled])
    rows = []
    for number, line in filled:
        found = separate(line)
        if found is None:
            raise DataError(
                f"{file}, line {number}: expected a path and a label, found {shown(line)}. Write PATH LABEL"
            )
        rows.append(LabelRow(f"line {number}", found[0].strip(), found[1].strip()))
    return rows


Separate = Callable[[str], tuple[str, str] | None]


def _separate(lines: list[str]) -> Separate:
    """Return the function from a line to (path, label), alike for all lines; it returns None for another line."""
    for separate in (_by_tab, _by_image, _by_comma):
        if lines and all(separate(line) is not None for line in lines):
            return separate
    return _by_space


def _by_tab(line: str) -> tuple[str, str] | None:
    return _pair(line.split("\t"))


def _by_image(line: str) -> tuple[str, str] | None:
    """Separate at the space behind the name of an image: both the path and the label may contain spaces."""
    match = _IMAGE_THEN_SPACE.fullmatch(line)
    return (match[1], match[2]) if match and "\t" not in line else None


def _by_comma(line: str) -> tuple[str, str] | None:
    try:
        return _pair(next(csv.reader([line])))
    except (csv.Error, StopIteration):
        return None


def _by_space(line: str) -> tuple[str, str] | None:
    return _pair(line.rsplit(maxsplit=1))


def _pair(cells: list[str]) -> tuple[str, str] | None:
    return (cells[0], cells[1]) if len(cells) == 2 else None


def _read_list(argument: str, images: ImageFiles, columns: Columns, findings: Findings) -> list[FoundLabel]:
    file = find_file(argument, images.folder, "list")
    return assigned(list_rows(file), file, images, columns, findings)


def _propose_list(images: ImageFiles) -> str | None:
    """Return the list in the folder of the images, or in the folder above, that names some of them."""

    def fitting(file: Path, lookup: Lookup) -> str | None:
        names = is_list_file(file) and any(lookup.images_named(row.id) for row in list_rows(file)[:_ROWS])
        return "" if names else None

    return _first_near(images, ENDINGS, fitting)


ID_COLUMNS = (*IMAGE_COLUMNS, "id", "image_id", "image_name", "id_code", "name")
"""Usual names of the column of ids."""
_FORM = re.compile(r"(?P<file>.+?\.(?:csv|tsv))(?:\s+(?P<id>.+?)\s*->\s*(?P<label>.+))?", re.IGNORECASE)
_TABLE_ROWS = 200
"""Number of rows that decide which column holds the ids."""


def _read_table(argument: str, images: ImageFiles, columns: Columns, findings: Findings) -> list[FoundLabel]:
    match = _FORM.fullmatch(argument)
    if match is None:
        raise UsageError(
            f"data.label_from: {shown(argument)} is not a .csv or .tsv file with two columns. Valid is, for example, "
            "'table: labels.csv id -> breed'"
        )
    file = find_file(match["file"], images.folder, "table")
    if match["id"]:
        columns = columns._replace(image=match["id"], label=match["label"], classes=None)
    table = read_table(file, columns._replace(group=None), findings, ID_COLUMNS)
    if any(table.splits):
        findings.warnings.append(
            f"column 'split' of {file.name} is not used: data.label_from reads labels alone, and splits are folders. "
            f"Give {file} as the data set to use both"
        )
    rows = [LabelRow(*row) for row in zip(table.rows, table.paths, table.labels, strict=True)]
    return assigned(rows, file, images, columns, findings)


def _propose_table(images: ImageFiles) -> str | None:
    """Return the table in the folder of the images, or in the folder above, one of whose columns names them."""
    return _first_near(images, TABLE_SUFFIXES, _columns)


def _columns(file: Path, lookup: Lookup) -> str | None:
    """Return " ID -> LABEL" of a table; None if no column names images, or if none divides them."""
    header, rows = read_rows(file)
    if {*PREDICTIONS} <= {*header}:  # guesses of a network are no labels
        return None
    cells = [row for _, row in rows if len(row) == len(header)]
    some = cells[:_TABLE_ROWS]
    hits = [sum(bool(lookup.images_named(row[place].strip())) for row in some) for place in range(len(header))]
    if not some or max(hits) < len(some) / 2:
        return None
    id = hits.index(max(hits))
    divide = [
        place
        for place in range(len(header))
        if place != id and 2 <= len({row[place].strip() for row in cells}) <= len(cells) / 2
    ]
    divide.sort(key=lambda place: header[place].strip().lower() not in LABEL_COLUMNS)
    return f" {header[id]} -> {header[divide[0]]}" if divide else None


KINDS: dict[str, Kind] = {
    "name": Kind("name: PATTERN", _read_names, _propose_names),
    "list": Kind("list: FILE", _read_list, _propose_list),
    "table": Kind("table: FILE ID -> LABEL", _read_table, _propose_table),
    "json": Kind("json: KEY", _read_json, _propose_json),
}
FORMS = ", ".join(repr(kind.form) for kind in KINDS.values())


def labels_of(images: ImageFiles, label_from: str, columns: Columns, findings: Findings) -> list[FoundLabel]:
    """Return the label of each image by the setting `label_from`. Raises UsageError and DataError."""
    name, colon, argument = label_from.partition(":")
    kind = KINDS.get(name.strip().lower())
    if kind is None or not colon:
        near = did_you_mean(name.strip().lower(), KINDS) if colon else ""
        raise UsageError(f"data.label_from is {shown(label_from)}; valid are {FORMS}.{near}")
    return kind.read(argument.strip(), images, columns, findings)


def advice(images: ImageFiles) -> str:
    """Return the sentence on how to say where the labels of these images are, with the setting that seems to fit.

    A list, a table or JSON files are there on purpose, so they come before names, which may only look like labels.
    """
    for name in ("table", "list", "json", "name"):
        try:
            argument = KINDS[name].propose(images) if images.paths else None
            cells = labels_of(images, f"{name}: {argument}", Columns(), Findings("")) if argument else []
        except (DataError, UsageError, OSError):
            continue
        classes = sorted(distinct_names(cells))
        if len(classes) > 1:
            flag = f"--data.label-from {shlex.quote(f'{name}: {argument}')}"
            return f"The labels seem to be elsewhere: add {flag} ({len(classes):,} classes: {listing(classes, 5)})"
    return (
        "If the labels are in the names of the images, in a list, in a table or in JSON files, say so with "
        f"--data.label-from and one of {FORMS}"
    )
