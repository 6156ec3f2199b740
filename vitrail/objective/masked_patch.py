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
from vitrail.objective.answers import judged
from vitrail.objective.base import Prepared
from vitrail.objective.colours import COLOURS, mean_colours, need_pixels, painted
from vitrail.objective.masks import check_share, corruption
from vitrail.objective.seen import Seen, SelfSupervised, hatched, to_pixels, where_hidden
from vitrail.objective.settings import MaskedPatch
from vitrail.objective.stems import at, encoded, flags, need_maskable

ACROSS = {"colour": 1, "small": 4}
"""Cells along a side of the patch, of each of which the colour is predicted."""


def predictions(config: MaskedPatch, patch: int) -> int:
    """Return how many values are predicted of a patch of patch x patch pixels."""
    across = ACROSS.get(config.target)
    return 3 * patch**2 if across is None else COLOURS * across**2


def pixel_targets(images: Tensor, patch: int) -> Tensor:
    """uint8 [batch, 3, height, width] -> float32 [batch, patches, patch * patch * 3] in -1..1: u / 127.5 - 1."""
    patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch)
    return patches.float() / 127.5 - 1


class MaskedPatchObjective(SelfSupervised):
    """See the module. The loss of an image is the mean over its corrupted patches, and over a patch's predictions.

    Metrics: "colour", the share of right colours. Raises UsageError for a network in which patches cannot be masked.
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
        if across is not None:  # refuses a patch that cannot be cut, before any training
            mean_colours(torch.zeros(1, 3, patch, patch, dtype=torch.uint8), patch, across)
        self.across = across
        self.mask = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.mask, std=0.02)
        self.predict = Linear(width, predictions(config, patch))
        nn.init.zeros_(self.predict.weight)
        nn.init.zeros_(self.predict.bias)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Draw what is corrupted: `targets` becomes int64 [batch, 2, corrupted] (`masks.corruption`)."""
        need_pixels(prepared.images, "what masked-patch predicts")
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
        losses, right = judged(rearrange(outputs, "b n (cells k) -> b n cells k", k=COLOURS), wanted)
        return losses.sum(), len(prepared), {"colour": right.sum()}

    def outputs(self, prepared: Prepared) -> Tensor:
        """Predictions at the corrupted places [batch, corrupted, outputs], in float32."""
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
    def show(self, prepared: Prepared) -> Seen:
        """See `vitrail.objective.seen`: hatched is what [mask] stands for; colours are drawn as they are quantised."""
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
            answer = to_pixels(rearrange(flat, "b (h w) (p q c) -> b c (h p) (w q)", h=grid[0], p=patch, q=patch))
            return Seen(images, masked, where_hidden(images, hidden, answer, patch), images)
        target = mean_colours(images, patch, self.across)
        guess = rearrange(outputs, "b n (cells k) -> b n cells k", k=COLOURS).argmax(-1)
        guesses = target.scatter(1, places[..., None].expand_as(guess), guess)
        answer, truth = (
            where_hidden(images, hidden, painted(colours, grid, patch), patch) for colours in (guesses, target)
        )
        return Seen(images, masked, answer, truth)
