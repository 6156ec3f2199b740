"""Google's networks in NumPy and float64, by their published names: an independent second opinion.

Written from the papers and from what the public code of google-research/vision_transformer, big_vision and
big_transfer computes; nothing of vitrail is imported. Arrays are flat dictionaries without a prefix, images are
[batch, height, width, channels], and every network returns a `Result`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import scipy.ndimage

Arrays = Mapping[str, np.ndarray]
OLD = ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
LINEN = ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")


@dataclass
class Result:
    """Logits [batch, classes], or features where there is no head, and the output of every block (or unit)."""

    logits: np.ndarray
    blocks: list[np.ndarray]


# ViT ---------------------------------------------------------------------------------------------------------------


def vision_transformer(arrays: Arrays, images: np.ndarray, grid: tuple[int, int] | None = None) -> Result:
    """vit_jax's ViT or hybrid; `grid` is that of the position table, by default the square one."""
    p = _float64(arrays)
    maps = hybrid_stem(p, images.astype(np.float64)) if "conv_root/kernel" in p else images.astype(np.float64)
    tokens, shape = patches(p, maps)
    table = p["Transformer/posembed_input/pos_embedding"]
    if "cls" in p:  # vit_jax puts the class token in front, then adds a table with a row for it
        tokens = np.concatenate([np.repeat(p["cls"], len(tokens), 0), tokens], 1)
        table = np.concatenate([table[:, :1], resampled(table[:, 1:], shape, grid)], 1)
    else:
        table = resampled(table, shape, grid)
    tokens, blocks = encoder(p, tokens + table)
    pooled = tokens[:, 0] if "cls" in p else tokens.mean(1)
    return Result(head(p, pooled), blocks)


def big_vision_vit(arrays: Arrays, images: np.ndarray, grid: tuple[int, int] | None = None) -> Result:
    """big_vision's ViT: positions first, then a class token without one; class token, average or MAP head."""
    p = _float64(arrays)
    tokens, shape = patches(p, images.astype(np.float64))
    table = p.pop("Transformer/posembed_input/pos_embedding", None)
    table = p.pop("pos_embedding", table)
    if table is None:
        table = sincos(*shape, tokens.shape[-1])
    else:
        if int(np.sqrt(table.shape[1])) ** 2 + 1 == table.shape[1] and grid is None:  # fix_old_checkpoints
            p["cls"] = p["cls"] + table[:, :1]
            table = table[:, 1:]
        table = resampled(table, shape, grid)
    tokens = tokens + table
    if "cls" in p:
        tokens = np.concatenate([np.repeat(p["cls"], len(tokens), 0), tokens], 1)
    tokens, blocks = encoder(p, tokens)
    if "MAPHead_0/probe" in p:
        return Result(head(p, map_head(p, tokens)), blocks)
    return Result(head(p, tokens[:, 0] if "cls" in p else tokens.mean(1)), blocks)


