"""The network of a verb, from any source that `vitrail.load` takes, and the run that it may be from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vitrail.data.settings import Data
from vitrail.errors import DataError, UsageError, VitrailError, WeightsError
from vitrail.exports.kinds import find_program
from vitrail.ranges import InputSize
from vitrail.training.recorded import held_out, recorded_run, recorded_splits
from vitrail.training.run import Run
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import NetworksLike
from vitrail.verbs.flags.reading import READ, read_settings
from vitrail.words import counted, distinct_labels

if TYPE_CHECKING:
    from vitrail.data.item import IndexedSource
    from vitrail.data.roles import Splits
    from vitrail.exports.engine import Engine
    from vitrail.model.resnet import ResNet
    from vitrail.model.vit import ViT
    from vitrail.tasks.ensemble import Ensemble
    from vitrail.weights.card import Card
    from vitrail.weights.confidence import Rejection

log = logging.getLogger("vitrail")
IN_FOLDERS = ("run.json", "model.safetensors", "pytorch_model.bin")
"""Files that only the folder of a run or of a network has."""
WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".bin")
"""Endings of weight files; an .npz may hold images, too."""


def is_network(word: str) -> bool:
    """Return whether a word of a command line names a network on this machine, and no images."""
    path = Path(word).expanduser()
    if not path.exists():
        return word.startswith("vitrail/")
    weights = path.is_file() and path.suffix in WEIGHT_FILES
    return weights or any((path / name).is_file() for name in IN_FOLDERS) or find_program(path) is not None


def load_network(source: str | Path, image_size: InputSize | None = None) -> ViT | ResNet:
    """Return a network with its card, resampled to `image_size` pixels if that is given.

    Assumptions about a foreign file are logged. Raises WeightsError, and UsageError for an impossible size.
    """
    from vitrail.weights.load import load

    network: Any = load(source, image_size=image_size)
    report = network.load_report
    log.log(logging.INFO if report.assumptions else logging.DEBUG, "%s", report)
    if report.path.parent.parts[-2:] == ("model", "last") and Path(source).name not in ("last", report.path.name):
        log.warning("%s has no model/best, the best model of the run: model/last, its newest one, is used", source)
    for difference in report.differences:
        log.warning("%s: images are prepared otherwise than where the weights come from: %s", source, difference)
    return network


def load_classifier(source: str | Path, image_size: InputSize | None = None) -> ViT | ResNet:
    """Return a network with a classifier, as `load_network` does. Raises WeightsError if it has none."""
    network = load_network(source, image_size)
    if not network.config.classes:
        raise WeightsError(
            f"{source} has no classifier, only features. Train a classifier: vitrail finetune DIR --from {source}"
        )
    warn_of_classifier(network, source)
    return network


def warn_of_classifier(network: ViT | ResNet, source: str | Path) -> None:
    """Log a warning for a classifier that was never trained, and for probabilities of images of another size."""
    if network.load_report.resampled and network.card.resampled() != network.card.unmeasured():
        log.warning(
            "%s: the temperature of its probabilities and the thresholds of its labels were measured with images of "
            "another size",
            source,
        )
    warn_of_untrained(network, source)


def warn_of_untrained(network: ViT | ResNet, source: str | Path) -> None:
    """Log a warning if all weights of a classifier are zero, as those of a new one are."""
    for name in ("head", "head_dist"):
        head = getattr(network, name, None)
        weights = [] if head is None else [values for values in head.parameters() if values.dim() > 1]
        if weights and not any(bool(values.any()) for values in weights):
            log.warning(
                "%s: all weights of its classifier (%s) are zero: it was never trained, and every image gets the same "
                "outputs. Train it: vitrail finetune DIR --from %s",
                source,
                name,
                source,
            )


def load_together(
    sources: NetworksLike, compute: Compute, *, calibrate: bool = True
) -> ViT | ResNet | Engine | Ensemble:
    """Return what `load_runnable` returns, or for several networks their mean. Raises UsageError if they have none."""
    from vitrail.tasks.ensemble import Ensemble

    each = each_network(sources)
    labels = network_labels(each)
    networks = [load_runnable(source, compute, calibrate=calibrate) for source in each]
    return networks[0] if len(networks) == 1 else Ensemble(networks, labels)


def each_network(sources: NetworksLike) -> list[str | Path]:
    """Return the networks one by one. Raises UsageError if there is none."""
    if not (found := [sources] if isinstance(sources, str | Path) else list(sources)):
        raise UsageError("there is no network: the list is empty. Give at least one run, model folder or weight file")
    return found


def fingerprint_of(sources: NetworksLike) -> str | list[str]:
    """Return a hash of the weights of a network, or of each of several. Raises WeightsError."""
    from vitrail.weights.load import weights_fingerprint

    found = [weights_fingerprint(source) for source in each_network(sources)]
    return found[0] if isinstance(sources, str | Path) else found


def temperature_of(network: ViT | ResNet | Engine | Ensemble) -> float | list[float]:
    """Return the temperature of the probabilities of a network, or of each of several networks or answers."""
    if (members := getattr(network, "members", None)) is not None:
        return [one.card.temperature for one in members]
    card = network.card
    return [own.temperature for _, own in card.of_answers().values()] if card.answers else card.temperature


def said_of_networks(sources: NetworksLike) -> str:
    """Return the networks as the subject of a sentence: "runs/a", "the mean of a, b and c"."""
    *names, last = network_labels(each := each_network(sources))
    if not names:
        return str(each[0])
    return f"the mean of {', '.join(names)} and {last}"


def load_runnable(
    source: str | Path, compute: Compute, *, features: bool = False, calibrate: bool = True
) -> ViT | ResNet | Engine:
    """Return a network with a classifier, or the exported program at `source`; with `features`, a network of any kind.

    calibrate: Keep the temperature of its probabilities, if its card has one.

    A program computes in its own way: raises UsageError for a device, a precision, an engine and an image size that are
    asked for. Raises ExportError for a program that computes something else than what is needed, WeightsError for a
    network without a classifier.
    """
    network: Any
    if (program := find_program(source)) is None:
        network = (load_network if features else load_classifier)(source, compute.image_size)
    else:
        own = {
            "--image-size": compute.image_size is None,
            "--device": compute.device in (None, "cpu"),
            "--precision": compute.precision == "auto",
            "--engine": compute.engine == "auto",
        }
        if given := [flag for flag, is_own in own.items() if not is_own]:
            raise UsageError(
                f"{program} is an exported program, which runs on the CPU, in the image size, the precision and the "
                f"runtime of its export. Remove {' and '.join(given)}"
            )
        from vitrail.exports.engine import Engine

        network = Engine(program, "features" if features else "logits")
    if network.card.preprocess.bands is None and network.card.config.channels != 3:
        raise UsageError(
            f"{source} takes images of {counted(network.card.config.channels, 'channel')}, and its card does not say "
            "how they are read from files (preprocess.bands), so it has no images in this command. Training measures "
            f"it: vitrail finetune DIR --from {'NETWORK' if program else source} --data.channels "
            f"{network.card.config.channels}"
        )
    if not calibrate:
        network.card = network.card.with_confidence(None)
    return network  # type: ignore[no-any-return]


def explained_rejection(card: Card, source: str | Path, threshold: float) -> Rejection | None:
    """Return, and log, what a smallest confidence means on the validation images of a network; None if unknown.

    Raises UsageError for a network that predicts several labels or numbers.
    """
    from vitrail.tasks.catalog import task_of

    task = task_of(card)
    if task.unrejected:
        raise UsageError(f"{source} predicts {task.predicts}{task.unrejected}. Remove --reject")
    found = None if card.confidence is None else card.confidence.rejection(threshold)
    if found is None:
        log.warning(
            "%s does not say how often it is right at a confidence: it was trained without validation images or "
            "without calibration, its calibration is switched off, or it is the mean of several networks",
            source,
        )
    else:
        log.info("%s", found)
    return found


def output_names(network: ViT | ResNet | Engine | Ensemble, images: IndexedSource, source: str | Path) -> list[str]:
    """Return the name of each output: from the weights, or else the classes of the images, in order.

    Raises DataError if the weights have no names and the numbers of outputs and classes differ.
    """
    if network.card.class_names:
        return list(network.card.class_names)
    classes, names = network.card.config.classes, list(images.class_names)
    if classes != len(names):
        raise DataError(
            f"{source} has {classes} outputs without names and the images have {len(names)} classes, so they cannot "
            f"be matched. Train a classifier for these images: vitrail finetune DIR --from {source}"
        )
    log.warning(
        "%s does not name its outputs: the classes of the images are used instead, in order, from %r to %r",
        source,
        names[0],
        names[-1],
    )
    return names


def other_held_out(runs: Sequence[str | Path]) -> str | Path | None:
    """Return a run that held out other images than the first one, which it may have learned; None if there is none."""
    return next((run for run in runs if held_out(run) != held_out(runs[0])), None)


def said_of_held_out(run: str | Path) -> str:
    """Return what is known about the images that such another run held out, as the end of a sentence."""
    return "it held out other images" if held_out(run) else "it is not known which images it held out"


def run_of(model: str | Path) -> Run | None:
    """Return the settings of a run; None if it is none, or has a class of the user's own that is not imported here."""
    try:
        return recorded_run(model)
    except VitrailError:
        return None


