"""The facts about this machine: cores, devices, free memory, fast arithmetic, and the C library's allocator.

Only this file asks for them. It imports torch and psutil when a function needs them, so that the command line starts
without them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Precision = Literal["auto", "bf16", "fp16", "tf32", "float32"]
"""Precision of matrix products, as the user chooses it. auto: bf16 or else fp16 if the device is fast at it."""
ComputePrecision = Literal["bf16", "fp16", "tf32", "float32"]
"""Precision of matrix products, as they are computed. tf32: float32 with factors of 10 bits (NVIDIA from Ampere on)."""

BEGAN = "VITRAIL_BEGAN"
"""Environment variable with the time at which the command began that started this process, in seconds since 1970."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Options of glibc's mallopt, from malloc.h."""
MMAP_MAX = 65536
"""glibc's default: maximum number of buffers that are separate mappings of the system, which are freed at once."""
SIGKILL = 9
"""Number of the signal with which a system ends a process. Windows has no signal of this name."""
STRICT_OVERCOMMIT = "2"
"""Value of vm.overcommit_memory with which the system limits allocated memory instead of used memory."""


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(usable_cores())


def usable_cores() -> set[int]:
    """Return the numbers of the processor cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {*range(os.cpu_count() or 1)}


def core_share(seconds: float = 0.05) -> float:
    """Return the share of a core that a busy thread gets, above 0 and at most 1, by `seconds` of work on one.

    It is below 1 if other programs keep the cores busy, or if a container limits this one.
    """
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < seconds:
        pass
    return min(seconds / max(time.monotonic() - began, seconds), 1.0)


def command_seconds() -> float:
    """Return the seconds since this command started, if `vitrail` is the program that runs; 0 in other programs.

    Processes that a command starts count from the start of that command (`BEGAN`).
    """
    if BEGAN in os.environ:
        return max(time.time() - float(os.environ[BEGAN]), 0.0)
    program = Path(sys.argv[0])
    if program.stem != "vitrail" and program.parts[-2:] != ("vitrail", "__main__.py"):
        return 0.0
    import psutil

    return max(time.time() - float(psutil.Process().create_time()), 0.0)


def processor() -> str:
    """Return the name of the processor."""
    return cpu_field("model name") or platform.processor() or platform.machine()


def cpu_field(*names: str) -> str:
    """Return the first value of one of these fields of /proc/cpuinfo, or "" on systems without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() in names), "")


def has_cuda() -> bool:
    """Return whether there is a CUDA (or ROCm) device."""
    import torch

    return torch.cuda.is_available()


def accelerators() -> dict[str, str]:
    """Return device name -> model for every accelerator of this machine."""
    import torch

    count = torch.cuda.device_count() if has_cuda() else 0
    found = {f"cuda:{number}": torch.cuda.get_device_name(number) for number in range(count)}
    return found | ({"mps": platform.processor()} if torch.backends.mps.is_available() else {})


