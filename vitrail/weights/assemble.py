"""Build a model from a config and tensors, without initialising it first and without copying the tensors.

The network is built with parameters that have shapes and no memory, and takes over the tensors it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError, WeightsError
from vitrail.model.build import build
from vitrail.model.head import build_heads
from vitrail.model.limits import ResizeMode, check_ranges
from vitrail.model.own_part import OwnPart, own_parts
from vitrail.model.resize import resize_bias, resize_kernel, resize_line, resize_positions
from vitrail.model.resnet import ResNet
from vitrail.model.variants import Config, ViTConfig, flat
from vitrail.model.vit import ViT
from vitrail.weights.card import Card

TensorSource = Callable[[Collection[str]], Iterator[tuple[str, Tensor]]]
"""Wanted names -> (name, tensor) for each of them, in any order, in the shape of the card's config."""

HEAD = ("head.", "head_dist.", "pre_logits.")
"""Prefixes of the tensors that a new classifier replaces."""
SIZES: dict[str, tuple[str, ...]] = {
    "stem.": ("width", "channels", "patch", "stem", "stem_units", "stem_width"),
    "root.": ("width", "channels"),
    "stages.": ("units", "width", "image_size"),
    "cls": ("width", "pool", "class_token"),
    "registers": ("registers", "width"),
    "positions.": ("positions", "place", "image_size", "patch", "registers", "width", "heads", "depth"),
    "blocks.": ("depth", "branches", "width", "mlp_dim", "mlp", "layer_scale"),
    "pre_logits.": ("pre_logits", "width"),
    "head": ("classes", "pre_logits", "width", "distilled", "segmentation", "queries", "query_blocks"),
}
"""Start of a tensor's name -> fields of the config that decide whether it exists, and its shape."""


@dataclass(frozen=True)
class Overrides:
    """Values that replace those of the file when a model is loaded; None keeps the file's. Raises UsageError."""

    classes: int | None = None
    image_size: int | tuple[int, int] | None = None
    resize_mode: ResizeMode | None = None
    patch: int | None = None
    channels: int | None = None
    drop_path: float | None = None

    def __post_init__(self) -> None:
        if self.classes is not None and self.classes < 0:
            raise UsageError(f"a classifier for {self.classes} classes cannot be built; 0 leaves it out")
        check_ranges(self)

    def apply(self, config: Config) -> Config:
        """Return the config with all changes but that of the classifier, which is replaced in the network."""
        if self.resize_mode is not None:
            if not isinstance(config, ViTConfig):
                raise UsageError("resize_mode is for positions, which a ResNet does not have: leave it out")
            config = config.changed(resize_mode=self.resize_mode)
        changed: dict[str, Any] = {}
        if self.image_size is not None:
            size = self.image_size
            changed["image_size"] = (size, size) if isinstance(size, int) else size
        if self.patch is not None:
            if not isinstance(config, ViTConfig) or config.stem != "linear":
                raise UsageError("only one linear projection of each patch can be resampled to another patch size")
            if self.patch < 1:
                raise UsageError(f"a patch of {self.patch} pixels cannot be cut")
            changed["patch"] = self.patch
        if self.drop_path is not None:
            if not isinstance(config, ViTConfig):
                raise UsageError("drop_path drops layers of a ViT, and this model is a ResNet: leave it out")
            changed["drop_path"] = self.drop_path
        if self.channels is not None:
            changed |= _with_channels(config, self.channels)
        return replace(config, **changed)

    def outputs_of(self, config: Config) -> Config:
        """Return the config with the changes that decide what it computes: not how layers are dropped in training."""
        return replace(self, drop_path=None).apply(config)


