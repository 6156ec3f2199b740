"""The augmentations of `augment.py` and `geometry.py` on whole batches, on any device.

All random choices are drawn on the host, by the operations themselves and from the same streams: a row of numbers for
each image (`Augmentation.draw`). `Plan` turns the rows of a batch into small tensors, one group for the images with the
same kind of change. `augment_on_device(images, plan)` applies them without asking the device for anything.

Pillow works with 8-bit values after every change, and so does this: tables and blends are Pillow's to the bit, up to
the rounding of the device; what moves pixels differs by a level (tests/data/test_batched.py has the bounds).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.images.augment import (
    CHANGES,
    DrawnSteps,
    MovingAugment,
    RandomErasing,
    solarize_table,
)
from vitrail.data.images.device_crop import COLUMNS, DeviceCrop
from vitrail.data.images.geometry import Compose, Flip, InceptionCrop, Op
from vitrail.data.images.pixels import EIGHT_BIT_RGB
from vitrail.data.settings import GREY
from vitrail.device import to_device

NAMES = tuple(CHANGES)
FLIP, TOP, LEFT, HEIGHT, WIDTH, KEY, STEPS = range(7)
"""Columns of a row of drawn numbers; from `STEPS` on, two for each change: its number in `NAMES` and its value."""
VALUES = np.arange(256, dtype=np.uint8)
AT_ONCE = 512
"""Number of images changed at a time, because intermediate results take many times the memory of the images."""
HASH = (0x2C1B3C6D, 0x297A2D39)
"""Multipliers of a hash of 32-bit numbers, below 2^31 (Wellons 2018, "Prospecting for hash functions")."""


@dataclass(frozen=True)
class Augmentation:
    """What happens to images of one size: perhaps a flip, some changes, and perhaps an erased rectangle.

    crop: How they get this size; None if they have it already.
    """

    flip: Flip | None
    changes: tuple[DrawnSteps, ...]
    erasing: RandomErasing | None
    size: tuple[int, int]
    crop: DeviceCrop | None = None

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Return the row of an image, float64; the numbers that the operations would draw from `rng` themselves."""
        row = [0.0] * STEPS
        if self.flip is not None:
            row[FLIP] = float(rng.random() < self.flip.probability)
        steps = [step for change in self.changes for step in change.steps(rng)]
        if self.erasing is not None:
            row[TOP:KEY] = self.erasing.box(*self.size, rng)
            row[KEY] = float(rng.integers(2**31))
        return np.array(row + [number for name, value in steps for number in (NAMES.index(name), value)])


def divided(transform: Op, size: tuple[int, int], *, decodes: bool = False) -> tuple[Op, Augmentation] | None:
    """Return the part of a transform of RGB images that stays on the host, and the rest; None if nothing can move.

    The host decodes and crops, and resizes to `size` except after a random crop; the device does that, flips, changes
    colours and erases. decodes: The device decodes JPEGs, too, which needs a random crop (None without one).
    """
    if not isinstance(transform, Compose):
        return None
    left = list(transform.ops)
    erasing = left.pop() if left and type(left[-1]) is RandomErasing else None
    changes: list[DrawnSteps] = []
    while left and isinstance(op := left[-1], DrawnSteps):
        changes.insert(0, op)
        left.pop()
    if not (changes or decodes) or (changes and isinstance(changes[-1], MovingAugment)):
        return None
    flip = left.pop() if left and isinstance(left[-1], Flip) else None
    crop = None
    if [type(op) for op in left] == [InceptionCrop] and transform.pixels is EIGHT_BIT_RGB:
        crop = DeviceCrop(left.pop(), decodes)  # type: ignore[arg-type]
    if decodes and crop is None:
        return None
    return Compose(tuple(left)), Augmentation(flip, tuple(changes), erasing, size, crop)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Group:
    """Images of a batch that have the same kind of change."""

    kind: str
    images: Tensor
    """int64 [n]: their places in the batch."""
    values: Tensor
    """[n, ...]: what the change needs: a factor, a radius, a matrix or a table."""


@dataclass(frozen=True)
class Crops:
    """The crops of a batch."""

    crop: DeviceCrop
    rows: np.ndarray
    """int64 [batch, COLUMNS]."""
    name: Callable[[int], str]

    def images(self, memory: Tensor, device: torch.device) -> Tensor:
        """See `DeviceCrop.images`."""
        return self.crop.images(memory, self.rows, self.name, device)


