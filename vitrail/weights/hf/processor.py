"""`preprocessor_config.json` of transformers: from it to `Preprocess`, mean and std, and back.

transformers resizes an image to a height and width, whatever its aspect ratio ("squash"), or by its shortest edge. It
may then crop the centre.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.data.images.ops import CROPPED, covering
from vitrail.data.settings import Preprocess
from vitrail.errors import UsageError, WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.mapping import number_in, numbers_in, size_in
from vitrail.words import shown

RESAMPLE: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}
"""Pillow's number of an interpolation -> its name, for those that vitrail has."""
EDGES = ("BitImageProcessor", "BitFeatureExtractor", "CLIPImageProcessor", "CLIPFeatureExtractor")
"""Processors that interpret a single number as the shortest edge; all others interpret it as a square."""


@dataclass
class Processing:
    """The preprocessing that a preprocessor_config.json describes."""

    preprocess: Preprocess
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Mean and std of pixels scaled to [0, 1]."""
    notes: list[str] = field(default_factory=list)
    """Differences between vitrail's preprocessing and the file's."""


def read_processor(values: Mapping[str, Any], image_size: tuple[int, int], where: str) -> Processing:
    """Return the preprocessing that a processor describes. Raises WeightsError for invalid values."""
    try:
        return _read(values, image_size, where)
    except UsageError as error:  # in a file rather than in a flag
        raise WeightsError(f"{where}: preprocessor_config.json does not describe a preprocessing: {error}") from error


def _read(values: Mapping[str, Any], image_size: tuple[int, int], where: str) -> Processing:
    values = {name: value for name, value in values.items() if value is not None}
    notes: list[str] = []
    resample = values.get("resample", 2)
    interpolation = RESAMPLE.get(resample) if isinstance(resample, int) else None
    if interpolation is None:
        valid = " or ".join(f"{number} ({name})" for number, name in RESAMPLE.items())
        raise UsageError(
            f"resample is {shown(resample)}, which vitrail does not have. Valid: {valid}. Change it there if the "
            "difference does not matter"
        )
    mean, std = _statistics(values, where)
    if "max_num_patches" in values:
        patch = int(number_in({"patch_size": 16} | values, "patch_size", where))
        tokens = (image_size[0] // patch) * (image_size[1] // patch)
        if (theirs := int(number_in(values, "max_num_patches", where))) != tokens:
            notes.append(f"at most {tokens} patches, one for each position; transformers would have {theirs}")
        return Processing(Preprocess(image_size, "native", interpolation=interpolation, patch=patch), mean, std, notes)
    resized, edge = _resized(values, image_size, where, notes)
    cropped = _pair(values.get("crop_size", 224), where) if values.get("do_center_crop") else None
    if edge:
        if cropped is None:
            notes.append(f"the centre of {edge} x {edge} pixels, but transformers would keep the aspect ratio")
        crop = cropped or (edge, edge)
        # transformers would pad a crop that is larger than the image with black
        preprocess = Preprocess(crop, "small", min(min(crop) / edge, 1.0), interpolation)
    elif cropped and cropped != resized and cropped[0] <= resized[0]:
        preprocess = Preprocess(cropped, "squash-crop", cropped[0] / resized[0], interpolation)
        if covering(preprocess) != resized:
            raise UsageError(
                f"images are resized to {shown(resized)} and cropped to {shown(cropped)}; vitrail crops the "
                "same share of both sides"
            )
    else:
        preprocess = Preprocess(cropped or resized, "squash", interpolation=interpolation)
    return Processing(preprocess, mean, std, notes)


def write_processor(preprocess: Preprocess, config: ViTConfig) -> dict[str, Any]:
    """Return the preprocessor_config.json of a preprocessing. Raises WeightsError if transformers has no such one."""
    if preprocess.resize == "native" and config.origin.resize_mode != "naflex":
        raise WeightsError(
            "of transformers' networks only SigLIP 2 NaFlex keeps the shapes of images (preprocess.resize native), and "
            f"this one resamples its positions by {config.origin.resize_mode!r}. Write the weights in format 'vitrail'"
        )
    if preprocess.resize == "pad":
        raise WeightsError(
            "transformers cannot pad images to the network's input (preprocess.resize pad). Write the weights in the "
            "format of vitrail, timm or open_clip"
        )
    height, width = preprocess.image_size
    values: dict[str, Any] = dict(
        image_processor_type="ViTImageProcessor",
        do_resize=True,
        size=dict(height=height, width=width),
        resample=next(number for number, name in RESAMPLE.items() if name == preprocess.interpolation),
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=list(config.mean),
        image_std=list(config.std),
    )
    if preprocess.resize == "native":
        tokens = config.grid[0] * config.grid[1]
        values |= dict(image_processor_type="Siglip2ImageProcessor", max_num_patches=tokens, patch_size=config.patch)
        return {name: value for name, value in values.items() if name != "size"}
    larger = covering(preprocess)
    if preprocess.resize == "small":
        values |= dict(image_processor_type="BitImageProcessor", size=dict(shortest_edge=min(larger)))
    if preprocess.resize == "squash-crop":
        values["size"] = dict(height=larger[0], width=larger[1])
    if preprocess.resize in CROPPED:
        values |= dict(do_center_crop=True, crop_size=dict(height=height, width=width))
    return values


def _resized(
    values: Mapping[str, Any], image_size: tuple[int, int], where: str, notes: list[str]
) -> tuple[tuple[int, int], int]:
    """Return the height and width to which images are squashed, and the shortest edge (0 if they are squashed)."""
    size = values.get("size")
    if values.get("do_resize") is False:
        notes.append("images are resized to the model's size, although do_resize is false")
        return image_size, 0
    kind = values.get("image_processor_type", values.get("feature_extractor_type", ""))
    if isinstance(size, int) and str(kind).removesuffix("Fast") in EDGES:
        size = dict(shortest_edge=size)
    if isinstance(size, Mapping) and size.get("shortest_edge"):
        return image_size, _pair(size["shortest_edge"], where)[0]
    return (image_size if size is None else _pair(size, where)), 0


def _pair(size: Any, where: str) -> tuple[int, int]:
    """Return height and width of a size in any notation. Raises WeightsError."""
    if isinstance(size, Mapping):
        size = [size.get("height"), size.get("width")]
    return size_in(size, "a size in preprocessor_config.json", where)


def _statistics(values: Mapping[str, Any], where: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std of pixels in [0, 1], whatever the range to which the processor scales pixels."""
    found = []
    for name, none in (("image_mean", 0.0), ("image_std", 1.0)):
        said = values.get(name, 0.5) if values.get("do_normalize", True) else none
        label = f"{name} in preprocessor_config.json"
        found.append(numbers_in({label: said}, label, where))
    said = values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1.0
    label = "rescale_factor in preprocessor_config.json"
    if (largest := 255 * number_in({label: said}, label, where)) <= 0:
        raise WeightsError(f"{where}: {label} is {shown(said)}; valid: a number above 0")
    if not math.isclose(largest, 1.0):
        found = [tuple(number / largest for number in numbers) for numbers in found]
    return found[0], found[1]
