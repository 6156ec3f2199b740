"""What can be known of a data set before training: imbalanced classes, counts and sizes, copies, bad images.

- `imbalance` notices imbalanced classes, and `fairness_flags` make training fair to rare classes.
- `stats` counts images and classes, and the sizes and formats of a sample, without decoding images.
- `leaked` finds held-out images that are also training images, if that is cheap. Only images of equal stored size can
  be equal, so comparing a small data set completely means reading a part of it.
- `check` decodes every image and compares all contents. Bad images are listed with the reason, and the user decides
  what to do. `vitrail.data.copies.dedup` also finds copies that were encoded again.

Nothing is changed.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.groups import groups_of, on_both_sides, said_of_groups, series_advice
from vitrail.data.images.decode import format_of, header_size
from vitrail.data.images.pixels import picture
from vitrail.data.images.stored import stored
from vitrail.data.item import DataSet, Findings, IndexedSource, evenly_spaced, ids, role_of, split_title
from vitrail.data.labels.sets import Answers, LabelSets, class_counts, known, label_text, summary
from vitrail.data.loading.prefetch import each_image, threads
from vitrail.data.roles import without_effect
from vitrail.data.settings import Data, as_flags
from vitrail.data.sources.open import open_whole
from vitrail.data.split import fingerprint
from vitrail.data.spreadsheet import SafeWriter
from vitrail.errors import DecodeError
from vitrail.files import replacing_text
from vitrail.words import listing, one_line, shown

IMBALANCED = 10
"""Images of the largest class per image of the smallest one from which a data set counts as imbalanced."""
FAIR = "--metric.name balanced_accuracy"
"""The flag of `vitrail train` that chooses the model for which every class counts the same. It changes no training."""
EVERY_CLASS = ("balanced_accuracy", "macro_f1")
"""Metrics for which every class counts the same."""
ADJUSTED = f"--objective.logit-adjustment 1 {FAIR}"
"""Flags for rare classes. Logit adjustment needs no further setting, and is consistent for the balanced error (Menon et
al. 2021, theorem 1). `benchmarks/long_tail.py` compares it with the others."""
ENOUGH_IMAGES, ENOUGH_STEPS = 10_000, 800
"""Training images and steps from which logit adjustment was measured to help: 10,847 images, 840 steps of 256 images. A
network that has learned little takes everything for the rare classes: magnetic tiles, 1,210 images in three minutes,
fell from 70.9 to 6.0 %."""


def fairness_flags(images: int, steps: float, loss: str = "softmax") -> str:
    """Return the flags of `vitrail train` that help rare classes in a run with these training images and steps.

    Logit adjustment is defined for softmax alone.
    """
    return ADJUSTED if loss == "softmax" and images >= ENOUGH_IMAGES and steps >= ENOUGH_STEPS else FAIR


def imbalance(counts: Sequence[int] | np.ndarray) -> float:
    """Return the number of images of the largest class per image of the smallest one; classes without images aside."""
    there = [int(count) for count in counts if count]
    return max(there) / min(there) if there else 1.0


def imbalance_text(names: Sequence[str], counts: Sequence[int] | np.ndarray) -> str:
    """Return how imbalanced the classes are, as a clause: "the largest class ('a', 200 images) has ..."."""
    there = sorted((int(count), number) for number, count in enumerate(counts) if count)
    (fewest, least), (most, largest) = there[0], there[-1]
    return (
        f"the largest class ({shown(names[largest])}, {most:,} images) has {most / fewest:.0f} times the images of the "
        f"smallest ({shown(names[least])}, {fewest:,})"
    )


_SAMPLE = 300


@dataclass(frozen=True)
class SplitStats:
    """One split, counted without reading its images."""

    name: str
    """"" where the data are not split."""
    count: int
    bytes: int
    classes: dict[str, int]
    """Class name -> number of images; an image counts for each of its labels."""
    unlabelled: int
    several: str = ""
    """Number of labels of an image, in words; empty for one label for each image."""

    @property
    def imbalance(self) -> float:
        """Images of the largest class per image of the smallest one."""
        return imbalance(list(self.classes.values()))

    @property
    def title(self) -> str:
        """How a message names the split: "split 'train'", or "the data" where the data are not split."""
        return split_title(self.name)


@one_line
@dataclass(frozen=True)
class Stats:
    """Counts of a data set. Sizes, formats and modes are of `looked_at` images: a sample in `stats`, all in `check`."""

    path: str
    kind: str
    fingerprint: str
    class_names: list[str]
    splits: list[SplitStats]
    findings: Findings
    looked_at: int
    heights: tuple[int, int, int]
    """Smallest, median and largest height in pixels; zeros if no image could be looked at."""
    widths: tuple[int, int, int]
    formats: dict[str, int]
    """JPEG, PNG ... "array" for arrays -> images."""
    modes: dict[str, int]
    """Pillow's names: RGB, L, CMYK, P ... -> images."""

    @property
    def count(self) -> int:
        """Images in all splits."""
        return sum(split.count for split in self.splits)


