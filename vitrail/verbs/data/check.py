"""`vitrail data check | stats | pack`: examine images before training. The data set itself is never changed."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.data.check import Report
    from vitrail.data.loading.pack import Packed
    from vitrail.data.stats import Stats

log = logging.getLogger("vitrail")
LINES = 20
"""Maximum number of lines of one kind on a terminal; --json and --out contain all of them."""


def check(path: str | Path, *, out: str | Path | None = None, workers: int | None = None) -> Report:
    """Decode every image, and list bad images, duplicates, and images that are in more than one split.

    Args:
        path: The images, in any form that `vitrail train` takes.
        out: Write everything found to this CSV file, too.
        workers: Number of threads that decode images (default: from the machine).
    """
    from vitrail.data.check import check

    report = check(path, workers=cores(workers), progress=Line("checked"))
    if out is not None:
        report.write_csv(out)
    return report


def stats(path: str | Path) -> Stats:
    """Count the images of every split and class, and look at the sizes of a sample.

    Args:
        path: The images, in any form that `vitrail train` takes.
    """
    from vitrail.data.stats import stats

    return stats(path)


def pack(
    path: str | Path,
    folder: str | Path,
    *,
    short_side: int = 256,
    quality: int = 90,
    shard_mb: int = 256,
    shuffle: bool = False,
    workers: int | None = None,
) -> dict[str, Packed]:
    """Write images to shards, which training reads several times faster: `vitrail train FOLDER`.

    The same command continues where an interrupted one stopped.

    Args:
        path: The images, in any form that `vitrail train` takes.
        folder: A new folder for the shards.
        short_side: Maximum short side in pixels. Larger images are scaled down to it.
        quality: JPEG quality from 1 to 100.
        shard_mb: Size of a shard in MiB.
        shuffle: Write the images in random order, as --data.together needs them.
        workers: Number of threads that decode and encode images (default: from the machine).
    """
    from vitrail.data.loading.pack import pack_data

    choices = dict(short_side=short_side, quality=quality, shard_bytes=shard_mb << 20, shuffle=shuffle)
    return pack_data(str(path), folder, **choices, workers=cores(workers), progress=Line("packed"))


def cores(asked: int | None) -> int:
    """Return the number of threads asked for, or of the processor's cores."""
    from vitrail.device import available_cores

    return available_cores() if asked is None else asked


class Line:
    """Progress on a terminal, on one line of stderr."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.shown = sys.stderr.isatty() and log.isEnabledFor(logging.INFO)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` images are done."""
        if self.shown and (done % 100 == 0 or done == total):
            print(f"\r{self.what} {done:,} of {total:,}", end="\n" if done == total else "", file=sys.stderr)


def show(result: Report | Stats | dict[str, Packed]) -> Any:
    """Return the result of any of these verbs as text or tables for a terminal."""
    if isinstance(result, dict):
        return "\n".join(_packed_lines(result))
    from rich.console import Group
    from rich.text import Text

    from vitrail.data.check import Report

    if not isinstance(result, Report):
        return Group(*_stats_parts(result))
    lines = [*result.warnings]
    lines += some([f"bad: {bad.split}/{bad.id}: {bad.detail}" for bad in result.bad])
    groups = [" = ".join(f"{copy.split}/{copy.id}" for copy in group) for group in result.duplicates]
    lines += some([f"the same image: {group}" for group in groups])
    return Group(*_stats_parts(result.stats), Text("\n".join(lines or ["no problems found"])))


def _stats_parts(stats: Stats) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    table = Table("split", "images", "classes", "fewest", "most", "no label", "MiB")
    for split in stats.splits:
        ranked = sorted(split.classes.items(), key=lambda item: item[1]) or [("", 0)]
        least, most = ranked[0], ranked[-1]
        row = (split.count, len(split.classes), f"{least[1]} ({least[0]})", f"{most[1]} ({most[0]})")
        table.add_row(split.name or "all", *map(str, row), str(split.unlabelled), f"{split.bytes / 2**20:.1f}")
    sides = [
        f"{name} {low} to {high}, median {middle}"
        for name, (low, middle, high) in (("height", stats.heights), ("width", stats.widths))
    ]
    kinds = ", ".join(f"{count} {name}" for name, count in [*stats.formats.items(), *stats.modes.items()])
    lines = [
        f"{stats.path}: {stats.kind}, {stats.count:,} images of {len(stats.class_names)} classes",
        f"sizes of {stats.looked_at:,} looked at: {'; '.join(sides)} pixels ({kinds})",
    ]
    return [Text(lines[0]), table, Text("\n".join([lines[1], *some(stats.findings.lines())]))]


def _packed_lines(packed: dict[str, Packed]) -> list[str]:
    lines = []
    for name, part in packed.items():
        lines.append(
            f"{name or 'all'}: {part.count:,} images in {part.shards} shards, {part.bytes / 2**20:.1f} MiB, "
            f"{part.folder}"
        )
        lines += some([f"  left out {bad.id}: {bad.reason}" for bad in part.bad])
    return lines


def some(lines: list[str], total: int | None = None) -> list[str]:
    """Return the first lines, and the number of further ones if `total` (default: all lines) is larger."""
    more = (len(lines) if total is None else total) - LINES
    return lines[:LINES] + ([f"... and {more:,} more"] if more > 0 else [])


def as_json(result: Report | Stats | dict[str, Packed]) -> Any:
    """Return the result of any of these verbs as JSON values."""
    from vitrail.config import plain
    from vitrail.data.check import Report

    if isinstance(result, dict):
        return {name: plain(part) for name, part in result.items()}
    if isinstance(result, Report):
        return {
            **plain(result.stats),
            "warnings": result.warnings,
            "bad": [bad._asdict() for bad in result.bad],
            "duplicates": [[copy._asdict() for copy in group] for group in result.duplicates],
        }
    return plain(result)
