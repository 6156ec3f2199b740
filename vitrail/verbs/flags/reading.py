"""The settings `--data.*` in verbs that only read images. They have all of them, as training does. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.config import merge
from vitrail.data.settings import Data
from vitrail.training.run import Run

log = logging.getLogger("vitrail")
READ = ("image_column", "label_column", "label_columns", "answers", "label_separator", "labels_per_image", "label_from",
        "include", "exclude", "strict", "ignore")  # fmt: skip
"""Settings that say which images and labels there are. All verbs that open data use them."""


def read_settings(
    reading: Mapping[str, Any], path: str | Path | None = None, base: Data | None = None, used: tuple[str, ...] = READ
) -> Data:
    """Return the settings `base` of the data with the values of `reading`, at `path` (default: that of `base`).

    Columns of labels that `reading` names are used in place of those of `base`. A setting that is not among those
    `used` causes a warning. Raises UsageError for an unknown or invalid setting.
    """
    if base is not None and any(reading.get(name) for name in ("label_column", "label_columns", "answers")):
        base = replace(base, label_column=None, label_columns=None)
    given = dict(reading) if path is None else {**reading, "path": str(path)}
    data = merge(Run() if base is None else Run(data=base), {Data.section: given}).data
    warn_of_unused(reading, used)
    return data


def warn_of_unused(reading: Iterable[str], used: tuple[str, ...]) -> None:
    """Log a warning for each of the settings `reading` that is not among those `used`."""
    for name in reading:
        if name not in used:
            log.warning("data.%s has no effect in this command", name)
