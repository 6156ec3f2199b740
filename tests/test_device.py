"""This machine: the allocator by the page faults that it saves, and who may ask or change what."""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import Forked

from vitrail import cli
from vitrail.device import fast_float32, has_amx, has_onednn

ROOT = Path(__file__).resolve().parents[1]

FAULTS = """
import os, resource
from vitrail.device import keep_freed_memory

def faults(sizes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        for mib in sizes:
            bytes(b"x" * (mib * 2**20 + 1))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for sizes, ask in {cases}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    first = faults(sizes)
    exec(ask)
    faults(sizes)
    print(first, faults(sizes), flush=True)
    os._exit(0)
"""


GIVEN_BACK = """
import psutil
from vitrail.device import give_back_freed_memory, keep_freed_memory

keep_freed_memory()
buffers = [bytes(b"x" * 2**20) for _ in range(200)]
held = psutil.Process().memory_info().rss
del buffers[:-1]  # the last one holds the end of the heap
kept = psutil.Process().memory_info().rss
give_back_freed_memory()
print(held, kept, psutil.Process().memory_info().rss)
"""
with_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")


def told(code: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return [int(word) for word in done.stdout.split()]


KEPT = [
    ((8, 24), "keep_freed_memory()", True),
    ((64, 200), "keep_freed_memory()", True),
    ((8, 24), "keep_freed_memory(32 * 2**20)", True),
    ((64, 200), "keep_freed_memory(32 * 2**20)", False),
    ((64, 200), "keep_freed_memory(); keep_freed_memory(32 * 2**20)", False),
    ((64, 200), "resource.setrlimit(resource.RLIMIT_AS, (2**50, 2**50)); keep_freed_memory()", False),
]
"""Sizes of blocks in MiB, what is asked for, and whether blocks of these sizes are kept then."""


@pytest.mark.processes
@with_glibc
def test_freed_memory_is_kept_for_what_comes_next() -> None:
    """Each case in a process of its own."""
    counts = told(FAULTS.format(cases=[(sizes, ask) for sizes, ask, _ in KEPT]))
    for (_, ask, kept), first, later in zip(KEPT, counts[::2], counts[1::2], strict=True):
        assert later < first / 20 if kept else later > first / 2, ask


@pytest.mark.processes
@with_glibc
def test_what_is_kept_can_be_given_back_to_be_counted() -> None:
    held, kept, left = told(GIVEN_BACK)
    assert kept > held - 8 * 2**20 and left < held - 150 * 2**20


ASKING = {
    *("os.cpu_count", "os.sched_getaffinity", "psutil.virtual_memory", "psutil.Process", "getrlimit"),
    *("torch.cuda.is_available", "torch.cuda.mem_get_info", "torch.cuda.get_device_capability"),
    *("torch.backends.mkldnn.is_available", "torch.backends.mps.is_available", "torch.backends.mkldnn.matmul"),
    *("has_amx_tiles", "has_avx512_bf16"),  # private names of torch: see torch_private.py
}


def questions(path: Path) -> set[str]:
    """What a file asks the machine, by the dotted names in it."""
    text = path.read_text(encoding="utf-8")
    if not any(name.rpartition(".")[2] in text for name in ASKING):
        return set()
    tree = ast.parse(text)
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)} & ASKING


def test_one_file_asks_the_machine() -> None:
    asked = {path.name: found for path in (ROOT / "vitrail").rglob("*.py") if (found := questions(path))}
    assert asked.keys() == {"device.py"} and asked["device.py"] == ASKING


LIBRARY_CALL = """
import json, logging, os, signal, sys, warnings
import matplotlib, numpy as np, torch
# these set environment variables and filters of their own when they are imported
import scipy.special, sklearn.metrics, torch._dynamo, torch._inductor.codecache, torch.utils.tensorboard
from PIL import Image
import vitrail
from vitrail import device

called = []
real = device._glibc
device._glibc = lambda name: (lambda *args: called.append(args)) if name == "mallopt" else real(name)

def state():
    return {
        "float32": torch.backends.mkldnn.matmul.fp32_precision,
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "log": (logging.getLogger("vitrail").level, len(logging.getLogger("vitrail").handlers)),
        "filters": len(warnings.filters),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "recursion": sys.getrecursionlimit(),
        "matplotlib": str({k: v for k, v in matplotlib.rcParams.items() if k != "backend"}),
        "mallopt": list(called),
    }

tiny = dict(model="Ti/4", vit=dict(width=16, depth=1, heads=2, mlp_dim=32), image_size=8, batch_size=64)
Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save("black.png")
before = state()
calls = {
    "train": lambda: vitrail.train("digits", name="tiny", duration="2 steps", **tiny),
    "evaluate": lambda: vitrail.evaluate("runs/tiny-1", "digits"),
    "predict": lambda: vitrail.predict("runs/tiny-1", "black.png"),
    "embed": lambda: vitrail.embed("runs/tiny-1", "black.png", out="features.npz"),
    "knn": lambda: vitrail.probe.knn("runs/tiny-1", "digits"),
    "inspect": lambda: vitrail.inspect("runs/tiny-1", "black.png", what=("rollout",)),
    "report": lambda: vitrail.report("runs/tiny-1"),
}
changed = {}
for name, call in calls.items():
    call()
    after = state()
    if after != before:
        changed[name] = [key for key in before if before[key] != after[key]]
        before = after
open("changed.json", "w").write(json.dumps(changed))
"""


def call_the_library(folder: str) -> None:
    """What a program that has imported vitrail does."""
    os.chdir(folder)
    exec(LIBRARY_CALL, {"__name__": "program"})


@pytest.mark.processes
def test_a_library_call_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    assert Forked(call_the_library, str(tmp_path), env=os.environ).wait(120) == 0
    assert json.loads((tmp_path / "changed.json").read_text()) == {}


def test_the_command_line_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(cli, "keep_freed_memory", asked.append)
    assert cli.main(["doctor"]) == 0
    assert asked == [None]


def test_threads_leave_the_setting_of_float32_as_it_was() -> None:
    """Contexts of two threads that overlap: the first to begin is the first to end."""
    setting = torch.backends.mkldnn.matmul
    before, first, second = setting.fp32_precision, fast_float32(), fast_float32()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    during = setting.fp32_precision
    second.__exit__(None, None, None)
    assert setting.fp32_precision == before
    assert during == ("bf16" if has_onednn() and not has_amx() else before)
