"""The data sets of the papers by name: their sizes and where they are published. Torch-free.

`catalog.toml` holds one table per data set, with the fields of `PublishedDataSet`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class PublishedDataSet:
    """One data set of a paper."""

    classes: int
    """Number of classes; 0 if an image has several labels (the tasks with these labels are in `vtab.toml`)."""
    splits: dict[str, int]
    """Split -> number of images."""
    hub: str | None = None
    """Name on the Hugging Face hub; None if the hub has no copy with images and a label."""
    image_column: str | None = None
    """Column of the images in the copy on the hub; None if it has a usual name."""
    label_column: str | None = None
    url: str | None = None
    """Page of the authors; None if the data set was never published."""
    tfds: str | None = None
    """Name in TensorFlow Datasets, NAME[/CONFIG]:VERSION, where "*" stands for any number."""
    by_hand: bool = False
    """Whether the files must be downloaded by hand, after an agreement, before TensorFlow Datasets can prepare them."""

    @property
    def source(self) -> str:
        """Where the data set comes from, in a sentence."""
        places = [f"the hub as {self.hub}"] if self.hub else []
        places += [f"tfds build {self.tfds.partition(':')[0]} ({self.tfds})"] if self.tfds else []
        places += [f"{self.url}{' (by hand)' if self.by_hand else ''}"] if self.url else []
        return "; ".join(places) or "never published"


def packaged_text(name: str) -> str:
    """Return the text of a data file of this package."""
    return files("vitrail.data.benchmarks").joinpath(name).read_text(encoding="utf-8")


def packaged_tables(name: str) -> dict[str, dict[str, Any]]:
    """Return the tables of a TOML file of this package, by name."""
    return tomllib.loads(packaged_text(name))


CATALOG = {name: PublishedDataSet(**fields) for name, fields in packaged_tables("catalog.toml").items()}
"""Name -> data set. `open_data` takes these names in place of a path ('digits' comes with scikit-learn)."""
