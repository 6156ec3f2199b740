"""`vitrail evaluate`: measure the accuracy of a network on images."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.config import from_yaml
from vitrail.errors import UsageError
from vitrail.training.run import Run
from vitrail.verbs.network.classifier import load_classifier, output_names

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.benchmarks.imagenet_labels import AnswerKey
    from vitrail.data.images.ops import Op
    from vitrail.data.item import Listed
    from vitrail.evaluation.classify import Classification
    from vitrail.evaluation.groups import Group
    from vitrail.model.resnet.network import ResNet
    from vitrail.model.vit import ViT

WORST = 15
"""Maximum number of classes and confusions shown on a terminal; --json shows all."""


@dataclass(frozen=True)
class Evaluation:
    """A network's results on a data set."""

    model: str
    data: str
    found: Classification
    groups: list[Group] = field(default_factory=list)
    """Means over groups of classes, if a file defines groups."""
    notes: list[str] = field(default_factory=list)
    """Assumptions, and what was skipped."""


@dataclass(frozen=True)
class _Task:
    """The images to evaluate, their preprocessing, and their correct classes."""

    source: Listed
    name: str
    class_names: list[str]
    transform: Op
    outputs: np.ndarray | None = None
    """The network's outputs to choose among; None: all."""
    key: AnswerKey | None = None
    notes: list[str] = field(default_factory=list)


def evaluate(
    model: str | Path,
    data: str | Path | None = None,
    *,
    split: str | None = None,
    protocol: Literal["imagenet", "real", "v2", "a", "r", "objectnet"] | None = None,
    labels: str | Path | None = None,
    groups: str | Path | None = None,
    image_size: int | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "bf16", "float32"] = "auto",
    out: str | Path | None = None,
) -> Evaluation:
    """Measure a trained network: top-1, top-5, calibration, accuracy of each class, and confusions.

    Every image counts exactly once, and classes are matched by name. Unreadable images are listed and not counted. With
    a protocol, a network with ImageNet's 1,000 classes is measured on one of ImageNet's test sets as the set's authors
    do.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        data: The images, in any form that `vitrail train` takes (default: the run's own test images, else its
            validation images).
        split: Split of the images to use (default: test, else validation, else all images).
        protocol: ImageNet test set that the folder holds, as it is published; 'imagenet' is the validation set.
        labels: File of labels for imagenet and real, folder of mappings for objectnet (default: next to the
            images).
        groups: A CSV file with the columns class and group. The means of each group of classes are then shown, too.
        image_size: Side of the square input in pixels. Position embeddings are resampled (default: the size of the
            training).
        batch_size: Number of images per batch. It does not change the results.
        workers: Number of threads that decode images (default: from the machine).
        device: Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available).
        precision: Number format of the computation. 'auto' chooses bf16 if the device is fast at it.
        out: Folder for evaluation.json, reliability.png, calibration.csv, classes.csv and the output for every
            image (answers.npz). With a name that ends in .npz, only the outputs are written.
    """
    if precision not in ("auto", "bf16", "float32"):
        raise UsageError(f"no precision is called {precision!r}: auto, bf16 or float32")
    if protocol is None and labels is not None:
        raise UsageError("--labels are those of a --protocol: imagenet, real or objectnet")
    if protocol is not None and (data is None or split is not None):
        raise UsageError(f"--protocol {protocol} names a whole test set: vitrail evaluate {model} DIR, without --split")
    from vitrail.evaluation.groups import group_means, misfits, read_groups
    from vitrail.verbs.network.evaluate_files import make_room, write

    if out is not None:
        make_room(Path(out))
    named = {} if groups is None else read_groups(Path(groups))
    network = load_classifier(model, image_size)
    task = _own(network, model, data, split) if protocol is None else _protocol(network, protocol, str(data), labels)
    notes = [*task.notes, *(misfits(named, task.class_names) if groups is not None else [])]
    found = _classify(network, task, batch_size, workers, device, precision)
    result = Evaluation(str(model), task.name, found, group_means(found, named), notes)
    if out is not None:
        write(found, as_json(result), Path(out))
    return result


def _classify(
    network: ViT | ResNet,
    task: _Task,
    batch_size: int,
    workers: int | None,
    device: str | None,
    precision: Literal["auto", "bf16", "float32"],
) -> Classification:
    from vitrail.data.loading.loader import Loader
    from vitrail.device import available_cores, choose_device
    from vitrail.evaluation.classify import classify, predictor
    from vitrail.evaluation.imagenet import choosing

    loader = Loader(
        task.source,
        transform=task.transform,
        image_size=network.card.preprocess.image_size,
        batch_size=batch_size,
        shuffle=False,
        drop_last=False,
        workers=available_cores() // 2 if workers is None else workers,
    )
    try:
        predict = predictor(network, choose_device(device), precision)
        predict = predict if task.outputs is None else choosing(predict, task.outputs)
        return classify(predict, loader, task.class_names, task.key)
    finally:
        loader.close()


def _own(network: ViT | ResNet, model: str | Path, data: str | Path | None, split: str | None) -> _Task:
    """Return the task for any images with the network's classes."""
    from vitrail.data.images.ops import eval_transform

    card = network.card
    source, name = _source(model, data, split, card.class_names or None)
    return _Task(source, name, output_names(network, source, model), eval_transform(card.preprocess))


