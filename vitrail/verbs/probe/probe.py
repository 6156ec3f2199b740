"""`vitrail probe fewshot | knn | linear`: measure the features of a frozen network."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import UsageError
from vitrail.verbs.network.features import Embedder, Prepare, open_splits
from vitrail.verbs.probe.results import Probe, as_json, show

if TYPE_CHECKING:
    from vitrail.evaluation.features import Features
    from vitrail.evaluation.fewshot import FewShot

__all__ = ["as_json", "fewshot", "knn", "linear", "show"]

log = logging.getLogger("vitrail")
Precision = Literal["auto", "bf16", "float32"]


def fewshot(
    model: str | Path | None = None,
    data: str | Path | None = None,
    *,
    features: str | Path | None = None,
    shots: tuple[int, ...] = (),
    seeds: int | None = None,
    l2: tuple[float, ...] = (),
    protocol: Literal["big_vision-2023", "paper-2020"] = "big_vision-2023",
    prepare: Prepare = "protocol",
    split: str | None = None,
    image_size: int | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    device: str | None = None,
    precision: Precision = "auto",
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
        image_size: Side of the square input in pixels. Position embeddings are resampled (default: the network's
            own size).
        batch_size: Number of images per batch.
        workers: Number of threads that decode images (default: from the machine).
        device: Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available).
        precision: Number format of the computation. 'auto' chooses bf16 if the device is fast at it.
    """
    _check("fewshot", model, features, split, image_size)
    from vitrail.evaluation.feature_file import load_features
    from vitrail.evaluation.fewshot import SHOTS, Plan
    from vitrail.evaluation.fewshot import fewshot as measure

    if features is not None:
        subject = str(features)
        train, test = load_features(features)
        plan = Plan(train.labels, train.class_names, protocol, tuple(shots) or SHOTS, seeds, tuple(l2))
    else:
        from vitrail.data.item import View

        splits = open_splits(str(model), data, split)
        names = list(splits.train.class_names)
        plan = Plan(splits.train.labels, names, protocol, tuple(shots) or SHOTS, seeds, tuple(l2))
        how = dict(image_size=image_size, batch_size=batch_size, workers=workers, device=device, precision=precision)
        embedder = Embedder(str(model), prepare=prepare, **how)  # type: ignore[arg-type]
        train, test = embedder(View(splits.train, plan.rows)), embedder(splits.test)
        train = replace(train, index=plan.rows[train.index])
        subject = f"{model} on {splits.name}"
    found = measure(plan, train, test)
    for count, short in found.short.items():
        some = ", ".join(short[:5]) + (", ..." if len(short) > 5 else "")
        log.warning("%d classes have fewer than %d training images, all of which are used: %s", len(short), count, some)
    return _probe(subject, found, train, test, _best_l2(found))


