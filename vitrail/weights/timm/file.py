"""`TimmFile`: a file of tensors under timm's names, with what its `config.json` says beyond them.

config.json names the architecture, the arguments it was built with (`model_args`), the pooling, the class names, and
in `pretrained_cfg` the preprocessing; older exports are one flat mapping. A bare state dict has no config.json. The
usual values of timm's models of that kind are then assumed, and the load report says so. `refuse` rejects what timm's
Vision Transformers have and vitrail has not.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.weights.archive import Archive
from vitrail.weights.formats import for_channels
from vitrail.weights.mapping import imagenet_statistics, numbers_in, size_in
from vitrail.words import listing, shown

TABLE = "relative_position_bias_table"
"""End of the names of tables of relative positions."""
BARE = (".safetensors", ".pth", ".pt", ".bin")
"""Endings of a bare state dict; any other path is a folder with a config.json."""

NORM_EPS = 1e-6
"""Epsilon of the LayerNorms in timm's ViTs."""

CLIP_EPS = 1e-5
"""Epsilon of the LayerNorms in timm's CLIP, the networks with a norm before the first block."""

GROUP_NORM_EPS = 1e-5
"""Epsilon of the GroupNorms in timm's ResNets."""


@dataclass(frozen=True)
class TimmFile:
    """Tensors under timm's names, and the content of config.json; most fields are empty for a bare file."""

    archive: Archive
    architecture: str = ""
    """Name of a timm model, such as "vit_base_patch16_224"; "" if there is no config.json."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    """`pretrained_cfg`, with the preprocessing that timm assumes or, for a bare file, that is usual."""
    pool: str | None = None
    labels: Any = None
    notes: list[str] = field(default_factory=list)
    """Assumptions made while the file is read, for the load report."""

    def error(self, message: str) -> WeightsError:
        """Return the error `message` about this file."""
        return WeightsError(f"{self.archive.path}: {message}")

    def argument(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """Return an argument of the architecture, or None. Raises WeightsError if it has another type."""
        value = self.arguments.get(name)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise self.error(f"model_args[{name!r}] of config.json is {shown(value)}, which has the wrong type")
        return value

    def image_size(self) -> tuple[int, int] | None:
        """Return height and width of the model's images, or None. Raises WeightsError for an invalid size."""
        size = self.arguments.get("img_size")
        if size is None:
            size = self.pretrained.get("input_size")
            size = size[1:] if isinstance(size, list | tuple) else size
        if size is None:
            return None
        return size_in(size, "the image size of config.json", str(self.archive.path))


VIT: dict[str, Any] = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_pct=0.9, interpolation="bicubic")
"""Usual preprocessing of a ViT, for a bare file."""
META = VIT | imagenet_statistics(3)
"""Usual preprocessing of DeiT, DINOv2 and MAE, for a bare file."""
BIT = VIT | dict(crop_pct=0.875, interpolation="bilinear")
"""Usual preprocessing of a BiT, for a bare file."""
DEFAULTS = META | dict(crop_pct=0.875)
"""timm's defaults for missing entries of `pretrained_cfg`."""


def has_timm_config(archive: Archive) -> bool:
    """Return whether timm wrote the config.json next to the tensors."""
    return isinstance(archive.config.get("architecture"), str)


def is_deits_own(archive: Archive) -> bool:
    """Return whether a file is of the DeiT repository's later models: LayerScale, a second branch or the hMLP stem.

    Of timm's models, BEiT and those with rotary positions have such names, too; others have a config.json.
    """
    beit = any(name.endswith((TABLE, ".q_bias", ".v_bias")) for name in archive.names)
    rotary = "pos_embed" not in archive or "rope.freqs" in archive
    own = {"blocks.0.gamma_1", "blocks.0.norm11.weight", "patch_embed.proj.0.weight"} & archive.names
    return bool(own) and not (beit or rotary or has_timm_config(archive))


