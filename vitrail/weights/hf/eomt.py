"""transformers' EoMT: a DINOv2 or a DINOv3 whose head are queries (`vitrail.model.queries`).

The names of files are those of modules. A file holds, for each of the last blocks, the share of the queries that attend
to their own mask alone at the end of training. It must be 0, to which training anneals it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.queries import upscalings
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.encoder import OUTSIDE, Encoder, apart
from vitrail.weights.hf.families import DinoV2, DinoV3, mlp_ratio
from vitrail.weights.mapping import NameTable, count, row_count, shape_of, unbatched, within
from vitrail.words import shown

SHARES = "attn_mask_probs"
"""Share of the queries of each block that attend to their own mask alone."""
QUERIES: NameTable = {
    "tokens": unbatched("query.weight"),
    "classify.{part}": "class_predictor.{part}",
    "mask.0.{part}": "mask_head.fc1.{part}",
    "mask.1.{part}": "mask_head.fc2.{part}",
    "mask.2.{part}": "mask_head.fc3.{part}",
    "upscale.{unit}.up.{part}": "upscale_block.block.{unit}.conv1.{part}",
    "upscale.{unit}.mix.{part}": "upscale_block.block.{unit}.conv2.{part}",
    "upscale.{unit}.norm.{part}": "upscale_block.block.{unit}.layernorm2d.{part}",
}
"""The queries and what they predict from."""
FRAME: NameTable = {ours: theirs for ours, theirs in OUTSIDE.items() if not ours.startswith("head.")}
PIECES = ("images are squashed to the network's input; transformers pads them or cuts them into pieces",)


FIELDS = {"num_register_tokens": "registers", "num_queries": "queries", "num_blocks": "query_blocks"}
NO_OBJECT = 0.1
"""Weight of "no object" in the loss."""


class _Queried(Encoder):
    """What both kinds of EoMT have."""

    headed = "eomt."
    in_memory: ClassVar[NameTable] = {}
    lists = ("layers", "layers")
    norm_name = "layernorm"
    mask_axes = 0
    remarks: ClassVar[tuple[str, ...]] = PIECES
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        (SHARES, "the share of masked attention, which is 0 at the end of training"),
        (r"criterion\.empty_weight", "the weights of the classes in the loss"),
    )

    @classmethod
    def bare(cls) -> str:
        """See `Encoder.bare`: there is one class."""
        return f"{cls.title}ForUniversalSegmentation"

    @classmethod
    def classifier(cls) -> str:
        """See `Encoder.classifier`."""
        return cls.bare()

    @classmethod
    def of_model(cls, config: ViTConfig) -> Encoder:
        """See `Encoder.of_model`."""
        return cls(cls.bare(), disk=False)

    @classmethod
    def processor(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.processor`."""
        return {name: value for name, value in values.items() if name != "size"}

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        (blocks,) = shape_of(archive, SHARES, 1)
        if archive[SHARES].any():
            raise WeightsError(
                f"{archive.path}: {SHARES} is not 0, so the network masks attention in predictions, too, which vitrail "
                "does only in training. Train it with annealed masks"
            )
        if (act := settings["hidden_act"]) != "gelu":  # that of the masks' MLP, too
            raise WeightsError(f"{archive.path}: hidden_act of config.json is {shown(act)}; valid for EoMT: gelu")
        expected = upscalings(self.stem_sizes(archive, settings)[2])
        if (found := count(archive, "upscale_block.block.")) != expected:
            raise WeightsError(
                f"{archive.path} scales masks up {found} times, and vitrail {expected} times with patches of this size"
            )
        queries = dict(segmentation="queries", queries=row_count(archive, "query.weight"), query_blocks=blocks)
        classes = row_count(archive, "class_predictor.weight") - 1  # the last one is "no object"
        return {**super().own(archive, settings), **queries, "classes": classes, "pool": "cls"}

    @classmethod
    def has_head(cls, config: ViTConfig) -> bool:
        """See `Encoder.has_head`."""
        return True

    def required(self, config: ViTConfig) -> dict[str, Tensor]:
        """See `Encoder.required`."""
        weights = torch.tensor([1.0] * config.classes + [NO_OBJECT])
        return {SHARES: torch.zeros(config.query_blocks), "criterion.empty_weight": weights}

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return {**super().json(config), "num_upscale_blocks": upscalings(config.patch)}


class Eomt(_Queried, DinoV2):
    """EoMT with a DINOv2, whose class token and registers have no position."""

    model_type = "eomt"
    title = "Eomt"
    outside: ClassVar[NameTable] = {
        **FRAME,
        "registers": "embeddings.register_tokens",
        "positions.embedding": unbatched("embeddings.position_embeddings.weight"),
        **within("head.", "", QUERIES),
    }
    block: ClassVar[NameTable] = {
        **DinoV2.block,
        **apart("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attentions.0.attention.out.{part}": "attention.out_proj.{part}",
    }
    disk_sign = "layers.0.mlp.weights_in.weight"  # transformers 4
    front = 0
    table_axes = 2
    has = "oblong registers layer_scale mlp=swiglu cls_position segmentation=queries"
    needs = "layer_scale cls_position segmentation=queries"
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-6, patch_size=16, layerscale_value=1.0)
    fields: ClassVar[Mapping[str, str]] = {**DinoV2.fields, **FIELDS}
    constants: ClassVar[Mapping[str, Any]] = {}
    processing: ClassVar[Mapping[str, Any]] = dict(resize="squash")
    resize_mode = "timm"

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        return {**super().own(archive, settings), "cls_position": False}

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> Preprocess:
        """See `Encoder.preprocess`."""
        return Encoder.preprocess.__func__(cls, image_size, patch)  # type: ignore[attr-defined]

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        whole = f"has MLPs of a whole multiple of the width, which {config.mlp_dim} is not"
        return {"has registers": not config.registers, whole: mlp_ratio(config) is None}


class EomtDinoV3(_Queried, DinoV3):
    """EoMT with a DINOv3."""

    model_type = "eomt_dinov3"
    title = "EomtDinov3"
    outside: ClassVar[NameTable] = {
        **FRAME,
        "stem.{part}": "embeddings.patch_embeddings.{part}",
        "registers": "embeddings.register_tokens",
        **within("head.", "", QUERIES),
    }
    swiglu: ClassVar[NameTable] = {}
    has = "oblong registers layer_scale positions=none rotary segmentation=queries"
    needs = f"{DinoV3.needs} segmentation=queries"
    defaults: ClassVar[Mapping[str, Any]] = {**DinoV3.defaults, "layer_norm_eps": 1e-6}
    fields: ClassVar[Mapping[str, str]] = {**DinoV3.fields, **FIELDS}
    remarks = (*DinoV3.remarks, *PIECES)  # type: ignore[assignment]

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        rope = settings.get("rope_parameters")
        return super().own(archive, {**settings, **(rope if isinstance(rope, Mapping) else {})})

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        values = super().json(config)
        return {**values, "rope_parameters": dict(rope_theta=values.pop("rope_theta"), rope_type="default")}
