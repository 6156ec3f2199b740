"""Settings that depend on the training images: the recipe if none is named, and a warmup that fits the run's length.

Each decision comes with its reason in words, so that the user can correct it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vitrail.durations import Percent
from vitrail.model.variants import variant
from vitrail.ranges import InputSize, height_width, shortest_size
from vitrail.training.run import NOMINAL, Run
from vitrail.transfer.recommend import PRE_TRAINING

if TYPE_CHECKING:
    from vitrail.data.item import IndexedSource

TINY = 16
"""Largest side in pixels of an image that is treated as a glyph."""
SMALL = 96
"""Largest side in pixels of images that are not resized for training."""
LONGEST_WARMUP = 20.0
"""Longest published warmup, in percent of the run (100 of 500 steps, big_vision and BiT)."""
USUAL_WARMUP = 10.0
"""The paper's warmup on ImageNet, in percent of the run (10,000 of 93,800 steps)."""
LARGEST_BATCH = 512
"""Images per step if the run does not set the batch size (`vitrail.training.batch_size`)."""
PHOTOGRAPH_SIDE, PHOTOGRAPH_PATCH = 96, 8
"""Sides in pixels to which photographs are resized for training from scratch, and of a patch: 144 tokens."""
LABEL_FREE = ("masked-patch", "mae", "beit", "tokenizer", "dino", "dinov2")
"""Objectives with a recipe of their own for small images, such as mae-small."""
ENOUGH_PASSES = 2
"""Photographs become smaller if the time allows fewer passes over them at full size."""
SIDES = (64, 48, 32)
"""Sides in pixels to which photographs are made smaller, multiples of the patch."""
ENOUGH_STEPS = 100
"""Number of steps that a short run should have: it gets a smaller batch."""
SMALLEST_BATCH = 16
"""Smallest number of images per step that a time limit leads to."""
EVALUATIONS, FEWEST_EVALUATIONS = 10, 2
"""Number of evaluations in a run, and in one whose time is too short for so many."""
EVALUATED = 0.2
"""Share of a time limit that evaluations may take. Of one minute for 3,068 photographs, ten evaluations on 341 others
left time for seven steps of 16 images."""
FORWARD = 1 / 3
"""Work for an evaluated image as a share of the work for a training image."""


@dataclass(frozen=True)
class TrainingSet:
    """The properties of a training set on which recipes depend."""

    images: int
    """Number of training images."""
    side: int
    """Median of the shorter side in pixels, over a sample of the images."""

    @classmethod
    def of(cls, train: IndexedSource) -> TrainingSet:
        """Return the properties of these training images. The side is measured on a few of them."""
        from vitrail.data.images.bands import layouts

        sides = [min(one.height, one.width) for one in layouts(train)]
        return cls(len(train), round(statistics.median(sides)) if sides else 0)


def choose_recipe(data: TrainingSet, objective: str = "supervised") -> tuple[str, str]:
    """Return the name of the recipe for training from scratch on such data, and the reason in words."""
    seen = f"{data.images:,} training images of about {data.side} pixels"
    if objective in LABEL_FREE:
        return f"{objective}-small", f"the objective {objective}, and {seen}"
    if data.side <= TINY:
        return "digits", f"{seen}: one token for every 2 x 2 pixels"
    if data.side <= SMALL:
        return "scratch-small", seen
    if data.images >= PRE_TRAINING:
        return "scratch-photos", seen
    better = "`vitrail finetune DIR`, from the weights that vitrail brings along, is better with few photographs"
    return "scratch-photos", f"{seen}; {better}"


def fit_image_size(run: Run, data: TrainingSet) -> Run:
    """Return `run` with a smaller size and larger patches for photographs, if it has no size of its own."""
    if run.image_size is not None or data.side <= SMALL:
        return run
    return replace(run, model=f"{run.network.partition('/')[0]}/{PHOTOGRAPH_PATCH}", image_size=PHOTOGRAPH_SIDE)