def _protocol(network: ViT | ResNet, protocol: str, data: str, labels: str | Path | None) -> _Task:
    """Return the task for one of ImageNet's test sets."""
    from vitrail.data.benchmarks.imagenet import open_benchmark
    from vitrail.evaluation.imagenet import output_order, view

    card = network.card
    order = output_order(card.class_names, card.config.classes)
    opened = open_benchmark(protocol, data, labels)
    notes = [*([order.assumed] if order.assumed else []), *opened.notes]
    name = f"{opened.protocol.title} ({data})"
    outputs = order.outputs[opened.columns]
    shown = view(opened.protocol, card.preprocess)
    return _Task(opened.source, name, opened.class_names, shown, outputs, opened.key, notes)


def _source(
    model: str | Path, data: str | Path | None, split: str | None, class_names: list[str] | None
) -> tuple[Listed, str]:
    """Open the images to evaluate, and name them."""
    from vitrail.data.sources.open import open_data, open_split

    if data is not None:
        return open_split(data, split, class_names), str(data)
    written = Path(model) / "config.yaml"
    if not written.is_file():
        raise UsageError(f"evaluate on which images? {model} is no run that knows: vitrail evaluate {model} DIR")
    run = from_yaml(written, Run())
    if split is not None:
        return open_split(run.data.path, split, class_names), f"{run.data.path}, split {split}"
    splits = open_data(run.data, seed=run.seed)
    if splits.test is not None:
        return splits.test, f"the test images of {run.data.path}"
    if splits.validation is not None:
        return splits.validation, f"the validation images of {run.data.path}"
    raise UsageError(f"{model} was trained without test or validation images: vitrail evaluate {model} DIR")


def show(result: Evaluation) -> Any:
    """Return the result as tables for a terminal."""
    from rich.console import Group as Lines
    from rich.table import Table
    from rich.text import Text

    from vitrail.evaluation.calibration import calibration

    found, calibrated = result.found, calibration(result.found)
    head = (
        f"{result.model} on {result.data}: top-1 {found.top1:.2%}, top-5 {found.top5:.2%}, "
        f"loss {found.nll:.4f}, {found.count:,} images"
    )
    sure = (
        f"calibration: ECE {calibrated.ece:.2%}, mean confidence {calibrated.confidence:.2%}, "
        f"Brier score {calibrated.brier:.4f}"
    )
    classes = Table("class", "images", "right", title="worst classes", title_justify="left")
    rows = sorted(zip(found.class_names, found.class_count, found.class_accuracy, strict=True), key=_by_accuracy)
    for name, count, accuracy in [row for row in rows if row[1]][:WORST]:
        classes.add_row(name, str(count), f"{accuracy:.1%}")
    confused = Table("class", "taken for", "images", title="most confused", title_justify="left")
    for label, answer, count in confusions(found)[:WORST]:
        confused.add_row(label, answer, str(count))
    means = Table("group", "classes", "images", "top-1", "top-5", "class mean", title="groups", title_justify="left")
    for group in result.groups:
        shares = (f"{share:.1%}" for share in (group.top1, group.top5, group.class_mean))
        means.add_row(group.name, str(group.classes), str(group.count), *shares)
    parts: list[Any] = [head, sure, *map(Text, result.notes), classes]
    parts += [table for table in (means, confused) if table.row_count]
    parts += [f"unreadable image, skipped: {id_} ({reason})" for id_, reason in found.bad]
    return Lines(*parts)


def _by_accuracy(row: tuple[str, int, float]) -> tuple[float, str]:
    return float(row[2]), row[0]


def confusions(found: Classification) -> list[tuple[str, str, int]]:
    """Return (class, taken for, images) for every mistake that was made, the most frequent first."""
    counts = found.confusion.copy()
    counts[range(len(counts)), range(len(counts))] = 0
    pairs = [(int(counts[i, j]), int(i), int(j)) for i, j in zip(*counts.nonzero(), strict=True)]
    pairs.sort(key=lambda pair: (-pair[0], pair[1:]))
    return [(found.class_names[i], found.class_names[j], count) for count, i, j in pairs]


def as_json(result: Evaluation) -> Any:
    """Return the result as JSON values: numbers, every class, the confusion matrix (rows are true classes)."""
    from dataclasses import asdict

    from vitrail.evaluation.calibration import calibration

    found, calibrated = result.found, calibration(result.found)
    classes = zip(found.class_names, found.class_count, found.class_correct, strict=True)
    return {
        "model": result.model,
        "data": result.data,
        **found.metrics(),
        "ece": calibrated.ece,
        "brier": calibrated.brier,
        "confidence": calibrated.confidence,
        "calibration": list(calibrated.rows()),
        "notes": result.notes,
        "groups": [asdict(group) for group in result.groups],
        "classes": [{"name": name, "count": int(count), "correct": int(right)} for name, count, right in classes],
        "confusion": found.confusion.tolist(),
        "bad": [{"id": id_, "reason": reason} for id_, reason in found.bad],
    }
