"""Masked autoencoder (He et al. 2022): the encoder sees a quarter of the patches, a light decoder predicts the others.

Masked patches never enter the encoder's layers, so the encoder costs little more than a quarter of its full cost. The
target is the normalised patch, by default with its own mean and standard deviation removed. The loss is the mean
squared error over masked patches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError, WeightsError
from vitrail.model.block import build_blocks
from vitrail.model.init import init_weights
from vitrail.model.layers import LayerNorm, dense, new_linear
from vitrail.model.posemb import Grid, Positions, sincos_table
from vitrail.model.variants import Origin, ViTConfig
from vitrail.objective.base import Prepared
from vitrail.objective.masks import (
    cut_patches,
    encode_normalised,
    hide_before_stem,
    join_patches,
    patch_mask,
    tokens_at,
    visible,
)
from vitrail.objective.self_supervised import MaskedObjective, to_pixels
from vitrail.objective.settings import MAE

EPSILON = 1e-6
"""Added to a patch's variance before the root, as in MAE's code."""


# Names of a published decoder -> ours. The first of each line are MAE's own; transformers has several.
_ENDS = {"decoder_embed": "embed", "decoder_norm": "norm", "decoder_pred": "predict"}
_LAYER = re.compile(r"decoder_(?:blocks|layers|encoder\.layer)\.(\d+)\.(.+)")
_PARTS = {
    **dict.fromkeys(("norm1", "layernorm_before"), "attentions.0.norm"),
    "attn.qkv": "attentions.0.attention.qkv",
    **dict.fromkeys(("attention.attention.query", "attention.q_proj"), "attentions.0.attention.query"),
    **dict.fromkeys(("attention.attention.key", "attention.k_proj"), "attentions.0.attention.key"),
    **dict.fromkeys(("attention.attention.value", "attention.v_proj"), "attentions.0.attention.value"),
    **dict.fromkeys(("attn.proj", "attention.output.dense", "attention.o_proj"), "attentions.0.attention.out"),
    **dict.fromkeys(("norm2", "layernorm_after"), "mlps.0.norm"),
    **dict.fromkeys(("mlp.fc1", "intermediate.dense"), "mlps.0.mlp.fc1"),
    **dict.fromkeys(("mlp.fc2", "output.dense"), "mlps.0.mlp.fc2"),
}


def patch_statistics(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation [..., 1] of each patch's values [..., n], from the unbiased variance."""
    return pixels.mean(-1, keepdim=True), (pixels.var(-1, keepdim=True) + EPSILON).sqrt()


