"""`vitrail evaluate`: measure the accuracy of a network on images."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from vitrail.data.settings import SPLIT
from vitrail.device import Precision
from vitrail.disk import writing
from vitrail.errors import UsageError
from vitrail.exports.kinds import EngineName
from vitrail.files import check_writable, replacing_text, result_json
from vitrail.ranges import Count, InputSize, Threads, checked
from vitrail.terminal import ProgressLine, table
from vitrail.training.recorded import held_out, recorded_run
from vitrail.verbs.features import NO_IMAGES
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords, ImagesLike, LabelsLike, NetworksLike
from vitrail.verbs.flags.reading import READ
from vitrail.verbs.network import (
    each_network,
    load_together,
    network_labels,
    other_held_out,
    output_names,
    run_images,
    run_of,
    said_of_held_out,
    said_of_networks,
    settings_of,
)
from vitrail.version import need
from vitrail.words import brief

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from vitrail.data.benchmarks.imagenet_labels import AnswerKey
    from vitrail.data.images.geometry import Op
    from vitrail.data.item import IndexedSource
    from vitrail.evaluation.classify import Batches, Predict
    from vitrail.evaluation.groups import GroupAccuracy
    from vitrail.evaluation.results import Results
    from vitrail.exports.engine import Engine
    from vitrail.model.resnet import ResNet
    from vitrail.model.vit import ViT
    from vitrail.tasks.ensemble import Ensemble
    from vitrail.weights.card import Card

ViewKind = Literal["flip", "crops"]


@dataclass(frozen=True)
class Evaluation:
    """A network's results on a data set, or those of the mean of several networks."""

    model: str
    data: str
    results: Results
    groups: list[GroupAccuracy] = field(default_factory=list)
    """Means over groups of classes, if a file defines groups."""
    notes: list[str] = field(default_factory=list)
    """Assumptions, and images or classes that were skipped."""
    temperature: float = 1.0
    """The temperature by which logits were divided; 1 for the mean over views or networks, whose probabilities have
    theirs."""
    networks: dict[str, Results] = field(default_factory=dict)
    """For the mean of several networks: the results of each alone."""

    def __repr__(self) -> str:
        main = self.results.headline
        numbers = {main: round(float(getattr(self.results, main)), 4), "images": self.results.count}
        return brief(self, {name: value for name, value in vars(self).items() if name != "results"} | numbers)


@dataclass(frozen=True)
class _Evaluated:
    """The images to evaluate, their preprocessing, and their correct classes."""

    source: IndexedSource
    name: str
    class_names: list[str]
    transform: Op
    outputs: np.ndarray | None = None
    """The network's outputs to choose among; None: all."""
    key: AnswerKey | None = None
    notes: list[str] = field(default_factory=list)