def read_timm_file(archive: Archive) -> TimmFile:
    """Return an archive with the content of its config.json. Raises WeightsError if an entry has the wrong type."""
    config = archive.config
    if not has_timm_config(archive):
        return TimmFile(archive, pretrained=_usual(archive))
    pretrained, arguments = config.get("pretrained_cfg", config), config.get("model_args") or {}
    for name, value in (("pretrained_cfg", pretrained), ("model_args", arguments)):
        if not isinstance(value, Mapping):
            raise WeightsError(f"{archive.path}: {name!r} of config.json should be a mapping, not {shown(value)}")
    labels = (mapping.get(name) for mapping in (config, pretrained) for name in ("label_names", "labels"))
    pools = (mapping.get("global_pool") for mapping in (arguments, config, pretrained))
    return TimmFile(
        archive,
        config["architecture"],
        arguments,
        DEFAULTS | {name: value for name, value in pretrained.items() if value is not None},
        pool=next((pool for pool in pools if isinstance(pool, str)), None),
        labels=next((found for found in labels if found is not None), None),
    )


def _usual(archive: Archive) -> dict[str, Any]:
    """Return the usual preprocessing of such a model."""
    if "stem.conv.weight" in archive:
        return BIT
    meta = {"dist_token", "blocks.0.ls1.gamma", "mask_token"} & archive.names
    return META if meta and "blocks.0.attn.q_bias" not in archive else VIT


def statistics(file: TimmFile, channels: int) -> dict[str, Any]:
    """Return mean and std of each channel as fields of a model's config."""
    found = {}
    for name in ("mean", "std"):
        given = numbers_in(file.pretrained, name, f"{file.archive.path}, config.json")
        values = for_channels(name, given, channels, file.notes)
        found[name] = values if len(values) == channels else values[:1] * channels
    return found


def preprocessing(file: TimmFile, image_size: tuple[int, int]) -> Preprocess:
    """Return the preprocessing of images."""
    values, note = file.pretrained, file.notes.append
    interpolation, crop, mode = values["interpolation"], values["crop_pct"], values.get("crop_mode") or "center"
    if not file.architecture:
        crop = 1.0 if min(image_size) >= 384 else crop
        note(
            f"mean {values['mean'][0]:g}, standard deviation {values['std'][0]:g}, crop {crop:g} and {interpolation} "
            "resizing, as usual for timm's models of this kind, because a bare file does not say"
        )

    _check_resize(file, interpolation, crop, mode)
    if mode == "squash" and crop == 1:
        return Preprocess(image_size, resize="squash", interpolation=interpolation)
    if mode == "squash":
        return Preprocess(image_size, "squash-crop", float(crop), interpolation)
    if mode == "border":
        red, green, blue = (round(255 * value) for value in statistics(file, 3)["mean"])
        return Preprocess(image_size, resize="pad", interpolation=interpolation, fill=(red, green, blue))
    given = file.image_size()
    if given and given != image_size:
        note(
            f"images of {image_size[0]} x {image_size[1]} pixels, because {given[0]} x {given[1]} is not a whole "
            "number of patches"
        )
    return Preprocess(image_size, crop=float(crop), interpolation=interpolation)


def _check_resize(file: TimmFile, interpolation: object, crop: object, mode: object) -> None:
    """Raise WeightsError for a preprocessing that vitrail does not have: other images would be seen as others."""
    valid = {
        "interpolation": (interpolation, ("bilinear", "bicubic")),
        "crop_mode": (mode, ("center", "squash", "border")),
    }
    where = f"{file.archive.path}, config.json"
    for name, (value, known) in valid.items():
        if value not in known:
            raise WeightsError(
                f"{where}: {name} is {shown(value)}, which vitrail does not have. Valid: {listing(known)}. Change it "
                "there if the difference does not matter"
            )
    if not isinstance(crop, int | float) or not 0 < crop <= 1:
        raise WeightsError(f"{where}: crop_pct is {shown(crop)}; it must be greater than 0 and at most 1")
    if mode == "border" and crop != 1:
        raise WeightsError(
            f"{where}: crop_pct is {crop:g} with crop_mode 'border', which vitrail does not have. Set crop_pct to 1 if "
            "the whole image may be shown"
        )


