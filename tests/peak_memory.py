"""The peak of this process's memory while something runs, whatever the process has done before.

`ru_maxrss` would not do: it never falls, and a new process begins with that of the process that started it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS = Path("/proc/self/status")


def kibibytes(field: str) -> int:
    """Return a field of the status of this process: VmRSS (memory now) or VmHWM (its peak)."""
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))


@contextmanager
def peak_growth() -> Iterator[Callable[[], int]]:
    """Context with a function that returns how many KiB the peak lies above the memory at the start."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is in use now
    before = kibibytes("VmRSS")
    yield lambda: kibibytes("VmHWM") - before
