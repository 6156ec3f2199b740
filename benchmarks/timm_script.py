"""timm's side of the learning benchmark: a training script of timm's own parts, for a given number of minutes.

Like timm's train.py, the script uses timm's library functions: create_loader with its transforms and collate mixup,
create_optimizer_v2, create_scheduler_v2, ModelEmaV3, its losses, bfloat16 autocast. Only the clock is not timm's: the
schedule follows the share of the time that is used up, so that it always ends in time.

Every open choice favours timm: explicit attention, fused AdamW and compilation, which are faster here; images are
decoded and the model is compiled before the clock starts; and the better one of the model and its moving average
counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks import compare, peers

ARCHITECTURE = replace(peers.SMALL_IMAGES, width=256, heads=4, patch=8)
"""Network that is best for timm in this short time: 16 tokens, 4.8 M parameters. In 2.5 minutes on the dev split it
reached 16.4 %; 64 tokens of width 128 reached 13.2 % and of width 192 9.2 %.
"""

VIRTUAL_EPOCHS, VIRTUAL_UPDATES = 300, 100
"""Length of the published schedule; 5 of its 300 epochs are warmup, whatever their length here."""


@dataclass(frozen=True)
class Settings:
    """A recipe with timm's settings."""

    batch_size: int = 128
    lr: float = 1e-3
    weight_decay: float = 0.05
    warmup_epochs: int = 15
    """Epochs of warmup, out of `VIRTUAL_EPOCHS`."""
    smoothing: float = 0.1
    scale: tuple[float, float] = (0.6, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    color_jitter: float = 0.0
    auto_augment: str | None = None
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    drop_path: float = 0.0
    ema_decay: float | None = None
    interpolation: str = "bicubic"
    workers: int = 0
    """Number of processes that prepare images. With two cores and images this small, one costs more than it gives."""


LIGHT = Settings()
"""Settings that suit a short training: flip, crops of 0.6 to 1, label smoothing, 1e-3."""

DEIT = Settings(
    lr=5e-4 * 128 / 512,  # the published rule: 5e-4 per 512 images
    warmup_epochs=5,
    scale=(0.08, 1.0),
    color_jitter=0.4,
    auto_augment="rand-m9-mstd0.5-inc1",
    erasing=0.25,
    mixup=0.8,
    cutmix=1.0,
    drop_path=0.1,
    ema_decay=0.99996,
)
"""DeiT's published settings without repeated augmentation, which timm offers to distributed runs only."""

RECIPES = {"light": LIGHT, "deit": DEIT}


class Images(torch.utils.data.Dataset):
    """Decoded images in memory in the form that timm's loader expects, which sets `transform` itself."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


def allow_new_pillow() -> None:
    """Keep at least 1 bit in timm's RandAugment: it sometimes asks for 0 bits, which new versions of Pillow refuse."""
    from timm.data import auto_augment

    for name in ("Posterize", "PosterizeIncreasing", "PosterizeOriginal"):
        auto_augment.NAME_TO_OP[name] = _posterize


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    from timm.data import auto_augment

    return auto_augment.posterize(image, max(1, bits))


def train_loader(images: Images, size: int, classes: int, s: Settings) -> Any:
    """Return timm's training loader with a recipe's augmentation."""
    from timm.data import FastCollateMixup, create_loader

    allow_new_pillow()
    mix = None
    if s.mixup or s.cutmix:
        mix = FastCollateMixup(
            mixup_alpha=s.mixup, cutmix_alpha=s.cutmix, label_smoothing=s.smoothing, num_classes=classes
        )
    return create_loader(
        images,  # type: ignore[arg-type]
        input_size=(3, size, size),
        batch_size=s.batch_size,
        is_training=True,
        re_prob=s.erasing,
        re_mode="pixel",
        scale=s.scale,
        ratio=s.ratio,
        color_jitter=s.color_jitter,
        auto_augment=s.auto_augment,
        interpolation=s.interpolation,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        num_workers=s.workers,
        collate_fn=mix,
        device=torch.device("cpu"),
    )


def endless(loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def train(
    model: nn.Module,
    images: Images,
    *,
    size: int,
    classes: int,
    settings: Settings,
    minutes: float,
    compiled: bool = True,
    bf16: bool = True,
) -> dict[str, Any]:
    """Train for `minutes` of wall time.

    Returns {"ema": module or None, "steps": int, "images_per_second": float}.
    """
    from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3

    s = settings
    loader = train_loader(images, size, classes, s)
    optimizer = create_optimizer_v2(model, "adamw", lr=s.lr, weight_decay=s.weight_decay, fused=True)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        "cosine",
        num_epochs=VIRTUAL_EPOCHS,
        warmup_epochs=s.warmup_epochs,
        warmup_lr=1e-6,
        step_on_epochs=False,
        updates_per_epoch=VIRTUAL_UPDATES,
    )
    criterion = SoftTargetCrossEntropy() if s.mixup or s.cutmix else LabelSmoothingCrossEntropy(s.smoothing)
    ema = ModelEmaV3(model, decay=s.ema_decay, use_warmup=True) if s.ema_decay else None
    forward = torch.compile(model) if compiled else model
    model.train()

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with compare.autocast("bf16" if bf16 else "float32"):
            return criterion(forward(inputs).float(), targets)

    feed = endless(loader)
    loss_of(*next(feed)).backward()  # compiles both directions, starts the workers
    optimizer.zero_grad()
    steps, start = 0, time.perf_counter()
    while (used := (time.perf_counter() - start) / (60 * minutes)) < 1:
        scheduler.step_update(int(used * VIRTUAL_EPOCHS * VIRTUAL_UPDATES))
        inputs, targets = next(feed)
        loss_of(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if ema is not None:
            ema.update(model, step=steps)
    rate = steps * s.batch_size / (time.perf_counter() - start)
    return {"ema": ema.module if ema else None, "steps": steps, "images_per_second": rate}


@torch.inference_mode()
def accuracy(model: nn.Module, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the top-1 in percent on images at their own size, in float32."""
    model.eval()
    right = 0
    for start in range(0, len(labels), 500):
        batch = torch.from_numpy(images[start : start + 500]).permute(0, 3, 1, 2).float() / 255
        right += int((model((batch - 0.5) / 0.5).argmax(1).numpy() == labels[start : start + 500]).sum())
    return 100 * right / len(labels)


def _read(values: dict[str, str], like: Any) -> dict[str, Any]:
    """Return the settings among `texts` that are fields of `like`, as numbers of the fields' types."""
    return {key: type(getattr(like, key))(float(v)) for key, v in values.items() if hasattr(like, key)}


def run(
    arrays: dict[str, tuple[np.ndarray, np.ndarray]],
    recipe: str,
    seed: int,
    minutes: float,
    overrides: dict[str, str],
    *,
    quick: bool = False,
) -> dict[str, Any]:
    """Train timm's model on arrays["train"] and evaluate it once on arrays["test"].

    `overrides` are settings of the recipe or of the architecture ("lr", "batch_size", "width", "depth", "heads",
    "patch"). Returns the entry of the results.
    """
    from timm.utils import random_seed

    random_seed(seed)
    images, labels = arrays["train"]
    size, classes = images.shape[1], int(labels.max()) + 1
    architecture = replace(ARCHITECTURE, image_size=size, classes=classes)
    architecture = replace(architecture, **_read(overrides, architecture))
    settings = replace(RECIPES[recipe], **_read(overrides, RECIPES[recipe]))
    model = peers.timm(architecture, fused=False, drop_path=settings.drop_path)
    done = train(
        model,
        Images(images, labels),
        size=size,
        classes=classes,
        settings=settings,
        minutes=minutes,
        compiled=not quick,
    )
    candidates = {"model": model, **({"ema": done["ema"]} if done["ema"] is not None else {})}
    scores = {name: accuracy(m, *arrays["test"]) for name, m in candidates.items()}
    return {
        "accuracy": max(scores.values()),
        "accuracies": scores,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": done["steps"],
        "images_per_second": round(done["images_per_second"], 1),
        "settings": {**asdict(settings), **asdict(architecture)},
    }