class MAEObjective(MaskedObjective):
    """See the module. The loss of an image is the mean over its masked patches and their values; there are no metrics.

    Raises UsageError for a network in which patches cannot be masked.
    """

    def __init__(self, model: nn.Module, config: MAE, seed: int) -> None:
        super().__init__(model, config, seed)
        self.config = config
        self.decoder = Decoder(self.model.config, config)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Draw the visible patches: `targets` becomes int64 [batch, visible], raster numbers."""
        rows, columns = self.model.grid(prepared.images)
        keep = visible(self.seed, step, prepared.index.tolist(), rows * columns, self.config.ratio)
        return replace(prepared, targets=torch.from_numpy(keep))

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        predicted, places = self.outputs(prepared)
        wanted = tokens_at(cut_patches(self._normalised(prepared.images), self.model.config.patch), places)
        if self.config.normalise:
            mean, deviation = patch_statistics(wanted)
            wanted = (wanted - mean) / deviation
        return (tokens_at(predicted, places).float() - wanted).square().mean((1, 2)).sum(), len(prepared), {}

    def outputs(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """Return predictions for all patches [batch, patches, values] and the masked patches, int64 [batch, masked]."""
        images, keep = prepared.images, prepared.targets
        grid = self.model.grid(images)
        count = grid[0] * grid[1]
        masked = ~patch_mask(keep, count)
        order = masked.int().argsort(stable=True, descending=True)  # nonzero() would wait for the GPU
        places = order[:, : count - keep.shape[1]]
        shown = hide_before_stem(self.model, images, masked, after_stem=self.config.mask_after_stem)
        tokens = self.model.place(self.model.patches(shown), grid)
        latent = encode_normalised(self.model, tokens, grid, keep)
        return self.decoder(latent, keep, grid), places

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `SelfSupervised`. A normalised prediction is drawn with the mean and deviation of its own patch."""
        images, patch = prepared.images, self.model.config.patch
        grid, shown = self.model.grid(images), self.as_pictures(images)
        hidden = ~patch_mask(prepared.targets, grid[0] * grid[1])
        predicted, _ = self.outputs(prepared)
        predicted = predicted.float()
        if self.config.normalise:
            mean, deviation = patch_statistics(cut_patches(self._normalised(images), patch))
            predicted = predicted * deviation + mean
        values = join_patches(predicted, grid, patch)
        rgb = images.dtype == torch.uint8
        picture = to_pixels(self.model.normalise.undo(values)) if rgb else self.as_pictures(values)
        return self.pictures(shown, hidden, picture, shown)

    def load_decoder(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Load the decoder from the tensors of a published MAE, with the names of MAE's code or of transformers.

        Returns sentences that say which tensors were loaded; none are if there is no decoder. The fixed position
        embeddings are not read. Raises WeightsError for a decoder of another shape.
        """
        published, own = _decoder_tensors(tensors), self.decoder.state_dict()
        if not published:
            return ["decoder: initialised randomly, because the pretrained weights have none"]
        if missing := own.keys() - published.keys():
            raise WeightsError(
                f"the decoder of the weights lacks {min(missing)!r}. If it has fewer layers than "
                "objective.decoder_depth, set that to its depth"
            )
        if published.keys() - own.keys():
            depth = len(self.decoder.blocks)
            raise WeightsError(f"the decoder of the weights has more than {depth} layers: set objective.decoder_depth")
        for name, tensor in published.items():
            if tensor.shape != own[name].shape:
                raise WeightsError(
                    f"the decoder of the weights has {name} of shape {tuple(tensor.shape)}, this one "
                    f"{tuple(own[name].shape)}: set objective.decoder_width, decoder_depth and decoder_heads to theirs"
                )
        self.decoder.load_state_dict(published)
        return [f"decoder: {len(published)} tensors of the pretrained weights"]

    def _normalised(self, images: Tensor) -> Tensor:
        return self.model.normalise(images) if images.dtype == torch.uint8 else images.float()


def _decoder_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a published decoder under our names; {} if there is none."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix("decoder.").rpartition(".")
        if kind == "mask_token":
            renamed["mask"] = tensor.flatten()
        elif module in _ENDS:
            renamed[f"{_ENDS[module]}.{kind}"] = tensor
        elif (layer := _LAYER.fullmatch(module)) and layer[2] in _PARTS:
            renamed[f"blocks.{layer[1]}.{_PARTS[layer[2]]}.{kind}"] = tensor
    for name in [name for name in renamed if ".query." in name]:
        parts = [renamed.pop(name.replace(".query.", f".{part}."), None) for part in ("query", "key", "value")]
        if all(part is not None for part in parts):
            renamed[name.replace(".query.", ".qkv.")] = torch.cat(parts)  # type: ignore[arg-type]
    return renamed if "embed.weight" in renamed else {}


def decoder_config(encoder: ViTConfig, config: MAE) -> ViTConfig:
    """Return the decoder's config: no class token, no positions, no stochastic depth."""
    if config.decoder_width % 4 or config.decoder_width % config.decoder_heads:
        raise UsageError(
            f"objective.decoder_width is {config.decoder_width}, decoder_heads {config.decoder_heads}, decoder_depth "
            f"{config.decoder_depth}: the width must be divisible by 4 and by the heads, and the depth at least 1"
        )
    return ViTConfig(
        width=config.decoder_width,
        depth=config.decoder_depth,
        heads=config.decoder_heads,
        mlp_dim=4 * config.decoder_width,
        patch=encoder.patch,
        image_size=encoder.image_size,
        channels=encoder.channels,
        classes=0,
        positions="none",
        pool="gap",
        origin=Origin(norm_eps=encoder.origin.norm_eps, gelu=encoder.origin.gelu),
    )


class Decoder(nn.Module):
    """The light decoder: encoded visible patches -> pixels of all patches.

    latent [batch, prefix + visible, encoder's width] -> pixels [batch, patches, patch * patch * channels].

    The pixels of a patch are in the order row, column, channel, as in MAE's code.
    """

    def __init__(self, encoder: ViTConfig, config: MAE) -> None:
        super().__init__()
        own = decoder_config(encoder, config)
        self.prefix = encoder.prefix
        self.embed = new_linear(encoder.width, own.width)
        self.mask = nn.Parameter(torch.empty(own.width))
        self.blocks = build_blocks(own, Positions(own))
        self.norm = LayerNorm(own.width, eps=own.origin.norm_eps)
        self.predict = new_linear(own.width, own.patch**2 * own.channels)
        init_weights(self, own.init)
        nn.init.normal_(self.mask, std=0.02)
        for layer in (self.embed, self.predict):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, latent: Tensor, keep: Tensor, grid: Grid) -> Tensor:
        """See the class; `keep` [batch, visible] are the raster numbers of the visible patches in `grid`."""
        tokens = dense(self.embed, latent)
        front, seen = tokens[:, : self.prefix], tokens[:, self.prefix :]
        batch, count, width = len(tokens), grid[0] * grid[1], tokens.shape[-1]
        every = self.mask.to(tokens.dtype).expand(batch, count, width)
        every = every.scatter(1, keep[..., None].expand(-1, -1, width), seen)
        every = every + mae_positions(grid, tokens)
        tokens = torch.cat([front, every], dim=1)
        places = torch.arange(count, device=tokens.device)
        for block in self.blocks:
            tokens = block(tokens, places, grid)
        return dense(self.predict, self.norm(tokens)[:, self.prefix :])


def mae_positions(grid: Grid, like: Tensor) -> Tensor:
    """Return MAE's fixed positions [1, rows * columns, width]: sines and cosines of the column, then of the row.

    `like` [..., width] has their device and type. The exponents of the frequencies are divided by width / 4, not by
    width / 4 - 1 as in MoCo v3 and big_vision.
    """
    return sincos_table(grid, like.shape[-1], like.shape[-1] // 4, like.device, like.dtype)
