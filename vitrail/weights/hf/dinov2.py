"""DINOv2 in transformers, with and without registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.encoder import Encoder, Statistics
from vitrail.weights.mapping import IMAGENET, Conversion, joined, number_in, rows, same, same_pair, shape_of


class DinoV2(Encoder):
    """DINOv2: LayerScale, SwiGLU in the giant; the classifier reads the class token and the mean of the patches."""

    model_type = "dinov2"
    title = "Dinov2"
    norms = ("norm1", "norm2")
    gammas = ("layer_scale1.lambda1", "layer_scale2.lambda1")
    part_names = Encoder.part_names | {"fc1": ("mlp.fc1", "mlp.fc1"), "fc2": ("mlp.fc2", "mlp.fc2")}
    expresses = frozenset({"LayerScale", "swiglu MLP", "pooling by 'cls+gap'"})
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-6, patch_size=14, layerscale_value=1.0)
    fields: ClassVar[Mapping[str, str]] = {"layerscale_value": "layer_scale"}
    constants: ClassVar[Mapping[str, Any]] = dict(use_mask_token=True)

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        both = "classifier.weight" in archive or self.architecture == self.classifier()
        return dict(
            classes=rows(archive, "classifier.weight"),
            pool="cls+gap" if both else "cls",
            layer_scale=number_in(settings, "layerscale_value", str(archive.path)),
            mlp="swiglu" if self._gated(archive) else "gelu",
        )

    def _gated(self, archive: Archive) -> int:
        """Return the hidden width of SwiGLU in the first block, 0 if it has a plain MLP."""
        mlp = f"{self.layers}.0.mlp"
        if self.disk:
            return rows(archive, f"{mlp}.weights_in.weight") // 2
        return rows(archive, f"{mlp}.gate_proj.weight")

    def mlp_dim(self, archive: Archive) -> int:
        """See `Encoder.mlp_dim`."""
        return self._gated(archive) or super().mlp_dim(archive)

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Encoder.preprocess`: the models are published for 518 pixels, and used at 224."""
        size = image_size if 224 % patch else (224, 224)
        return Preprocess(size, "small", 0.875, "bicubic"), IMAGENET

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        if config.layer_scale is None:
            return f"{cls.bare()} has LayerScale, and this model has none"
        if config.pool == "cls" and config.classes:
            return f"the classifier of {cls.classifier()} reads the class token and the mean of the patches"
        if mlp_ratio(config) is None:
            return f"{cls.bare()} has MLPs of a whole multiple of the width, which {config.mlp_dim} is not"
        if config.registers and config.register_positions:
            return f"{cls.bare()} has no positions of registers"
        if config.pre_logits:
            return f"{cls.bare()} has no pre-logits layer"
        if config.pool == "cls+gap" and config.final_norm == "pooled":
            return f"{cls.bare()} has no LayerNorm after pooling"
        return super().refusal(config)

    @classmethod
    def has_head(cls, config: ViTConfig) -> bool:
        """See `Encoder.has_head`."""
        return config.pool == "cls+gap"

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return dict(mlp_ratio=mlp_ratio(config), qkv_bias=self.qkv_bias, use_swiglu_ffn=config.mlp == "swiglu")

    def required(self, config: ViTConfig) -> dict[str, Tensor]:
        """See `Encoder.required`: the mask token of pre-training, at its initial value of zero."""
        return {f"{self.prefix}embeddings.mask_token": torch.zeros(1, config.width)}

    @property
    def layers(self) -> str:
        """See `Encoder.layers`."""
        return f"{self.prefix}encoder.layer"

    def mlp(self, config: ViTConfig, ours: str, theirs: str) -> list[Conversion]:
        """See `Encoder.mlp`."""
        if config.mlp != "swiglu":
            return super().mlp(config, ours, theirs)
        if self.disk:
            return [
                *same_pair(f"{ours}.fc1", f"{theirs}.mlp.weights_in"),
                *same_pair(f"{ours}.fc2", f"{theirs}.mlp.weights_out"),
            ]
        gate, up = f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"
        both = [joined(f"{ours}.fc1.{kind}", (f"{gate}.{kind}", f"{up}.{kind}")) for kind in ("weight", "bias")]
        return [*both, *same_pair(f"{ours}.fc2", f"{theirs}.mlp.down_proj")]


class DinoV2WithRegisters(DinoV2):
    """DINOv2 with registers, which have no positions. Only this encoder resamples positions with antialiasing."""

    model_type = "dinov2_with_registers"
    title = "Dinov2WithRegisters"
    expresses = DinoV2.expresses | {"registers"}
    defaults: ClassVar[Mapping[str, Any]] = {**DinoV2.defaults, "patch_size": 16}
    fields: ClassVar[Mapping[str, str]] = {**DinoV2.fields, "num_register_tokens": "registers"}
    constants: ClassVar[Mapping[str, Any]] = {}
    resize_mode = "timm"  # the same method: bicubic, antialiased, in float32

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        registers = shape_of(archive, f"{self.prefix}embeddings.register_tokens", 3)[1]
        return {**super().own(archive, settings), "registers": registers}

    def tokens(self, config: ViTConfig, embeddings: str) -> list[Conversion]:
        """See `Encoder.tokens`."""
        registers = [same("registers", f"{embeddings}.register_tokens")] if config.registers else []
        return [*super().tokens(config, embeddings), *registers]


def mlp_ratio(config: ViTConfig) -> int | None:
    """Return the `mlp_ratio` that gives a config's MLPs, None if there is none.

    The hidden width is the product with the width; for SwiGLU it is two thirds of that, rounded up to a multiple of 8.
    """
    for ratio in range(1, 65):
        hidden = ratio * config.width
        if config.mlp == "swiglu":
            hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        if hidden == config.mlp_dim:
            return ratio
    return None