def assemble(card: Card, source: TensorSource, report: LoadReport, changes: Overrides) -> ViT | ResNet:
    """Return the network of a card with the tensors of `source`, in eval mode, with `card` and `load_report`.

    Fill `report` with the tensors that were loaded, resampled and reset. Tensors of `source` are used without a copy,
    so they must have the right shape and dtype, be finite, and not share memory.
    """
    old = card.config
    config = changes.apply(old)
    model = skeleton(config)
    if changes.classes is not None:
        with torch.device("meta") if "head" not in own_parts(config) else nullcontext():
            model.reset_head(changes.classes)
        config = model.config
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    new = {name for name in shapes if changes.classes is not None and name.startswith(HEAD)}
    tensors = {name: torch.zeros(shapes[name]) for name in new}
    if "head" in own_parts(config):  # it initialises itself
        tensors = {name: tensor for name, tensor in model.state_dict().items() if name in new}
    if isinstance(config, ViTConfig) and config.segmentation and new:
        head, _ = build_heads(config)
        assert head is not None
        tensors = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    for name, tensor in source(shapes.keys() - new):
        tensors[name] = _at(name, tensor, shapes[name], old, config, report)
    fill(model, tensors)
    report.loaded = [name for name in shapes if name not in new and name not in report.missing]
    report.reset = [name for name in shapes if name in new]
    report.missing = {name: why for name, why in report.missing.items() if name in shapes and name not in new}
    changed: dict[str, Any] = {}
    if config != old:
        changed["config"] = config
    if new or changes.outputs_of(old) != old:  # the network computes something else now
        changed["reference"] = {}
    if changes.image_size is not None:
        changed["preprocess"] = replace(card.preprocess, image_size=config.image_size)
    if config.channels != old.channels:
        changed["preprocess"] = replace(changed.get("preprocess", card.preprocess), bands=None)
    card = replace(card, **changed) if changes.classes is None else card.with_new_outputs(**changed)
    model.card, model.load_report = card, report
    return model.eval()


def skeleton(config: Config) -> ViT | ResNet:
    """Return the network of a config, its parameters without memory, unless a part is the user's own.

    Raises WeightsError if it cannot be built.
    """
    try:
        if own_parts(config):  # they may compute values that are in no file
            with torch.random.fork_rng(devices=[]):
                return build(config)
        with torch.device("meta"):
            return build(config)
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:  # too many values, and such
        raise WeightsError(f"no network can be built from its config: {error}") from error


def expected(config: Config, path: Path) -> dict[str, Tensor]:
    """Return all tensors of a config's network by name, without memory. Raises WeightsError naming `path`."""
    try:
        return expected_of(config)
    except (UsageError, WeightsError) as error:
        raise WeightsError(f"{path} does not describe a model: {error}") from error


def said_of(name: str, config: Config) -> str:
    """Return what a config says that decides about the tensor `name`: "width 16, channels 3, patch 4"."""
    fields = next((fields for start, fields in SIZES.items() if name.startswith(start)), ("width",))
    values = flat(config)
    return ", ".join(f"{field} {values[field]}" for field in fields if field in values)


@lru_cache(maxsize=1)  # a file is compared with its network before and while it is loaded
def expected_of(config: Config) -> dict[str, Tensor]:
    """Return all tensors of a config's network by name, without memory. Raises WeightsError if it cannot be built."""
    return dict(skeleton(config).state_dict())


def fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a `skeleton` its tensors. Raises WeightsError naming a missing one."""
    if missing := sorted(model.state_dict().keys() - tensors.keys()):
        raise WeightsError(f"no values for {missing[0]!r}")
    model.load_state_dict(tensors, strict=True, assign=True)
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:
            continue
        if buffer.numel():
            raise RuntimeError(f"the buffer {name!r} is in no file, and its values were not computed")
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, torch.empty_like(buffer, device="cpu"))


def admit(name: str, tensor: Tensor, like: Tensor, path: Path, taken: set[int]) -> Tensor:
    """Return the tensor for the model: in the dtype of `like`, finite, contiguous, with memory of its own.

    It is copied only if necessary. A view into a larger tensor is copied, because saving or copying it would include
    the larger one. `taken` collects addresses. Raises WeightsError.
    """
    if tensor.is_floating_point() != like.is_floating_point() or tensor.is_complex():
        raise WeightsError(f"{path}: {name!r} holds {tensor.dtype} where {like.dtype} belongs")
    tensor = tensor.to(like.dtype)
    exact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    aligned = tensor.data_ptr() % tensor.element_size() == 0
    if not (tensor.is_contiguous() and exact and aligned and tensor.data_ptr() not in taken):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.numel():
        taken.add(tensor.data_ptr())
    check_finite(name, tensor, f"{path} is unusable")
    return tensor


def check_finite(name: str, tensor: Tensor, what: str) -> None:
    """Raise WeightsError, with `what` and the number of values, if a tensor has NaN or infinity."""
    # a sum keeps NaN and infinity; a sum that overflowed is counted below
    if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
        count = int((~tensor.isfinite()).sum())
        if count:
            raise WeightsError(f"{what}: {count} of {tensor.numel()} values of {name!r} are NaN or infinite")


def _at(name: str, tensor: Tensor, shape: tuple[int, ...], old: Config, new: Config, report: LoadReport) -> Tensor:
    """Return a tensor resampled to the resolution and the channels of `new`; record it in the report."""
    if isinstance(old, ViTConfig) and isinstance(new, ViTConfig) and old.grid != new.grid and tensor.numel():
        # by the grid, not by the shape: 2 x 8 and 4 x 4 have tables of one length
        resized, way = tensor, "linear"
        if old.positions == "1d" and name == "positions.embedding":
            resized, way = resize_positions(tensor, old.grid, new.grid, new.origin.resize_mode), new.origin.resize_mode
        elif old.positions == "relative_bias" and name == "positions.bias":
            resized, way = resize_bias(tensor, old.grid, new.grid, new.origin.resize_mode), new.origin.resize_mode
        elif name.startswith("positions.") and not isinstance(old.positions, OwnPart):
            resized = resize_line(tensor, shape[1])
        elif name.startswith("positions.") and tensor.shape != shape and _is_raster(tensor, old):
            resized, way = resize_positions(tensor, old.grid, new.grid, new.origin.resize_mode), new.origin.resize_mode
        if resized is not tensor:
            sizes = [f"{config.image_size[0]} x {config.image_size[1]}" for config in (old, new)]
            if old.patch != new.patch:
                sizes = [f"{config.grid[0]} x {config.grid[1]} patches of {config.patch}" for config in (old, new)]
            report.resampled[name] = f"{sizes[0]} -> {sizes[1]} px, {way}"
            tensor = resized.contiguous()
    if isinstance(old, ViTConfig) and isinstance(new, ViTConfig) and old.patch != new.patch and name == "stem.weight":
        tensor = resize_kernel(tensor, new.patch).contiguous()
        report.resampled[name] = f"{old.patch} -> {new.patch} px patches, pseudo-inverse of a bilinear resize"
    kernel = tensor.dim() == 4 and tensor.shape[1] == old.channels  # that reads images
    if old.channels != new.channels and kernel and shape == (len(tensor), new.channels, *tensor.shape[2:]):
        tensor = _adapt_channels(tensor, new.channels)
        report.resampled[name] = f"{old.channels} -> {new.channels} channels"
    if tuple(tensor.shape) != shape and old.channels != new.channels:
        raise WeightsError(
            f"{name!r} of shape {tuple(tensor.shape)} is not a kernel that can be adapted from {old.channels} to "
            f"{new.channels} channels; keep {old.channels}"
        )
    if tuple(tensor.shape) != shape:
        raise WeightsError(
            f"{name!r} of shape {tuple(tensor.shape)} cannot be resampled to {shape} for images of "
            f"{new.image_size[0]} x {new.image_size[1]} pixels; keep {old.image_size[0]} x {old.image_size[1]}"
        )
    return tensor


def _is_raster(tensor: Tensor, config: ViTConfig) -> bool:
    """Return whether a tensor of the user's own positions has a row for each patch, as the built-in table has."""
    return tensor.dim() == 3 and tensor.shape[1] in {count + math.prod(config.grid) for count in (0, config.front)}


