"""FLOPs of learning from one image, by objective: the forward pass of each objective is counted.

A trained network costs three forward passes, because the backward pass computes gradients of inputs and of weights. A
network that only computes targets costs one: DINO's teacher and BEiT's tokenizer. Cropping, masking and losses are not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from vitrail.costs.count import ACCELERATOR, ImageSize, counted_macs, fake, macs, sized
from vitrail.model.build import build
from vitrail.model.variants import Config, ResNetConfig, ViTConfig
from vitrail.objective.base import Prepared
from vitrail.objective.beit import BEiTObjective
from vitrail.objective.crops import GLOBAL, crop_sizes
from vitrail.objective.dino import Projection
from vitrail.objective.mae import MAEObjective
from vitrail.objective.masked_patch import MaskedPatchObjective
from vitrail.objective.masks import hidden_count
from vitrail.objective.settings import DINO, MAE, BEiT, DINOv2, MaskedPatch, ObjectiveSettings, Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer


@dataclass(frozen=True)
class ForwardMacs:
    """Multiply-accumulates of the forward passes of one image."""

    trained: int
    frozen: int = 0
    """Of networks that only compute targets."""

    @property
    def flops(self) -> int:
        """FLOPs of learning from the image once: 2 per multiply-accumulate."""
        return 2 * (3 * self.trained + self.frozen)


@cache
def forward_macs(
    objective: ObjectiveSettings,
    config: Config,
    image_size: ImageSize | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> ForwardMacs:
    """Return the MACs of one image of `image_size` (None: the config's) under an objective.

    `tokenizer` is BEiT's. An objective of the user's own counts as one pass of the network. Raises ValueError for an
    objective that needs another kind of network, or BEiT without its tokenizer.
    """
    config = sized(config, image_size)
    if isinstance(objective, DINO):
        return _dino(objective, config)
    if not isinstance(objective, MaskedPatch | MAE | BEiT | Tokenizer):
        return ForwardMacs(macs(config))
    if isinstance(config, ResNetConfig):
        raise ValueError(f"objective {objective.kind} needs a Vision Transformer")
    if isinstance(objective, Tokenizer):
        encoded, compared, painted = _tokenizer(objective, config)
        return ForwardMacs(encoded + painted, compared)
    if not isinstance(objective, BEiT):
        return ForwardMacs(_masked(objective, config))
    if tokenizer is None:
        raise ValueError("the cost of BEiT depends on its tokenizer")
    encoded, compared, _ = _tokenizer(tokenizer, config)
    return ForwardMacs(_masked(objective, config, tokenizer), encoded + compared)


def _masked(settings: MaskedPatch | MAE | BEiT, config: ViTConfig, tokenizer: Tokenizer | None = None) -> int:
    """Return the MACs of an objective that hides patches, including its head or decoder."""
    with torch.device("meta"):
        model = build(config).to("meta")  # its constants, too
        if isinstance(settings, MaskedPatch):
            objective: MaskedPatchObjective | MAEObjective | BEiTObjective = MaskedPatchObjective(model, settings, 0)
        elif isinstance(settings, MAE):
            objective = MAEObjective(model, settings, 0)
        else:
            assert tokenizer is not None
            objective = BEiTObjective(model, settings, 0, ImageTokenizer(tokenizer, config.patch))
    none = torch.zeros(1, dtype=torch.int64)
    prepared = objective.prepare(Prepared(_images(config, "meta"), none, none, none), step=0)
    return counted_macs(lambda: objective.outputs(prepared))


def _tokenizer(settings: Tokenizer, config: ViTConfig) -> tuple[int, int, int]:
    """Return the MACs of encoding an image, comparing it with all codes, and painting it from codes."""
    with fake(lambda: ImageTokenizer(settings, config.patch)) as tokenizer:
        vectors = torch.empty(1, *config.grid, settings.features, device=ACCELERATOR)
        return (
            counted_macs(lambda: tokenizer.find(_images(config, ACCELERATOR))),
            counted_macs(lambda: tokenizer.codebook.nearest(vectors)),
            counted_macs(lambda: tokenizer.paint(vectors)),
        )


def _dino(settings: DINO, config: Config) -> ForwardMacs:
    """Return the MACs of DINO: the student sees all crops, the teacher only the global ones, and so does an anchor."""
    network = replace(config, classes=0)
    with fake(lambda: Projection(config.features, settings)) as projection:
        head = counted_macs(lambda: projection(torch.empty(1, config.features, device=ACCELERATOR)))
    patch = 1 if isinstance(config, ResNetConfig) else config.patch
    large, small = crop_sizes(config.image_size, config.image_size, patch, settings)
    student = teacher = GLOBAL * (macs(network, large) + head)
    student += settings.local_crops * (macs(network, small) + head)
    if isinstance(settings, DINOv2):
        assert isinstance(network, ViTConfig)
        # the last layer computes all tokens, of which a class token alone is spared the others
        every = macs(network.changed(pool="gap", class_token=network.has_class_token), large)
        masked = hidden_count(large[0] // patch * (large[1] // patch), settings.mask_shares[1])
        more = GLOBAL * (every - macs(network, large)) + masked * head
        student, teacher = student + more, teacher + more
        teacher += GLOBAL * every if settings.gram_weight else 0
    return ForwardMacs(student, teacher)


def _images(config: Config, device: str) -> Tensor:
    return torch.empty(1, config.channels, *config.image_size, dtype=torch.uint8, device=device)
