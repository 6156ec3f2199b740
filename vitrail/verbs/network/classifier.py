"""Load the network of a verb from any source that `vitrail.load` takes; with a classifier for some verbs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import DataError, WeightsError

if TYPE_CHECKING:
    from vitrail.data.item import Listed
    from vitrail.model.resnet.network import ResNet
    from vitrail.model.vit import ViT

log = logging.getLogger("vitrail")


def load_network(source: str | Path, image_size: int | None = None) -> ViT | ResNet:
    """Return a network with its card, resampled to `image_size` pixels if that is given.

    Assumptions about a foreign file are logged. Raises WeightsError, and UsageError for an impossible size.
    """
    from vitrail.weights.load import load

    network: Any = load(source, image_size=image_size)
    report = network.load_report
    log.log(logging.INFO if report.assumptions else logging.DEBUG, "%s", report)
    return network


def load_classifier(source: str | Path, image_size: int | None = None) -> ViT | ResNet:
    """Return a network with a classifier, as `load_network` does. Raises WeightsError if it has none."""
    network = load_network(source, image_size)
    if not network.config.classes:
        raise WeightsError(
            f"{source} has no classifier, only features. Train a classifier: vitrail finetune DIR --from {source}"
        )
    return network


def output_names(network: ViT | ResNet, images: Listed, source: str | Path) -> list[str]:
    """Return the name of each output: from the weights, or else the classes of the images, in order.

    Raises DataError if the weights have no names and the numbers of outputs and classes differ.
    """
    if network.card.class_names:
        return list(network.card.class_names)
    classes, names = network.config.classes, list(images.class_names)
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
