"""Measure the number of a cell: the accuracy of a trained network, or the cost of a network on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from vitrail.costs.count import learned_values, macs
from vitrail.costs.measure import TimedNetwork, peak_bytes, rate, sweep
from vitrail.costs.measure import best as fastest
from vitrail.data.benchmarks.imagenet import open_benchmark
from vitrail.data.images.geometry import Op
from vitrail.data.images.ops import eval_transform
from vitrail.data.item import IndexedSource, Subset
from vitrail.data.labels.sets import one_label
from vitrail.data.loading.loader import Loader
from vitrail.data.settings import Preprocess
from vitrail.data.split import fingerprint
from vitrail.device import available_cores, choose_device, compute_precision
from vitrail.errors import TrainingError
from vitrail.evaluation.ahead import Refusing
from vitrail.evaluation.classify import classify, predictor
from vitrail.evaluation.features import Features, collect
from vitrail.evaluation.fewshot import ShotSelection, fewshot
from vitrail.evaluation.imagenet import choosing, output_order, view
from vitrail.evaluation.knn import knn
from vitrail.evaluation.linear_probe import linear_probe
from vitrail.files import read_json_object
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.ranges import height_width
from vitrail.studies.sets import IMAGENET, Sets, train_and_test
from vitrail.studies.study import Counted, MetricName, Stage
from vitrail.training.folder import RunFolder
from vitrail.training.optim.tune import freeze_rest
from vitrail.transfer.trial import Outcome, write_json
from vitrail.weights.load import load

SHOTS, DRAWS, NEIGHBOURS = 5, 10, 20
MEASURED = "measured.json"
BATCH = 256
"""Images per batch when features are computed."""
SECONDS = 0.5
"""Seconds of a measurement of speed at one batch size."""
STEP = 64
"""Images of the training step whose memory is measured."""


class Probes:
    """Measures trained networks, on features of the images of a data set (`Cell.on`) or on their own test images."""

    def __init__(self, sets: Sets, on: str = "down") -> None:
        self.sets = sets
        self.on = on
        self._features: tuple[Path, Features, Features] | None = None
        """The features of the network that was measured last, for the next metric."""

    def number(self, metric: MetricName, outcome: Outcome, best: bool) -> float:
        """Return a number of a trained network, in the unit of `vitrail.studies.study.UNITS`.

        With `best`, of its best weights on the validation images. Numbers from features are kept beside the run. Raises
        the errors of opening images, and TrainingError if the run has no test images.
        """
        folder = RunFolder(Path(outcome.run))
        if metric == "top-1":
            if outcome.test is None:
                raise TrainingError(f"{folder.path} has no test images to measure on")
            return 100 * outcome.test["top1"]
        if metric == "stored":
            return (folder.last / "model.safetensors").stat().st_size / 1e6
        kept = folder.path.parent / MEASURED
        key = f"{metric}, {SHOTS} shots, {DRAWS} draws, best {best}, {self.fingerprint}"
        known = _known(kept)
        if key not in known:
            model = folder.best if best else folder.last
            known[key] = 100 * (self.real(model) if metric == "ReaL" else self._probe(metric, model))
            write_json(kept, known)
        return known[key]

    @cached_property
    def images(self) -> tuple[IndexedSource, IndexedSource]:
        """The training images, from which shots are drawn, and the test images."""
        return self.sets.probe if self.on == "down" else train_and_test(self.sets.path(self.on))

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of these images."""
        return fingerprint(dict(zip(("train", "test"), self.images, strict=True)))

    def real(self, model: Path) -> float:
        """Return the accuracy of a saved network by the labels of ImageNet ReaL, a fraction."""
        network, root = load(model), Path(self.sets.path(IMAGENET))
        opened = open_benchmark("real", root / "val" if (root / "val").is_dir() else root)
        order = output_order(network.card.class_names, network.card.config.classes)
        predict = Refusing(predictor(network, choose_device(None), "auto"))
        loader = _loader(opened.source, view(opened.protocol, network.card.preprocess), network.card.preprocess)
        with closing(loader), predict:
            found = classify(choosing(predict, order.outputs[opened.columns]), loader, opened.class_names, opened.key)
        return found.top1

    def _probe(self, metric: MetricName, model: Path) -> float:
        train, test = self.images
        if metric == "5-shot":
            chosen = ShotSelection(one_label(train.labels, metric), train.class_names, shots=(SHOTS,), seeds=DRAWS)
            embed = _embedder(model)
            shots = embed(Subset(train, chosen.rows))
            shots = replace(shots, index=chosen.rows[shots.index])
            return float(fewshot(chosen, shots, embed(test)).mean[0, 0])
        if self._features is None or self._features[0] != model:
            embed = _embedder(model)
            self._features = model, embed(train), embed(test)
        _, *features = self._features
        if metric == "20-NN":
            return knn(*features, k=(NEIGHBOURS,), device=choose_device(None)).top1[NEIGHBOURS]
        return linear_probe(*features).top1