class Look(NamedTuple):
    """Size, format, mode and digest of one image, or the error of reading it."""

    size: tuple[int, int] = (0, 0)
    format: str = ""
    mode: str = ""
    digest: bytes = b""
    error: DecodeError | None = None


class Tally:
    """Sizes, digests, formats and modes of many images, in 40 bytes per image."""

    def __init__(self, count: int) -> None:
        self.count = 0
        self.sizes = np.zeros((count, 2), dtype=np.int32)
        self.digests = np.zeros((count, 2), dtype=np.uint64)
        """Zeros for an image that could not be decoded."""
        self.formats: Counter[str] = Counter()
        self.modes: Counter[str] = Counter()

    def add(self, look: Look) -> None:
        """Count one more image."""
        if look.error is None:
            self.sizes[self.count] = look.size
            self.formats[look.format] += 1
            self.modes[look.mode] += 1
            if look.digest:
                self.digests[self.count] = np.frombuffer(look.digest, dtype=np.uint64)
        self.count += 1


def _opened(data: Data | str | Path) -> tuple[Data, DataSet]:
    """Return the settings of a data set, and the data set, which says which of them change nothing."""
    data = data if isinstance(data, Data) else Data(path=str(data))
    found = open_whole(data)
    found.findings.warnings += without_effect(data, found.findings.kind)
    return data, found


def stats(data: Data | str | Path) -> Stats:
    """Count a data set's images and classes and look at the headers of a sample. Raises as `open_path` does."""
    data, found = _opened(data)
    tally = Tally(_SAMPLE * len(found.splits))
    for source in found.splits.values():
        for index in evenly_spaced(len(source), _SAMPLE):
            tally.add(_look(source, int(index), decoded=False))
    return summarise(data.path, found, tally)


def _look(source: IndexedSource, index: int, *, decoded: bool) -> Look:
    """Read one image: its header, or all of it if it is to be `decoded`."""
    try:
        data = source[index].image
        if not decoded:
            return Look(*header_facts(data))
        height, width, _ = picture(data).shape
        return Look((height, width), *header_facts(data)[1:], digest(data))
    except DecodeError as error:
        return Look(error=error)


def header_facts(data: bytes | np.ndarray) -> tuple[tuple[int, int], str, str]:
    """Return ((height, width) of the upright image, format, mode) by the header alone; of an array type and bands."""
    if isinstance(data, np.ndarray):
        usual = data.dtype == np.uint8 and data.ndim == 3 and data.shape[2] == 3
        mode = "RGB" if usual else f"{data.dtype} {data.shape[2] if data.ndim == 3 else 1} bands"
        return (data.shape[0], data.shape[1]), "array", mode
    try:
        format = format_of(data)
    except DecodeError:
        return (0, 0), "unknown", "unknown"
    if format.reader is None or format.name == "TIFF":
        try:
            found = stored(data)
            height, width, bands = found.size()
            if format.reader is None or bands > 4 or (bands > 1 and found.bits != "8"):
                return (height, width), format.name, f"{found.dtype} {bands} bands"
        except DecodeError:
            if format.reader is None:
                return (0, 0), format.name, "unknown"
    try:
        with format.reader(BytesIO(data)) as image:
            return header_size(image), format.name, image.mode
    except Exception:  # a damaged header raises anything; decoding says what is wrong
        return (0, 0), format.name, "unknown"


def summarise(path: str, found: DataSet, tally: Tally) -> Stats:
    """Return the statistics of a data set from its lists and the tally of the images that were read."""
    sizes = tally.sizes[tally.sizes[:, 0] > 0]
    sizes = sizes if len(sizes) else np.zeros((1, 2), dtype=np.int32)
    names = dict.fromkeys(name for source in found.splits.values() for name in source.class_names)
    return Stats(
        path=path,
        kind=found.findings.kind,
        fingerprint=fingerprint(found.splits),
        class_names=list(names),
        splits=[_split_stats(name, source) for name, source in found.splits.items()],
        findings=found.findings,
        looked_at=tally.count,
        heights=_range(sizes[:, 0]),
        widths=_range(sizes[:, 1]),
        formats=dict(tally.formats.most_common()),
        modes=dict(tally.modes.most_common()),
    )


def _split_stats(name: str, source: IndexedSource) -> SplitStats:
    counts = class_counts(source.labels, len(source.class_names))
    classes = dict(zip(source.class_names, counts.tolist(), strict=True))
    unknown = len(source) - int(np.count_nonzero(known(source.labels)))
    several = summary(source.labels) if isinstance(source.labels, LabelSets) else ""
    if isinstance(source.labels, Answers):
        several = f"{len(source.labels.parts)} answers per image: {listing(list(source.labels.parts), quoted=False)}"
    return SplitStats(name, len(source), int(source.sizes.sum()), classes, unknown, several)


def _range(values: np.ndarray) -> tuple[int, int, int]:
    return int(values.min()), int(np.median(values)), int(values.max())


READ_AT_MOST = 2**28
"""Maximum number of bytes to read. A data set that needs more is not examined."""


