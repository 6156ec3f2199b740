"""Masked autoencoder (He et al. 2022): the encoder sees a quarter of the patches, a light decoder predicts the others.

Masked patches never enter the encoder's layers, so the encoder costs little more than a quarter of its full cost. The
target is the normalised patch, by default with its own mean and standard deviation removed. The loss is the mean
squared error over masked patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor, nn

from vitrail.errors import WeightsError
from vitrail.model.stems.patch import normalise
from vitrail.model.vit import ViT
from vitrail.objective.base import Prepared
from vitrail.objective.decoder import Decoder
from vitrail.objective.masks import check_share, visible
from vitrail.objective.self_supervised import SelfSupervised, hatched, to_pixels, where_hidden
from vitrail.objective.settings import MAE
from vitrail.objective.stems import at, encoded, flags, into_stem, need_maskable

EPSILON = 1e-6
"""Added to a patch's variance before the root, as in MAE's code."""


def patch_pixels(images: Tensor, patch: int) -> Tensor:
    """[batch, channels, height, width] -> [batch, patches, patch * patch * channels], ordered row, column, channel."""
    return rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch)


def patch_statistics(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation [..., 1] of each patch's values [..., n], from the unbiased variance."""
    return pixels.mean(-1, keepdim=True), (pixels.var(-1, keepdim=True) + EPSILON).sqrt()


