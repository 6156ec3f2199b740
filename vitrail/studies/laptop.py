"""The laptop protocol: pre-train on most classes of a data set, then measure on the others, or fine-tune.

A fifth of the classes, drawn by a seed, is left out of pre-training (DOWN), like the paper's transfer data sets.
All networks see small images. The metric is the paper's few-shot accuracy (section 4.1), the mean of ten draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.item import IndexedSource, Subset
from vitrail.data.labels.sets import known, one_label
from vitrail.data.roles import NONE, split_data_set
from vitrail.data.settings import Augment, Data, Preprocess
from vitrail.data.sources.lists import write_list
from vitrail.data.sources.open import open_path
from vitrail.data.split import hold_out
from vitrail.durations import Epochs, Percent, Steps
from vitrail.errors import DataError, UsageError
from vitrail.objective.settings import Supervised
from vitrail.studies.sets import Sets
from vitrail.studies.study import Cell, LaptopData, Stage
from vitrail.training.run import Model, Optim, Run, Schedule

SIDE, LARGER_SIDE = 32, 48
"""Side of the images in pixels, for pre-training and for fine-tuning."""
DOWN = 0.2
"""Share of the classes that pre-training does not see."""
HOLDOUT, SMALL_HOLDOUT = 0.02, 0.1
"""Share of the training images that is held out: of the images to pre-train on, and of smaller data sets (B.1.1)."""
TEST = 1 / 6
"""Share of the images that become test images if the data have no test split."""
LABELS = {"up": "the classes of pre-training", "down": "other classes", "digits": "digits"}
"""Name of a data set -> what a table calls it."""

WIDE = Model(width=128, depth=6, heads=4, mlp_dim=512, patch=4, stem="linear", pool="cls")
NARROW = Model(width=64, depth=6, heads=2, mlp_dim=256, patch=4, stem="linear", pool="cls")
NETWORKS: dict[str, dict[str, Any]] = {
    "ViT-128/4": {"model": "narrow/4", "vit": WIDE},
    "ViT-128/8": {"model": "narrow/8", "vit": replace(WIDE, patch=8)},
    "ViT-64/4": {"model": "narrow/4", "vit": NARROW},
    "ViT-64/8": {"model": "narrow/8", "vit": replace(NARROW, patch=8)},
    "R50x1": {"model": "R50x1", "vit": Model()},
    "R50x1/2": {"model": "R50x1", "vit": Model(width=32)},
    "R50x1/4": {"model": "R50x1", "vit": Model(width=16)},
}
"""Name -> the settings of its architecture: ViT-width/patch with 6 blocks, and R50x1 at its width, half of it and a
quarter. ViT-128/4 costs as much as R50x1; ViT-128/8 and ViT-64/4 cost as much as R50x1/2."""


def pre_training(network: str, epochs: float = 1, *, tested: bool = False, **vit: Any) -> Run:
    """Return the run that pre-trains a network of `NETWORKS`, changed by `vit`, for `epochs` epochs.

    With `tested` its accuracy on the test images of its own classes is measured at the end.
    """
    architecture = NETWORKS[network]
    return Run(
        model=architecture["model"],
        vit=replace(architecture["vit"], **vit),
        image_size=SIDE,
        data=Data(path="up", holdout=HOLDOUT, test=None if tested else NONE),
        objective=Supervised(smoothing=0.1),
        augment=Augment(crop="pad"),
        preprocess=Preprocess((SIDE, SIDE), resize="squash"),
        optim=Optim(name="adamw", lr=1e-3, weight_decay=0.05),
        schedule=Schedule(shape="cosine", warmup=Percent(5)),
        duration=Epochs(epochs),
        batch_size=128,
        evaluate_every=Percent(100),
        checkpoint_every=Percent(25),
    )


def fine_tuning(start: Stage, on: str, lr: float = 1e-3, side: int = LARGER_SIDE) -> Stage:
    """Return the fine-tuning of a pre-trained network on a data set at a higher resolution."""
    run = Run(
        image_size=side,
        data=Data(path=on, holdout=HOLDOUT if on == "up" else SMALL_HOLDOUT),
        augment=Augment(crop="pad", flip=on != "digits"),  # a mirrored digit is another digit or none
        preprocess=Preprocess((side, side), resize="squash"),
        optim=Optim(name="adamw", lr=lr, weight_decay=0.05),
        schedule=Schedule(shape="cosine", warmup=Percent(10)),
        duration=Steps(100),
        batch_size=64,
        evaluate_every=Percent(100),
        checkpoint_every=Percent(50),
    )
    return Stage(run, start)


def transferred(
    row: str, at: float | str, start: Stage, given: LaptopData, rates: Sequence[float] = (1e-3,)
) -> list[Cell]:
    """Return a cell for the fine-tuning of a network on each data set, at the rate best on held-out images."""
    cells = []
    for on in given.sets:
        first, *others = (fine_tuning(start, on, rate) for rate in rates)
        cells.append(Cell(row, at, first, others, metric="top-1", what=f"fine-tuned on {LABELS.get(on, on)}"))
    return cells


def divide(data: str, folder: Path, seed: int = 0, more: Sequence[str] = ("digits",)) -> Sets:
    """Divide a data set by classes and write lists of the images of both parts into `folder`.

    `more` are other data sets to fine-tune on. Raises DataError for fewer than four classes, and the errors of opening
    the data.
    """
    found = open_path(data)
    splits = split_data_set(found, Data(path=data, holdout=0.0), seed)
    names = splits.class_names
    if len(names) < 4:
        raise DataError(f"{data} has {len(names)} classes. A study needs at least 4: most to pre-train on, 2 to test")
    order = np.random.default_rng(seed).permutation(len(names))
    down = np.sort(order[: max(round(DOWN * len(names)), 2)])
    train, test = splits.train, splits.test
    if test is None or not known(test.labels).any():
        rest, held_out = hold_out(train, TEST, seed)
        train, test = Subset(train, rest), Subset(train, held_out)
    folder.mkdir(parents=True, exist_ok=True)
    up = [_of(part, np.setdiff1d(np.arange(len(names)), down)) for part in (train, test)]
    write_list(folder / "up.csv", data, found, {"train": up[0], "test": up[1]})
    write_list(folder / "down.csv", data, found, {"train": _of(train, down), "test": _of(test, down)})
    few = [names[index] for index in down]
    probe = _only(train, few), _only(test, few)
    paths = {"up": str(folder / "up.csv"), "down": str(folder / "down.csv"), "all": data, **_named(more)}
    paths = {name: str(Path(path).resolve()) if Path(path).exists() else path for name, path in paths.items()}
    return Sets(paths, round((1 - HOLDOUT) * len(up[0])), lambda: probe)


def _named(more: Sequence[str]) -> dict[str, str]:
    named = {path if path == "digits" else Path(path).name: path for path in more}
    if len(named) < len(more) or named.keys() & {"up", "down", "all"}:
        raise UsageError(f"the data sets {', '.join(more)} need folder names that differ, and are not up, down or all")
    return named


def _of(source: IndexedSource, labels: np.ndarray) -> Subset:
    """Return the images with one of these labels."""
    return Subset(source, np.flatnonzero(np.isin(one_label(source.labels, "a study"), labels)))


def _only(source: IndexedSource, names: list[str]) -> Subset:
    """Return the images of these classes, with labels that count them."""
    kept = [source.class_names.index(name) for name in names]
    return Subset(Subset(source, np.flatnonzero(np.isin(one_label(source.labels, "a study"), kept))), None, names)