def digest(image: bytes | np.ndarray) -> bytes:
    """Return 16 bytes that are equal for equal contents. The contents are a file or an array of pixels."""
    contents = image if isinstance(image, bytes) else np.ascontiguousarray(image).tobytes()
    return hashlib.blake2b(contents, digest_size=16).digest()


def leaked(train: IndexedSource, held_out: IndexedSource) -> list[str] | None:
    """Return the ids of held-out images with the contents of a training image.

    Return None if the comparison needs to read more than `READ_AT_MOST` bytes, or sizes are not known. Raises DataError
    for a read that hangs.
    """
    if not (train.sizes.any() and held_out.sizes.any()):
        return None
    sizes = np.setdiff1d(np.intersect1d(train.sizes, held_out.sizes), 0)
    mine, theirs = (np.flatnonzero(np.isin(source.sizes, sizes)).tolist() for source in (train, held_out))
    if train.sizes[mine].sum() + held_out.sizes[theirs].sum() > READ_AT_MOST:
        return None
    with threads(1) as pool:  # without a thread, nobody would notice a read that hangs
        known = set(each_image(pool, _digest_of, train, mine)) - {None}
        found = each_image(pool, _digest_of, held_out, theirs)
        return [held_out.id(index) for index, one in zip(theirs, found, strict=True) if one in known]


def _digest_of(source: IndexedSource, index: int) -> bytes | None:
    """Return the digest of an image; None for an unreadable one, which the loader reports."""
    try:
        return digest(source[index].image)
    except DecodeError:
        return None


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
    """Decode every image of every split and compare their contents. Raises as `open_path` does."""
    data, found = _opened(data)
    total, look = found.count, partial(_look, decoded=True)
    tally, bad = Tally(total), list[BadImage]()
    with threads(workers) as pool:
        for name, source in found.splits.items():
            for index, seen in enumerate(each_image(pool, look, source, range(len(source)))):
                tally.add(seen)
                if seen.error is not None:
                    bad.append(BadImage(name, source.id(index), seen.error.reason, str(seen.error)))
                if progress is not None:
                    progress(tally.count, total)
    duplicates = [[_copy(found.splits, int(place)) for place in group] for group in equal_groups(tally.digests)]
    report = Report(summarise(data.path, found, tally), bad, duplicates)
    return replace(report, warnings=[*_warnings(report, found.splits, tally, data), *_of_groups(data, found.splits)])


def _of_groups(data: Data, splits: dict[str, IndexedSource]) -> Iterator[str]:
    """Yield what is wrong with the images that belong together, or that seem to."""
    class_names = {name for source in splits.values() for name in source.class_names}
    if data.group is not None:
        groups = {name: groups_of(source, data) for name, source in splits.items()}
        yield from (said_of_groups(source, groups[name], data) for name, source in splits.items())
        yield from on_both_sides(groups, data, class_names)
        return
    names = (one for source in splits.values() for one in ids(source, np.arange(len(source))))
    if advice := series_advice(names, len(class_names)):
        yield advice


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


def _copy(splits: dict[str, IndexedSource], place: int) -> Copy:
    for name, source in splits.items():
        if place < len(source):
            return Copy(name, source.id(place), label_text(source.labels, place, source.class_names))
        place -= len(source)
    raise IndexError(place)


def _of_no_training_image(splits: Mapping[str, IndexedSource]) -> Iterator[str]:
    """Yield a line for each held-out split with images of classes that no split for training has images of."""
    held = {name: _classes_of(source) for name, source in splits.items() if role_of(name) != "train"}
    if len(held) < len(splits):
        trained = {one for name, source in splits.items() if name not in held for one in _classes_of(source)}
        for name, classes in held.items():
            if role_of(name) and (lacking := [one for one in classes if one not in trained]):
                yield f"{split_title(name)} has images of classes that no training image has: {listing(lacking)}"


def _classes_of(source: IndexedSource) -> list[str]:
    """Return the classes that images of a source have."""
    counts = class_counts(source.labels, len(source.class_names))
    return [name for name, count in zip(source.class_names, counts, strict=True) if count]


def _warnings(report: Report, splits: dict[str, IndexedSource], tally: Tally, data: Data) -> Iterator[str]:
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
    yield from _of_no_training_image(splits)
    shorter, longer = tally.sizes.min(axis=1), tally.sizes.max(axis=1)
    if small := int(np.count_nonzero((shorter > 0) & (shorter < SMALL))):
        yield f"{small} images have a side below {SMALL} pixels"
    if thin := int(np.count_nonzero((shorter > 0) & (longer > LONG * shorter))):
        yield f"{thin} images are more than {LONG} times longer than wide"
    for split in report.stats.splits:
        if split.imbalance >= IMBALANCED and not split.several:
            spread = imbalance_text(list(split.classes), list(split.classes.values()))
            trained_on = role_of(split.name) == "train" or len(splits) == 1
            helping = fairness_flags(sum(split.classes.values()), math.inf)
            command = shlex.join(["vitrail", "train", report.stats.path, *as_flags(data)])
            advice = f". For rare classes: {command} {helping}" * trained_on
            yield f"{split.title} is imbalanced: {spread}{advice}"
