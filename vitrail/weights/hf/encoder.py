"""`Encoder`: a vision encoder of transformers and the names of its tensors in one file.

The class itself is the plain ViT; its subclasses are the other encoders.

Reading infers a model from the tensors (`own`, `side`). Writing states how transformers would describe a model
(`reasons`, `of_model`, `json`). The tables of names serve both, so a file that was read can be written back.

transformers 5 renamed most modules, but still reads and writes the names of version 4 (`Encoder.disk`):

| | on disk | in memory since 5.0 |
|---|---|---|
| layer | `encoder.layer.0.` | `layers.0.` (DINOv2: as on disk) |
| query, key, value | `attention.attention.query` | `attention.q_proj` |
| output projection | `attention.output.dense` | `attention.o_proj` |
| MLP | `intermediate.dense`, `output.dense` | `mlp.fc1`, `mlp.fc2` |

A folder has the names on disk, a bare `state_dict()` those in memory. A model with a head prefixes the encoder's
tensors with the encoder's name (`vit.embeddings...`); a bare encoder does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.limits import ResizeMode
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.mapping import (
    Conversion,
    NameTable,
    Rule,
    apply_table,
    grid_of,
    joined,
    qkv_biases,
    row_count,
    shape_of,
    stem_sizes,
    within,
    without_key_bias,
)
from vitrail.weights.parts import first_reason, lacking, without_place
from vitrail.words import shown

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

HALF: Statistics = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

GATED = ViTConfig.of(mlp="swiglu")
"""A config whose MLPs have a gate."""
EVERY_HAS = "gelu norm_eps"
"""The parts in `vitrail.weights.parts` that every encoder has."""
STEM = "embeddings.patch_embeddings.projection"
QKV = "attentions.0.attention.qkv"


def apart(query: str, key: str, value: str) -> dict[str, str | Rule]:
    """Return the rows of queries, keys and values in layers of their own."""
    names = (query, key, value)
    return {f"{QKV}.{kind}": joined(*(f"{name}.{kind}" for name in names)) for kind in ("weight", "bias")}


def keyless(query: str, value: str) -> dict[str, str | Rule]:
    """Return the row of the bias of queries, keys and values in encoders whose keys have none."""
    return {f"{QKV}.bias": without_key_bias(f"{query}.bias", f"{value}.bias")}


def gated(gate: str, up: str, down: str) -> dict[str, str | Rule]:
    """Return the rows of an MLP with a gate."""
    return {
        "mlps.0.mlp.fc1.{part}": joined(f"{gate}.{{part}}", f"{up}.{{part}}"),
        "mlps.0.mlp.fc2.{part}": f"{down}.{{part}}",
    }


OUTSIDE: NameTable = {
    "stem.{part}": f"{{prefix}}{STEM}.{{part}}",
    "cls": "{prefix}embeddings.cls_token",
    "positions.embedding": "{prefix}embeddings.position_embeddings",
    "norm.{part}": "{norm}.{part}",
    "pre_logits.hidden.{part}": "{prefix}pooler.dense.{part}",
    "head.{part}": "classifier.{part}",
}
"""Everything but the blocks, for the plain ViT."""
BLOCK: NameTable = {
    "attentions.0.norm.{part}": "layernorm_before.{part}",
    **apart("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    "attentions.0.attention.out.{part}": "attention.output.dense.{part}",
    "mlps.0.norm.{part}": "layernorm_after.{part}",
    "mlps.0.mlp.fc1.{part}": "intermediate.dense.{part}",
    "mlps.0.mlp.fc2.{part}": "output.dense.{part}",
}
"""A block of the plain ViT on disk."""
IN_MEMORY: NameTable = {
    **apart("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attentions.0.attention.out.{part}": "attention.o_proj.{part}",
    "mlps.0.mlp.fc1.{part}": "mlp.fc1.{part}",
    "mlps.0.mlp.fc2.{part}": "mlp.fc2.{part}",
}
"""The rows of a block that are otherwise in memory."""


@dataclass(frozen=True)
class Encoder:
    """The plain ViT. An unused pooler is read as the pre-logits layer of pre-training (paper, 3.1).

    The fields are what the model's config does not determine about the names in a file.
    """

    architecture: str
    """Name of the class in transformers."""
    prefix: str = ""
    """Prefix of the encoder's names: "vit." if the model has a head."""
    disk: bool = True
    """Whether the names are those of files; otherwise they are those of modules since 5.0."""
    norm: str = "layernorm"
    """Full name of the LayerNorm after the last block."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias."""
    mlp_bias: bool = True
    """Whether the MLPs have a bias."""
    loose: bool = False
    """Whether the names of the blocks lack the prefix: transformers 5.23 saves ViT-MSN so."""

    model_type: ClassVar[str] = "vit"
    """`model_type` in config.json."""
    title: ClassVar[str] = "ViT"
    """Start of the names of its classes in transformers."""
    classifies: ClassVar[bool] = True
    """Whether transformers has a class of it with a classifier."""
    headed: ClassVar[str] = "vit."
    """Prefix of every name in a model with a head."""
    stem: ClassVar[str] = STEM
    """Name of the patch embedding, without the prefix."""
    outside: ClassVar[NameTable] = OUTSIDE
    block: ClassVar[NameTable] = BLOCK
    """Names in a block on disk."""
    in_memory: ClassVar[NameTable] = IN_MEMORY
    """The rows of `block` that are otherwise in memory."""
    swiglu: ClassVar[NameTable] = {}
    """The rows of a block that are otherwise if its MLP has a gate; those of `swiglu_in_memory` in memory."""
    swiglu_in_memory: ClassVar[NameTable] = {}
    silu: ClassVar[bool] = False
    """Whether `hidden_act` in config.json is the gate's if the MLPs have one."""
    lists: ClassVar[tuple[str, str]] = ("encoder.layer", "layers")
    """Name of the list of blocks on disk, and in memory."""
    disk_sign: ClassVar[str] = "encoder.layer.0.attention.attention.query.weight"
    """A tensor that only a file with the names of files has."""
    norm_name: ClassVar[str] = "layernorm"
    """Name of the LayerNorm after the last block, without the prefix."""
    front: ClassVar[int] = 1
    """Number of rows of the position table before the grid's."""
    table_axes: ClassVar[int] = 3
    """Number of axes of the position table."""
    has: ClassVar[str] = "oblong pooled_norm pre_logits"
    """The parts in `vitrail.weights.parts` that it may have, besides `EVERY_HAS`."""
    needs: ClassVar[str] = ""
    """Those that it always has."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Fields of ViTConfig that are the same for every model."""
    eps_name: ClassVar[str] = "layer_norm_eps"
    """Name of the epsilon of the norms in config.json."""
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-12, patch_size=16, pooler_act="tanh")
    """transformers' defaults for missing entries of config.json that differ between encoders."""
    fields: ClassVar[Mapping[str, str]] = {"intermediate_size": "mlp_dim"}
    """Entry of config.json -> field of ViTConfig with the same value, for entries that not all encoders have."""
    mask_axes: ClassVar[int] = 0
    """Number of axes of the mask token of pre-training, 0 if there need not be one."""
    constants: ClassVar[Mapping[str, Any]] = {}
    """Entries of config.json that are the same for every model."""
    processing: ClassVar[Mapping[str, Any]] = dict(resize="squash")
    """Fields of `Preprocess` for the published models."""
    statistics: ClassVar[Statistics] = HALF
    """Mean and std of the published models."""
    head_features: ClassVar[Mapping[int, int]] = {}
    """Width -> features of a head, if there is no config.json (`vitrail.weights.mapping.usual_heads`)."""
    resize_mode: ClassVar[ResizeMode] = "hf"
    remarks: ClassVar[tuple[str, ...]] = ()
    """Notes for the load report of every such model."""
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"(\w+\.)?embeddings\.mask_token", "mask token of masked pre-training"),
        (r"(\w+\.)?pooler\.dense\.\w+", "the classifier reads the class token, not the pooler"),
        (r"decoder\..*", "decoder of masked pre-training"),
    )
    """(pattern of names that the model does not use, reason)."""

    @classmethod
    def bare(cls) -> str:
        """Return the name of its class without a head, in transformers."""
        return f"{cls.title}Model"

    @classmethod
    def classifier(cls) -> str:
        """Return the name of its class with a classifier, in transformers; "" if there is none."""
        return f"{cls.title}ForImageClassification" if cls.classifies else ""

    # reading

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ViTConfig that are specific to this encoder. Raises WeightsError."""
        values = {**self.fixed, "classes": row_count(archive, "classifier.weight") if self.classifies else 0}
        if self.swiglu:
            values["mlp"] = "swiglu" if self.gated(archive) else "gelu"
        if "registers" in self.has.split():
            values["registers"] = shape_of(archive, self.theirs("registers"), 3)[1]
        if "pre_logits" in self.has.split() and not values["classes"]:
            values["pre_logits"] = row_count(archive, f"{self.prefix}pooler.dense.weight") or None
        if values.get("pre_logits") and settings["pooler_act"] != "tanh":
            raise WeightsError(
                f"{archive.path} has a pooler with {shown(settings['pooler_act'])} (pooler_act of config.json); "
                "vitrail's pre-logits layer has tanh"
            )
        return values

    def mlp_dim(self, archive: Archive) -> int:
        """Return the hidden width of the MLPs: the number of inputs of their second layer."""
        config = GATED if self.gated(archive) else None
        return shape_of(archive, self.theirs("blocks.0.mlps.0.mlp.fc2.weight", config), 2)[1]

    def gated(self, archive: Archive) -> bool:
        """Return whether the MLPs have a gate."""
        return bool(self.swiglu) and self.theirs("blocks.0.mlps.0.mlp.fc1.weight", GATED) in archive

    def stem_sizes(self, archive: Archive, settings: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return width, channels and patch."""
        return stem_sizes(archive, f"{self.prefix}{self.stem}.weight")

    def activation(self, archive: Archive, settings: Mapping[str, Any]) -> Any:
        """Return the name of the GELU of the MLPs in config.json.

        The gate of SwiGLU is a SiLU, and no GELU is left. Raises WeightsError for another gate in config.json.
        """
        if not (self.silu and self.gated(archive)):
            return settings["hidden_act"]
        if (act := settings["hidden_act"] if archive.config else "silu") != "silu":
            raise WeightsError(f"{archive.path}: hidden_act of config.json is {shown(act)}; valid for gated MLPs: silu")
        return "gelu"

    @classmethod
    def final_norm(cls, archive: Archive, prefix: str) -> str:
        """Return the full name of the LayerNorm after the last block."""
        return f"{prefix}{cls.norm_name}"

    def side(self, archive: Archive) -> int:
        """Return the side of the square grid that the positions are for."""
        name = self.theirs("positions.embedding")
        return grid_of(archive, name, shape_of(archive, name, self.table_axes)[-2], (self.front,))[0][0]

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> Preprocess:
        """Return the preprocessing of the published models."""
        return Preprocess(image_size, **cls.processing)

    @classmethod
    def processor(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of preprocessor_config.json that say what vitrail does."""
        return values

    def absent(self, config: ViTConfig) -> dict[str, str]:
        """Return the model's tensors that are zero because files lack them, and why; `biases` aside."""
        return {}

    # writing

    def written(self, config: ViTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that a file holds. Raises WeightsError for values it cannot hold."""
        return state

    def document(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return config.json with the entries of this encoder."""
        return values

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """Return reason -> whether it is true, for reasons of its own why this encoder cannot express a config.

        A reason says what the encoder is like: "has one token between the class token and the grid".
        """
        return {}

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """Return why this encoder cannot express a config, "" if it can."""
        bare = cls.bare()
        if part := without_place(config, f"{cls.has} {EVERY_HAS}"):
            return f"{bare} has no place for {part}"
        if part := lacking(config, cls.needs):
            return f"{bare} needs {part}"
        headed = config.classes > 0
        reasons = {
            "has no place for a classifier": headed and not cls.classifier(),
            "has no place for a pre-logits layer in front of a classifier": headed and bool(config.pre_logits),
        }
        reason = first_reason({**reasons, **cls.reasons(config)})
        return f"{bare} {reason}" if reason else ""

    @classmethod
    def of_model(cls, config: ViTConfig) -> Encoder:
        """Return the encoder under the names with which transformers would save such a model."""
        headed = cls.has_head(config)
        prefix = cls.headed if headed else ""
        return cls(cls.classifier() if headed else cls.bare(), prefix, norm=f"{prefix}{cls.norm_within(config)}")

    @classmethod
    def has_head(cls, config: ViTConfig) -> bool:
        """Return whether the class of such a model has a head in transformers."""
        return bool(config.classes and cls.classifier())

    @classmethod
    def norm_within(cls, config: ViTConfig) -> str:
        """Return the name of the last LayerNorm without the prefix."""
        return cls.norm_name

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """Return the entries of config.json that are specific to this encoder, besides `fields` and `constants`."""
        values: dict[str, Any] = dict(qkv_bias=self.qkv_bias)
        if config.pre_logits:
            values |= dict(pooler_output_size=config.pre_logits, pooler_act="tanh")
        return values

    def required(self, config: ViTConfig) -> dict[str, Tensor]:
        """Return tensors that transformers requires and no prediction depends on: a mask token at its initial zero."""
        shape = (*(1,) * (self.mask_axes - 1), config.width)
        return {f"{self.prefix}embeddings.mask_token": torch.zeros(shape)} if self.mask_axes else {}

    # both

    @property
    def layers(self) -> str:
        """Name of the list of blocks."""
        return f"{'' if self.loose else self.prefix}{self.lists[0 if self.disk else 1]}"

    def table(self, config: ViTConfig | None = None) -> NameTable:
        """Return the table of names: of a model, or without a config the rows that all such encoders have."""
        swiglu = config is not None and config.origin.mlp == "swiglu"
        block = {**self.block, **(self.swiglu if swiglu else {})}
        if not self.disk:
            block |= {**self.in_memory, **(self.swiglu_in_memory if swiglu else {})}
        return {**self.outside, **within("blocks.{layer}.", "{blocks}.{layer}.", block)}

    def conversions(self, names: Iterable[str], config: ViTConfig | None = None) -> list[Conversion]:
        """Return the conversions of a model's tensors."""
        return apply_table(names, self.table(config), prefix=self.prefix, blocks=self.layers, norm=self.norm)

    def theirs(self, ours: str, config: ViTConfig | None = None) -> str:
        """Return the name in the file of a tensor of the model, of the first if there are several."""
        return self.conversions([ours], config)[0].theirs[0]

    def biases(self, config: ViTConfig) -> dict[str, list[str]]:
        """Return field of the encoder -> names of the model's biases that a file has only if the field is true."""
        return dict(qkv_bias=qkv_biases(config))
