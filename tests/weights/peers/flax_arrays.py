"""Random weights under the names and in the shapes that Google, big_vision and BiT publish.

Every array has values that matter: no zero biases, no scales of 1. The forward passes are in `flax_reference`.
"""

from __future__ import annotations

import numpy as np
from flax_reference import LINEN, OLD

Arrays = dict[str, np.ndarray]
PREFIXES = ("", "opt/target/", "params/", "params/img/")


class Maker:
    """float32 arrays that depend on the order in which they are asked for."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.arrays: Arrays = {}

    def normal(self, name: str, *shape: int, std: float = 0.1, mean: float = 0.0) -> None:
        self.arrays[name] = (mean + std * self.rng.standard_normal(shape)).astype(np.float32)

    def kernel(self, name: str, *shape: int, inputs: int) -> None:
        self.normal(name, *shape, std=inputs**-0.5)

    def dense(self, name: str, inputs: int, outputs: int) -> None:
        self.kernel(f"{name}/kernel", inputs, outputs, inputs=inputs)
        self.normal(f"{name}/bias", outputs)

    def norm(self, name: str, *shape: int, names: tuple[str, str] = ("scale", "bias")) -> None:
        self.normal(f"{name}/{names[0]}", *shape, mean=1.0)
        self.normal(f"{name}/{names[1]}", *shape)

    def conv(self, name: str, side: int, inputs: int, outputs: int) -> None:
        self.kernel(f"{name}/kernel", side, side, inputs, outputs, inputs=side * side * inputs)

    def attention(self, name: str, width: int, heads: int) -> None:
        features = width // heads
        for part in ("query", "key", "value"):
            self.kernel(f"{name}/{part}/kernel", width, heads, features, inputs=width)
            self.normal(f"{name}/{part}/bias", heads, features)
        self.kernel(f"{name}/out/kernel", heads, features, width, inputs=width)
        self.normal(f"{name}/out/bias", width)

    def encoder(self, width: int, depth: int, heads: int, mlp: int, naming: tuple[str, str, str]) -> None:
        for layer in range(depth):
            block = f"Transformer/encoderblock_{layer}"
            self.norm(f"{block}/LayerNorm_0", width)
            self.attention(f"{block}/{naming[0]}", width, heads)
            self.norm(f"{block}/{naming[1]}", width)
            self.dense(f"{block}/{naming[2]}/Dense_0", width, mlp)
            self.dense(f"{block}/{naming[2]}/Dense_1", mlp, width)
        self.norm("Transformer/encoder_norm", width)

    def top(self, width: int, pre_logits: int | None, classes: int | None) -> None:
        if pre_logits:
            self.dense("pre_logits", width, pre_logits)
        if classes:
            self.dense("head", pre_logits or width, classes)


def google(
    *,
    width: int = 24,
    depth: int = 2,
    heads: int = 3,
    mlp: int = 40,
    patch: int = 8,
    grid: tuple[int, int] = (4, 4),
    channels: int = 3,
    classes: int | None = 7,
    pre_logits: int | None = None,
    cls: bool = True,
    naming: tuple[str, str, str] = OLD,
    seed: int = 0,
) -> Arrays:
    """A ViT of vit_jax; without `cls`, one that is pooled by its average."""
    make = Maker(seed)
    make.conv("embedding", patch, channels, width)
    make.normal("embedding/bias", width)
    if cls:
        make.normal("cls", 1, 1, width, std=1.0)
    make.normal("Transformer/posembed_input/pos_embedding", 1, grid[0] * grid[1] + cls, width, std=1.0)
    make.encoder(width, depth, heads, mlp, naming)
    make.top(width, pre_logits, classes)
    return make.arrays


def hybrid(
    *, units: tuple[int, ...] = (1, 1), root: int = 64, cell: int = 1, wide: bool = True, seed: int = 0, **vit: object
) -> Arrays:
    """A ViT of vit_jax on a ResNet; with `wide`, GroupNorm arrays are (1, 1, 1, C), as in the older files."""
    make = Maker(seed + 1)
    ones = (1, 1, 1) if wide else ()
    make.conv("conv_root", 7, 3, root)
    make.norm("gn_root", *ones, root)
    inputs = root
    for stage, count in enumerate(units, 1):
        width = root * 2 ** (stage - 1)
        for unit in range(1, count + 1):
            name = f"block{stage}/unit{unit}"
            sizes = ((1, inputs, width), (3, width, width), (1, width, 4 * width))
            for layer, (side, into, out) in enumerate(sizes, 1):
                make.conv(f"{name}/conv{layer}", side, into, out)
                make.norm(f"{name}/gn{layer}", *ones, out)
            if unit == 1:
                make.conv(f"{name}/conv_proj", 1, inputs, 4 * width)
                make.norm(f"{name}/gn_proj", *ones, 4 * width)
            inputs = 4 * width
    return google(patch=cell, channels=inputs, seed=seed, **vit) | make.arrays  # type: ignore[arg-type]


def big_vision(
    *,
    width: int = 24,
    depth: int = 3,
    heads: int = 3,
    mlp: int = 40,
    patch: int = 8,
    grid: tuple[int, int] = (4, 4),
    classes: int | None = 7,
    pre_logits: int | None = None,
    pool: str = "gap",
    positions: str = "learn",
    seed: int = 0,
) -> Arrays:
    """A ViT of big_vision: pool gap, map or tok; positions learn, sincos2d, or "old" with the class token's row."""
    make = Maker(seed)
    make.conv("embedding", patch, 3, width)
    make.normal("embedding/bias", width)
    if pool == "tok":
        make.normal("cls", 1, 1, width, std=1.0)
    if positions != "sincos2d":
        make.normal("pos_embedding", 1, grid[0] * grid[1] + (positions == "old"), width, std=1.0)
    make.encoder(width, depth, heads, mlp, LINEN)
    if pool == "map":
        make.normal("MAPHead_0/probe", 1, 1, width, std=1.0)
        make.attention("MAPHead_0/MultiHeadDotProductAttention_0", width, heads)
        make.norm("MAPHead_0/LayerNorm_0", width)
        make.dense("MAPHead_0/MlpBlock_0/Dense_0", width, mlp)
        make.dense("MAPHead_0/MlpBlock_0/Dense_1", mlp, width)
    make.top(width, pre_logits, classes)
    return make.arrays


