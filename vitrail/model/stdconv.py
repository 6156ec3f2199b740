"""Weight-standardised convolution, in the forms of the paper's convolutional networks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.layers import Conv2d
from vitrail.model.limits import StdConv

_EPSILON = {"bit": 1e-10, "timm": 1e-8}
"""Values added to the variance."""


class StdConv2d(Conv2d):
    """Square convolution without bias. Each call standardises the kernel, for each output channel.

    Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization". The mean and the
    population variance are over input channels, rows and columns. The sources of released weights add the epsilon at
    different places, so `form` names the source:

    - `"hybrid"`: `(w - mean) / (std + 1e-5)` (official hybrid ViTs)
    - `"bit"`: `(w - mean) / sqrt(var + 1e-10)` (official BiT)
    - `"timm"`: `(w - mean) / sqrt(var + 1e-8)` (both families there)

    They also pad strided convolutions differently. With `same` it is TensorFlow's SAME padding (hybrids), which adds an
    odd pixel at the bottom and right. SAME depends on the input's size. This is the case of sides divisible by the
    stride, as in every image divisible by the patch. Otherwise the padding is `kernel // 2` on all sides (BiT).
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, form: StdConv = "bit", same: bool = False
    ) -> None:
        total = max(kernel - stride, 0)  # SAME's padding of both sides together
        self.asymmetric = same and total % 2 == 1
        padding = total // 2 if same else kernel // 2
        super().__init__(inputs, outputs, kernel, stride, padding=0 if self.asymmetric else padding, bias=False)
        self.form: StdConv | None = form
        self.before = padding

    def standardised(self) -> Tensor:
        """Return the kernel as it is applied, [outputs, inputs, kernel, kernel]."""
        if self.form is None:
            return self.weight
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        if self.form == "hybrid":
            return (self.weight - mean) / (variance.sqrt() + 1e-5)
        return (self.weight - mean) * (variance + _EPSILON[self.form]).rsqrt()

    def fix(self) -> None:
        """Standardise the kernel now and not in each call, for a network that is no longer trained."""
        self.weight = nn.Parameter(self.standardised().detach(), requires_grad=False)
        self.form = None

    def forward(self, maps: Tensor) -> Tensor:
        """[batch, inputs, H, W] -> [batch, outputs, H / stride, W / stride]; rounded up without `same`."""
        if self.asymmetric:
            maps = F.pad(maps, (self.before, self.before + 1) * 2)
        return F.conv2d(maps, self.standardised(), None, self.stride, self.padding)


def group_norm(channels: int, eps: float) -> nn.GroupNorm:
    """Return a GroupNorm of 32 groups, or of their greatest common divisor with the number of channels."""
    return nn.GroupNorm(math.gcd(32, channels), channels, eps=eps)
