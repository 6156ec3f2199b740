"""The sections of a comparison. Each takes a `Comparison` and returns HTML, or "" where it has nothing to show."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitrail.data.images.decode import decode
from vitrail.errors import DecodeError, VitrailError
from vitrail.evaluation.calibration import calibration
from vitrail.evaluation.classify import Classification
from vitrail.reports.compare import Against, Comparison
from vitrail.reports.contents import Contents, validation_images
from vitrail.reports.figures import SERIES, Curve, curves, picture
from vitrail.reports.sections import commands
from vitrail.reports.text import percent, safe, table, wilson

MOST_CLASSES = 200
"""Rows of the table of classes."""
OPEN = 20
"""Up to so many rows are shown without being asked for."""
EACH, IN_ALL = 12, 96
"""Pictures that one run gets right and another wrong: of each kind, and on the page, at most."""


def verdict(found: Comparison) -> str:
    """Which run is better, in one sentence for each comparison, and how to read it."""
    first = _bold(found.labels[0])
    others = {one.number for one in found.against} | {0}
    apart = [_bold(label) for number, label in enumerate(found.labels) if number not in others]
    missing = f"Not tested against {first}: {', '.join(apart)}; the end of this page says why." if apart else ""
    if not found.against:
        return (
            f'<p class="verdict">None of these runs can be called better than {first}.</p><p class="why">{missing}</p>'
        )
    note = (
        "McNemar's test asks whether the images that only one of the two gets right could be divided so unevenly by "
        "chance. It is about the choice of images: another seed may change a network's accuracy by as much."
    )
    if len(found.against) > 1:
        note += f" The p-values are corrected for {len(found.against)} comparisons (Holm)."
    sentences = "".join(f'<p class="verdict">{_sentence(found, one)}</p>' for one in found.against)
    return f'{sentences}<p class="why">{note} {missing}</p>'


def _sentence(found: Comparison, one: Against) -> str:
    first, other, matched = _bold(found.labels[0]), _bold(found.labels[one.number]), one.pair
    more = f"{_p(one.p)}; {matched.only_second:,} images only {other} gets right, {matched.only_first:,} only {first}"
    if matched.difference == 0:
        return f"{other} and {first} get equally many of {matched.count:,} validation images right ({more})."
    sure = "a difference that chance seldom makes" if one.p < 0.05 else "a difference that chance could make"
    return (
        f"{other} gets {percent(float(matched.second_right.mean()))} of {matched.count:,} validation images right, "
        f"{first} {percent(float(matched.first_right.mean()))}: {sure} ({more})."
    )


def accuracy(found: Comparison) -> str:
    """Accuracy of each run with its interval, loss and calibration, and the difference from the first."""
    pairs = {one.number: one for one in found.against}
    rows = []
    for number, (label, run) in enumerate(zip(found.labels, found.runs, strict=True)):
        own = ("–",) * 4 if run.answers is None else _own(run.answers)
        rows.append((_bold(label), *own, _tested(run), *_beside(pairs.get(number))))
    own_head = ("images", "right", "loss", "calibration error", "test images right")
    head = ("run", *own_head, "difference (points)", "McNemar's p")
    caption = f"Validation images, with 95 % confidence intervals; differences are from {_bold(found.labels[0])}."
    shown = table(caption, head, rows, numeric=range(1, len(head)))
    return f"<h2>How good they are</h2>{shown}"


def _own(answers: Classification) -> tuple[str, ...]:
    low, high = wilson(int(answers.correct.sum()), answers.count)
    right = f"{percent(answers.top1)}<small>{percent(low)} to {percent(high)}</small>"
    return f"{answers.count:,}", right, f"{answers.nll:.3f}", percent(calibration(answers).ece)


def _tested(run: Contents) -> str:
    test = (run.facts.get("result") or {}).get("test")
    if not test:
        return "–"
    low, high = wilson(round(test["top1"] * test["count"]), int(test["count"]))
    return f"{percent(test['top1'])} of {int(test['count']):,}<small>{percent(low)} to {percent(high)}</small>"


def _beside(one: Against | None) -> tuple[str, ...]:
    if one is None:
        return "–", "–"
    low, high = (_points(end) for end in one.pair.interval)
    return f"{_points(one.pair.difference)}<small>{low} to {high}</small>", _number(one.p)


def _points(share: float) -> str:
    points = round(100 * share, 1)
    return f"{points:+.1f}" if points else "0.0"


def settings(found: Comparison) -> str:
    """The settings that differ, and only those."""
    if not found.settings:
        return "<h2>What differs</h2><p>No setting differs.</p>"
    rows = [(safe(name), *(_value(value) for value in values)) for name, values in found.settings.items()]
    shown = table(
        "Settings that are not the same in all runs; – where one is not set.",
        ("setting", *map(_bold, found.labels)),
        rows,
    )
    return f"<h2>What differs</h2>{shown}"


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return safe(" ".join(map(str, value)))
    return "–" if value is None else safe(value)


def progress(found: Comparison) -> str:
    """Loss, accuracy and learning rate of all runs over each other."""
    wanted: tuple[tuple[str, str, str, str, dict[str, bool]], ...] = (
        ("Training loss", "loss per image (nats)", "loss", "lr", {"running_mean": True}),
        ("Validation loss", "loss per image (nats)", "nll", "nll", {}),
        ("Accuracy", "images answered right", "top1", "nll", {"percent": True}),
        ("Learning rate", "learning rate", "lr", "lr", {}),
    )
    drawn = []
    for title, label, name, beside, look in wanted:
        lines: dict[str, Curve] = {}
        for run_label, run in zip(found.labels, found.runs, strict=True):
            curve = run.curve(name, beside=beside)
            if len(curve[0]):
                lines[run_label] = curve
        if lines:
            ends = "; ".join(f"{run_label} ends at {curve[1][-1]:.3g}" for run_label, curve in lines.items())
            looks = {run_label: found.labels.index(run_label) for run_label in lines}
            drawn.append(curves(title, label, lines, looks=looks, describe=f"{title} over steps: {ends}.", **look))
    if not drawn:
        return ""
    figures = "".join(f"<figure>{figure}</figure>" for figure in drawn)
    note = "A step is one batch; where batch sizes differ, equal steps are not equally many images."
    few = "" if len(found.runs) <= len(SERIES) else " Colours repeat with another dash."
    return f'<h2>How training went</h2><div class="curves">{figures}</div><p class="why">{note}{few}</p>'


def classes(found: Comparison) -> str:
    """Accuracy by class in every run, the largest differences first."""
    shown = [0, *(one.number for one in found.against)]
    answers = [found.runs[number].answers for number in shown]
    if len(shown) < 2 or answers[0] is None:
        return ""
    share = np.stack([one.class_accuracy for one in answers if one is not None], axis=1)
    count = answers[0].class_count
    seen = np.flatnonzero(~np.isnan(share).any(axis=1))
    gap = np.zeros(len(share))
    gap[seen] = share[seen].max(axis=1) - share[seen].min(axis=1)
    order = seen[np.argsort(-gap[seen], kind="stable")][:MOST_CLASSES]
    rows = []
    for k in order.tolist():
        others = [_points(value - share[k, 0]) for value in share[k, 1:]]
        shares = (percent(value) for value in share[k])
        rows.append((safe(answers[0].class_names[k]), f"{count[k]:,}", *shares, *others))
    labels = [_bold(found.labels[number]) for number in shown]
    head = ("class", "images", *labels, *(f"{label} (points)" for label in labels[1:]))
    more = f" {MOST_CLASSES} of {len(seen)} are shown." if len(seen) > MOST_CLASSES else ""
    caption = f"Share answered right, the largest differences first; points are from {labels[0]}.{more}"
    body = table(caption, head, rows, numeric=range(1, len(head)))
    return (
        "<h2>Which classes gain and lose</h2>"
        f"<details{' open' if len(rows) <= OPEN else ''}><summary>All classes</summary>{body}</details>"
    )


def disagreements(found: Comparison, notes: list[str]) -> str:
    """Images that one of two runs gets right and the other wrong; a note where the images are not there."""
    if not found.against:
        return ""
    try:
        source = validation_images(found.runs[0])
    except (VitrailError, OSError) as error:
        notes.append(f"no pictures: {error}")
        return ""
    each = min(EACH, max(1, IN_ALL // (2 * len(found.against))))
    return "".join(_kinds(found, one, source, each) for one in found.against)


def _kinds(found: Comparison, one: Against, source: Any, each: int) -> str:
    parts = []
    for better, worse, right, wrong in (
        (one.number, 0, one.pair.second_right, one.pair.first_right),
        (0, one.number, one.pair.first_right, one.pair.second_right),
    ):
        places = np.flatnonzero(right & ~wrong)
        # where the two are furthest apart in what they give to the true class
        places = places[np.argsort(-_apart(found, one)[places], kind="stable")]
        figures = _figures(found, one, places, source, each)
        if figures:
            title = f"Right by {_bold(found.labels[better])}, wrong by {_bold(found.labels[worse])}"
            about = f"{len(places):,} images; first those on which the two are furthest apart."
            parts.append(f'<h2>{title}</h2><p class="why">{about}</p><div class="gallery single">{figures}</div>')
    return "".join(parts)


def _apart(found: Comparison, one: Against) -> np.ndarray:
    first, second = found.runs[0].answers, found.runs[one.number].answers
    assert first is not None and second is not None
    gap = np.abs(first.loss[one.pair.first_rows] - second.loss[one.pair.second_rows])
    return np.nan_to_num(gap, nan=np.inf, posinf=np.inf)


def _figures(found: Comparison, one: Against, places: np.ndarray, source: Any, most: int) -> str:
    drawn: list[str] = []
    for place in places.tolist():
        if len(drawn) == most:
            break
        rows = {0: int(one.pair.first_rows[place]), one.number: int(one.pair.second_rows[place])}
        first = found.runs[0].answers
        assert first is not None
        try:
            item = source[int(first.index[rows[0]])]
            image = decode(item.image) if isinstance(item.image, bytes) else item.image
        except DecodeError:  # it could be read when it was evaluated
            continue
        true = safe(first.class_names[int(first.label[rows[0]])], 60)
        said = "<br>".join(
            f"{_bold(found.labels[number])}: {_said(found, number, row)}" for number, row in rows.items()
        )
        small = ' class="pixels"' if max(image.shape) <= 64 else ""
        shown = f'<img src="{picture(image)}" alt="{safe(item.id, 80)}: an image of class {true}"{small}>'
        caption = f"<b>{true}</b><br>{said}<br>{safe(item.id, 80)}"
        drawn.append(f'<figure><div class="pair">{shown}</div><figcaption>{caption}</figcaption></figure>')
    return "".join(drawn)


def _said(found: Comparison, number: int, row: int) -> str:
    answers = found.runs[number].answers
    assert answers is not None
    best = int(answers.top[row, 0])
    if best < 0:
        return "no answer"
    kind = "right" if best == answers.label[row] else "wrong"
    name = safe(answers.class_names[best], 60)
    return f'<span class="{kind}">{name}</span> ({percent(float(answers.probability[row, 0]), 0)})'


def repeat(found: Comparison) -> str:
    """The commands of each run."""
    each = (f"<h3>{safe(label, 60)}</h3>{commands(run)}" for label, run in zip(found.labels, found.runs, strict=True))
    return f"<h2>Do it again</h2>{''.join(each)}"


def _bold(label: str) -> str:
    return f"<b>{safe(label, 60)}</b>"


def _p(p: float) -> str:
    return f"p {_number(p)}" if p < 0.001 else f"p = {_number(p)}"


def _number(p: float) -> str:
    return "&lt; 0.001" if p < 0.001 else f"{p:.3f}"