def class_names(file: TimmFile, classes: int) -> list[str]:
    """Return the name of each output, or [] if config.json has none that fit."""
    if isinstance(file.labels, Mapping):
        names = [file.labels.get(str(index)) for index in range(len(file.labels))]
    elif isinstance(file.labels, list | tuple):
        names = list(file.labels)
    else:
        return []
    if len(names) == classes and all(isinstance(name, str | int) for name in names):
        return [str(name) for name in names]
    if classes:
        file.notes.append(f"no class names: config.json has {len(names)}, which do not fit {classes} classes")
    return []


_TENSORS = (
    (r"^patch_embed\.norm\.", "a norm on the patches"),
    (r"\.running_mean$", "a BatchNorm"),
    (
        r"^patch_embed\.backbone\.(?!(stem\.)?(conv|norm)\.|stages\.\d+\.blocks\.\d+\.)",
        "a stem other than BiT's ResNet",
    ),
    (r"\.attn\.(norm|scale_norm)\.|\.mlp\.norm\.", "a norm inside the attention or the MLP"),
    (r"^blocks\..*\.(q|k|v|q_proj|k_proj|v_proj)\.weight$", "separate projections of queries, keys and values"),
    (r"\.(lambda_\w+|sub_norm\.\w+)$", "differential attention"),
    (r"\.attn\.gate", "gated attention"),
    (r"\.(in_proj|in_norm|mlp_bias|attn_out_proj|mlp_out_proj)\b", "a projection that attention and MLP share"),
    (r"\.mlp\.(fc1_[gx]|w\d+)\.", "an MLP whose gate is a layer of its own"),
    (r"(^|\.)(rope|rotary|freqs)\b", "rotary positions"),
    (r"\.rel_pos_[hw]$|^rel_pos_bias\..*mlp", "relative positions of another kind than BEiT's"),
    (r"^attn_pool\.pos_embed$", "positions in the attention pooling"),
)
"""(pattern of tensor names, the part of a model to which they belong), for parts that vitrail does not have."""

AIMV2_PARTS = ("a norm on the patches", "an MLP whose gate is a layer of its own")
"""Parts in `_TENSORS` that AIMv2 has."""

_ARCHITECTURES = (
    (r"lingbot|sapiens", "rotary positions of another kind"),
    (r"naflex\w*_radio_", "a patch embedding of another kind"),
    (r"^test_vit3$", "pooling over registers"),
)
"""(pattern of architectures, a part that vitrail does not have), for parts that names and shapes do not show."""

_ARGUMENTS = {"norm_layer": ("layernorm", "layernormfp32"), "padding_same": (True,)}
"""Argument -> supported values, for arguments that names and shapes do not show."""


def refuse(file: TimmFile, supported: Container[str] = ()) -> None:
    """Raise WeightsError, naming the tensor or the entry of config.json, for a model that vitrail cannot express.

    `supported` are the parts in `_TENSORS` that its kind of network may have.
    """
    for pattern, what in _ARCHITECTURES:
        if re.search(pattern, file.architecture):
            raise file.error(f"{shown(file.architecture)} has {what}, which vitrail does not support")
    for name, known in _ARGUMENTS.items():
        value = file.arguments.get(name)
        if value is not None and value not in known:
            raise file.error(f"{name} of config.json is {shown(value)}; valid: {known[0]!r}")
    for pattern, what in _TENSORS:
        if what in supported:
            continue
        if found := sorted(name for name in file.archive.names if re.search(pattern, name)):
            raise file.error(f"{found[0]!r} is part of {what}, which vitrail does not support")
