"""The C library's allocator. A step, or a batch, frees what the next one needs again: glibc is asked to keep it.

Given back to the system it would return page by page, with a fault for each, cleared. With another C library nothing
is asked.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Of glibc's malloc.h."""
MMAP_MAX = 65536
"""As glibc starts: how many buffers may come from the system one by one, and go back to it so."""


def keep_freed_memory(largest: int | None = None) -> None:
    """Keep freed buffers of up to `largest` bytes (32 MiB at most) for the next; None: of any size. Process-wide.

    On a CPU, training and more so prediction are faster by it, at about the same peak: benchmarks/allocator.py. What is
    kept is there for whatever the process does next.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return
    if largest is not None:
        set_option(M_MMAP_THRESHOLD, largest)
    set_option(M_MMAP_MAX, 0 if largest is None else MMAP_MAX)
    set_option(M_TRIM_THRESHOLD, 2**31 - 1 if largest is None else 2**30)
