"""What the formats of flax ViTs have no place for, so that a model is refused rather than changed.

A flax file holds arrays and nothing else: what is not in the names and shapes is fixed by the program that reads it,
and those programs compute the tanh approximation of GELU and LayerNorm with an epsilon of 1e-6. A model that does
otherwise could be written without an error and would come out as another function, its logits off by about 2e-4 for
the GELU. That is the quiet change of numbers that converting must not make, so it is refused here; who wants the
approximation says so by making it the model's own. What surrounds the network is not in the file either (how pixels
are normalised, how positions are resampled to another resolution): `vitrail.weights.save` tells what is lost there.
"""

from __future__ import annotations

from torch import nn

from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.flax.encoder import grid_of


def expressible(model: nn.Module, name: str, *, stems: tuple[str, ...], pools: tuple[str, ...]) -> ViTConfig:
    """Return the config of a model that the format `name` can hold. Raises WeightsError with the reason."""
    if not isinstance(model, ViT):
        raise WeightsError(
            f"format {name!r} holds Vision Transformers, not a {type(model).__name__}; a ResNetV2 goes into 'bit'"
        )
    config = model.config
    for wrong, what in _without_place(config, stems, pools):
        if wrong:
            raise WeightsError(f"format {name!r} has no place for {what}; save as 'vitrail', which has")
    for wrong, what in _unsaid(config):
        if wrong:
            raise WeightsError(f"format {name!r} cannot say {what}")
    return config


def _without_place(config: ViTConfig, stems: tuple[str, ...], pools: tuple[str, ...]) -> list[tuple[bool, str]]:
    """(is it so?, what there is no array for)"""
    return [
        (config.stem not in stems, f"a {config.stem!r} stem (it knows {', '.join(stems)})"),
        (config.block != "sequential", f"{config.block} blocks"),
        (config.mlp != "gelu", f"a {config.mlp} MLP"),
        (config.layer_scale is not None, "LayerScale"),
        (config.place != "input", f"positions at {config.place!r} instead of the input"),
        (config.registers > 0, "registers"),
        (config.distilled, "a distillation token"),
        (config.pool not in pools, f"pool {config.pool!r} (it knows {', '.join(pools)})"),
        (config.has_class_token != (config.pool == "cls"), f"a class token that pool {config.pool!r} does not read"),
        (config.final_norm != "tokens", "a norm after the pooling"),
    ]


def _unsaid(config: ViTConfig) -> list[tuple[bool, str]]:
    """(is it so?, what the file cannot say and its readers take otherwise)"""
    hybrid = config.stem == "resnet"
    standardised = (config.std_conv, config.group_norm_eps) != ("hybrid", 1e-6)
    return [
        (
            config.gelu != "tanh",
            "which GELU a model has, and every program that reads it computes the tanh approximation: this model's "
            "exact GELU would come out as another one, with logits off by about 2e-4. Save as 'timm', 'hf' or "
            "'vitrail', or build the model with gelu='tanh' if that change is wanted",
        ),
        (
            config.norm_eps != 1e-6,
            f"the epsilon of LayerNorm, and its readers take 1e-6; this model has {config.norm_eps}",
        ),
        (
            hybrid and standardised,
            "how a hybrid standardises its kernels, and its readers take (w - mean) / (std + 1e-5) and a GroupNorm "
            f"epsilon of 1e-6; this model has the form {config.std_conv!r} and {config.group_norm_eps}",
        ),
    ]


def check_grid(config: ViTConfig, name: str) -> None:
    """Raise WeightsError where a reader would take the number of positions for another grid."""
    rows, columns = config.grid
    if (assumed := grid_of(rows * columns)) != config.grid:
        raise WeightsError(
            f"format {name!r} keeps the number of positions and not their rows: a grid of {rows} x {columns} would be "
            f"read as {assumed[0]} x {assumed[1]}; save as 'vitrail', or load the model with a square image_size first"
        )