@dataclass(frozen=True)
class Plan:
    """The changes of a batch: groups in order. Those of one step have no image in common."""

    groups: tuple[Group, ...]
    crops: Crops | None = None
    """How the images get their size; None if they have it already."""

    @classmethod
    def of(
        cls,
        rows: list[np.ndarray],
        size: tuple[int, int],
        crop: DeviceCrop | None = None,
        name: Callable[[int], str] = str,
    ) -> Plan:
        """Return the plan for images of `size` with these rows, which begin with the numbers of a `crop`.

        name: Place in the batch -> name of the image, for errors.
        """
        if crop is not None:
            boxes = np.stack([row[: len(COLUMNS)] for row in rows]).astype(np.int64)
            plan = cls.of([row[len(COLUMNS) :] for row in rows], size)
            return replace(plan, crops=Crops(crop, boxes, name))
        groups: list[Group] = []
        table = np.zeros((len(rows), max([STEPS, *map(len, rows)])))
        table[:, STEPS:] = -1
        for line, row in zip(table, rows, strict=True):
            line[: len(row)] = row
        _add(groups, "flip", np.flatnonzero(table[:, FLIP]), np.zeros(0))
        for column in range(STEPS, table.shape[1], 2):
            numbers = table[:, column]
            parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
            for number in np.unique(numbers[numbers >= 0]).astype(int).tolist():
                kind, values_of = KINDS[NAMES[number]]
                places = np.flatnonzero(numbers == number)
                parts.setdefault(kind, []).append((places, values_of(table[places, column + 1], size)))
            for kind, members in parts.items():
                places, values = map(np.concatenate, zip(*members, strict=True))
                _add(groups, kind, places, values)
        erased = np.flatnonzero(table[:, HEIGHT])
        _add(groups, "erase", erased, table[erased, TOP : KEY + 1].astype(np.int64))
        return cls(tuple(groups))

    def apply(self, images: Tensor, device: torch.device) -> Tensor:
        """Return the changed images of a batch, of which `images` is the memory, on a device; nothing waits for it."""
        images = to_device(images, device) if self.crops is None else self.crops.images(images, device)
        groups = (Group(one.kind, to_device(one.images, device), to_device(one.values, device)) for one in self.groups)
        return augment_on_device(images, Plan(tuple(groups)))


def _add(groups: list[Group], kind: str, images: np.ndarray, values: np.ndarray) -> None:
    if len(images):
        values = values.astype(np.float32) if values.dtype == np.float64 else values
        groups.append(Group(kind, torch.as_tensor(images, dtype=torch.int64), torch.from_numpy(values)))


def augment_on_device(images: Tensor, plan: Plan) -> Tensor:
    """Return changed images; uint8 [batch, 3, height, width], as are `images`, on whose device the plan is."""
    changed = images.clone()
    for group in plan.groups:
        for places, values in zip(group.images.split(AT_ONCE), _split(group), strict=True):
            changed.index_copy_(0, places, BATCHED[group.kind](changed.index_select(0, places), values))
    return changed