def patches(p: Arrays, maps: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """A convolution whose stride is its kernel; tokens in raster order, and their grid."""
    kernel = p["embedding/kernel"]
    side, _, channels, width = kernel.shape
    batch, rows, columns = len(maps), maps.shape[1] // side, maps.shape[2] // side
    cut = maps.reshape(batch, rows, side, columns, side, channels).transpose(0, 1, 3, 2, 4, 5)
    tokens = cut.reshape(batch, rows * columns, -1) @ kernel.reshape(-1, width) + p["embedding/bias"]
    return tokens, (rows, columns)


def resampled(table: np.ndarray, shape: tuple[int, int], grid: tuple[int, int] | None) -> np.ndarray:
    """scipy.ndimage.zoom(order=1), as both code bases do it."""
    side = round(table.shape[1] ** 0.5)
    old = grid or (side, side)
    if old == shape:
        return table
    cells = table.reshape(*old, -1)
    return scipy.ndimage.zoom(cells, (shape[0] / old[0], shape[1] / old[1], 1), order=1).reshape(1, -1, table.shape[2])


def sincos(rows: int, columns: int, width: int) -> np.ndarray:
    """MoCo v3's fixed positions, as in big_vision."""
    y, x = np.mgrid[:rows, :columns]
    omega = 1.0 / 10_000.0 ** (np.arange(width // 4) / (width // 4 - 1))
    y, x = np.outer(y.flatten(), omega), np.outer(x.flatten(), omega)
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], 1)[None]


def encoder(p: Arrays, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """All layers and the norm after them; also what leaves each layer."""
    blocks = []
    scanned = "Transformer/encoderblock/LayerNorm_0/scale"
    own = [name for name in p if name.startswith("Transformer/encoderblock_") and name.endswith("LayerNorm_0/scale")]
    depth = len(p[scanned]) if scanned in p else len(own)
    for layer in range(depth):
        place = "Transformer/encoderblock/" if scanned in p else f"Transformer/encoderblock_{layer}/"
        block = {name.removeprefix(place): array for name, array in p.items() if name.startswith(place)}
        if scanned in p:
            block = {name: array[layer] for name, array in block.items()}
        attention, norm, mlp = OLD if f"{OLD[0]}/query/kernel" in block else LINEN
        normed = layer_norm(block, "LayerNorm_0", tokens)
        tokens = tokens + attend(block, attention, normed, normed)
        tokens = tokens + two_layers(block, mlp, layer_norm(block, norm, tokens))
        blocks.append(tokens)
    return layer_norm(p, "Transformer/encoder_norm", tokens), blocks


def map_head(p: Arrays, tokens: np.ndarray) -> np.ndarray:
    """A learned probe attends to all tokens, then an MLP with a residual."""
    probe = np.repeat(p["MAPHead_0/probe"], len(tokens), 0)
    pooled = attend(p, "MAPHead_0/MultiHeadDotProductAttention_0", probe, tokens)
    normed = layer_norm(p, "MAPHead_0/LayerNorm_0", pooled)
    return (pooled + two_layers(p, "MAPHead_0/MlpBlock_0", normed))[:, 0]


def head(p: Arrays, pooled: np.ndarray) -> np.ndarray:
    """tanh pre-logits and the classifier, each where the file has it."""
    if "pre_logits/kernel" in p:
        pooled = np.tanh(dense(p, "pre_logits", pooled))
    return dense(p, "head", pooled) if "head/kernel" in p else pooled


def attend(p: Arrays, name: str, queries: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """flax's MultiHeadDotProductAttention."""

    def project(part: str, x: np.ndarray) -> np.ndarray:  # [batch, heads, tokens, features]
        projected = np.tensordot(x, p[f"{name}/{part}/kernel"], 1) + p[f"{name}/{part}/bias"]
        return projected.transpose(0, 2, 1, 3)

    query, key, value = project("query", queries), project("key", tokens), project("value", tokens)
    logits = query @ key.transpose(0, 1, 3, 2) / np.sqrt(query.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ value
    return np.tensordot(mixed.transpose(0, 2, 1, 3), p[f"{name}/out/kernel"], 2) + p[f"{name}/out/bias"]


def two_layers(p: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    """Dense, GELU in the tanh approximation (flax's default), Dense."""
    hidden = dense(p, f"{name}/Dense_0", x)
    hidden = hidden / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    return dense(p, f"{name}/Dense_1", hidden)


def dense(p: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    """flax's Dense."""
    return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]


def layer_norm(p: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    """flax's LayerNorm, whose epsilon is 1e-6."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p[f"{name}/scale"] + p[f"{name}/bias"]


# ResNets -----------------------------------------------------------------------------------------------------------


def hybrid_stem(p: Arrays, images: np.ndarray) -> np.ndarray:
    """vit_jax's ResNet: post-activation bottlenecks, SAME padding, GroupNorm with an epsilon of 1e-6."""

    def layer(name: str, norm: str, maps: np.ndarray, stride: int = 1) -> np.ndarray:
        kernel = p[f"{name}/kernel"]
        mean, std = kernel.mean((0, 1, 2)), kernel.std((0, 1, 2))
        maps = convolution(same_padding(maps, len(kernel), stride), (kernel - mean) / (std + 1e-5), stride)
        return group_norm(maps, p[f"{norm}/scale"], p[f"{norm}/bias"], 1e-6)

    maps = relu(layer("conv_root", "gn_root", images, 2))
    maps = max_pool(same_padding(maps, 3, 2, -np.inf))
    for stage in range(1, 10):
        for unit in range(1, 100):
            name = f"block{stage}/unit{unit}"
            if f"{name}/conv1/kernel" not in p:
                break
            stride = 2 if stage > 1 and unit == 1 else 1
            shortcut = maps
            if f"{name}/conv_proj/kernel" in p:
                shortcut = layer(f"{name}/conv_proj", f"{name}/gn_proj", maps, stride)
            maps = relu(layer(f"{name}/conv1", f"{name}/gn1", maps))
            maps = relu(layer(f"{name}/conv2", f"{name}/gn2", maps, stride))
            maps = relu(shortcut + layer(f"{name}/conv3", f"{name}/gn3", maps))
    return maps


def bit(arrays: Arrays, images: np.ndarray) -> Result:
    """BiT's ResNetV2: pre-activation, GroupNorm with an epsilon of 1e-5, paddings of k // 2 and of zeros."""
    p = _float64(arrays)

    def conv(name: str, maps: np.ndarray, stride: int = 1) -> np.ndarray:
        kernel = p[f"{name}/standardized_conv2d/kernel"]
        kernel = (kernel - kernel.mean((0, 1, 2))) / np.sqrt(kernel.var((0, 1, 2)) + 1e-10)
        return convolution(padded(maps, len(kernel) // 2), kernel, stride)

    def active(name: str, maps: np.ndarray) -> np.ndarray:
        return relu(group_norm(maps, p[f"{name}/group_norm/gamma"], p[f"{name}/group_norm/beta"], 1e-5))

    maps = max_pool(padded(conv("resnet/root_block", images.astype(np.float64), 2), 1))
    units = []
    for stage in range(1, 10):
        for unit in range(1, 100):
            name = f"resnet/block{stage}/unit{unit:02d}"
            if f"{name}/a/standardized_conv2d/kernel" not in p:
                break
            stride = 2 if stage > 1 and unit == 1 else 1
            inside = active(f"{name}/a", maps)
            if f"{name}/a/proj/standardized_conv2d/kernel" in p:
                maps = conv(f"{name}/a/proj", inside, stride)
            inside = conv(f"{name}/b", active(f"{name}/b", conv(f"{name}/a", inside)), stride)
            maps = maps + conv(f"{name}/c", active(f"{name}/c", inside))
            units.append(maps)
    pooled = active("resnet", maps).mean((1, 2))
    if "resnet/head/conv2d/kernel" in p:
        pooled = pooled @ p["resnet/head/conv2d/kernel"][0, 0] + p["resnet/head/conv2d/bias"]
    return Result(pooled, units)


def convolution(maps: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    """Without padding: windows of the map as the rows of a matrix, times the kernel [height, width, in, out]."""
    height, width, inputs, outputs = kernel.shape
    windows = np.lib.stride_tricks.sliding_window_view(maps, (height, width), (1, 2))[:, ::stride, ::stride]
    rows = windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, height * width * inputs)
    return (rows @ kernel.reshape(-1, outputs)).reshape(*windows.shape[:3], outputs)


def max_pool(maps: np.ndarray) -> np.ndarray:
    """3 x 3 windows in steps of 2, without padding."""
    return np.lib.stride_tricks.sliding_window_view(maps, (3, 3), (1, 2))[:, ::2, ::2].max((-2, -1))


def same_padding(maps: np.ndarray, kernel: int, stride: int, value: float = 0.0) -> np.ndarray:
    """TensorFlow's SAME: as many outputs as ceil(size / stride), an odd pixel of padding goes last."""
    totals = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in maps.shape[1:3]]
    sides = [(total // 2, total - total // 2) for total in totals]
    return np.pad(maps, ((0, 0), *sides, (0, 0)), constant_values=value)


def padded(maps: np.ndarray, pixels: int) -> np.ndarray:
    """Zeros on all sides."""
    return np.pad(maps, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))


def group_norm(maps: np.ndarray, scale: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """32 groups of neighbouring channels, statistics over their pixels; scale may be stored as (1, 1, 1, C)."""
    batch, height, width, channels = maps.shape
    groups = maps.reshape(batch, height * width, 32, channels // 32)
    mean, variance = groups.mean((1, 3), keepdims=True), groups.var((1, 3), keepdims=True)
    return ((groups - mean) / np.sqrt(variance + eps)).reshape(maps.shape) * scale.reshape(-1) + bias.reshape(-1)


def relu(maps: np.ndarray) -> np.ndarray:
    """max(x, 0)"""
    return np.maximum(maps, 0)


def _float64(arrays: Arrays) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float64) for name, array in arrays.items()}
