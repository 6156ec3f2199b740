"""Masked patch prediction, the paper's own self-supervision (section 4.6, appendix B.1.2).

Half of the patch embeddings are corrupted, after the stem and before the positions: 80 % of them become a learned
[mask] embedding, 10 % the embedding of another patch, 10 % stay. At every corrupted position the network predicts
its patch: the mean colour (1), a 4x4 version of it (2), or all pixels (3).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.layers import Linear
from vitrail.model.vit import ViT
from vitrail.objective.base import Prepared
from vitrail.objective.colours import COLOURS, mean_colours, need_pixels, painted
from vitrail.objective.masks import check_share, corruption
from vitrail.objective.self_supervised import (
    SelfSupervised,
    classification_losses,
    hatched,
    to_pixels,
    where_hidden,
)
from vitrail.objective.settings import MaskedPatch
from vitrail.objective.stems import at, encoded, flags, need_maskable

ACROSS = {"colour": 1, "small": 4}
"""Target -> number of cells along a side of the patch. The colour of each cell is predicted."""


def predictions(config: MaskedPatch, patch: int) -> int:
    """Return the number of outputs for a patch of patch x patch pixels."""
    across = ACROSS.get(config.target)
    return 3 * patch**2 if across is None else COLOURS * across**2


def pixel_targets(images: Tensor, patch: int) -> Tensor:
    """uint8 [batch, 3, height, width] -> float32 [batch, patches, patch * patch * 3] in -1..1: u / 127.5 - 1."""
    patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch)
    return patches.float() / 127.5 - 1


class MaskedPatchObjective(SelfSupervised):
    """See the module. The loss of an image is the mean over its corrupted patches, and over a patch's predictions.

    Metrics: "colour", the share of correctly predicted colours. Raises UsageError for a network in which patches
    cannot be masked.
    """

    model: ViT

    def __init__(self, model: nn.Module, config: MaskedPatch, seed: int) -> None:
        model = need_maskable(model, config.kind, after_stem=config.mask_after_stem)
        super().__init__(model)
        check_share("corrupt", config.corrupt)
        if min(config.mask, config.other) < 0 or config.mask + config.other > 1 + 1e-9:
            raise UsageError(
                f"objective.mask is {config.mask} and objective.other {config.other}: they are shares of the corrupted "
                "patches, at least 0 and together at most 1"
            )
        self.config = config
        self.seed = seed
        patch, width = model.config.patch, model.config.width
        across = ACROSS.get(config.target)
        if across is not None:  # raises before any training if the patch cannot be cut
            mean_colours(torch.zeros(1, 3, patch, patch, dtype=torch.uint8), patch, across)
        self.across = across
        self.mask = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.mask, std=0.02)
        self.predict = Linear(width, predictions(config, patch))
        nn.init.zeros_(self.predict.weight)
        nn.init.zeros_(self.predict.bias)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Draw the corrupted patches: `targets` becomes int64 [batch, 2, corrupted] (`masks.corruption`)."""
        need_pixels(prepared.images, "the target of masked-patch")
        rows, columns = self.model.grid(prepared.images)
        drawn = corruption(self.seed, step, prepared.index.tolist(), rows * columns, self.config)
        return replace(prepared, targets=torch.from_numpy(drawn).to(prepared.images.device))

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        places, patch = prepared.targets[:, 0], self.model.config.patch
        outputs = self.outputs(prepared)
        if self.across is None:
            wanted = at(pixel_targets(prepared.images, patch), places)
            return (outputs - wanted).square().mean((1, 2)).sum(), len(prepared), {}
        wanted = at(mean_colours(prepared.images, patch, self.across), places)
        logits = rearrange(outputs, "b n (cells k) -> b n cells k", k=COLOURS)
        losses, correct = classification_losses(logits, wanted)
        return losses.sum(), len(prepared), {"colour": correct.sum()}

    def outputs(self, prepared: Prepared) -> Tensor:
        """Return the predictions for the corrupted patches, float32 [batch, corrupted, outputs]."""
        places, shown = prepared.targets.unbind(1)
        grid = self.model.grid(prepared.images)
        patches = self.model.patches(prepared.images)
        batch, count, width = patches.shape
        own = torch.arange(count, device=places.device).expand(batch, -1)
        pool = torch.cat([patches, self.mask.to(patches.dtype).expand(batch, 1, width)], dim=1)
        tokens = self.model.place(at(pool, own.scatter(1, places, shown)), grid)
        found = encoded(self.model, tokens, grid)[:, self.model.config.prefix :]
        return self.predict(at(found, places)).float()

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `SelfSupervised`. A hatch marks [mask] embeddings; colours are drawn in their quantised values."""
        images, patch = prepared.images, self.model.config.patch
        grid = self.model.grid(images)
        places, shown = prepared.targets.unbind(1)
        count = grid[0] * grid[1]
        hidden, outputs = flags(places, count), self.outputs(prepared)
        own = torch.arange(count, device=places.device).expand(len(images), -1).scatter(1, places, shown)
        pixels = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch)
        moved = at(pixels, own.clamp(max=count - 1))
        moved = rearrange(moved, "b (h w) (p q c) -> b c (h p) (w q)", h=grid[0], p=patch, q=patch)
        masked = hatched(moved, own == count, patch)
        if self.across is None:
            flat = torch.zeros(len(images), count, outputs.shape[-1], device=outputs.device)
            flat = flat.scatter(1, places[..., None].expand_as(outputs), (outputs + 1) * 127.5)
            predicted = to_pixels(rearrange(flat, "b (h w) (p q c) -> b c (h p) (w q)", h=grid[0], p=patch, q=patch))
            target = images
        else:
            colours = mean_colours(images, patch, self.across)
            guess = rearrange(outputs, "b n (cells k) -> b n cells k", k=COLOURS).argmax(-1)
            guesses = colours.scatter(1, places[..., None].expand_as(guess), guess)
            predicted = painted(guesses, grid, patch)
            target = where_hidden(images, hidden, painted(colours, grid, patch), patch)
        prediction = where_hidden(images, hidden, predicted, patch)
        return {"input": images, "mask": masked, "prediction": prediction, "target": target}