@checked
def evaluate(
    model: NetworksLike,
    data: ImagesLike | None = None,
    *,
    split: str | None = None,
    protocol: Literal["imagenet", "real", "v2", "a", "r", "objectnet"] | None = None,
    labels: LabelsLike | None = None,
    groups: str | Path | None = None,
    tta: ViewKind | None = None,
    calibrate: bool = True,
    image_size: InputSize | None = None,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    engine: EngineName = "auto",
    out: str | Path | None = None,
    raw: bool = False,
    **reading: Unpack[DataKeywords],
) -> Evaluation:
    """Measure a trained network: top-1, top-5, balanced accuracy, F1, calibration, each class, and confusions.

    A network that predicts several labels is measured by mean average precision (mAP), F1 (micro, macro and of each
    label, with the thresholds of its card), exact matches, and the calibration of each label. A network that predicts
    numbers is measured by R2, MAE and RMSE of each target, beside the errors of always predicting the training mean.

    Every image counts exactly once, and classes are matched by name. Unreadable images are listed and not counted. With
    a protocol, a network with ImageNet's 1,000 classes is measured on one of ImageNet's test sets as the set's authors
    do.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub, or a program that
            `vitrail export` wrote for ONNX Runtime or OpenVINO, which then computes. Of several, before the images, the
            mean of the calibrated probabilities is measured, or of the numbers, and each alone. In Python they are a
            list.
        data: The images, in any form that `vitrail train` takes (default: the run's own test images, else its
            validation images). In Python also a list of paths, pictures, arrays or tensors, with `labels`.
        split: Split of the images to use (default: test, else validation, else all images).
        protocol: ImageNet test set that the folder holds, as it is published; 'imagenet' is the validation set.
        labels: File of labels for imagenet and real, folder of mappings for objectnet (default: next to the
            images). In Python also the labels of a list of images: names of classes or numbers of the network's
            outputs, a list of these for each image if it has several labels, a dictionary of these and of numbers if
            it has several answers.
        groups: A CSV file with the columns class and group. The means of each group of classes are then shown, too.
        tta: Mean of the probabilities over views of each image: 'flip' also looks at its mirror image, 'crops' at its
            four corners and its middle, all mirrored, too. It takes 2 or 10 times as long (default: one view).
        calibrate: Divide the network's outputs by the temperature of its card, if it has one.
        image_size: Size of the input in pixels: the side of a square, or height and width, such as 32 64. Position
            embeddings are resampled (default: the size of the training).
        batch_size: Number of images per batch. It does not change the results.
        out: Folder for evaluation.json, reliability.png, calibration.csv, classes.csv and the output for every
            image (answers.npz); for several labels also cooccurrence.csv. With a name that ends in .npz, only the
            outputs are written.
    """
    networks, said = each_network(model), said_of_networks(model)
    compute = Compute(image_size, batch_size, workers, device, precision, engine)
    held, folder = None, data if isinstance(data, str | Path) else None
    answers = labels if isinstance(labels, str | Path) else None
    if not (isinstance(data, str | Path | None) and isinstance(labels, str | Path | None)):
        held = _held(data, labels, protocol=protocol, split=split, **reading)
    elif protocol is None and labels is not None:
        raise UsageError("--labels needs a --protocol that has labels: imagenet, real or objectnet")
    if protocol is not None and tta == "crops":
        raise UsageError(f"--protocol {protocol} prescribes what is seen of an image. Use --tta flip, or no --tta")
    if protocol is not None and (data is None or split is not None or reading):
        raise UsageError(
            f"--protocol {protocol} needs its folder, without --split and settings of data: vitrail evaluate "
            f"{networks[0]} DIR --protocol {protocol}"
        )
    from vitrail.data.cache import refuse_within
    from vitrail.evaluation.classify import Classification
    from vitrail.evaluation.groups import group_accuracies, group_warnings, read_groups
    from vitrail.tasks.catalog import task_of

    if out is not None:
        if folder is not None:
            refuse_within(out, str(folder))
        _check_writable(Path(out))
    named = {} if groups is None else read_groups(Path(groups))
    network = load_together(model, compute, calibrate=calibrate)
    if held is not None:
        card = network.card
        names, bands = card.class_names or range(card.config.classes), card.preprocess.bands is not None
        given = task_of(card).given(*held, list(map(str, names)), bands=bands)
        task = _task(network, said, given, "the given images")
    elif protocol is None:
        task = _task(network, said, *_source(networks, folder, split, reading, network.card))
    else:
        task = _protocol(network, protocol, str(data), answers)
    notes = [*task.notes, *(group_warnings(named, task.class_names) if groups is not None else [])]
    kind = task_of(network.card)
    if groups is not None and kind.name != "classes":
        raise UsageError(f"--groups divides images by their one class, and {said} predicts {kind.predicts}")
    if tta is not None and not kind.probable:
        raise UsageError(f"--tta needs classes, and {said} predicts {kind.predicts}. Leave it out")
    began = time.monotonic()
    found, alone = _classify(network, task, compute, tta)
    if tta is not None:
        notes += _said_of_views(tta, networks, found, time.monotonic() - began)
    means = group_accuracies(found, named) if isinstance(found, Classification) else []
    temperature = network.card.temperature if tta is None else 1.0
    each_alone = dict(zip(network_labels(networks), alone, strict=True)) if alone else {}
    result = Evaluation(said, task.name, found, means, notes, temperature, each_alone)
    if out is not None:
        _write(found, as_json(result), Path(out), raw=raw)
    return result


