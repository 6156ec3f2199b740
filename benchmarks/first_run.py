"""Give a folder of photographs to vitrail and to what others write in thirty lines, each for the same minutes.

    python -m benchmarks.photo_sets clones/ sets/             unpack the public sets
    python -m benchmarks.first_run --data sets/clothing sets/brain sets/pets sets/tiles sets/solar/labels.csv
    python -m benchmarks.first_run --data sets/clothing --busy          beside a process that needs the same cores

The first side is the command that a stranger types, `vitrail VERB DIR`, with a time limit and a seed. The others are
the most frequent class; HOG (histograms of oriented gradients) with logistic regression; and torchvision's resnet18,
from scratch at 64 pixels. Every run is a process of its own and has the machine to itself. Reading and decoding images
counts for all sides, and the start of Python for none.

All sides get the same images: vitrail's own opening of the data, with the seed of the run. Accuracy is that on the test
images, which no side uses before. Images that vitrail then holds out of the training images are training images of the
other sides. Data without test images are measured on the held-out images; vitrail chooses its best weights on them, and
the other sides do not use them.

The log holds all finished runs, and the same command continues an interrupted benchmark. A run of vitrail is repeated
when its code or its weights have changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps

from benchmarks import compare, record
from benchmarks.cells import Cell, Cells
from benchmarks.learn import json_of, vitrail_verb
from vitrail.data.item import IndexedSource
from vitrail.data.labels.sets import one_label
from vitrail.data.roles import Splits
from vitrail.data.sources.open import open_data

LOG = record.RESULTS / "first_run.jsonl"
VERBS = ("finetune",)
"""What a stranger types before the folder."""
SHARE = 0.1
"""Share of the training images on which HOG chooses its regularisation."""
HOG_SIDE = RESNET_SIDE = 64
LOADED_SIDE = 80
"""Shorter side of the images from which resnet18 takes its crops; they are reduced to it once."""
BUSY = "import torch\na = torch.randn(1024, 1024)\nwhile True:\n    a @ a"
"""The other process of a busy machine: it never waits."""


class Images(NamedTuple):
    """The images of one set as all sides but vitrail see them."""

    train: list[IndexedSource]
    measured: IndexedSource
    where: str
    """Which images are measured: test or validation."""

    @property
    def labels(self) -> np.ndarray:
        """Classes of the training images, int64 [N]."""
        return np.concatenate([one_label(part.labels, "first_run") for part in self.train])

    @property
    def answers(self) -> np.ndarray:
        """Classes of the measured images, int64 [M]."""
        return one_label(self.measured.labels, "first_run")


def opened(data: str, seed: int) -> Images:
    """Return the images of a data set as `vitrail train DATA --seed SEED` splits them."""
    splits: Splits = open_data(data, seed=seed)
    drawn = "ids" in splits.held_out
    assert splits.validation is not None
    if splits.test is None:
        return Images([splits.train], splits.validation, "validation")
    return Images([splits.train, splits.validation] if drawn else [splits.train], splits.test, "test")


def pictures(sources: list[IndexedSource]) -> Iterator[Image.Image]:
    """Yield the images of the sources, upright and in colour."""
    for source in sources:
        for index in range(len(source)):
            stored = source[index].image
            image = Image.open(io.BytesIO(stored)) if isinstance(stored, bytes) else Image.fromarray(stored)
            image.draft("RGB", (2 * LOADED_SIDE, 2 * LOADED_SIDE))  # decodes large JPEGs at a smaller scale
            yield ImageOps.exif_transpose(image).convert("RGB")


def hog(image: Image.Image, side: int = HOG_SIDE, cell: int = 8, bins: int = 9) -> np.ndarray:
    """Return histograms of oriented gradients (Dalal and Triggs 2005), each block of 2 x 2 cells normalised."""
    grey = np.sqrt(np.asarray(image.convert("L").resize((side, side)), dtype=np.float32) / 255)
    down, right = np.gradient(grey)
    angle = (np.arctan2(down, right) % np.pi) / np.pi * bins
    low, length = np.floor(angle), np.hypot(down, right)
    cells = np.zeros((bins, side // cell, side // cell), dtype=np.float32)
    for number in range(bins):
        part = length * ((low % bins == number) * (1 - angle + low) + ((low + 1) % bins == number) * (angle - low))
        cells[number] = part.reshape(side // cell, cell, side // cell, cell).sum((1, 3))
    blocks = np.concatenate([cells[:, :-1, :-1], cells[:, 1:, :-1], cells[:, :-1, 1:], cells[:, 1:, 1:]])
    blocks = np.minimum(blocks / (np.linalg.norm(blocks, axis=0) + 1e-3), 0.2)
    return np.asarray((blocks / (np.linalg.norm(blocks, axis=0) + 1e-3)).ravel())


def most_frequent(images: Images, seed: int, minutes: float) -> np.ndarray:
    """Predict the most frequent class of the measured images for all of them."""
    return np.full(len(images.answers), np.bincount(images.answers).argmax())


def hog_and_regression(images: Images, seed: int, minutes: float) -> np.ndarray:
    """Predict by logistic regression on HOG; a tenth of the training images choose C, then all are used."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, labels = np.stack([hog(image) for image in pictures(images.train)]), images.labels
    few = np.bincount(labels).min() < 2
    parts = train_test_split(features, labels, test_size=SHARE, random_state=seed, stratify=None if few else labels)

    warnings.simplefilter("ignore", ConvergenceWarning)  # a hundred steps are enough for the accuracy

    def fitted(c: float, x: np.ndarray, y: np.ndarray) -> Any:
        return make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=100)).fit(x, y)

    best = max((1e-4, 1e-3, 1e-2, 1e-1), key=lambda c: fitted(c, parts[0], parts[2]).score(parts[1], parts[3]))
    found = fitted(best, features, labels).predict(np.stack([hog(image) for image in pictures([images.measured])]))
    return np.asarray(found)