def _known(path: Path) -> dict[str, float]:
    """Return the numbers that were measured before; empty if there are none, or if the file is damaged."""
    try:
        found = {key: float(value) for key, value in read_json_object(path, TrainingError).items()}
    except (TrainingError, ValueError, TypeError, OverflowError):
        return {}
    return {key: value for key, value in found.items() if math.isfinite(value)}


def _embedder(model: Path) -> Callable[[IndexedSource], Features]:
    """Return what computes the features of images by a saved network, with its own preprocessing."""
    network = load(model)
    embed = predictor(network, choose_device(None), "auto", features=True)
    preprocess = network.card.preprocess

    def features(source: IndexedSource) -> Features:
        with closing(_loader(source, eval_transform(preprocess), preprocess)) as loader, Refusing(embed) as refusing:
            return collect(refusing, loader, source.class_names)

    return features


def _loader(source: IndexedSource, transform: Op, preprocess: Preprocess) -> Loader:
    return Loader(
        source, transform=transform, image_size=preprocess.size, batch_size=BATCH,
        workers=max(1, available_cores() // 2), shuffle=False, drop_last=False,
    )  # fmt: skip


def count_cost(metric: Counted, stage: Stage) -> float:
    """Return what the network of a stage costs, in the unit of `vitrail.studies.study.UNITS`.

    Times and memory are measured on this machine, in the precision of the training.
    """
    config = config_of(stage)
    if metric == "parameters":
        return learned_values(config) / 1e6
    if metric == "MACs":
        return macs(config) / 1e6
    device = choose_device(None)
    precision = compute_precision(device, stage.run.precision)
    if metric in ("memory", "step"):
        prepare = partial(freeze_rest, tune=stage.run.tune)
        step = TimedNetwork(config, "training", device, precision, prepare)
        return peak_bytes(step, STEP) / 2**20 if metric == "memory" else 1000 * STEP / _rate(step, STEP)
    timed = TimedNetwork(config, "inference", device, precision)
    if metric == "latency":
        return 1000 / _rate(timed, 1)
    return fastest(sweep(lambda batch: rate(timed, batch, SECONDS))).images_per_second


def _rate(timed: TimedNetwork, batch: int) -> float:
    return rate(timed, batch, SECONDS).images_per_second


def config_of(stage: Stage) -> ViTConfig | ResNetConfig:
    """Return the network of a stage: that of the first stage of its chain, at its own image size.

    A size that the patch does not divide becomes the next multiple, as in fine-tuning (392 pixels for ViT-H/14).
    """
    first = stage
    while first.start is not None:
        first = first.start
    size = height_width(first.run.image_size or 224)
    config = variant(first.run.network, **first.run.vit.changes(), image_size=size)
    patch = config.patch if isinstance(config, ViTConfig) else 1
    height, width = height_width(stage.run.image_size or config.image_size)
    return replace(config, image_size=(-(-height // patch) * patch, -(-width // patch) * patch))
