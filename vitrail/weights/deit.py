"""The DeiT repository's own files: `{"model": state_dict}` of DeiT-III and of "Three things" (`models_v2.py`).

Files of the first DeiT models have timm's names, and are read as timm's. The later models changed these names:

| theirs | ours |
|---|---|
| `blocks.I.gamma_1`, `gamma_2` | LayerScale of the attention and of the MLP |
| `blocks.I.{norm1,attn}`, `{norm11,attn1}`, `{norm2,mlp}`, `{norm21,mlp1}` | two parallel branches |
| `patch_embed.proj.{0,1,3,4,6,7}` | the hMLP stem: convolutions and (Sync)BatchNorms |
| `pos_embed` [1, patches, width] | positions of the patches only, without the class token |

A file contains neither the number of heads nor the preprocessing. The load report lists what is assumed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.stems.convolutional import hmlp_stages
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.ranges import LARGEST_SIDE
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.formats import ForeignModel, foreign_tensors, refuse_folder, state_of, write_tensors
from vitrail.weights.mapping import (
    Conversion,
    first_reason,
    imagenet_statistics,
    rows,
    same,
    same_pair,
    shape_of,
    special_parts,
    stem_sizes,
    usual_heads,
)
from vitrail.weights.timm.file import has_timm_config

BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
STEM_CONVS, STEM_NORMS = (0, 3, 6), (1, 4, 7)
"""Indices in the hMLP stem's sequence, equal in DeiT and vitrail; GELU is at 2 and 5."""

# DeiT's names of norm, layer and LayerScale in the first and in the second branch of a block
_ATTENTIONS = (("norm1", "attn", "gamma_1"), ("norm11", "attn1", "gamma_1_1"))
_MLPS = (("norm2", "mlp", "gamma_2"), ("norm21", "mlp1", "gamma_2_1"))


@dataclass(frozen=True)
class DeiT:
    """The format of `facebookresearch/deit`."""

    name: str = "deit"

    def recognises(self, archive: Archive) -> bool:
        """Return whether there is LayerScale as `gamma_1`, a second branch or the hMLP stem.

        BEiT's files have such LayerScale too, but relative positions; timm's other files with it have a config.json.
        """
        needed = {"cls_token", "blocks.0.norm1.weight", "blocks.0.attn.qkv.weight"}
        own = {"blocks.0.gamma_1", "blocks.0.norm11.weight", "patch_embed.proj.0.weight"}
        beit = any(name.endswith(("relative_position_bias_table", ".q_bias", ".v_bias")) for name in archive.names)
        rotary = "pos_embed" not in archive or "rope.freqs" in archive  # timm's: DINOv3, RoPE-ViT
        known = needed <= archive.names and bool(own & archive.names) and not has_timm_config(archive)
        return known and not beit and not rotary

    def find(self, archive: Archive) -> ForeignModel:
        """See `Format.find`. The preprocessing is DeiT's evaluation."""
        config, assumptions = _config(archive)
        # the default of DeiT's main.py, and the value in DeiT-III's commands
        crop = 0.875 if config.cls_position else 1.0
        preprocess = Preprocess(config.image_size, resize="small", crop=crop, interpolation="bicubic")
        assumptions.append(f"preprocessing of the DeiT repository: ImageNet's mean and std, bicubic, crop {crop}")
        origin = {"format": self.name, "file": str(archive.path)}
        card = Card(config, preprocess=preprocess, source=self.name, provenance={"origin": origin})
        return ForeignModel(card, conversions(config), assumptions=assumptions)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write `{"model": state_dict}`, or a safetensors file if `path` ends in .safetensors. Raises WeightsError."""
        config = card.config
        if reason := _refusal(config):
            raise WeightsError(f"the DeiT repository's format has no place for this model: {reason}")
        assert isinstance(config, ViTConfig)
        refuse_folder(path, "deit.pth")
        write_tensors(path, foreign_tensors(state_of(model), conversions(config), self.name), under="model")


FORMAT = DeiT()


def conversions(config: ViTConfig) -> list[Conversion]:
    """Return the conversions of all tensors of a model to the names in DeiT's files."""
    found = [same("cls", "cls_token"), same("positions.embedding", "pos_embed")]
    found += [same("dist", "dist_token")] if config.distilled else []
    if config.stem == "linear":
        found += same_pair("stem", "patch_embed.proj")
    else:
        for place in STEM_CONVS:
            found += same_pair(f"stem.proj.{place}", f"patch_embed.proj.{place}")
        for place in STEM_NORMS:
            found += [same(f"stem.proj.{place}.{part}", f"patch_embed.proj.{place}.{part}") for part in BATCH_NORM]
    for layer in range(config.depth):
        for branch in range(config.branches):
            found += _branches(f"blocks.{layer}", branch, scaled=config.layer_scale is not None)
    found += same_pair("norm", "norm")
    heads = ("head", "head_dist") if config.distilled else ("head",)
    return found + [entry for head in heads if config.classes for entry in same_pair(head, head)]


