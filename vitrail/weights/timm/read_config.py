"""timm's `config.json`: facts about a model beyond the names and shapes of its tensors.

It names the architecture, the arguments it was built with (`model_args`), the pooling, the class names, and in
`pretrained_cfg` the preprocessing; older exports are one flat mapping. A bare state dict has none of this. Then
the usual values of timm's models of that kind are assumed, and the load report says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.weights.archive import Archive

BARE = (".safetensors", ".pth", ".pt", ".bin")
"""Endings of a state dict on its own; any other path is a folder with a config.json."""

NORM_EPS = 1e-6
"""Epsilon of the LayerNorms in timm's ViTs."""

GROUP_NORM_EPS = 1e-5
"""Epsilon of the GroupNorms in timm's ResNets."""


@dataclass(frozen=True)
class TimmConfig:
    """The content of config.json; empty for a bare file."""

    path: Path
    architecture: str = ""
    """Name of a timm model, such as "vit_base_patch16_224"; "" if there is no config.json."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None
    labels: Any = None

    def argument(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """Return an argument of the architecture, or None. Raises WeightsError if it has another type."""
        value = self.arguments.get(name)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise WeightsError(
                f"{self.path}: model_args[{name!r}] of config.json is {value!r}, which has the wrong type"
            )
        return value

    def image_size(self) -> tuple[int, int] | None:
        """Return height and width of the model's images, or None. Raises WeightsError for an invalid size."""
        size = self.arguments.get("img_size")
        if size is None:
            size = self.pretrained.get("input_size")
            size = size[1:] if isinstance(size, list | tuple) else size
        if size is None:
            return None
        pair = (size, size) if isinstance(size, int) else size
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
            raise WeightsError(f"{self.path}: the image size of config.json is {size!r}; valid: [height, width]")
        return pair[0], pair[1]


@dataclass(frozen=True)
class UsualPreprocessing:
    """Usual preprocessing of a kind of timm model, for files that say nothing."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    crop: float = 0.9
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"


IMAGENET = UsualPreprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
SILENT = UsualPreprocessing(IMAGENET.mean, IMAGENET.std, crop=0.875)
"""timm's defaults for missing entries of a config.json."""


def is_timms(archive: Archive) -> bool:
    """Return whether timm wrote the config.json next to the tensors."""
    return isinstance(archive.config.get("architecture"), str)


def read_timm_config(archive: Archive) -> TimmConfig:
    """Return the content of config.json. Raises WeightsError if an entry has the wrong type."""
    config = archive.config
    if not is_timms(archive):
        return TimmConfig(archive.path)  # there is none, or it is another library's
    architecture = str(config["architecture"])
    pretrained, arguments = config.get("pretrained_cfg", config), config.get("model_args") or {}
    for name, value in (("pretrained_cfg", pretrained), ("model_args", arguments)):
        if not isinstance(value, Mapping):
            raise WeightsError(f"{archive.path}: {name!r} of config.json should be a mapping, not {value!r}")
    places = [
        mapping.get(name)
        for mapping in (config, pretrained)
        for name in ("label_names", "labels")
        if mapping.get(name) is not None
    ]
    pools = (arguments.get("global_pool"), config.get("global_pool"), pretrained.get("global_pool"))
    pool = next((pool for pool in pools if isinstance(pool, str)), None)
    return TimmConfig(archive.path, architecture, arguments, pretrained, pool, places[0] if places else None)


def statistics(hub: TimmConfig, channels: int, usual: UsualPreprocessing, notes: list[str]) -> dict[str, Any]:
    """Return mean and std of each channel as fields of a model's config; append assumptions to `notes`."""
    found = {}
    for name in ("mean", "std"):
        value = hub.pretrained.get(name) if hub.architecture else getattr(usual, name)
        value = getattr(SILENT, name) if value is None else value
        value = (value,) if isinstance(value, int | float) else value
        if not isinstance(value, list | tuple) or not value or not all(isinstance(v, int | float) for v in value):
            raise WeightsError(f"{hub.path}: {name!r} of config.json is {value!r}; valid: one number for each channel")
        values = tuple(float(v) for v in value)
        if len(values) != channels and len(set(values)) > 1:
            average = sum(values) / len(values)
            notes.append(f"{name} {average:.4g} for every channel: config.json has {len(values)}, the model {channels}")
            values = (average,)
        found[name] = values if len(values) == channels else values[:1] * channels
    return found


def preprocessing(
    hub: TimmConfig, image_size: tuple[int, int], usual: UsualPreprocessing, notes: list[str]
) -> Preprocess:
    """Return the preprocessing of images; append assumptions to `notes`."""
    if not hub.architecture:
        crop = 1.0 if min(image_size) >= 384 else usual.crop
        notes.append(
            f"mean {usual.mean[0]:g}, standard deviation {usual.std[0]:g}, crop {crop:g} and {usual.interpolation} "
            "resizing, as usual for timm's models of this kind: a bare file does not say"
        )
        return Preprocess(image_size, crop=crop, interpolation=usual.interpolation)
    interpolation = hub.pretrained.get("interpolation") or SILENT.interpolation
    if interpolation not in ("bilinear", "bicubic"):
        notes.append(f"bicubic resizing instead of {interpolation!r}")
        interpolation = "bicubic"
    crop = hub.pretrained.get("crop_pct") or SILENT.crop
    if not isinstance(crop, int | float) or not 0 < crop <= 1:
        notes.append(f"crop 1 instead of crop_pct {crop!r}")
        crop = 1.0
    mode = hub.pretrained.get("crop_mode") or "center"
    if mode == "squash":
        if crop != 1:
            notes.append(f"the whole image is squashed: timm would crop {crop:g} of it")
        return Preprocess(image_size, resize="squash", interpolation=interpolation)
    if mode != "center":
        notes.append(f"a central crop instead of crop_mode {mode!r}")
    given = hub.image_size()
    if given and given != image_size:
        notes.append(
            f"images of {image_size[0]} x {image_size[1]} pixels: {given[0]} x {given[1]} is no whole number of patches"
        )
    return Preprocess(image_size, crop=float(crop), interpolation=interpolation)


def class_names(hub: TimmConfig, classes: int, notes: list[str]) -> list[str]:
    """Return the name of each output, or [] if config.json has none that fit; then `notes` says so."""
    labels = hub.labels
    if isinstance(labels, Mapping):
        names = [labels.get(str(index)) for index in range(len(labels))]
    elif isinstance(labels, list | tuple):
        names = list(labels)
    else:
        return []
    if len(names) != classes or any(name is None for name in names):
        if classes:
            notes.append(f"no class names: config.json has {len(names)}, which do not fit {classes} classes")
        return []
    return [str(name) for name in names]
