"""`vitrail plan`: recommend a method of learning for these images on this machine, with time, memory and command."""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vitrail.durations import Minutes, parse_minutes
from vitrail.ranges import InputSize, Seconds, checked, height_width
from vitrail.terminal import TerminalPage, Unwrapped, page, table
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.verbs.flags.reading import read_settings
from vitrail.verbs.plan.options import PlanRequest, probe_options, training_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitrail.data.labels.sets import Labels
    from vitrail.transfer.recommend import Recommendation

NOTES = 5
"""Largest number of notes about the data on a terminal. `vitrail data check` shows all."""
BUSY = 0.5
"""Load per core from which other programs disturb the timing."""


@checked
def plan(
    path: str | Path,
    *,
    weights: str | Path | None = None,
    time_limit: Minutes | str | None = None,
    image_size: InputSize | None = None,
    seconds: Seconds = 10.0,
    **reading: Unpack[DataKeywords],
) -> Recommendation:
    """Time each method of learning on these images for a few seconds, and recommend one.

    The methods are few-shot (closed form), a linear probe, tuning the attention alone, tuning everything, and training
    from scratch. Each comes with its expected place by accuracy (1 is the best; measured by `python -m
    benchmarks.adviser`), its time, its memory and its command. Nothing is trained, and no file is written.

    Args:
        path: The images, in any form that `vitrail train` takes.
        weights: Weights to start from: a run, a model folder, a weight file of any known library, or a name on the
            hub (default: vitrail/tiny, a small network that vitrail ships).
        time_limit: Available time in minutes or with a unit such as 20s, 10min or 1.5h (default: no limit).
        image_size: Size of the input in pixels: the side of a square, or height and width, such as 32 64 (default: the
            size of the weights, or of the recipe).
        seconds: Time for measuring all methods together, in seconds. A method whose single step takes longer adds
            to it.
    """
    import numpy as np

    from vitrail.recipes.finetune_by_data import WEIGHTS
    from vitrail.recipes.known import Known
    from vitrail.transfer.recommend import METHODS, Situation, recommend
    from vitrail.weights.load import read_card

    card = read_card(weights or WEIGHTS)
    began = time.perf_counter()
    known = Known()
    settings = read_settings(reading, path, used=tuple(reading))
    splits = known.splits(settings, seed=0)
    request = PlanRequest(
        path=str(path),
        weights=str(weights or WEIGHTS),
        named=weights is not None,
        card=card,
        image_size=image_size,
        limit=None if time_limit is None else 60 * parse_minutes(time_limit),
        seconds=seconds,
        known=known,
        splits=splits,
        opening=time.perf_counter() - began,
        reading=reading,
        settings=settings,
    )
    machine = _machine()
    options = [*probe_options(request), *training_options(request)]
    options.sort(key=lambda option: METHODS.index(option.name))
    same_classes = list(card.class_names) == splits.class_names
    larger = image_size is not None and math.prod(height_width(image_size)) > math.prod(card.config.image_size)
    counts = _images_of_classes(splits.train.labels, splits.class_names)
    labels = None if isinstance(splits.train.labels, np.ndarray) else sum(counts.values())
    seen = Situation(len(splits.train), len(counts), same_classes and larger, labels)
    found = recommend(seen, options, seconds=request.limit, memory=machine["free_memory_bytes"])
    return replace(found, data=_data(request), machine=machine)


def _machine() -> dict[str, Any]:
    """Return the facts about the machine that the times depend on."""
    import torch

    from vitrail.device import available_cores, choose_device, compute_precision, free_memory

    device = choose_device(None)
    return {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "precision": compute_precision(device),
        "free_memory_bytes": free_memory(device),
    }


def _data(request: PlanRequest) -> dict[str, Any]:
    """Return the facts about the images that the recommendation depends on."""
    from vitrail.data.images.bands import layouts

    splits = request.splits
    counts = _images_of_classes(splits.train.labels, splits.class_names)
    sizes = [(one.height, one.width) for one in layouts(splits.train)]
    median = [int(statistics.median(side)) for side in zip(*sizes, strict=True)] if sizes else [0, 0]
    by_count = sorted(counts.items(), key=lambda one: one[1]) or [("", 0)]
    fewest, most = by_count[0], by_count[-1]
    images = {
        name: len(source) for name in ("train", "validation", "test") if (source := getattr(splits, name)) is not None
    }
    return {
        "path": request.path,
        "kind": splits.report.kind,
        "images": images,
        "classes": len(counts),
        "fewest": list(fewest),
        "most": list(most),
        "imbalance": round(most[1] / max(fewest[1], 1), 2),
        "median_size": median,
        "notes": splits.report.lines(),
    }


def _images_of_classes(labels: Labels, class_names: Sequence[str]) -> dict[str, int]:
    """Return each class and its number of images, as `class_counts` does. A number is no class, and is left out."""
    from vitrail.data.labels.numbers import Numbers
    from vitrail.data.labels.sets import Answers, class_counts

    if isinstance(labels, Numbers):
        return {}
    numbers: list[str] = []
    if isinstance(labels, Answers):
        numbers = [name for name, part in labels.parts.items() if isinstance(part.labels, Numbers)]
    counts = class_counts(labels, len(class_names)).tolist()
    return {name: count for name, count in zip(class_names, counts, strict=True) if name not in numbers}


def show(result: Recommendation) -> TerminalPage:
    """Return the plan as text for a terminal; commands stay on lines of their own, to copy."""
    from vitrail.words import binary_size, time_span

    data, machine = result.data, result.machine
    use = {"train": "train on", "validation": "choose by", "test": "test"}
    held = ", ".join(f"{count:,} to {use[name]}" for name, count in data["images"].items())
    (few, fewest), (much, most), (height, width) = data["fewest"], data["most"], data["median_size"]
    spread = f"{fewest:,} of {few} to {most:,} of {much} ({data['imbalance']:g} to 1)"
    spread = f"{most:,} of each" if fewest == most else spread
    busy = f"load {machine['load']}"
    if (machine["load"] or 0) > BUSY * machine["cores"]:
        busy += ": other programs are running, so these times are too long"
    classes = f"{data['classes']:,} classes, {spread}" if data["classes"] else "numbers"
    lines = [
        f"images    {data['path']} ({data['kind']}): {held}; {classes}; {height} x {width} px (median)",
        f"machine   {machine['name']}, {machine['cores']} cores, {machine['precision']}, "
        f"{binary_size(machine['free_memory_bytes'])} free, {busy}",
        *(f"note      {note}" for note in data["notes"][:NOTES]),
    ]
    rows = []
    for option in result.options:
        rate = f"{option.images_per_second:,.{0 if option.images_per_second >= 100 else 1}f}"
        mark = "> " * option.recommended
        memory = binary_size(option.memory_bytes)
        rows.append((mark + option.name, option.expected, time_span(option.seconds), memory, rate, option.why))
    width = max(len(option.name) for option in result.options)
    return page(
        lines,
        table(("", "expected", "time", "memory", "images/s", ""), rows),
        [Unwrapped(f"{option.name:{width}}  {option.command}") for option in result.options],
        "",
        f"recommended: {result.recommended.name}. {result.why}",
        f"({result.source})",
    )


def as_json(result: Recommendation) -> Any:
    """Return the plan as JSON values."""
    return {"recommended": result.recommended.name, "command": result.recommended.command, **asdict(result)}
