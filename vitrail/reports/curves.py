"""How training went: the metrics of one run, or of several runs, over optimiser steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vitrail.evaluation.metric import NUMBERS, PIXELS, SEVERAL_LABELS, TITLES
from vitrail.objective.settings import Segmentation, SeveralAnswers
from vitrail.reports.figures import Points, draw_curves
from vitrail.reports.run_record import RunRecord

SHARES = {
    "colour": "hidden colours predicted correctly",
    "code": "hidden visual tokens predicted correctly",
    "agreement": "crops where the student's best output is the teacher's",
    "entropy": "entropy of the teacher's outputs (100 % = uniform)",
    "use": "perplexity of the visual tokens (100 % = all used equally)",
}
"""Metrics of self-supervised training that are shares, and their names in the report."""
PARTS = ("DINO loss", "iBOT loss", "KoLeo loss", "Gram loss")
"""Parts of the loss of DINOv2, without their weights."""
LINES = {"training": "lr", "validation": "count"}
"""Curve -> a number that its lines in metrics.jsonl have."""
RIGHT = "correct validation images"


def training_curves(record: RunRecord) -> list[Markup]:
    """Return the figures of one run: loss, accuracies, other metrics, and learning rate."""
    in_nats, validation_loss = _is_in_nats(record), _validation_loss(record)
    loss = {"training": record.curve("loss", having="lr"), "validation": validation_loss}
    of_pixels = len(record.curve("pixel_accuracy", having="lr")[0])  # queries learn by another loss, and log none
    if isinstance(record.run and record.run.objective, Segmentation) and not of_pixels:
        drawn = [
            _figure(
                "Training loss",
                "loss of the queries",
                {"training": loss["training"]},
                running_mean=True,
            ),
            _figure("Validation loss", "cross-entropy of pixels (nats)", {"validation": validation_loss}),
        ]
    else:
        drawn = [_figure("Loss", "loss per image" + " (nats)" * in_nats, loss, running_mean=True)]
    drawn += [
        _figure(name, "mean over images", {at: record.curve(name, having=by) for at, by in LINES.items()})
        for name in PARTS
    ]
    shares = [
        ("Accuracy", RIGHT, record.curve("top1", having="nll")),
        ("Balanced accuracy", "mean over classes", record.curve("balanced_accuracy", having="nll")),
        *((TITLES[name], TITLES[name], record.curve(name, having="nll")) for name in SEVERAL_LABELS),
        *((TITLES[name], TITLES[name], record.curve(name, having="miou")) for name in PIXELS),
        *((label, label, record.curve(name, having="count")) for name, label in SHARES.items()),
        ("kNN accuracy of the features", RIGHT, record.curve("knn", having="knn")),
    ]
    few_shot = {name for line in record.metrics for name in line if re.fullmatch(r"\d+-shot", name)}
    if few_shot:
        most = max(few_shot, key=lambda name: int(name.partition("-")[0]))
        shares.append((f"Linear {most} accuracy", RIGHT, record.curve(most, having=most)))
    drawn += [_figure(title, label, {"validation": curve}, percent=True) for title, label, curve in shares]
    drawn += [_figure(TITLES[name], TITLES[name], {"validation": record.curve(name, having="r2")}) for name in NUMBERS]
    drawn.append(_figure("Learning rate", "learning rate", {"training": record.curve("lr", having="lr")}))
    return [figure for figure in drawn if figure is not None]


def comparison_curves(records: Sequence[RunRecord], labels: Sequence[str]) -> list[Markup]:
    """Return the figures of several runs, with one line per run; `labels` name the runs."""
    loss = "loss per image" + " (nats)" * all(map(_is_in_nats, records))
    metrics: tuple[tuple[str, str, Callable[[RunRecord], Points], dict[str, bool]], ...] = (
        ("Training loss", loss, lambda record: record.curve("loss", having="lr"), {"running_mean": True}),
        ("Validation loss", loss, _validation_loss, {}),
        ("Accuracy", RIGHT, lambda record: record.curve("top1", having="nll"), {"percent": True}),
        ("Learning rate", "learning rate", lambda record: record.curve("lr", having="lr"), {}),
    )
    styles = {label: number for number, label in enumerate(labels)}
    drawn = []
    for title, label, curve, look in metrics:
        lines = {run: curve(record) for run, record in zip(labels, records, strict=True)}
        drawn.append(_figure(title, label, lines, styles=styles, **look))
    return [figure for figure in drawn if figure is not None]


def _is_in_nats(record: RunRecord) -> bool:
    """Return whether the loss of a run is a cross-entropy alone, as far as its settings are known."""
    if record.run is None:
        return True
    objective = record.run.objective
    return not (record.self_supervised or objective.numbers or isinstance(objective, SeveralAnswers))


def _validation_loss(record: RunRecord) -> Points:
    """Return the loss on the validation images, which is called by what it is where that is the same everywhere."""
    found = record.curve("nll", having="nll")
    return found if len(found[0]) else record.curve("loss", having="count")


def _figure(title: str, label: str, lines: Mapping[str, Points], **look: Any) -> Markup | None:
    lines = {name: line for name, line in lines.items() if len(line[0])}
    if not lines:
        return None
    form = ".1%" if look.get("percent") else ".4g"
    each = [
        f"{name} from {values[0]:{form}} to {values[-1]:{form}}, "
        f"lowest {values.min():{form}}, highest {values.max():{form}}"
        for name, (_, values) in lines.items()
    ]
    return draw_curves(title, label, lines, describe=f"{title} over steps: {'; '.join(each)}.", **look)
