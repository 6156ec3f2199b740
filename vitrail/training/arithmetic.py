"""What it costs to learn from an image once, by objective; `vitrail.costs.flops` counts the networks.

What learns costs three forward passes (gradients of inputs and of weights), what only answers costs one: DINO's
teacher, BEiT's tokenizer. Cutting, masking and the losses themselves are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vitrail.costs.flops import layer_macs, macs, masked_macs
from vitrail.model.stems.convolutional import hmlp_stages
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.objective.decoder import decoder_config
from vitrail.objective.dino.crops import GLOBAL, crop_sizes
from vitrail.objective.masked_patch import predictions
from vitrail.objective.masks import hidden_count
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Supervised, Tokenizer

Config = ViTConfig | ResNetConfig
Size = tuple[int, int]


@dataclass(frozen=True)
class Passes:
    """Multiply-accumulates of one image's forward passes."""

    learning: int
    answering: int = 0
    """Of networks that learn nothing by it."""

    @property
    def flops(self) -> int:
        """Of learning from the image once, 2 for a multiply-accumulate."""
        return 2 * (3 * self.learning + self.answering)


def passes(
    objective: Supervised | MaskedPatch | MAE | BEiT | Tokenizer | DINO,
    config: Config,
    image_size: int | Size | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> Passes:
    """Return what learning from one image of `image_size` (None: the config's) takes.

    `tokenizer` is BEiT's. Raises ValueError for an objective that cannot have such a network, or BEiT without it.
    """
    size = config.image_size if image_size is None else image_size
    size = (size, size) if isinstance(size, int) else size
    if isinstance(objective, Supervised):
        return Passes(macs(config, size))
    if isinstance(objective, DINO):
        return _dino(objective, config, size)
    if isinstance(config, ResNetConfig):
        raise ValueError(f"objective {objective.kind} needs a Vision Transformer")
    if isinstance(objective, Tokenizer):
        found, compared, painted = _tokenizer(objective, config, size)
        return Passes(found + painted, compared)
    if isinstance(objective, MAE):
        return _mae(objective, config, size)
    patches = _patches(config, size)
    every = masked_macs(config, size, patches)
    if isinstance(objective, MaskedPatch):
        predicted = predictions(objective, config.patch)
        return Passes(every + hidden_count(patches, objective.corrupt) * config.width * predicted)
    if tokenizer is None:
        raise ValueError("what BEiT costs depends on its tokenizer")
    found, compared, _ = _tokenizer(tokenizer, config, size)
    return Passes(every + hidden_count(patches, objective.ratio) * config.width * tokenizer.codes, found + compared)


def _patches(config: ViTConfig, size: Size) -> int:
    return (size[0] // config.patch) * (size[1] // config.patch)


def _mae(objective: MAE, config: ViTConfig, size: Size) -> Passes:
    """The layers see the visible patches only, the decoder's layers all of them."""
    patches, decoder = _patches(config, size), decoder_config(config, objective)
    visible = patches - hidden_count(patches, objective.ratio)
    own = (config.prefix + visible) * config.width * decoder.width
    own += layer_macs(decoder, config.prefix + patches, patches)
    own += patches * decoder.width * config.channels * config.patch**2
    return Passes(masked_macs(config, size, visible) + own)


def _tokenizer(tokenizer: Tokenizer, config: ViTConfig, size: Size) -> tuple[int, int, int]:
    """MACs of finding what is like a code, of comparing it with them all, and of painting an image from codes."""
    stages, width, area, inputs = hmlp_stages(config.patch), tokenizer.width, size[0] * size[1], 3
    down = up = 0
    for factor in stages:
        up += area * width * width  # each output pixel of a transposed convolution comes from one input pixel
        area //= factor**2
        down += area * factor**2 * inputs * width
        inputs = width
    residual = tokenizer.depth * 2 * 9 * area * width**2
    narrow = area * width * tokenizer.features
    compared = area * tokenizer.features * tokenizer.codes
    return down + residual + narrow, compared, narrow + residual + up + size[0] * size[1] * width * 3


def _dino(objective: DINO, config: Config, size: Size) -> Passes:
    """The student answers for all crops, the teacher for the global ones."""
    network = replace(config, classes=0)
    large, small = crop_sizes(size, size, 1 if isinstance(config, ResNetConfig) else config.patch, objective)
    head = config.features * objective.hidden + objective.hidden**2 + objective.hidden * objective.bottleneck
    head += objective.bottleneck * objective.outputs
    near = GLOBAL * (macs(network, large) + head)
    return Passes(near + objective.local_crops * (macs(network, small) + head), near)
