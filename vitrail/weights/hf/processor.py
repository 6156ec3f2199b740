"""`preprocessor_config.json` of transformers and our `Preprocess`, mean and std, in both directions.

transformers resizes to a height and width whatever the shape of the image ("squash"), or to a shortest edge,
and may then cut out the centre.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig

RESAMPLE = {2: "bilinear", 3: "bicubic"}
"""Pillow's number -> name, for the interpolations that vitrail has."""
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
    """Return the preprocessing that a processor describes. Raises WeightsError for invalid sizes."""
    values = {name: value for name, value in values.items() if value is not None}
    notes: list[str] = []
    resample = values.get("resample", 2)
    if resample not in RESAMPLE:
        notes.append(f"bicubic in the place of Pillow's resampling {resample!r}")
    way: Literal["bilinear", "bicubic"] = "bilinear" if resample == 2 else "bicubic"
    mean, std = _statistics(values, where)
    resized, edge = _resized(values, image_size, where, notes)
    cropped = _pair(values.get("crop_size", 224), where) if values.get("do_center_crop") else None
    if edge:
        cut = cropped or (edge, edge)
        if cropped is None:
            notes.append(f"the centre of {edge} x {edge}: transformers would keep the shape of the image")
        # a cut larger than the image would be padded with black
        preprocess = Preprocess(cut, "small", min(min(cut) / edge, 1.0), way)
    elif cropped and cropped != resized and cropped[0] <= resized[0]:
        notes.append(
            f"short side to {resized[0]}, then the centre of {cropped[0]} x {cropped[1]}: transformers squashes to "
            f"{resized[0]} x {resized[1]} first, which is the same for square images"
        )
        preprocess = Preprocess(cropped, "small", cropped[0] / resized[0], way)
    else:
        preprocess = Preprocess(cropped or resized, "squash", interpolation=way)
    return Processing(preprocess, mean, std, notes)


def write_processor(preprocess: Preprocess, config: ViTConfig) -> dict[str, Any]:
    """Return the preprocessor_config.json of a preprocessing."""
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
    if preprocess.resize == "small":
        values |= dict(
            image_processor_type="BitImageProcessor",
            size=dict(shortest_edge=round(min(height, width) / preprocess.crop)),
            do_center_crop=True,
            crop_size=dict(height=height, width=width),
        )
    return values


def _resized(
    values: Mapping[str, Any], image_size: tuple[int, int], where: str, notes: list[str]
) -> tuple[tuple[int, int], int]:
    """Return the height and width that images are squashed to, and the shortest edge (0 if they are squashed)."""
    size = values.get("size")
    if values.get("do_resize") is False:
        notes.append("images are resized to the model's size: the processor leaves their size alone")
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
    pair = [size, size] if isinstance(size, int) else size
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise WeightsError(
            f"{where}: a size in preprocessor_config.json is {size!r}; valid: height and width in pixels"
        )
    return pair[0], pair[1]


def _statistics(values: Mapping[str, Any], where: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std of pixels in [0, 1], for any range that the processor scales them to."""
    found = []
    for name, none in (("image_mean", 0.0), ("image_std", 1.0)):
        numbers = values.get(name, 0.5) if values.get("do_normalize", True) else none
        numbers = [numbers] if isinstance(numbers, int | float) else numbers
        if not isinstance(numbers, list) or not numbers or not all(isinstance(n, int | float) for n in numbers):
            raise WeightsError(f"{where}: {name} in preprocessor_config.json is {numbers!r}; valid: a number a channel")
        found.append(tuple(float(number) for number in numbers))
    factor = values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1.0
    largest = 255 * factor
    if not math.isclose(largest, 1.0):
        found = [tuple(number / largest for number in numbers) for numbers in found]
    return found[0], found[1]