def _adapt_channels(kernel: Tensor, channels: int) -> Tensor:
    """Return a kernel [out, old channels, height, width] as [out, channels, height, width].

    The rule is that of timm's `create_model(in_chans=...)`: one channel gets the sum of the kernels, so that a gray
    image gives what its three equal channels gave. More or fewer channels get the kernels in turn, scaled by old / new,
    so that the outputs keep their size.
    """
    old = kernel.shape[1]
    if channels == 1:
        return kernel.sum(1, keepdim=True)
    in_turn = kernel.repeat(1, -(-channels // old), 1, 1)[:, :channels].contiguous()
    return in_turn * (old / channels)


def _with_channels(config: Config, channels: int) -> dict[str, Any]:
    """Return `channels`, and the mean and std of the pixels for them, as values of a config.

    The values of the old channels are used in turn; one channel gets their averages.
    """
    changed: dict[str, Any] = {"channels": channels}
    for name in ("mean", "std"):
        old = getattr(config, name)
        if channels == config.channels:
            changed[name] = old
        elif len(set(old)) == 1 or channels != 1:
            changed[name] = tuple(old[channel % len(old)] for channel in range(channels))
        else:
            changed[name] = (sum(old) / len(old),)
    return changed


@dataclass
class LoadReport:
    """What loading did with each tensor of the file and of the model, by name."""

    path: Path
    format: str = "vitrail"
    """Format of the file: "vitrail", or a name of `vitrail.weights.formats.NAMES`."""
    loaded: list[str] = field(default_factory=list)
    """Names, in the model, of the tensors from the file and its base."""
    base: str = ""
    """If the file holds only the tuned part: number of tensors from the base, and its source."""
    resampled: dict[str, str] = field(default_factory=dict)
    """Name -> how it was resampled, such as "14 x 14 -> 24 x 24, official"."""
    reset: list[str] = field(default_factory=list)
    """Names of the tensors of a new head, which starts at zero unless it is one for pixels or of the user's own."""
    unused: dict[str, str] = field(default_factory=dict)
    """Name in the file -> why the model does not use it, such as "replaced by a new head"."""
    missing: dict[str, str] = field(default_factory=dict)
    """Name in the model that the file lacks -> why it is zero, such as "BEiT's keys have no bias"."""
    assumptions: list[str] = field(default_factory=list)
    """Assumptions about what the file does not say."""
    differences: list[str] = field(default_factory=list)
    """Those of the assumptions by which images are prepared otherwise than in the library that the file is from."""

    def __str__(self) -> str:
        parts = [f"loaded {len(self.loaded)} tensors from {self.path} ({self.format})"]
        parts += [f"of which {self.base}"] * bool(self.base)
        parts += [f"resampled {name} ({how})" for name, how in self.resampled.items()]
        new = [name for name in self.reset if name in self.unused]
        reset = [name for name in self.reset if name not in new]
        unused = {name: why for name, why in self.unused.items() if name not in new}
        parts += [f"replaced, for other classes: {_few(new)}"] * bool(new)
        parts += [f"new: {_few(reset)}"] * bool(reset)
        parts += [f"not in the file, zero: {_grouped(self.missing)}"] * bool(self.missing)
        parts += [f"left out: {_grouped(unused)}"] * bool(unused)
        parts += [f"assumed: {text}" for text in self.assumptions]
        return "; ".join(parts)


def _grouped(names: dict[str, str]) -> str:
    """Return names grouped by reason, because a hundred tensors of a decoder share one reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in names.items():
        by_reason.setdefault(reason, []).append(name)
    return ", ".join(f"{_few(group)} ({reason})" for reason, group in by_reason.items())


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, ... {names[-1]} ({len(names)} tensors)"
