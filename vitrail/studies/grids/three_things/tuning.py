"""Fine-tuning a part of a network: the trainings that Tables 5 and 6 of the follow-up share (section 4)."""

from __future__ import annotations

from dataclasses import replace

from vitrail.durations import Steps
from vitrail.recipes.registry import recipe
from vitrail.studies.grids.three_things.depth import baseline
from vitrail.studies.laptop import fine_tuning, pre_training
from vitrail.studies.study import Cell, Stage
from vitrail.training.run import Tune

EPOCHS, STEPS = 15, 200
RATES = (1e-3, 4e-3)
ALL = "everything"
PARTS: dict[str, Tune] = {
    ALL: "all",
    "attention": "attention",
    "FFN": "ffn",
    "attention and positions": "attention+positions",
}
"""Row -> what is tuned; the paper's text names attention, its authors' own switch also trains the positions."""
SIZES = ("ti16", "s16", "b16", "l16")


def start() -> Stage:
    """Return a network trained with labels, a small one so that little is left to learn, as in the follow-up."""
    return Stage(pre_training("ViT-64/8", EPOCHS, tested=True))


def part(
    name: str,
    at: float | str,
    on: str,
    side: int,
    *,
    keep_head: bool = False,
    share: float | None = None,
    steps: int = STEPS,
) -> Cell:
    """Return the accuracy of a part of it tuned on a data set, or on a share of it, at the better of two rates."""
    stages = []
    for rate in RATES:
        tuned = fine_tuning(start(), on, rate, side)
        data = replace(tuned.run.data, subset=share)
        run = replace(tuned.run, data=data, tune=PARTS[name], duration=Steps(steps), keep_head=keep_head)
        stages.append(Stage(run, tuned.start))
    first, *others = stages
    return Cell(name, at, first, others, metric="top-1")


def published_part(row: str, size: str, name: str, on: str, at: str) -> Cell:
    """Return the follow-up's fine-tuning at 384 pixels of a part of a network of its Table 1."""
    run = recipe("three-things/finetune")
    keep = on == "imagenet"
    run = replace(run, data=replace(run.data, path=on), tune=PARTS[name], keep_head=keep)
    return Cell(row, at, Stage(run, baseline(size, "-400-ls")), metric="top-1")
