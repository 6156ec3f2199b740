"""The settings of each objective, with or without labels. Torch-free.

A configuration chooses an objective by its `kind` (`objective: {kind: mae, ratio: 0.6}`). The docstring of each field
is the help text of its flag. An objective of one's own is a subclass: of `Supervised` with other `losses`, or of
`ObjectiveSettings` with its own `build` (`vitrail.import_path`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from vitrail.durations import AnyLength, Epochs, Length
from vitrail.errors import UsageError
from vitrail.import_path import Extensible, find
from vitrail.ranges import (
    Count,
    Decay,
    Depth,
    Finite,
    Fraction,
    NotNegative,
    Part,
    Positive,
    Range,
    Settings,
    Share,
    Width,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitrail.objective.base import Objective, RunFacts


class ObjectiveSettings(Extensible, section="objective"):
    """Base of the settings of an objective. `build` makes the objective."""

    kind: Any = "own"
    labels: ClassVar[bool] = True
    """Whether the network learns from labels and has a classifier. If not, `build` makes a `SelfSupervised`."""
    numbers: ClassVar[bool] = False
    """Whether the labels are numbers, and the network predicts numbers."""
    made_by: ClassVar[str] = ""
    """Import path of the `Objective` that `build` makes."""

    def build(self, model: nn.Module, task: RunFacts) -> Objective:
        """Return the objective that owns and trains `model`."""
        objective: Objective = find(self.made_by).of(model, self, task)
        return objective


@dataclass(frozen=True)
class Supervised(ObjectiveSettings):
    """Learning from labels (`vitrail.objective.supervised`)."""

    made_by: ClassVar[str] = "vitrail.objective.supervised:SupervisedObjective"

    kind: Literal["supervised"] = "supervised"
    """The objective: learning from labels."""
    loss: Literal["softmax", "sigmoid", "bce", "asymmetric"] = "softmax"
    """Loss function. softmax: cross-entropy; sigmoid: binary cross-entropy summed over classes (paper, pre-training);
    bce: binary cross-entropy averaged over classes (A2, DeiT-III); asymmetric: sigmoid with less weight on classes that
    an image does not have (ASL). If images have several labels, sigmoid replaces softmax."""
    smoothing: Decay = 0.0
    """Label smoothing: share of the target that is spread over all classes."""
    bce_threshold: Finite | None = None
    """For loss bce: targets above this value become 1 after mixing. A2 uses 0.0, so every mixed class counts fully
    (default: targets stay as they are)."""
    gamma_positive: NotNegative = 0.0
    """For loss asymmetric: focusing exponent of the classes that an image has."""
    gamma_negative: NotNegative = 4.0
    """For loss asymmetric: focusing exponent of the classes that an image does not have."""
    margin: Decay = 0.05
    """For loss asymmetric: probability up to which a class that an image does not have costs nothing."""
    focal_gamma: NotNegative = 0.0
    """Focusing exponent of focal loss (Lin et al. 2017), usually 2: each loss is multiplied by (1 - p) to this power,
    where p is the probability that the network gives to the truth, so that easy images count less. For loss softmax,
    sigmoid and bce; 0 for none."""
    head_bias: Finite = 0.0
    """Initial bias of the classifier, such as -10 for sigmoid on ImageNet-21k."""
    class_weights: Literal["none", "balanced", "effective"] = "none"
    """Weight of each class in the loss. balanced: inverse to its number of images; effective: inverse to its effective
    number of images, which grows ever more slowly (Cui et al. 2019). The mean weight of a training image is 1."""
    class_weights_beta: Annotated[float, Range(0, 1, below=True)] = 0.9999
    """For class weights effective: share by which each further image of a class counts less than the one before."""
    logit_adjustment: NotNegative = 0.0
    """Strength of logit adjustment for rare classes (Menon et al. 2021), usually 1: the logarithm of each class's share
    of the training images, times this value, is added to its logit during training. For loss softmax; 0 for none."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each image [batch], from logits [batch, classes].

        targets: int64 [batch], or float [batch, classes] after mixup or CutMix.
        """
        values: Tensor = find("vitrail.objective.supervised:supervised_loss")(logits, targets, self)
        return values


@dataclass(frozen=True)
class Regression(ObjectiveSettings):
    """Prediction of one or several numbers for each image (`vitrail.objective.supervised`)."""

    numbers: ClassVar[bool] = True
    made_by: ClassVar[str] = "vitrail.objective.supervised:RegressionObjective"
    kind: Literal["regression"] = "regression"
    """The objective: prediction of numbers."""
    loss: Literal["mse", "huber"] = "mse"
    """Loss function, of errors in standard deviations of a target. mse: squared error; huber: squared up to
    `huber_delta` and linear above it, so that a few wrong numbers count less (Huber 1964)."""
    huber_delta: Positive = 1.0
    """For loss huber: error in standard deviations of the target above which the loss is linear."""


@dataclass(frozen=True)
class SeveralAnswers(ObjectiveSettings):
    """Several answers for each image at once (`vitrail.objective.answers`)."""

    made_by: ClassVar[str] = "vitrail.objective.answers:SeveralAnswersObjective"
    kind: Literal["answers"] = "answers"
    """The objective: several answers for an image, those that data.answers names."""
    answer_weights: tuple[str, ...] = ()
    """Weights of the answers in the loss: species=1 weight_g=0.5. The loss is the sum of the answers' losses, each a
    mean over the images that have the answer, times its weight (default: 1 for each)."""
    smoothing: Decay = 0.0
    """Label smoothing of classes and sets of labels: share of the target that is spread over all classes."""
    number_loss: Literal["mse", "huber"] = "mse"
    """Loss of numbers, of errors in standard deviations. mse: squared error; huber: linear from one deviation on."""


@dataclass(frozen=True)
class Segmentation(ObjectiveSettings):
    """Prediction of the class of each pixel (`vitrail.objective.segmentation`)."""

    made_by: ClassVar[str] = "vitrail.objective.segmentation:SegmentationObjective"
    kind: Literal["segmentation"] = "segmentation"
    """The objective: prediction of the class of each pixel. Images with masks have it without being asked."""

    def build(self, model: nn.Module, task: RunFacts) -> Objective:
        """See `ObjectiveSettings`. Queries have a loss of their own (`vitrail.objective.queries`)."""
        if model.config.segmentation != "queries":  # type: ignore[union-attr]
            return super().build(model, task)
        objective: Objective = find("vitrail.objective.queries:QueryObjective").of(model, self, task)
        return objective


@dataclass(frozen=True)
class Distill(Settings, section="distill"):
    """What the network learns from the teacher that `Run.teacher` names (`vitrail.objective.distillation`)."""

    kind: Literal["soft", "hard", "features"] = "soft"
    """Target. soft: the teacher's probabilities; hard: its best class; features: its pooled features, of any width."""
    weight: Share = 0.5
    """Share of the teacher in the loss; the rest is the loss of the labels."""
    temperature: Positive = 3.0
    """For kind soft: the logits of both networks are divided by this value."""
    features: Literal["cosine", "mse"] = "cosine"
    """For kind features: distance of the features. mse: mean squared difference after normalisation of each image's
    features to mean 0 and variance 1."""


