"""A network on the test sets of ImageNet: the order of its outputs, and the preprocessing of the images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vitrail.data.benchmarks.imagenet import ImageNetProtocol
from vitrail.data.benchmarks.imagenet_labels import wnids
from vitrail.data.images.geometry import Compose, CropBorder, Op
from vitrail.data.images.ops import SeveralInputs, Stacked, eval_transform
from vitrail.data.settings import Preprocess
from vitrail.device import to_device
from vitrail.errors import DataError
from vitrail.evaluation.classify import Predict


@dataclass(frozen=True)
class Order:
    """The order of ImageNet's classes among the outputs of a network."""

    outputs: np.ndarray
    """int64 [1000]: the output of each class, in the order of the classes' numbers."""
    assumed: str
    """The assumption behind the order, "" if the names of the outputs determine it."""


def output_order(class_names: Sequence[str], outputs: int) -> Order:
    """Find ImageNet's classes among the outputs of a network.

    Names that are or begin with WordNet ids, and the numbers 0 to 999, identify each class. With other names (tench,
    goldfish, ...) or without names, the outputs are assumed to be in the order of the classes' numbers, as in every
    published network. Raises DataError if the network does not have 1,000 outputs.
    """
    if outputs != 1000:
        raise DataError(
            f"this network has {outputs:,} classes, but the protocol needs the 1,000 classes of ImageNet. Load a "
            "network that was trained or fine-tuned on ImageNet (ILSVRC2012)"
        )
    for keys, known in (
        ([(re.match(r"n\d{8}(?!\d)", name) or [""])[0] for name in class_names], wnids()),
        (list(class_names), tuple(map(str, range(1000)))),
    ):
        position = {name: output for output, name in enumerate(keys)}
        if position.keys() == set(known):
            return Order(np.array([position[name] for name in known]), "")
    if not class_names:
        named = "the network does not name its outputs"
    else:
        named = f"the network names its outputs {class_names[0]!r} to {class_names[-1]!r}, not by WordNet id"
    order = f"in ImageNet's order, from {wnids()[0]} to {wnids()[-1]}"
    return Order(np.arange(1000), f"{named}: they are taken to be {order}")


def choosing(predict: Predict, outputs: np.ndarray) -> Predict:
    """Return images -> logits [batch, len(outputs)] of only these outputs, in this order.

    The softmax then runs over these classes only, as the authors of ImageNet-A and ImageNet-R evaluate.
    """
    chosen = torch.from_numpy(outputs)

    def answer(images: Tensor) -> Tensor:
        logits = predict(images)
        if outputs.max() >= logits.shape[1]:
            raise DataError(
                f"the network gave {logits.shape[1]} outputs, but the protocol needs output {outputs.max()}"
            )
        return logits[:, to_device(chosen, logits.device)]

    return answer


def view(protocol: ImageNetProtocol, preprocess: Preprocess) -> Op:
    """Return the transform of an image: the network's own preprocessing, except where the protocol prescribes another.

    ObjectNet: the border is cut off, the aspect ratio kept, and 480/512 of the shorter side are seen; at an image
    size of 480 that is the paper's resize to 512 and crop of 480.
    """
    if isinstance(preprocess, SeveralInputs):
        return Stacked(tuple(view(protocol, one) for one in preprocess.each))
    if protocol.crop is not None:
        preprocess = replace(preprocess, resize="small", crop=protocol.crop)
    shown = eval_transform(preprocess)
    return Compose((CropBorder(protocol.border), shown)) if protocol.border else shown
