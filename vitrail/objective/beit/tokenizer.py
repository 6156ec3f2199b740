"""A tokenizer of images: it gives each patch one of `codes` visual tokens. It is trained on the user's own images.

An encoder of convolutions computes a vector for each patch. The nearest code of a codebook replaces it (van den Oord et
al. 2017, as in BEiT v2). A decoder of convolutions predicts the image from the codes. The encoder gets the gradients of
the codes (straight-through). BEiT takes its tokenizer from DALL-E, which samples codes by a Gumbel
softmax; trained for minutes instead of weeks, that leaves most codes unused and little to predict.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail import world
from vitrail.config import merge
from vitrail.errors import UsageError, WeightsError
from vitrail.files import parse_json, replacing
from vitrail.model.stem import hmlp_stages
from vitrail.objective.base import Prepared
from vitrail.objective.beit.codebook import Codebook
from vitrail.objective.colours import need_pixels
from vitrail.objective.self_supervised import SelfSupervised, to_pixels
from vitrail.objective.settings import Tokenizer
from vitrail.ranges import LARGEST_SIDE
from vitrail.words import shown

FILE = "tokenizer.safetensors"
_PLACES = ("", "best", "last", "model/best", "model/last")


class _Residual(nn.Module):
    """Two 3x3 convolutions around a ReLU, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, maps: Tensor) -> Tensor:
        return maps + self.layers(maps)


class ImageTokenizer(nn.Module):
    """uint8 images [batch, 3, height, width] <-> codes, int64 [batch, patches], in raster order.

    The strides of the convolutions are the prime factors of the patch size, or 4 first if it divides the patch size.
    """

    def __init__(self, config: Tokenizer, patch: int) -> None:
        super().__init__()
        self.config = config
        self.patch = patch
        stages, width = hmlp_stages(patch), config.width
        layers: list[nn.Module] = []
        for stage, factor in enumerate(stages):
            layers += [nn.Conv2d(3 if stage == 0 else width, width, factor, factor), nn.ReLU()]
        layers += [_Residual(width) for _ in range(config.depth)]
        self.encoder = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(width, config.features, 1))
        self.codebook = Codebook(config.codes, config.features, config.decay)
        upwards = [nn.ConvTranspose2d(width, width, factor, factor) for factor in reversed(stages)]
        residuals = [_Residual(width) for _ in range(config.depth)]
        last = nn.Conv2d(width, 3, 1)  # the order of creation decides the initial values
        layers = [nn.Conv2d(config.features, width, 1), *residuals]
        for layer in (*upwards, last):
            layers += [nn.ReLU(), layer]
        self.decoder = nn.Sequential(*layers)

    def find(self, images: Tensor) -> Tensor:
        """Return the encoder's vectors [batch, rows, columns, features], each of mean 0 and variance 1."""
        if images.shape[-2] % self.patch or images.shape[-1] % self.patch:
            raise UsageError(
                f"this tokenizer gives each patch of {self.patch} pixels a token: images of {images.shape[-2]} x "
                f"{images.shape[-1]} pixels are not whole patches"
            )
        found = self.encoder(scaled(images)).movedim(1, -1)
        return F.layer_norm(found, found.shape[-1:])  # otherwise one feature, brightness, dominates all others

    @torch.no_grad()
    def codes(self, images: Tensor) -> Tensor:
        """Return the tokens of images, int64 [batch, patches]."""
        return self.codebook.nearest(self.find(images)).flatten(1)

    @torch.no_grad()
    def pictures(self, codes: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return uint8 images [batch, 3, height, width] for tokens [batch, patches]."""
        return unscaled(self.paint(self.codebook.vectors[codes.unflatten(1, grid)]))

    def paint(self, vectors: Tensor) -> Tensor:
        """Return pixels in -1..1 [batch, 3, height, width] for vectors [batch, rows, columns, features]."""
        return self.decoder(vectors.movedim(-1, 1)).float()

    def save(self, folder: Path) -> None:
        """Write `tokenizer.safetensors` into `folder`, and replace an older file atomically."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        header = {"tokenizer": json.dumps({"patch": self.patch, **asdict(self.config)})}
        with replacing(folder / FILE) as temporary:
            save_file(tensors, temporary, metadata=header)


def scaled(images: Tensor) -> Tensor:
    """uint8 0..255 -> float32 -1..1."""
    need_pixels(images, "a visual token")
    return images.float() / 127.5 - 1


def unscaled(values: Tensor) -> Tensor:
    """float -1..1 -> uint8 0..255."""
    return to_pixels((values + 1) * 127.5)


def load_tokenizer(source: str | Path) -> ImageTokenizer:
    """Return the tokenizer in a file, a model folder or a run folder, in evaluation mode and frozen.

    Raises UsageError if `source` is empty, WeightsError if there is no tokenizer or it cannot be read.
    """
    if not str(source):
        raise UsageError(
            "objective beit needs a tokenizer: train one on these images first (vitrail train DIR --recipe tokenizer), "
            "then set objective.tokenizer to its run folder"
        )
    places = (Path(source), *(Path(source) / place / FILE for place in _PLACES))
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise WeightsError(f"there is no tokenizer at {source}: give a run folder or a {FILE}")
    try:
        with safe_open(file, framework="pt") as opened:
            config, patch = _config((opened.metadata() or {})["tokenizer"])
            with torch.device("meta"):
                needed = {name: tuple(like.shape) for name, like in ImageTokenizer(config, patch).state_dict().items()}
            found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            if wrong := sorted(name for name in needed | found if needed.get(name) != found.get(name)):
                shape, valid = found.get(wrong[0]), needed.get(wrong[0])
                raise ValueError(f"{shown(wrong[0])} has the shape {shape}; its settings require {valid}")
            tokenizer = ImageTokenizer(config, patch)
            tokenizer.load_state_dict({name: opened.get_tensor(name) for name in needed})
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError, UsageError) as error:
        raise WeightsError(f"{file} is not a tokenizer of vitrail: {error}") from error
    return tokenizer.eval().requires_grad_(False)


