"""Count the images and classes of a data set, and the sizes and formats of a sample, without decoding images."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.bands.stored import stored
from vitrail.data.images.decode import FORMATS
from vitrail.data.imbalance import imbalance
from vitrail.data.item import DataSet, Findings, Listed, split_title
from vitrail.data.labels.sets import LabelSets, class_counts, known, summary
from vitrail.data.settings import Data
from vitrail.data.sources.open import find_whole
from vitrail.data.split import fingerprint
from vitrail.errors import DecodeError
from vitrail.words import one_line

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


def stats(data: Data | str | Path) -> Stats:
    """Count a data set's images and classes and look at the headers of a sample. Raises as `find` does."""
    data = data if isinstance(data, Data) else Data(path=str(data))
    found = find_whole(data)
    tally = Tally(_SAMPLE * len(found.splits))
    for source in found.splits.values():
        for index in np.unique(np.linspace(0, len(source) - 1, min(_SAMPLE, len(source))).astype(int)):
            tally.add(_glance(source, int(index)))
    return summarise(data.path, found, tally)


def _glance(source: Listed, index: int) -> Look:
    """Read one image's header."""
    try:
        data = source[index].image
    except DecodeError as error:
        return Look(error=error)
    if isinstance(data, bytes):
        return Look(*describe(data))
    return Look((data.shape[0], data.shape[1]), *array_kind(data))


def array_kind(array: np.ndarray) -> tuple[str, str]:
    """Return format and mode of an image that is an array: RGB, or its type and its shape."""
    usual = array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3
    return "array", "RGB" if usual else f"{array.dtype} {array.shape[2] if array.ndim == 3 else 1} bands"


def describe(data: bytes) -> tuple[tuple[int, int], str, str]:
    """Return ((height, width) as stored, format, mode) by the header alone."""
    format = next((format for format in FORMATS if format.magic.match(data[:512])), None)
    if format is None:
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
            return (image.height, image.width), format.name, image.mode
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


def _split_stats(name: str, source: Listed) -> SplitStats:
    counts = class_counts(source.labels, len(source.class_names))
    classes = dict(zip(source.class_names, counts.tolist(), strict=True))
    unknown = len(source) - int(np.count_nonzero(known(source.labels)))
    several = summary(source.labels) if isinstance(source.labels, LabelSets) else ""
    return SplitStats(name, len(source), int(source.sizes.sum()), classes, unknown, several)


def _range(values: np.ndarray) -> tuple[int, int, int]:
    return int(values.min()), int(np.median(values)), int(values.max())
