"""`Family`: one kind of vision encoder in transformers. The class itself is the plain ViT; the others differ from it.

Reading (`own`, `mlp_dim`, `final_norm`) infers a model from an archive. Writing (`refusal`, `layout`, `json`) states
how transformers would describe a model. `conversions` serves both, so a file that was read can be written back.

transformers 5 renamed most modules, but still reads and writes the names of version 4 (`Layout`):

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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ResizeMode, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.mapping import Conversion, joined, rows, same, same_pair, shape_of, square_side

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

IMAGENET: Statistics = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF: Statistics = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


STEM = "embeddings.patch_embeddings.projection"

DISK = {
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "out": "attention.output.dense",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
}
MEMORY = {
    "query": "attention.q_proj",
    "key": "attention.k_proj",
    "value": "attention.v_proj",
    "out": "attention.o_proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}


@dataclass(frozen=True)
class Layout:
    """Naming of the tensors in one file, as far as the model's config does not determine it."""

    model_type: str
    """`model_type` of config.json: the family."""
    architecture: str
    """Name of the class in transformers."""
    prefix: str = ""
    """Prefix of the encoder's names: "vit." if the model has a head."""
    disk: bool = True
    """Whether the names are those of files, or else those of modules since 5.0."""
    norm: str = "layernorm"
    """Full name of the LayerNorm after the last block."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias."""


def refusal_of_all(config: ViTConfig) -> str:
    """Return why no encoder of transformers can express a config, "" if one may."""
    learned = config.positions == "1d"
    checks = {
        f"transformers' encoders have linear stems, not {config.stem}": config.stem != "linear",
        f"transformers' encoders have no {config.block} blocks": config.block != "sequential",
        "transformers' encoders have no attention pooling": config.pool == "map",
        "every encoder of transformers has a class token": not config.has_class_token,
        "transformers adds positions at the input only": learned and config.place != "input",
        "in transformers the class token has a position of its own": learned and not config.cls_position,
        f"transformers has no {config.positions} positions": config.positions in ("2d", "relative", "sincos"),
    }
    return next((reason for reason, there in checks.items() if there), "")