def _config(text: str) -> tuple[Tokenizer, int]:
    """Return the settings in a file's header, and the patch. Raises ValueError or UsageError for invalid ones."""
    values = parse_json(text)
    patch = values.pop("patch", None) if isinstance(values, dict) else None
    if not isinstance(patch, int) or not 1 <= patch <= LARGEST_SIDE:
        raise ValueError(f"patch is {shown(patch)}; valid: 1 to {LARGEST_SIDE:,}")
    return merge(Tokenizer(), values), patch


class TokenizerObjective(SelfSupervised):
    """Train a tokenizer. The loss is the mean squared error of pixels in -1..1 plus `commitment` times that of codes.

    In evaluation the loss is the error of the pixels alone. Metrics: "use", the evenness of the codes' use
    (`Codebook.use`).
    """

    model: ImageTokenizer

    def __init__(self, model: ImageTokenizer) -> None:
        super().__init__(model)
        self.config = model.config
        self._tally: Tensor | None = None
        """Sums over the micro-batches of this step so far (`Codebook.tally`)."""

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Start, or restart, a step; nothing is random here."""
        self._tally = None
        return prepared

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        book, found = self.model.codebook, self.model.find(prepared.images).float()
        codes = book.nearest(found)
        chosen = book.vectors[codes]
        painted = self.model.paint(found + (chosen - found).detach())
        losses = (painted - scaled(prepared.images)).square().mean((1, 2, 3))
        if self.training:
            losses = losses + self.config.commitment * (found - chosen).square().mean((1, 2, 3))
            tally = book.tally(found, codes)
            self._tally = tally if self._tally is None else self._tally + tally
        return losses.sum(), len(prepared), {"use": book.use * len(prepared)}

    @torch.no_grad()
    def after_step(self) -> None:
        """Move each code towards the mean of the vectors that it replaced."""
        if self._tally is not None:
            self.model.codebook.move(world.sum_(self._tally))
            self._tally = None

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `SelfSupervised`. No patch is hidden; in place of the mask each token is drawn as a shade of grey."""
        images = prepared.images
        codes = self.model.codebook.nearest(self.model.find(images))
        shades = (codes * 255 // (self.config.codes - 1)).to(torch.uint8)[:, None].expand(-1, 3, -1, -1)
        shades = shades.repeat_interleave(self.model.patch, -2).repeat_interleave(self.model.patch, -1)
        pictures = unscaled(self.model.paint(self.model.codebook.vectors[codes]))
        return {"input": images, "tokens": shades, "prediction": pictures, "target": images}
