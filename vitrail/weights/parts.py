"""The parts of a model that the paper's ViT lacks: a format says which of them it has, and refuses the others by name.

A format names parts by a row of `WORDS` ("registers": any number of them), or by a row and its value ("pool=gap").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.model.variants import ViTConfig, flat

WORDS = {
    "stem": "stem {!r}",
    "block": "{} blocks",
    "positions": "positions {!r}",
    "sines": "sines of kind {!r} as positions",
    "place": "positions at place {!r}",
    "rotary": "rotary positions",
    "cls_position": "a class token without a position",
    "registers": "{} registers",
    "register_positions": "positions of registers",
    "distilled": "a distillation token",
    "pool": "pool {!r}",
    "tokenless": "a network without a class token",
    "unread": "a class token that pool {!r} does not read",
    "pool_heads": "attention pooling with its own number of heads",
    "pool_mlp_dim": "attention pooling with its own hidden width",
    "pool_prefix": "attention pooling over the tokens in front of the grid",
    "pre_logits": "a pre-logits layer",
    "segmentation": "a head {!r} for the classes of pixels",
    "layer_scale": "LayerScale",
    "mlp": "a {} MLP",
    "gelu": "GELU of kind {!r}",
    "norm": "norms of kind {!r}",
    "norm_eps": "the LayerNorm epsilon {}",
    "patch_norm": "a norm of the patches",
    "pre_norm": "a norm before the first block",
    "norm_after": "norms behind attention and MLP",
    "inner_norms": "norms inside attention or MLP",
    "qk_norm": "norms of queries and keys of kind {!r}",
    "pooled_norm": "a norm after the pooling",
    "unnormed": "features without a last norm",
    "oblong": "images of {} pixels, which are not square",
}
"""Part -> how it is called. Most are fields of `ViTConfig` and `Origin`; `_values` computes the others."""


def without_place(config: ViTConfig, has: str) -> str:
    """Return in words the first part of a model that a format does not have, "" if it has them all."""
    plain, known = _values(ViTConfig()), list(dict.fromkeys(has.split()))
    for name, value in _values(config).items():
        if value != plain[name] and name not in known and f"{name}={value}" not in known:
            others = [part.partition("=")[2] for part in known if part.startswith(f"{name}=")]
            valid = f" (valid: {', '.join([str(plain[name]) or 'none', *others])})"
            return WORDS[name].format(value) + valid * isinstance(plain[name], str | float)
    return ""


def lacking(config: ViTConfig, needed: str) -> str:
    """Return in words the first part that a format needs and a model lacks, "" if it has them all."""
    plain, values = _values(ViTConfig()), _values(config)
    for name, _, value in (part.partition("=") for part in needed.split()):
        if values[name] == plain[name] or value not in ("", values[name]):
            return WORDS[name].format(value)
    return ""


def first_reason(reasons: Mapping[str, bool]) -> str:
    """Return the first reason that is true of a model, "" if there is none: why a format cannot express it."""
    return next((reason for reason, is_true in reasons.items() if is_true), "")


def own_pool(config: ViTConfig) -> tuple[int | None, int | None]:
    """Return heads and hidden width of the attention pooling where they differ from those of the blocks, else None."""
    heads = None if config.origin.pool_heads == config.heads else config.origin.pool_heads
    return heads, None if config.origin.pool_mlp_dim == config.mlp_dim else config.origin.pool_mlp_dim


def _values(config: ViTConfig) -> dict[str, Any]:
    """Return the value of each row of `WORDS`, in order; a field of no effect has that of the paper's ViT."""
    origin, (height, width) = config.origin, config.image_size
    tabled, token, reads = config.positions in ("1d", "2d"), config.has_class_token, config.pool in ("cls", "cls+gap")
    values = flat(config) | dict(
        sines=origin.sines if config.positions == "sincos" else "moco",
        place=config.place if tabled or config.positions == "sincos" else "input",
        cls_position=config.cls_position or not (tabled and token),
        register_positions=origin.register_positions and config.registers > 0,
        tokenless=not token,
        unread=config.pool if token and not reads else None,
        pool_heads=own_pool(config)[0],
        pool_mlp_dim=own_pool(config)[1],
        pool_prefix=origin.pool_prefix and config.prefix > 0,
        gelu=origin.gelu if origin.mlp == "gelu" else "erf",
        inner_norms=origin.attention_norm or origin.mlp_norm,
        pooled_norm=origin.final_norm == "pooled",
        unnormed=origin.final_norm == "none",
        oblong=None if height == width else f"{height} x {width}",
    )
    return {name: values[name] for name in WORDS}
