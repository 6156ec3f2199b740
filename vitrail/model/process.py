"""What a process that computes with networks sets for all of itself."""

from __future__ import annotations

from vitrail.allocator import keep_freed_memory
from vitrail.model.attention import fast_math


def prepare_process() -> None:
    """Set what makes networks faster and changes no result: how float32 is multiplied, what becomes of freed memory."""
    fast_math()
    keep_freed_memory()
