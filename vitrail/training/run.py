"""`Run`: a whole experiment as one value. Torch-free; `config.yaml` in a run folder is this, written out.

A recipe is a function that returns one; a variation is `dataclasses.replace(run, ...)`. None means that the value is
decided from the data and the machine before the first step; the run folder records the decision. The docstring of each
field is the help text of its flag.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from vitrail.data.settings import Augment, Data, Preparation, Preprocess
from vitrail.device import ComputePrecision, Precision
from vitrail.durations import AnyLength, Epochs, Length, Minutes, Percent
from vitrail.errors import UsageError
from vitrail.evaluation.metric import Metric
from vitrail.import_path import Extensible
from vitrail.model.limits import Init, Pool, PositionKind, PositionPlace, Stem
from vitrail.model.own_part import OwnPart
from vitrail.objective.settings import (
    DINO,
    MAE,
    BEiT,
    DINOv2,
    Distill,
    MaskedPatch,
    ObjectiveSettings,
    Regression,
    Segmentation,
    SeveralAnswers,
    Supervised,
    Tokenizer,
)
from vitrail.ranges import (
    Count,
    Decay,
    Depth,
    DropPath,
    FolderName,
    Heads,
    Hidden,
    InputSize,
    NotNegative,
    Part,
    Positive,
    Range,
    Registers,
    Seconds,
    Seed,
    Settings,
    Side,
    Threads,
    Width,
    shortest_size,
)
from vitrail.words import listing

if TYPE_CHECKING:
    import torch

    from vitrail.objective.base import Moment

Track = Literal["tensorboard", "wandb", "mlflow"]
Tune = Literal["all", "attention", "attention+positions", "ffn", "head", "lora"]
"""The whole network; the attention layers and the classifier, also with the positions; the MLPs and the classifier; the
classifier alone; low-rank updates of dense layers and the classifier."""
LORA = ("lora_rank", "lora_alpha", "lora_on")
"""Settings for tune lora."""
COMBINABLE = ("dropout", "drop_path", "drop_path_shape", "patch", "head", "init", "segmentation", "queries")
"""Fields of `Run.vit` that can be combined with existing weights. They change no tensors, except that another patch
resamples some, and that a new classifier is drawn anew."""
NOMINAL = Epochs(30)
"""Length of a run; where only a time limit ends it, the length of its schedule, which is stretched over the time."""


@dataclass(frozen=True)
class Model(Settings, section="vit"):
    """Changes to the named architecture. None keeps its value (see `vitrail.model.variants.ViTConfig`)."""

    width: Width | None = None
    """Number of values in each token (default: the architecture's)."""
    depth: Depth | None = None
    """Number of blocks (default: the architecture's)."""
    heads: Heads | None = None
    """Number of attention heads in each block (default: the architecture's)."""
    mlp_dim: Hidden | None = None
    """Number of hidden units in each MLP (default: the architecture's)."""
    patch: Side | None = None
    """Side of a patch in pixels. With `weights`, their patch kernels and positions are resampled to this size
    (default: the architecture's)."""
    stem: Stem | OwnPart | None = None
    """How an image becomes patch embeddings, or the import path of a stem of your own (default: the architecture's)."""
    stem_norm: Literal["batch", "layer"] | None = None
    """Normalisation inside the stem (default: the architecture's)."""
    attention: OwnPart | None = None
    """Import path of an attention of your own (default: multi-head self-attention)."""
    positions: PositionKind | OwnPart | None = None
    """Kind of position embedding, or the import path of one of your own (default: the architecture's)."""
    place: PositionPlace | None = None
    """Where the position embedding is added (default: the architecture's)."""
    pool: Pool | None = None
    """How the tokens become the features of the classifier (default: the architecture's)."""
    cls_position: bool | None = None
    """Give the class token a position embedding of its own (default: the architecture's)."""
    registers: Registers | None = None
    """Number of register tokens (default: the architecture's)."""
    head: OwnPart | None = None
    """Import path of a classifier of your own (default: a linear layer)."""
    segmentation: Literal["linear", "layers", "queries"] | None = None
    """Head for images with masks, which tells the class of each patch. linear: a linear layer on the tokens of the last
    layer (Segmenter); layers: convolutions on the tokens of the last four layers, which double the sides twice (SETR);
    queries: learned tokens in the last four blocks, which predict a class and its mask each (EoMT) (default:
    layers)."""
    queries: Annotated[int, Range(1, 10_000)] | None = None
    """For segmentation queries: number of queries, several for each class of an image (default: 100)."""
    pre_logits: Hidden | Literal["width"] | None = None
    """Width of the tanh layer in front of the classifier. width: as wide as the network, as in the paper's pre-training
    (default: the architecture's)."""
    dropout: Decay | None = None
    """Dropout probability (default: the architecture's)."""
    drop_path: DropPath | None = None
    """Largest probability of skipping a residual branch, known as stochastic depth (default: the architecture's)."""
    drop_path_shape: Literal["linear", "constant"] | None = None
    """Let the drop-path probability grow linearly with depth, or keep it constant (default: the architecture's)."""
    layer_scale: Positive | None = None
    """Initial value of LayerScale (default: the architecture's)."""
    init: Init | None = None
    """Whose code draws the initial weights. paper: Xavier kernels and a classifier of zeros; deit: a normal of 0.02 for
    all kernels; beit and mae: theirs, with a classifier near zero. With `weights`, only a new classifier is drawn
    (default: paper)."""

    def changes(self) -> dict[str, Any]:
        """Return the fields that are set: what `vitrail.model.variants.variant` takes with the architecture's name."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


OWN_RATES = {"adamw": (1e-3, 0.05), "sgd": (0.03, 1e-3), "lamb": (3e-3, 0.02), "muon": (4e-3, 0.05)}
"""Optimiser -> its learning rate and weight decay where a user names another optimiser than the recipe's: those of the
small recipes (AdamW, Muon), of BiT (SGD), and of DeiT-III (LAMB)."""


@dataclass(frozen=True)
class Optim(Extensible, section="optim"):
    """The optimiser. Weight decay is decoupled and acts on kernels only, not on biases, norms, class token or
    positions. An optimiser of one's own is a subclass with another `build`."""

    name: Literal["adamw", "sgd", "lamb", "muon"] = "adamw"
    """Optimiser: AdamW, SGD with momentum, LAMB, or Muon. muon: Muon for the dense layers of the blocks, and AdamW for
    everything else, with the learning rate and the weight decay of AdamW. An optimiser that is not the recipe's takes
    its own learning rate and weight decay unless they are given, too."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    weight_decay: NotNegative = 0.05
    """Weight decay, scaled by the scheduled learning rate."""
    weight_decay_end: NotNegative | None = None
    """Weight decay at the end of the run, reached along half a cosine (default: the same as at the start)."""
    layer_decay: Part | None = None
    """Layer-wise learning rate decay. A parameter learns with lr * layer_decay ** (layers + 1 - depth). Its depth is 0
    in stem, tokens and positions, i + 1 in block i, and layers + 1 after the blocks (default: one rate for all)."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the first and second moment, for AdamW and LAMB, and for the AdamW part of Muon."""
    momentum: Decay = 0.9
    """Momentum of SGD. The momentum of Muon is 0.95, as published."""
    eps: Positive = 1e-8
    """Constant added to the denominator of AdamW and LAMB, and of the AdamW part of Muon."""
    clip: Positive | None = 1.0
    """Largest global gradient norm; longer gradients are scaled down. None switches clipping off."""

    def with_own_rate(self, given: Container[str]) -> Optim:
        """Return the optimiser with its own learning rate and weight decay, except those that are `given` by name."""
        lr, decay = OWN_RATES[self.name]
        own = {"lr": lr, "weight_decay": decay, "weight_decay_end": None}
        return replace(self, **{name: value for name, value in own.items() if name not in given})  # type: ignore[arg-type]

    def build(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimiser of these groups of parameters.

        A group has "params", "weight_decay", and "name": "kernels" or "others". With layer-wise decay it also has its
        own "lr", and "factor", its share of the largest rate. In each step "lr" is set anew. If `name` is "muon" it has
        "parts", the number of matrices that each of its weights stores; 0 is for AdamW. All built-in optimisers
        run fused kernels, which are about three times as fast, on CPUs too. LAMB's trust ratio is for kernels only.
        Raises UsageError for an unknown name.
        """
        import torch

        from vitrail.training.optim.rules import LAMB, SGD, Muon

        if self.name == "sgd":
            return SGD(groups, lr=self.lr, momentum=self.momentum, fused=True)
        if self.name == "lamb":
            adapted = [{**group, "adapt": group["name"] == "kernels"} for group in groups]
            return LAMB(adapted, lr=self.lr, betas=self.betas, eps=self.eps)
        if self.name == "muon":
            return Muon(groups, lr=self.lr, betas=self.betas, eps=self.eps)
        if self.name == "adamw":
            return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)
        raise UsageError(f"no optimiser is named {self.name!r}. Valid: adamw, sgd, lamb, muon")


Shape = Literal["cosine", "linear", "rsqrt", "step", "constant"]
"""How the learning rate decays."""


@dataclass(frozen=True)
class Schedule(Extensible, section="schedule"):
    """Learning rate over steps: linear warmup, then a decay to `end`. A schedule of one's own is a subclass with
    another `rate`."""

    shape: Shape = "cosine"
    """How the learning rate decays after the warmup."""
    warmup: AnyLength = Percent(5)
    """Length of the linear warmup."""
    end: NotNegative = 0.0
    """Learning rate at the end of the run, as an absolute value."""
    timescale: Length = field(default_factory=lambda: Percent(10))
    """For shape rsqrt: time after which the learning rate has fallen by sqrt(2)."""
    drops: tuple[Annotated[float, Range(0, 100)], ...] = (30.0, 60.0, 90.0)
    """For shape step: points of the run, in percent, at which the learning rate is divided by ten (BiT)."""

    def rate(self, now: Moment, peak: float) -> float:
        """Return the learning rate of the step that follows `now`; `peak` is `optim.lr`.

        `now.step` and `now.total` count optimiser steps, `now.done` is the share of the run that is over, and
        `now.steps(duration)` converts a duration. Raises UsageError if the values contradict each other.
        """
        return learning_rate(
            now.step,
            now.total,
            peak,
            shape=self.shape,
            warmup=now.steps(self.warmup),
            end=self.end,
            timescale=now.steps(self.timescale),
            drops=[percent * now.total / 100 for percent in self.drops],
        )


def learning_rate(
    step: float,
    total: float,
    base: float,
    *,
    shape: Shape = "cosine",
    warmup: float = 0,
    end: float = 0.0,
    timescale: float | None = None,
    drops: Sequence[float] = (),
) -> float:
    """Return the learning rate of update `step`, counted from 0, of a run of `total`.

    `step`, `total`, `warmup`, `timescale` and `drops` have the same unit, and only their ratios count: optimiser steps,
    seconds of a run limited by time, or fractions of either (total 1). After the end the rate stays the last one.

    With p = (step - warmup) / (total - warmup), the decay from `base` is

    - cosine: to `end` along half a cosine, (1 + cos(pi p)) / 2
    - linear: to `end` along a straight line, 1 - p
    - rsqrt: base / sqrt(1 + (step - warmup) / timescale), never below `end`; default timescale: total / 10
    - step: divided by ten after each of `drops` (from the next step on, because BiT's code compares with <),
      never below `end`
    - constant: no decay

    and the warmup multiplies it by min(1, step / warmup). So the first update has rate 0, as in the original code. The
    paper's text ("learning rate warmup of 10k steps") does not say whether steps are counted from 0 or from 1. A run
    too short to waste an update passes `step + 1`.

    Raises UsageError if the values contradict each other.
    """
    if shape not in get_args(Shape):
        raise UsageError(f"no schedule is named {shape!r}. Valid: {', '.join(get_args(Shape))}")
    if total <= 0 or not 0 <= warmup <= total:
        raise UsageError(f"a warmup of {warmup:g} does not fit a run of {total:g}. It must be from 0 to {total:g}")
    timescale = total / 10 if timescale is None else timescale
    if timescale <= 0:
        raise UsageError(f"the timescale of an rsqrt schedule is {timescale:g}; it must be above 0")
    if any(not 0 <= drop <= total for drop in drops):
        raise UsageError(f"the drops of a step schedule are {list(drops)}; each must be from 0 to {total:g}")
    step = min(max(step, 0), total)
    after = max(step - warmup, 0)
    progress = after / (total - warmup) if total > warmup else 0.0
    if shape == "cosine":
        rate = end + (base - end) * (1 + math.cos(math.pi * progress)) / 2
    elif shape == "linear":
        rate = end + (base - end) * (1 - progress)
    elif shape == "rsqrt":
        rate = max(base / math.sqrt(1 + after / timescale), min(end, base))
    elif shape == "step":
        rate = max(base * 0.1 ** sum(drop < step for drop in drops), min(end, base))
    else:
        rate = base
    return rate * (step / warmup) if step < warmup else rate


@dataclass(frozen=True)
class Average(Settings, section="average"):
    """A second set of weights, averaged over steps. It is evaluated and saved as the model."""

    kind: Literal["none", "ema", "polyak"] = "none"
    """Weight averaging. ema: exponential with `decay`, which ramps up over the first steps; polyak: uniform mean of all
    steps from `start`."""
    decay: Decay = 0.9999
    """For ema: share of the average that each step keeps."""
    start: AnyLength = Percent(75)
    """For polyak: when averaging starts."""


@dataclass(frozen=True)
class Progressive(Settings, section="progressive"):
    """Progressive resizing: small images first. They have fewer tokens, so more epochs fit into the same time."""

    start: Part = 1.0
    """Side of the first images as a share of the full side; 1 switches progressive resizing off."""
    until: AnyLength = Percent(80)
    """When images reach the full side."""


@dataclass(frozen=True)
class Run(Settings):
    """One training run, complete."""

    gone: ClassVar[tuple[str, ...]] = ("wide_branches", "concurrent")

    name: Annotated[str, FolderName()] = "train"
    """Name of the run. Its folder is `out`/`name`-<n>."""
    out: str = "runs"
    """Folder in which the run folder is created."""
    data: Data = field(default_factory=Data)
    """Where the images are and how they are split."""
    model: str | None = None
    """Network that is trained, such as S/16, B/32, R50+B/16 or R50x1 (`vitrail.model.variants.variant` lists them). It
    is exactly the network of this name: what a recipe changes in `vit` is for the recipe's own network (default: that
    of `weights` or of the recipe; S/16 without either)."""
    vit: Model = field(default_factory=Model)
    """Changes to the named architecture."""
    image_size: InputSize | None = None
    """Size of the input in pixels: the side of a square, or height and width, such as 32 64 (default: a square from the
    data, or the size of the weights)."""
    weights: str | None = None
    """Weights to start from: a run, a model folder, a weight file, or a name on the hub. The classifier becomes a zero
    layer unless `keep_head` is set, or `vit.init` says how it is drawn (default: random initialisation)."""
    keep_head: bool = False
    """Keep the classifier of `weights` instead of a zero one. The classes must be the same, in the same order."""
    classes: tuple[str, ...] = ("replace",)
    """Classes of the network, which are known by their names. replace: those of the images alone, with a new
    classifier; add: the classes of `weights` and those of the images; merge WOLF=DOG ...: the classes of `weights`,
    where a class gets a new name or that of another class; remove [NAME ...]: the classes of `weights` without those
    that are named, or without those of no image. With all but replace, the classifier keeps the rows of its classes."""
    probe_head: bool = False
    """Fit the new classifier to the features of the frozen network before the first step (a linear probe), instead of a
    zero one; with masks, the head for pixels. It is evaluated like any later model, so the best model is never worse
    than the probe. BatchNorms keep the statistics of the weights, with which the probe was fitted."""
    tune: Tune = "all"
    """Which part of the pretrained network is trained; the classifier always is. Checkpoints store only the trained
    part. lora: updates of low rank, which are added to the weights afterwards."""
    lora_rank: Annotated[int, Range(1, 2**16)] | None = None
    """For tune lora: rank of the updates (default: 8)."""
    lora_alpha: Positive | None = None
    """For tune lora: the updates are multiplied by this value divided by the rank (default: the rank, so that the
    factor is 1)."""
    lora_on: Literal["attention", "mlp", "both"] | None = None
    """For tune lora: layers that get an update. attention: q, k, v and output projections; mlp: both dense layers of
    the MLPs (default: attention)."""
    objective: (
        Supervised | Regression | Segmentation | SeveralAnswers | MaskedPatch | MAE | BEiT | DINO | DINOv2 | Tokenizer
        | ObjectiveSettings
    ) = field(default_factory=Supervised)  # fmt: skip
    """What the network learns, chosen by `objective.kind`: from labels, numbers or masks (with the head
    `vit.segmentation`), or without labels."""
    teacher: str | None = None
    """Trained network from which this one learns, too (distillation): a run, a model folder, a weight file, or a name
    on the hub. It sees the same augmented images (default: labels only)."""
    distill: Distill = field(default_factory=Distill)
    """What is learned from the teacher."""
    augment: Augment = field(default_factory=Augment)
    """Random changes to training images."""
    preprocess: Preparation | None = None
    """How validation images are prepared (default: squash if all images have one size, else resize and crop 0.875)."""
    optim: Optim = field(default_factory=Optim)
    """The optimiser."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over the run."""
    average: Average = field(default_factory=Average)
    """Averaging of the weights over steps."""
    progressive: Progressive = field(default_factory=Progressive)
    """Progressive resizing of training images."""
    duration: Length | None = NOMINAL
    """Length of the run. With a time limit and no length of yours, the run uses all of the time."""
    time_limit: Minutes | None = None
    """Time limit of the whole command in minutes or with a unit (20s, 10min, 1.5h): from its start to the report, the
    evaluation of the test images included. The schedule is fitted into the time that is left for training (default: no
    limit)."""
    batch_size: Count | None = None
    """Number of images per optimiser step over all processes (default: from the number of training images, at most
    512)."""
    accumulate: Count | None = None
    """Number of micro-batches per optimiser step (default: the fewest that fit in memory)."""
    evaluate_every: Length = Epochs(1)
    """Time between two evaluations on the validation images."""
    fewshot: tuple[Annotated[int, Range(1, 100_000)], ...] | None = None
    """Measure few-shot accuracy at each evaluation, with these numbers of images per class, such as 1 5 10. The
    training does not change (default: no measurement)."""
    knn: Annotated[int, Range(1, 100_000)] | None = None
    """Measure kNN accuracy at each evaluation, with this number of nearest training images, such as 20. It works with
    every objective if images have labels (default: no measurement)."""
    metric: Metric = field(default_factory=Metric)
    """The number by which the best model is chosen."""
    calibrate: bool = True
    """Fit the temperature of the best model's probabilities on the validation images at the end, so that of all images
    with a probability of 80 % about 80 % are right. The order of the classes does not change."""
    checkpoint_every: Length = Epochs(1)
    """Time between two checkpoints."""
    track: tuple[Track, ...] = ("tensorboard",)
    """Trackers that show metrics, settings, pictures and the report of the run. Several can be named. A tracker uses
    the network only if its own environment variables name a server, and never stops a run."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    early_stop: Count | None = None
    """Stop after this number of evaluations without a better `metric` on the validation images, by default top-1
    accuracy. Without labels, the validation loss counts (default: never)."""
    precision: Precision = "auto"
    """Precision of matrix products; the weights stay float32. auto: bf16 where the hardware is fast at it, else fp16
    (with a scaled loss) on GPUs with tensor cores. tf32 rounds the factors of float32 products, float32 is exact."""
    compile: bool | None = None
    """Compile the blocks with torch.compile (default: on a GPU, if the run is long enough to pay for a minute)."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, more time."""
    shard: bool | Annotated[int, Range(2, 2**16)] = False
    """Shard weights, gradients and optimiser state over the processes (FSDP2), for networks too large for one device,
    such as ViT-H. A number shards them over groups of this number of processes, such as the 8 GPUs of a machine, and
    replicates them over the groups. The losses do not change."""
    workers: Threads | None = None
    """Number of threads or processes that decode images; 0 decodes in the training thread (default: from the number of
    cores)."""
    worker_kind: Literal["auto", "threads", "processes"] = "auto"
    """What decodes training images. processes: takes no time of the training thread, but some memory and seconds to
    start. The batches are the same. auto: processes on CUDA with at least three cores for each training process, unless
    images are cached; otherwise threads."""
    augment_on: Literal["auto", "host", "device"] = "auto"
    """What changes the colours of training images and erases parts: the processors that decode (host), or the device of
    the network, whole batches at once. The random numbers are the same, and the images differ by a level or two. auto:
    the device, if it is CUDA and the processors could not keep up."""
    decode_on: Literal["host", "device"] = "host"
    """What decodes the JPEGs of training images: the processors, or the GPU (device: nvJPEG, with torchcodec installed,
    for random crops of RGB images). Its colours differ by some levels. The processors decode what nvJPEG cannot. With
    device, the device changes colours, too, and images are not cached."""
    cache: Literal["auto", "yes", "no"] = "auto"
    """Cache decoded images in memory. auto: if they are small and fit."""
    timeout: Seconds | None = None
    """Seconds that a process waits for the others before the run fails. Work that only the main process does may take
    longer (default: 1800 until the first step has been taken, then 600)."""
    max_nonfinite: Count = 3
    """Number of consecutive steps with a non-finite loss or gradient after which training stops."""
    seed: Seed = 0
    """Seed of all random numbers of the run."""
    device: str | None = None
    """Device to train on: 'cpu', 'cuda', 'cuda:1' or 'mps' (default: the fastest available)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size is not None:
            object.__setattr__(self, "image_size", shortest_size(self.image_size))
        if self.objective.numbers and self.data.labels_per_image == "auto":  # so that config.yaml says it, too
            object.__setattr__(self, "data", replace(self.data, labels_per_image="numbers"))
        if self.classes[:1] not in (("replace",), ("add",), ("merge",), ("remove",)):
            raise UsageError(
                f"classes is {listing(self.classes)}; its first word must be replace, add, merge or remove"
            )
        prepared = self.preprocess  # one with every value is a Preprocess, wherever it was read from
        if type(prepared) is Preparation and None not in (prepared.image_size, prepared.resize):
            object.__setattr__(self, "preprocess", prepared.completed(Preprocess()))

    @property
    def network(self) -> str:
        """Return the name of the network to train from scratch."""
        return "S/16" if self.model is None else self.model

    @property
    def keeps_classes(self) -> bool:
        """Return whether the classifier keeps rows of `weights` for the classes that it knows by name."""
        return self.classes != ("replace",)

    @property
    def decided_precision(self) -> ComputePrecision:
        """Return the precision of a run with every decision made."""
        assert self.precision != "auto"
        return self.precision

    @property
    def supervised(self) -> bool:
        """Return whether the run learns from labels. If not, images need no labels and there is no classifier."""
        return self.objective.labels


def check_batch(batch: int, processes: int, named: str = "") -> None:
    """Raise UsageError, with the nearest valid numbers, if the images of a batch cannot be shared equally by processes.

    named: How the number of processes came about: "2 x 8".
    """
    if batch >= 1 and batch % processes == 0:
        return
    below = max(batch // processes, 0) * processes
    near = " or ".join(f"--batch-size {size}" for size in (below, below + processes) if size)
    raise UsageError(
        f"batch_size is {batch}, but there are {processes} processes{f' ({named})' * bool(named)}, and each needs the "
        f"same number of images. Use {near}, or another number of processes"
    )
