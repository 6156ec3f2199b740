"""A tokenizer of images: one of `codes` visual tokens for each patch, learned on the user's own images.

A discrete variational autoencoder, as BEiT takes from DALL-E (Ramesh et al. 2021, section 2.1): convolutions down
to the grid of patches give a distribution over codes; a sample of it, made differentiable by the Gumbel softmax
whose temperature falls during training, is looked up in a codebook; convolutions up from there paint the image.
The tokens of an image are the most probable codes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.errors import UsageError, WeightsError
from vitrail.model.stem import hmlp_stages
from vitrail.objective.base import Prepared
from vitrail.objective.colours import need_pixels
from vitrail.objective.config import Tokenizer
from vitrail.objective.seen import Seen, SelfSupervised, to_pixels

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

    The convolutions shrink and grow by the prime factors of the patch, 4 first where it has one, so any patch goes.
    """

    def __init__(self, config: Tokenizer, patch: int) -> None:
        super().__init__()
        if config.codes < 2 or min(config.temperature) <= 0 or config.anneal < 1:
            raise UsageError(
                f"objective.codes is {config.codes}, objective.temperature {config.temperature}, objective.anneal "
                f"{config.anneal}: at least 2 codes, temperatures above 0 and at least 1 step are needed"
            )
        self.config = config
        self.patch = patch
        stages, width = hmlp_stages(patch), config.width
        down: list[nn.Module] = []
        for stage, factor in enumerate(stages):
            down += [nn.Conv2d(3 if stage == 0 else width, width, factor, factor), nn.ReLU()]
        residuals = [_Residual(width) for _ in range(config.depth)]
        self.encoder = nn.Sequential(*down, *residuals, nn.ReLU(), nn.Conv2d(width, config.codes, 1))
        self.codebook = nn.Embedding(config.codes, width)
        up: list[nn.Module] = []
        for factor in reversed(stages):
            up += [nn.ReLU(), nn.ConvTranspose2d(width, width, factor, factor)]
        residuals = [_Residual(width) for _ in range(config.depth)]
        self.decoder = nn.Sequential(*residuals, *up, nn.ReLU(), nn.Conv2d(width, 3, 1))

    def logits(self, images: Tensor) -> Tensor:
        """Unnormalised log-probabilities of the codes, [batch, codes, rows, columns]."""
        if images.shape[-2] % self.patch or images.shape[-1] % self.patch:
            raise UsageError(
                f"this tokenizer gives each patch of {self.patch} pixels a token: images of {images.shape[-2]} x "
                f"{images.shape[-1]} pixels are not whole patches"
            )
        return self.encoder(scaled(images))

    @torch.no_grad()
    def codes(self, images: Tensor) -> Tensor:
        """The tokens of images, int64 [batch, patches]."""
        return self.logits(images).argmax(1).flatten(1)

    @torch.no_grad()
    def pictures(self, codes: Tensor, grid: tuple[int, int]) -> Tensor:
        """uint8 images [batch, 3, height, width] of tokens [batch, patches]."""
        maps = rearrange(self.codebook(codes), "b (h w) d -> b d h w", h=grid[0])
        return unscaled(self.decoder(maps))

    def save(self, folder: Path) -> None:
        """Write `tokenizer.safetensors` into `folder`, replacing what is there at once."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        partial = folder / f".{FILE}"
        header = {"tokenizer": json.dumps({"patch": self.patch, **asdict(self.config)})}
        save_file(tensors, partial, metadata=header)
        partial.replace(folder / FILE)


def scaled(images: Tensor) -> Tensor:
    """uint8 0..255 -> float32 -1..1."""
    need_pixels(images, "a visual token")
    return images.float() / 127.5 - 1


def unscaled(values: Tensor) -> Tensor:
    """float -1..1 -> uint8 0..255."""
    return to_pixels((values + 1) * 127.5)


def load_tokenizer(source: str | Path) -> ImageTokenizer:
    """Return the tokenizer in a file, a model folder or a run folder, in evaluation mode and frozen.

    Raises UsageError where none is named, WeightsError where there is none or it cannot be read.
    """
    if not str(source):
        raise UsageError(
            "objective beit needs a tokenizer: train one on these images first (vitrail train DIR --recipe tokenizer), "
            "and give its run folder as objective.tokenizer"
        )
    file = next(_candidates(Path(source)), None)
    if file is None:
        raise WeightsError(f"there is no tokenizer at {source}: give a run folder or a {FILE}")
    try:
        with safe_open(file, framework="pt") as opened:
            values = json.loads((opened.metadata() or {})["tokenizer"])
            patch = values.pop("patch")
            config = Tokenizer(**{**values, "temperature": tuple(values["temperature"])})
            tokenizer = ImageTokenizer(config, patch)
            tokenizer.load_state_dict({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{file} is no tokenizer of vitrail's: {error}") from error
    return tokenizer.eval().requires_grad_(False)


def _candidates(source: Path) -> Iterator[Path]:
    if source.is_file():
        yield source
    for place in _PLACES:
        if (file := source / place / FILE).is_file():
            yield file


class TokenizerObjective(SelfSupervised):
    """Train a tokenizer. Its loss is the mean squared error of pixels in -1..1, and `kl` times the divergence.

    The Gumbel noise is drawn like dropout, from torch's generator, which training seeds by (seed, step, rank).
    In evaluation there is none: the most probable code is taken, and the loss is the squared error alone.
    """

    model: ImageTokenizer

    def __init__(self, model: ImageTokenizer) -> None:
        super().__init__(model)
        self.config = model.config

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """`targets` becomes the temperature of this step, float32 [batch]."""
        value = temperature(self.config, step)
        return replace(prepared, targets=torch.full((len(prepared),), value, device=prepared.images.device))

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        pixels = scaled(prepared.images)
        logits = self.model.logits(prepared.images).float()
        if not self.training:
            chosen = F.one_hot(logits.argmax(1), self.config.codes).movedim(-1, 1).float()
            painted = self._painted(chosen)
            return (painted - pixels).square().mean((1, 2, 3)).sum(), len(prepared), {}
        share = F.gumbel_softmax(logits, tau=float(prepared.targets[0]), dim=1)
        error = (self._painted(share) - pixels).square().mean((1, 2, 3))
        log = logits.log_softmax(1)
        divergence = (log.exp() * (log + torch.tensor(self.config.codes).log())).sum(1).mean((1, 2))
        return (error + self.config.kl * divergence).sum(), len(prepared), {}

    @torch.no_grad()
    def show(self, prepared: Prepared) -> Seen:
        """See `vitrail.objective.seen`: nothing is hidden; the mask shows the tokens as shades, one for each code."""
        images = prepared.images
        codes = self.model.logits(images).argmax(1)
        shades = (codes * 255 // max(self.config.codes - 1, 1)).to(torch.uint8)[:, None].expand(-1, 3, -1, -1)
        shades = shades.repeat_interleave(self.model.patch, -2).repeat_interleave(self.model.patch, -1)
        pictures = self.model.pictures(codes.flatten(1), (codes.shape[1], codes.shape[2]))
        return Seen(images, shades, pictures, images, ("input", "tokens", "prediction", "target"))

    def _painted(self, share: Tensor) -> Tensor:
        """Shares of the codes [batch, codes, rows, columns] -> pixels in -1..1."""
        return self.model.decoder(torch.einsum("bkhw,kd->bdhw", share, self.model.codebook.weight)).float()


def temperature(config: Tokenizer, step: int) -> float:
    """The temperature at a step: from the first to the last by equal factors, then the last."""
    first, last = config.temperature
    return first * (last / first) ** min(max(step, 0) / config.anneal, 1.0)