def choose_device(name: str | None) -> torch.device:
    """Return the device called `name`, or by default the best one. Raises UsageError if it cannot be used."""
    import torch

    if name is None:
        if has_cuda():
            name = f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"
        else:
            name = "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`. A copy from the CPU to a CUDA device reads pinned memory, and nothing waits for it.

    torch keeps pinned memory for the next copies, and reuses it only after the copies that read it are done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def total_memory() -> int:
    """Return the bytes of main memory."""
    import psutil

    return int(psutil.virtual_memory().total)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`. It respects the limits of a container."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    give_back_freed_memory()  # otherwise freed memory that this process still holds counts as used
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text("utf-8"))
        used = int((group / "memory.current").read_text("utf-8"))
        facts = dict(line.split() for line in (group / "memory.stat").read_text("utf-8").splitlines())
    except (OSError, ValueError):  # there is no limit ("max"), or the system has no control groups
        return available
    used -= int(facts.get("inactive_file", 0))  # the system drops cached files when it needs memory
    return max(min(available, limit - used), 0)


CPU_WORDS = re.compile(
    r"DefaultCPUAllocator|could not create a primitive(?! descriptor)|could not create a memory|std::bad_alloc"
)
"""Parts of torch's messages about failed allocations on a CPU: its own, oneDNN's, C++'s. oneDNN has no primitive
descriptor where the types of two matrices do not go together, which is no lack of memory."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether Python or torch raises this error when an allocation fails, on any device."""
    words = error.__class__.__name__ == "OutOfMemoryError" or CPU_WORDS.search(str(error)) is not None
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and words)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or else its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def memory_in_use(device: torch.device) -> int:
    """Return the peak of bytes allocated on a CUDA device, or else the resident memory of this process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    import psutil

    return int(psutil.Process().memory_info().rss)


def fast_bf16(device: torch.device) -> bool:
    """Return whether the hardware has bfloat16 matrix products (AVX512-BF16, AMX, NVIDIA from Ampere on)."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    from vitrail.torch_private import has_avx512_bf16

    return device.type == "cpu" and has_avx512_bf16()


def compute_precision(device: torch.device, precision: Precision = "auto") -> ComputePrecision:
    """Return the precision in which `device` computes. Raises UsageError for tf32 on a device without it."""
    if precision == "tf32" and not (device.type == "cuda" and fast_bf16(device)):
        raise UsageError(f"precision tf32 needs an NVIDIA GPU from Ampere on, not {device}. Use precision float32")
    if precision != "auto":
        return precision
    if fast_bf16(device):
        return "bf16"
    return "fp16" if device.type == "cuda" and has_tensor_cores(device) else "float32"


def prediction_precision(device: torch.device, precision: Precision) -> ComputePrecision:
    """Return the precision of predictions: `compute_precision`, but float32 for float16 on a CPU, where it is slow."""
    computed = compute_precision(device, precision)
    return "float32" if device.type == "cpu" and computed == "fp16" else computed


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a CUDA device has tensor cores (NVIDIA from Volta on); the first multiply float16 alone."""
    import torch

    return torch.cuda.get_device_capability(device) >= (7, 0)


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the type of matrix products under autocast in a decided precision, None without autocast."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


@cache
def has_onednn() -> bool:
    """Return whether torch was built with oneDNN."""
    import torch

    return bool(torch.backends.mkldnn.is_available())


@cache
def has_amx() -> bool:
    """Return whether the processor has AMX, whose tiles multiply bfloat16 matrices."""
    from vitrail.torch_private import has_amx_tiles

    return has_amx_tiles()


class _FastFloat32:
    """How many contexts of `fast_float32` are open in this process, and the setting before the first."""

    lock = threading.Lock()
    users = 0
    before: Any = None


_FLOAT32 = _FastFloat32()


@contextmanager
def fast_float32() -> Iterator[None]:
    """Context in which x86 CPUs compute float32 matrix products with oneDNN. Afterwards the setting is as before.

    The precision is the same, and the speed twice that of MKL on AMD. torch offers oneDNN only under the name of
    reduced precision ("bf16"), which oneDNN uses on AMX processors alone; there nothing is changed.
    """
    import torch

    if not has_onednn() or has_amx():
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _FLOAT32.lock:  # the setting is that of the process: the last of several threads restores it
        if _FLOAT32.users == 0:
            _FLOAT32.before = matmul.fp32_precision
            matmul.fp32_precision = "bf16"
        _FLOAT32.users += 1
    try:
        yield
    finally:
        with _FLOAT32.lock:
            _FLOAT32.users -= 1
            if _FLOAT32.users == 0:
                matmul.fp32_precision = _FLOAT32.before


@contextmanager
def float32_products(precision: Precision) -> Iterator[None]:
    """Context of `fast_float32` in which CUDA computes float32 products exactly, or with precision tf32 in TF32.

    By default torch computes convolutions in TF32.
    """
    import torch

    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        with fast_float32():
            yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def keep_freed_memory(largest: int | None = None) -> None:
    """Ask glibc to keep freed buffers of up to `largest` bytes (32 MiB at most; default: of any size) for reuse.

    Each step frees memory that the next step needs again. Memory that was returned to the system comes back page by
    page, with a page fault for each. Reuse makes training and prediction on CPUs faster, at about the same peak
    (benchmarks/allocator.py). The setting is process-wide and cannot be read, so only the command line and the
    processes that it starts call this. If the address space is limited (`ulimit -v`), nothing changes, because compiled
    code and threads would lack the memory. Other C libraries ignore the call.
    """
    if (set_option := _glibc("mallopt")) is None or _addresses_are_limited():
        return
    if largest is not None:
        set_option(M_MMAP_THRESHOLD, largest)
    set_option(M_MMAP_MAX, 0 if largest is None else MMAP_MAX)
    set_option(M_TRIM_THRESHOLD, 2**31 - 1 if largest is None else 2**30)


def give_back_freed_memory() -> None:
    """Return all kept memory to the system, once, so that free memory can be counted."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (OSError, TypeError, AttributeError):
        return None


def _addresses_are_limited() -> bool:
    if sys.platform == "win32":
        return False
    else:  # so that a type checker leaves the import out there
        from resource import RLIM_INFINITY, RLIMIT_AS, RLIMIT_DATA, getrlimit

        overcommit = Path("/proc/sys/vm/overcommit_memory")
        strict = overcommit.exists() and overcommit.read_text("utf-8").strip() == STRICT_OVERCOMMIT
        return strict or any(getrlimit(kind)[0] != RLIM_INFINITY for kind in (RLIMIT_AS, RLIMIT_DATA))
