"""The settings `--data.*` in verbs that only read images. They have all of them, as training does. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from vitrail.config import merge
from vitrail.data.settings import Data
from vitrail.training.run import Run
from vitrail.verbs.flags.declared import REPEATED, flag_of

log = logging.getLogger("vitrail")
READ = ("image_column", "label_column", "label_columns", "answers", "label_separator", "labels_per_image", "label_from",
        "include", "exclude", "strict", "ignore")  # fmt: skip
"""Settings that say which images and labels there are. All verbs that open data use them."""
SPLIT = ("train", "validation", "holdout", "test", "subset", "fold", "group")
"""Settings that divide the images."""


def read_settings(
    reading: Mapping[str, Any], path: str | Path | None = None, base: Data | None = None, used: tuple[str, ...] = READ
) -> Data:
    """Return the settings `base` of the data with the values of `reading`, at `path` (default: that of `base`).

    A setting that is not among those `used` causes a warning. Raises UsageError for an unknown or invalid setting.
    """
    given = dict(reading) if path is None else {**reading, "path": str(path)}
    data = merge(Run() if base is None else Run(data=base), {Data.section: given}).data
    warn_of_unused(reading, used)
    return data


def warn_of_unused(reading: Iterable[str], used: tuple[str, ...]) -> None:
    """Log a warning for each of the settings `reading` that is not among those `used`."""
    for name in reading:
        if name not in used:
            log.warning("data.%s has no effect in this command", name)


def as_flags(data: Data) -> Iterator[str]:
    """Yield the words of a command line that give `data` its settings."""
    for name in (field.name for field in fields(Data) if field.name != "path"):
        value, flag = getattr(data, name), flag_of(f"{Data.section}.{name}")
        if value == getattr(Data(), name):
            continue
        if name in REPEATED:
            yield from (word for each in value for word in (flag, each))
        elif isinstance(value, bool):
            yield flag
        else:
            yield from (flag, *map(str, value if isinstance(value, tuple) else [value]))
