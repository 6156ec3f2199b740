"""DeiT, ViT-MSN, I-JEPA and ViT-MAE in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from vitrail.data.settings import Preprocess
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.encoder import Encoder, Statistics
from vitrail.weights.mapping import IMAGENET, Conversion, rows, same, same_pair


class DeiT(Encoder):
    """DeiT: a distillation token behind the class token, with a position of its own.

    The class with a teacher has a head for each of the two tokens, and its logits are their mean: vitrail's
    `distilled`. The other classes do not read the distillation token, which makes it a register with a position.
    """

    model_type = "deit"
    title = "DeiT"
    with_teacher = "DeiTForImageClassificationWithTeacher"
    front = 2
    expresses = frozenset({"distillation token", "registers"})

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        if classes := rows(archive, "cls_classifier.weight"):
            return dict(classes=classes, distilled=True)
        return {**super().own(archive, settings), "registers": 1, "register_positions": True}

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Encoder.preprocess`."""
        return Preprocess(image_size, "small", 0.875, "bicubic"), IMAGENET

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        if not config.distilled and not (config.registers == 1 and config.register_positions):
            return f"{cls.bare()} has one token between the class token and the grid, with a position"
        if config.distilled and config.registers:
            return f"{cls.bare()} has no registers besides the distillation token"
        if config.distilled and not config.classes:
            return f"{cls.bare()} has no pooling of two tokens without a head"
        return super().refusal(config)

    @classmethod
    def of_model(cls, config: ViTConfig) -> Encoder:
        """See `Encoder.of_model`."""
        encoder = super().of_model(config)
        return replace(encoder, architecture=cls.with_teacher) if config.distilled else encoder

    def tokens(self, config: ViTConfig, embeddings: str) -> list[Conversion]:
        """See `Encoder.tokens`."""
        second = same("dist" if config.distilled else "registers", f"{embeddings}.distillation_token")
        return [*super().tokens(config, embeddings), second]

    def heads(self, config: ViTConfig) -> list[Conversion]:
        """See `Encoder.heads`."""
        if not config.distilled:
            return super().heads(config)
        return [*same_pair("head", "cls_classifier"), *same_pair("head_dist", "distillation_classifier")]


class MSN(Encoder):
    """ViT-MSN (masked siamese networks): a plain ViT without pooler."""

    model_type = "vit_msn"
    title = "ViTMSN"
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-6, patch_size=16)

    @classmethod
    def headed_prefix(cls) -> str:
        """See `Encoder.headed_prefix`."""
        return "vit."

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        return dict(classes=rows(archive, "classifier.weight"))

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Encoder.preprocess`."""
        return Preprocess(image_size, "squash"), IMAGENET

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        return f"{cls.bare()} has no pooler" if config.pre_logits else super().refusal(config)


class IJepa(MSN):
    """I-JEPA: no class token; the classifier reads the mean of the patches."""

    model_type = "ijepa"
    title = "IJepa"
    front = 0
    expresses = frozenset({"network without a class token", "pooling by 'gap'"})
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-12, patch_size=16)
    unused = (
        (r"(\w+\.)?embeddings\.mask_token", "mask token of masked pre-training"),
        (r"(\w+\.)?pooler\.dense\.\w+", "the features are the mean of the patches; the pooler reads the first one"),
    )

    @classmethod
    def headed_prefix(cls) -> str:
        """See `Encoder.headed_prefix`."""
        return "ijepa."

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        return {**super().own(archive, settings), "pool": "gap", "class_token": False}

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        if config.has_class_token:
            return f"{cls.bare()} has no class token"
        if config.final_norm == "pooled":
            return f"{cls.bare()} normalises the patches, not their mean"
        return super().refusal(config)


class MAE(Encoder):
    """The encoder of a masked autoencoder. Its positions are fixed sines, which are read from the file."""

    model_type = "vit_mae"
    title = "ViTMAE"

    @classmethod
    def headed_prefix(cls) -> str:
        """See `Encoder.headed_prefix`."""
        return "vit."

    @classmethod
    def classifier(cls) -> str:
        """See `Encoder.classifier`."""
        return ""

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        return dict(classes=0)

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Encoder.preprocess`."""
        return Preprocess(image_size, "squash"), IMAGENET

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        if config.classes or config.pre_logits:
            return f"{cls.bare()} has no {'classifier' if config.classes else 'pooler'}"
        return super().refusal(config)
