"""The keywords of verbs with settings, for type checkers and for `vitrail.ranges.checked`. Torch-free.

The command line makes its flags from `Run` and `Data`. Type checkers cannot, so the names stand here once more, and a
test compares both. Types are those that Python may give: a section may be a mapping of its settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from vitrail.data.settings import Augment, Bits, Data, PerImage, Preparation
from vitrail.device import Precision
from vitrail.durations import Duration, Minutes
from vitrail.evaluation.metric import Metric
from vitrail.objective.settings import Distill, ObjectiveSettings
from vitrail.ranges import Channels, Count, InputSize, Part, Positive, Seconds, Seed, Share, Threads
from vitrail.training.run import Average, Model, Optim, Progressive, Schedule, Track, Tune

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

    ImageLike = str | Path | Image.Image | np.ndarray | torch.Tensor
    ImagesLike = ImageLike | Sequence[ImageLike | Sequence[Any]]
    """Images in Python: paths, pictures of Pillow, uint8 arrays [H, W, 3] and tensors [3, H, W], many of them in one
    with a further dimension in front, and lists of these."""
    NetworksLike = str | Path | Sequence[str | Path]
    """A network, or several whose mean is taken."""
    LabelsLike = str | Path | Sequence[Any] | np.ndarray | torch.Tensor
    """A file of labels, or in Python a label for each of the images that are given."""
else:  # on the command line all are paths
    ImageLike = ImagesLike = LabelsLike = str | Path
    NetworksLike = str | Path | tuple[str | Path, ...]


class TrialKeywords(TypedDict, total=False):
    """The settings of `Run` that all trials of a sweep share: all but `out` and `weights`."""

    name: str
    data: Data | Mapping[str, Any]
    model: str | None
    vit: Model | Mapping[str, Any]
    image_size: InputSize | None
    keep_head: bool
    classes: str | Sequence[str]
    probe_head: bool
    tune: Tune
    lora_rank: int | None
    lora_alpha: Positive | None
    lora_on: Literal["attention", "mlp", "both"] | None
    objective: ObjectiveSettings | Mapping[str, Any]
    teacher: str | Path | None
    distill: Distill | Mapping[str, Any]
    augment: Augment | Mapping[str, Any]
    preprocess: Preparation | Mapping[str, Any] | None
    optim: Optim | Mapping[str, Any]
    schedule: Schedule | Mapping[str, Any]
    average: Average | Mapping[str, Any]
    progressive: Progressive | Mapping[str, Any]
    duration: Duration | str | float | None
    time_limit: Minutes | None
    batch_size: Count | None
    accumulate: Count | None
    evaluate_every: Duration | str | float
    fewshot: Sequence[int] | None
    knn: int | None
    metric: Metric | Mapping[str, Any]
    calibrate: bool
    checkpoint_every: Duration | str | float
    track: Sequence[Track]
    keep: Count
    early_stop: Count | None
    precision: Precision
    compile: bool | None
    activation_checkpointing: bool
    shard: bool | int
    workers: Threads | None
    worker_kind: Literal["auto", "threads", "processes"]
    augment_on: Literal["auto", "host", "device"]
    decode_on: Literal["host", "device"]
    cache: Literal["auto", "yes", "no"]
    timeout: Seconds | None
    max_nonfinite: Count
    seed: Seed
    device: str | None


class FinetuneKeywords(TrialKeywords, total=False):
    """The settings of `Run` but `weights`, which is a parameter."""

    out: str | Path


class RunKeywords(FinetuneKeywords, total=False):
    """The settings of `Run`."""

    weights: str | Path | None


class LenientDataKeywords(TypedDict, total=False):
    """The settings of `Data` but its path, and `strict`, which is a parameter of `vitrail.predict`."""

    train: str
    validation: str | Literal["none", "subset"] | None
    holdout: float
    fold: str | None
    group: str | None
    test: str | Literal["none"] | None
    image_column: str | None
    label_column: str | None
    label_columns: Sequence[str] | str | None
    answers: Sequence[str] | str | None
    label_separator: str | None
    labels_per_image: PerImage
    label_from: str | Path | None
    ignore: Sequence[int]
    max_bad: Share
    include: Sequence[str] | str
    exclude: Sequence[str | Path] | str
    subset: Count | Part | None
    sampler: Literal["uniform", "balanced", "sqrt"]
    channels: Channels | None
    bits: Bits | None
    display: Sequence[Channels] | None
    together: Count


class DataKeywords(LenientDataKeywords, total=False):
    """The settings of `Data` but its path."""

    strict: bool