def bit(*, units: tuple[int, ...] = (2, 1), width: int = 32, classes: int | None = 5, seed: int = 0) -> Arrays:
    """A ResNetV2 of BiT."""
    make = Maker(seed)
    gamma_beta = ("gamma", "beta")
    make.conv("resnet/root_block/standardized_conv2d", 7, 3, width)
    inputs = width
    for stage, count in enumerate(units, 1):
        inner = width * 2 ** (stage - 1)
        for unit in range(1, count + 1):
            name = f"resnet/block{stage}/unit{unit:02d}"
            sizes = ((1, inputs, inner), (3, inner, inner), (1, inner, 4 * inner))
            for letter, (side, into, out) in zip("abc", sizes, strict=True):
                make.norm(f"{name}/{letter}/group_norm", into, names=gamma_beta)
                make.conv(f"{name}/{letter}/standardized_conv2d", side, into, out)
            if unit == 1:
                make.conv(f"{name}/a/proj/standardized_conv2d", 1, inputs, 4 * inner)
            inputs = 4 * inner
    make.norm("resnet/group_norm", inputs, names=gamma_beta)
    if classes:
        make.conv("resnet/head/conv2d", 1, inputs, classes)
        make.normal("resnet/head/conv2d/bias", classes)
    return make.arrays


def scanned(arrays: Arrays) -> Arrays:
    """The same model with all layers of each kind in one array."""
    first = "Transformer/encoderblock_0/"
    depth = sum(name.endswith("LayerNorm_1/scale") for name in arrays if "encoderblock" in name)
    stacks = {
        f"Transformer/encoderblock/{name.removeprefix(first)}": np.stack(
            [arrays[name.replace("encoderblock_0", f"encoderblock_{layer}")] for layer in range(depth)]
        )
        for name in arrays
        if name.startswith(first)
    }
    return {name: array for name, array in arrays.items() if "encoderblock_" not in name} | stacks


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """The nearest smaller bfloat16 values, as NumPy sees them: voids of two bytes."""
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view("V2")


def from_bfloat16(array: np.ndarray) -> np.ndarray:
    """The same values in float32."""
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
