"""How networks compute what they compute: by their definitions or fast, in which type, with which memory.

The definition of a network is torch's own layers and the formulas of the paper, as `vitrail.model.vit`, `block`,
`attention` and `layers` write them. `vitrail.model.fast` has faster computations of the same values, equal to rounding.
Each file asks one question, whether the fast computation applies; without the folder `fast` it never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib.util import find_spec
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

How = Literal["auto", "definition", "fast"]
Path = Literal["auto", "fused", "explicit"]
P = ParamSpec("P")

_FOLDER = find_spec("vitrail.model.fast")
HAS_FAST = _FOLDER is not None and _FOLDER.has_location
"""Whether the fast computations are there. A deleted folder may leave compiled files, which have no location."""

_how: ContextVar[How] = ContextVar("how", default="auto")
_path: ContextVar[Path] = ContextVar("attention_path", default="auto")


@contextmanager
def computed(how: How) -> Iterator[None]:
    """Context in which networks compute by their definitions, or fast even if a mode follows the operations.

    "fast" is for code that counts what the fast computations do (`vitrail.costs`). "auto" computes fast where nobody
    can tell (`vitrail.model.fast.layers`).
    """
    token = _how.set(how)
    try:
        yield
    finally:
        _how.reset(token)


def how_computed() -> How:
    """Return how networks compute at this moment (`computed`); compiled ones as if nobody asked."""
    return "auto" if torch.compiler.is_dynamo_compiling() else _how.get()  # torch 2.11 cannot trace the question


@contextmanager
def attention_path(path: Path) -> Iterator[None]:
    """Context in which fast attention takes this path: "fused", "explicit" or "auto" (`vitrail.model.fast.attention`).

    Attention by its definition has one path only.
    """
    token = _path.set(path)
    try:
        yield
    finally:
        _path.reset(token)


def chosen_path() -> Path:
    """Return the path that fast attention takes at this moment (`attention_path`); compiled, it chooses itself."""
    return "auto" if torch.compiler.is_dynamo_compiling() else _path.get()


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product with this tensor is computed, with autocast taken into account."""
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def recomputable(forward: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorate `forward` of a module with an attribute `recompute` (activation checkpointing).

    While that is True, the backward pass computes the forward pass again and only the inputs are stored in between.
    """

    @wraps(forward)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        module: Any = args[0]
        if module.recompute and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)  # type: ignore[arg-type, no-any-return]
        return forward(*args, **kwargs)

    return wrapper
