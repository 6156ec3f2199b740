"""Tables of names: the tensors of a model, and those of another library's file that they are made of.

A format is a table of two columns: the name in the model, and the name in the file, or a `Rule` if the tensor changes.
`apply_table` applies a table to the tensors that a model has, so rows of parts that it lacks are of no effect. Loading
applies `read`, saving applies `write`. A name is written only once, and a file that was read can be written back. Below
are the sizes of a model that shapes in a file reveal, and what formats share when they assume or refuse something.

| theirs | ours |
|---|---|
| flax `Dense`: kernel [in, out] | `Linear`: weight [out, in] |
| flax `Conv`: kernel [height, width, in, out] | `Conv2d`: weight [out, in, height, width] |
| separate query, key and value | one weight [3 * width, width], in this order |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.model.variants import SIZES, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.words import shown

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of the pixels of ImageNet, as shares of the full range."""
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Those of CLIP's training images, in every library."""
LARGEST_NUMBER = 1e30
"""Numbers of foreign files are below it, so that float32 can hold them."""


def _keep(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Rule:
    """How one tensor of a model is made of the tensors of a file, and back: the right column of a table."""

    theirs: tuple[str, ...]
    """Names in the file, in the order in which `read` takes the tensors."""
    read: Callable[..., Tensor] = _keep
    """Foreign tensors -> the model's tensor, as a view if possible; the loader copies it if necessary."""
    write: Callable[[Tensor], Tensor | Sequence[Tensor]] = _keep
    """The model's tensor -> the foreign tensor, or several in order: the inverse of `read`, as views if possible."""
    reshape: bool = False
    """Whether `read` may return the values in another shape; the loader then reshapes them to the model's."""

    def written(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the foreign tensors of one of the model's; they do not share memory with each other."""
        foreign = self.write(tensor)
        return (foreign,) if isinstance(foreign, Tensor) else tuple(part.clone() for part in foreign)


@dataclass(frozen=True)
class Conversion(Rule):
    """The conversion of one tensor of a model from another library's file, and back."""

    ours: str = ""
    """Name in the model's `state_dict()`."""


NameTable = Mapping[str, str | Rule]
"""Name in the model -> name in the file, or a `Rule` if the tensor changes; with the fields of `apply_table`."""


def apply_table(names: Iterable[str], table: NameTable, first: int = 0, **fields: str) -> list[Conversion]:
    """Return the conversions of a model's tensors, in the order of their names; a name without a row has none.

    Fields in a row: {part} is the end of a name, such as weight or bias. Any other field of the left column, such as
    {layer} or {unit}, is a number; a file counts {stage} and {unit} from `first`. A {layer} that only the right column
    has stands for all layers. `fields` are the other fields of the right column, such as the prefix of a file.
    """
    names = list(names)
    depth = len({name.split(".")[1] for name in names if name.startswith("blocks.")})
    found = []
    for name in names:
        matches = ((_pattern(ours).fullmatch(name), right) for ours, right in table.items())
        match, right = next(((match, right) for match, right in matches if match), (None, ""))
        if match is None:
            continue
        rule = right if isinstance(right, Rule) else Rule((right,))
        own: dict[str, Any] = match.groupdict()
        own |= {field: int(text) for field, text in own.items() if field != "part"}
        own |= {field: own[field] + first for field in ("stage", "unit") if field in own}
        layers = [own.pop("layer")] if "layer" in own else range(max(depth, 1))
        theirs = [one.format(layer=layer, **own, **fields) for layer in layers for one in rule.theirs]
        found.append(Conversion(tuple(dict.fromkeys(theirs)), rule.read, rule.write, rule.reshape, name))
    return found


@cache
def _pattern(ours: str) -> re.Pattern[str]:
    """Return the pattern of the names that a left column stands for."""
    texts = re.escape(ours).replace(r"\{part\}", r"(?P<part>\w+)")
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", texts))


def within(ours: str, theirs: str, table: NameTable) -> dict[str, str | Rule]:
    """Return the rows of a part of a network, whose names start with `ours` in the model and `theirs` in the file."""

    def moved(right: str | Rule) -> str | Rule:
        if isinstance(right, str):
            return theirs + right
        return replace(right, theirs=tuple(theirs + one for one in right.theirs))

    return {ours + name: moved(right) for name, right in table.items()}


def joined(*theirs: str, dim: int = 0) -> Rule:
    """Return the rule of tensors that are separate in the file and concatenated along `dim` in the model."""
    return Rule(theirs, lambda *parts: torch.cat(parts, dim), lambda tensor: tensor.chunk(len(theirs), dim))


def stacked(theirs: str) -> Rule:
    """Return the rule of tensors that are separate in the file and stacked along a new first axis here."""
    return Rule((theirs,), lambda *tables: torch.stack(tables), lambda stack: stack.unbind())


def without_key_bias(query: str, value: str) -> Rule:
    """Return the rule of a bias of queries, keys and values that lacks the keys' part in the file (BEiT).

    A bias of the keys adds the same number to all logits of a query, which the softmax removes.
    """
    return Rule((query, value), lambda q, v: torch.cat([q, torch.zeros_like(q), v]), lambda bias: bias.chunk(3)[::2])


def turned(theirs: str) -> Rule:
    """Return the rule of a transposed matrix: [in, out] in the file, [out, in] in the model."""
    return Rule((theirs,), lambda matrix: matrix.mT, lambda weight: weight.mT)


def conv_kernel(theirs: str) -> Rule:
    """Return the rule of a kernel [height, width, in, out] in the file, [out, in, height, width] in the model."""
    return Rule((theirs,), lambda kernel: kernel.permute(3, 2, 0, 1), lambda weight: weight.permute(2, 3, 1, 0))


def reshaped(theirs: str, shape_theirs: tuple[int, ...]) -> Rule:
    """Return the rule of a tensor that has the shape `shape_theirs` in the file and equal values, in order."""
    return Rule((theirs,), write=lambda tensor: tensor.reshape(shape_theirs), reshape=True)


def unbatched(theirs: str) -> Rule:
    """Return the rule of a tensor without the first axis of one entry that the model's has."""
    return Rule((theirs,), write=lambda tensor: tensor[0], reshape=True)


def dense_rows(ours: str, theirs: str) -> NameTable:
    """Return the rows of a flax `Dense` {kernel [in, out], bias [out]} for a linear layer."""
    return {f"{ours}.weight": turned(f"{theirs}/kernel"), f"{ours}.bias": f"{theirs}/bias"}


def scale_bias(ours: str, theirs: str, names: tuple[str, str] = ("scale", "bias")) -> NameTable:
    """Return the rows of a norm's weight and bias, which flax names scale and bias (BiT: gamma and beta)."""
    return {f"{ours}.weight": f"{theirs}/{names[0]}", f"{ours}.bias": f"{theirs}/{names[1]}"}


def number_in(values: Mapping[str, Any], name: str, where: str) -> float:
    """Return the number `name` of a JSON object of the file `where`. Raises WeightsError if it is not a finite one."""
    value = values.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < LARGEST_NUMBER:
        raise WeightsError(f"{where}: {name} is {shown(value)}; valid: a finite number")
    return float(value)


def numbers_in(values: Mapping[str, Any], name: str, where: str) -> tuple[float, ...]:
    """Return the number or the numbers `name` of a JSON object, as `number_in` does; WeightsError if there are none."""
    value = values.get(name)
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    if not numbers:
        raise WeightsError(f"{where}: {name} is {shown(value)}; valid: one number for each channel")
    return tuple(number_in({name: number}, name, where) for number in numbers)


def size_in(value: Any, name: str, where: str) -> tuple[int, int]:
    """Return height and width of a size in pixels, one number or two. Raises WeightsError for anything else."""
    pair = value if isinstance(value, list | tuple) else [value, value]
    whole = all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair)
    if len(pair) != 2 or not whole:
        raise WeightsError(f"{where}: {name} is {shown(value)}; valid: one number of pixels, or height and width")
    return pair[0], pair[1]


def text_in(value: Any, name: str, where: str) -> str:
    """Return a text of a JSON file. Raises WeightsError for anything else."""
    if not isinstance(value, str):
        raise WeightsError(f"{where}: {name} is {shown(value)}; valid: text")
    return value


def shape_of(archive: Archive, name: str, dimensions: int) -> tuple[int, ...]:
    """Return the shape of a required tensor. Raises WeightsError unless it has this number of dimensions."""
    shape = archive.shape(name)
    if len(shape) != dimensions or 0 in shape:
        raise WeightsError(f"{archive.path} has {name!r} in shape {shape}; it should have {dimensions} dimensions")
    return shape


def row_count(archive: Archive, name: str) -> int:
    """Return the number of rows of a matrix, 0 if the archive lacks it."""
    return shape_of(archive, name, 2)[0] if name in archive else 0


def stem_sizes(archive: Archive, name: str) -> tuple[int, int, int]:
    """Return width, channels and patch of a linear stem. Raises WeightsError for patches that are not square."""
    width, channels, height, patch = shape_of(archive, name, 4)
    if height != patch:
        raise WeightsError(
            f"{archive.path} has patches of {height} x {patch} pixels ({name!r}); only square patches are supported"
        )
    return width, channels, patch


def grid_of(
    archive: Archive,
    name: str,
    length: int,
    fronts: Iterable[int],
    given: tuple[int, int] | None = None,
    hint: str = "The file does not say which grid it is.",
) -> tuple[tuple[int, int], int]:
    """Return the grid (rows, columns) of the table `name` of `length` positions, and how many are in front of it.

    `fronts` are the numbers of positions that there may be for other tokens. The grid is the `given` one, or a square.
    """
    possible = sorted(set(fronts))
    if given and length - given[0] * given[1] in possible:
        return given, length - given[0] * given[1]
    sides = {front: math.isqrt(length - front) for front in possible if length > front}
    squares = [front for front, side in sides.items() if side * side == length - front]
    if len(squares) != 1:
        raise WeightsError(
            f"{archive.path}: {name!r} has {length} positions, which fit {'more than one' if squares else 'no'} square "
            f"grid with {' or '.join(map(str, possible))} in front of it. {hint}"
        )
    side = sides[squares[0]]
    return (side, side), squares[0]


def count(archive: Archive, prefix: str, end: str = ".", first: int = 0, names: Iterable[str] | None = None) -> int:
    """Return how many numbers, from `first`, stand between `prefix` and `end` in the names (default: the archive's).

    Raises WeightsError if a number is missing.
    """
    pattern = re.compile(re.escape(prefix) + r"(\d+)" + re.escape(end))
    found = (pattern.match(name) for name in (archive.names if names is None else names))
    numbers = {int(match[1]): match[1] for match in found if match}
    if missing := sorted(set(range(first, first + len(numbers))) - numbers.keys()):
        last, digits = numbers[max(numbers)], min(map(len, numbers.values()))
        raise WeightsError(f"{archive.path} has '{prefix}{last}' but no '{prefix}{missing[0]:0{digits}}'")
    return len(numbers)


def imagenet_statistics(channels: int) -> dict[str, tuple[float, ...]]:
    """Return ImageNet's mean and std as values of a config; {} for other than three channels, which have none."""
    return dict(zip(("mean", "std"), IMAGENET, strict=True)) if channels == 3 else {}


def without_stem_bias(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Return a model's tensors without `stem.bias`, for formats that have none: the grid's positions take it over.

    The model computes the same, at other resolutions too, because resampling keeps constants. Raises WeightsError for a
    bias without learned positions at the input.
    """
    left = {name: tensor for name, tensor in state.items() if name != "stem.bias"}
    bias, name = state["stem.bias"], "positions.embedding"
    if not bias.any():
        return left
    if config.positions != "1d" or config.place != "input":
        raise WeightsError(
            "the format has no bias of the patch embedding, and the model has one and no learned positions that could "
            "take it over. Save it as 'vitrail'"
        )
    return left | {name: torch.cat([state[name][:, : config.front], state[name][:, config.front :] + bias], dim=1)}


def dense_biases(config: ViTConfig) -> list[str]:
    """Return the names of the biases of the dense layers in attentions and MLPs that come after queries and keys."""
    return _biases(config, "attentions.{}.attention.out", "mlps.{}.mlp.fc1", "mlps.{}.mlp.fc2")


def qkv_biases(config: ViTConfig) -> list[str]:
    """Return the names of the biases of queries, keys and values."""
    return _biases(config, "attentions.{}.attention.qkv")


def _biases(config: ViTConfig, *parts: str) -> list[str]:
    places = [(layer, branch) for layer in range(config.depth) for branch in range(config.branches)]
    return [f"blocks.{layer}.{part.format(branch)}.bias" for layer, branch in places for part in parts]


ROTARY_HEADS = {4096: 128, 1536: 96, 0: 64}
"""Features of a head in published networks with rotary positions: DINOv3's 7B, the gigantic Perception Encoder, all."""
AIMV2_HEADS = {0: 128}


def untold_heads(width: int) -> str:
    """Return what nobody knows of a network of this width whose file does not say it; "" if its heads are the usual."""
    known = width % 64 == 0 or any(width == size[0] for size in SIZES.values())
    why = f"{width} is not a multiple of the usual 64 features per head"
    return "" if known else f"how many heads its {width} features are split into, and {why}"


def usual_heads(archive: Archive, width: int, own: Mapping[int, int] | None = None) -> tuple[int, str]:
    """Return the number of heads of published models with this width, and a sentence for the load report.

    No tensor's shape depends on it. `own` is the number of features of a head for a width, or (0) for any width that is
    a multiple, in a family of its own. Raises WeightsError if the width is neither a published one nor a multiple of
    64.
    """
    own = own or {}
    features, named = own.get(width, own.get(0, 0)), {size[0]: size[2] for size in SIZES.values()}
    if features and width % features == 0:
        return width // features, f"{width // features} heads of {features} features"
    if width in named:
        return named[width], f"{named[width]} heads, as published models of width {width} have"
    if unknown := untold_heads(width):
        raise WeightsError(f"{archive.path} does not say {unknown}. Give a folder with the model's config.json.")
    return width // 64, f"{width // 64} heads of 64 features"
