"""One served network: its classes, its features, and where it looks.

Images are decoded and prepared exactly as in `vitrail predict`, and the same frozen network computes, so the numbers
are the same up to rounding. Attention is computed by the network itself in float32.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.costs.count import learned_values
from vitrail.data.images.ops import eval_transform, shown_transform
from vitrail.data.labels.masks import class_colours, mask_png
from vitrail.data.labels.sets import BETWEEN
from vitrail.device import Precision, choose_device
from vitrail.errors import DecodeError, UsageError, WeightsError, finite_rows
from vitrail.evaluation.classify import NOT_FINITE, Predict
from vitrail.evaluation.confidence import NONE, calibrated
from vitrail.evaluation.pixel_scores import pixel_classes
from vitrail.evaluation.ranked import ranked
from vitrail.exports.engine import Engine
from vitrail.exports.engines import engine_predictor
from vitrail.exports.kinds import EngineName
from vitrail.inspection.maps import head_maps, patch_attention
from vitrail.inspection.overlay import Box, visible_box
from vitrail.inspection.positions import PositionTiles, position_tiles
from vitrail.inspection.rollout import rollout
from vitrail.model.vit import ViT
from vitrail.server.limits import Refused, refuse_undecodable
from vitrail.server.responses import ModelDescription
from vitrail.tasks.catalog import task_of
from vitrail.tasks.prediction import Prediction
from vitrail.weights.store import checksum
from vitrail.words import as_text, shown, without_folders

T = TypeVar("T")
TOP = 1000
"""Maximum number of classes per image. They are ranked in the network's thread, a batch at a time, because tensor
operations would block the event loop."""
DIGITS = 6
"""Decimals of shares and similarities in responses."""
RESTART = "Clients rely on the classes: restart the server to serve it"


@dataclass(frozen=True)
class PreparedImage:
    """An image as the network sees it, and its place in the original picture."""

    pixels: np.ndarray
    """The network's input, [height, width, channels]."""
    seen: np.ndarray
    """The same as a picture, which differs if the input is a strip (`vitrail.strip`)."""
    shown: np.ndarray
    """What is shown of it, uint8 [height, width, 3]."""
    size: tuple[int, int]
    """Height and width of the upright picture."""
    box: Box
    """The part of it that the network sees."""

    def crop(self) -> str:
        """Return the pixels as a PNG in a data URI."""
        file = io.BytesIO()
        Image.fromarray(self.shown).save(file, "PNG", compress_level=1)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


class RankedClasses(NamedTuple):
    """The best classes of an image, best first."""

    classes: np.ndarray
    """int64 [k]."""
    shares: np.ndarray
    """float32 [k]: the probability of each."""
    predicted: np.ndarray | None
    """bool [k]: whether a class reaches its threshold; None for a network that predicts one class."""
    mask: str | None = None
    """For a network that predicts the class of each pixel: these as a PNG in a data URI; `shares` are of the pixels."""


@dataclass(frozen=True)
class AttentionQuery:
    """A layer, a head (None: the mean of all heads), and a patch (None: the classifier's input)."""

    layer: int = -1
    head: int | None = None
    patch: tuple[int, int] | None = None


