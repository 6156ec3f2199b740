"""Row and column attention, which replaces a ResNet's 3x3 convolutions in AxialResNet (paper, appendix D.6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.layers import new_linear
from vitrail.model.stdconv import group_norm

HEADS = 8


class RowColumnAttention(nn.Module):
    """Attention along rows, then along columns, then average pooling if there is a stride.

    [batch, width, H, W] -> [batch, width, H / stride, W / stride], rounded up. `size` is the height and width of the
    maps for which relative positions are learned; see AxisAttention for other sizes. A GroupNorm precedes each
    attention: the first is the bottleneck's, and `norm_eps` is the epsilon of the second. Raises UsageError if the
    heads do not divide the width.
    """

    def __init__(self, width: int, stride: int, size: tuple[int, int], norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.row = AxisAttention(width, span=size[1])
        self.norm = group_norm(width, norm_eps)
        self.column = AxisAttention(width, span=size[0])
        self.stride = stride

    def forward(self, maps: Tensor) -> Tensor:
        """See the class."""
        batch, _, height, width = maps.shape
        maps = self.row(rearrange(maps, "b c h w -> (b h) w c"))
        maps = self.norm(rearrange(maps, "(b h) w c -> b c h w", b=batch, h=height))
        maps = self.column(rearrange(maps, "b c h w -> (b w) h c"))
        maps = rearrange(maps, "(b w) h c -> b c h w", b=batch, w=width)
        return F.avg_pool2d(maps, self.stride, ceil_mode=True) if self.stride > 1 else maps


class AxisAttention(nn.Module):
    """Position-sensitive attention within a line: [lines, length, width] -> [lines, length, width].

    Wang et al., "Axial-DeepLab", Eq. 4: `softmax((q k + q r_q + k r_k) / sqrt(d)) (v + r_v)`, where r_q, r_k
    and r_v are learned for each signed distance and shared by the heads. Queries and keys are half as wide as values.
    There is no output projection, because the bottleneck's last convolution follows. Distances of `span` or more, in
    images larger than the model's, use the ends of the table.
    """

    def __init__(self, width: int, span: int) -> None:
        super().__init__()
        if width % (2 * HEADS):
            raise UsageError(f"axial attention with {HEADS} heads needs a width divisible by {2 * HEADS}, not {width}")
        value = width // HEADS
        self.sizes = [value // 2, value // 2, value]  # features of q, k and v in each head
        self.span = span
        self.qkv = new_linear(width, 2 * width, bias=False)
        self.relative = nn.Parameter(torch.empty(sum(self.sizes), 2 * span - 1))

    def forward(self, lines: Tensor) -> Tensor:
        """See the class."""
        q, k, v = rearrange(self.qkv(lines), "n l (h c) -> n h l c", h=HEADS).split(self.sizes, dim=-1)
        place = torch.arange(lines.shape[1], device=lines.device)
        distance = (place[None, :] - place[:, None]).clamp(1 - self.span, self.span - 1)  # key minus query
        to_key, to_query, of_value = self.relative[:, distance + self.span - 1].split(self.sizes)
        logits = q @ k.transpose(-2, -1) + torch.einsum("nhic,cij->nhij", q, to_key)
        logits = logits + torch.einsum("nhjc,cij->nhij", k, to_query)
        weights = (logits * q.shape[-1] ** -0.5).softmax(-1)
        out = weights @ v + torch.einsum("nhij,cij->nhic", weights, of_value)
        return rearrange(out, "n h l c -> n l (h c)")
