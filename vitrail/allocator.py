"""The C library's allocator. A step, or a batch, frees what the next one needs again: glibc is asked to keep it.

Given back to the system it would return page by page, with a fault for each, cleared. With another C library nothing
is asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Of glibc's malloc.h."""
MMAP_MAX = 65536
"""As glibc starts: how many buffers may come from the system one by one, and go back to it so."""
NEVER_PROMISED = "2"
"""Of vm.overcommit_memory: the system counts what is asked for, not what is used."""


def keep_freed_memory(largest: int | None = None) -> None:
    """Keep freed buffers of up to `largest` bytes (32 MiB at most) for the next; None: of any size. Process-wide.

    On a CPU, training and more so prediction are faster by it, at about the same peak: benchmarks/allocator.py. What is
    kept is there for whatever the process does next, but not for what asks the system itself, such as compiled code and
    threads: where addresses are limited (`ulimit -v`), nothing is kept.
    """
    if (set_option := _of_glibc("mallopt")) is None or _limited():
        return
    if largest is not None:
        set_option(M_MMAP_THRESHOLD, largest)
    set_option(M_MMAP_MAX, 0 if largest is None else MMAP_MAX)
    set_option(M_TRIM_THRESHOLD, 2**31 - 1 if largest is None else 2**30)


def give_back_freed_memory() -> None:
    """Give what has been kept back to the system, once, so that what is free can be counted."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (OSError, TypeError, AttributeError):
        return None


def _limited() -> bool:
    from resource import RLIM_INFINITY, RLIMIT_AS, RLIMIT_DATA, getrlimit  # where there is glibc, there is this

    promised = Path("/proc/sys/vm/overcommit_memory")
    counted = promised.exists() and promised.read_text().strip() == NEVER_PROMISED
    return counted or any(getrlimit(kind)[0] != RLIM_INFINITY for kind in (RLIMIT_AS, RLIMIT_DATA))