@dataclass(frozen=True)
class MaskedPatch(ObjectiveSettings):
    """Masked patch prediction (`vitrail.objective.masked_patch`; paper, 4.6 and B.1.2)."""

    labels: ClassVar[bool] = False
    made_by: ClassVar[str] = "vitrail.objective.masked_patch:MaskedPatchObjective"
    kind: Literal["masked-patch"] = "masked-patch"
    """The objective: masked patch prediction."""
    corrupt: Fraction = 0.5
    """Share of the patch embeddings that are corrupted. The paper also tried 0.15, as BERT uses."""
    mask: Share = 0.8
    """Share of the corrupted embeddings that become the learned [mask] embedding."""
    other: Share = 0.1
    """Share of the corrupted embeddings that become the embedding of another patch. The rest stays unchanged."""
    target: Literal["colour", "small", "pixels"] = "colour"
    """Prediction target. colour: the patch's mean colour in 3 bits per channel, one of 512; small: that colour for each
    cell of a 4 x 4 grid in the patch, 16 predictions; pixels: every pixel, by regression (L2)."""
    mask_after_stem: bool = False
    """Allow stems that mix patches before they are corrupted."""


@dataclass(frozen=True)
class MAE(ObjectiveSettings):
    """Masked autoencoder (`vitrail.objective.mae`; He et al. 2022)."""

    labels: ClassVar[bool] = False
    made_by: ClassVar[str] = "vitrail.objective.mae:MAEObjective"
    kind: Literal["mae"] = "mae"
    """The objective: masked autoencoder."""
    ratio: Fraction = 0.75
    """Share of the patches that are hidden from the encoder."""
    decoder_width: Width = 512
    """Number of values in each token of the decoder."""
    decoder_depth: Depth = 8
    """Number of blocks of the decoder."""
    decoder_heads: Width = 16
    """Number of attention heads in each block of the decoder."""
    normalise: bool = True
    """Predict pixels normalised by the mean and standard deviation of their patch."""
    mask_after_stem: bool = False
    """Allow stems that mix patches before they are masked."""


