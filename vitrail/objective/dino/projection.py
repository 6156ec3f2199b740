"""DINO's projection head: features -> the outputs of the loss (Caron et al. 2021, section 3.1 and appendix C)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.layers import dense, dense_after_gelu, linear, new_linear
from vitrail.objective.settings import DINO

EPSILON = 1e-12
"""Minimum length by which a vector is divided."""


class WeightNormed(nn.Module):
    """A dense layer without bias. Its rows are `gain` times the direction of `weight` (Salimans & Kingma 2016).

    weight [outputs, inputs]; gain [outputs] starts at 1 and is trained only with `learns_gain`.
    """

    def __init__(self, inputs: int, outputs: int, *, learns_gain: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.gain = nn.Parameter(torch.ones(outputs), requires_grad=learns_gain)
        self.frozen = False
        """If True, the weight gets no gradient and the optimiser does not change it."""
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]"""
        # cosines are divided by a temperature of 0.04, so their third digit matters, which bfloat16 does not have
        with torch.autocast(features.device.type, enabled=False):
            weight = F.normalize(self.weight, dim=1, eps=EPSILON) * self.gain[:, None]
            return linear(features, weight.detach() if self.frozen else weight)


class Projection(nn.Module):
    """Features -> outputs: three dense layers with GELU between them, L2 normalisation, then a weight-normed layer."""

    def __init__(self, inputs: int, config: DINO) -> None:
        super().__init__()
        self.first = new_linear(inputs, config.hidden)
        self.second = new_linear(config.hidden, config.hidden)
        self.third = new_linear(config.hidden, config.bottleneck)
        self.last = WeightNormed(config.bottleneck, config.outputs, learns_gain=not config.norm_last_layer)
        for layer in (self.first, self.second, self.third):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        """[n, inputs] -> [n, outputs], in float32."""
        hidden = dense_after_gelu(self.third, dense_after_gelu(self.second, dense(self.first, features)))
        return self.last(F.normalize(hidden.float(), dim=-1, eps=EPSILON)).float()
