"""A full scan before training: decode every image and compare all contents.

Nothing is changed. Bad images are listed with the reason, and the user decides what to do.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.bands.picture import picture
from vitrail.data.copies.leaks import digest
from vitrail.data.imbalance import IMBALANCED, described, flags
from vitrail.data.item import Listed, role_of, split_title
from vitrail.data.labels.sets import class_counts, label_text
from vitrail.data.loading.prefetch import each_image, threads
from vitrail.data.settings import Data
from vitrail.data.sources.open import find_whole
from vitrail.data.spreadsheet import SafeWriter
from vitrail.data.stats import Look, Stats, Tally, array_kind, describe, summarise
from vitrail.errors import DecodeError
from vitrail.files import replacing_text
from vitrail.words import one_line

OnProgress = Callable[[int, int], None]
"""Called with (images done, images in all)."""

SMALL = 8
"""An image with a side shorter than this, in pixels, causes a warning."""
LONG = 8
"""An image whose longer side is more than this many times its shorter side causes a warning."""


class BadImage(NamedTuple):
    """One image that cannot be decoded."""

    split: str
    id: str
    reason: str
    """See `DecodeError.reason`."""
    detail: str


class Copy(NamedTuple):
    """One of several images with the same bytes."""

    split: str
    id: str
    label: str


@one_line
@dataclass(frozen=True)
class Report:
    """The result of a full scan."""

    stats: Stats
    bad: list[BadImage]
    duplicates: list[list[Copy]]
    """Groups of images with equal contents."""
    warnings: list[str] = field(default_factory=list)

    @property
    def leaks(self) -> list[list[Copy]]:
        """The duplicates that lie in more than one split."""
        return [group for group in self.duplicates if len({copy.split for copy in group}) > 1]

    @property
    def bad_share(self) -> float:
        """Unreadable images as a share of all that are listed."""
        return len(self.bad) / max(1, self.stats.count)

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 1 if no image can be read."""
        return int(bool(self.bad) and len(self.bad) == self.stats.count)

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the table of everything wrong: (split, id, reason, detail), header first."""
        yield ("split", "id", "reason", "detail")
        yield from self.bad
        for item in self.stats.findings.dropped:
            yield ("", item.id, "left-out", item.reason)
        for group in self.duplicates:
            for copy in group[1:]:
                yield (copy.split, copy.id, "duplicate", f"of {group[0].split}:{group[0].id}")

    def write_csv(self, path: str | Path, *, raw: bool = False) -> None:
        """Write `rows` to a CSV file; `raw` is SafeWriter's. Raises WriteError."""
        with replacing_text(Path(path)) as file:
            SafeWriter(file, raw=raw, end="\r\n").writerows(self.rows())


def check(data: Data | str | Path, *, workers: int = 0, progress: OnProgress | None = None) -> Report:
    """Decode every image of every split and compare their contents. Raises as `find` does."""
    data = data if isinstance(data, Data) else Data(path=str(data))
    found = find_whole(data)
    total = sum(len(source) for source in found.splits.values())
    tally, bad = Tally(total), list[BadImage]()
    with threads(workers) as pool:
        for name, source in found.splits.items():
            for index, look in enumerate(each_image(pool, _look, source, range(len(source)))):
                tally.add(look)
                if look.error is not None:
                    bad.append(BadImage(name, source.id(index), look.error.reason, str(look.error)))
                if progress is not None:
                    progress(tally.count, total)
    duplicates = _duplicates(found.splits, tally)
    report = Report(summarise(data.path, found, tally), bad, duplicates)
    return replace(report, warnings=list(_warnings(report, found.splits, tally)))


def _look(source: Listed, index: int) -> Look:
    """Read and decode one image."""
    try:
        data = source[index].image
        if isinstance(data, bytes):
            image, (format, mode) = picture(data), describe(data)[1:]
        else:
            image, (format, mode) = picture(data), array_kind(data)
    except DecodeError as error:
        return Look(error=error)
    return Look((image.shape[0], image.shape[1]), format, mode, digest(data))


def _duplicates(splits: dict[str, Listed], tally: Tally) -> list[list[Copy]]:
    """Return the groups of images with equal contents, in the order of their first image."""
    return [[_copy(splits, int(place)) for place in group] for group in equal_groups(tally.digests)]


def equal_groups(digests: np.ndarray) -> list[np.ndarray]:
    """Return groups of indices with equal digests (uint64 [N, 2], zeros for none), ordered by their first index."""
    there = np.flatnonzero(digests.any(axis=1))
    digests = digests[there]
    order = np.lexsort((there, digests[:, 1], digests[:, 0]))
    same = (digests[order][1:] == digests[order][:-1]).all(axis=1)
    # runs of equal neighbours: a group begins where `same` turns true and ends where it turns false
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    groups = [there[order[begin : end + 1]] for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    return sorted(groups, key=lambda group: int(group[0]))


def _copy(splits: dict[str, Listed], place: int) -> Copy:
    for name, source in splits.items():
        if place < len(source):
            return Copy(name, source.id(place), label_text(source.labels, place, source.class_names))
        place -= len(source)
    raise IndexError(place)


def _warnings(report: Report, splits: dict[str, Listed], tally: Tally) -> Iterator[str]:
    """Yield one line for each problem that a user should know of before training."""
    yield from report.stats.findings.warnings
    for split in report.stats.splits:
        if split.unlabelled:
            yield f"{split.unlabelled} of {split.count} images of {split.title} have no label"
    if report.bad:
        yield f"{len(report.bad)} images ({report.bad_share:.2%}) cannot be decoded"
    if report.leaks:
        yield f"{len(report.leaks)} images are in more than one split: results on them are not to be trusted"
    repeated = sum(len(group) - 1 for group in report.duplicates)
    if repeated:
        yield (
            "1 image is an exact copy of another" if repeated == 1 else f"{repeated} images are exact copies of others"
        )
    torn = [group for group in report.duplicates if len({copy.label for copy in group if copy.label}) > 1]
    if torn:
        yield f"{len(torn)} images occur with different labels"
    begin = 0
    for name, source in splits.items():
        good = tally.sizes[begin : begin + len(source), 0] > 0
        begin += len(source)
        classes = len(source.class_names)
        gone = (class_counts(source.labels, classes) > 0) & (class_counts(source.labels[good], classes) == 0)
        for label in np.flatnonzero(gone).tolist():
            yield f"no image of class {source.class_names[label]!r} in {split_title(name)} can be decoded"
    shorter, longer = tally.sizes.min(axis=1), tally.sizes.max(axis=1)
    if small := int(np.count_nonzero((shorter > 0) & (shorter < SMALL))):
        yield f"{small} images have a side below {SMALL} pixels"
    if thin := int(np.count_nonzero((shorter > 0) & (longer > LONG * shorter))):
        yield f"{thin} images are more than {LONG} times longer than wide"
    for split in report.stats.splits:
        if split.imbalance >= IMBALANCED and not split.several:
            spread = described(list(split.classes), list(split.classes.values()))
            trained_on = role_of(split.name) == "train" or len(splits) == 1
            helping = flags(sum(split.classes.values()), math.inf)
            advice = f". For rare classes: vitrail train {shlex.quote(report.stats.path)} {helping}" * trained_on
            yield f"{split.title} is imbalanced: {spread}{advice}"
