"""A linear layer from frozen patch tokens to the class of each pixel, as DINOv2 measures segmentation.

Source: Oquab et al. 2023, DINOv2, section 7.4, "linear", and its code (dinov2/eval/segmentation and the configuration
dinov2_vits14_ade20k_linear): batch normalisation of the tokens, a linear layer to the classes, bilinear upsampling of
the logits to the pixels, cross-entropy without ignored pixels. AdamW, learning rate 0.001, weight decay 0.0001, batch
16, linear warm-up in the first 1,500 of 40,000 steps, then linear decay to 0.

What differs: the whole image is resized to the square input, once, in place of random crops of 512 pixels with random
scale, mirroring and colours in training and a sliding window in evaluation. So the tokens are computed once. The steps
are fewer, and the loss is the mean over the pixels that count, where mmsegmentation divides by all pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.loading.order import stream
from vitrail.data.masks import IGNORED
from vitrail.device import fast_float32

LR, WEIGHT_DECAY, BATCH = 1e-3, 1e-4, 16
WARMUP = 1_500 / 40_000
"""Share of the steps in which the learning rate rises."""
BATCHES = 29
"""Purpose of a random stream (the others are in `vitrail.data`)."""
_LOGITS = 1 << 24
"""Number of logits that are upsampled at a time."""


class TokenClassifier(nn.Module):
    """Batch normalisation and a linear layer: tokens [B, rows, columns, width] -> logits [B, classes, rows, columns].

    The weights start as mmsegmentation's do, from a normal distribution with deviation 0.01.
    """

    def __init__(self, width: int, classes: int, seed: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.linear = nn.Conv2d(width, classes, 1)
        nn.init.normal_(self.linear.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.linear.bias)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        logits: Tensor = self.linear(self.norm(tokens.movedim(-1, 1)))
        return logits


@fast_float32()
def fit_tokens(
    tokens: np.ndarray,
    truth: np.ndarray,
    classes: int,
    *,
    steps: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> TokenClassifier:
    """Return the classifier, in eval mode, that is trained on tokens float32 [N, rows, columns, width].

    `truth` uint8 [N, H, W] are the classes of the pixels of each image, IGNORED where they do not count. Both may be
    memory maps: only batches are read. `progress(step, steps)` is called after each step.
    """
    model = TokenClassifier(tokens.shape[-1], classes, seed).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), LR, weight_decay=WEIGHT_DECAY)
    for step, rows in zip(range(steps), _batches(len(tokens), seed), strict=False):
        for group in optimiser.param_groups:
            group["lr"] = LR * _factor(step, steps)
        wanted = torch.from_numpy(truth[rows]).to(device).long()
        logits = model(torch.from_numpy(tokens[rows]).to(device))
        logits = F.interpolate(logits, wanted.shape[1:], mode="bilinear", align_corners=False)
        loss = F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
        optimiser.zero_grad()
        (loss / (wanted != IGNORED).sum().clamp(min=1)).backward()
        optimiser.step()
        if progress is not None:
            progress(step + 1, steps)
    return model.eval()


def _factor(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the highest one."""
    return min(1.0, (step + 1) / max(WARMUP * steps, 1)) * (1 - step / steps)


def _batches(count: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the rows of each batch, ascending, epoch after epoch; the last ones of an epoch are left out."""
    epoch, size = 0, min(BATCH, count)
    while True:
        order = stream(seed, epoch, 0, BATCHES).permutation(count)
        for begin in range(0, count - size + 1, size):
            yield np.sort(order[begin : begin + size])
        epoch += 1


@torch.inference_mode()
@fast_float32()
def predict_pixels(model: TokenClassifier, tokens: Tensor, height: int, width: int) -> np.ndarray:
    """Return the class of each pixel, uint8 [height, width], from tokens [rows, columns, width] of one image.

    The logits are upsampled bilinearly, some rows of pixels at a time, so that memory does not grow with the image.
    """
    logits = model(tokens[None])[0]
    down, across = (_weights(*sides).to(logits.device) for sides in zip(logits.shape[1:], (height, width), strict=True))
    wide = logits @ across.T
    at_a_time = max(1, _LOGITS // (len(logits) * width))
    parts = [torch.einsum("hr,krw->khw", part, wide).argmax(dim=0) for part in down.split(at_a_time)]
    return torch.cat(parts).to(torch.uint8).cpu().numpy()


def _weights(cells: int, pixels: int) -> Tensor:
    """Return the share of each cell in each pixel's value, float32 [pixels, cells], as torch interpolates."""
    return F.interpolate(torch.eye(cells)[None], pixels, mode="linear", align_corners=False)[0].T.contiguous()