class MAEObjective(SelfSupervised):
    """See the module. The loss of an image is the mean over its masked patches and their values; there are no metrics.

    Raises UsageError for a network in which patches cannot be masked.
    """

    model: ViT

    def __init__(self, model: nn.Module, config: MAE, seed: int) -> None:
        model = need_maskable(model, config.kind, after_stem=config.mask_after_stem)
        super().__init__(model)
        check_share("ratio", config.ratio)
        self.config = config
        self.seed = seed
        self.decoder = Decoder(model.config, config)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Draw the visible patches: `targets` becomes int64 [batch, visible], raster numbers."""
        rows, columns = self.model.grid(prepared.images)
        keep = visible(self.seed, step, prepared.index.tolist(), rows * columns, self.config.ratio)
        return replace(prepared, targets=torch.from_numpy(keep).to(prepared.images.device))

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        predicted, places = self.outputs(prepared)
        wanted = at(patch_pixels(self._normalised(prepared.images), self.model.config.patch), places)
        if self.config.normalise:
            mean, deviation = patch_statistics(wanted)
            wanted = (wanted - mean) / deviation
        return (at(predicted, places).float() - wanted).square().mean((1, 2)).sum(), len(prepared), {}

    def outputs(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """Return predictions for all patches [batch, patches, values] and the masked patches, int64 [batch, masked]."""
        images, keep = prepared.images, prepared.targets
        grid = self.model.grid(images)
        count = grid[0] * grid[1]
        masked = ~flags(keep, count)
        order = masked.int().argsort(stable=True, descending=True)  # nonzero() would wait for the GPU
        places = order[:, : count - keep.shape[1]]
        shown = into_stem(self.model, images, masked, after_stem=self.config.mask_after_stem)
        tokens = self.model.place(self.model.patches(shown), grid)
        latent = encoded(self.model, tokens, grid, keep)
        return self.decoder(latent, keep, grid), places

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `SelfSupervised`. A normalised prediction is drawn with the mean and deviation of its own patch."""
        images, patch = prepared.images, self.model.config.patch
        rows, columns = self.model.grid(images)
        hidden = ~flags(prepared.targets, rows * columns)
        predicted, _ = self.outputs(prepared)
        predicted = predicted.float()
        if self.config.normalise:
            mean, deviation = patch_statistics(patch_pixels(self._normalised(images), patch))
            predicted = predicted * deviation + mean
        picture = rearrange(predicted, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=patch, q=patch)
        predicted = to_pixels((picture - self.model.pixel_shift) / self.model.pixel_scale + 128)
        return {
            "input": images,
            "mask": hatched(images, hidden, patch),
            "prediction": where_hidden(images, hidden, predicted, patch),
            "target": images,
        }

    def load_decoder(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Load the decoder from the tensors of a published MAE, with the names of MAE's code or of transformers.

        Returns sentences that say which tensors were loaded; none are if there is no decoder. The fixed position
        embeddings are not read. Raises WeightsError for a decoder of another shape.
        """
        # transformers 5 reads decoder_layers.0 but writes it as decoder_encoder.layer.0
        tensors = {name.replace("decoder_encoder.layer.", "decoder_layers."): tensors[name] for name in tensors}
        found = {ours: read(tensors) for ours, read in _decoder_names(len(self.decoder.blocks), tensors).items()}
        if not found:
            return ["decoder: initialised randomly, because the pretrained weights have none"]
        own = self.decoder.state_dict()
        for name, tensor in found.items():
            if tensor.shape != own[name].shape:
                raise WeightsError(
                    f"the decoder of the weights has {name} of shape {tuple(tensor.shape)}, this one "
                    f"{tuple(own[name].shape)}: set objective.decoder_width, decoder_depth and decoder_heads to theirs"
                )
        self.decoder.load_state_dict(found)
        return [f"decoder: {len(found)} tensors of the pretrained weights"]

    def _normalised(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            return images.float()
        return normalise(images, self.model.pixel_scale, self.model.pixel_shift)


class _Read:
    """Read one tensor of our decoder from one or several of theirs."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        missing = [name for name in self.names if name not in tensors]
        if missing:
            raise WeightsError(
                f"the decoder of the weights lacks {missing[0]!r}. If it has fewer layers than "
                "objective.decoder_depth, set that to its depth"
            )
        tensor = torch.cat([tensors[name] for name in self.names])
        return tensor.flatten() if self.names[0].endswith("mask_token") else tensor


def _decoder_names(depth: int, tensors: Mapping[str, Tensor]) -> dict[str, _Read]:
    """Return our name -> its reader; {} if the tensors hold no decoder."""
    if "decoder_embed.weight" in tensors:  # MAE's own code
        ends, first, layer = {"mask": "mask_token"}, "", "decoder_blocks.{}"
        parts = {"norm": "norm1", "out": "attn.proj", "norm2": "norm2", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
        qkv: tuple[str, ...] = ("attn.qkv",)
    elif "decoder.decoder_embed.weight" in tensors:  # transformers, on disk and, since version 5, in memory
        ends, first, layer = {"mask": "decoder.mask_token"}, "decoder.", "decoder.decoder_layers.{}"
        disk = "decoder.decoder_layers.0.intermediate.dense.weight" in tensors
        parts = {"norm": "layernorm_before", "norm2": "layernorm_after"}
        parts |= (
            {"out": "attention.output.dense", "fc1": "intermediate.dense", "fc2": "output.dense"}
            if disk
            else {"out": "attention.o_proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
        )
        three = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
        qkv = three if disk else ("attention.q_proj", "attention.k_proj", "attention.v_proj")
    else:
        return {}
    if layer.format(depth) + f".{parts['fc1']}.weight" in tensors:
        raise WeightsError(f"the decoder of the weights has more than {depth} layers: set objective.decoder_depth")
    names = {ours: _Read(theirs) for ours, theirs in ends.items()}
    for kind in ("weight", "bias"):
        for ours, theirs in (("embed", "decoder_embed"), ("norm", "decoder_norm"), ("predict", "decoder_pred")):
            names[f"{ours}.{kind}"] = _Read(f"{first}{theirs}.{kind}")
        for number in range(depth):
            ours, theirs = f"blocks.{number}", layer.format(number)
            names[f"{ours}.attentions.0.attention.qkv.{kind}"] = _Read(*(f"{theirs}.{part}.{kind}" for part in qkv))
            for where, part in (
                ("attentions.0.norm", "norm"),
                ("attentions.0.attention.out", "out"),
                ("mlps.0.norm", "norm2"),
                ("mlps.0.mlp.fc1", "fc1"),
                ("mlps.0.mlp.fc2", "fc2"),
            ):
                names[f"{ours}.{where}.{kind}"] = _Read(f"{theirs}.{parts[part]}.{kind}")
    return names
