"""One network as the server answers for it: classes, features, and where it looks.

An image is decoded and prepared exactly as in `vitrail predict`, and the same frozen network answers, so the
numbers are the same to rounding. What looks inside is the network itself in float32.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.images.decode import decode
from vitrail.data.images.ops import eval_transform
from vitrail.errors import DecodeError, UsageError
from vitrail.evaluation.classify import Precision, Predict, predictor
from vitrail.evaluation.predict import as_text
from vitrail.inspection.maps import HeadMaps, head_maps
from vitrail.inspection.overlay import Box, seen
from vitrail.inspection.positions import PositionTiles, position_tiles
from vitrail.inspection.query import patch_attention
from vitrail.inspection.rollout import rollout
from vitrail.model.vit import ViT
from vitrail.server.limits import Refused, undecodable

TOP = 1000
"""Classes that can be asked for, at most. They are ranked where the network computes, a batch at a time: the event
loop would have to wait for the interpreter at each tensor operation of its own."""
DIGITS = 6
"""Decimals of shares and similarities in answers."""


@dataclass(frozen=True)
class Prepared:
    """An image as the network takes it, and where that is in the picture that was sent."""

    pixels: np.ndarray
    """uint8 [height, width, 3]."""
    size: tuple[int, int]
    """Height and width of the picture, upright."""
    box: Box
    """The part of it that the network sees."""

    def crop(self) -> str:
        """Return the pixels as a PNG in a data address."""
        file = io.BytesIO()
        Image.fromarray(self.pixels).save(file, "PNG", compress_level=1)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


class Ranked(NamedTuple):
    """The best classes of an image, best first."""

    classes: np.ndarray
    """int64 [k]."""
    shares: np.ndarray
    """float32 [k]: the probability of each."""


@dataclass(frozen=True)
class Look:
    """What to look at: a layer and head (None: all heads, averaged), and a patch, or None for what is read."""

    layer: int = -1
    head: int | None = None
    patch: tuple[int, int] | None = None


class Served:
    """A network with its card, under a name. Computes on whichever thread calls it; call from one at a time."""

    def __init__(
        self, name: str, network: Any, device: torch.device | str | None = None, precision: Precision = "auto"
    ) -> None:
        self.name, self.network, self.card = name, network, network.card
        self.device, self.precision = device, precision
        self.transform = eval_transform(self.card.preprocess)
        config = self.card.config
        self.class_names = [as_text(text) for text in self.card.class_names] or list(map(str, range(config.classes)))
        self.predict: Predict = predictor(network, device, precision)

    @cached_property
    def embed(self) -> Predict:
        """The network up to its classifier, made when it is first asked for: on a CPU it is a copy of its own."""
        return predictor(self.network, self.device, self.precision, features=True)

    @cached_property
    def positions(self) -> PositionTiles | str:
        """Similarity of positions, or why there is none."""
        try:
            return position_tiles(self.network)
        except UsageError as error:
            return str(error)

    def prepare(self, data: bytes, max_pixels: int) -> Prepared:
        """Decode and prepare the bytes of a file; on any thread. Raises Refused 415 or 422 with the reason."""
        try:
            image = decode(data, max_pixels=max_pixels)
        except DecodeError as error:
            raise undecodable(error) from error
        height, width = image.shape[:2]
        pixels = self.transform(image, np.random.default_rng(0))  # nothing is random in evaluation
        return Prepared(pixels, (height, width), seen(self.transform, height, width))

    def rank(self, images: list[Prepared]) -> list[Ranked | Exception]:
        """Return the best classes of each image, `TOP` at most; an exception where its logits are not finite."""
        logits = self.predict(_stack(images)).float().cpu()
        shares, classes = logits.softmax(dim=1).topk(min(TOP, logits.shape[1]))
        ranked = map(Ranked, classes.numpy(), shares.numpy())
        return [one if fine else _not_finite() for one, fine in zip(ranked, _finite(logits), strict=True)]

    def features(self, images: list[Prepared]) -> list[np.ndarray | Exception]:
        """Return float32 features [width] of each image, as `vitrail embed` does."""
        rows = self.embed(_stack(images)).float().cpu()
        return [row if fine else _not_finite() for row, fine in zip(rows.numpy(), _finite(rows), strict=True)]

    def top(self, ranked: Ranked, count: int) -> list[dict[str, Any]]:
        """Return the `count` best classes, at most `TOP`, with their probabilities, best first."""
        pairs = zip(ranked.classes[:count].tolist(), ranked.shares[:count].tolist(), strict=True)
        return [{"class": self.class_names[number], "probability": share} for number, share in pairs]

    def look(self, wanted: list[tuple[Prepared, Look]]) -> list[dict[str, Any] | Exception]:
        """Return for each image where the network looks, as JSON values; UsageError for what is not there."""
        return [self._look(image, what) for image, what in wanted]

    def _look(self, image: Prepared, what: Look) -> dict[str, Any] | Exception:
        place = next(self.network.parameters()).device
        images = _stack([image]).to(place)
        try:
            joint = rollout(self.network, images)[0]
            if what.patch is None:
                maps = head_maps(self.network, images, what.layer, what.head)
            else:
                maps = patch_attention(self.network, images, what.patch, what.layer, what.head)
        except UsageError as error:
            return error
        box = image.box
        return {
            "grid": list(joint.shape),
            "rollout": _rounded(joint),
            "layer": what.layer % self.card.config.depth,
            "head": what.head,
            "patch": None if what.patch is None else list(what.patch),
            "attention": _rounded(_mean(maps)),
            **self._alike(what.patch),
            "crop": image.crop(),
            "picture": list(image.size),
            "seen": {"top": box.top, "left": box.left, "height": box.height, "width": box.width},
        }

    def _alike(self, patch: tuple[int, int] | None) -> dict[str, Any]:
        """How alike the positions are to that of a patch."""
        if patch is None:
            return {"positions": None, "positions_about": None}
        if isinstance(self.positions, str):
            return {"positions": None, "positions_about": self.positions}
        tiles = self.positions
        return {"positions": _rounded(tiles.values[patch]), "positions_about": f"{tiles.quantity} ({tiles.about})"}

    def describe(self) -> dict[str, Any]:
        """Return the model card and what can be asked for, as JSON values."""
        card, config = self.card.to_dict(), self.card.config
        vit = isinstance(self.network, ViT)
        return {
            "name": self.name,
            "class_names": self.class_names,
            "parameters": sum(parameter.numel() for parameter in self.network.parameters()),
            "image_size": list(self.card.preprocess.image_size),
            "attention": vit,
            "layers": config.depth if vit else 0,
            "heads": config.heads if vit else 0,
            "grid": list(config.grid) if vit else [],
            "card": {key: value for key, value in card.items() if key not in ("class_names", "reference")},
        }

    def warm(self) -> None:
        """Answer once, so that the first client does not wait for what is set up on the way."""
        height, width = self.card.preprocess.image_size
        grey = Prepared(np.full((height, width, 3), 127, np.uint8), (height, width), Box(0, 0, height, width))
        answer = self.rank([grey])[0]
        if isinstance(answer, Exception):
            raise answer


def _stack(images: list[Prepared]) -> Tensor:
    return torch.from_numpy(np.stack([image.pixels for image in images])).permute(0, 3, 1, 2)


def _finite(rows: Tensor) -> list[bool]:
    finite: list[bool] = rows.isfinite().all(dim=1).tolist()
    return finite


def _not_finite() -> Refused:
    return Refused(500, "not-finite", "the network's answer to this image is not finite")


def _mean(maps: list[HeadMaps]) -> Tensor:
    """The attentions of a layer and its heads as one map [rows, columns]."""
    return torch.stack([one.shares[0].mean(dim=0) for one in maps]).mean(dim=0)


def _rounded(values: Tensor | np.ndarray) -> list[list[float]]:
    array = values.cpu().numpy() if isinstance(values, Tensor) else values
    return [[round(float(value), DIGITS) for value in row] for row in array]