def _split(group: Group) -> list[Tensor]:
    if len(group.values) == len(group.images):
        return list(group.values.split(AT_ONCE))
    return [group.values] * -(-len(group.images) // AT_ONCE)


# ---------------------------------------------------------------- tables: a new value for each value


def _table(images: Tensor, tables: Tensor) -> Tensor:
    """Look up each value in the table of its image and channel; tables: uint8 [n, 1 or C, 256]."""
    count, channels = images.shape[:2]
    values = images.reshape(count, channels, -1).long()
    return tables.expand(count, channels, 256).gather(2, values).reshape(images.shape)


def _blend_table(grey: float | Tensor, factor: Tensor) -> Tensor:
    """Return the table of Pillow's blend of one grey value, [n, 1], with an image, by a factor [n, 1]."""
    values = torch.arange(256, dtype=torch.float32, device=factor.device)
    return _blend(torch.as_tensor(grey, dtype=torch.float32, device=factor.device), values, factor)


def _brightness(factors: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return _blend_table(0.0, torch.from_numpy(factors.astype(np.float32))[:, None])[:, None].numpy()


def _solarized(thresholds: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return np.where(thresholds[:, None, None] > VALUES, VALUES, 255 - VALUES)


def _posterized(bits: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return VALUES & (256 - 2 ** (8 - bits)).astype(np.uint8)[:, None, None]


def _brighter(added: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return np.array([[solarize_table(one)] for one in added], np.uint8)


def _autocontrast(images: Tensor, values: Tensor) -> Tensor:
    low, high = (end[:, :, None].double() for end in (images.amin((2, 3)), images.amax((2, 3))))
    scale = torch.full_like(high, 255.0) / (high - low).clamp(min=1)  # torch divides a number by its inverse, inexactly
    levels = torch.arange(256, dtype=torch.float64, device=images.device)
    stretched = (levels * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return _table(images, torch.where(high > low, stretched, levels.to(torch.uint8)))


def _equalize(images: Tensor, values: Tensor) -> Tensor:
    count, channels = images.shape[:2]
    flat = images.reshape(count * channels, -1).long()
    histogram = torch.zeros(count * channels, 256, dtype=torch.int64, device=images.device)
    histogram.scatter_add_(1, flat, torch.ones_like(flat))
    before = histogram.cumsum(1) - histogram
    levels = torch.arange(256, device=images.device)
    last = (histogram > 0).long().mul(levels).amax(1, keepdim=True)
    step = (flat.shape[1] - histogram.gather(1, last)) // 255
    equal = ((step // 2 + before) // step.clamp(min=1)).clamp(max=255)
    return _table(images, torch.where(step > 0, equal, levels).to(torch.uint8).reshape(count, channels, 256))


# ---------------------------------------------------------------- blends with another picture


def _blend(other: Tensor, image: Tensor, factor: Tensor) -> Tensor:
    """Return Pillow's blend, rounded down: 0 for `other`, 1 for `image`, and beyond."""
    return (other + factor * (image - other)).clamp(0, 255).to(torch.uint8)


def _luminance(images: Tensor) -> Tensor:
    """Return the grey values of RGB images as integers, [n, 1, H, W], by Pillow's weights of ITU-R 601-2."""
    red, green, blue = images.to(torch.int32).unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16)[:, None]


def _grey(images: Tensor, values: Tensor) -> Tensor:
    return _luminance(images).to(torch.uint8).expand_as(images)


def _color(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(_luminance(images).float(), images.float(), factor[:, None, None, None])


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    mean = torch.floor(_luminance(images).double().mean((1, 2, 3)) + 0.5)
    return _table(images, _blend_table(mean[:, None], factor[:, None])[:, None])


def _sharpness(images: Tensor, factor: Tensor) -> Tensor:
    exact = images.float()
    kernel = torch.ones(1, 1, 3, 3, device=images.device)
    sums = F.conv2d(exact.reshape(-1, 1, *images.shape[2:]), kernel).reshape(*images.shape[:2], -1)
    smooth = exact.clone()  # the border stays
    inner = exact[:, :, 1:-1, 1:-1]
    smooth[:, :, 1:-1, 1:-1] = ((sums.reshape(inner.shape) + 4 * inner) / 13 + 0.5).floor()
    return _blend(smooth, exact, factor[:, None, None, None])


# ---------------------------------------------------------------- what moves pixels


def _flip(images: Tensor, values: Tensor) -> Tensor:
    return images.flip(3)


def _turned(images: Tensor, turns: Tensor) -> Tensor:
    """Turn square images anticlockwise by quarter turns, float [n] from 0 to 3."""
    for number in (1, 2, 3):
        images = torch.where((turns == number)[:, None, None, None], images.rot90(number, (2, 3)), images)
    return images


def _moved(images: Tensor, matrices: Tensor) -> Tensor:
    """Return images whose pixel (x, y) is pixel (a x + b y + c, d x + e y + f); the rest is grey; matrices: [n, 6]."""
    height, width = images.shape[2:]
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
    across, down = a * x + b * y + c, d * x + e * y + f
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    grid = torch.stack([across * (2 / width) - 1, down * (2 / height) - 1], 3)
    moved = F.grid_sample(images.float(), grid, "bilinear", "border", align_corners=False)
    # Pillow rounds down; the share is for the rounding of float32, which is below an integer that Pillow gets
    return torch.where(inside[:, None], moved + 2**-10, float(GREY[0])).to(torch.uint8)


def _rotation(degrees: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the matrices of Pillow's `rotate`, whose centre is the middle of the picture."""
    angles, (height, width) = -np.radians(degrees % 360.0), size
    cos, sin, x, y = np.cos(angles), np.sin(angles), width / 2, height / 2
    return np.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], 1)


def _affine(element: int, values: np.ndarray) -> np.ndarray:
    """Return matrices that change nothing, but for one element, numbered from 0."""
    matrices = np.tile(np.array([1.0, 0, 0, 0, 1, 0]), (len(values), 1))
    matrices[:, element] = values
    return matrices


def _blurred(images: Tensor, radius: Tensor) -> Tensor:
    """Return Pillow's Gaussian blur: a box whose ends count in part, three times across and three times down."""
    variance = radius * radius / 3
    whole = torch.floor((torch.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    across, down = (_boxes(length, whole, part) for length in (images.shape[3], images.shape[2]))
    return separable(images, down, across)


def _boxes(length: int, whole: Tensor, part: Tensor) -> Tensor:
    """Return the matrices [n, length, length] of three box filters in sequence, with the ends repeated."""
    margin = 4  # for radii up to 4
    places = torch.arange(length, device=whole.device)[:, None]
    distance = (torch.arange(-margin, length + margin, device=whole.device) - places).abs()
    whole, part = whole[:, None, None], part[:, None, None]
    weights = torch.where(distance <= whole, 1.0, torch.where(distance == whole + 1, part, 0.0))
    before, weights, after = (weights / (2 * (whole + part) + 1)).split([margin, length, margin], 2)
    weights[:, :, 0] += before.sum(2)
    weights[:, :, -1] += after.sum(2)
    return weights @ weights @ weights


def separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return uint8 [n, C, h, w]: rows [n, h, H] times images [n, C, H, W] times columns [n, w, W], rounded.

    As in Pillow, the result across is rounded before that down.
    """
    across = (images.float() @ columns[:, None].transpose(2, 3)).round_().clamp_(0, 255)
    return (rows[:, None] @ across).round_().clamp_(0, 255).to(torch.uint8)


def _erased(images: Tensor, boxes: Tensor) -> Tensor:
    """Fill a rectangle of each image with random values, a function of its key; boxes: int64 [n, 5] with the key."""
    height, width = images.shape[2:]
    top, left, tall, wide, key = boxes[:, :, None, None].unbind(1)
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device)[:, None]
    inside = (y >= top) & (y < top + tall) & (x >= left) & (x < left + wide)
    pixel = torch.arange(images[0].numel(), device=images.device).reshape(images.shape[1:])
    noise = _hashed(_hashed(key[:, None]) ^ pixel) & 255
    return torch.where(inside[:, None], noise.to(torch.uint8), images)


def _hashed(number: Tensor) -> Tensor:
    """Return the hash of 32-bit numbers, int64."""
    for factor, shift in zip(HASH, (17, 11), strict=True):
        number = ((number ^ (number >> shift)) * factor) & 0xFFFFFFFF
    return number ^ (number >> 15)


def _kept(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return values


KINDS: dict[str, tuple[str, Callable[[np.ndarray, tuple[int, int]], np.ndarray]]] = {
    "autocontrast": ("autocontrast", _kept),
    "equalize": ("equalize", _kept),
    "invert": ("table", lambda values, size: np.tile(VALUES[::-1], (len(values), 1, 1))),
    "posterize": ("table", _posterized),
    "solarize": ("table", _solarized),
    "solarize_add": ("table", _brighter),
    "color": ("color", _kept),
    "contrast": ("contrast", _kept),
    "brightness": ("table", _brightness),
    "sharpness": ("sharpness", _kept),
    "rotate": ("move", _rotation),
    "shear_x": ("move", lambda values, size: _affine(1, values)),
    "shear_y": ("move", lambda values, size: _affine(3, values)),
    "translate_x": ("move", lambda values, size: _affine(2, values * size[1])),
    "translate_y": ("move", lambda values, size: _affine(5, values * size[0])),
    "vflip": ("vflip", _kept),
    "rotate90": ("turn", _kept),
    "grey": ("grey", _kept),
    "blur": ("blur", _kept),
}
"""Name of a change -> the kind of its group, and a function of (values [n], size of the images) that returns what the
group needs, [n, ...]."""

BATCHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flip": _flip,
    "vflip": lambda images, values: images.flip(2),
    "turn": _turned,
    "table": _table,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "contrast": _contrast,
    "color": _color,
    "sharpness": _sharpness,
    "move": _moved,
    "grey": _grey,
    "blur": _blurred,
    "erase": _erased,
}
"""Kind of a group -> function of (images uint8 [n, 3, H, W], values) that returns changed images."""
