"""The DeiT repository's own files: `{"model": state_dict}` of DeiT-III and of "Three things" (`models_v2.py`).

Files of the first DeiT models have timm's names, and are read as timm's. The later models have LayerScale, a second
branch of each block, the hMLP stem with its (Sync)BatchNorms, and positions of the patches only, under the names of
`TABLE`. A file contains neither the number of heads nor the preprocessing. The load report lists what is assumed.
"""

from __future__ import annotations

import math
from pathlib import Path

from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.stem import hmlp_stages
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.ranges import LARGEST_SIDE
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected
from vitrail.weights.card import Card
from vitrail.weights.formats import ForeignModel, foreign_tensors, refuse_folder, state_of, write_tensors
from vitrail.weights.mapping import (
    apply_table,
    count,
    grid_of,
    imagenet_statistics,
    row_count,
    shape_of,
    stem_sizes,
    untold_heads,
    usual_heads,
    within,
)
from vitrail.weights.parts import first_reason, without_place
from vitrail.weights.timm.file import is_deits_own

STEM_CONVS, STEM_NORMS = (0, 3, 6), (1, 4, 7)
"""Indices in the hMLP stem's sequence, equal in DeiT and vitrail; GELU is at 2 and 5."""

TABLE = {
    "cls": "cls_token",
    "dist": "dist_token",
    "positions.embedding": "pos_embed",
    "stem.proj.{place}.{part}": "patch_embed.proj.{place}.{part}",
    "stem.{part}": "patch_embed.proj.{part}",
    **within(
        "blocks.{layer}.",
        "blocks.{layer}.",
        {
            "attentions.0.norm.{part}": "norm1.{part}",
            "attentions.0.attention.qkv.{part}": "attn.qkv.{part}",
            "attentions.0.attention.out.{part}": "attn.proj.{part}",
            "attentions.0.residual.gamma": "gamma_1",
            "attentions.1.norm.{part}": "norm11.{part}",
            "attentions.1.attention.qkv.{part}": "attn1.qkv.{part}",
            "attentions.1.attention.out.{part}": "attn1.proj.{part}",
            "attentions.1.residual.gamma": "gamma_1_1",
            "mlps.0.norm.{part}": "norm2.{part}",
            "mlps.0.mlp.fc{number}.{part}": "mlp.fc{number}.{part}",
            "mlps.0.residual.gamma": "gamma_2",
            "mlps.1.norm.{part}": "norm21.{part}",
            "mlps.1.mlp.fc{number}.{part}": "mlp1.fc{number}.{part}",
            "mlps.1.residual.gamma": "gamma_2_1",
        },
    ),
    "norm.{part}": "norm.{part}",
    "head.{part}": "head.{part}",
    "head_dist.{part}": "head_dist.{part}",
}
HAS = "stem=hmlp block=parallel cls_position layer_scale distilled"
"""The parts in `vitrail.weights.parts` that the DeiT repository's models have."""


class DeiT:
    """The format of `facebookresearch/deit`."""

    name = "deit"

    def recognises(self, archive: Archive) -> bool:
        """See `Format.recognises`."""
        needed = {"cls_token", "blocks.0.norm1.weight", "blocks.0.attn.qkv.weight"}
        return needed <= archive.names and is_deits_own(archive)

    def find(self, archive: Archive) -> ForeignModel:
        """See `Format.find`. The preprocessing is DeiT's evaluation."""
        config, assumptions = _config(archive)
        # the default of DeiT's main.py, and the value in DeiT-III's commands
        crop = 0.875 if config.cls_position else 1.0
        preprocess = Preprocess(config.image_size, resize="small", crop=crop, interpolation="bicubic")
        assumptions.append(f"preprocessing of the DeiT repository: ImageNet's mean and std, bicubic, crop {crop}")
        origin = {"format": self.name, "file": str(archive.path)}
        card = Card(config, preprocess=preprocess, source=self.name, provenance={"origin": origin})
        return ForeignModel(card, apply_table(expected(config, archive.path), TABLE), assumptions=assumptions)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write `{"model": state_dict}`, or a safetensors file if `path` ends in .safetensors. Raises WeightsError."""
        config = card.config
        if reason := _refusal(config):
            raise WeightsError(f"the DeiT repository's format has no place for this model: {reason}")
        assert isinstance(config, ViTConfig)
        refuse_folder(path, "deit.pth")
        state = state_of(model)
        write_tensors(path, foreign_tensors(state, apply_table(state, TABLE), self.name), under="model")


FORMAT = DeiT()


def _config(archive: Archive) -> tuple[ViTConfig, list[str]]:
    """Return the config of the model in a file, and the assumptions made."""
    hmlp = "patch_embed.proj.0.weight" in archive
    parallel = "blocks.0.norm11.weight" in archive
    if hmlp:
        width, channels, patch = _hmlp_stem(archive)
    else:
        width, channels, patch = stem_sizes(archive, "patch_embed.proj.weight")
    distilled = "dist_token" in archive
    length = shape_of(archive, "pos_embed", 3)[1]
    grid, front = grid_of(archive, "pos_embed", length, (0, 1 + distilled))
    heads, sentence = usual_heads(archive, width)
    config = ViTConfig.of(
        width=width,
        depth=count(archive, "blocks."),
        heads=heads,
        mlp_dim=shape_of(archive, "blocks.0.mlp.fc1.weight", 2)[0],
        patch=patch,
        image_size=(grid[0] * patch, grid[1] * patch),
        channels=channels,
        classes=row_count(archive, "head.weight"),
        stem="hmlp" if hmlp else "linear",
        stem_norm="batch",
        block="parallel" if parallel else "sequential",
        branches=2 if parallel else 1,
        resize_mode="deit",
        cls_position=front > 0,
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


def _refusal(config: ViTConfig | ResNetConfig) -> str:
    """Return why DeiT's files cannot hold this model, "" if they can."""
    if not isinstance(config, ViTConfig):
        return "it is a ResNet"
    later = config.layer_scale is not None or config.branches > 1 or config.stem == "hmlp"
    front = "a class token" + (" and a distillation token" if config.origin.distilled else "")
    untold = untold_heads(config.width)
    reasons = {
        f"{config.stem_norm} norms in the hMLP stem": config.stem == "hmlp" and config.stem_norm != "batch",
        f"an hMLP stem for patches of {config.patch}, not 16": config.stem == "hmlp" and config.patch != 16,
        f"{config.block} blocks of {config.branches} branches": config.branches > 2,
        f"positions for {front} beside LayerScale, branches or an hMLP stem": later and config.cls_position,
        "a distillation token beside LayerScale, branches or an hMLP stem": later and config.origin.distilled,
        "a distillation token without a position": config.origin.distilled and not config.cls_position,
        f"its file does not say {untold}": bool(untold),
    }
    return without_place(config, HAS) or first_reason(reasons)
