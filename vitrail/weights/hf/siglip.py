"""The image towers of SigLIP and SigLIP 2 in transformers, alone or in a whole model.

The names are those of CLIP (`clip.py`), without class token, `pre_layrnorm` and projection, and

| theirs | ours |
|---|---|
| `head.probe`, `head.layernorm`, `head.mlp` | `pool.probe`, `pool.norm`, `pool.mlp` |
| `head.attention.in_proj_{weight,bias}`: queries, keys, values | `pool.query`, then `pool.key_value` |
| `head.attention.out_proj` | `pool.out` |
| SigLIP 2 (NaFlex): `embeddings.patch_embedding.weight` (D, p * p * C) | `stem.weight` (D, C, p, p) |

The released SigLIP 2 weights of one resolution are of SigLIP's class. NaFlex weights take images of any aspect ratio;
here their images are resized to a square as large as the table of positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.clip import Clip
from vitrail.weights.hf.encoder import HALF, Statistics
from vitrail.weights.mapping import Conversion, number_in, rows, same, same_pair, shape_of


class Siglip(Clip):
    """SigLIP's image tower. Its classifier reads the mean of the patches, and without one the probe pools them."""

    model_type = "siglip_vision_model"
    whole = "siglip"
    title = "SiglipVision"
    front = 0
    expresses = frozenset({"network without a class token", "pooling by 'gap'", "pooling by 'map'"})
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-6, patch_size=16, hidden_act="gelu_pytorch_tanh")
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        *Clip.unused[:2],
        (r"(vision_model\.)?head\..*", "the attention pooling, which the classifier replaces"),
    )

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        classes, probed = rows(archive, "classifier.weight"), f"{self.prefix}head.probe" in archive
        return dict(classes=classes, pool="map" if probed and not classes else "gap", class_token=False)

    def absent(self, config: ViTConfig) -> dict[str, str]:
        """See `Encoder.absent`."""
        return {}

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Encoder.preprocess`."""
        return Preprocess(image_size, "squash", interpolation="bicubic"), HALF

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        if config.has_class_token:
            return f"{cls.bare()} has no class token"
        if config.grid[0] != config.grid[1]:
            return f"{cls.bare()} has a square table of positions"
        if config.classes and config.pool == "map":
            return f"the classifier of {cls.classifier()} reads the mean of the patches"
        if config.final_norm == "pooled":
            return f"{cls.bare()} normalises the patches, not what is pooled"
        return super(Clip, cls).refusal(config)

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return dict(vision_use_head=config.pool == "map")

    def written(self, config: ViTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Encoder.written`."""
        return state

    def conversions(self, config: ViTConfig) -> list[Conversion]:
        """See `Encoder.conversions`."""
        pool = self._pool(f"{self.prefix}head", config.width) if config.pool == "map" else []
        return super().conversions(config) + pool

    def patches(self, config: ViTConfig, stem: str) -> list[Conversion]:
        """See `Clip.patches`."""
        return same_pair("stem", stem)

    def tokens(self, config: ViTConfig, embeddings: str) -> list[Conversion]:
        """See `Encoder.tokens`."""
        return []

    def _pool(self, head: str, width: int) -> list[Conversion]:
        """Return the conversions of the attention pooling, where torch joins queries, keys and values."""
        joint = f"{head}.attention.in_proj_"
        conversions = [same("pool.probe", f"{head}.probe"), *same_pair("pool.out", f"{head}.attention.out_proj")]
        for kind in ("weight", "bias"):
            conversions += [
                Conversion(f"pool.query.{kind}", (joint + kind,), lambda both: both[:width], lambda part: (part,)),
                Conversion(f"pool.key_value.{kind}", (joint + kind,), lambda both: both[width:], lambda part: (part,)),
            ]
        names = {"norm": "layernorm", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
        return conversions + [
            entry for ours, theirs in names.items() for entry in same_pair(f"pool.{ours}", f"{head}.{theirs}")
        ]


class Siglip2(Siglip):
    """SigLIP 2's image tower for any aspect ratio (NaFlex), whose patch embedding is a dense layer."""

    model_type = "siglip2_vision_model"
    whole = "siglip2"
    title = "Siglip2Vision"
    resize_mode = "naflex"
    remarks = ("square images; transformers keeps their aspect ratio, up to a number of patches",)
    defaults: ClassVar[Mapping[str, Any]] = {**Siglip.defaults, "num_channels": 3}

    def stem_sizes(self, archive: Archive, settings: Mapping[str, Any]) -> tuple[int, int, int]:
        """See `Encoder.stem_sizes`."""
        name, where = f"{self.prefix}{self.stem}.weight", f"{archive.path}, config.json"
        width, values = shape_of(archive, name, 2)
        channels, patch = (int(number_in(settings, entry, where)) for entry in ("num_channels", "patch_size"))
        if patch < 1 or channels * patch * patch != values:
            raise WeightsError(
                f"{archive.path}: {name!r} has {values} inputs, which are not {channels} channels of {patch} x {patch} "
                "pixels (config.json)"
            )
        return width, channels, patch

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        if config.resize_mode != "naflex":
            return f"{cls.bare()} resamples positions by 'naflex', not {config.resize_mode!r}"
        return super().refusal(config)

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return super().json(config) | dict(num_patches=config.grid[0] * config.grid[1])

    def patches(self, config: ViTConfig, stem: str) -> list[Conversion]:
        """See `Clip.patches`: a row of the dense layer is [row, column, channel]."""
        channels, patch = config.channels, config.patch

        def read(flat: Tensor) -> Tensor:
            return flat.reshape(-1, patch, patch, channels).permute(0, 3, 1, 2)

        def write(kernel: Tensor) -> tuple[Tensor, ...]:
            return (kernel.permute(0, 2, 3, 1).flatten(1),)

        return [Conversion("stem.weight", (f"{stem}.weight",), read, write), same("stem.bias", f"{stem}.bias")]
