"""A CPU that computes as a GPU does: the same layers, with casts of a block's parameters in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.model.compute import compute_dtype
from vitrail.model.fast import attention, layers


def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the questions that layers ask about the device, until the test ends."""

    def projection(module: Any, x: Tensor) -> tuple[Tensor, Tensor, float]:
        weight, offset = layers.cast_of(module.qkv) or (module.qkv.weight, module.qkv.bias)
        return weight, offset, module.scale(len(weight) // 3)

    monkeypatch.setattr(layers, "joins_casts", lambda x: compute_dtype(x) != torch.float32)
    monkeypatch.setattr(layers, "on_onednn", lambda x, dtype: False)
    monkeypatch.setattr(layers, "applies_to_norm", lambda x: False)
    monkeypatch.setattr(attention, "_projection", projection)
