"""Compare ways to show a whole photograph to a network of square inputs, by a linear classifier of its features.

    python -m benchmarks.framing --data sets/clothing sets/tiles sets/pets sets/brain sets/solar/labels.csv

The ways are the central square, and that of 87.5 % of the shorter side; the whole image, squashed or padded; and the
mean of the features of two squares at the ends of the longer side, which are so small that both together have about as
many tokens. Four-fold logistic regression on all training images, with the best of three strengths for each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import vitrail
from benchmarks import record
from benchmarks.first_run import Images, name_of, opened, pictures

SIDE, SMALL = 128, 96
BATCH = 64
STRENGTHS = (0.003, 0.03, 0.3)


def square(image: Image.Image, side: int, share: float = 1.0, at: float = 0.5) -> Image.Image:
    """Return a square part: `share` of the shorter side, at a place between both ends of the longer one."""
    part = round(min(image.size) * share)
    left, top = (round((length - part) * at) for length in image.size)
    return image.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + part, top + part))


def padded(image: Image.Image) -> Image.Image:
    """Return the whole image with its proportions, on grey."""
    scale, whole = SIDE / max(image.size), Image.new("RGB", (SIDE, SIDE), (127, 127, 127))
    width, height = (max(1, round(length * scale)) for length in image.size)
    small = image.resize((width, height), Image.Resampling.BILINEAR)
    whole.paste(small, ((SIDE - small.width) // 2, (SIDE - small.height) // 2))
    return whole


WAYS: dict[str, tuple[Callable[[Image.Image], Image.Image], ...]] = {
    "87.5 % of the square": (lambda image: square(image, SIDE, 0.875),),
    "central square": (lambda image: square(image, SIDE),),
    "squashed": (lambda image: image.resize((SIDE, SIDE), Image.Resampling.BILINEAR),),
    "padded": (padded,),
    "two squares": (lambda image: square(image, SMALL, at=0.0), lambda image: square(image, SMALL, at=1.0)),
}
"""Name -> the views of an image, whose features are averaged."""


def features(model: Any, images: Images, views: tuple[Callable[[Image.Image], Image.Image], ...]) -> np.ndarray:
    """Return the features of all training images, float32 [N, width]."""
    sums: list[torch.Tensor] = []
    for view in views:
        parts, batch = [], []
        for number, image in enumerate(pictures(images.train), 1):
            batch.append(np.asarray(view(image)))
            if len(batch) == BATCH or number == len(images.labels):
                pixels = torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2)
                with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                    parts.append(model.features(pixels).float())
                batch = []
        sums.append(torch.cat(parts))
    return torch.stack(sums).mean(0).numpy()


def accuracy(values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return top-1 and balanced accuracy in percent of four-fold logistic regression."""
    folds = StratifiedKFold(4, shuffle=True, random_state=0)
    found = []
    for strength in STRENGTHS:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=200))
        answers = cross_val_predict(model, values, labels, cv=folds)
        found.append(((answers == labels).mean(), balanced_accuracy_score(labels, answers)))
    top1, balanced = max(found)
    return {"top1": round(100 * float(top1), 1), "balanced": round(100 * float(balanced), 1)}


def table(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: both accuracies, a line for each set."""
    lines: list[tuple[str, ...]] = [("top-1 / balanced accuracy, %", *WAYS)]
    for name in dict.fromkeys(row["set"] for row in document["rows"]):
        found = {row["way"]: row for row in document["rows"] if row["set"] == name}
        lines.append((name, *(f"{found[way]['top1']:.1f} / {found[way]['balanced']:.1f}" for way in WAYS)))
    return lines


def main() -> None:
    """Measure all ways on all sets, print the table and write results/framing.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR", help="folders, or anything vitrail takes")
    options = parser.parse_args()
    record.prepare(options)
    model, rows = vitrail.load("vitrail/tiny"), []
    for data in options.data:
        images = opened(data, 0)
        for way, views in WAYS.items():
            rows.append({"set": name_of(data), "way": way, **accuracy(features(model, images, views), images.labels)})
            print(rows[-1], flush=True)
    record.print_lines("linear classifiers of vitrail/tiny", table({"rows": rows}))
    record.save("framing", options, rows=rows)


if __name__ == "__main__":
    main()
