"""The result of `fit`: what a run reached, and how it compares with what a classifier must beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from vitrail.evaluation.metric import headline, interval, metric_in_words, on_images
from vitrail.tasks.classes import NEW, OLD
from vitrail.training import floor
from vitrail.training.checkpoints.state import RunStatus
from vitrail.training.folder import RunFolder
from vitrail.words import one_line

GAP = 0.05
"""By how much the interval of the accuracy on the test images must lie below that on the validation images before the
two are said to be different kinds of images. The validation images also choose the step, which gains little."""


@one_line
@dataclass(frozen=True)
class Result:
    """The result of `fit`, which run.json stores."""

    folder: Path
    steps: int
    epochs: float
    seconds: float
    """Of training, with the time before a resume."""
    ended: str
    """Why the run ended: "all steps done", "time limit" or "early stop"."""
    best: dict[str, float]
    """Step and validation metrics of the best model: as in `Classification.metrics` or `LabelScores.metrics`, or loss
    if there are no labels."""
    before: dict[str, float] = field(default_factory=dict)
    """Of a run that keeps classes of its weights: their accuracy on the same images, by old and new classes."""
    test: dict[str, float] | None = None
    """Metrics of the best model on the test images, measured once; None without test images."""
    message: str = ""
    """For the user, in one or two sentences."""
    skipped: int = 0
    """Number of steps that were skipped because their update was not finite."""
    floors: dict[str, dict[str, float]] = field(default_factory=dict)
    """What a classifier must beat on the same images as the headline (`vitrail.training.floor`)."""
    no_floor: str = ""
    """Why there is no linear classifier among them."""
    lost: dict[str, str] = field(default_factory=dict)
    """What could not be written into the run folder -> the reason."""

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 1 if something could not be written."""
        return int(bool(self.lost))

    def without(self, lost: Mapping[str, str]) -> Result:
        """Return the result of a run that could not write `lost`."""
        return replace(self, lost=dict(sorted({**self.lost, **lost}.items())))

    @property
    def verdict(self) -> str:
        """The headline on the test images, else on the validation images, beside the floors; "" without floors."""
        numbers = self.test or self.best
        if not self.floors or not (name := headline(numbers)):
            return ""
        where = "test images" if self.test else "validation images"
        skewed = any("balanced_accuracy" in one for one in self.floors.values())
        balanced = f", balanced accuracy {numbers['balanced_accuracy']:.2%}" if skewed else ""
        failed = f": this network {self.shortfall}" if self.shortfall else ""
        text = f"{metric_in_words(name, numbers[name])}{balanced}{on_images(name, numbers, where)}"
        skipped = f" (without a linear classifier: {self.no_floor})" if self.no_floor else ""
        return f"{text}; {floor.floors_in_words(self.floors)}{skipped}{failed}"

    @property
    def shortfall(self) -> str:
        """What it means that the network does not exceed a floor: "has not learned enough"; "" if it exceeds all."""
        return floor.shortfall(self.test or self.best, self.floors)

    @property
    def gap(self) -> str:
        """A sentence if much less of the test images is right than of the validation images, else ""."""
        test, best = self.test or {}, self.best
        if not {"top1", "count"} <= test.keys() & best.keys() or interval(test)[1] > interval(best)[0] - GAP:
            return ""
        return (
            f"The test images differ from the training images: of {best['count']:,.0f} validation images "
            f"{best['top1']:.2%} are right. `vitrail evaluate {self.folder}` shows which classes of the test images "
            "fail."
        )

    @property
    def of_classes(self) -> str:
        """A sentence about the classes that the weights knew, before and now, and the others; "" without any."""
        return classes_in_words(self.before, self.best)

    @property
    def summary(self) -> str:
        """The message, and what could not be written, with the first reason."""
        if not self.lost:
            return self.message
        reason = next(iter(self.lost.values()))
        return f"{self.message}, except what could not be written: {', '.join(self.lost)} ({reason})"

    @classmethod
    def of(
        cls,
        status: RunStatus,
        folder: Path,
        per_epoch: int,
        test: dict[str, float] | None = None,
        floors: floor.Floors | None = None,
    ) -> Result:
        """Return the result of a run with `status`; `per_epoch` is the number of steps in an epoch."""
        best, reached = status.best, ""
        shown = {} if test and headline(test) else best  # the number of the test images has a line of its own
        if name := headline(shown):
            reached = f", validation {metric_in_words(name, best[name])}{on_images(name, best)}"
        elif "loss" in shown:
            reached = f", validation loss {best['loss']:.4f}{on_images('loss', best)}"
        if status.skipped:
            reached += f"; {status.skipped} updates were skipped because they were not finite"
        return cls(
            folder,
            steps=status.step,
            epochs=status.step / per_epoch,
            seconds=round(status.elapsed, 1),
            ended=status.ended,
            best=best,
            before=status.before,
            test=test,
            floors=floors.found if floors else {},
            no_floor=floors.skipped if floors else "",
            message=f"{status.ended} after {status.step} steps{reached}; everything is in {folder}",
            skipped=status.skipped,
        )


def classes_in_words(before: Mapping[str, float], best: Mapping[str, float]) -> str:
    """Return a sentence about old and new classes of `Result.before` and `Result.best`; "" without any."""
    kinds = {OLD: "classes that the weights knew", NEW: "new and merged classes"}
    shown = [f"{words} {best[name]:.1%} ({before[name]:.1%} before)" for name, words in kinds.items()
             if name in before and name in best]  # fmt: skip
    return f"Of the validation images, right: {', '.join(shown)}." if shown else ""


def recorded_result(folder: RunFolder) -> Result | None:
    """Return the result of a finished run; None if it is not finished."""
    values = folder.facts().get("result") or {}
    known = {field.name for field in fields(Result)} - {"folder", "message"}
    try:
        result = Result(folder=folder.path, **{name: value for name, value in values.items() if name in known})
    except TypeError:  # nothing of a result, or not all: the end of the run is repeated
        return None
    message = (
        f"{folder.path} is finished ({result.ended} after {result.steps} steps): nothing to do. To continue, resume it "
        "with larger --epochs, --time-limit or --early-stop (in Python: duration, time_limit or early_stop); the "
        "learning rate then follows the longer schedule"
    )
    return replace(result, message=message)
