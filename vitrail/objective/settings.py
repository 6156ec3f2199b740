"""What is learned, as values: from labels, or without any. Torch-free.

Each has a `kind`, by which a configuration chooses among them (`objective: {kind: mae, ratio: 0.6}`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.config import Duration, Epochs


@dataclass(frozen=True)
class Supervised:
    """Learning from labels (`vitrail.objective.supervised`)."""

    kind: Literal["supervised"] = "supervised"
    loss: Literal["softmax", "sigmoid", "bce"] = "softmax"
    """softmax: cross-entropy; sigmoid: cross-entropy per class, summed over classes (paper, pre-training);
    bce: the same, averaged over classes (A2, DeiT-III)."""
    smoothing: float = 0.0
    """Label smoothing."""
    bce_threshold: float | None = None
    """bce: targets above this become 1, after mixing (A2 uses 0.0: every mixed class counts fully)."""
    head_bias: float = 0.0
    """Initial bias of the classifier (-10 for sigmoid on ImageNet-21k)."""


@dataclass(frozen=True)
class MaskedPatch:
    """Masked patch prediction (`vitrail.objective.masked_patch`; paper, 4.6 and B.1.2)."""

    kind: Literal["masked-patch"] = "masked-patch"
    corrupt: float = 0.5
    """Share of the patch embeddings that are corrupted (the paper also tried 0.15, BERT's)."""
    mask: float = 0.8
    """Of those, the share that becomes the learned [mask] embedding."""
    other: float = 0.1
    """Of those, the share that becomes the embedding of another patch of the image; what is left stays as it is."""
    target: Literal["colour", "small", "pixels"] = "colour"
    """colour: the patch's mean colour in 3 bits a channel, one of 512; small: the same of each cell of the patch
    cut 4 x 4, 16 predictions; pixels: every pixel, by regression (L2)."""
    mask_after_stem: bool = False
    """Allow stems in which patches mix before they are corrupted."""


@dataclass(frozen=True)
class MAE:
    """Masked autoencoder (`vitrail.objective.mae`; He et al. 2022)."""

    kind: Literal["mae"] = "mae"
    ratio: float = 0.75
    """Share of the patches that the encoder does not see."""
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    normalise: bool = True
    """Predict pixels with the mean and deviation of their patch taken out."""
    mask_after_stem: bool = False
    """Allow stems in which patches mix before they are masked."""


@dataclass(frozen=True)
class BEiT:
    """Prediction of visual tokens behind blocks of masked patches (`objective.beit.objective`; Bao et al. 2022)."""

    kind: Literal["beit"] = "beit"
    tokenizer: str = ""
    """Run folder or file of a tokenizer, trained before with `objective: {kind: tokenizer}`."""
    ratio: float = 75 / 196
    """Share of the patches that are masked; BEiT's code masks 75 of 196."""
    smallest_block: int = 16
    """Patches."""
    aspect: float = 0.3
    """Blocks have a height over width between this and its inverse."""
    mask_after_stem: bool = False
    """Allow stems in which patches mix before they are masked (the follow-up's experiment, section 5)."""


@dataclass(frozen=True)
class Tokenizer:
    """A discrete autoencoder that gives each patch one of `codes` visual tokens (`objective.beit.tokenizer`)."""

    kind: Literal["tokenizer"] = "tokenizer"
    codes: int = 8192
    width: int = 256
    """Features of its convolutions."""
    depth: int = 2
    """Residual blocks on each side."""
    features: int = 32
    """Of a code, and of what is compared with it."""
    decay: float = 0.99
    """Of the moving averages that the codes are, for each step."""
    commitment: float = 0.25
    """Weight of the squared distance of what is compared from its code, which the convolutions keep small."""


@dataclass(frozen=True)
class DINO:
    """Self-distillation without labels (`vitrail.objective.dino.objective`; Caron et al. 2021)."""

    kind: Literal["dino"] = "dino"
    outputs: int = 65_536
    """What teacher and student tell crops apart by."""
    hidden: int = 2048
    """Features of the two hidden layers of the projection."""
    bottleneck: int = 256
    """Features in front of its last layer, where their length is made 1."""
    norm_last_layer: bool = True
    """Keep the rows of the last layer at length 1; without it small networks learn more, and may become unstable."""
    freeze_last_layer: Duration = Epochs(1)
    """The last layer stays as it began for so long."""
    view: float = 1.0
    """Side of the image that crops are cut from, as a multiple of the network's input, for photographs that have more
    pixels to show; at least 1."""
    global_scale: tuple[float, float] = (0.4, 1.0)
    """Share of the image's area in each of the two global crops, which the teacher sees."""
    global_size: float = 1.0
    """Side of a global crop as a share of the network's input, in whole patches; a half is four times as fast."""
    local_scale: tuple[float, float] = (0.05, 0.4)
    local_crops: int = 8
    """Which only the student sees."""
    local_size: float = 96 / 224
    """Side of a local crop as a share of a global one's; rounded to whole patches."""
    jitter: float = 1.0
    """Strength of the changes of colour; 1 is the paper's, 0 is none."""
    blur: float = 2.0
    """Largest standard deviation of the blur in pixels, where crops are blurred; 0 is none."""
    student_temperature: float = 0.1
    teacher_temperature: tuple[float, float] = (0.04, 0.07)
    """At the start, and from the end of `temperature_warmup` on."""
    temperature_warmup: Duration = Epochs(30)
    teacher_momentum: float = 0.996
    """Of the teacher's moving average of the student at the start; it grows to 1 along half a cosine."""
    centring: Literal["mean", "sinkhorn"] = "mean"
    """What is taken away from the teacher's answers so that no output wins everywhere. mean: the moving average of
    its answers; sinkhorn: what gives every output an equal share of the images of the step (Sinkhorn-Knopp; SwAV,
    DINOv2)."""
    centre_momentum: float = 0.9
    """Of the moving average of the centre; with sinkhorn it serves evaluations only."""
