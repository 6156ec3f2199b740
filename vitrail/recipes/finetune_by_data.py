"""Fine-tuning whose settings follow from the images, the pretrained network and the time: the default of `finetune`.

The paper's protocol (`vitrail.recipes.paper_finetune`) is for large networks and long runs: it takes 500 steps of 512
images on a small data set, and two minutes on two cores are 48 such steps. The rule here takes AdamW with layer-wise
learning rates, as the fine-tuning of MAE and BEiT does (`vitrail.recipes.self_supervised`), and a batch that leaves
enough steps. Its numbers were chosen on held-out training images and a small network
(`python -m benchmarks.finetune_default`). For larger networks, rate and layer decay meet the published ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from vitrail.data.settings import Augment
from vitrail.durations import Epochs, Percent
from vitrail.objective.settings import Supervised
from vitrail.recipes.by_data import ENOUGH_STEPS, SMALL, SMALLEST_BATCH, TINY, TrainingSet
from vitrail.recipes.published import described
from vitrail.training.run import Optim, Run, Schedule
from vitrail.transfer.recommend import best_tuned
from vitrail.words import counted

WEIGHTS = "vitrail/tiny"
"""Weights from which a fine-tuning starts if none are named. vitrail ships them."""
USUAL_PASSES, USUAL_IMAGES = 40, 1_000
"""Passes over a training set of `USUAL_IMAGES`. The passes fall with the square root of the number of images."""
LEAST_PASSES, MOST_PASSES = 8, 60
UNLABELLED = 2
"""How many times as many passes there are after pre-training without labels, whose features know no classes yet."""
STEPS_PER_PASS = 20
"""Number of steps that a pass should have: a small data set gets a smaller batch."""
LARGEST_BATCH = 128
RATE, RATE_WIDTH = 2.5e-4, 768
"""Peak learning rate of AdamW for a network of this width, that of B/16."""
HIGHEST_RATE = 4e-3
"""That of finetune-small."""
LAYER_DECAY = 0.75
"""Factor of the learning rate from one block to the one before (MAE, table 9)."""
FEW_PASSES = 15
"""Number of passes up to which crops show most of the image: too few for the network to learn what a crop has cut off.
Of magnetic tiles with small defects, four passes over crops of 60 and of 80 % and more, at equal rates, gave 95.5 and
97.8 % of the validation images, from a probe with 95.5 %."""
SHIFT, GLYPH_SHIFT = 8, 16
"""Side of the input divided by the largest shift: 4 of 32 pixels, as usual for CIFAR; half as much for characters."""
ENLARGED, ENLARGED_COST = 2, 5
"""How many times the side of the input is enlarged if the time allows it, and how many times the work for an image then
is: four times as many tokens, and the attention among them. At equal work and up to 15 passes, the larger side was no
better (12 kinds of flowers, 32 and 64 pixels), so it is chosen only where time would be left over."""


@dataclass(frozen=True)
class Pretrained:
    """The properties of a pretrained network on which its fine-tuning depends."""

    width: int
    """Number of values in a token; for a ResNet, in a position of the last feature map."""
    blocks: int
    """Number of encoder blocks; 0 for a ResNet."""
    side: int
    """Shorter side of the input in pixels."""
    labelled: bool = True
    """Whether it was pre-trained with labels."""
    own_head: bool = False
    """Whether the classifier is of the user's own."""
    queries: bool = False
    """Whether the class of each pixel is told by queries, not by a head that reads maps of tokens."""


@dataclass(frozen=True)
class FineTuning:
    """What is fine-tuned: the images, the network, and how many images the run may see."""

    data: TrainingSet
    classes: int
    """Number of classes or targets."""
    network: Pretrained
    seen: int | None = None
    """Number of images that the run sees at most, repetitions included: what the time limit allows at the measured
    speed, or the length that the user gave; None: no limit."""
    in_time: int | None = None
    """Number of images that the time limit alone allows; None: no time limit."""
    linear: bool = True
    """Whether it has a new linear classifier that learns one class of each image, so that a linear probe can begin."""
    maps: bool = False
    """Whether it has a new head that learns the class of each pixel from maps of tokens, so that it can be fitted."""
    steps: int | None = None
    """Length in steps that the user gave without a batch size; None: another length, or none."""

    @property
    def each(self) -> float:
        """Mean number of training images per class."""
        return self.data.images / max(self.classes, 1)


@dataclass(frozen=True)
class Advice:
    """A run, and the reason of each decision in words."""

    run: Run
    why: dict[str, str] = field(default_factory=dict)
    """Setting -> its value and the reason."""


