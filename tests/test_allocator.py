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


GIVEN_BACK = """
import psutil
from vitrail.allocator import give_back_freed_memory, keep_freed_memory

keep_freed_memory()
buffers = [bytes(b"x" * 2**20) for _ in range(200)]
held = psutil.Process().memory_info().rss
del buffers[:-1]  # the last one holds the end of the heap
kept = psutil.Process().memory_info().rss
give_back_freed_memory()
print(held, kept, psutil.Process().memory_info().rss)
"""
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")


def told(code: str) -> list[int]:
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize(
    ("sizes", "ask", "kept"),
    [
        ((8, 24), "keep_freed_memory()", True),
        ((64, 200), "keep_freed_memory()", True),
        ((8, 24), "keep_freed_memory(32 * 2**20)", True),
        ((64, 200), "keep_freed_memory(32 * 2**20)", False),
        ((64, 200), "keep_freed_memory(); keep_freed_memory(32 * 2**20)", False),
        ((64, 200), "resource.setrlimit(resource.RLIMIT_AS, (2**50, 2**50)); keep_freed_memory()", False),
    ],
)
def test_freed_memory_is_kept_for_what_comes_next(sizes: tuple[int, ...], ask: str, kept: bool) -> None:
    first, later = told(FAULTS.format(sizes=sizes, ask=ask))
    assert later < first / 20 if kept else later > first / 2


def test_what_is_kept_can_be_given_back_to_be_counted() -> None:
    held, kept, left = told(GIVEN_BACK)
    assert kept > held - 8 * 2**20 and left < held - 150 * 2**20
