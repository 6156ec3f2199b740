"""`vitrail probe fewshot | knn | linear`: measure the features of a frozen network."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Unpack

from vitrail.device import Precision
from vitrail.errors import UsageError
from vitrail.ranges import Count, InputSize, Positive, Range, Seed, Threads, checked
from vitrail.terminal import TextTable, page, table, unreadable_json
from vitrail.verbs.features import Embedder, Prepare, open_train_and_test
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.verbs.segment import segment as segment
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.evaluation.features import Features
    from vitrail.evaluation.fewshot import FewShot
    from vitrail.evaluation.knn import KNN
    from vitrail.evaluation.linear_probe import LinearProbe

log = logging.getLogger("vitrail")
MAX_COLUMNS = 8
"""Maximum number of regularisation strengths in the table on a terminal; --json has all of them."""


@one_line
@dataclass(frozen=True)
class Probe:
    """The result of a probe, and whose features it measured."""

    subject: str
    """The network and its images, or the file of features."""
    classes: int
    width: int
    """Number of features per image."""
    results: FewShot | KNN | LinearProbe
    unreadable: list[tuple[str, str]]
    """(image, reason) of each unreadable image; they are not counted in any result."""
    best_l2: dict[int, float] | None = None
    """For few-shot with "paper-2020": shots -> the regularisation with the highest accuracy."""

    @classmethod
    def of(cls, subject: str, found: Any, train: Features, test: Features, best_l2: Any = None) -> Self:
        """Return the result `found` for these training and test features."""
        return cls(subject, len(train.class_names), train.width, found, [*train.bad, *test.bad], best_l2)


@checked
def fewshot(
    model: str | Path | None = None,
    data: str | Path | None = None,
    *,
    features: str | Path | None = None,
    shots: tuple[Count, ...] = (),
    seeds: Annotated[int, Range(1, 1000)] | None = None,
    l2: tuple[Positive, ...] = (),
    protocol: Literal["big_vision-2023", "paper-2020"] = "big_vision-2023",
    prepare: Prepare = "protocol",
    split: str | None = None,
    image_size: InputSize | None = None,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    **reading: Unpack[DataKeywords],
) -> Probe:
    """Measure linear few-shot accuracy: least squares in closed form on frozen features (paper, section 4.1).

    Protocol big_vision-2023 draws the shots with three seeds and regularises with 1024; paper-2020 uses the first
    images of each class and tries strengths from 2^-10 to 2^19. Features are computed once, for the shots and the test
    images.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        data: The images, in any form that `vitrail train` takes (default: those of the run).
        features: An .npz file with train_features, train_labels, test_features and test_labels, such as `vitrail
            embed` writes, in place of model and data.
        shots: Numbers of training images per class (default: 1, 5, 10 and 25).
        seeds: Number of random draws of the shots, over which accuracy is averaged (default: the protocol's).
        l2: Strengths of regularisation to try (default: the protocol's).
        protocol: Protocol of the shots and the regularisation.
        prepare: How images are prepared: 'protocol' squashes them to 256 pixels and crops the central 224, 'model'
            does as in evaluation.
        split: Split to measure on (default: test, else validation, else a tenth that is held out).
    """
    compute = Compute(image_size, batch_size, workers, device, precision)
    _check("fewshot", model, features, split, image_size, *reading.values())
    from vitrail.data.item import Subset
    from vitrail.data.labels.sets import one_label
    from vitrail.evaluation.feature_files import load_features
    from vitrail.evaluation.fewshot import SHOTS, ShotSelection
    from vitrail.evaluation.fewshot import fewshot as measure

    select = partial(ShotSelection, protocol=protocol, shots=tuple(shots) or SHOTS, seeds=seeds, l2=tuple(l2))
    if features is not None:
        subject = str(features)
        train, test = load_features(features)
        selected = select(train.labels, train.class_names)
    else:
        images = open_train_and_test(str(model), data, split, reading=reading)
        selected = select(one_label(images.train.labels, "probe fewshot"), list(images.train.class_names))
        embedder = Embedder(str(model), compute, prepare)
        train, test = embedder(Subset(images.train, selected.rows)), embedder(images.test)
        train = replace(train, index=selected.rows[train.index])
        subject = f"{model} on {images.name}"
    found = measure(selected, train, test)
    for count, short in found.short.items():
        some = ", ".join(short[:5]) + (", ..." if len(short) > 5 else "")
        log.warning("%d classes have fewer than %d training images, all of which are used: %s", len(short), count, some)
    return Probe.of(subject, found, train, test, _best_l2(found))


@checked
def knn(
    model: str | Path | None = None,
    data: str | Path | None = None,
    *,
    features: str | Path | None = None,
    k: tuple[Count, ...] = (),
    temperature: Positive = 0.07,
    split: str | None = None,
    image_size: InputSize | None = None,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    **reading: Unpack[DataKeywords],
) -> Probe:
    """Measure classification by nearest training images: cosine similarity, with votes weighted by temperature (DINO).

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        data: The images, in any form that `vitrail train` takes (default: those of the run).
        features: An .npz file with train_features, train_labels, test_features and test_labels, such as `vitrail
            embed` writes, in place of model and data.
        k: Numbers of nearest images that vote (default: 20).
        temperature: Temperature T of a vote's weight, exp(similarity / T).
        split: Split to measure on (default: test, else validation, else a tenth that is held out).
    """
    compute = Compute(image_size, batch_size, workers, device, precision)
    _check("knn", model, features, split, image_size, *reading.values())
    from vitrail.evaluation.knn import NEIGHBOURS
    from vitrail.evaluation.knn import knn as measure

    subject, train, test = _train_and_test("knn", model, data, reading, features, split, compute)
    found = measure(train, test, k=tuple(k) or NEIGHBOURS, temperature=temperature, device=compute.place())
    return Probe.of(subject, found, train, test)


@checked
def linear(
    model: str | Path | None = None,
    data: str | Path | None = None,
    *,
    features: str | Path | None = None,
    l2: tuple[Positive, ...] = (),
    iterations: Count = 1000,
    seed: Seed = 0,
    split: str | None = None,
    image_size: InputSize | None = None,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    **reading: Unpack[DataKeywords],
) -> Probe:
    """Fit a linear classifier to frozen features with several strengths of regularisation, and measure the best.

    The classifier is softmax regression on standardised features, solved to its optimum (scikit-learn's
    LogisticRegression with C = 1 / (images * l2)). The best strength is chosen on a tenth of the training images that
    is held out, then solved again on all of them; the test images are not used for the choice.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        data: The images, in any form that `vitrail train` takes (default: those of the run).
        features: An .npz file with train_features, train_labels, test_features and test_labels, such as `vitrail
            embed` writes, in place of model and data.
        l2: Strengths of regularisation to try (default: seven from 10 to 0.00001).
        iterations: Maximum number of iterations of the solver for each strength.
        seed: Seed of the held-out tenth.
        split: Split to measure on (default: test, else validation, else a tenth that is held out).
        batch_size: Number of images per batch while features are computed.
    """
    compute = Compute(image_size, batch_size, workers, device, precision)
    _check("linear", model, features, split, image_size, *reading.values())
    from vitrail.evaluation.linear_probe import STRENGTHS, linear_probe

    subject, train, test = _train_and_test("linear", model, data, reading, features, split, compute)
    found = linear_probe(
        train,
        test,
        l2=tuple(l2) or STRENGTHS,
        iterations=iterations,
        seed=seed,
        device=compute.place(),
    )
    return Probe.of(subject, found, train, test)


def _check(verb: str, model: Any, features: Any, *of_images: Any) -> None:
    """Raise UsageError if the features to measure are given twice or not at all."""
    if features is None and model is None:
        raise UsageError(f"no features are given: vitrail probe {verb} MODEL DATA, or a file, --features FILE.npz")
    if features is not None and (model is not None or any(given is not None for given in of_images)):
        raise UsageError(
            "--features replaces model, data, --split, --image-size and the settings of data. Give either features or "
            "a model."
        )


def _train_and_test(
    verb: str,
    model: str | Path | None,
    data: str | Path | None,
    reading: Mapping[str, Any],
    features: str | Path | None,
    split: str | None,
    compute: Compute,
) -> tuple[str, Features, Features]:
    """Return (subject, training features, test features)."""
    if features is not None:
        from vitrail.evaluation.feature_files import load_features

        return str(features), *load_features(features)
    from vitrail.data.labels.sets import one_label

    images = open_train_and_test(str(model), data, split, reading=reading)
    one_label(images.train.labels, f"probe {verb}")
    embedder = Embedder(str(model), compute)
    return f"{model} on {images.name}", embedder(images.train), embedder(images.test)


def _best_l2(found: FewShot) -> dict[int, float] | None:
    """Return shots -> the regularisation that paper-2020 chooses on this data set; None for other protocols."""
    from vitrail.evaluation.fewshot import best_l2

    if found.protocol != "paper-2020" or len(found.l2) == 1:
        return None
    cells = [(i, j) for i in range(len(found.shots)) for j in range(len(found.l2))]
    return best_l2([{(found.shots[i], found.l2[j]): float(found.mean[i, j]) for i, j in cells}])


def show(result: Probe) -> Any:
    """Return the result as text and a table for a terminal."""
    from vitrail.evaluation.classify import has_top5
    from vitrail.evaluation.fewshot import FewShot
    from vitrail.evaluation.knn import KNN

    found, five = result.results, has_top5(result.classes)
    head = f"{result.subject}: {result.classes} classes, {result.width} features, {found.test_images:,} test images"
    if isinstance(found, FewShot):
        seeds = found.top1.shape[2]
        lines = [f"top-1, protocol {found.protocol}" + (f", mean and deviation of {seeds} seeds" if seeds > 1 else "")]
        if result.best_l2 is not None:
            lines.append("best l2 is chosen on these test images, as the protocol does for a single data set")
        return page(head, lines, _fewshot_table(found, result.best_l2))
    if isinstance(found, KNN):
        counts = [(k, f"{top1:.2%}", *[f"{found.top5[k]:.2%}"] * five) for k, top1 in found.top1.items()]
        return page(head, table(("k", "top-1", *["top-5"] * five), counts))
    best = f"top-5 {found.top5:.2%}, " * five
    measured = f"top-1 {found.top1:.2%}, {best}loss {found.nll:.4f} on the test images"
    rows = [
        (f"{one.l2:g}", f"{one.top1:.2%}", f"{one.nll:.4f}", "chosen" * (one is found.chosen)) for one in found.settings
    ]
    strengths = table(("l2", "held-out top-1", "held-out loss", ""), rows)
    return page(head, measured, _linear_warnings(found), strengths)


def _linear_warnings(found: LinearProbe) -> list[str]:
    """Return what makes the result of a linear probe worse than it could be, and what to do."""
    l2, lines = found.chosen.l2, []
    if found.grid_end is not None:
        more = [l2 * 10, l2 * 100] if found.grid_end == "largest" else [l2 / 10, l2 / 100]
        lines.append(
            f"The chosen l2 {l2:g} is the {found.grid_end} that was tried. Try more: --l2 "
            + " ".join(f"{strength:g}" for strength in [l2, *more])
        )
    if short := [f"{one.l2:g}" for one in found.settings if not one.converged]:
        lines.append(f"The solver did not converge on the images that are not held out, with l2 {', '.join(short)}.")
    if not found.converged:
        lines.append(f"The solver did not converge on all training images with l2 {l2:g}.")
    return [*lines, *(["Allow it more steps with --iterations."] if short or not found.converged else [])]


def _fewshot_table(found: FewShot, best: dict[int, float] | None) -> TextTable:
    strengths = list(found.l2)
    if len(strengths) > MAX_COLUMNS:  # only the best of each row
        strengths = sorted({found.l2[int(row.argmax())] for row in found.mean} | set((best or {}).values()))
    rows = []
    for i, shots in enumerate(found.shots):
        cells = [str(shots)]
        for strength in strengths:
            j = found.l2.index(strength)
            deviation = "" if math.isnan(found.std[i, j]) else f" ± {100 * found.std[i, j]:.2f}"
            cells.append(f"{100 * found.mean[i, j]:.2f} %{deviation}")
        rows.append([*cells, f"{best[shots]:g}"] if best else cells)
    return table(("shots", *(f"l2 {strength:g}" for strength in strengths), *(["best l2"] if best else [])), rows)


def as_json(result: Probe) -> Any:
    """Return the result as JSON values; few-shot results include every seed."""
    from vitrail.evaluation.fewshot import FewShot
    from vitrail.evaluation.knn import KNN

    found = result.results
    about = {"subject": result.subject, "classes": result.classes, "width": result.width}
    about |= {"train_images": found.train_images, "test_images": found.test_images}
    if isinstance(found, FewShot):
        values = _fewshot_json(found, result.best_l2)
    elif isinstance(found, KNN):
        rows = [{"k": count, "top1": top1, "top5": found.top5[count]} for count, top1 in found.top1.items()]
        values = {"temperature": found.temperature, "results": rows}
    else:
        values = {
            "top1": found.top1,
            "top5": found.top5,
            "nll": found.nll,
            "converged": found.converged,
            "chosen": asdict(found.chosen),
            "grid_end": found.grid_end,
            "held_out": [asdict(one) for one in found.settings],
            "held_out_images": found.held_out_images,
        }
    return {**about, **values, "unreadable": unreadable_json(result.unreadable)}


def _fewshot_json(found: FewShot, best: dict[int, float] | None) -> dict[str, Any]:
    results = [
        {
            "shots": shots,
            "l2": strength,
            "top1": float(found.mean[i, j]),
            "std": float(found.std[i, j]),
            "seeds": found.top1[i, j].tolist(),
        }
        for i, shots in enumerate(found.shots)
        for j, strength in enumerate(found.l2)
    ]
    chosen = {} if best is None else {"best_l2": {str(shots): strength for shots, strength in best.items()}}
    short = {str(shots): names for shots, names in found.short.items()}
    return {"protocol": found.protocol, "results": results, **chosen, "fewer_images": short}
