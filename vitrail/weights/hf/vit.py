"""DeiT and ViT-MAE in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitrail.data.settings import Preprocess
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.family import IMAGENET, Family, Layout, Statistics, pooler
from vitrail.weights.mapping import Conversion, rows, same, same_pair


class DeiT(Family):
    """DeiT: a distillation token behind the class token, with a position of its own.

    With a teacher there is a head for each of the two and the logits are their mean: our `distilled`. In the
    other classes nothing reads the distillation token, which makes it a register with a position.
    """

    model_type = "deit"
    title = "DeiT"
    taught = "DeiTForImageClassificationWithTeacher"
    front = 2

    def own(self, archive: Archive, layout: Layout, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.own`."""
        if classes := rows(archive, "cls_classifier.weight"):
            return dict(classes=classes, distilled=True)
        classes = rows(archive, "classifier.weight")
        pre_logits = None if classes else pooler(archive, layout, settings)
        return dict(classes=classes, pre_logits=pre_logits, registers=1, register_positions=True)

    def preprocess(self, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Family.preprocess`."""
        return Preprocess(image_size, "small", 0.875, "bicubic"), IMAGENET

    def refusal(self, config: ViTConfig) -> str:
        """See `Family.refusal`."""
        if not config.distilled and not (config.registers == 1 and config.register_positions):
            return f"{self.bare} has one token between the class token and the grid, with a position"
        return self.lacks(
            config,
            {
                "registers besides the distillation token": config.distilled and bool(config.registers),
                "pooling of two tokens without a head": config.distilled and not config.classes,
                "LayerScale": config.layer_scale is not None,
                "pre-logits layer in front of a classifier": bool(config.pre_logits and config.classes),
            },
        )

    def layout(self, config: ViTConfig) -> Layout:
        """See `Family.layout`."""
        layout = super().layout(config)
        return replace(layout, architecture=self.taught) if config.distilled else layout

    def tokens(self, config: ViTConfig, embeddings: str) -> list[Conversion]:
        """See `Family.tokens`."""
        return [same("dist" if config.distilled else "registers", f"{embeddings}.distillation_token")]

    def heads(self, config: ViTConfig) -> list[Conversion]:
        """See `Family.heads`."""
        if not config.distilled:
            return super().heads(config)
        return [*same_pair("head", "cls_classifier"), *same_pair("head_dist", "distillation_classifier")]


class MAE(Family):
    """The encoder of a masked autoencoder; its positions are fixed sines, taken from the file as they are."""

    model_type = "vit_mae"
    title = "ViTMAE"
    prefix = "vit."
    classifier = ""

    def own(self, archive: Archive, layout: Layout, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.own`."""
        return dict(classes=0)

    def preprocess(self, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Family.preprocess`."""
        return Preprocess(image_size, "squash"), IMAGENET

    def refusal(self, config: ViTConfig) -> str:
        """See `Family.refusal`."""
        checks = {"classifier": bool(config.classes), "pooler": bool(config.pre_logits)}
        return self.lacks(config, checks) or super().refusal(config)
