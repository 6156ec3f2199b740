"""The image tower of CLIP in transformers: `CLIPVisionModel`, with its projection, or in a whole `CLIPModel`.

| theirs | ours |
|---|---|
| `embeddings.class_embedding` (D) | `cls` (1, 1, D) |
| `embeddings.patch_embedding`, without bias | `stem`; the bias is zero |
| `embeddings.position_embedding.weight` (1 + N, D) | `positions.embedding` (1, 1 + N, D) |
| `pre_layrnorm` (spelled so) | `pre_norm` |
| `encoder.layers.0.self_attn.{q,k,v,out}_proj`, `layer_norm1`, `layer_norm2`, `mlp.fc1`, `mlp.fc2` | `blocks.0` |
| `post_layernorm` | `norm` |
| `visual_projection`, without bias | `head`; its outputs are the embedding that CLIP compares with texts |
| `classifier`, on the mean of the patches without `post_layernorm` | `head`, without `norm` |

Names have the prefix `vision_model.`, unless version 5 saved a bare `CLIPVisionModel`. The text tower is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.encoder import Encoder, Statistics
from vitrail.weights.mapping import (
    CLIP,
    Conversion,
    norm_pair,
    reshaped,
    rows,
    same,
    same_pair,
    shape_of,
    square_side,
    without_stem_bias,
)

LABELS = ("id2label", "label2id", "num_labels", "problem_type")
"""Entries of config.json about a classifier."""


class Clip(Encoder):
    """CLIP's image tower."""

    model_type = "clip_vision_model"
    whole = "clip"
    """`model_type` of a model with both towers, and of one with a classifier."""
    title = "CLIPVision"
    stem = "embeddings.patch_embedding"
    norms = ("layer_norm1", "layer_norm2")
    part_names: ClassVar[dict[str, tuple[str, str]]] = {
        **{part: (f"self_attn.{part[0]}_proj",) * 2 for part in ("query", "key", "value")},
        **{"out": ("self_attn.out_proj",) * 2, "fc1": ("mlp.fc1",) * 2, "fc2": ("mlp.fc2",) * 2},
    }
    expresses = frozenset({"LayerNorm before the first block", "pooling by 'gap'", "network without a last LayerNorm"})
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-5, patch_size=32, hidden_act="quick_gelu")
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"text_model\..*|text_projection\.weight|logit_scale|logit_bias", "the tower for texts"),
        (r"(vision_model\.)?embeddings\.position_ids", "the numbers of the positions, in order"),
        (r"(vision_model\.)?post_layernorm\.\w+", "the norm of the class token, which the classifier does not read"),
    )

    @classmethod
    def headed_prefix(cls) -> str:
        """See `Encoder.headed_prefix`."""
        return "vision_model."

    # reading

    @classmethod
    def final_norm(cls, archive: Archive, prefix: str) -> str:
        """See `Encoder.final_norm`."""
        return f"{prefix}post_layernorm"

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        if not archive.config:
            raise WeightsError(
                f"{archive.path} is CLIP's image tower, and its tensors do not say whether the MLPs have quick_gelu, "
                "as OpenAI's weights, or another GELU, as OpenCLIP's. Give a folder with the model's config.json"
            )
        if classes := rows(archive, "classifier.weight"):
            return dict(classes=classes, pre_norm=True, pool="gap", class_token=True, final_norm="none")
        return dict(classes=rows(archive, "visual_projection.weight"), pre_norm=True)

    def side(self, archive: Archive) -> int:
        """See `Encoder.side`."""
        return square_side(archive, self.table, shape_of(archive, self.table, 2)[0] - self.front)

    def absent(self, config: ViTConfig) -> dict[str, str]:
        """See `Encoder.absent`."""
        projection = {"head.bias": "no bias of the projection"} if config.classes and config.pool == "cls" else {}
        return {"stem.bias": "no bias of the patch embedding", **projection}

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Encoder.preprocess`."""
        return Preprocess(image_size, "small", 1.0, "bicubic"), CLIP

    # writing

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        if config.grid[0] != config.grid[1]:
            return f"{cls.bare()} has a square table of positions"
        if not config.pre_norm:
            return f"{cls.bare()} has a LayerNorm before the first block, and this model has none"
        if not config.has_class_token:
            return f"{cls.bare()} has a class token"
        if (config.pool == "gap") != (config.final_norm == "none") or (config.pool == "gap" and not config.classes):
            return f"{cls.bare()} normalises the class token, and its classifier reads the mean of the patches as it is"
        return super().refusal(config)

    @classmethod
    def of_model(cls, config: ViTConfig) -> Encoder:
        """See `Encoder.of_model`. Every version of transformers reads a bare tower with the prefix."""
        prefix = cls.headed_prefix()
        name = (
            cls.bare()
            if not config.classes
            else cls.classifier()
            if config.pool == "gap"
            else f"{cls.bare()}WithProjection"
        )
        return cls(name, prefix, norm=f"{prefix}post_layernorm")

    @classmethod
    def classifier(cls) -> str:
        """See `Encoder.classifier`."""
        return f"{cls.title.removesuffix('Vision')}ForImageClassification"

    @classmethod
    def has_head(cls, config: ViTConfig) -> bool:
        """See `Encoder.has_head`."""
        return bool(config.classes) and config.pool == "gap"

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return dict(projection_dim=config.classes) if config.classes and config.pool == "cls" else {}

    def document(self, values: dict[str, Any]) -> dict[str, Any]:
        """See `Encoder.document`: a class with a classifier has the tower's config within its own."""
        if self.architecture != self.classifier():
            return {name: value for name, value in values.items() if name not in LABELS}
        own = ("architectures", "dtype", *LABELS)
        tower = {name: value for name, value in values.items() if name not in own}
        top = {name: value for name, value in values.items() if name in own}
        return {**top, "model_type": self.whole, "vision_config": tower}

    def required(self, config: ViTConfig) -> dict[str, Tensor]:
        """See `Encoder.required`: the norm of the class token, in a network whose classifier reads the patches."""
        if config.final_norm != "none":
            return {}
        return {f"{self.norm}.weight": torch.ones(config.width), f"{self.norm}.bias": torch.zeros(config.width)}

    def written(self, config: ViTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Encoder.written`: without the bias of the patch embedding, and without one of the projection."""
        left = without_stem_bias(state, config)
        if "head.bias" in self.absent(config) and left.pop("head.bias").any():
            raise WeightsError(
                "format 'hf' cannot express this model: the class token's features go through a layer with a bias, "
                f"and the projection of {self.architecture} has none. Save it as 'vitrail' or 'timm'"
            )
        return left

    # both

    @property
    def layers(self) -> str:
        """See `Encoder.layers`."""
        return f"{self.prefix}encoder.layers"

    @property
    def table(self) -> str:
        """Name of the position table."""
        return f"{self.prefix}embeddings.position_embedding.weight"

    def conversions(self, config: ViTConfig) -> list[Conversion]:
        """See `Encoder.conversions`."""
        stem = f"{self.prefix}{self.stem}"
        conversions = [*self.patches(config, stem), *self.tokens(config, f"{self.prefix}embeddings")]
        if config.positions == "1d":
            conversions.append(reshaped("positions.embedding", self.table, (-1, config.width)))
        conversions += same_pair("pre_norm", f"{self.prefix}pre_layrnorm") if config.pre_norm else []
        for layer in range(config.depth):
            conversions += self.block(config, layer)
        conversions += norm_pair(config, "norm", self.norm) if config.final_norm == "tokens" else []
        return conversions + (self.heads(config) if config.classes else [])

    def patches(self, config: ViTConfig, stem: str) -> list[Conversion]:
        """Return the conversions of the patch embedding with the name `stem`."""
        return [same("stem.weight", f"{stem}.weight")]

    def tokens(self, config: ViTConfig, embeddings: str) -> list[Conversion]:
        """See `Encoder.tokens`."""
        return [reshaped("cls", f"{embeddings}.class_embedding", (config.width,))]

    def heads(self, config: ViTConfig) -> list[Conversion]:
        """See `Encoder.heads`."""
        return super().heads(config) if config.pool == "gap" else [same("head.weight", "visual_projection.weight")]


def tower(archive: Archive, kinds: Mapping[str, str]) -> Archive:
    """Return an archive with the config.json of the image tower, if config.json describes one next to one for texts.

    `kinds` is the `model_type` of such a model -> that of its image tower. Without a classifier, its labels go: older
    versions of transformers wrote two placeholders into every config.json.
    """
    config, inner = archive.config, archive.config.get("vision_config")
    kind = str(config.get("model_type"))
    if kind in kinds and isinstance(inner, Mapping):
        top = {name: config[name] for name in ("architectures", *LABELS) if name in config}
        config = {**{k: v for k, v in inner.items() if k not in LABELS}, **top, "model_type": kinds[kind]}
    elif kind not in kinds.values():
        return archive
    if "classifier.weight" not in archive:
        config = {name: value for name, value in config.items() if name not in LABELS}
    return replace(archive, config=config)
