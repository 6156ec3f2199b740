"""What is asked of the C library's allocator, by the faults that it then spares."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource
from vitrail.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        for mib in {sizes}:
            bytes(b"x" * (mib * 2**20 + 1))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
{ask}
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")
@pytest.mark.parametrize(
    ("sizes", "ask", "kept"),
    [
        ((8, 24), "keep_freed_memory()", True),
        ((64, 200), "keep_freed_memory()", True),
        ((8, 24), "keep_freed_memory(32 * 2**20)", True),
        ((64, 200), "keep_freed_memory(32 * 2**20)", False),
        ((64, 200), "keep_freed_memory(); keep_freed_memory(32 * 2**20)", False),
    ],
)
def test_freed_memory_is_kept_for_what_comes_next(sizes: tuple[int, ...], ask: str, kept: bool) -> None:
    root = Path(__file__).resolve().parents[1]
    code = FAULTS.format(sizes=sizes, ask=ask)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    first, later = map(int, done.stdout.split())
    assert later < first / 20 if kept else later > first / 2
