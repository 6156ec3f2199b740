"""What `vitrail data audit | dedup | next` share: lists and contact sheets outside of the data, and JSON of results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.errors import UsageError
from vitrail.files import check_writable, replacing_text
from vitrail.terminal import unreadable_json


def output_files(asked: Mapping[str, Sequence[str | Path | None]], data: list[str]) -> list[Path | None]:
    """Return the paths of the output files, by the ending that each must have.

    Raises UsageError or DataError, before any work, if one is not valid or lies within the data.
    """
    from vitrail.data.cache import refuse_within

    for ending, files in asked.items():
        for file in [Path(file) for file in files if file is not None]:
            refuse_within(file, *data)
            if file.suffix.lower() != ending:
                what = {".csv": "lists are CSV files", ".png": "contact sheets are PNG files"}[ending]
                raise UsageError(f"{file}: {what}, so the name must end in {ending}")
            check_writable(file.expanduser(), UsageError)
    return [None if file is None else Path(file).expanduser() for files in asked.values() for file in files]


def write_rows(file: Path, columns: Sequence[str], rows: Iterable[Iterable[object]], *, raw: bool) -> None:
    """Write rows to a CSV file, whose names are read back exactly. `raw` is SafeWriter's."""
    from vitrail.data.spreadsheet import SafeWriter

    with replacing_text(file, UsageError) as stream:
        writer = SafeWriter(stream, raw=raw, read_back=True)
        writer.writerow(columns)
        writer.writerows(rows)


def as_json(result: Any) -> Any:
    """Return a result with unreadable images as JSON values."""
    from vitrail.config import plain

    return {**plain(result), "unreadable": unreadable_json(result.unreadable)}
