"""`Run`: a whole experiment as one value. Torch-free; `config.yaml` in a run folder is this, written out.

A recipe is a function that returns one; a variation is `dataclasses.replace(run, ...)`.
None means "decided from the data and the machine before the first step", and the run folder records what.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitrail.config import Duration, Epochs, Percent
from vitrail.data.settings import Augment, Data, Preprocess
from vitrail.model.variants import Place, Pool, Positions, Stem
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Supervised, Tokenizer

Tune = Literal["all", "attention", "ffn", "head"]
"""The whole network; the attentions and the classifier; the MLPs and the classifier; the classifier."""


@dataclass(frozen=True)
class Model:
    """Overrides of a named variant; None keeps the variant's value (see `vitrail.model.variants.ViTConfig`)."""

    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    mlp_dim: int | None = None
    patch: int | None = None
    """With `weights`: their patch kernels and positions are resampled to this size."""
    stem: Stem | None = None
    stem_norm: Literal["batch", "layer"] | None = None
    positions: Positions | None = None
    place: Place | None = None
    pool: Pool | None = None
    cls_position: bool | None = None
    registers: int | None = None
    pre_logits: int | None = None
    dropout: float | None = None
    drop_path: float | None = None
    drop_path_shape: Literal["linear", "constant"] | None = None
    layer_scale: float | None = None


@dataclass(frozen=True)
class Optim:
    """The optimiser. Weight decay is decoupled and falls on kernels only (protocols: not on biases, norms,
    class token, positions)."""

    name: Literal["adamw", "sgd", "lamb"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    weight_decay_end: float | None = None
    """At the end of the run, reached along half a cosine; None: it stays."""
    layer_decay: float | None = None
    """A parameter's rate is lr * layer_decay ** (layers + 1 - depth), its depth 0 in stem, tokens and positions, i + 1
    in block i, and layers + 1 in what follows the blocks (`training/optim/layer_decay.py`); None: lr for all."""
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9
    eps: float = 1e-8
    clip: float | None = 1.0
    """Largest global gradient norm; None does not clip."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate over steps: linear warmup, then a decay to `end`."""

    shape: Literal["cosine", "linear", "rsqrt", "step", "constant"] = "cosine"
    warmup: Duration = Percent(5)
    end: float = 0.0
    """Last learning rate, absolute."""
    timescale: Duration = field(default_factory=lambda: Percent(10))
    """rsqrt: steps after which the rate has fallen by sqrt(2)."""
    drops: tuple[float, ...] = (30.0, 60.0, 90.0)
    """step: in percent of the run, where the rate falls to a tenth, each time anew (BiT)."""


@dataclass(frozen=True)
class Average:
    """A second set of weights, averaged over steps, evaluated and kept as the model."""

    kind: Literal["none", "ema", "polyak"] = "none"
    """ema: exponential with `decay`, ramped up over the first steps; polyak: uniform mean from `start` on."""
    decay: float = 0.9999
    start: Duration = Percent(75)


@dataclass(frozen=True)
class Progressive:
    """Progressive resizing: small images first. They are fewer tokens, so the same time holds more passes."""

    start: float = 1.0
    """Side of the first images as a share of the full side; 1 switches it off."""
    until: Duration = Percent(80)
    """When the full side is reached."""


@dataclass(frozen=True)
class Run:
    """One training run, complete."""

    name: str = "train"
    """The run folder is `out`/`name`-<n>."""
    out: str = "runs"
    data: Data = field(default_factory=Data)
    model: str = "S/16"
    """A name `vitrail.model.variants.variant` reads."""
    vit: Model = field(default_factory=Model)
    image_size: int | None = None
    """Side of the square input in pixels; None: from the data (and the weights started from)."""
    weights: str | None = None
    """Start from these weights (a run, a model folder, a weight file, a name on the hub), with a zero head."""
    keep_head: bool = False
    """Keep the classifier of `weights`, for the same classes in the same order, in place of a zero one."""
    tune: Tune = "all"
    """What of the network in `weights` learns, the classifier always; checkpoints hold only that (`optim/tune.py`)."""
    objective: Supervised | MaskedPatch | MAE | BEiT | DINO | Tokenizer = field(default_factory=Supervised)
    """What is learned, chosen by `objective.kind`: from labels, or without any."""
    augment: Augment = field(default_factory=Augment)
    preprocess: Preprocess | None = None
    """How validation images are prepared; None: squash for images of one size, else resize and crop 0.875."""
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    average: Average = field(default_factory=Average)
    progressive: Progressive = field(default_factory=Progressive)
    duration: Duration = Epochs(30)
    time_limit: float | None = None
    """Minutes of training after which the schedule is made to end; None: no limit."""
    batch_size: int | None = None
    """Images per optimiser step over all processes; None: what fits in memory, at most 512."""
    accumulate: int | None = None
    """Micro-batches per optimiser step; None: as few as fit in memory."""
    evaluate_every: Duration = Epochs(1)
    fewshot: tuple[int, ...] | None = None
    """At each evaluation also measure few-shot accuracy with so many images per class, such as 1 5 10, on the
    validation images (`vitrail.evaluation.fewshot`); None: do not. It changes nothing in the training."""
    knn: int | None = None
    """At each evaluation also measure the accuracy, on the validation images, of a vote among so many nearest training
    images in the network's features, such as 20; for every objective, wherever images have labels; None: do not."""
    checkpoint_every: Duration = Epochs(1)
    keep: int = 2
    """Checkpoints kept."""
    early_stop: int | None = None
    """Stop after this many evaluations without improvement of validation top-1, or without labels of the
    validation loss; None: never."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    compile: bool = False
    activation_checkpointing: bool = False
    shard: bool = False
    """Cut weights, gradients and optimiser state over the processes (FSDP2), for networks too large for each to hold:
    from ViT-H on. The losses stay the same."""
    wide_branches: bool = False
    """Compute the branches of parallel blocks as one wide branch: the same network, no faster on the CPUs measured
    (`vitrail.model.wide`)."""
    workers: int | None = None
    """Threads that decode images; None: from the machine. 0 decodes in the training thread."""
    cache: Literal["auto", "yes", "no"] = "auto"
    """Keep decoded images in memory where they are small and fit."""
    timeout: float = 1800.0
    """Seconds that the processes of a run wait for one that hangs; work of the main one alone may take longer."""
    max_nonfinite: int = 3
    """Steps in a row with a loss or gradient that is not finite before training gives up."""
    seed: int = 0
    device: str | None = None
    """'cpu', 'cuda', 'cuda:1', 'mps'; None: the best there is."""

    @property
    def supervised(self) -> bool:
        """Does it learn from labels? If not, images need none, and the network gets no classifier."""
        return isinstance(self.objective, Supervised)
