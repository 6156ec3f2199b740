"""The network that verbs ask: whatever `vitrail.load` takes; for `evaluate` and `predict`, one that names classes."""

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

    What was assumed about a foreign file is logged. Raises WeightsError, and UsageError for an impossible size.
    """
    from vitrail.weights.load import load

    network: Any = load(source, image_size=image_size)
    report = network.load_report
    log.log(logging.INFO if report.assumptions else logging.DEBUG, "%s", report)
    return network


def load_classifier(source: str | Path, image_size: int | None = None) -> ViT | ResNet:
    """Return a network with a classifier, as `load_network` does. Raises WeightsError where it has none."""
    network = load_network(source, image_size)
    if not network.config.classes:
        raise WeightsError(
            f"{source} has no classifier, it gives features: vitrail finetune DIR --from {source} trains one"
        )
    return network


def output_names(network: ViT | ResNet, images: Listed, source: str | Path) -> list[str]:
    """Return the name of each output: the weights' own; where they name none, those of the images, in order.

    Raises DataError where the numbers of outputs and classes differ, so that this cannot be right.
    """
    if network.card.class_names:
        return list(network.card.class_names)
    classes, names = network.config.classes, list(images.class_names)
    if classes != len(names):
        raise DataError(
            f"{source} has {classes} outputs without names and the images have {len(names)} classes: nothing says "
            f"which is which. vitrail finetune DIR --from {source} trains a classifier for these images"
        )
    log.warning(
        "%s does not name its outputs: they are taken to be the images' classes in order, from %r to %r",
        source,
        names[0],
        names[-1],
    )
    return names