def whole_patches(size: InputSize, run: Run) -> InputSize:
    """Return the smallest size in whole patches of the network of `run` whose sides are not below those of `size`."""
    patch = getattr(variant(run.network, **run.vit.changes()), "patch", 1)
    height, width = height_width(size)
    return shortest_size((-(-height // patch) * patch, -(-width // patch) * patch))


def evaluated_in_time(run: Run, seen: float, validation: int, asked: Container[str] = ()) -> tuple[Run, str]:
    """Return `run` with fewer evaluations if they took too much of a time in which it sees `seen` images, and why.

    validation: Number of validation images. What is `asked` for does not change.
    """
    affordable = EVALUATED * seen / (FORWARD * validation) if validation else EVALUATIONS
    if affordable >= EVALUATIONS or "evaluate_every" in asked or run.evaluate_every != Percent(100 / EVALUATIONS):
        return run, ""
    count = max(int(affordable), FEWEST_EVALUATIONS)
    why = f"{count} times, because the {validation:,} validation images take a part of the time"
    return replace(run, evaluate_every=Percent(100 / count)), why


def in_time(run: Run, images: int, seen: int, asked: Container[str] = ()) -> tuple[Run, dict[str, str]]:
    """Return `run` as it suits a time that allows to see `seen` images of full size, and the changes in words.

    What is `asked` for, of image_size and batch_size, does not change.

    Where that is only a few passes over the `images`, photographs are resized to fewer pixels: the work for an image
    falls with the square of its side. A batch is small enough for `ENOUGH_STEPS` steps, so that no step takes more than
    a hundredth of the time.
    """
    from vitrail.training.batch_size import default_batch  # which imports torch

    changes, full, passes = dict[str, str](), run.image_size, seen / max(images, 1)
    fixed = not isinstance(full, int) or passes >= ENOUGH_PASSES or "image_size" in asked
    sides = [] if fixed else [height_width(whole_patches(side, run))[0] for side in SIDES]
    sides = [side for side in sides if isinstance(full, int) and side < full]
    if isinstance(full, int) and sides:
        allowed = {side: passes * (full / side) ** 2 for side in sides}
        side = next((side for side in sides if allowed[side] >= ENOUGH_PASSES), sides[-1])
        changes["image_size"] = (
            f"{side}, not {full}: so the time allows about {allowed[side]:.2g} passes over the images, not {passes:.2g}"
        )
        seen, run = int(allowed[side] * images), replace(run, image_size=side)
    batch = run.batch_size or default_batch(images)
    wanted = max(2 ** int(math.log2(max(seen / ENOUGH_STEPS, 1))), SMALLEST_BATCH)
    if wanted < batch and "batch_size" not in asked:
        changes["batch_size"] = f"{wanted}, not {batch}: the time allows about {seen:,} images"
        run = replace(run, batch_size=wanted)
    return run, changes


def has_absolute_warmup(run: Run) -> bool:
    """Return whether the warmup is in steps, epochs or examples. Such a warmup may be too long for a small data set."""
    return not isinstance(run.schedule.warmup, Percent)


def fit_warmup(run: Run, data: TrainingSet) -> tuple[Run, str]:
    """Return `run` with a warmup that fits the number of images, and the change in words ("" if nothing changed).

    A warmup longer than a fifth of the run becomes a tenth of it. Published warmups suit large data: 10,000 steps are a
    tenth of 300 epochs on ImageNet, but more than all steps of 300 epochs on 10,000 images.
    """
    if not has_absolute_warmup(run):
        return run, ""
    images = max(data.images, 1)
    batch = min(run.batch_size or LARGEST_BATCH, images)
    units = {"per_epoch": max(images // batch, 1), "batch_size": batch}
    total = (run.duration or NOMINAL).steps(**units)
    warmup = run.schedule.warmup.steps(**units, total=total)
    if total < 1 or warmup <= LONGEST_WARMUP / 100 * total:
        return run, ""
    schedule = replace(run.schedule, warmup=Percent(USUAL_WARMUP))
    change = f"warmup: {USUAL_WARMUP:g} % of the run, not {run.schedule.warmup}, because it has {total:,} steps here"
    return replace(run, schedule=schedule), change
