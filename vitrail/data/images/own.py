"""Operations of the user's own, and transforms of torchvision, with random numbers that are the image's alone.

A function takes (image, random numbers) and draws from them. A `torch.nn.Module`, such as a transform of torchvision,
takes a tensor and draws from torch's generator, which all threads of the process share: seeding it would race with the
other threads that load images, and with the dropout of the training thread. So each call gets a generator of its own
(`Seeded`), and the process's generator is neither read nor changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from vitrail.data.images.geometry import Op, Size
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels
from vitrail.data.wording import Worded
from vitrail.errors import UsageError, VitrailError
from vitrail.import_path import own_object
from vitrail.torch_private import TorchDispatchMode, drawing_from
from vitrail.version import need
from vitrail.words import shown

TRIALS = 4
"""Number of seeds with which a transform is tried before it is used."""
TORCHVISION = "torchvision"
"""The one package of which a file, too, may name transforms, as it may name vitrail's own."""


@dataclass(frozen=True)
class OwnOp(Op):
    """A function of the user's own as an operation."""

    function: Callable[[np.ndarray, np.random.Generator], np.ndarray]
    pixels: Pixels = EIGHT_BIT_RGB

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op. Raises UsageError if the function returns another kind of image."""
        result = self.function(image, rng)
        channels, dtype = self.pixels.channels, np.dtype(self.pixels.dtype)
        wanted = (dtype, 3, (channels,))
        if not isinstance(result, np.ndarray) or (result.dtype, result.ndim, result.shape[2:]) != wanted:
            kind = f"{result.dtype} {result.shape}" if isinstance(result, np.ndarray) else shown(result)
            raise UsageError(
                f"{self.function} returned {kind}; an operation returns an image, {dtype} [H, W, {channels}]"
            )
        return result


class Seeded(TorchDispatchMode):
    """Context in which torch's functions draw from `generator`, in this thread alone."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch. Raises UsageError for an operation with random numbers that takes no generator, as dropout."""
        keywords = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in operation.tags and keywords.get("generator") is None:
            if (operation := drawing_from(found := operation)) is None:
                raise UsageError(f"{found} draws random numbers that cannot be seeded for each image")
            keywords["generator"] = self.generator
        return operation(*args, **keywords)


@dataclass(frozen=True)
class TorchTransform:
    """A `torch.nn.Module` as a function of an image; it gets and returns a tensor [channels, H, W]."""

    module: nn.Module

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> Any:
        """Return the transformed image [H, W, channels], or whatever else the module returned."""
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        # a copy, because a transform may work in place
        pixels = torch.from_numpy(image).permute(2, 0, 1).clone(memory_format=torch.contiguous_format)
        with torch.no_grad(), Seeded(generator):
            result = self.module(pixels)
        if not isinstance(result, torch.Tensor) or result.ndim != 3:
            return result
        return np.ascontiguousarray(result.permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class WithArguments:
    """A function of the user's own, with the arguments that follow the image and the random numbers."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> Any:
        """Return what the function returns for a copy of the image, in which it may work."""
        return self.function(image.copy(), rng, *self.arguments, **self.keywords)


@dataclass(frozen=True)
class Sometimes(Op):
    """An operation on a share of the images."""

    share: float
    op: Op

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        return self.op(image, rng) if rng.random() < self.share else image


def named_operation(asked: Worded, size: Size, pixels: Pixels) -> Op:
    """Return the operation that an import path with arguments names, on images of `size` (height, width).

    It is tried on random pixels first. Raises UsageError for what is no transform, for one that fails or returns
    another kind of image, and for one that draws random numbers from elsewhere, so that a run could not be repeated.
    """
    theirs = asked.name.partition(":")[0].partition(".")[0] == TORCHVISION
    if theirs:
        need(TORCHVISION)
    found = own_object(asked.name, imports=theirs, what="function or class")
    assert asked.arguments is not None
    function: Any
    # a file may name what it likes, so only these are called with arguments: modules, and functions of an image
    if isinstance(found, type) and issubclass(found, nn.Module):
        try:
            function = TorchTransform(found(*asked.arguments, **asked.keywords))
        except Exception as error:
            raise UsageError(f"augment.also {asked.text!r} cannot be made: {type(error).__name__}: {error}") from error
    elif inspect.isfunction(found):
        function = WithArguments(found, asked.arguments, asked.keywords)
    else:
        raise UsageError(
            f"augment.also {asked.text!r}: {asked.name} is {shown(found)}. Valid: a function of (image, random "
            "numbers), or a class that derives from torch.nn.Module, as the transforms of torchvision do"
        )
    op = OwnOp(function, pixels)
    try:
        _try(op, asked.text, size)
    except VitrailError:
        raise
    except Exception as error:
        raise UsageError(
            f"augment.also {asked.text!r} failed on an image ({np.dtype(pixels.dtype)}, {pixels.channels} channels): "
            f"{type(error).__name__}: {error}"
        ) from error
    return Sometimes(asked.share, op)


def _try(op: OwnOp, text: str, size: Size) -> None:
    shape = (*size, op.pixels.channels)
    random = np.random.default_rng(0)
    eight_bit = op.pixels.dtype is np.uint8
    image = random.integers(0, 256, shape, np.uint8) if eight_bit else random.standard_normal(shape, np.float32)
    for seed in range(TRIALS):
        first, second = (op(image, np.random.default_rng(seed)) for _ in range(2))
        if first.shape != shape:
            raise UsageError(
                f"augment.also {text!r} made an image of {first.shape[0]} x {first.shape[1]} pixels of one of "
                f"{size[0]} x {size[1]}; it must keep the size"
            )
        if not np.array_equal(first, second):
            raise UsageError(
                f"augment.also {text!r} makes different images with the same random numbers, so that a run could not "
                "be repeated. Draw them from the generator that a function gets, or in a module with torch's functions"
            )