def advise(task: FineTuning) -> Advice:
    """Return the fine-tuning for `task`. Pure function."""
    images = max(task.data.images, 1)
    passes, length = _passes(task, images)
    seen = passes * images if task.seen is None else min(passes * images, task.seen)
    batch, of_batch = _batch(images, seen)
    if task.steps is not None:
        seen, of_batch = task.steps * batch, f"{batch}: {counted(task.steps, 'step')} in all"
    rate, of_rate = _rate(task.network)
    side, why = task.network.side, {"duration": length, "batch_size": of_batch, "optim": of_rate}
    larger = task.in_time is not None and task.in_time >= ENLARGED_COST * seen
    if larger and task.data.side >= ENLARGED * side:
        side *= ENLARGED
        why["image_size"] = f"{side}, not {task.network.side}: the images are larger, and there is time for it"
    augment, why["augment"] = _augment(task.data.side, side, seen / images)
    decay = LAYER_DECAY if task.network.blocks else None
    run = replace(
        finetune_by_data(),
        optim=Optim(name="adamw", lr=rate, weight_decay=0.05, layer_decay=decay, clip=1.0),
        augment=augment,
        image_size=side if "image_size" in why else None,
        duration=Epochs(passes),
        batch_size=batch,
        probe_head=task.maps or (task.linear and task.each >= 2),  # one image of a class is held out: see `fit_probe`
    )
    if task.network.blocks and (tune := best_tuned(task.each)) != run.tune:
        run = replace(run, tune=tune)
        why["tune"] = f"{tune}: the best with {task.each:.3g} images per class (python -m benchmarks.adviser)"
    return Advice(run, why)


def _passes(task: FineTuning, images: int) -> tuple[float, str]:
    """Return the length in passes over the images, and the reason."""
    usual = USUAL_PASSES * math.sqrt(USUAL_IMAGES / images)
    passes = float(round(min(max(usual, LEAST_PASSES), MOST_PASSES)))
    why = f"{passes:g} passes over {images:,} images"
    if not task.network.labelled:
        passes *= UNLABELLED
        why = f"{passes:g} passes over {images:,} images, because the weights were pre-trained without labels"
    allowed = passes if task.seen is None else task.seen / images
    if allowed < passes:
        why += f", of which the time or the given length leaves about {allowed:.2g}"
    return passes, why


def _batch(images: int, seen: float) -> tuple[int, str]:
    """Return the images per step for a run that sees `seen` images, and the reason."""
    wanted = min(images // STEPS_PER_PASS, seen / ENOUGH_STEPS, LARGEST_BATCH)
    batch = min(2 ** int(math.log2(max(wanted, SMALLEST_BATCH))), images)
    return batch, f"{batch}: about {max(round(seen / batch), 1):,} steps in all"


def _rate(network: Pretrained) -> tuple[float, str]:
    """Return the peak learning rate, and the reason.

    Adam's best rate is in inverse proportion to the width of the network (Yang et al. 2022, muP). MAE's rates for B/16
    are 2.5e-4 to 5e-4 at a batch of 128.
    """
    rate = float(f"{min(RATE * RATE_WIDTH / network.width, HIGHEST_RATE):.2g}")
    layers = f", falling by {LAYER_DECAY:g} from layer to layer" if network.blocks else ""
    return rate, f"AdamW with a rate of {rate:g} for width {network.width}{layers}"


def _augment(side: int, into: int, passes: float) -> tuple[Augment, str]:
    """Return the changes to training images of this side, for an input with a side of `into` pixels, and the reason."""
    if side <= TINY:
        shift = Augment(crop="pad", pad=into // GLYPH_SHIFT, flip=False)
        return shift, f"small shifts, not mirrored: images of {side} pixels are taken for characters"
    if side <= SMALL:
        shift = Augment(crop="pad", pad=into // SHIFT)
        return shift, f"shifts and mirroring, because the images have only {side} pixels"
    if passes <= FEW_PASSES:
        why = f"crops of 70 to 100 % of the image, and mirroring, for at most {FEW_PASSES} passes"
        return Augment(scale=(0.7, 1.0)), why
    return Augment(scale=(0.3, 1.0)), "crops of 30 to 100 % of the image, and mirroring"


def finetune_by_data() -> Run:
    """AdamW with layer-wise learning rates; the images, the network and the time decide on the rest.

    The default of `vitrail finetune`. Without a time limit it makes 8 to 60 passes over the images, fewer the more
    images there are. Batch, learning rate, augmentation and the tuned part follow; each decision is printed with its
    reason. The paper's protocol is --recipe finetune.

    Command: `vitrail finetune DIR`
    Cost: 8 to 60 passes over the images, or the minutes given with --time-limit.
    """
    return Run(
        objective=Supervised(smoothing=0.1),
        augment=Augment(scale=(0.3, 1.0)),
        optim=Optim(name="adamw", lr=RATE, weight_decay=0.05, layer_decay=LAYER_DECAY, clip=1.0),
        schedule=Schedule(shape="cosine", warmup=Percent(10)),
        duration=Epochs(USUAL_PASSES),
        batch_size=LARGEST_BATCH,
        evaluate_every=Percent(10),
        checkpoint_every=Percent(10),
    )


FINETUNE_BY_DATA = described(finetune_by_data, "finetune")
