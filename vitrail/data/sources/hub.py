"""Data sets of the Hugging Face hub, by name or as saved to a folder, through `datasets`."""

from __future__ import annotations

import os
from pathlib import Path

from vitrail.data.item import Found
from vitrail.data.sources.arrow import read_hub
from vitrail.errors import DataError


def open_saved(path: Path, image_column: str | None, label_column: str | None) -> Found:
    """Open a folder that `datasets` wrote with save_to_disk. Raises DataError, UsageError."""
    import datasets  # seconds to import

    saved = datasets.load_from_disk(str(path))
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"": saved}
    return read_hub(dict(splits), path, image_column, label_column)


def open_hub(name: str, image_column: str | None, label_column: str | None) -> Found:
    """Open a hub data set by name: from its cache, or downloaded once. Never runs code of the data set."""
    import datasets  # seconds to import

    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:  # the library raises a dozen kinds, down to plain ValueError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"hub data set {name!r} is not in the cache {datasets.config.HF_DATASETS_CACHE} "
            f"and could not be loaded: {reason}. With a network once: hf download --repo-type dataset {name}; "
            "or give the folder that holds its parquet files"
        ) from error
    return read_hub(dict(loaded), Path(str(datasets.config.HF_DATASETS_CACHE)), image_column, label_column)


def hub_cached(name: str) -> bool:
    """Is a data set `owner/name` in the hub's cache on this machine?"""
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        return False
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / name.replace("/", "___")
    fetched = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"datasets--{name.replace('/', '--')}"
    return prepared.is_dir() or fetched.is_dir()
