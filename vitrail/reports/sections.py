"""The sections of a report. Each takes contents and returns HTML, or "" where it has nothing to show."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np

from vitrail.config import to_yaml
from vitrail.evaluation.calibration import calibration
from vitrail.evaluation.classify import Classification
from vitrail.inspection.overlay import under_attention
from vitrail.reports.contents import Contents
from vitrail.reports.figures import confusion, curves, picture, reliability, uri
from vitrail.reports.gallery import Exhibit
from vitrail.reports.seen import is_self_supervised, reached, shares
from vitrail.reports.seen import tiles as self_supervised_tiles
from vitrail.reports.text import facts, percent, safe, table, wilson
from vitrail.words import time_span

MOST_CLASSES = 200
"""Rows of the table of classes."""
MOST_LISTED = 50
PAIRS = 15
TUNED = {
    "attention": "attention layers and classifier only",
    "ffn": "MLPs and classifier only",
    "head": "classifier only",
}
"""What `Run.tune` means, in words."""


def verdict(contents: Contents) -> str:
    """What was trained on what, and how good it is, in one sentence; then how to read the number."""
    answers, data = contents.answers, contents.facts.get("data", {})
    result = contents.facts.get("result") or {}
    who = _model_name(contents)
    images = data.get("images", {}).get("train")
    classes = "" if is_self_supervised(contents) else f" of {len(contents.class_names)} classes"
    on = f"{images:,} images{classes}" if images else "images"
    where = f" ({safe(data['path'])})" if data.get("path") else ""
    long = f" in {time_span(result['seconds'])}".replace(" ", "\N{NO-BREAK SPACE}") if result.get("seconds") else ""
    if answers is None:
        unfinished = "" if result else " The run has not ended."
        came = reached(contents) if is_self_supervised(contents) else ""
        end = f" {came}." if came else "; it was not evaluated."
        return f'<p class="verdict">{who} on {on}{where}{long}{end}{unfinished}</p>'
    low, high = wilson(int(answers.correct.sum()), answers.count)
    most = answers.class_count.max() / answers.count
    note = f"Always answering the most frequent class would be right for {percent(most)}."
    if not result:
        note += " The run has not ended: these are the best numbers so far."
    return (
        f'<p class="verdict">{who} on {on}{where}{long} gets <strong>{percent(answers.top1)}</strong> of '
        f"{answers.count:,} validation images right "
        f"({percent(0.95, 0)} confidence: {percent(low)} to {percent(high)}).</p>"
        f'<p class="why">The confidence interval is about the choice of images alone. {note}</p>'
    )


def _model_name(contents: Contents) -> str:
    run = contents.run
    if run is None:
        return "A network"
    if run.weights:
        only = "" if run.tune == "all" else f" ({safe(TUNED[run.tune])})"
        return f"A network fine-tuned{only} from {safe(run.weights)}"
    changed = [(item.name, getattr(run.vit, item.name)) for item in fields(run.vit)]
    changes = [f"{name.replace('_', ' ')} {value}" for name, value in changed if value is not None]
    but = f" with {', '.join(changes)}" if changes else ""
    kind = "Vision Transformer" if "/" in run.model else "ResNet"
    return f"A {kind} ({safe(run.model)}{safe(but)}) trained from scratch"


def numbers(contents: Contents, parameters: int | None) -> str:
    """The few numbers of a run, as tiles."""
    answers, result = contents.answers, contents.facts.get("result") or {}
    tiles = self_supervised_tiles(contents) if is_self_supervised(contents) else []
    if answers is not None:
        tiles.append(("top-1 accuracy", percent(answers.top1), "best class is right"))
        if len(contents.class_names) > 5:
            tiles.append(("top-5 accuracy", percent(answers.top5), "right class among five best"))
        tiles.append(("loss", f"{answers.nll:.3f}", "cross-entropy in nats"))
    if result.get("test"):
        test = result["test"]
        low, high = wilson(round(test["top1"] * test["count"]), int(test["count"]))
        about = f"{int(test['count']):,} images; {percent(low)} to {percent(high)}"
        tiles.append(("test accuracy", percent(test["top1"]), about))
    if parameters:
        tuned = contents.facts.get("tuned") or {}
        part = f"; {tuned['parameters']:,} tuned ({safe(tuned['what'])})" if tuned else ""
        tiles.append(("parameters", f"{parameters / 1e6:.1f} M", f"{parameters:,}{part}"))
    if result:
        about = f"{result.get('epochs', 0):.3g} epochs; {safe(result.get('ended', ''))}"
        tiles.append(("training steps", f"{result.get('steps', 0):,}", about))
        tiles.append(("training time", time_span(result.get("seconds", 0)), "evaluations on the way included"))
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}<small>{about}</small></dd></div>" for name, value, about in tiles)
    return f'<dl class="numbers">{cells}</dl>' if cells else ""


def progress(contents: Contents) -> str:
    """Loss, accuracy and learning rate over steps."""
    train, seen = contents.curve("loss", beside="lr"), contents.curve("nll", beside="nll")
    unlabelled = is_self_supervised(contents)
    if unlabelled:
        seen = contents.curve("loss", beside="count")
    accuracy, rate = contents.curve("top1", beside="nll"), contents.curve("lr", beside="lr")
    drawn = []
    if len(train[0]) or len(seen[0]):
        lines = {"training": train, "validation": seen}
        ends = "; ".join(f"{name} ends at {line[1][-1]:.3f}" for name, line in lines.items() if len(line[1]))
        text = f"Loss over steps: {ends}."
        unit = "loss per image" if unlabelled else "loss per image (nats)"
        drawn.append(curves("Loss", unit, _full(lines), describe=text, running_mean=True))
    if len(accuracy[0]):
        best = f"the best is {percent(float(accuracy[1].max()))}"
        text = f"Validation accuracy over steps: {best}, the last {percent(float(accuracy[1][-1]))}."
        drawn.append(curves("Accuracy", "images answered right", {"validation": accuracy}, percent=True, describe=text))
    drawn += shares(contents) + _probed(contents)
    if len(rate[0]):
        text = f"Learning rate over steps: at most {rate[1].max():.3g}, at the end {rate[1][-1]:.3g}."
        drawn.append(curves("Learning rate", "learning rate", {"training": rate}, describe=text))
    if not drawn:
        return ""
    figures = "".join(f"<figure>{figure}</figure>" for figure in drawn)
    with_ = "" if unlabelled else ", with label smoothing and mixing where they are on"
    note = f"Training loss is measured on augmented images{with_}, so it "
    note += "may lie above the validation loss without anything being wrong."
    return f'<h2>How training went</h2><div class="curves">{figures}</div><p class="why">{note}</p>'


def _probed(contents: Contents) -> list[str]:
    """The curves of kNN accuracy, and of few-shot accuracy with most shots where there are several."""
    drawn = []
    nearest = contents.curve("knn", beside="knn")
    if len(nearest[0]):
        text = f"kNN accuracy over steps: the best is {percent(float(nearest[1].max()))}, "
        text += f"the last {percent(float(nearest[1][-1]))}."
        label = "validation images answered right"
        drawn.append(
            curves("kNN accuracy of the features", label, {"validation": nearest}, percent=True, describe=text)
        )
    names = {name for line in contents.metrics for name in line if re.fullmatch(r"\d+-shot", name)}
    if not names:
        return drawn
    name = max(names, key=lambda name: int(name.partition("-")[0]))
    curve = contents.curve(name, beside=name)
    if not len(curve[0]):
        return drawn
    text = f"{name} accuracy over steps: the best is {percent(float(curve[1].max()))}, "
    text += f"the last {percent(float(curve[1][-1]))}."
    title = f"Linear {name} accuracy"
    return [
        *drawn,
        curves(title, "validation images answered right", {"validation": curve}, percent=True, describe=text),
    ]


def _full(lines: dict[str, Any]) -> dict[str, Any]:
    return {name: line for name, line in lines.items() if len(line[0])}


def classes(answers: Classification) -> str:
    """Confusion matrix, most frequent confusions, and the table of classes."""
    counts = answers.confusion
    parts = ["<h2>Which classes are told apart</h2>"]
    if len(counts) <= 1000:  # beyond, a cell is less than a pixel
        names = [html.unescape(safe(name, 40)) for name in answers.class_names]
        parts.append(f'<div class="scroll"><figure class="confusion">{confusion(counts, names)}</figure></div>')
    parts.append(_confusions(counts, answers))
    parts.append(_class_table(counts, answers))
    return "".join(parts)


def _confusions(counts: np.ndarray, answers: Classification) -> str:
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    cells = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
    rows = []
    for true, answered in (divmod(int(cell), len(counts)) for cell in cells):
        if number := int(wrong[true, answered]):
            share = percent(number / counts[true].sum())
            names = (safe(answers.class_names[true]), safe(answers.class_names[answered]))
            rows.append((*names, str(number), share))
    if not rows:
        return "<p>No image was answered wrongly.</p>"
    head = ("true class", "answered class", "images", "of that class")
    return table("The most frequent confusions", head, rows, numeric=(2, 3))


def _class_table(counts: np.ndarray, answers: Classification) -> str:
    accuracy, images, right = answers.class_accuracy, answers.class_count, answers.class_correct
    order = np.argsort(np.where(np.isnan(accuracy), 2.0, accuracy), kind="stable")
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    rows = []
    for k in order[:MOST_CLASSES].tolist():
        low, high = wilson(int(right[k]), int(images[k]))
        usual = safe(answers.class_names[int(wrong[k].argmax())]) if wrong[k].any() else "–"
        bar = f'<meter value="{accuracy[k]:.4f}" aria-hidden="true"></meter>' if images[k] else ""
        between = f"{percent(low, 0)} to {percent(high, 0)}" if images[k] else "–"
        cells = (str(images[k]), percent(accuracy[k]), bar, between, usual)
        rows.append((safe(answers.class_names[k]), *cells))
    more = f" The {MOST_CLASSES} weakest of {len(counts)} are shown." if len(counts) > MOST_CLASSES else ""
    head = ("class", "images", "right", "", "95 % confidence", "most frequent mistake")
    shown = table(f"Every class, the weakest first.{more}", head, rows, numeric=(1, 2, 4))
    return f"<details{' open' if len(rows) <= 20 else ''}><summary>All classes</summary>{shown}</details>"


def calibrated(answers: Classification) -> str:
    """Whether the network knows how sure it may be."""
    found = calibration(answers)
    gap = found.confidence - found.accuracy
    lean = f"{percent(abs(gap))} too {'sure' if gap > 0 else 'timid'}"
    brier = "–" if np.isnan(found.brier) else f"{found.brier:.3f}"
    note = (
        "Of all answers given with a confidence of 80\N{NO-BREAK SPACE}%, that many should be right. On average the "
        f"network's confidence is {percent(found.confidence)}, and {percent(found.accuracy)} are right: {lean}. The "
        f"expected calibration error, the mean gap over {len(found.bin_count)} bins, is {percent(found.ece)}; the "
        f"Brier score, from 0 (right and sure) to 2, is {brier}."
    )
    drawn = f'<div class="scroll"><figure>{reliability(found)}</figure></div>'
    return f'<h2>How sure it is</h2>{drawn}<p class="why">{note}</p>'


def gallery(title: str, about: str, shown: Iterable[Exhibit], answers: Classification) -> str:
    """Images beside themselves under attention rollout, with what they are and what was answered."""
    figures = "".join(_exhibit(exhibit, answers) for exhibit in shown)
    if not figures:
        return ""
    return f'<h2>{title}</h2><p class="why">{about}</p><div class="gallery">{figures}</div>'


def _exhibit(exhibit: Exhibit, answers: Classification) -> str:
    label, row = int(answers.label[exhibit.row]), exhibit.row
    true = safe(answers.class_names[label], 60) if label >= 0 else "not known"
    said = []
    for k, p in zip(answers.top[row, :3].tolist(), answers.probability[row, :3].tolist(), strict=True):
        name = safe(answers.class_names[k], 60)
        said.append(f'<span class="{"right" if k == label else "wrong"}">{name}</span> ({percent(p, 0)})')
    name = safe(exhibit.id, 80)
    small = ' class="pixels"' if max(exhibit.image.shape) <= 64 else ""
    images = f'<img src="{picture(exhibit.image)}" alt="{name}: an image of class {true}"{small}>'
    if exhibit.shares is not None:
        lit = picture(under_attention(exhibit.image, exhibit.shares))
        images += f'<img src="{lit}" alt="the same image, yellow where the network attended most">'
    text = f"<b>{true}</b>; answered {', '.join(said)}<br>{name}"
    return f'<figure><div class="pair">{images}</div><figcaption>{text}</figcaption></figure>'


def batch(contents: Contents) -> str:
    """The first augmented batch."""
    if not contents.batch:
        return ""
    alt = "The first images of the first training batch, after augmentation, each with its class."
    return (
        '<h2>What the network saw</h2><p class="why">The first training batch after cropping and augmentation. Labels '
        "that do not fit, or images that nobody could recognise, are the most frequent cause of a poor result.</p>"
        f'<img class="batch" src="{uri(contents.batch, "png")}" alt="{alt}">'
    )


def repeat(contents: Contents) -> str:
    """The command, and what was decided without being asked for."""
    parts = ["<h2>Do it again</h2>", commands(contents)]
    if decisions := contents.facts.get("decisions"):
        parts.append("<p>Settings that were left open, and how they were decided:</p>")
        parts.append(facts(decisions.items()))
    if contents.run is not None:
        settings = _code(*to_yaml(contents.run).splitlines())
        parts.append(f"<details><summary>All settings (config.yaml)</summary>{settings}</details>")
    return "".join(parts)


def commands(contents: Contents) -> str:
    """The command as it was given, and the one that takes every decision from config.yaml."""
    known, given = contents.facts, ""
    if command := known.get("command"):
        place = [f"cd {shlex.quote(known['directory'])}"] if known.get("directory") else []
        given = f"<p>The command:</p>{_code(*place, command)}"
    again = f"vitrail train --config {shlex.quote(str(contents.folder / 'config.yaml'))}"
    return f"{given}<p>The same with every decision as it was taken then:</p>{_code(again)}"


def _code(*lines: str) -> str:
    text = "\n".join(safe(line, 4000) for line in lines)
    return f"<pre>{text}</pre>"


def particulars(contents: Contents) -> str:
    """Data, machine and versions, and what could not be read."""
    known = contents.facts
    data, machine = known.get("data", {}), known.get("machine", {})
    rows: list[tuple[str, Any]] = [(name, known[name]) for name in ("started", "ended") if known.get(name)]
    rows += [("resumed", f"{one.get('at')} at step {one.get('step')}") for one in known.get("resumed", [])]
    rows += [(f"{name} images", f"{count:,}") for name, count in data.get("images", {}).items()]
    rows += [("data fingerprint", data["fingerprint"])] if data.get("fingerprint") else []
    rows += [("seed", known["seed"])] if "seed" in known else []
    rows += [("source commit", known["commit"])] if known.get("commit") else []
    rows += [(name.replace("_gib", " (GiB)"), value) for name, value in machine.items()]
    rows += [(name, version) for name, version in known.get("versions", {}).items() if version]
    left_out = [str(note) for note in data.get("notes", [])]
    unreadable = {line["image"]: line["reason"] for line in contents.metrics if line.get("kind") == "unreadable"}
    left_out += [f"training image {name}: {reason}" for name, reason in unreadable.items()]
    if contents.answers is not None:
        left_out += [f"validation image {name}: {reason}" for name, reason in contents.answers.bad]
    listed = "".join(f"<li>{safe(note, 400)}</li>" for note in left_out[:MOST_LISTED])
    more = f"<li>and {len(left_out) - MOST_LISTED} more</li>" if len(left_out) > MOST_LISTED else ""
    data_notes = f"<h2>What was found in the data</h2><ul>{listed}{more}</ul>" if listed else ""
    return f"{data_notes}<h2>Where it ran</h2>{facts(rows)}" if rows else data_notes