def settings_of(
    run: Run | None, card: Card, data: str | Path | None, reading: Mapping[str, Any], used: tuple[str, ...] = READ
) -> Data:
    """Return the settings of images at `data` (default: those of the run), whose labels are read as the run's were.

    reading, used: See `read_settings`.
    """
    from vitrail.tasks.catalog import task_of

    settings = Data() if run is None else run.data
    if data is not None and Path(data) != Path(settings.path):  # its columns may have other names
        kept = ("label_separator", "labels_per_image", "ignore")
        settings = Data(**{name: getattr(settings, name) for name in kept})
    return read_settings(reading, data, task_of(card).settings(settings, card), used)


def is_table(data: Data) -> bool:
    """Return whether the images are listed in one file, such as a CSV."""
    from vitrail.data.sources.table import TABLE_SUFFIXES

    place = Path(data.path).expanduser()
    return place.suffix.lower() in TABLE_SUFFIXES and place.is_file()


def with_answers(data: Data, card: Card) -> Data:
    """Return the settings of images whose labels only stand beside results: of a table, the columns that are answers.

    They are those of a network with this `card` that the table has. Labels that are named in another way stay.
    """
    from vitrail.data.labels.answers import with_kind
    from vitrail.data.sources.table import read_rows
    from vitrail.tasks.catalog import task_of

    named = data.answers or data.label_column or data.label_columns or data.label_from
    if not card.answers or named or not is_table(data):
        return data
    header, _ = read_rows(Path(data.path).expanduser())
    found = task_of(card).settings(data, card)
    there = tuple(name for name in found.answers or () if with_kind(name)[0] in header)
    return replace(found, answers=there) if there else data


