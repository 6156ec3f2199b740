"""The image files that paths name: files, folders and patterns, as predictions and features take them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, takewhile
from pathlib import Path

from vitrail.data.image_names import KINDS, images_among, in_junk, is_junk, other_files
from vitrail.data.item import SYSTEM_FILE, Findings
from vitrail.data.settings import ALL, Selection
from vitrail.errors import DataError, UsageError
from vitrail.words import listing


def find_images(
    paths: Iterable[str | Path], selection: Selection = ALL, findings: Findings | None = None
) -> Iterator[Path]:
    """Yield the files of `paths`: files, folders (all images below them) and patterns such as "photos/**/*.jpg".

    Only files that `selection` leaves are among them. `findings` counts what is ignored. Raises DataError if there is
    no file.

    In folders and patterns, hidden files and files without an image suffix are skipped. A file that is itself in
    `paths` is always yielded, even if it is missing, and its row then gives the reason.
    """
    named = [Path(path).expanduser() for path in paths]
    found = [(path, [path] if path.exists() else sorted(glob.glob(str(path), recursive=True))) for path in named]
    if not any(matches for _, matches in found):
        what = ", ".join(str(path) for path in named[:3]) or "no path"
        raise DataError(
            f"nothing to predict at {what}: no file or folder has this name or fits this pattern (looked from "
            f"{Path.cwd()}). Give image files, folders of images, or a pattern such as 'photos/*.jpg'"
        )
    if selection.lists:
        raise UsageError(
            f"data.exclude {selection.lists[0]!r} is a list of images of a data set, and these are files. Give "
            "patterns, such as '*_mask.png'"
        )
    findings = findings or Findings("files")
    files = (file for file in _expanded(found, findings) if not (selection.patterns and selection.reason(str(file))))
    first = next(files, None)
    if first is None:
        what = listing([str(path) for path in named], 3, quoted=False)
        if selection.patterns and next(_expanded(found, Findings("files")), None) is not None:
            raise DataError(f"none of the images in {what} is left by {selection}. Change or remove a pattern")
        folders = [path for path in named if path.is_dir()]
        raise DataError(f"no images in {what}{other_files(folders[0]) if folders else ''}")
    return chain([first], files)


def _expanded(found: Iterable[tuple[Path, Sequence[str | Path]]], findings: Findings) -> Iterator[Path]:
    for path, matches in found:
        for match in map(Path, matches or [path]):
            # the user wrote the folders of a pattern up to its first part with a wildcard
            fixed = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
            if match != path and in_junk(match.relative_to(fixed).as_posix()):
                findings.ignore(SYSTEM_FILE, str(match))
            elif match.is_dir():
                yield from _below(match, set(), findings)
            elif match == path or any(is_image(str(match)) for is_image in KINDS):
                yield match


def _below(folder: Path, visited: set[tuple[int, int]], findings: Findings) -> Iterator[Path]:
    """Yield all images below a folder, sorted. A folder that several links lead to is visited once."""
    try:
        names = sorted(os.listdir(folder))
        status = folder.stat()
    except OSError:
        yield folder  # reading it as an image fails with the reason
        return
    if (status.st_dev, status.st_ino) in visited:
        return
    visited.add((status.st_dev, status.st_ino))
    for name in filter(is_junk, names):
        findings.ignore(SYSTEM_FILE, str(folder / name))
    paths = [folder / name for name in names if not is_junk(name)]
    yield from (Path(path) for path in images_among(map(str, paths)) if not os.path.isdir(path))
    for path in paths:
        if path.is_dir():
            yield from _below(path, visited, findings)
