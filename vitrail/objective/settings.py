"""The settings of each objective, with or without labels. Torch-free.

A configuration chooses an objective by its `kind` (`objective: {kind: mae, ratio: 0.6}`). The docstring of each field
is the help text of its flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.config import Duration, Epochs


@dataclass(frozen=True)
class Supervised:
    """Learning from labels (`vitrail.objective.supervised`)."""

    kind: Literal["supervised"] = "supervised"
    """The objective: learning from labels."""
    loss: Literal["softmax", "sigmoid", "bce"] = "softmax"
    """Loss function. softmax: cross-entropy; sigmoid: binary cross-entropy summed over classes (paper, pre-training);
    bce: binary cross-entropy averaged over classes (A2, DeiT-III)."""
    smoothing: float = 0.0
    """Label smoothing: share of the target that is spread over all classes."""
    bce_threshold: float | None = None
    """For loss bce: targets above this value become 1 after mixing. A2 uses 0.0, so every mixed class counts fully
    (default: targets stay as they are)."""
    head_bias: float = 0.0
    """Initial bias of the classifier, such as -10 for sigmoid on ImageNet-21k."""


@dataclass(frozen=True)
class MaskedPatch:
    """Masked patch prediction (`vitrail.objective.masked_patch`; paper, 4.6 and B.1.2)."""

    kind: Literal["masked-patch"] = "masked-patch"
    """The objective: masked patch prediction."""
    corrupt: float = 0.5
    """Share of the patch embeddings that are corrupted. The paper also tried 0.15, as BERT uses."""
    mask: float = 0.8
    """Share of the corrupted embeddings that become the learned [mask] embedding."""
    other: float = 0.1
    """Share of the corrupted embeddings that become the embedding of another patch. The rest stays unchanged."""
    target: Literal["colour", "small", "pixels"] = "colour"
    """Prediction target. colour: the patch's mean colour in 3 bits per channel, one of 512; small: that colour for each
    cell of a 4 x 4 grid in the patch, 16 predictions; pixels: every pixel, by regression (L2)."""
    mask_after_stem: bool = False
    """Allow stems that mix patches before they are corrupted."""


@dataclass(frozen=True)
class MAE:
    """Masked autoencoder (`vitrail.objective.mae`; He et al. 2022)."""

    kind: Literal["mae"] = "mae"
    """The objective: masked autoencoder."""
    ratio: float = 0.75
    """Share of the patches that are hidden from the encoder."""
    decoder_width: int = 512
    """Number of values in each token of the decoder."""
    decoder_depth: int = 8
    """Number of blocks of the decoder."""
    decoder_heads: int = 16
    """Number of attention heads in each block of the decoder."""
    normalise: bool = True
    """Predict pixels normalised by the mean and standard deviation of their patch."""
    mask_after_stem: bool = False
    """Allow stems that mix patches before they are masked."""


@dataclass(frozen=True)
class BEiT:
    """Prediction of the visual tokens of masked patches (`objective.beit.objective`; Bao et al. 2022)."""

    kind: Literal["beit"] = "beit"
    """The objective: prediction of visual tokens (BEiT)."""
    tokenizer: str = ""
    """Run folder or file of a tokenizer. Train one first with `objective: {kind: tokenizer}`."""
    ratio: float = 75 / 196
    """Share of the patches that are masked. BEiT's code masks 75 of 196."""
    smallest_block: int = 16
    """Smallest number of patches in a masked block."""
    aspect: float = 0.3
    """Smallest aspect ratio (height over width) of a masked block; its inverse is the largest."""
    mask_after_stem: bool = False
    """Allow stems that mix patches before they are masked (the follow-up's experiment, section 5)."""


@dataclass(frozen=True)
class Tokenizer:
    """A discrete autoencoder that gives each patch one of `codes` visual tokens (`objective.beit.tokenizer`)."""

    kind: Literal["tokenizer"] = "tokenizer"
    """The objective: a tokenizer for BEiT."""
    codes: int = 8192
    """Number of visual tokens (codes)."""
    width: int = 256
    """Number of channels of the convolutions."""
    depth: int = 2
    """Number of residual blocks in the encoder, and in the decoder."""
    features: int = 32
    """Number of values in a visual token's code vector."""
    decay: float = 0.99
    """Decay per step of the moving averages that form the codes."""
    commitment: float = 0.25
    """Weight of the commitment loss, the squared distance between the encoder's output and its code."""


@dataclass(frozen=True)
class DINO:
    """Self-distillation without labels (`vitrail.objective.dino.objective`; Caron et al. 2021)."""

    kind: Literal["dino"] = "dino"
    """The objective: self-distillation (DINO)."""
    outputs: int = 65_536
    """Number of outputs of the projection head (prototypes)."""
    hidden: int = 2048
    """Number of units in each of the two hidden layers of the projection head."""
    bottleneck: int = 256
    """Number of values in front of the projection head's last layer, where they are normalised to length 1."""
    norm_last_layer: bool = True
    """Keep the rows of the projection head's last layer at length 1. Without it small networks learn more but may
    become unstable."""
    freeze_last_layer: Duration = Epochs(1)
    """How long the last layer of the projection head stays frozen at the start."""
    view: float = 1.0
    """Side of the image from which crops are cut, as a multiple of the network's input. Use more than 1 for photographs
    with more pixels; at least 1."""
    global_scale: tuple[float, float] = (0.4, 1.0)
    """Smallest and largest share of the image's area in a global crop. There are two; the teacher sees them."""
    global_size: float = 1.0
    """Side of a global crop as a share of the network's input, in whole patches. Half the side is four times as
    fast."""
    local_scale: tuple[float, float] = (0.05, 0.4)
    """Smallest and largest share of the image's area in a local crop."""
    local_crops: int = 8
    """Number of local crops per image, which only the student sees."""
    local_size: float = 96 / 224
    """Side of a local crop as a share of the side of a global crop, rounded to whole patches."""
    jitter: float = 1.0
    """Strength of colour jitter: 1 as in the paper, 0 for none."""
    blur: float = 2.0
    """Largest standard deviation of the Gaussian blur in pixels; 0 for no blur."""
    student_temperature: float = 0.1
    """Softmax temperature of the student."""
    teacher_temperature: tuple[float, float] = (0.04, 0.07)
    """Softmax temperature of the teacher at the start, and after `temperature_warmup`."""
    temperature_warmup: Duration = Epochs(30)
    """How long the teacher's temperature rises from its first value to its second."""
    teacher_momentum: float = 0.996
    """Momentum of the teacher, a moving average of the student, at the start. It grows to 1 along half a cosine."""
    centring: Literal["mean", "sinkhorn"] = "mean"
    """How the teacher's outputs are balanced, so that no output dominates. mean: subtract their moving average;
    sinkhorn: give every output an equal share of the step's images (Sinkhorn-Knopp; SwAV, DINOv2)."""
    centre_momentum: float = 0.9
    """Momentum of the centre's moving average. With sinkhorn only evaluations use it."""