def network_labels(networks: Sequence[str | Path]) -> list[str]:
    """Return a short label for each network. Raises UsageError if a network is given twice."""
    labels = distinct_labels(networks)
    if len(set(labels)) < len(labels):
        twice = next(label for number, label in enumerate(labels) if label in labels[:number])
        raise UsageError(f"the network {twice} is given twice. Give each network once.")
    return labels


class RunImages(NamedTuple):
    """Images that a run was not trained on."""

    role: Literal["validation", "test"]
    source: IndexedSource
    notes: list[str]
    """What has changed since the training."""


def run_images(
    model: str | Path,
    run: Run,
    data: Data,
    roles: Sequence[Literal["validation", "test"]],
    *,
    labels: bool = True,
) -> RunImages | None:
    """Return the images of the first of the `roles` that the run in the folder `model` has; None if it has none.

    `data` are the run's settings of the data, or changes of them. labels: See `open_data`. Raises as `run_splits`.
    """
    splits, notes = run_splits(model, run, data, labels=labels)
    found = ((role, getattr(splits, role)) for role in roles)
    return next((RunImages(role, source, notes) for role, source in found if source is not None), None)


def run_splits(model: str | Path, run: Run, data: Data, *, labels: bool = True) -> tuple[Splits, list[str]]:
    """Return the images of the run in the folder `model`, divided as in its training, and notes about what has changed.

    See `recorded_splits`. If the run kept classes of its weights, the notes say which images of old classes there are.
    """
    from vitrail.training.classes import change_classes, known_classes

    changed = labels and run.keeps_classes
    splits, notes = recorded_splits(model, run, data, known_classes(run) if changed else (), labels=labels)
    if not changed:
        return splits, notes
    change = change_classes(replace(run, data=data), splits)
    return change.splits, [*notes, *change.about]
