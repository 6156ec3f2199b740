"""`Run`: a whole experiment as one value. Torch-free; `config.yaml` in a run folder is this, written out.

A recipe is a function that returns one; a variation is `dataclasses.replace(run, ...)`. None means that the value is
decided from the data and the machine before the first step; the run folder records the decision. The docstring of each
field is the help text of its flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitrail.config import Duration, Epochs, Percent
from vitrail.data.settings import Augment, Data, Preprocess
from vitrail.model.variants import Place, Pool, Positions, Stem
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Supervised, Tokenizer

Tune = Literal["all", "attention", "ffn", "head"]
"""The whole network; the attention layers and the classifier; the MLPs and the classifier; the classifier alone."""


@dataclass(frozen=True)
class Model:
    """Changes to the named architecture. None keeps its value (see `vitrail.model.variants.ViTConfig`)."""

    width: int | None = None
    """Number of values in each token (default: the architecture's)."""
    depth: int | None = None
    """Number of blocks (default: the architecture's)."""
    heads: int | None = None
    """Number of attention heads in each block (default: the architecture's)."""
    mlp_dim: int | None = None
    """Number of hidden units in each MLP (default: the architecture's)."""
    patch: int | None = None
    """Side of a patch in pixels. With `weights`, their patch kernels and positions are resampled to this size
    (default: the architecture's)."""
    stem: Stem | None = None
    """How an image becomes patch embeddings (default: the architecture's)."""
    stem_norm: Literal["batch", "layer"] | None = None
    """Normalisation inside the stem (default: the architecture's)."""
    positions: Positions | None = None
    """Kind of position embedding (default: the architecture's)."""
    place: Place | None = None
    """Where the position embedding is added (default: the architecture's)."""
    pool: Pool | None = None
    """How the tokens become the features of the classifier (default: the architecture's)."""
    cls_position: bool | None = None
    """Give the class token a position embedding of its own (default: the architecture's)."""
    registers: int | None = None
    """Number of register tokens (default: the architecture's)."""
    pre_logits: int | None = None
    """Width of the tanh layer in front of the classifier (default: the architecture's)."""
    dropout: float | None = None
    """Dropout probability (default: the architecture's)."""
    drop_path: float | None = None
    """Largest probability of skipping a residual branch, known as stochastic depth (default: the architecture's)."""
    drop_path_shape: Literal["linear", "constant"] | None = None
    """Let the drop-path probability grow linearly with depth, or keep it constant (default: the architecture's)."""
    layer_scale: float | None = None
    """Initial value of LayerScale (default: the architecture's)."""


@dataclass(frozen=True)
class Optim:
    """The optimiser. Weight decay is decoupled and acts on kernels only, not on biases, norms, class token or
    positions."""

    name: Literal["adamw", "sgd", "lamb"] = "adamw"
    """Optimiser: AdamW, SGD with momentum, or LAMB."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.05
    """Weight decay, scaled by the scheduled learning rate."""
    weight_decay_end: float | None = None
    """Weight decay at the end of the run, reached along half a cosine (default: the same as at the start)."""
    layer_decay: float | None = None
    """Layer-wise learning rate decay. A parameter learns with lr * layer_decay ** (layers + 1 - depth). Its depth is 0
    in stem, tokens and positions, i + 1 in block i, and layers + 1 after the blocks (default: one rate for all)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment, for AdamW and LAMB."""
    momentum: float = 0.9
    """Momentum of SGD."""
    eps: float = 1e-8
    """Constant added to the denominator of AdamW and LAMB."""
    clip: float | None = 1.0
    """Largest global gradient norm; longer gradients are scaled down. None switches clipping off."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate over steps: linear warmup, then a decay to `end`."""

    shape: Literal["cosine", "linear", "rsqrt", "step", "constant"] = "cosine"
    """How the learning rate decays after the warmup."""
    warmup: Duration = Percent(5)
    """Length of the linear warmup."""
    end: float = 0.0
    """Learning rate at the end of the run, as an absolute value."""
    timescale: Duration = field(default_factory=lambda: Percent(10))
    """For shape rsqrt: time after which the learning rate has fallen by sqrt(2)."""
    drops: tuple[float, ...] = (30.0, 60.0, 90.0)
    """For shape step: points of the run, in percent, at which the learning rate is divided by ten (BiT)."""


@dataclass(frozen=True)
class Average:
    """A second set of weights, averaged over steps. It is evaluated and saved as the model."""

    kind: Literal["none", "ema", "polyak"] = "none"
    """Weight averaging. ema: exponential with `decay`, which ramps up over the first steps; polyak: uniform mean of all
    steps from `start`."""
    decay: float = 0.9999
    """For ema: share of the average that each step keeps."""
    start: Duration = Percent(75)
    """For polyak: when averaging starts."""


@dataclass(frozen=True)
class Progressive:
    """Progressive resizing: small images first. They have fewer tokens, so more epochs fit into the same time."""

    start: float = 1.0
    """Side of the first images as a share of the full side; 1 switches progressive resizing off."""
    until: Duration = Percent(80)
    """When images reach the full side."""


@dataclass(frozen=True)
class Run:
    """One training run, complete."""

    name: str = "train"
    """Name of the run. Its folder is `out`/`name`-<n>."""
    out: str = "runs"
    """Folder in which the run folder is created."""
    data: Data = field(default_factory=Data)
    """Where the images are and how they are split."""
    model: str = "S/16"
    """Architecture, such as S/16, B/32, R50+B/16 or R50x1 (`vitrail.model.variants.variant` lists them)."""
    vit: Model = field(default_factory=Model)
    """Changes to the named architecture."""
    image_size: int | None = None
    """Side of the square input in pixels (default: from the data, or from the weights)."""
    weights: str | None = None
    """Weights to start from: a run, a model folder, a weight file, or a name on the hub. The classifier becomes a zero
    layer unless `keep_head` is set (default: random initialisation)."""
    keep_head: bool = False
    """Keep the classifier of `weights` instead of a zero one. The classes must be the same, in the same order."""
    tune: Tune = "all"
    """Which part of the pretrained network is trained; the classifier always is. Checkpoints store only the trained
    part."""
    objective: Supervised | MaskedPatch | MAE | BEiT | DINO | Tokenizer = field(default_factory=Supervised)
    """What the network learns, chosen by `objective.kind`: from labels or without labels."""
    augment: Augment = field(default_factory=Augment)
    """Random changes to training images."""
    preprocess: Preprocess | None = None
    """How validation images are prepared (default: squash if all images have one size, else resize and crop 0.875)."""
    optim: Optim = field(default_factory=Optim)
    """The optimiser."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over the run."""
    average: Average = field(default_factory=Average)
    """Averaging of the weights over steps."""
    progressive: Progressive = field(default_factory=Progressive)
    """Progressive resizing of training images."""
    duration: Duration = Epochs(30)
    """Length of the run."""
    time_limit: float | None = None
    """Time limit of the training in minutes. The whole schedule is compressed to fit into it (default: no limit)."""
    batch_size: int | None = None
    """Number of images per optimiser step over all processes (default: from the number of training images, at most
    512)."""
    accumulate: int | None = None
    """Number of micro-batches per optimiser step (default: the fewest that fit in memory)."""
    evaluate_every: Duration = Epochs(1)
    """Time between two evaluations on the validation images."""
    fewshot: tuple[int, ...] | None = None
    """Measure few-shot accuracy at each evaluation, with these numbers of images per class, such as 1 5 10. The
    training does not change (default: no measurement)."""
    knn: int | None = None
    """Measure kNN accuracy at each evaluation, with this number of nearest training images, such as 20. It works with
    every objective if images have labels (default: no measurement)."""
    checkpoint_every: Duration = Epochs(1)
    """Time between two checkpoints."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    early_stop: int | None = None
    """Stop after this number of evaluations without a better validation top-1 accuracy. Without labels, the validation
    loss counts (default: never)."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Precision of matrix products; the weights stay float32. auto: bf16 where the hardware is fast at it."""
    compile: bool = False
    """Compile each block with torch.compile."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, more time."""
    shard: bool = False
    """Shard weights, gradients and optimiser state over the processes (FSDP2), for networks too large for one device,
    such as ViT-H. The losses do not change."""
    wide_branches: bool = False
    """Compute the branches of parallel blocks as one wide branch. The network is the same; on the CPUs measured it is
    not faster (`vitrail.model.wide`)."""
    workers: int | None = None
    """Number of threads that decode images; 0 decodes in the training thread (default: from the number of cores)."""
    cache: Literal["auto", "yes", "no"] = "auto"
    """Cache decoded images in memory. auto: if they are small and fit."""
    timeout: float = 1800.0
    """Seconds that a process waits for the others before the run fails. Work that only the main process does may take
    longer."""
    max_nonfinite: int = 3
    """Number of consecutive steps with a non-finite loss or gradient after which training stops."""
    seed: int = 0
    """Seed of all random numbers of the run."""
    device: str | None = None
    """Device to train on: 'cpu', 'cuda', 'cuda:1' or 'mps' (default: the fastest available)."""

    @property
    def supervised(self) -> bool:
        """Return whether the run learns from labels. If not, images need no labels and there is no classifier."""
        return isinstance(self.objective, Supervised)
