"""One served network: its classes, its features, and where it looks.

Images are decoded and prepared exactly as in `vitrail predict`, and the same frozen network computes, so the numbers
are the same up to rounding. Attention is computed by the network itself in float32.
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
from vitrail.inspection.maps import HeadMaps, head_maps, patch_attention
from vitrail.inspection.overlay import Box, visible_box
from vitrail.inspection.positions import PositionTiles, position_tiles
from vitrail.inspection.rollout import rollout
from vitrail.model.vit import ViT
from vitrail.server.limits import Refused, undecodable

TOP = 1000
"""Maximum number of classes per image. They are ranked in the network's thread, a batch at a time, because tensor
operations would block the event loop."""
DIGITS = 6
"""Decimals of shares and similarities in responses."""


@dataclass(frozen=True)
class PreparedImage:
    """An image as the network sees it, and its place in the original picture."""

    pixels: np.ndarray
    """uint8 [height, width, 3]."""
    size: tuple[int, int]
    """Height and width of the upright picture."""
    box: Box
    """The part of it that the network sees."""

    def crop(self) -> str:
        """Return the pixels as a PNG in a data URI."""
        file = io.BytesIO()
        Image.fromarray(self.pixels).save(file, "PNG", compress_level=1)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


class RankedClasses(NamedTuple):
    """The best classes of an image, best first."""

    classes: np.ndarray
    """int64 [k]."""
    shares: np.ndarray
    """float32 [k]: the probability of each."""


@dataclass(frozen=True)
class AttentionQuery:
    """A layer, a head (None: the mean of all heads), and a patch (None: the classifier's input)."""

    layer: int = -1
    head: int | None = None
    patch: tuple[int, int] | None = None


class ServedModel:
    """A network with its card, under a name. Call it from one thread at a time."""

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
        """The network without its classifier. It is made at first use, because on a CPU it is another copy."""
        return predictor(self.network, self.device, self.precision, features=True)

    @cached_property
    def positions(self) -> PositionTiles | str:
        """The similarity of positions, or why there is none."""
        try:
            return position_tiles(self.network)
        except UsageError as error:
            return str(error)

    def prepare(self, data: bytes, max_pixels: int) -> PreparedImage:
        """Decode and prepare the bytes of a file, on any thread. Raises Refused 415 or 422 with the reason."""
        try:
            image = decode(data, max_pixels=max_pixels)
        except DecodeError as error:
            raise undecodable(error) from error
        height, width = image.shape[:2]
        pixels = self.transform(image, np.random.default_rng(0))  # nothing is random in evaluation
        return PreparedImage(pixels, (height, width), visible_box(self.transform, height, width))

    def rank(self, images: list[PreparedImage]) -> list[RankedClasses | Exception]:
        """Return the best classes of each image, at most `TOP`; an exception if its logits are not finite."""
        logits = self.predict(_stack(images)).float().cpu()
        shares, classes = logits.softmax(dim=1).topk(min(TOP, logits.shape[1]))
        ranked = map(RankedClasses, classes.numpy(), shares.numpy())
        return [one if fine else _not_finite() for one, fine in zip(ranked, _finite(logits), strict=True)]

    def features(self, images: list[PreparedImage]) -> list[np.ndarray | Exception]:
        """Return float32 features [width] of each image, as `vitrail embed` does."""
        rows = self.embed(_stack(images)).float().cpu()
        return [row if fine else _not_finite() for row, fine in zip(rows.numpy(), _finite(rows), strict=True)]

    def top(self, ranked: RankedClasses, count: int) -> list[dict[str, Any]]:
        """Return the `count` best classes, at most `TOP`, with their probabilities, best first."""
        pairs = zip(ranked.classes[:count].tolist(), ranked.shares[:count].tolist(), strict=True)
        return [{"class": self.class_names[number], "probability": share} for number, share in pairs]

    def look(self, wanted: list[tuple[PreparedImage, AttentionQuery]]) -> list[dict[str, Any] | Exception]:
        """Return where the network looks in each image, as JSON values; UsageError if there is no such layer."""
        return [self._look(image, what) for image, what in wanted]

    def _look(self, image: PreparedImage, what: AttentionQuery) -> dict[str, Any] | Exception:
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
            **self._position_similarity(what.patch),
            "crop": image.crop(),
            "picture": list(image.size),
            "seen": {"top": box.top, "left": box.left, "height": box.height, "width": box.width},
        }

    def _position_similarity(self, patch: tuple[int, int] | None) -> dict[str, Any]:
        """Return the similarity of all positions to that of a patch, as JSON values."""
        if patch is None:
            return {"positions": None, "positions_about": None}
        if isinstance(self.positions, str):
            return {"positions": None, "positions_about": self.positions}
        tiles = self.positions
        return {"positions": _rounded(tiles.values[patch]), "positions_about": f"{tiles.quantity} ({tiles.about})"}

    def describe(self) -> dict[str, Any]:
        """Return the model card, and which layers, heads and patches there are, as JSON values."""
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
        """Process one image, so that the first client does not wait for the set-up."""
        height, width = self.card.preprocess.image_size
        grey = PreparedImage(np.full((height, width, 3), 127, np.uint8), (height, width), Box(0, 0, height, width))
        answer = self.rank([grey])[0]
        if isinstance(answer, Exception):
            raise answer


def _stack(images: list[PreparedImage]) -> Tensor:
    return torch.from_numpy(np.stack([image.pixels for image in images])).permute(0, 3, 1, 2)


def _finite(rows: Tensor) -> list[bool]:
    finite: list[bool] = rows.isfinite().all(dim=1).tolist()
    return finite


def _not_finite() -> Refused:
    return Refused(500, "not-finite", "the network's output for this image contains NaN or infinity")


def _mean(maps: list[HeadMaps]) -> Tensor:
    """Return the mean attention over heads as one map [rows, columns]."""
    return torch.stack([one.shares[0].mean(dim=0) for one in maps]).mean(dim=0)


def _rounded(values: Tensor | np.ndarray) -> list[list[float]]:
    array = values.cpu().numpy() if isinstance(values, Tensor) else values
    return [[round(float(value), DIGITS) for value in row] for row in array]
