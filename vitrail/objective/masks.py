"""Which patches are hidden, and how: they are drawn here, and hidden before or after the stem.

They are a function of (seed, step, example) only. An example is the index of an image in its source. So its mask does
not depend on the number of processes, its place in the batch, how the batch is cut, or a resume. Copies of an image in
one batch (repeated augmentation) share a mask.

Masking after the stem equals masking before it if no pixel reaches another patch's token. That holds for the linear
stems and the hMLP stem (follow-up, section 5). But in training their BatchNorm computes its statistics from all
patches, so masked patches are erased from the image first, unless the setting says otherwise. In the other stems 3x3
convolutions mix masked pixels into visible tokens, and erasing would create edges instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from vitrail.data.loading.order import stream
from vitrail.errors import UsageError
from vitrail.model.posemb import Grid
from vitrail.model.vit import ViT
from vitrail.objective.settings import BEiT, MaskedPatch

CORRUPT, VISIBLE, BLOCKS, CROP_MASKS = 24, 25, 26, 31
"""Purposes of the random streams used here (the others are in `vitrail.data.loading.order` and its users)."""
VALIDATION = -1
"""The step number for validation images, so that every evaluation has the same masks."""

SMALLEST_BLOCK, ASPECT = 4, 0.3
"""Smallest number of patches in a block, and smallest aspect ratio, of DINOv2's masks."""
ATTEMPTS = 10
"""Failed attempts to place a block before the rest is masked patch by patch."""


def hidden_count(patches: int, share: float) -> int:
    """Return the number of `patches` to hide: the share, rounded, but at least one hidden and one visible patch.

    Raises UsageError for an image of a single patch.
    """
    if patches < 2:
        raise UsageError(
            "an image of one patch leaves no visible patch to predict from: use a smaller patch or larger images"
        )
    return min(max(round(share * patches), 1), patches - 1)


def corruption(seed: int, step: int, index: Sequence[int], patches: int, config: MaskedPatch) -> np.ndarray:
    """Return int64 [batch, 2, corrupted]: the corrupted patches in raster order, and what replaces each.

    The second row is the patch's own number (unchanged), another patch's number, or `patches` for the [mask] embedding.
    The number of corrupted patches is the same for every image. The replacement of each is drawn independently.
    """
    count = hidden_count(patches, config.corrupt)

    def draw(rng: np.random.Generator) -> np.ndarray:
        places = np.sort(rng.permutation(patches)[:count])
        action = rng.random(count)
        others = (places + rng.integers(1, patches, count)) % patches
        shown = np.where(action < config.mask + config.other, others, places)
        return np.stack([places, np.where(action < config.mask, patches, shown)])

    return _each(draw, seed, step, index, CORRUPT)


def visible(seed: int, step: int, index: Sequence[int], patches: int, ratio: float) -> np.ndarray:
    """Return int64 [batch, visible]: the patches that are not masked, in raster order, drawn uniformly (MAE)."""
    kept = patches - hidden_count(patches, ratio)
    return _each(lambda rng: np.sort(rng.permutation(patches)[:kept]), seed, step, index, VISIBLE)


def blocks(seed: int, step: int, index: Sequence[int], grid: tuple[int, int], config: BEiT) -> np.ndarray:
    """Return bool [batch, rows * columns]: True where masked, in rectangles (BEiT, algorithm 1).

    The area of a rectangle is uniform between the smallest block and the number of patches left to mask, and the
    logarithm of its aspect ratio is uniform. A rectangle that would mask too many or no new patches is drawn again.
    After `ATTEMPTS` failures single patches are masked, so the number is the same for every image (in BEiT's code it
    may be smaller).
    """
    count = hidden_count(grid[0] * grid[1], config.ratio)
    return _each(lambda rng: _blocks(rng, grid, count, config.smallest_block, config.aspect), seed, step, index, BLOCKS)


def one_crop_masked(
    seed: int, step: int, index: Sequence[int], grid: tuple[int, int], shares: tuple[float, float]
) -> np.ndarray:
    """Return bool [batch, 2, rows * columns]: True where one of the two crops of an image is masked, in rectangles.

    DINOv2 masks half of all global crops, each with another share of its patches, evenly spaced between two `shares`.
    Here it is one of the two crops of each image, and its share is uniform between them, so that the masks of an image
    do not depend on the others in its batch.
    """
    patches = grid[0] * grid[1]

    def draw(rng: np.random.Generator) -> np.ndarray:
        masks, which = np.zeros((2, patches), dtype=bool), rng.integers(2)
        count = hidden_count(patches, rng.uniform(*shares))
        masks[which] = _blocks(rng, grid, count, SMALLEST_BLOCK, ASPECT)
        return masks

    return _each(draw, seed, step, index, CROP_MASKS)