def _classify(
    network: ViT | ResNet | Engine | Ensemble, task: _Evaluated, compute: Compute, tta: ViewKind | None = None
) -> tuple[Results, list[Results]]:
    """Return the results of a network; for the mean of several networks also those of each."""
    import torch

    from vitrail.data.images.ops import VIEWS, views
    from vitrail.data.loading.loader import Batch
    from vitrail.evaluation.ahead import Refusing, ahead
    from vitrail.evaluation.confidence import KeptBatches, averaged
    from vitrail.evaluation.imagenet import choosing
    from vitrail.tasks.catalog import task_of
    from vitrail.tasks.ensemble import Ensemble

    card, transform, temperature = network.card, task.transform, network.card.temperature
    height, width = card.preprocess.size
    if tta is not None:
        transform, height, temperature = views(tta, card.preprocess, transform), VIEWS[tta] * height, 1.0
    images = compute.loader(task.source, transform, (height, width), ProgressLine("computed"))
    with closing(images) as loader, ExitStack() as checks:
        outputs: list[Predict] = []
        for computed in compute.of_each(network, images=lambda: len(task.source)):
            predict: Predict = checks.enter_context(Refusing(computed, compute.precision))
            if task.outputs is not None:
                predict = choosing(predict, task.outputs)
            if tta is not None:
                predict = averaged(predict, VIEWS[tta], card.temperature, several=card.several)
            outputs.append(predict)

        def measure(predict: Predict, images: Batches, card: Card = card) -> Results:
            names = task.class_names
            return task_of(card).measure(predict, images, names, card, temperature=temperature, key=task.key)  # type: ignore[no-any-return]

        if not isinstance(network, Ensemble):
            return measure(outputs[0], loader), []

        def of_each(batch: Batch) -> Tensor:  # [batch, networks, classes]
            return torch.stack([predict(batch.images) for predict in outputs], dim=1)

        computed_once = ahead(loader.epoch(0), of_each)
        kept = KeptBatches([Batch(found, batch.labels, batch.index) for batch, found in computed_once], loader.bad)
        each = [measure(itemgetter((slice(None), place)), kept, own) for place, own in enumerate(network.cards)]
        return measure(lambda found: network.mean(found.unbind(dim=1)), kept), each


def _said_of_views(tta: ViewKind, networks: Sequence[str | Path], found: Results, seconds: float) -> list[str]:
    """Return notes about an evaluation with several views of each image, which took `seconds`."""
    from vitrail.data.images.ops import VIEWS

    images = len(found.index)
    notes = [
        f"--tta {tta}: probabilities are the mean over {VIEWS[tta]} views of each image, so the network computes "
        f"{VIEWS[tta]} times as much as without --tta; {images / seconds:,.1f} images/s, the time to read "
        "the files included"
    ]
    if any(run is not None and not run.augment.flip for run in map(run_of, networks)):
        notes.append(
            "warning: the network was trained without mirrored images (augment.flip: false), because a mirrored image "
            "may be of another class. Half of the views are mirrored"
        )
    return notes


def _held(data: Any, labels: Any, **for_files: Any) -> tuple[list[Any], Sequence[Any]]:
    """Return images that Python holds, one by one, and their labels. Raises UsageError unless both are given."""
    from vitrail.data.sources.indexed import one_by_one

    images = list(one_by_one([] if data is None else [data]))
    if data is not None and not images:
        raise UsageError(NO_IMAGES)
    if data is None or labels is None or isinstance(labels, str | Path):
        raise UsageError("images in Python need a label each: evaluate(model, images, labels=['cat', 'dog'])")
    if unfit := [name for name, value in for_files.items() if value is not None]:
        raise UsageError(f"{unfit[0]} is a setting of files, and the labels are given in Python. Remove it")
    return images, list(labels)


def _task(
    network: ViT | ResNet | Engine | Ensemble, model: str, source: IndexedSource, name: str, notes: Sequence[str] = ()
) -> _Evaluated:
    """Return the task for images whose labels are the network's. Raises DataError if they are not."""
    from vitrail.data.images.ops import eval_transform
    from vitrail.tasks.catalog import task_of

    card = network.card
    names = output_names(network, source, model)
    source = task_of(card).images(source, str(model))
    return _Evaluated(source, name, names, eval_transform(card.preprocess), notes=[*notes])


def _trained_on(run: Path, data: Path) -> list[str]:
    """Return a warning if `data` is what the run trained on, without splits: a part of it was held out."""
    recorded, held = run_of(run), held_out(run)
    if recorded is None or held.get("from") != "" or data.resolve() != Path(recorded.data.path).resolve():
        return []
    return [
        f"warning: the network was trained on most of these images, so its accuracy on new images is lower. `vitrail "
        f"evaluate {run}` measures only the images that were held out"
    ]


