"""What a server does to its process."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the server needs vitrail[serve]")

FAULTS = """
import resource
from vitrail.serve.running import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        for size in (8, 24):
            bytes(b"x" * (size * 2**20 + 1))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")
def test_freed_memory_is_kept_for_the_next_batch() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, cwd=root, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert kept < given_back / 20
