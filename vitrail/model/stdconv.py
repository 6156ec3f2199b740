"""Weight-standardised convolution, in the two forms of the paper's convolutional networks."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StdConv2d(nn.Conv2d):
    """Square convolution without bias whose kernel is standardised, per output channel, each time it is used.

    Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization". The mean
    and the population variance are over input channels, rows and columns. The two families of released
    weights differ in where the epsilon goes and in how a strided convolution is padded, so `form` names the
    family:

    - `"hybrid"`: `(w - mean) / (std + 1e-5)`, and TensorFlow's SAME padding, where an odd pixel of padding
      goes to the bottom and right (official hybrid ViTs). SAME depends on the input's size; this is the case
      of sides divisible by the stride, which every image divisible by the patch meets.
    - `"bit"`: `(w - mean) / sqrt(var + 1e-10)`, and the same padding, `kernel // 2`, on all sides (official
      BiT).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        *,
        form: Literal["hybrid", "bit"] = "bit",
    ) -> None:
        same = kernel - stride  # SAME's total padding; negative where a stride skips pixels
        self.lopsided = form == "hybrid" and same > 0 and same % 2 == 1
        padding = kernel // 2 if form == "bit" else max(same, 0) // 2
        super().__init__(inputs, outputs, kernel, stride, padding=0 if self.lopsided else padding, bias=False)
        self.form = form
        self.before = padding

    def standardised(self) -> Tensor:
        """Return the kernel as it is applied, [outputs, inputs, kernel, kernel]."""
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        if self.form == "hybrid":
            return (self.weight - mean) / (variance.sqrt() + 1e-5)
        return (self.weight - mean) * (variance + 1e-10).rsqrt()

    def forward(self, maps: Tensor) -> Tensor:
        """[batch, inputs, H, W] -> [batch, outputs, H / stride, W / stride]; the `bit` form rounds up."""
        if self.lopsided:
            maps = F.pad(maps, (self.before, self.before + 1) * 2)
        return F.conv2d(maps, self.standardised(), None, self.stride, self.padding)


def group_norm(channels: int, eps: float) -> nn.GroupNorm:
    """GroupNorm of 32 groups, or of as many as divide a narrower or odd number of channels evenly."""
    return nn.GroupNorm(math.gcd(32, channels), channels, eps=eps)