def resnet18(images: Images, seed: int, minutes: float) -> np.ndarray:
    """Predict by torchvision's resnet18, trained from scratch; one cycle of the learning rate ends with the time."""
    from torchvision.models import resnet18 as network
    from torchvision.transforms import v2

    start, limit = time.monotonic(), 60 * minutes
    torch.manual_seed(seed)
    small = v2.Resize(LOADED_SIDE)
    train, labels = [small(image) for image in pictures(images.train)], torch.from_numpy(images.labels)
    tensor = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)])
    crop = v2.Compose([v2.RandomResizedCrop(RESNET_SIDE, scale=(0.35, 1)), v2.RandomHorizontalFlip(), tensor])
    model = network(num_classes=int(labels.max()) + 1).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    batch = min(64, max(8, len(train) // 8))
    while (done := (time.monotonic() - start) / limit) < 1:
        for rows in torch.randperm(len(train)).split(batch)[: max(1, len(train) // batch)]:
            done = min((time.monotonic() - start) / limit, 1)
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * min(done / 0.2, (1 - done) / 0.8)
            inputs = torch.stack([crop(train[row]) for row in rows.tolist()]).contiguous(
                memory_format=torch.channels_last
            )
            loss = torch.nn.functional.cross_entropy(model(inputs), labels[rows], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if done == 1:
                break
    middle = v2.Compose([v2.Resize(72), v2.CenterCrop(RESNET_SIDE), tensor])
    measured = torch.stack([middle(image) for image in pictures([images.measured])])
    with torch.inference_mode():
        outputs = [model.eval()(some) for some in measured.split(64)]
    return np.asarray(torch.cat(outputs).argmax(1))


BASELINES: dict[str, Callable[[Images, int, float], np.ndarray]] = {
    "most frequent class": most_frequent,
    "HOG + logistic regression": hog_and_regression,
    "resnet18 from scratch": resnet18,
}


def baseline(name: str, data: str, seed: int, minutes: float) -> Cell:
    """Run a baseline in this process. Return its accuracy in percent."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    images, start = opened(data, seed), time.monotonic()
    found, answers = BASELINES[name](images, seed, minutes), images.answers
    shares = [(found[answers == one] == one).mean() for one in np.unique(answers)]
    return {
        "top1": round(100 * float((found == answers).mean()), 2),
        "balanced": round(100 * float(np.mean(shares)), 2),
        "images": len(answers),
        "where": images.where,
        "seconds": round(time.monotonic() - start, 1),
    }


def ours(verb: str, data: str, seed: int, minutes: float, folder: Path) -> Cell:
    """Run the command that a stranger types. Return its accuracy in percent, as the run itself gives it."""
    start = time.monotonic()
    ran = vitrail_verb([verb, data, f"--time-limit={minutes}min", f"--seed={seed}", f"--out={folder}"])
    wall, images = time.monotonic() - start, opened(data, seed)
    numbers = ran["test"] or ran["best"]
    if numbers["count"] != len(images.answers) or bool(ran["test"]) != (images.where == "test"):
        raise SystemExit(
            f"vitrail measured {numbers['count']:g} images of {data}, not the {len(images.answers)} of all"
        )
    return {
        "top1": round(100 * numbers["top1"], 2),
        "balanced": round(100 * numbers["balanced_accuracy"], 2),
        "images": len(images.answers),
        "where": images.where,
        "seconds": ran["seconds"],
        "wall": round(wall, 1),
        "steps": ran["steps"],
        "ended": ran["ended"],
    }


@cache
def version() -> str:
    """Return a fingerprint of vitrail's code and of the weights in it."""
    mark = hashlib.sha256()
    for path in sorted((record.ROOT / "vitrail").rglob("*")):
        if path.suffix in (".py", ".safetensors"):
            mark.update(path.read_bytes())
    return mark.hexdigest()[:8]


@contextlib.contextmanager
def beside(busy: bool) -> Iterator[None]:
    """Context in which, if the machine is to be busy, another process works on as many cores as the run."""
    process = subprocess.Popen([sys.executable, "-c", BUSY]) if busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def run(side: str, data: str, seed: int, options: argparse.Namespace) -> Cell:
    """Run one side in a new process, and record how much of the machine other processes used."""
    with beside(options.busy), compare.foreign_load() as foreign:
        if side in BASELINES:
            words = [f"--one={side}", f"--data={data}", f"--seeds={seed}", f"--minutes={options.minutes}"]
            found: Cell = json_of([sys.executable, "-m", "benchmarks.first_run", *words])
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = ours(side.removeprefix("vitrail "), data, seed, options.minutes, Path(folder))
    return {**found, "foreign_load": round(foreign[0], 3)}


def name_of(data: str) -> str:
    """Return the name of a data set: that of its folder."""
    path = Path(data)
    return path.parent.name if path.is_file() else path.name


def over_seeds(values: list[float]) -> str:
    """Return "mean ± deviation"."""
    found: Any = record.over_seeds(values)
    return record.with_deviation(**found)


def finished(log: Path, sets: list[str]) -> list[Cell]:
    """Return the rows of a log for these sets; of several versions of vitrail the one that was measured last."""
    rows: dict[tuple[Any, ...], Cell] = {}
    for name, result in Cells(log).done.items():
        if (key := json.loads(name))["set"] in sets:
            rows[tuple(value for setting, value in key.items() if setting != "version")] = {**key, **result}
    return sorted(rows.values(), key=lambda row: (row["busy"], row["threads"], sets.index(row["set"]), row["seed"]))


def conditions(row: Cell) -> str:
    """Return how the machine was used: "1 thread", "2 threads, busy"."""
    return f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}{', busy' if row['busy'] else ''}"


def _both(rows: list[Cell]) -> str:
    """Return mean and deviation over seeds of top-1 and balanced accuracy, "" without rows."""
    return " / ".join(over_seeds([row[key] for row in rows]) for key in ("top1", "balanced")) if rows else ""


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: mean and standard deviation over seeds of both accuracies, a line for each set and way."""
    rows = document["rows"]
    measured = {row["side"] for row in rows}
    sides = [*(side for side in BASELINES if side in measured), *sorted(measured - BASELINES.keys())]
    lines: list[tuple[str, ...]] = [("top-1 / balanced accuracy, %", "seeds", *sides)]
    for name, how in dict.fromkeys((row["set"], conditions(row)) for row in rows):
        some = [row for row in rows if (row["set"], conditions(row)) == (name, how)]
        cells = [_both([row for row in some if row["side"] == side]) for side in sides]
        seeds = str(len({row["seed"] for row in some}))
        lines.append((f"{name}, {some[0]['images']} {some[0]['where']} images, {how}", seeds, *cells))
    return lines


def main() -> None:
    """Run what the log lacks, print the table and write results/first_run.json."""
    parser = record.arguments(__doc__)
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="DIR", help="folders, or anything that vitrail takes"
    )
    parser.add_argument("--verbs", nargs="*", default=list(VERBS), help="train, finetune: what a stranger types")
    parser.add_argument("--baselines", nargs="*", choices=list(BASELINES), default=list(BASELINES))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--busy", action="store_true", help="with another process that needs the same cores")
    parser.add_argument("--log", type=Path, default=LOG, help="file of finished runs")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="start no run after this time")
    parser.add_argument("--one", choices=list(BASELINES), help=argparse.SUPPRESS)
    parser.set_defaults(threads=2)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(baseline(options.one, options.data[0], options.seeds, options.minutes)))
        return
    if options.quick:
        options.minutes, options.seeds, options.log = 0.1, 1, Path(tempfile.mkdtemp()) / "log.jsonl"
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of all children
    sides = [f"vitrail {verb}" for verb in options.verbs] + options.baselines
    cells = Cells(options.log, options.stop_after)
    for seed in range(options.seeds):
        for data in options.data:
            for side in sides:
                key = {"set": name_of(data), "data": open_data(data, seed=seed).fingerprint, "side": side, "seed": seed}
                key |= {"minutes": options.minutes, "threads": options.threads, "busy": options.busy}
                key |= {} if side in BASELINES else {"version": version()}
                cells.get(partial(run, side, data, seed, options), **key)
    rows = finished(options.log, [name_of(data) for data in options.data])
    record.print_lines(f"{options.minutes:g} minutes", summary({"rows": rows}))
    if cells.missing:
        print(f"{cells.missing} runs are missing: the same command continues with them", file=sys.stderr)
    record.save("first_run", options, missing=cells.missing, rows=rows)


if __name__ == "__main__":
    main()
