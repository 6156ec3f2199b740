"""Masked patch prediction, the paper's own self-supervision (section 4.6, appendix B.1.2).

Half of the patch embeddings are corrupted, after the stem and before the positions: 80 % of them become a learned
[mask] embedding, 10 % the embedding of another patch, 10 % stay. At every corrupted position the network predicts
its patch: the mean colour (1), a 4x4 version of it (2), or all pixels (3). Only (3) is defined for other bands than
RGB with 8 bits: their normalised values.

Colours have 3 bits per channel. The paper does not define the quantisation. Here the mean m of a channel over the
pixels, 0 to 255, becomes the level floor(m / 32), 0 to 7, and the colour is 64 red + 8 green + blue, 0 to 511. It is
computed in integers from uint8 pixels before normalisation, so it is the same on every device. A level represents the
middle of its 32 values: 16, 48, ..., 240.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.layers import dense, zero_linear
from vitrail.objective.base import Prepared
from vitrail.objective.masks import corruption, cut_patches, join_patches, patch_mask, tokens_at
from vitrail.objective.self_supervised import (
    MaskedObjective,
    classification_losses,
    hatch_patches,
    require_pixels,
    to_pixels,
)
from vitrail.objective.settings import MaskedPatch

ACROSS = {"colour": 1, "small": 4}
"""Target -> number of cells along a side of the patch. The colour of each cell is predicted."""


class MaskedPatchObjective(MaskedObjective):
    """See the module. The loss of an image is the mean over its corrupted patches, and over a patch's predictions.

    Metrics: "colour", the share of correctly predicted colours. Raises UsageError for a network in which patches
    cannot be masked.
    """

    def __init__(self, model: nn.Module, config: MaskedPatch, seed: int) -> None:
        super().__init__(model, config, seed)
        self.config = config
        if config.mask + config.other > 1 + 1e-9:
            raise UsageError(
                f"objective.mask is {config.mask} and objective.other {config.other}: they are shares of the corrupted "
                "patches, at least 0 and together at most 1"
            )
        patch, self.across = self.model.config.patch, ACROSS.get(config.target)
        if self.across is not None:  # raises before any training if the patch cannot be cut
            mean_colours(torch.zeros(1, 3, patch, patch, dtype=torch.uint8), patch, self.across)
        self.mask = nn.Parameter(torch.empty(self.model.config.width))
        nn.init.normal_(self.mask, std=0.02)
        values = self.model.config.channels * patch**2 if self.across is None else COLOURS * self.across**2
        self.predict = zero_linear(self.model.config.width, values)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Draw the corrupted patches: `targets` becomes int64 [batch, 2, corrupted] (`masks.corruption`)."""
        if self.across is not None:
            require_pixels(prepared.images, "the target of masked-patch")
        rows, columns = self.model.grid(prepared.images)
        drawn = corruption(self.seed, step, prepared.index.tolist(), rows * columns, self.config)
        return replace(prepared, targets=torch.from_numpy(drawn))

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        places, patch = prepared.targets[:, 0], self.model.config.patch
        outputs = self.outputs(prepared)
        if self.across is None:
            images = prepared.images  # float32 bands are predicted as they are
            wanted = cut_patches(images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images, patch)
            wanted = tokens_at(wanted, places)
            return (outputs - wanted).square().mean((1, 2)).sum(), len(prepared), {}
        wanted = tokens_at(mean_colours(prepared.images, patch, self.across), places)
        logits = rearrange(outputs, "b n (cells k) -> b n cells k", k=COLOURS)
        losses, correct = classification_losses(logits, wanted)
        return losses.sum(), len(prepared), {"colour": correct.sum()}

    def outputs(self, prepared: Prepared) -> Tensor:
        """Return the predictions for the corrupted patches, float32 [batch, corrupted, outputs]."""
        patches = self.model.patches(prepared.images)
        batch, count, width = patches.shape
        pool = torch.cat([patches, self.mask.to(patches.dtype).expand(batch, 1, width)], dim=1)
        patches = tokens_at(pool, _sources(prepared, count))
        return dense(self.predict, self.encode_at(prepared.targets[:, 0], patches, prepared.images)).float()

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `SelfSupervised`. A hatch marks [mask] embeddings; colours are drawn in their quantised values."""
        images, patch = prepared.images, self.model.config.patch
        grid = self.model.grid(images)
        places, count = prepared.targets[:, 0], grid[0] * grid[1]
        outputs, sources = self.outputs(prepared), _sources(prepared, count)
        patches, target = cut_patches(images, patch), self.as_pictures(images)
        moved = self.as_pictures(join_patches(tokens_at(patches, sources.clamp(max=count - 1)), grid, patch))
        if self.across is None:
            guess = to_pixels((outputs + 1) * 127.5) if images.dtype == torch.uint8 else outputs
            guessed = patches.scatter(1, places[..., None].expand_as(guess), guess)
            prediction = self.as_pictures(join_patches(guessed, grid, patch))
        else:
            colours = mean_colours(images, patch, self.across)
            guess = rearrange(outputs, "b n (cells k) -> b n cells k", k=COLOURS).argmax(-1)
            prediction = paint_colours(colours.scatter(1, places[..., None].expand_as(guess), guess), grid, patch)
            target = paint_colours(colours, grid, patch)
        shown, mask = self.as_pictures(images), hatch_patches(moved, sources == count, patch)
        return self.pictures(shown, patch_mask(places, count), prediction, target, mask)


def _sources(prepared: Prepared, count: int) -> Tensor:
    """Return which patch's embedding is at each place, int64 [batch, count]; `count` for the [mask] embedding."""
    places, shown = prepared.targets.unbind(1)
    return torch.arange(count, device=places.device).expand(len(places), -1).scatter(1, places, shown)


LEVELS = 8
COLOURS = LEVELS**3
STEP = 256 // LEVELS


def mean_colours(images: Tensor, patch: int, across: int = 1) -> Tensor:
    """Return the colours, int64 [batch, patches, across^2], of each patch cut into across x across cells.

    images: uint8 [batch, 3, height, width]; patches and cells are in raster order. `across` 4 is the paper's "4x4
    downsized version". Raises UsageError if the cells are not whole pixels.
    """
    require_pixels(images, "a mean colour")
    if patch % across:
        raise UsageError(
            f"a patch of {patch} pixels cannot be cut into {across} x {across} cells: use a patch divisible by "
            f"{across}, or objective.target colour"
        )
    side = patch // across
    cells = rearrange(images, "b c (h y p) (w x q) -> b (h w) (y x) c (p q)", y=across, x=across, p=side, q=side)
    red, green, blue = (cells.sum(-1, dtype=torch.int64) // (STEP * side * side)).unbind(-1)
    return (red * LEVELS + green) * LEVELS + blue


def colours_to_pixels(colours: Tensor) -> Tensor:
    """Return red, green and blue, uint8 [..., 3], of colours [...]: the middle of each level."""
    levels = torch.stack([colours // LEVELS**2, colours // LEVELS % LEVELS, colours % LEVELS], dim=-1)
    return (levels * STEP + STEP // 2).to(torch.uint8)


def paint_colours(colours: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Return uint8 images [batch, 3, height, width] with the colours [batch, patches, cells]."""
    across = round(colours.shape[-1] ** 0.5)
    values = colours_to_pixels(colours)
    small = rearrange(values, "b (h w) (y x) c -> b c (h y) (w x)", h=grid[0], y=across)
    return small.repeat_interleave(patch // across, -2).repeat_interleave(patch // across, -1)
