"""Compare the default of `vitrail finetune` with the paper's protocol and with finetune-small, at equal budgets.

    python -m benchmarks.finetune_default                                  by the number of images that a run sees
    python -m benchmarks.finetune_default --minutes 2 10 40                by the clock, on a machine that is idle

Published weights are not needed: a small network is trained once on 80 classes of CIFAR-100, in the folder `--cache`.
It is then fine-tuned on four sets of real images that it has not seen: the other 20 classes with 100 and with 10 images
each, 12 kinds of flowers, and handwritten digits. Accuracy is that on training images held out of each set, which no
run uses; the test images of the data sets are never opened. A budget in images seen does not depend on the load of the
machine, but counts a frozen part of the network as if it were trained, and ignores that larger batches are quicker.

The log holds all finished runs: the same command continues an interrupted benchmark, and starts no further run after
`--stop-after` minutes. All runs share one process.
"""

from __future__ import annotations

import io
import itertools
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import compare, record
from benchmarks.cells import Cell, Cells
from vitrail.durations import Epochs, Percent
from vitrail.recipes.registry import recipe
from vitrail.training.loop import fit
from vitrail.training.run import Model, Run
from vitrail.verbs.flags.settings import RunArguments, finetuning_run

DATA = Path(os.environ.get("VITRAIL_TEST_DATA", record.ROOT.parent / "shared" / "data"))
LOG = record.RESULTS / "finetune_default.jsonl"
CACHE = Path.home() / ".cache" / "vitrail-benchmarks" / "finetune_default"
NETWORK = Model(width=96, depth=6, heads=3, mlp_dim=384, pool="gap")
"""With patches of 8 pixels, an image of 32 pixels has 16 tokens."""
DEFAULT, PAPER, SMALL = "default", "finetune", "finetune-small"
SIDES = (DEFAULT, PAPER, SMALL)
"""The default, and the recipes that it is compared with."""
HELD_OUT = 40
"""Number of images per class that accuracy is measured on."""
FLOWERS_SIDE = 128
"""Side in pixels to which photographs are reduced once, so that decoding them is no part of the measurement."""

Images = tuple[np.ndarray, np.ndarray]


