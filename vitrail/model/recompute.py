"""Activation checkpointing as a property of a module: compute the forward pass again instead of storing it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

P = ParamSpec("P")


def recomputable(forward: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorate `forward` of a module with an attribute `recompute`.

    While that is True, the backward pass computes the forward pass again and only the inputs are stored in between.
    """

    @wraps(forward)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        module: Any = args[0]
        if module.recompute and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)  # type: ignore[arg-type, no-any-return]
        return forward(*args, **kwargs)

    return wrapper
