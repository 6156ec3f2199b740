"""The head of a segmentation run begins as one that was fitted to the tokens of the frozen network (`Run.probe_head`).

The reason is that of `vitrail.training.probe_head`. The tokens of the training images are computed once. The part of
the head behind them learns from them, with a BatchNorm in front of it, which is a part of its first layer afterwards.
Rates, decay and batch are those of DINOv2's linear segmentation probe (`vitrail.transfer.segmentation`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import world
from vitrail.data.image_names import bad_kinds
from vitrail.data.images.masked import nearest
from vitrail.data.item import Subset
from vitrail.data.labels.masks import Masks
from vitrail.data.loading.order import stream
from vitrail.data.settings import IGNORED
from vitrail.device import fast_float32
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.ahead import ahead
from vitrail.evaluation.classify import applied
from vitrail.model.segmentation import MappedPixels
from vitrail.objective.segmentation import enlarged
from vitrail.training.assemble import Setup
from vitrail.training.batches import evaluation_loader
from vitrail.training.probe_head import BOTH, set_whole, whole_network

LR, WEIGHT_DECAY, BATCH = 1e-3, 1e-4, 16
WARMUP = 1_500 / 40_000
"""Share of the steps in which the learning rate rises."""
BATCHES = 29
"""Purpose of a random stream (the others are in `vitrail.data`)."""
STEPS = 500
"""Number of steps of the head on frozen tokens."""
MOST, BYTES = 1_000, 2**30
"""Maximum number of images that it learns from, and of bytes of their tokens."""


class OnTokens(nn.Module):
    """BatchNorm and the part of a head behind the tokens: [B, rows, columns, width] -> logits [B, classes, h, w]."""

    def __init__(self, head: MappedPixels, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        return self.head.classify(self.norm(tokens.movedim(-1, 1)))

    @torch.no_grad()
    def joined(self) -> MappedPixels:
        """Return the head with the BatchNorm, as it is in evaluation, in its first layer."""
        first, norm = self.head.first, self.norm
        assert norm.running_var is not None and norm.running_mean is not None and first.bias is not None
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = norm.bias - norm.running_mean * scale
        first.bias += first.weight.flatten(1) @ shift
        first.weight *= scale.view(-1, *[1] * (first.weight.ndim - 2))
        return self.head


@fast_float32()
def fit_tokens(
    model: nn.Module,
    tokens: np.ndarray,
    truth: np.ndarray,
    *,
    steps: int,
    seed: int = 0,
    spent: Callable[[], float] = lambda: 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Train `model`: tokens [B, rows, columns, width] -> logits [B, classes, h, w], and leave it in eval mode.

    `tokens` [N, rows, columns, width] are of a frozen network, `truth` uint8 [N, H, W] the classes of the pixels of
    each image, IGNORED where they do not count. Both may be memory maps: only batches are read. `spent` is the share of
    the time that is over, 1 at the end; `progress(step, steps)` is called after each step.
    """
    device = next(model.parameters()).device
    optimiser = torch.optim.AdamW(model.parameters(), LR, weight_decay=WEIGHT_DECAY)
    model.train()
    for step, rows in zip(range(steps), _batches(len(tokens), seed), strict=False):
        if (done := max(step / steps, spent())) >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / max(WARMUP * steps, 1)) * (1 - done)
        wanted = torch.from_numpy(truth[rows]).to(device).long()
        logits = enlarged(model(torch.from_numpy(tokens[rows]).to(device).float()), wanted)
        loss = F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
        optimiser.zero_grad()
        (loss / (wanted != IGNORED).sum().clamp(min=1)).backward()
        optimiser.step()
        if progress is not None:
            progress(step + 1, steps)
    model.eval()


def _batches(count: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the rows of each batch, ascending, epoch after epoch; the last ones of an epoch are left out."""
    epoch, size = 0, min(BATCH, count)
    while True:
        order = stream(seed, epoch, 0, BATCHES).permutation(count)
        for begin in range(0, count - size + 1, size):
            yield np.sort(order[begin : begin + size])
        epoch += 1


def start_fitted(setup: Setup, seconds: float = math.inf, say: Callable[[str], None] = lambda text: None) -> str:
    """Fit the head of a run to the tokens of its frozen network. Return what was done, in words.

    seconds: After which it ends. say: Gets a line before the part that may take minutes.

    Raises UsageError for a head that does not read maps of tokens once, and DataError if no image can be read.
    """
    head, began = getattr(setup.objective.model, "head", None), time.monotonic()
    if setup.run.keep_head:
        raise UsageError(BOTH)
    if not isinstance(head, MappedPixels):
        raise UsageError(
            "probe_head fits a head for pixels that is linear or of layers (vit.segmentation), which this run does not "
            "have: set --no-probe-head"
        )
    with whole_network(setup) as network:
        images, values = world.from_main("fitting the head", lambda: _fitted(setup, network, began + seconds, say))
    for parameter, value in zip(head.parameters(), values, strict=True):
        set_whole(parameter, value)
    return (
        f"head fitted to the tokens of {images:,} training images in {time.monotonic() - began:.0f} s; training "
        "starts from it"
    )


def _fitted(setup: Setup, network: Any, until: float, say: Callable[[str], None]) -> tuple[int, list[Tensor]]:
    """Return the number of images that the head of `network` was fitted to, and its parameters, in main memory."""
    tokens, truth = _frozen_tokens(setup, network, (time.monotonic() + until) / 2)
    model = OnTokens(deepcopy(network.head), tokens.shape[-1]).to(setup.decision.device)
    begun, left = time.monotonic(), max(until - time.monotonic(), 1e-9)
    say(f"fitting the head to the tokens of {len(tokens):,} images of the frozen network: {STEPS} steps")
    fit_tokens(model, tokens, truth, steps=STEPS, seed=setup.run.seed, spent=lambda: (time.monotonic() - begun) / left)
    return len(tokens), [parameter.detach().cpu() for parameter in model.joined().parameters()]


def _frozen_tokens(setup: Setup, network: nn.Module, until: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of training images, float16 [N, rows, columns, width], and their masks, uint8 [N, H, W]."""
    run, train = setup.run, setup.splits.train
    assert isinstance(train.labels, Masks)
    size = setup.decision.preprocess.size
    picked = np.random.default_rng(run.seed).permutation(len(train))[:MOST]
    tokens: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    loader = evaluation_loader(run, Subset(train, picked), whole=True)
    with closing(loader):
        compute = applied(lambda model, images: model.head.maps(model, images), network, None, run.precision)
        for batch, maps in ahead(loader.epoch(0), lambda batch: compute(batch.images)):
            tokens.append(maps.permute(0, 2, 3, 1).to(torch.float16).numpy())
            masks += [nearest(train.labels.mask(number), *size) for number in picked[batch.index.numpy()].tolist()]
            if sum(part.nbytes for part in tokens) > BYTES or time.monotonic() > until:
                break
        if not tokens:
            raise DataError(f"the head is fitted to no image: none could be read: {bad_kinds(loader.bad)}")
    return np.concatenate(tokens), np.stack(masks)
