"""`vitrail data split`: nested random subsets of a data set, as lists of its images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from vitrail.errors import UsageError
from vitrail.files import check_writable
from vitrail.ranges import Count, Part, Seed, check, checked
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.verbs.flags.reading import READ, read_settings
from vitrail.words import one_line


@one_line
@dataclass(frozen=True)
class Subset:
    """One list that was written."""

    file: str
    train: int
    """Number of training images."""
    validation: int
    test: int


@checked
def split(
    path: str | Path,
    folder: str | Path,
    *sizes: str | Count | Part,
    seed: Seed = 0,
    raw: bool = False,
    **reading: Unpack[DataKeywords],
) -> list[Subset]:
    """Write random subsets of the training images, one list per size, to study how much data a network needs.

    Each list is a CSV file that `vitrail train` reads as a data set with this number of training images; no image is
    copied. Each subset is part of every larger one, and classes are in proportion. All lists share the validation
    images, by which the best model is chosen, and the test images. `vitrail train DATA --data.subset SIZE` with the
    same seed uses the same images.

    Args:
        path: The images, in any form that `vitrail train` takes.
        folder: Folder for the lists, named SIZE.csv.
        sizes: Numbers of images (1000), or shares of the training images (10% or 0.1).
        seed: Seed of the subsets, and of the validation images if the data have no validation split.
    """
    from vitrail.data.cache import refuse_within
    from vitrail.data.item import Subset as ImageSubset
    from vitrail.data.roles import split_data_set
    from vitrail.data.sources.lists import write_list
    from vitrail.data.sources.open import open_and_warn
    from vitrail.data.split import subset

    asked = _sizes(sizes)
    target = refuse_within(folder, str(path))
    check_writable(target, UsageError, folder=True)
    data = read_settings(reading, path, used=(*READ, "train", "validation", "holdout", "test"))
    found = open_and_warn(data)
    splits = split_data_set(found, data, seed)
    chosen = {len(indices): indices for indices in (subset(splits.train, size, seed) for size in asked)}
    held_out = {"validation": splits.validation, "test": splits.test}
    others = {name: source for name, source in held_out.items() if source is not None}
    written = []
    for count, indices in sorted(chosen.items()):
        file = target / f"{count}.csv"
        parts = {"train": ImageSubset(splits.train, indices), **others}
        write_list(file, str(path), found, parts, label_from=data.label_from, raw=raw)
        written.append(Subset(str(file), count, *(len(others.get(name, ())) for name in held_out)))
    return written


def _sizes(sizes: Iterable[str | int | float]) -> list[int | float]:
    """Return the sizes that "1000", "10%" and "0.1" mean: numbers of images as int, shares as float."""
    found = [_size(str(size).strip()) for size in sizes]
    if not found:
        raise UsageError("no size is given. Give at least one: vitrail data split DATA FOLDER 1000 5000 10%")
    return found


def show(result: list[Subset]) -> str:
    """Return the result as lines."""
    lines = [
        f"{one.file}: {one.train:,} training images, {one.validation:,} for validation, {one.test:,} for the test"
        for one in result
    ]
    return "\n".join(lines)


def _size(text: str) -> int | float:
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(
            f"{text!r} is not the size of a subset. Write a number of images, such as 1000, or a share, such as 10%"
        ) from None
    images = "%" not in text and number.is_integer() and (number != 1 or "." not in text)
    size = int(number) if images else number
    check(Count | Part, size, "sizes")
    return size