def knn(
    model: str | Path | None = None,
    data: str | Path | None = None,
    *,
    features: str | Path | None = None,
    k: tuple[int, ...] = (),
    temperature: float = 0.07,
    split: str | None = None,
    image_size: int | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    device: str | None = None,
    precision: Precision = "auto",
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
        image_size: Side of the square input in pixels. Position embeddings are resampled (default: the network's
            own size).
        batch_size: Number of images per batch.
        workers: Number of threads that decode images (default: from the machine).
        device: Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available).
        precision: Number format of the computation. 'auto' chooses bf16 if the device is fast at it.
    """
    _check("knn", model, features, split, image_size)
    from vitrail.device import choose_device
    from vitrail.evaluation.knn import NEIGHBOURS
    from vitrail.evaluation.knn import knn as measure

    how = dict(image_size=image_size, batch_size=batch_size, workers=workers, device=device, precision=precision)
    subject, train, test = _train_and_test(model, data, features, split, how)
    place = choose_device(device)
    found = measure(train, test, k=tuple(k) or NEIGHBOURS, temperature=temperature, device=place)
    return _probe(subject, found, train, test)


def linear(
    model: str | Path | None = None,
    data: str | Path | None = None,
    *,
    features: str | Path | None = None,
    lr: tuple[float, ...] = (),
    weight_decay: tuple[float, ...] = (),
    epochs: int = 100,
    minibatch: int = 256,
    seed: int = 0,
    split: str | None = None,
    image_size: int | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    device: str | None = None,
    precision: Precision = "auto",
) -> Probe:
    """Train a linear classifier on frozen features, with many learning rates in one pass, and measure the best.

    The best learning rate is chosen on a tenth of the training images that is held out, then trained again on all of
    them; the test images are not used for the choice. Training is SGD with momentum 0.9 and cosine decay, on
    standardised features.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        data: The images, in any form that `vitrail train` takes (default: those of the run).
        features: An .npz file with train_features, train_labels, test_features and test_labels, such as `vitrail
            embed` writes, in place of model and data.
        lr: Learning rates to try (default: eight from 0.0001 to 0.3).
        weight_decay: Weight decays to try with each learning rate (default: 0).
        epochs: Number of epochs over the features.
        minibatch: Number of features per step.
        seed: Seed of the order of the images and of the held-out tenth.
        split: Split to measure on (default: test, else validation, else a tenth that is held out).
        image_size: Side of the square input in pixels. Position embeddings are resampled (default: the network's
            own size).
        batch_size: Number of images per batch while features are computed.
        workers: Number of threads that decode images (default: from the machine).
        device: Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available).
        precision: Number format of the computation. 'auto' chooses bf16 if the device is fast at it.
    """
    _check("linear", model, features, split, image_size)
    from vitrail.device import choose_device
    from vitrail.transfer.linear_probe import LEARNING_RATES, linear_probe

    how = dict(image_size=image_size, batch_size=batch_size, workers=workers, device=device, precision=precision)
    subject, train, test = _train_and_test(model, data, features, split, how)
    found = linear_probe(
        train,
        test,
        lr=tuple(lr) or LEARNING_RATES,
        weight_decay=tuple(weight_decay) or (0.0,),
        epochs=epochs,
        minibatch=minibatch,
        seed=seed,
        device=choose_device(device),
    )
    return _probe(subject, found, train, test)


def _check(verb: str, model: Any, features: Any, *of_images: Any) -> None:
    """Raise UsageError if the features to measure are given twice or not at all."""
    if features is None and model is None:
        raise UsageError(f"Probe which features? vitrail probe {verb} MODEL DATA, or a file, --features FILE.npz")
    if features is not None and (model is not None or any(given is not None for given in of_images)):
        raise UsageError("--features replaces model, data, --split and --image-size. Give either features or a model.")


def _train_and_test(
    model: str | Path | None,
    data: str | Path | None,
    features: str | Path | None,
    split: str | None,
    how: dict[str, Any],
) -> tuple[str, Features, Features]:
    """Return (subject, training features, test features)."""
    if features is not None:
        from vitrail.evaluation.feature_file import load_features

        return str(features), *load_features(features)
    splits = open_splits(str(model), data, split)
    embedder = Embedder(str(model), **how)
    return f"{model} on {splits.name}", embedder(splits.train), embedder(splits.test)


def _best_l2(found: FewShot) -> dict[int, float] | None:
    """Return shots -> the regularisation that paper-2020 chooses on this data set; None for other protocols."""
    from vitrail.evaluation.fewshot import best_l2

    if found.protocol != "paper-2020" or len(found.l2) == 1:
        return None
    cells = [(i, j) for i in range(len(found.shots)) for j in range(len(found.l2))]
    return best_l2([{(found.shots[i], found.l2[j]): float(found.mean[i, j]) for i, j in cells}])


def _probe(
    subject: str,
    found: Any,
    train: Features,
    test: Features,
    best_l2: dict[int, float] | None = None,
) -> Probe:
    bad = [*train.bad, *test.bad]
    return Probe(subject, len(train.class_names), train.width, found, bad, best_l2)
