"""Compare one network that gives two answers for a photograph with two networks that give one each.

    python -m benchmarks.several_answers --clones clones/          continues where it was interrupted

The photographs are 2,624 solar cells (zae-bayern/elpv-dataset, cloned into clones/) with two columns of their authors:
the probability of a defect, a number, and the type of the cell, mono- or polycrystalline, a class. A fifth is for the
test. A small Vision Transformer is trained from scratch for equally many epochs on both columns, on each alone, and on
both with a half of the cells of each column empty, drawn apart. A seed draws the split and is that of the run.
"""

from __future__ import annotations

import csv
import subprocess
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import record
from benchmarks.cells import Cell, Cells, arguments
from benchmarks.finetune_default import CACHE
from benchmarks.learn import vitrail_verb
from benchmarks.photo_sets import git_folder

LOG = record.RESULTS / "several_answers.jsonl"
REPOSITORY, DATA = "zae-bayern/elpv-dataset", "src/elpv_dataset/data/"
SIDE = 64
"""Side of the images in pixels; the original is 300."""
NETWORK = ("--model", "Ti/8", "--vit.width", "128", "--vit.depth", "4", "--vit.heads", "2", "--vit.mlp-dim", "256")
HOW = ("--batch-size", "32", "--progressive.start", "1", "--checkpoint-every", "100 %", "--device", "cpu")
NUMBER, KIND = "defect:numbers", "kind:classes"
WAYS: dict[str, tuple[str, ...]] = {
    "both": (NUMBER, KIND),
    "both, half of each known": (NUMBER, KIND),
    "defect alone": (NUMBER, "--objective.kind", "regression"),
    "kind alone": (KIND,),
}
"""Name of a network -> its answers, and other flags."""


def write_images(clone: Path, folder: Path) -> None:
    """Write the cells as images of `SIDE` pixels, and labels.csv of their authors."""
    folder.mkdir(parents=True)
    archive = subprocess.Popen(["git", "-C", str(clone), "archive", "HEAD", DATA], stdout=subprocess.PIPE)
    with tarfile.open(fileobj=archive.stdout, mode="r|") as members:
        for member in members:
            name, file = Path(member.name).name, members.extractfile(member) if member.isfile() else None
            if file is not None and name.endswith(".png"):
                Image.open(file).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX).save(folder / name)
            elif file is not None and name == "labels.csv":
                (folder / name).write_bytes(file.read())
    if archive.wait():
        raise SystemExit(f"git cannot read {clone}")


def write_list(folder: Path, seed: int, half: bool, path: Path) -> None:
    """Write the list of a seed: image, defect, kind, split; with `half`, half of the training cells are empty."""
    random, rows = np.random.default_rng(seed), []
    for line in (folder / "labels.csv").read_text().splitlines():
        image, defect, kind = line.split()
        test, empty = random.random() < 0.2, random.random(2) < 0.5
        defect, kind = ("" if half and not test and empty[at] else cell for at, cell in enumerate((defect, kind)))
        rows.append((str(folder / Path(image).name), defect, kind, "test" if test else "train"))
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("image", "defect", "kind", "split"), *rows])


def measured(way: str, data: Path, epochs: float, seed: int, folder: Path) -> Cell:
    """Train, and return what the network reaches on the test images, and the seconds of its training."""
    given = ["--epochs", str(epochs), f"--seed={seed}", f"--out={folder}", "--resume=auto"]
    ran = vitrail_verb(["train", str(data), *NETWORK, *HOW, *given, "--data.answers", *WAYS[way]])
    test: dict[str, float] = ran["test"]
    names = {"defect_r2": ("defect.r2", "r2"), "defect_mae": ("defect.mae", "mae"), "kind_top1": ("kind.top1", "top1")}
    found = {name: test.get(ours, test.get(alone)) for name, (ours, alone) in names.items()}
    return {**{name: round(value, 4) for name, value in found.items() if value is not None}, "steps": ran["steps"]}


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: mean and standard deviation over seeds of each number of each network."""
    titles = {"defect_r2": "R2 of the defect, %", "defect_mae": "its MAE, points", "kind_top1": "kind right, %"}
    lines = [("network", *titles.values())]
    for way in WAYS:
        rows = [row for row in document["rows"] if row["way"] == way]
        each = [[100 * row[name] for row in rows if name in row] for name in titles]
        lines.append((way, *(record.with_deviation(**record.over_seeds(values)) if values else "" for values in each)))
    return lines


def main() -> None:
    """Run what the log lacks, print the table and write results/several_answers.json."""
    parser = arguments(__doc__, LOG)
    parser.add_argument("--clones", type=Path, required=True, help="folder of clones, as benchmarks.photo_sets has it")
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the images")
    options = parser.parse_args()
    if options.quick:
        options.epochs = 0.05
    cells, images = Cells.begin(options), options.cache / f"solar {SIDE}"
    clone = git_folder(options.clones, REPOSITORY)
    if clone is None:
        raise SystemExit(f"there is no clone of {REPOSITORY} in {options.clones}")
    if not images.exists():
        write_images(clone, images)
    rows = []
    for seed in options.seeds:
        for way in WAYS:
            half = "half" in way
            data = options.cache / f"solar answers {'half ' * half}{seed}.csv"
            write_list(images, seed, half, data)
            key = {"set": "solar", "way": way, "seed": seed}
            found = cells.train(partial(measured, way, data, options.epochs, seed), **key, epochs=options.epochs)
            rows.append({**key, **(found or {})})
    record.print_lines("on the test images, mean over seeds", summary({"rows": rows}))
    cells.say_missing()
    record.save("several_answers", options, rows=rows)


if __name__ == "__main__":
    main()