class ServedModel:
    """A network, or an exported program, with its card, under a name. Call it from one thread at a time.

    reject: Smallest probability of the best class; an image with a lower one gets no class.
    """

    def __init__(
        self,
        name: str,
        network: Any,
        device: torch.device | str | None = None,
        precision: Precision = "auto",
        engine: EngineName = "auto",
        reject: float | None = None,
    ) -> None:
        self.name, self.network, self.card = name, network, network.card
        self.task = task_of(self.card)
        self.of_pixels = self.task.name == "segmentation"
        if isinstance(network, Engine):
            self._checksum: Future[str] | None = None
        else:  # a second for a gigabyte or two, while the engine is made and tried
            behind = ThreadPoolExecutor(1, "vitrail-checksum")
            tensors = {name: tensor.detach().cpu() for name, tensor in network.state_dict().items()}
            self._checksum = behind.submit(checksum, tensors)
            behind.shutdown(wait=False)
        report = getattr(network, "load_report", None)
        self.file: Path | None = network.path if isinstance(network, Engine) else report.path if report else None
        self.device = device if isinstance(device, torch.device) else choose_device(device)
        self.precision, self.engine, self.reject = precision, engine, reject
        self.transform, self.shown = (make(self.card.preprocess) for make in (eval_transform, shown_transform))
        config = self.card.config
        self.class_names = [as_text(text) for text in self.card.class_names] or list(map(str, range(config.classes)))
        outputs = engine_predictor(network, self.device, precision, engine=engine)
        self.predict: Predict = calibrated(outputs, self.card.temperature)

    @cached_property
    def weights_sha256(self) -> str:
        """SHA-256 of the network's tensors: that of its file, and of the programs exported from it."""
        return self.network.weights_sha256 if self._checksum is None else self._checksum.result()

    @cached_property
    def embed(self) -> Predict:
        """The network without its classifier. It is made at first use, because on a CPU it is another copy."""
        return engine_predictor(self.network, self.device, self.precision, engine=self.engine, features=True)

    @cached_property
    def positions(self) -> PositionTiles | str:
        """The similarity of positions, or why there is none."""
        if self.card.preprocess.resize == "native":
            return "Images of any shape have positions of their own, resampled for their rows and columns."
        try:
            return position_tiles(self.network)
        except UsageError as error:
            return str(error)

    def prepare(self, data: bytes, max_pixels: int) -> PreparedImage:
        """Decode and prepare the bytes of a file, on any thread. Raises Refused 415 or 422 with the reason."""
        try:
            image = self.transform.pixels.read(data, max_pixels)
        except DecodeError as error:
            raise refuse_undecodable(error) from error
        height, width = image.shape[:2]
        unused = np.random.default_rng(0)  # nothing is random in evaluation
        pixels = seen = self.shown(image, unused)
        if self.card.preprocess.resize == "native":
            pixels = self.transform(image, unused)
        shown = self.transform.pixels.shown(seen)
        return PreparedImage(pixels, seen, shown, (height, width), visible_box(self.shown, height, width))

    def rank(self, images: list[PreparedImage]) -> list[RankedClasses | Prediction | Exception]:
        """Return the best classes of each image, at most `TOP`; an exception if its logits are not finite.

        A network that predicts numbers, or gives several answers, has a `Prediction` for each image.
        """
        logits = self.predict(_stack(images)).float().cpu()
        found: Iterable[RankedClasses | Prediction]
        if self.of_pixels:
            found = map(self._masked, logits, images)
        elif self.task.probable:
            best = ranked(logits, TOP, self.card.thresholds)
            predicted: Any = [None] * len(images) if best.predicted is None else best.predicted
            found = map(RankedClasses, best.classes, best.probabilities, predicted)
        else:
            found = self.task.predictions(logits, self.card, TOP)
        return _if_finite(found, logits)

    def _masked(self, logits: Tensor, image: PreparedImage) -> RankedClasses:
        """Return the classes with the largest areas in an image, and its mask, from its logits."""
        mask = pixel_classes(logits, *image.size)
        shares = np.bincount(mask.reshape(-1), minlength=len(self.class_names)) / mask.size
        best = np.argsort(-shares, kind="stable")[:TOP]
        png = base64.b64encode(mask_png(mask, len(self.class_names))).decode("ascii")
        return RankedClasses(best, shares[best], None, f"data:image/png;base64,{png}")

    def features(self, images: list[PreparedImage]) -> list[np.ndarray | Exception]:
        """Return float32 features [width] of each image, as `vitrail embed` does."""
        rows = self.embed(_stack(images)).float().cpu()
        return _if_finite(rows.numpy(), rows)

    def values(self, found: RankedClasses | Prediction, most: int) -> dict[str, Any]:
        """Return what is predicted as the fields of a response, with the `most` best classes."""
        if isinstance(found, Prediction):
            return {"top": [], **found.values(most=most)}
        about = {"labels": self.labels(found), "rejected": self.rejected(found), "mask": found.mask}
        return {"top": self.top(found, most), **about}

    def counted(self, found: RankedClasses | Prediction) -> Iterator[tuple[str, float, list[str]]]:
        """Yield the best class, its probability and the predicted classes, as metrics count them: of each answer."""
        if not isinstance(found, Prediction):
            best, share = self.class_names[found.classes[0]], float(found.shares[0])
            labels = self.labels(found)
            classes = [best] if labels is None else [one["class"] for one in labels]
            yield best, share, [] if self.rejected(found) else classes
            return
        for name, one in (found.answers or {}).items():
            if one.numbers is None:
                classes = one.classes[:1] if one.labels is None else [label for label, _ in one.labels] or [NONE]
                before = f"{name}{BETWEEN}"
                yield before + one.classes[0], one.probabilities[0], [before + label for label in classes]

    def top(self, ranked: RankedClasses, count: int) -> list[dict[str, Any]]:
        """Return the `count` best classes, at most `TOP`, with their probabilities, best first.

        Classes of pixels have the colour that they have in the mask, too.
        """
        pairs = zip(ranked.classes[:count].tolist(), ranked.shares[:count].tolist(), strict=True)
        found: list[dict[str, Any]] = [
            {"class": self.class_names[number], "probability": share} for number, share in pairs
        ]
        if ranked.mask:
            colours = class_colours(len(self.class_names))
            for one, number in zip(found, ranked.classes, strict=False):
                one["colour"] = f"#{bytes(colours[number]).hex()}"
        return found

    def labels(self, ranked: RankedClasses) -> list[dict[str, Any]] | None:
        """Return the predicted labels with their probabilities, best first; None if the network predicts one class."""
        if ranked.predicted is None:
            return None
        chosen = RankedClasses(ranked.classes[ranked.predicted], ranked.shares[ranked.predicted], None)
        return self.top(chosen, len(chosen.classes))

    def rejected(self, ranked: RankedClasses) -> bool | None:
        """Return whether the best class is less probable than is asked for; None if nothing is asked for."""
        return None if self.reject is None else bool(ranked.shares[0] < self.reject)

    def look(self, wanted: list[tuple[PreparedImage, AttentionQuery]]) -> list[dict[str, Any] | Exception]:
        """Return where the network looks in each image, as JSON values; UsageError if there is no such layer."""
        return [self._look(image, what) for image, what in wanted]

    def _look(self, image: PreparedImage, what: AttentionQuery) -> dict[str, Any] | Exception:
        if isinstance(self.network, Engine):
            return UsageError(f"{self.name} is an exported program, which shows no attention. Serve the model itself")
        images = torch.from_numpy(image.seen[None]).permute(0, 3, 1, 2).to(next(self.network.parameters()).device)
        try:
            joint = rollout(self.network, images)[0]
            if what.patch is None:
                maps = head_maps(self.network, images, what.layer, what.head)
            else:
                maps = patch_attention(self.network, images, what.patch, what.layer, what.head)
        except UsageError as error:
            return error
        except WeightsError as error:
            return Refused(500, NOT_FINITE, str(error))
        box = image.box
        return {
            "grid": list(joint.shape),
            "rollout": _rounded(joint),
            "layer": what.layer % self.card.config.depth,
            "head": what.head,
            "patch": None if what.patch is None else list(what.patch),
            # the mean over heads, as one map
            "attention": _rounded(torch.stack([one.shares[0].mean(dim=0) for one in maps]).mean(dim=0)),
            **self._position_similarity(what.patch),
            "crop": image.crop(),
            "picture": list(image.size),
            "seen": {"top": box.top, "left": box.left, "height": box.height, "width": box.width},
        }

    def _position_similarity(self, patch: tuple[int, int] | None) -> dict[str, Any]:
        """Return the similarity of all positions to that of a patch, as JSON values."""
        if patch is None or isinstance(self.positions, str):
            return {"positions": None, "positions_about": None if patch is None else self.positions}
        tiles = self.positions
        return {"positions": _rounded(tiles.values[patch]), "positions_about": f"{tiles.quantity} ({tiles.about})"}

    @cached_property
    def description(self) -> ModelDescription:
        """The model card without folders, and which layers, heads and patches there are."""
        config = self.card.config
        card = {name: value for name, value in self.card.to_dict().items() if name not in ("class_names", "reference")}
        vit = isinstance(self.network, ViT)
        return ModelDescription(
            name=self.name,
            weights_sha256=self.weights_sha256,
            class_names=self.class_names,
            several_labels=self.card.several,
            reject=self.reject,
            parameters=learned_values(config),
            image_size=list(self.card.preprocess.image_size),
            attention=vit,
            layers=config.depth if vit else 0,
            heads=config.heads if vit else 0,
            grid=list(config.grid) if vit else [],
            card=without_folders(card),
        )

    def check_there(self) -> None:
        """Raise WeightsError if the file of this network is gone: another model of its run does not replace it."""
        if self.file is not None and not self.file.exists():
            raise WeightsError(
                f"{self.name}: {self.file}, which is in service, is gone. Restore it, or restart the server to serve "
                "another model"
            )

    def check_replaces(self, old: ServedModel) -> None:
        """Raise WeightsError if clients of `old` would get other classes, or several labels in place of one."""
        new, was = ((one.task.predicts, [answer.task for answer in one.card.answers]) for one in (self, old))
        if new != was:
            kinds = [f"{what} {', '.join(of_answers)}".rstrip() for what, of_answers in (new, was)]
            raise WeightsError(
                f"{self.name}: the new model predicts {kinds[0]}, and the old one predicts {kinds[1]}. {RESTART}"
            )
        if self.class_names != old.class_names:
            pairs = enumerate(zip(self.class_names, old.class_names, strict=False))
            differ = [f"class {i} is {shown(new)}, not {shown(was)}" for i, (new, was) in pairs if new != was]
            differ.append(f"it has {len(self.class_names)} classes, not {len(old.class_names)}")
            raise WeightsError(f"{self.name}: the new model has other classes: {differ[0]}. {RESTART}")

    def warm(self) -> None:
        """Process one image, so that the first client does not wait for the set-up."""
        height, width = self.card.preprocess.size
        pixels = self.transform.pixels
        grey = np.full((height, width, pixels.channels), 127, pixels.dtype)
        image = PreparedImage(grey, grey, pixels.shown(grey), (height, width), Box(0, 0, height, width))
        answer = self.rank([image])[0]
        if isinstance(answer, Exception):
            raise answer
        _ = self.weights_sha256, self.description  # every response names the weights


def _stack(images: list[PreparedImage]) -> Tensor:
    return torch.from_numpy(np.stack([image.pixels for image in images])).permute(0, 3, 1, 2)


def _if_finite(values: Iterable[T], rows: Tensor) -> list[T | Exception]:
    """Return each image's value, or a refusal if its row [images, n] of the network's output is not finite."""
    refused = Refused(500, NOT_FINITE, "the network's output for this image contains NaN or infinity")
    finite = finite_rows(rows).tolist()
    return [value if fine else refused for value, fine in zip(values, finite, strict=True)]


def _rounded(values: Tensor | np.ndarray) -> list[list[float]]:
    array = values.cpu().numpy() if isinstance(values, Tensor) else values
    return [[round(float(value), DIGITS) for value in row] for row in array]