@dataclass(frozen=True)
class BEiT(ObjectiveSettings):
    """Prediction of the visual tokens of masked patches (`objective.beit`; Bao et al. 2022)."""

    labels: ClassVar[bool] = False
    made_by: ClassVar[str] = "vitrail.objective.beit:BEiTObjective"
    kind: Literal["beit"] = "beit"
    """The objective: prediction of visual tokens (BEiT)."""
    tokenizer: str = ""
    """Run folder or file of a tokenizer. Train one first with `objective: {kind: tokenizer}`."""
    ratio: Fraction = 75 / 196
    """Share of the patches that are masked. BEiT's code masks 75 of 196."""
    smallest_block: Count = 16
    """Smallest number of patches in a masked block."""
    aspect: Part = 0.3
    """Smallest aspect ratio (height over width) of a masked block; its inverse is the largest."""
    mask_after_stem: bool = False
    """Allow stems that mix patches before they are masked (the follow-up's experiment, section 5)."""


@dataclass(frozen=True)
class Tokenizer(ObjectiveSettings):
    """A discrete autoencoder that gives each patch one of `codes` visual tokens (`objective.tokenizer`)."""

    labels: ClassVar[bool] = False
    made_by: ClassVar[str] = "vitrail.objective.tokenizer:TokenizerObjective"
    kind: Literal["tokenizer"] = "tokenizer"
    """The objective: a tokenizer for BEiT."""
    codes: Annotated[int, Range(2, 2**20)] = 8192
    """Number of visual tokens (codes)."""
    width: Width = 256
    """Number of channels of the convolutions."""
    depth: Annotated[int, Range(0, 1000)] = 2
    """Number of residual blocks in the encoder, and in the decoder."""
    features: Annotated[int, Range(2, 2**16)] = 32
    """Number of values in a visual token's code vector."""
    decay: Decay = 0.99
    """Decay per step of the moving averages that form the codes."""
    commitment: NotNegative = 0.25
    """Weight of the commitment loss, the squared distance between the encoder's output and its code."""