def _branches(block: str, branch: int, *, scaled: bool) -> list[Conversion]:
    """Return the conversions of one attention branch and one MLP branch of a block."""
    norm, inner, gamma = _ATTENTIONS[branch]
    ours = f"{block}.attentions.{branch}"
    found = [
        *same_pair(f"{ours}.norm", f"{block}.{norm}"),
        *same_pair(f"{ours}.attention.qkv", f"{block}.{inner}.qkv"),
        *same_pair(f"{ours}.attention.out", f"{block}.{inner}.proj"),
    ]
    found += [same(f"{ours}.residual.gamma", f"{block}.{gamma}")] if scaled else []
    norm, inner, gamma = _MLPS[branch]
    ours = f"{block}.mlps.{branch}"
    found += [
        *same_pair(f"{ours}.norm", f"{block}.{norm}"),
        *same_pair(f"{ours}.mlp.fc1", f"{block}.{inner}.fc1"),
        *same_pair(f"{ours}.mlp.fc2", f"{block}.{inner}.fc2"),
    ]
    return found + ([same(f"{ours}.residual.gamma", f"{block}.{gamma}")] if scaled else [])


def _config(archive: Archive) -> tuple[ViTConfig, list[str]]:
    """Return the config of the model in a file, and the assumptions made."""
    hmlp = "patch_embed.proj.0.weight" in archive
    parallel = "blocks.0.norm11.weight" in archive
    depth = 1 + max(int(match[1]) for name in archive.names if (match := re.match(r"blocks\.(\d+)\.", name)))
    if hmlp:
        width, channels, patch = _hmlp_stem(archive)
    else:
        width, channels, patch = stem_sizes(archive, "patch_embed.proj.weight")
    distilled = "dist_token" in archive
    side, has_row = _square(archive, front=1 + distilled)
    heads, sentence = usual_heads(archive, width)
    config = ViTConfig(
        width=width,
        depth=depth,
        heads=heads,
        mlp_dim=shape_of(archive, "blocks.0.mlp.fc1.weight", 2)[0],
        patch=patch,
        image_size=(side * patch, side * patch),
        channels=channels,
        classes=rows(archive, "head.weight"),
        stem="hmlp" if hmlp else "linear",
        stem_norm="batch",
        block="parallel" if parallel else "sequential",
        branches=2 if parallel else 1,
        resize_mode="deit",
        cls_position=has_row,
        distilled=distilled,
        drop_path_shape="constant",
        layer_scale=1e-4 if "blocks.0.gamma_1" in archive else None,
        norm_eps=1e-6,
        gelu="erf",
        **imagenet_statistics(channels),  # type: ignore[arg-type]
    )
    return config, [sentence]


def _hmlp_stem(archive: Archive) -> tuple[int, int, int]:
    """Return width, channels and patch of an hMLP stem. Raises WeightsError for other stages or norms than DeiT's."""
    shapes = [shape_of(archive, f"patch_embed.proj.{place}.weight", 4) for place in STEM_CONVS]
    kernels = tuple(shape[2] for shape in shapes)
    if math.prod(kernels) > LARGEST_SIDE or kernels != hmlp_stages(math.prod(kernels)):
        raise WeightsError(
            f"{archive.path} has an hMLP stem with kernels {kernels}. Only {hmlp_stages(16)}, for patches of 16, is "
            "supported."
        )
    for place in STEM_NORMS:
        if f"patch_embed.proj.{place}.running_mean" not in archive:
            raise WeightsError(
                f"{archive.path} lacks 'patch_embed.proj.{place}.running_mean'. DeiT's hMLP stem has BatchNorms, and "
                "the file does not name another norm."
            )
    return shapes[-1][0], shapes[0][1], math.prod(kernels)


def _square(archive: Archive, front: int) -> tuple[int, bool]:
    """Return the side of the grid, and whether the tokens in front of the patches have positions."""
    count = shape_of(archive, "pos_embed", 3)[1]
    for tokens, has_row in ((count, False), (count - front, True)):
        if tokens > 0 and math.isqrt(tokens) ** 2 == tokens:
            return math.isqrt(tokens), has_row
    raise WeightsError(
        f"{archive.path} has {count} positions in 'pos_embed', which is not a square grid, with or without {front} "
        "for the tokens in front. The file does not contain the grid."
    )


def _refusal(config: ViTConfig | ResNetConfig) -> str:
    """Return why DeiT's files cannot hold this model, "" if they can."""
    if not isinstance(config, ViTConfig):
        return "it is a ResNet"
    height, width = config.image_size
    later = config.layer_scale is not None or config.branches > 1 or config.stem == "hmlp"
    front = "a class token" + (" and a distillation token" if config.distilled else "")
    placed = config.positions, config.place
    reasons = {
        f"stem {config.stem!r}": config.stem not in ("linear", "hmlp"),
        f"{config.stem_norm} norms in the hMLP stem": config.stem == "hmlp" and config.stem_norm != "batch",
        f"an hMLP stem for patches of {config.patch}, not 16": config.stem == "hmlp" and config.patch != 16,
        f"{config.block} blocks of {config.branches} branches": config.block == "axial" or config.branches > 2,
        f"positions {config.positions!r} at place {config.place!r}": placed != ("1d", "input"),
        f"pool {config.pool!r}": config.pool != "cls",
        f"{config.registers} registers": bool(config.registers),
        "a pre-logits layer": config.pre_logits is not None,
        f"final_norm {config.final_norm!r}": config.final_norm != "tokens",
        f"an MLP with {config.mlp}": config.mlp != "gelu",
        f"GELU of kind {config.gelu!r}": config.gelu != "erf",
        f"norm_eps {config.norm_eps}": config.norm_eps != 1e-6,
        f"images of {height} x {width} pixels, which are not square": height != width,
        f"positions for {front} beside LayerScale, branches or an hMLP stem": later and config.cls_position,
        "a distillation token beside LayerScale, branches or an hMLP stem": later and config.distilled,
        "a distillation token without a position": config.distilled and not config.cls_position,
        **special_parts(config),
    }
    return first_reason(reasons)