def _blocks(rng: np.random.Generator, grid: tuple[int, int], count: int, smallest: int, narrowest: float) -> np.ndarray:
    mask = np.zeros(grid, dtype=bool)
    failed = 0
    while (left := count - int(mask.sum())) and failed < ATTEMPTS:
        area = rng.uniform(min(smallest, left), left)
        aspect = math.exp(rng.uniform(math.log(narrowest), -math.log(narrowest)))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        failed += 1
        if not (0 < height <= grid[0] and 0 < width <= grid[1]):
            continue
        top, start = rng.integers(grid[0] - height + 1), rng.integers(grid[1] - width + 1)
        block = mask[top : top + height, start : start + width]
        if 0 < int((~block).sum()) <= left:
            block[:] = True
            failed = 0
    flat = mask.ravel()
    missing = count - int(flat.sum())
    flat[rng.permutation(np.flatnonzero(~flat))[:missing]] = True
    return flat


def _each(
    draw: Callable[[np.random.Generator], np.ndarray], seed: int, step: int, index: Sequence[int], purpose: int
) -> np.ndarray:
    return np.stack([draw(stream(seed, step, int(example), purpose)) for example in index])


LOCAL = ("linear", "linear+norm", "linear+gelu", "linear+norm+gelu", "hmlp")
ERASED = 128
"""uint8 value of erased pixels; in normalised images they are 0."""


def require_maskable(model: nn.Module, kind: str, *, after_stem: bool) -> ViT:
    """Return `model` if its patches can be masked; otherwise raise UsageError with the reason."""
    if not isinstance(model, ViT):
        raise UsageError(
            f"objective {kind} masks patches, so it needs a Vision Transformer, not {type(model).__name__}"
        )
    if model.config.block == "axial":
        raise UsageError(f"objective {kind} cannot mask in axial blocks, which need every row and column whole")
    if model.config.stem not in LOCAL and not after_stem:
        raise UsageError(
            f"objective {kind} with stem {model.config.stem!r}: its convolutions carry the pixels of masked patches "
            "into the tokens of their neighbours, so masking before and after the stem are two different things. Use "
            "stem 'hmlp' or 'linear', where they are the same, or ask for masking after the stem with "
            "--mask-after-stem (objective.mask_after_stem: true); the follow-up found no gain in it (section 5)"
        )
    return model


def cut_patches(images: Tensor, patch: int) -> Tensor:
    """[batch, channels, height, width] -> [batch, patches, patch * patch * channels], ordered row, column, channel."""
    return rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch)


def join_patches(patches: Tensor, grid: Grid, patch: int) -> Tensor:
    """Undo `cut_patches`: return images [batch, channels, height, width]."""
    return rearrange(patches, "b (h w) (p q c) -> b c (h p) (w q)", h=grid[0], p=patch, q=patch)


def pixel_mask(patches: Tensor, images: Tensor, patch: int) -> Tensor:
    """bool [batch, patches] -> bool [batch, 1, height, width]: True at the pixels of these patches of `images`."""
    batch, _, height, width = images.shape
    grid = patches.view(batch, 1, height // patch, width // patch)
    return grid.repeat_interleave(patch, -2).repeat_interleave(patch, -1)


def erase(images: Tensor, masked: Tensor, patch: int) -> Tensor:
    """Return images [batch, channels, height, width] in which the patches `masked` [batch, patches] are grey."""
    return images.masked_fill(pixel_mask(masked, images, patch), ERASED if images.dtype == torch.uint8 else 0)


def hide_before_stem(model: ViT, images: Tensor, masked: Tensor, *, after_stem: bool) -> Tensor:
    """Return the stem's input for `images` in which the patches `masked` are hidden."""
    shares = any(isinstance(module, nn.BatchNorm2d) for module in model.stem.modules())
    return erase(images, masked, model.config.patch) if shares and not after_stem else images


def encode_normalised(model: ViT, tokens: Tensor, grid: Grid, keep: Tensor | None = None) -> Tensor:
    """Return the encoder's output for all tokens, normalised even if the config normalises only after pooling."""
    tokens = model.encode(tokens, grid, keep)
    return tokens if model.config.origin.final_norm == "tokens" else model.norm(tokens)


def patch_mask(places: Tensor, patches: int) -> Tensor:
    """Raster numbers [batch, n] -> bool [batch, patches]: True at these patches."""
    return torch.zeros(len(places), patches, dtype=torch.bool, device=places.device).scatter(1, places, True)


def tokens_at(tokens: Tensor, places: Tensor) -> Tensor:
    """[batch, patches, features] -> [batch, n, features]: the tokens at `places` [batch, n]."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))
