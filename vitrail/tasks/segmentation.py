"""The class of each pixel of an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.item import IndexedSource
from vitrail.data.labels.masks import Masks
from vitrail.data.labels.sets import Labels
from vitrail.data.settings import Preparation
from vitrail.data.sources.indexed import GivenImages
from vitrail.data.spreadsheet import SafeWriter
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.classify import BEST_CLASSES, check_rows
from vitrail.evaluation.metric import PIXELS, Metric, metric_in_words
from vitrail.evaluation.pixel_scores import STORED, TRUE, PixelResults, score_pixels
from vitrail.files import replacing_text
from vitrail.objective.settings import Segmentation, Supervised
from vitrail.tasks.prediction import Prediction
from vitrail.tasks.task import PredictedColumns, Task, shown_names
from vitrail.terminal import TerminalPage, page, table, unreadable_lines
from vitrail.words import listing

if TYPE_CHECKING:
    from vitrail.data.benchmarks.imagenet_labels import AnswerKey
    from vitrail.data.npz import Npz
    from vitrail.evaluation.classify import Batches, Predict
    from vitrail.evaluation.groups import GroupAccuracy
    from vitrail.weights.card import Card

SHOWN = 40
"""Maximum number of classes in the table on a terminal; --json and classes.csv have all of them."""
COLUMNS = ("class", "pixels", "IoU")
MIXED = {"mixup": 0.0, "cutmix": 0.0}
"""Settings of `Augment` that mix the labels of two images, and their values without mixing."""


class SegmentationTask(Task[PixelResults]):
    """See the module."""

    name = "segmentation"
    predicts = "the class of each pixel"
    probable = False
    unrejected = ", whose pixels have each their own class"
    logged = (*PIXELS, "loss", "count")

    def holds(self, labels: Labels) -> bool:
        """See `Task`."""
        return isinstance(labels, Masks)

    def adapt(self, run: Any, labels: Labels) -> tuple[Any, dict[str, str]]:
        """See `Task`: cross-entropy of each pixel, mIoU, whole images, no mixing, and no calibration."""
        why: dict[str, str] = {}
        objective = run.objective
        if isinstance(objective, Supervised) and replace(objective, smoothing=0.0) == Supervised():
            smoothed = ", of which none is smoothed" * bool(objective.smoothing)
            why["objective.kind"] = f"segmentation: the labels are masks{smoothed}"
            run = replace(run, objective=Segmentation())
        if not isinstance(run.objective, Segmentation):
            raise UsageError(
                f"objective {objective.kind} with these settings cannot learn from the masks of {run.data.path}. Set "
                "objective.kind to segmentation, which has no settings, or give the folder of the images alone"
            )
        by_class = {
            "data.sampler": run.data.sampler != "uniform",
            "knn": run.knn,
            "fewshot": run.fewshot,
            "augment_on device": run.augment_on == "device",
            "decode_on device": run.decode_on == "device",
        }
        if wrong := [name for name, asked in by_class.items() if asked]:
            raise UsageError(f"{listing(wrong, quoted=False)}: does not work with masks. Leave it out")
        metric, preprocess = run.metric, run.preprocess
        if metric.name not in PIXELS and type(metric) is Metric:
            why["metric.name"] = f"miou, the mean intersection over union: {metric.name} needs one label for each image"
            metric = replace(metric, name="miou")
        if type(metric) is not Metric:  # one of the user's own may need classes of whole images: it is tried on a mask
            metric.measured(PixelResults(["0", "1"], np.arange(1), np.ones((1, 3, 2), dtype=np.int64), np.zeros(1)))
        if preprocess is None or preprocess.resize is None:
            why["preprocess"] = "squash: each pixel of an image gets a class"
            preprocess = replace(preprocess or Preparation(), resize="squash")
        if preprocess.resize != "squash":
            raise UsageError(
                f"preprocess.resize {preprocess.resize} cuts off or adds parts of an image, and each pixel of its mask "
                "gets a class. Use preprocess.resize squash; an image_size of HEIGHT WIDTH keeps proportions"
            )
        if mixed := {name: none for name, none in MIXED.items() if getattr(run.augment, name) != none}:
            why["augment"] = f"without {' and '.join(mixed)}, which mix the classes of whole images"
        if run.calibrate:
            why["calibrate"] = "no: temperature scaling is not measured on pixels"
        augment = replace(run.augment, **mixed)
        changed = {"metric": metric, "preprocess": preprocess, "augment": augment, "augment_on": "host"}
        return replace(run, calibrate=False, **changed), why

    def measure(
        self,
        predict: Predict,
        images: Batches,
        class_names: Sequence[str],
        card: Card,
        *,
        temperature: float,
        best: int = BEST_CLASSES,
        key: AnswerKey | None = None,
    ) -> PixelResults:
        """See `Task`."""
        return score_pixels(predict, images, class_names)

    def activated(self, logits: Tensor, card: Card) -> Tensor:
        """See `Task`: the softmax at each place."""
        return logits.softmax(dim=1)

    def outputs(self, activated: Tensor, card: Card) -> Tensor:
        """See `Task`."""
        return activated.log()

    def meaning(self, card: Card, *, inside: bool) -> dict[str, Any]:
        """See `Task`."""
        what = "probabilities" if inside else "logits"
        return {
            "meaning": f"{what} [batch, class_names, rows, columns] of the classes of parts of the image: enlarge them "
            "bilinearly (without aligned corners) to the image; the largest is the class of a pixel"
        }

    def predictions(self, logits: Tensor, card: Card, top: int) -> Iterator[Prediction]:
        """See `Task`: the share of the pixels that each class has."""
        return self.of_tiles(logits, card, top, [(1.0, 1.0)] * len(logits))

    def of_tiles(
        self, logits: Tensor, card: Card, top: int, filled: Sequence[tuple[float, float]]
    ) -> Iterator[Prediction]:
        """See `Task`: shares of the pixels that are in the image."""
        names, wide = shown_names(card), F.interpolate(logits.float(), card.preprocess.size, mode="bilinear")
        for whole, (height, width) in zip(wide.argmax(dim=1).cpu().numpy(), filled, strict=True):
            rows, columns = (
                max(1, round(part * side)) for part, side in zip((height, width), whole.shape, strict=True)
            )
            classes = whole[:rows, :columns].ravel()
            shares = np.bincount(classes, minlength=len(names)) / len(classes)
            yield Prediction("", [], [], numbers=dict(zip(names, shares.round(6).tolist(), strict=True)))

    def columns(self, logits: Tensor, card: Card, top: int, reject: float | None = None) -> PredictedColumns:
        """See `Task`: shares of the pixels."""
        rows = [list((one.numbers or {}).values()) for one in self.predictions(logits, card, top)]
        return {"shares": np.array(rows).reshape(len(rows), len(shown_names(card)))}

    def images(self, source: IndexedSource, who: str) -> IndexedSource:
        """See `Task`."""
        if not isinstance(source.labels, Masks):
            raise DataError(
                f"{who}, which predicts the class of each pixel, needs images with masks: images/NAME.jpg and "
                "masks/NAME.png"
            )
        return source

    def given(self, images: list[Any], labels: Sequence[Any], names: list[str], *, bands: bool) -> GivenImages:
        """See `Task`."""
        raise DataError("masks that Python holds cannot be given. Write images/NAME.jpg and masks/NAME.png")

    def read(self, file: Npz, class_names: Sequence[str]) -> PixelResults:
        """See `Task`."""
        arrays: dict[str, Any] = {field: file.read(name, "fi") for name, field in STORED.items()}
        check_rows(arrays, {"index": ("i", 1), "pixels": ("i", 3), "losses": ("f", 1)})
        if arrays["pixels"].shape[1:] != (3, len(class_names)):
            raise ValueError(f"pixels are {arrays['pixels'].shape}, and there are {len(class_names)} classes")
        return PixelResults(list(class_names), **arrays)

    def page(
        self, subject: str, found: PixelResults, notes: list[str], groups: Sequence[GroupAccuracy], temperature: float
    ) -> TerminalPage:
        """See `Task`."""
        rows = [(name, f"{pixels:,}", "-" if iou != iou else f"{iou:.2%}") for name, pixels, iou in _rows(found)]
        more = [f"{len(rows) - SHOWN} more classes: --json"] if len(rows) > SHOWN else []
        return page(
            f"{subject}: {found.in_words()} (the most frequent class has {found.largest_share:.2%} of the pixels), "
            f"loss {found.loss:.4f}, {found.count:,} images",
            notes,
            table(COLUMNS, rows[:SHOWN]),
            [*more, *unreadable_lines(found.bad)],
        )

    def as_json(self, found: PixelResults, groups: Sequence[GroupAccuracy], temperature: float) -> dict[str, Any]:
        """See `Task`; the IoU of a class that is neither there nor predicted is null."""
        return {
            **found.metrics(),
            "largest_share": found.largest_share,
            "classes": [
                {"name": name, "pixels": pixels, "iou": None if iou != iou else iou}
                for name, pixels, iou in _rows(found)
            ],
            "bad": [{"id": id_, "reason": reason} for id_, reason in found.bad],
        }

    def write(self, found: PixelResults, out: Path, *, raw: bool = False) -> None:
        """See `Task`: classes.csv."""
        with replacing_text(out / "classes.csv") as file:
            writer = SafeWriter(file, raw=raw)
            writer.writerow(COLUMNS)
            writer.writerows((name, pixels, "" if iou != iou else f"{iou:.6f}") for name, pixels, iou in _rows(found))

    def sentence(self, numbers: Mapping[str, float], classes: int) -> str:
        """See `Task`."""
        return f"{', '.join(metric_in_words(name, numbers[name]) for name in PIXELS)}, loss {numbers['loss']:.4f}"


def _rows(found: PixelResults) -> list[tuple[str, int, float]]:
    """Return name, number of pixels and IoU of each class."""
    pixels = found.pixels[:, TRUE].sum(axis=0)
    return list(zip(found.class_names, pixels.tolist(), found.iou.tolist(), strict=True))
