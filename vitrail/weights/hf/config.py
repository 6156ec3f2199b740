"""`config.json` of transformers: read, compared with the shapes of the tensors, and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.errors import WeightsError, did_you_mean
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.hf.family import STEM, Family, Layout
from vitrail.weights.mapping import stem_sizes, usual_heads

ERF = ("gelu", "gelu_python")
TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_python_tanh", "gelu_fast", "gelu_accurate")
COMMON = dict(num_attention_heads=12, hidden_act="gelu")
"""transformers' defaults for missing entries of config.json, for all families."""


def infer(archive: Archive, family: Family, layout: Layout) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of ViTConfig without preprocessing, and the assumptions made. Raises WeightsError."""
    settings = {**COMMON, **family.defaults, **archive.config}
    notes = list(family.remarks)
    width, channels, patch = stem_sizes(archive, f"{layout.prefix}{STEM}.weight")
    values: dict[str, Any] = dict(
        width=width,
        depth=_depth(archive, family, layout),
        mlp_dim=family.mlp_dim(archive, layout),
        patch=patch,
        channels=channels,
        norm_eps=_positive(archive, settings, "layer_norm_eps", float),
        gelu=_gelu(archive, settings["hidden_act"]),
        resize_mode=family.resize_mode,
        image_size=_image_size(archive, family, layout, patch),
        **family.own(archive, layout, settings),
    )
    if archive.config:
        values["heads"] = _positive(archive, settings, "num_attention_heads", int)
    else:
        values["heads"], sentence = usual_heads(archive, width)
        notes.append(
            f"{sentence}, LayerNorm epsilon {values['norm_eps']:g} and GELU by erf, as {family.bare} has by default: "
            "there is no config.json"
        )
    _compare(archive, family, values)
    return values, notes


def _depth(archive: Archive, family: Family, layout: Layout) -> int:
    depth = 0
    while f"{family.layers(layout)}.{depth}.{family.norms[0]}.weight" in archive:
        depth += 1
    if not depth:
        raise WeightsError(f"{archive.path} lacks the tensor '{family.layers(layout)}.0.{family.norms[0]}.weight'")
    return depth


def _image_size(archive: Archive, family: Family, layout: Layout, patch: int) -> tuple[int, int]:
    size = archive.config.get("image_size")
    if size is None:
        side = family.side(archive, layout) * patch
        return side, side
    pair = size if isinstance(size, list) else [size, size]
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise WeightsError(f"{archive.path}: image_size of config.json is {size!r}; valid: one number, or two")
    return pair[0], pair[1]


def _positive(archive: Archive, settings: Mapping[str, Any], name: str, kind: type) -> Any:
    value = settings[name]
    numeric = isinstance(value, int | kind) and not isinstance(value, bool)
    if not numeric or value <= 0:
        raise WeightsError(f"{archive.path}: {name} of config.json is {value!r}; it should be a number above 0")
    return kind(value)


def _gelu(archive: Archive, name: Any) -> str:
    if name in ERF:
        return "erf"
    if name in TANH:
        return "tanh"
    raise WeightsError(
        f"{archive.path}: hidden_act of config.json is {name!r}, which no vitrail model has."
        f"{did_you_mean(str(name), (*ERF, *TANH))} Valid: {', '.join((*ERF, *TANH))}"
    )


def _compare(archive: Archive, family: Family, values: Mapping[str, Any]) -> None:
    """Raise WeightsError if config.json describes another model than the tensors."""
    fields = dict(hidden_size="width", num_hidden_layers="depth", num_channels="channels", patch_size="patch")
    for name, field in {**fields, **family.checked}.items():
        said, found = archive.config.get(name, values[field]), values[field]
        if said not in (found, [found, found]):
            raise WeightsError(f"{archive.path}: config.json says {name} {said!r}, but the tensors are of {found}")


def class_names(archive: Archive, classes: int) -> list[str]:
    """Return the names in `id2label` of config.json, [] if it has only placeholders. Raises WeightsError."""
    labels = archive.config.get("id2label")
    if not classes or not labels:
        return []
    if not isinstance(labels, dict) or set(labels) != {str(index) for index in range(classes)}:
        count = len(labels) if isinstance(labels, dict) else repr(labels)
        raise WeightsError(
            f"{archive.path}: id2label of config.json should name the classes 0 to {classes - 1} of the classifier; "
            f"it has {count}"
        )
    names = [str(labels[str(index)]) for index in range(classes)]
    return [] if names == placeholders(classes) else names


def placeholders(classes: int) -> list[str]:
    """Return the names that transformers gives to classes without names."""
    return [f"LABEL_{index}" for index in range(classes)]


def to_json(config: ViTConfig, card: Card, family: Family, layout: Layout, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model, with unrelated entries of the file that it was loaded from."""
    origin = card.provenance.get("origin") or {}
    same_kind = origin.get("format") == "hf" and origin.get("layout", {}).get("model_type") == family.model_type
    found: dict[str, Any] = dict(origin.get("config", {})) if same_kind else {}
    act = found.get("hidden_act", "")
    if act not in (ERF if config.gelu == "erf" else TANH):
        act = ERF[0] if config.gelu == "erf" else TANH[0]
    height, width = config.image_size
    found |= dict(
        architectures=[layout.architecture],
        model_type=family.model_type,
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        hidden_act=act,
        layer_norm_eps=config.norm_eps,
        image_size=height if height == width else [height, width],
        patch_size=config.patch,
        num_channels=config.channels,
        dtype=dtype,
        **family.json(config, layout),
    )
    found.pop("torch_dtype", None)  # the older name of dtype
    if config.classes or family.has_head(config):
        names = card.class_names or placeholders(config.classes)
        found["id2label"] = {str(index): name for index, name in enumerate(names)}
        found["label2id"] = {name: index for index, name in enumerate(names)}
    return found