def cifar() -> Images:
    """Return the training images of CIFAR-100 and their classes."""
    import pyarrow.parquet as pq

    table = pq.read_table(sorted((DATA / "cifar100" / "data").glob("train-*.parquet")))
    pixels = [np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB")) for image in table["img"].to_pylist()]
    return np.stack(pixels), table["fine_label"].to_numpy()


def unseen(labels: np.ndarray) -> np.ndarray:
    """Return which of these images of CIFAR-100 are of the 20 classes that the network has not seen."""
    return np.asarray(labels % 5 == 4)


def flowers() -> Images:
    """Return the training photographs of 12 kinds of flowers and their classes."""
    files = sorted((DATA / "flowers12" / "train").glob("*/*.jpg"))
    names = sorted({file.parent.name for file in files})
    size = (FLOWERS_SIDE, FLOWERS_SIDE)
    pixels = [np.asarray(Image.open(file).convert("RGB").resize(size, Image.Resampling.BICUBIC)) for file in files]
    return np.stack(pixels), np.array([names.index(file.parent.name) for file in files])


def digits() -> Images:
    """Return the training images of the embedded digits and their classes."""
    from vitrail.data.sources.open import find

    train = find("digits").splits["train"]
    pixels = np.stack([np.asarray(train[row].image) for row in range(len(train))])
    return np.broadcast_to(pixels, (*pixels.shape[:3], 3)).copy(), np.asarray(train.labels)


def unseen_cifar() -> Images:
    """Return the images of the classes that the network has not seen."""
    pixels, labels = cifar()
    return pixels[unseen(labels)], labels[unseen(labels)]


SETS: dict[str, tuple[Callable[[], Images], int | None]] = {
    "cifar20": (unseen_cifar, 100),
    "cifar20-few": (unseen_cifar, 10),
    "flowers": (flowers, None),
    "digits": (digits, None),
}
"""Name -> its training images, and the largest number of them per class to train on."""


def write(place: Path, source: Callable[[], Images], each: int | None) -> None:
    """Write a data set to the file `place`: at most `each` images per class to train on, and the held-out images."""
    pixels, labels = source()
    _, labels = np.unique(labels, return_inverse=True)
    train, held_out = [], []
    for label in range(int(labels.max()) + 1):
        rows = np.random.default_rng(label).permutation(np.flatnonzero(labels == label))
        rows, measured = rows[HELD_OUT:], rows[:HELD_OUT]
        train += rows[:each].tolist()
        held_out += measured.tolist()
    place.parent.mkdir(parents=True, exist_ok=True)
    both = {"train": train, "test": held_out}
    values: dict[str, Any] = {f"x_{name}": pixels[rows] for name, rows in both.items()}
    values |= {f"y_{name}": labels[rows] for name, rows in both.items()}
    np.savez(place, **values)


def pretrained(cache: Path, epochs: float) -> Path:
    """Return the run folder of the network to start from; it is trained if `cache` does not hold it."""
    out = cache / f"pretrained-{epochs:g}"
    place = out / "images.npz"
    if not place.exists():
        out.mkdir(parents=True, exist_ok=True)
        pixels, labels = cifar()
        seen = ~unseen(labels)
        np.savez(place, x_train=pixels[seen], y_train=np.unique(labels[seen], return_inverse=True)[1])
    if found := sorted(out.glob("*/report.json")):
        return found[0].parent
    base = replace(recipe("scratch-small"), model="Ti/8", vit=NETWORK, image_size=32, progressive=Run().progressive)
    run = replace(base, data=replace(base.data, path=str(place), holdout=0.02), duration=Epochs(epochs), out=str(out))
    unfinished = sorted(out.glob("*/checkpoints"))
    result = fit(
        replace(run, name="network", checkpoint_every=Percent(10), evaluate_every=Percent(100)),
        resume=unfinished[0].parent if unfinished else None,
    )
    (result.folder / "report.json").write_text("{}\n")
    return result.folder


def run_of(side: str, data: Path, weights: Path, seed: int, budget: dict[str, Any]) -> Run:
    """Return the run of a side, as `vitrail finetune DATA --from WEIGHTS` decides it."""
    given = {"seed": seed, **budget, "evaluate_every": "50 %", "checkpoint_every": "100 %", "track": ()}
    named = None if side == DEFAULT else side
    return finetuning_run(RunArguments(data, named, weights=weights, settings=given))[0]


def decided(run: Run) -> dict[str, Any]:
    """Return what the sides differ in, so that results of another rule are not taken for those of this one."""
    optim, augment = run.optim, run.augment
    return {
        "optim": [optim.name, optim.lr, optim.layer_decay],
        "batch": run.batch_size,
        "tune": run.tune,
        "image_size": run.image_size,
        "augment": [augment.crop, augment.pad, *augment.scale, augment.flip],
    }


def measured(run: Run, out: Path) -> Cell:
    """Fine-tune, and return the accuracy on the held-out images, steps and seconds."""
    with compare.foreign_load() as foreign:
        result = fit(replace(run, out=str(out)))
    assert result.test is not None
    return {
        "accuracy": round(100 * result.test["top1"], 2),
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "foreign_load": round(foreign[0], 2),
    }


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: mean and standard deviation of the accuracy over seeds, by set and budget."""
    rows = document["rows"]
    lines: list[tuple[str, ...]] = [("held-out images, %", "budget", *SIDES)]
    for name, budget in dict.fromkeys((row["set"], row["budget"]) for row in rows):
        texts = []
        for side in SIDES:
            some = [r["accuracy"] for r in rows if (r["set"], r["budget"], r["side"]) == (name, budget, side)]
            spread = f" ±{statistics.stdev(some):.1f}" if len(some) > 1 else ""
            texts.append(f"{statistics.fmean(some):.1f}{spread}" if some else "")
        lines.append((name, budget, *texts))
    return lines


def main() -> None:
    """Run what the log lacks, print the table and write results/finetune_default.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--sets", nargs="+", choices=tuple(SETS), default=list(SETS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--images-seen", type=int, nargs="+", default=[2_000, 10_000, 40_000])
    parser.add_argument("--minutes", type=float, nargs="+", help="budgets of time, in place of --images-seen")
    parser.add_argument("--epochs", type=float, default=1, help="epochs of the network to start from")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the network and the data sets")
    parser.add_argument("--log", type=Path, default=LOG, help="file of finished runs")
    parser.add_argument("--stop-after", type=float, help="minutes after which no further run starts")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.images_seen, options.seeds, options.log = 0.02, [128], [0], None
    record.prepare(options)
    weights, cells, rows = pretrained(options.cache, options.epochs), Cells(options.log, options.stop_after), []
    budgets: dict[str, dict[str, Any]] = {
        f"{count:,} images": {"duration": f"{count} examples"} for count in options.images_seen
    }
    if options.minutes:
        budgets = {f"{minutes:g} min": {"time_limit": minutes} for minutes in options.minutes}
    for seed, (budget, given), name, side in itertools.product(
        options.seeds, budgets.items(), options.sets, options.sides
    ):
        data = options.cache / f"{name}.npz"
        if not data.exists():
            write(data, *SETS[name])
        run = run_of(side, data, weights, seed, given)
        key = {"set": name, "budget": budget, "side": side, "seed": seed, "epochs": options.epochs, **decided(run)}
        cell = cells.train(partial(measured, run), **key)
        rows += [] if cell is None else [{**key, **cell}]
    record.print_lines("accuracy on held-out images, %", summary({"rows": rows}))
    if cells.missing:
        print(f"{cells.missing} runs are missing: the same command continues")
    record.save("finetune_default", options, network=str(NETWORK), rows=rows)


if __name__ == "__main__":
    main()