class Family:
    """The plain ViT. An unused pooler is read as the pre-logits layer of pre-training (paper, 3.1)."""

    model_type = "vit"
    title = "ViT"
    """Start of the names of its classes in transformers."""
    norms = ("layernorm_before", "layernorm_after")
    gammas = ("", "")
    """Names of the LayerScale of attention and MLP, in families that have it."""
    front = 1
    """Number of rows of the position table before the grid's."""
    defaults: Mapping[str, Any] = dict(layer_norm_eps=1e-12, patch_size=16, pooler_act="tanh")
    """transformers' defaults for missing entries of config.json that differ between families."""
    checked: Mapping[str, str] = {"intermediate_size": "mlp_dim"}
    """Entry of config.json -> field of ViTConfig that it must agree with."""
    resize_mode: ResizeMode = "hf"
    remarks: tuple[str, ...] = ()
    """Notes for the load report of every model of the family."""
    unused: tuple[tuple[str, str], ...] = (
        (r"(\w+\.)?embeddings\.mask_token", "mask token of masked pre-training"),
        (r"(\w+\.)?pooler\.dense\.\w+", "the classifier reads the class token, not the pooler"),
        (r"decoder\..*", "decoder of masked pre-training"),
    )
    """(pattern of names that the model does not use, reason)."""

    @property
    def prefix(self) -> str:
        """Prefix of every name in a model with a head."""
        return f"{self.model_type}."

    @property
    def bare(self) -> str:
        """Name of its class without a head, in transformers."""
        return f"{self.title}Model"

    @property
    def classifier(self) -> str:
        """Name of its class with a classifier, in transformers; "" if there is none."""
        return f"{self.title}ForImageClassification"

    # reading

    def own(self, archive: Archive, layout: Layout, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ViTConfig that are specific to this family. Raises WeightsError."""
        classes = rows(archive, "classifier.weight")
        return dict(classes=classes, pre_logits=None if classes else pooler(archive, layout, settings))

    def mlp_dim(self, archive: Archive, layout: Layout) -> int:
        """Return the hidden width of the MLPs."""
        return rows(archive, f"{self.layers(layout)}.0.{self.parts(layout)['fc1']}.weight")

    def final_norm(self, archive: Archive, prefix: str) -> str:
        """Return the full name of the LayerNorm after the last block."""
        return f"{prefix}layernorm"

    def side(self, archive: Archive, layout: Layout) -> int:
        """Return the side of the square grid that the positions are for."""
        name = f"{layout.prefix}embeddings.position_embeddings"
        return square_side(archive, name, shape_of(archive, name, 3)[1] - self.front)

    def preprocess(self, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """Return preprocessing, mean and std of this family's published models."""
        return Preprocess(image_size, "squash"), HALF

    # writing

    def refusal(self, config: ViTConfig) -> str:
        """Return why this family cannot express a config, "" if it can; call `refusal_of_all` first."""
        return self.lacks(
            config,
            {
                "distillation token": config.distilled,
                "registers": bool(config.registers),
                "LayerScale": config.layer_scale is not None,
                "pre-logits layer in front of a classifier": bool(config.pre_logits and config.classes),
            },
        )

    def lacks(self, config: ViTConfig, checks: Mapping[str, bool]) -> str:
        """Return a sentence about the first check that is true, or about a part that only few families have."""
        rare = {
            f"{config.mlp} MLP": config.mlp != "gelu",
            f"{config.positions} positions": config.positions != "1d",
            f"pooling by {config.pool!r}": config.pool != "cls",
        }
        found = [what for what, there in {**checks, **rare}.items() if there]
        return f"{self.bare} has no {found[0]}" if found else ""

    def layout(self, config: ViTConfig) -> Layout:
        """Return the names under which transformers would save such a model."""
        headed = self.has_head(config)
        prefix = self.prefix if headed else ""
        norm = f"{prefix}{self.norm_within(config)}"
        return Layout(self.model_type, self.classifier if headed else self.bare, prefix, norm=norm)

    def has_head(self, config: ViTConfig) -> bool:
        """Return whether its class in transformers has a head."""
        return bool(config.classes)

    def norm_within(self, config: ViTConfig) -> str:
        """Return the name of the last LayerNorm within the encoder."""
        return "layernorm"

    def json(self, config: ViTConfig, layout: Layout) -> dict[str, Any]:
        """Return the entries of config.json that are specific to this family."""
        values: dict[str, Any] = dict(intermediate_size=config.mlp_dim, qkv_bias=layout.qkv_bias)
        if config.pre_logits:
            values |= dict(pooler_output_size=config.pre_logits, pooler_act="tanh")
        return values

    def invented(self, config: ViTConfig, layout: Layout) -> dict[str, Tensor]:
        """Return tensors that transformers requires and no prediction depends on."""
        return {}

    # both

    def layers(self, layout: Layout) -> str:
        """Return the name of the list of blocks."""
        return f"{layout.prefix}encoder.layer" if layout.disk else f"{layout.prefix}layers"

    def parts(self, layout: Layout) -> dict[str, str]:
        """Return the names of query, key, value, out, fc1 and fc2 within a block."""
        return DISK if layout.disk else MEMORY

    def conversions(self, config: ViTConfig, layout: Layout) -> list[Conversion]:
        """Return the conversions of all tensors."""
        embeddings = f"{layout.prefix}embeddings"
        conversions = [*same_pair("stem", f"{layout.prefix}{STEM}"), same("cls", f"{embeddings}.cls_token")]
        conversions += self.tokens(config, embeddings)
        conversions += self.positions(config, layout)
        for layer in range(config.depth):
            conversions += self.block(config, layout, layer)
        conversions += same_pair("norm", layout.norm)
        if config.pre_logits:
            conversions += same_pair("pre_logits.hidden", f"{layout.prefix}pooler.dense")
        return conversions + (self.heads(config) if config.classes else [])

    def tokens(self, config: ViTConfig, embeddings: str) -> list[Conversion]:
        """Return the conversions of tokens in front of the grid, other than the class token."""
        return []

    def positions(self, config: ViTConfig, layout: Layout) -> list[Conversion]:
        """Return the conversions of the position tables."""
        return [same("positions.embedding", f"{layout.prefix}embeddings.position_embeddings")]

    def heads(self, config: ViTConfig) -> list[Conversion]:
        """Return the conversions of the classifiers."""
        return same_pair("head", "classifier")

    def block(self, config: ViTConfig, layout: Layout, layer: int) -> list[Conversion]:
        """Return the conversions of one encoder layer."""
        theirs, part = f"{self.layers(layout)}.{layer}", self.parts(layout)
        attention, mlp = f"blocks.{layer}.attentions.0", f"blocks.{layer}.mlps.0"
        conversions = [
            *same_pair(f"{attention}.norm", f"{theirs}.{self.norms[0]}"),
            *self.qkv(f"{attention}.attention.qkv", theirs, layout),
            *same_pair(f"{attention}.attention.out", f"{theirs}.{part['out']}"),
            *same_pair(f"{mlp}.norm", f"{theirs}.{self.norms[1]}"),
            *self.mlp(config, layout, f"{mlp}.mlp", theirs),
        ]
        if config.layer_scale is not None:
            conversions.append(same(f"{attention}.residual.gamma", f"{theirs}.{self.gammas[0]}"))
            conversions.append(same(f"{mlp}.residual.gamma", f"{theirs}.{self.gammas[1]}"))
        return conversions

    def qkv(self, ours: str, theirs: str, layout: Layout) -> list[Conversion]:
        """Return the conversions of queries, keys and values."""
        names = [f"{theirs}.{self.parts(layout)[part]}" for part in ("query", "key", "value")]
        kinds = ("weight", "bias") if layout.qkv_bias else ("weight",)
        return [joined(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in names)) for kind in kinds]

    def mlp(self, config: ViTConfig, layout: Layout, ours: str, theirs: str) -> list[Conversion]:
        """Return the conversions of the two dense layers of an MLP."""
        part = self.parts(layout)
        return [entry for fc in ("fc1", "fc2") for entry in same_pair(f"{ours}.{fc}", f"{theirs}.{part[fc]}")]


def pooler(archive: Archive, layout: Layout, settings: Mapping[str, Any]) -> int | None:
    """Return the width of a pooler (the pre-logits layer of a model without a head), or None."""
    name = f"{layout.prefix}pooler.dense.weight"
    if name not in archive:
        return None
    if settings["pooler_act"] != "tanh":
        raise WeightsError(f"{archive.path} has a pooler with {settings['pooler_act']}; pre-logits here have tanh")
    return rows(archive, name)
