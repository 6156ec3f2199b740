"""What the kind of labels decides in a run: its loss, its metric, and the scale of numbers."""

from __future__ import annotations

from dataclasses import replace

from vitrail.data.labels.numbers import Numbers, TargetScale
from vitrail.data.labels.sets import Labels, LabelSets, summary
from vitrail.errors import UsageError
from vitrail.evaluation.metric import NUMBERS, ONE_LABEL, SEVERAL_LABELS, Metric
from vitrail.objective.settings import Supervised
from vitrail.training.run import Run
from vitrail.weights.card import Card
from vitrail.words import listing


def for_labels(run: Run, labels: Labels) -> tuple[Run, dict[str, str]]:
    """Return `run` with a loss and a metric for these labels, and the reasons.

    Raises UsageError for settings of another kind of labels.
    """
    own, metric, objective = type(run.metric) is not Metric, run.metric, run.objective
    if isinstance(labels, Numbers) or objective.numbers:
        return _for_numbers(run, labels)
    if not isinstance(labels, LabelSets):
        if metric.name in (*SEVERAL_LABELS, *NUMBERS) and not own:
            raise UsageError(
                f"metric.name is {metric.name}, which needs images with several labels or numbers, and these have one "
                "label each. Use top1, top5 or nll, or set data.labels_per_image to 'several'"
            )
        return run, {}
    why = {"labels": f"several: {summary(labels)}"}
    by_class: dict[str, object] = {"data.sampler": run.data.sampler}
    if isinstance(objective, Supervised):
        by_class["objective.class_weights"] = objective.class_weights
        by_class["objective.logit_adjustment"] = objective.logit_adjustment
    for name, asked in by_class.items():
        if asked not in ("uniform", "none", 0):
            raise UsageError(
                f"{name} is {asked}, which counts images by their one class, and these images have several labels. "
                "Leave it out; objective.loss asymmetric gives more weight to the labels that an image has"
            )
    if isinstance(objective, Supervised) and objective.loss == "softmax":
        why["objective.loss"] = "sigmoid: an image may have several labels or none, which softmax cannot express"
        run = replace(run, objective=replace(objective, loss="sigmoid"))
    if metric.name in (*ONE_LABEL, *NUMBERS) and not own:
        why["metric.name"] = f"map, mean average precision: {metric.name} needs one label for each image"
        run = replace(run, metric=replace(metric, name="map"))
    return run, why


def _for_numbers(run: Run, labels: Labels) -> tuple[Run, dict[str, str]]:
    """Return `run` with a metric for numbers, and the reasons. Raises UsageError for settings that need classes."""
    if not isinstance(labels, Numbers):
        raise UsageError(
            f"objective {run.objective.kind} needs numbers as labels, and these are classes "
            f"(data.labels_per_image is {run.data.labels_per_image!r}). Set data.labels_per_image to 'numbers'"
        )
    if not run.objective.numbers:
        raise UsageError(
            f"the labels are numbers (data.labels_per_image), which objective {run.objective.kind} cannot learn. Set "
            "objective.kind to regression, or data.labels_per_image to auto"
        )
    by_class = {"data.sampler": run.data.sampler != "uniform", "knn": run.knn, "fewshot": run.fewshot}
    if wrong := [name for name, asked in by_class.items() if asked]:
        raise UsageError(
            f"{listing(wrong, quoted=False)}: needs images with classes, and these have numbers. Leave it out"
        )
    metric, why = run.metric, {}
    if metric.name not in NUMBERS and type(metric) is Metric:
        why["metric.name"] = f"r2, the share of the variance that is explained: {metric.name} needs classes"
        run = replace(run, metric=replace(metric, name="r2"))
    if run.calibrate:
        why["calibrate"] = "no: numbers have no probabilities"
    return replace(run, calibrate=False), why


def scale_of(
    run: Run, card: Card | None, labels: Labels, names: list[str]
) -> tuple[TargetScale | None, dict[str, str]]:
    """Return mean and deviation of the targets of the training images, in words, too; None if they are no numbers.

    With `Run.keep_head` the scale is that of the weights with this `card`. Raises DataError for a constant target.
    """
    if not isinstance(labels, Numbers):
        return None, {}
    scale = TargetScale.of(labels, names)
    if run.keep_head and card is not None:
        if card.scale is None:
            raise UsageError(f"keep_head: {run.weights} predicts classes, and this run numbers. Remove --keep-head")
        scale = card.scale
    each = zip(names, scale.mean, scale.deviation, strict=True)
    told = "; ".join(f"{name}: mean {mean:.6g}, deviation {spread:.6g}" for name, mean, spread in each)
    return scale, {"scale": told}