@dataclass(frozen=True)
class DINO(ObjectiveSettings):
    """Self-distillation without labels (`vitrail.objective.dino`; Caron et al. 2021)."""

    labels: ClassVar[bool] = False
    made_by: ClassVar[str] = "vitrail.objective.dino:DINOObjective"
    kind: Literal["dino"] = "dino"
    """The objective: self-distillation (DINO)."""
    outputs: Annotated[int, Range(2, 2**20)] = 65_536
    """Number of outputs of the projection head (prototypes)."""
    hidden: Width = 2048
    """Number of units in each of the two hidden layers of the projection head."""
    bottleneck: Width = 256
    """Number of values in front of the projection head's last layer, where they are normalised to length 1."""
    norm_last_layer: bool = True
    """Keep the rows of the projection head's last layer at length 1. Without it small networks learn more but may
    become unstable."""
    freeze_last_layer: AnyLength = Epochs(1)
    """How long the last layer of the projection head stays frozen at the start."""
    view: Annotated[float, Range(1, 100)] = 1.0
    """Side of the image from which crops are cut, as a multiple of the network's input. Use more than 1 for photographs
    with more pixels; at least 1."""
    global_scale: tuple[Part, Part] = (0.4, 1.0)
    """Smallest and largest share of the image's area in a global crop. There are two; the teacher sees them."""
    global_size: Part = 1.0
    """Side of a global crop as a share of the network's input, in whole patches. Half the side is four times as
    fast."""
    local_scale: tuple[Part, Part] = (0.05, 0.4)
    """Smallest and largest share of the image's area in a local crop."""
    local_crops: Annotated[int, Range(0, 1000)] = 8
    """Number of local crops per image, which only the student sees."""
    local_size: Part = 96 / 224
    """Side of a local crop as a share of the side of a global crop, rounded to whole patches."""
    jitter: Annotated[float, Range(0, 2.5)] = 1.0
    """Strength of colour jitter: 1 as in the paper, 0 for none."""
    blur: Annotated[float, Range(0.1, 1000, extra=0)] = 2.0
    """Largest standard deviation of the Gaussian blur in pixels; 0 for no blur."""
    student_temperature: Positive = 0.1
    """Softmax temperature of the student."""
    teacher_temperature: tuple[Positive, Positive] = (0.04, 0.07)
    """Softmax temperature of the teacher at the start, and after `temperature_warmup`."""
    temperature_warmup: AnyLength = Epochs(30)
    """How long the teacher's temperature rises from its first value to its second."""
    teacher_momentum: Share = 0.996
    """Momentum of the teacher, a moving average of the student, at the start. It grows to 1 along half a cosine."""
    centring: Literal["mean", "sinkhorn"] = "mean"
    """How the teacher's outputs are balanced, so that no output dominates. mean: subtract their moving average;
    sinkhorn: give every output an equal share of the step's images (Sinkhorn-Knopp; SwAV, DINOv2)."""
    centre_momentum: Share = 0.9
    """Momentum of the centre's moving average. With sinkhorn only evaluations use it."""

    pairs: ClassVar[tuple[str, ...]] = ("global_scale", "local_scale")
    """Settings that are a smallest and a largest value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.pairs:
            low, high = getattr(self, name)
            if low > high:
                raise UsageError(f"objective.{name} is {(low, high)}; it must be (low, high) with low <= high")


@dataclass(frozen=True)
class DINOv2(DINO):
    """DINO, predictions of masked patches, and an anchor for similarities (`vitrail.objective.dinov2`)."""

    made_by: ClassVar[str] = "vitrail.objective.dinov2:DINOv2Objective"
    pairs: ClassVar[tuple[str, ...]] = (*DINO.pairs, "mask_shares")
    kind: Literal["dinov2"] = "dinov2"  # type: ignore[assignment]
    """The objective: self-distillation of images and of masked patches (DINOv2, DINOv3), also from loaded weights."""
    global_scale: tuple[Part, Part] = (0.32, 1.0)
    """Smallest and largest share of the image's area in a global crop. There are two; the teacher sees them."""
    local_scale: tuple[Part, Part] = (0.05, 0.32)
    """Smallest and largest share of the image's area in a local crop."""
    teacher_momentum: Share = 0.992
    """Momentum of the teacher, a moving average of the student, at the start. It grows to 1 along half a cosine."""
    centring: Literal["mean", "sinkhorn"] = "sinkhorn"
    """How the teacher's outputs are balanced, so that no output dominates. mean: subtract their moving average;
    sinkhorn: give every output an equal share of the step's images (Sinkhorn-Knopp; SwAV, DINOv2)."""
    mask_shares: tuple[Fraction, Fraction] = (0.1, 0.5)
    """Smallest and largest share of the patches that are masked in one of the two global crops. The student predicts
    the teacher's outputs for them (iBOT)."""
    patch_weight: NotNegative = 1.0
    """Weight of the loss of masked patches."""
    patch_head: Literal["shared", "separate"] = "separate"
    """Projection head of the patches. separate: one of their own, as in DINOv2's published networks; shared: that of
    the images."""
    koleo_weight: NotNegative = 0.1
    """Weight of the KoLeo loss, which moves the features of each image away from the most similar ones in the step."""
    gram_weight: NotNegative = 0.0
    """Weight of Gram anchoring (DINOv3): the similarities of an image's patches stay near those in a frozen network,
    the loaded weights. It keeps features of single patches good, which segmentation needs."""
    gram_start: AnyLength = Epochs(0)
    """When Gram anchoring begins."""
    gram_refresh: Length | None = None
    """Time after which the frozen network becomes the present teacher, again and again (default: it stays what was
    loaded)."""
