"""`vitrail data check | stats | pack`: examine images before training. The data set itself is never changed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from vitrail.files import check_writable
from vitrail.ranges import Range, Side, Threads, checked
from vitrail.terminal import ProgressLine, first_lines, page, table
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.verbs.flags.reading import READ, read_settings
from vitrail.version import need
from vitrail.words import counted

if TYPE_CHECKING:
    from vitrail.data.check import BadImage, Copy, Report, Stats
    from vitrail.data.loading.pack import PackResult


@checked
def check(
    path: str | Path,
    *,
    out: str | Path | None = None,
    raw: bool = False,
    workers: Threads | None = None,
    **reading: Unpack[DataKeywords],
) -> Report:
    """Decode every image, and list bad images, duplicates, and images that are in more than one split.

    Args:
        path: The images, in any form that `vitrail train` takes.
        out: Write everything found to this CSV file, too.
    """
    threads = Compute(workers=workers).threads(alone=True)
    from vitrail.data.check import check

    if out is not None:
        check_writable(Path(out))
    report = check(
        read_settings(reading, path, used=(*READ, "group")), workers=threads, progress=ProgressLine("checked")
    )
    if out is not None:
        report.write_csv(out, raw=raw)
    return report


def stats(path: str | Path, **reading: Unpack[DataKeywords]) -> Stats:
    """Count the images of every split and class, and look at the sizes of a sample.

    Args:
        path: The images, in any form that `vitrail train` takes.
    """
    from vitrail.data.check import stats

    return stats(read_settings(reading, path))


@checked
def pack(
    path: str | Path,
    folder: str | Path,
    *,
    short_side: Side = 256,
    quality: Annotated[int, Range(1, 100)] = 90,
    shard_mb: Annotated[int, Range(1, 10**6)] = 256,
    shuffle: bool = False,
    outside: bool = False,
    workers: Threads | None = None,
    **reading: Unpack[DataKeywords],
) -> dict[str, PackResult]:
    """Write images to shards, which training reads several times faster: `vitrail train FOLDER`.

    The same command continues where an interrupted one stopped.

    Args:
        path: The images, in any form that `vitrail train` takes.
        folder: A new folder for the shards.
        short_side: Maximum short side in pixels. Larger images are scaled down to it.
        quality: JPEG quality from 1 to 100.
        shard_mb: Size of a shard in MiB.
        shuffle: Write the images in random order, as --data.together needs them.
        outside: Copy also images that lie outside the folder of the data, through links or through paths in a table.
        workers: Number of threads that decode and encode images (default: from the machine).
    """
    threads = Compute(workers=workers).threads(alone=True)
    need("pyarrow")
    from vitrail.data.loading.pack import pack_data

    choices = dict(short_side=short_side, quality=quality, shard_bytes=shard_mb << 20, shuffle=shuffle)
    data = read_settings(reading, path, used=(*READ, "channels", "bits"))
    return pack_data(data, folder, outside=outside, **choices, workers=threads, progress=ProgressLine("packed"))


def show(result: Report | Stats | dict[str, PackResult]) -> Any:
    """Return the result of any of these verbs as text or tables for a terminal."""
    if isinstance(result, dict):
        lines = []
        for name, part in result.items():
            size = f"{part.count:,} images in {part.shards} shards, {part.bytes / 2**20:.1f} MiB"
            lines.append(f"{name or 'all'}: {size}, {part.folder}")
            lines += first_lines([f"  left out {bad.id}: {bad.reason}" for bad in part.bad])
        return "\n".join(lines)
    from vitrail.data.check import Report

    if not isinstance(result, Report):
        return page(*_stats_parts(result))
    groups = [" = ".join(_path(copy) for copy in group) for group in result.duplicates]
    said = set(result.stats.findings.warnings)
    lines = [
        *(line for line in result.warnings if line not in said),
        *first_lines([f"bad: {_path(bad)}: {bad.detail}" for bad in result.bad]),
        *first_lines([f"the same image: {group}" for group in groups]),
    ]
    dedup = shlex.join(["vitrail", "data", "dedup", result.stats.path])
    none = f"no problems found; `{dedup}` looks for copies that were scaled or edited"
    return page(*_stats_parts(result.stats), lines or ([] if said else none))


def _path(image: BadImage | Copy) -> str:
    """Return the place of an image in the data."""
    return f"{image.split}/{image.id}" if image.split else image.id


def _stats_parts(stats: Stats) -> list[Any]:
    rows = []
    for split in stats.splits:
        ranked = sorted(split.classes.items(), key=lambda item: item[1]) or [("", 0)]
        (least, fewest), (most, largest) = ranked[0], ranked[-1]
        counts = (split.count, len(split.classes), f"{fewest} ({least})", f"{largest} ({most})", split.unlabelled)
        rows.append((split.name or "all", *counts, f"{split.bytes / 2**20:.1f}"))
    sides = [
        f"{name} {low} to {high}, median {middle}"
        for name, (low, middle, high) in (("height", stats.heights), ("width", stats.widths))
    ]
    classes = len(stats.class_names)
    kinds = ", ".join(f"{count:,} {name}" for name, count in [*stats.formats.items(), *stats.modes.items()])
    return [
        f"{stats.path}: {stats.kind}, {counted(stats.count, 'image')} of {classes} class{'es' * (classes != 1)}",
        table(("split", "images", "classes", "fewest", "most", "no label", "MiB"), rows),
        f"sizes of {stats.looked_at:,} looked at: {'; '.join(sides)} pixels ({kinds})",
        [f"labels of {split.name or 'all'}: {split.several}" for split in stats.splits if split.several],
        first_lines(stats.findings.lines()),
    ]


def as_json(result: Report | Stats | dict[str, PackResult]) -> Any:
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
