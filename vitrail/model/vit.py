"""The Vision Transformer, Eq. 1-4 of "An Image is Worth 16x16 Words". Read this first.

z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos         (1)  embed
z'_l = MSA(LN(z_{l-1})) + z_{l-1}                       (2)  block.Block, attention branch
z_l  = MLP(LN(z'_l)) + z'_l                             (3)  block.Block, MLP branch
y    = LN(z_L^0)                                        (4)  encode, summary
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.block import build_blocks
from vitrail.model.compute import HAS_FAST
from vitrail.model.head import PreLogits, build_heads, build_pool
from vitrail.model.init import init_weights
from vitrail.model.layers import created_on, dense, new_norm
from vitrail.model.native import Grids, grids_of
from vitrail.model.own_part import is_own_part
from vitrail.model.posemb import Grid, Queried, build_positions
from vitrail.model.segmentation import PixelHead
from vitrail.model.stem import Normalise, build_stem, check_images, refuse_script
from vitrail.model.variants import ViTConfig
from vitrail.ranges import Layers, selected

if HAS_FAST:
    from vitrail.model.fast import first_tokens as fast


class ViT(nn.Module):
    """images [batch, channels, height, width], or strips of patches (`config.native`) -> logits [batch, classes].

    With `config.segmentation` the logits are maps [batch, classes, rows, columns], which the caller enlarges to pixels.

    The model normalises uint8 images by the config's mean and std. Float images must be normalised already; their
    values are not checked. For float pixels in [0, 1] call `model(model.normalise(255 * images))`, for float pixels in
    0..255 `model(model.normalise(images))`. Height and width may be any multiples of the patch: positions are resampled
    when another size needs it. Raises UsageError for images of another shape or type.

    device: Where the parameters are created (default: torch's default device).
    """

    card: Any = None
    """Where the weights come from (`vitrail.weights.card.Card`). The code that loads the weights sets it."""
    load_report: Any = None
    """What loading did with each tensor (`vitrail.weights.assemble.LoadReport`). None if nothing was loaded."""

    __prepare_scriptable__ = refuse_script

    def __init__(self, config: ViTConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        with created_on(device):
            self._build(config)

    def _build(self, config: ViTConfig) -> None:
        self.stem = build_stem(config)
        self.cls = nn.Parameter(torch.empty(1, 1, config.width)) if config.has_class_token else None
        self.dist = nn.Parameter(torch.empty(1, 1, config.width)) if config.origin.distilled else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        self.positions = build_positions(config)
        self.dropout = nn.Dropout(config.dropout)
        norm = partial(new_norm, config.origin, config.width)
        self.patch_norm = norm() if config.origin.patch_norm else nn.Identity()
        self.pre_norm = norm() if config.origin.pre_norm else nn.Identity()
        self.blocks = build_blocks(config, self.positions)
        self.norm = nn.Identity() if config.origin.final_norm == "none" else norm()
        self.pool = build_pool(config)
        self.pre_logits = PreLogits(config.pooled, config.pre_logits) if config.pre_logits else nn.Identity()
        self.head, self.head_dist = build_heads(config)
        self.normalise = Normalise(config.mean, config.std)
        init_weights(self, config.init)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute each block again in the backward pass instead of storing its activations, or store them again."""
        for block in self.blocks:
            block.recompute = enable  # type: ignore[assignment]

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        if isinstance(self.head, PixelHead):
            logits: Tensor = self.head(self, images)
            return logits
        return self.classify(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Return the classifier's input [batch, pre_logits or config.pooled]; two tokens are concatenated."""
        num_queries = fast.num_queries(self) if HAS_FAST else None
        grid = self.grids(images)
        tokens = self.encode(self.embed(images), grid, num_queries=num_queries)
        return self.summary(tokens, grid if isinstance(grid, Grids) else None)

    def embed(self, images: Tensor) -> Tensor:
        """Eq. 1: images -> tokens [batch, prefix + grid, width].

        The prefix holds the class token, the distillation token and the registers that the config has, in this order.
        The grid is in raster order.
        """
        return self.place(self.patches(images), self.grids(images))

    def patches(self, images: Tensor) -> Tensor:
        """E x_p of Eq. 1: images -> patch embeddings [batch, grid, width] without positions, in raster order.

        With `config.patch_norm` they are normalised.
        """
        self.grid(images)  # raises UsageError for images that do not fit
        if images.dtype == torch.uint8 and not getattr(self.stem, "folds_normalisation", False):
            images = self.normalise(images).to(self.like.dtype)
        maps = self.stem(images)
        if is_own_part(self.stem) and (shape := (self.config.width, *self.grid(images))) != tuple(maps.shape[1:]):
            raise UsageError(
                f"the stem returned maps {tuple(maps.shape[1:])}; it must return [width, H/patch, W/patch], {shape}"
            )
        tokens = rearrange(maps, "b d h w -> b (h w) d")
        return self.patch_norm(tokens[:, 1:] if self.are_strips(images) else tokens)  # the first is the head's

    def place(self, patches: Tensor, grid: Grid | Grids) -> Tensor:
        """The rest of Eq. 1: patch embeddings [batch, grid, width] -> tokens. Adds the prefix in front, and E_pos.

        With `config.pre_norm` the LayerNorm before the first block follows.
        """
        prefix = (self.cls, self.dist, self.registers)
        front = [token.expand(patches.shape[0], -1, -1) for token in prefix if token is not None]
        tokens = torch.cat([*front, patches], dim=1) if front else patches
        positions = self.positions.added(None, grid)
        return self.pre_norm(self.dropout(self._plus(tokens, positions)))

    def encode(
        self,
        tokens: Tensor,
        grid: Grid | Grids | None = None,
        keep: Tensor | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """Eq. 2, 3 for every layer, then the LayerNorm of Eq. 4 if `config.final_norm` is "tokens".

        tokens [batch, prefix + grid, width] -> [batch, prefix + kept, width].

        `grid` is (rows, columns), or those of each strip; by default the config's. `keep` [batch, kept] are the raster
        indices of the grid tokens to process (masked pre-training); by default all. With `num_queries`, only the first
        `num_queries` tokens are returned, and the last layer computes no others.
        """
        grid = grid or self.config.grid
        count = grid.tokens if isinstance(grid, Grids) else grid[0] * grid[1]
        places = torch.arange(count, device=tokens.device)
        if keep is not None:
            tokens, places = _take(tokens, keep, self.config.prefix), keep
        for layer in range(len(self.blocks)):
            tokens = self._layer(layer, tokens, places, grid, keep, num_queries)
        return self._normed(tokens)

    def _layer(
        self,
        layer: int,
        tokens: Tensor,
        places: Tensor,
        grid: Grid | Grids | Queried,
        keep: Tensor | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """Eq. 2, 3 for one layer."""
        positions = self.positions.added(layer, grid.grid if isinstance(grid, Queried) else grid)
        if positions is not None and isinstance(grid, Queried):
            positions = F.pad(positions, (0, 0, 0, grid.queries))
        if positions is not None and keep is not None:
            positions = _take(positions, keep, self.config.prefix)
        tokens = self._plus(tokens, positions)
        needed = self.positions.needs_grid or self.config.block == "axial" or isinstance(grid, Grids | Queried)
        where = (places, grid) if needed else ()
        last = dict(num_queries=num_queries) if num_queries is not None and layer == len(self.blocks) - 1 else {}
        return self.blocks[layer](tokens, *where, **last)

    def _plus(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return tokens + positions. Positions of the user's own may be float32 where the weights are bfloat16."""
        if positions is None:
            return tokens
        if positions.dtype != tokens.dtype == self.like.dtype:  # else autocast decides
            positions = positions.to(tokens.dtype)
        return tokens + positions

    def _normed(self, tokens: Tensor) -> Tensor:
        return self.norm(tokens) if self.config.origin.final_norm == "tokens" else tokens

    @property
    def like(self) -> Tensor:
        """A parameter, with the device and the type of the others."""
        return next(self.parameters())

    @property
    def layers(self) -> int:
        """Number of layers that `intermediate` can return."""
        return len(self.blocks)

    @overload
    def intermediate(
        self, images: Tensor, layers: Layers = 1, *, norm: bool = False, reshape: bool = True
    ) -> list[Tensor]: ...

    @overload
    def intermediate(
        self, images: Tensor, layers: Layers = 1, *, norm: bool = False, reshape: bool = True, prefix: Literal[True]
    ) -> list[tuple[Tensor, Tensor]]: ...

    def intermediate(
        self, images: Tensor, layers: Layers = 1, *, norm: bool = False, reshape: bool = True, prefix: bool = False
    ) -> list[Tensor] | list[tuple[Tensor, Tensor]]:
        """Return the grid's tokens after chosen layers, [batch, width, rows, columns] each, with gradients.

        `model.intermediate(images, norm=True)[0]` are the patch features of the last layer. `layers` is the number of
        last layers, or a list of layer numbers, where negative ones count from the end; None means all. The result has
        the order of the network. With `norm` each layer's tokens go through the final LayerNorm, unless it is for
        pooled features only. Without `reshape` the tokens are [batch, rows * columns, width], in raster order. With
        `prefix` each item is a pair, of these and of the tokens in front [batch, prefix, width], which may be none.

        Raises UsageError for a layer that does not exist, for images that do not fit, and for strips.
        """
        if self.are_strips(images):
            raise UsageError(
                "images of any shape have tokens on grids of different shapes, which fit into no common array: give "
                "pictures, one or several of the same shape, in place of strips"
            )
        grid, wanted = self.grid(images), selected(layers, self.layers, "layer")
        places = torch.arange(grid[0] * grid[1], device=images.device)
        tokens, outputs = self.embed(images), []
        for layer in range(max(wanted) + 1):
            tokens = self._layer(layer, tokens, places, grid)
            if layer in wanted:
                outputs.append(self._normed(tokens) if norm else tokens)
        front = self.config.prefix
        pairs = [(_on_grid(each[:, front:], grid) if reshape else each[:, front:], each[:, :front]) for each in outputs]
        return pairs if prefix else [tokens for tokens, _ in pairs]

    def summary(self, tokens: Tensor, grids: Grids | None = None) -> Tensor:
        """Encoded tokens [batch, prefix + kept, width] -> features: pool, LayerNorm if it is there, pre-logits.

        `grids` are those of strips.
        """
        pooled = self.pool(tokens, self.config.prefix, *([] if grids is None else [grids]))
        if self.config.origin.final_norm == "pooled":
            pooled = self.norm(pooled.unflatten(-1, (-1, self.config.width))).flatten(-2)
        return self.pre_logits(pooled)

    def classify(self, features: Tensor) -> Tensor:
        """Features -> logits [batch, classes]. Without a classifier, return the features.

        Raises UsageError for a network that tells the class of each pixel: an image has none.
        """
        if self.config.segmentation:
            raise UsageError(
                "this network tells the class of each pixel (segmentation), and this needs a network that tells the "
                "class of an image"
            )
        if self.head is None:
            return features
        if self.head_dist is None:
            return dense(self.head, features)
        cls, dist = features.chunk(2, dim=-1)
        return (dense(self.head, cls) + dense(self.head_dist, dist)) / 2

    def grid(self, images: Tensor) -> Grid:
        """Return the rows and columns of tokens for these images. Raises UsageError for images that do not fit."""
        check_images(images, self.config.channels)
        height, width = images.shape[-2:]
        patch = self.config.patch
        if height % patch or width % patch:
            raise UsageError(
                f"images of {height} x {width} pixels do not fit this model: it needs sides divisible by {patch}"
            )
        return height // patch, width // patch

    def grids(self, images: Tensor) -> Grid | Grids:
        """Return `grid`, or that of each image if these are strips (`vitrail.strip`)."""
        grid, patch = self.grid(images), self.config.patch
        if not self.are_strips(images):
            return grid
        head = images[:, :, :patch]
        head = head.float() if head.dtype == torch.uint8 else self.normalise.undo(head)
        return grids_of(head[:, 0].flatten(1) - 127, grid[0] - 1)

    def are_strips(self, images: Tensor) -> bool:
        """Return whether images are strips: one patch wide, and one longer than the most patches."""
        rows, columns = self.config.grid
        strip = ((1 + rows * columns) * self.config.patch, self.config.patch)
        return self.config.native and tuple(images.shape[-2:]) == strip

    def no_weight_decay(self) -> set[str]:
        """Return the names of tokens and positions: timm's optimisers do not decay them, nor vectors."""
        names = (name for name, _ in self.named_parameters())
        return {name for name in names if name.startswith(("cls", "dist", "registers", "positions."))}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names, from the image to the head, for timm's layer-wise learning rates.

        They are timm's own for its Vision Transformer: the stem, tokens and positions; each block, where the last one
        includes the final norm; the head. `coarse` makes no difference.
        """
        norm = [(r"^norm\.", (99999,))] if self.config.origin.final_norm == "tokens" else []
        stem = r"^(?:stem|cls|dist|registers|positions|patch_norm|pre_norm)\b"
        return dict(stem=stem, blocks=[(r"^blocks\.(\d+)\.", None), *norm])

    def reset_head(self, classes: int) -> None:
        """Replace the whole head by a linear layer that starts at zero (fine-tuning, section 3.2).

        With 0 classes there is no head. A distilled model has two such layers, as in DeiT's code.
        """
        kind = self.config.segmentation if classes else ""
        self.config = replace(self.config, classes=classes, pre_logits=None, segmentation=kind)
        self.pre_logits = nn.Identity()
        self.head, self.head_dist = build_heads(self.config, self.like)


def _on_grid(tokens: Tensor, grid: Grid) -> Tensor:
    """[batch, rows * columns, width] -> [batch, width, rows, columns]"""
    return rearrange(tokens, "b (h w) d -> b d h w", h=grid[0]).contiguous()


def _take(tokens: Tensor, keep: Tensor, prefix: int) -> Tensor:
    """Return the prefix and the grid tokens at `keep` [batch, kept]."""
    tokens = tokens.expand(len(keep), -1, -1)
    grid = tokens[:, prefix:].gather(1, keep[:, :, None].expand(-1, -1, tokens.shape[2]))
    return torch.cat([tokens[:, :prefix], grid], dim=1)