def _protocol(
    network: ViT | ResNet | Engine | Ensemble, protocol: str, data: str, labels: str | Path | None
) -> _Evaluated:
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
    return _Evaluated(opened.source, name, opened.class_names, shown, outputs, opened.key, notes)


def _source(
    networks: Sequence[str | Path], data: str | Path | None, split: str | None, reading: Mapping[str, Any], card: Card
) -> tuple[IndexedSource, str, list[str]]:
    """Open the images to evaluate, name them, and warn if a network knows them. Labels are read as the run's were."""
    from vitrail.data.sources.folder import Located
    from vitrail.data.sources.open import open_split

    model, names = networks[0], card.class_names or None
    run = recorded_run(model) if data is None else run_of(model)
    used = (*READ, *(SPLIT if data is None and split is None else ()))
    settings = settings_of(run, card, data, reading, used)
    if data is not None:
        known = [line for one in networks for line in _trained_on(Path(one), Path(data)) if split is None]
        return Located(open_split(settings, split, names), "", data), str(data), known
    if run is None:
        raise UsageError(f"no images are given, and {model} is not a run with images: vitrail evaluate {model} DIR")
    if split is not None:
        return Located(open_split(settings, split, names), "", settings.path), f"{settings.path}, split {split}", []
    if (images := run_images(model, run, settings, ("test", "validation"))) is None:
        raise UsageError(f"{model} was trained without test or validation images: vitrail evaluate {model} DIR")
    role, source, known = images
    if role == "validation" and (other := other_held_out(networks)) is not None:
        known += [
            f"warning: the images that {model} held out may be training images of {other}: {said_of_held_out(other)}. "
            "Name images that no network was trained on"
        ]
    return Located(source, "", settings.path), f"the {role} images of {settings.path}", known


def _check_writable(out: Path) -> None:
    """Raise UsageError if `_write` cannot write to `out` or lacks a package, before the evaluation starts."""
    if not _is_file(out):
        need("matplotlib")
    check_writable(out, UsageError, folder=not _is_file(out))


def _write(found: Results, numbers: Any, out: Path, *, raw: bool = False) -> None:
    """Write outputs and numbers (JSON values) to the folder `out`, or only the outputs to a file named .npz.

    `raw` is SafeWriter's. Raises UsageError if `out` cannot be written.
    """
    from vitrail.tasks.catalog import TASKS, save_results

    with writing(out, UsageError):
        if _is_file(out):
            save_results(out, found)
            return
        text = result_json(numbers, indent=1)
        with replacing_text(out / "evaluation.json") as file:
            file.write(text + "\n")
        save_results(out / "answers.npz", found)
        TASKS[found.task].write(found, out, raw=raw)


def _is_file(out: Path) -> bool:
    return out.suffix.lower() == ".npz"


def show(result: Evaluation) -> Any:
    """Return the result as tables for a terminal."""
    from vitrail.tasks.catalog import TASKS

    task, subject = TASKS[result.results.task], f"{result.model} on {result.data}"
    found = task.page(subject, result.results, result.notes, result.groups, result.temperature)
    if result.networks:
        each = {**result.networks, "their mean": result.results}
        rows = [
            (name, one.in_words(), f"{ece:.2%}" if (ece := _ece(one)) is not None else "") for name, one in each.items()
        ]
        found.parts.insert(1, table(("network", "result", "calibration error"), rows, "each network alone"))
    return found


def _ece(found: Results) -> float | None:
    """Return the calibration error; None of numbers, which have no probability."""
    from vitrail.tasks.catalog import TASKS

    return TASKS[found.task].as_json(found, [], 1.0).get("ece")


def as_json(result: Evaluation) -> Any:
    """Return the result as JSON values: numbers, every class, the confusion matrix (rows are true classes)."""
    from vitrail.tasks.catalog import TASKS

    found = TASKS[result.results.task].as_json(result.results, result.groups, result.temperature)
    about: dict[str, Any] = {"model": result.model, "data": result.data, "notes": result.notes}
    if result.networks:
        about["networks"] = {name: {**one.metrics(), "ece": _ece(one)} for name, one in result.networks.items()}
    return {**about, **found}
