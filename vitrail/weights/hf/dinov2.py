"""DINOv2 in transformers, with and without registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.family import IMAGENET, Family, Layout, Statistics
from vitrail.weights.mapping import Conversion, joined, rows, same, same_pair, shape_of


class DinoV2(Family):
    """DINOv2: LayerScale, SwiGLU in the giant; the classifier reads the class token and the mean of the patches."""

    model_type = "dinov2"
    title = "Dinov2"
    norms = ("norm1", "norm2")
    gammas = ("layer_scale1.lambda1", "layer_scale2.lambda1")
    defaults: Mapping[str, Any] = dict(layer_norm_eps=1e-6, patch_size=14, layerscale_value=1.0)
    checked: Mapping[str, str] = {}
    registers = False

    def own(self, archive: Archive, layout: Layout, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.own`."""
        both = "classifier.weight" in archive or layout.architecture == self.classifier
        values: dict[str, Any] = dict(
            classes=rows(archive, "classifier.weight"),
            pool="cls+gap" if both else "cls",
            layer_scale=float(settings["layerscale_value"]),
            mlp="swiglu" if self._gated(archive, layout) else "gelu",
        )
        if self.registers:
            values["registers"] = shape_of(archive, f"{layout.prefix}embeddings.register_tokens", 3)[1]
        return values

    def _gated(self, archive: Archive, layout: Layout) -> int:
        """Hidden width of SwiGLU in the first block, 0 where it has an ordinary MLP."""
        mlp = f"{self.layers(layout)}.0.mlp"
        return (
            rows(archive, f"{mlp}.weights_in.weight") // 2 if layout.disk else rows(archive, f"{mlp}.gate_proj.weight")
        )

    def mlp_dim(self, archive: Archive, layout: Layout) -> int:
        """See `Family.mlp_dim`."""
        return self._gated(archive, layout) or super().mlp_dim(archive, layout)

    def preprocess(self, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Family.preprocess`: published for 518 px, used at 224."""
        size = image_size if 224 % patch else (224, 224)
        return Preprocess(size, "small", 0.875, "bicubic"), IMAGENET

    def refusal(self, config: ViTConfig) -> str:
        """See `Family.refusal`."""
        if config.layer_scale is None:
            return f"{self.bare} has LayerScale, and this model has none"
        if config.pool == "cls" and config.classes:
            return f"the classifier of {self.classifier} reads the class token and the mean of the patches"
        if mlp_ratio(config) is None:
            return f"{self.bare} has MLPs of a whole multiple of the width, which {config.mlp_dim} is not"
        checks = {
            "distillation token": config.distilled,
            "registers": bool(config.registers) and not self.registers,
            "positions of registers": bool(config.registers) and config.register_positions,
            "pre-logits layer": bool(config.pre_logits),
            f"{config.positions} positions": config.positions != "1d",
            f"pooling by {config.pool!r}": config.pool == "gap",
            "LayerNorm after pooling": config.pool == "cls+gap" and config.final_norm == "pooled",
        }
        found = [what for what, there in checks.items() if there]
        return f"{self.bare} has no {found[0]}" if found else ""

    def has_head(self, config: ViTConfig) -> bool:
        """See `Family.has_head`."""
        return config.pool == "cls+gap"

    def json(self, config: ViTConfig, layout: Layout) -> dict[str, Any]:
        """See `Family.json`."""
        values: dict[str, Any] = dict(
            mlp_ratio=mlp_ratio(config),
            qkv_bias=layout.qkv_bias,
            use_swiglu_ffn=config.mlp == "swiglu",
            layerscale_value=config.layer_scale,
        )
        return values | (dict(num_register_tokens=config.registers) if self.registers else dict(use_mask_token=True))

    def invented(self, config: ViTConfig, layout: Layout) -> dict[str, Tensor]:
        """See `Family.invented`: the mask token of pre-training, at the zeros it starts from."""
        return {f"{layout.prefix}embeddings.mask_token": torch.zeros(1, config.width)}

    def layers(self, layout: Layout) -> str:
        """See `Family.layers`."""
        return f"{layout.prefix}encoder.layer"

    def parts(self, layout: Layout) -> dict[str, str]:
        """See `Family.parts`."""
        return {**super().parts(layout), "fc1": "mlp.fc1", "fc2": "mlp.fc2"}

    def mlp(self, config: ViTConfig, layout: Layout, ours: str, theirs: str) -> list[Conversion]:
        """See `Family.mlp`."""
        if config.mlp != "swiglu":
            return super().mlp(config, layout, ours, theirs)
        if layout.disk:
            return [
                *same_pair(f"{ours}.fc1", f"{theirs}.mlp.weights_in"),
                *same_pair(f"{ours}.fc2", f"{theirs}.mlp.weights_out"),
            ]
        gate, up = f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"
        both = [joined(f"{ours}.fc1.{kind}", (f"{gate}.{kind}", f"{up}.{kind}")) for kind in ("weight", "bias")]
        return [*both, *same_pair(f"{ours}.fc2", f"{theirs}.mlp.down_proj")]


class DinoV2WithRegisters(DinoV2):
    """DINOv2 with registers, which have no positions; it alone resamples its positions with antialiasing."""

    model_type = "dinov2_with_registers"
    title = "Dinov2WithRegisters"
    defaults: Mapping[str, Any] = dict(layer_norm_eps=1e-6, patch_size=16, layerscale_value=1.0)
    resize_mode = "timm"  # the same: bicubic, antialiased, in float32
    registers = True

    def tokens(self, config: ViTConfig, embeddings: str) -> list[Conversion]:
        """See `Family.tokens`."""
        return [same("registers", f"{embeddings}.register_tokens")] if config.registers else []


def mlp_ratio(config: ViTConfig) -> int | None:
    """The `mlp_ratio` that gives a config's MLPs: of SwiGLU two thirds, rounded up to 8. None where none does."""
    for ratio in range(1, 65):
        hidden = ratio * config.width
        if config.mlp == "swiglu":
            hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        if hidden == config.mlp_dim:
            return ratio
    return None
