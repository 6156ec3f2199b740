"""The rules of every comparison: alternate, take medians, look at the ceiling, distrust a busy machine.

A `Contender` is something to call. `race` calls all contenders in turn, round after round, in an order that rotates;
`race_apart` has each in a process of its own, where what is set for a whole process differs between the sides.
`Measurement.ratio` compares two of them round by round, so that a slow phase of the machine slows down both sides.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import psutil
import torch

QUIET = 0.05
"""Share of the machine that other processes may use during a sample; above it, the sample is repeated."""
RETRIES = 3
"""Number of times that a disturbed sample is repeated before it is kept and flagged."""


@dataclass(frozen=True)
class Contender:
    """One contender of a comparison: `step` does the work of `images` images once.

    `setting` is the process-wide state during its samples (autocast, float32 products).
    """

    name: str
    step: Callable[[], object]
    images: int
    setting: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class Measurement:
    """The rates of one contender, one per round."""

    name: str
    rates: list[float] = field(default_factory=list)
    """Images per second."""
    foreign: list[float] = field(default_factory=list)
    """Share of the machine's CPU time that other processes used."""

    @property
    def median(self) -> float:
        """Images per second in the median round."""
        return statistics.median(self.rates)

    @property
    def disturbed(self) -> int:
        """Number of rounds in which other processes used more than `QUIET` of the machine, in spite of retries."""
        return sum(share > QUIET for share in self.foreign)

    def ratio(self, peer: Measurement) -> Ratio:
        """Return the ratio of this speed to the peer's, round by round."""
        return Ratio([ours / theirs for ours, theirs in zip(self.rates, peer.rates, strict=True)])


@dataclass(frozen=True)
class Ratio:
    """Our speed over theirs, one value per round."""

    rounds: list[float]

    def summary(self) -> dict[str, float]:
        """Return the median, the lowest and the highest round."""
        values = (statistics.median(self.rounds), min(self.rounds), max(self.rounds))
        return dict(zip(("median", "low", "high"), (round(v, 3) for v in values), strict=True))


Sample = Callable[[float], tuple[float, float]]
"""Measures for some seconds and returns images/s and the share of the machine that other processes used."""


def race(contenders: list[Contender], *, rounds: int = 5, seconds: float = 3.0) -> list[Measurement]:
    """Measure all contenders in alternation; a sample takes at least `seconds` and two calls."""
    if len({c.name for c in contenders}) != len(contenders):
        raise ValueError("two contenders have the same name")
    for contender in contenders:
        _warm_up(contender)
    return in_turn({c.name: partial(_quiet_sample, c) for c in contenders}, rounds, seconds)


def race_apart(
    makers: Mapping[str, Callable[[], Contender]], *, rounds: int = 5, seconds: float = 3.0
) -> list[Measurement]:
    """Do the same with contenders that are made in a process each, with this process's number of torch threads.

    So the settings of one process (the allocator's, above all) are those of one side only. All processes live at the
    same time, and all but one are idle. The functions that make contenders must be importable.
    """
    spawn, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    with ExitStack() as stack:
        samples: dict[str, Sample] = {}
        for name, make in makers.items():
            home = stack.enter_context(ProcessPoolExecutor(1, spawn, torch.set_num_threads, (threads,)))
            home.submit(_settle, make).result()
            samples[name] = partial(_sample_there, home)
        return in_turn(samples, rounds, seconds)


def in_turn(samples: dict[str, Sample], rounds: int, seconds: float) -> list[Measurement]:
    """Measure round by round, `seconds` each; the one that is first rotates."""
    measured = {name: Measurement(name) for name in samples}
    names = list(samples)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            rate, foreign = samples[name](seconds)
            measured[name].rates.append(rate)
            measured[name].foreign.append(foreign)
    return list(measured.values())


_settled: list[Contender] = []
"""The contender that lives in this process."""


def _settle(make: Callable[[], Contender]) -> None:
    _settled[:] = [make()]
    _warm_up(_settled[0])


def _sample_there(home: ProcessPoolExecutor, seconds: float) -> tuple[float, float]:
    return home.submit(_sample_settled, seconds).result()


def _sample_settled(seconds: float) -> tuple[float, float]:
    return _quiet_sample(_settled[0], seconds)


def _warm_up(contender: Contender) -> None:
    """Make the first calls, which compile, allocate and fill caches, outside the clock."""
    with contender.setting():
        contender.step()
        contender.step()


def _quiet_sample(contender: Contender, seconds: float) -> tuple[float, float]:
    """Return (images/s, foreign share) of a sample without foreign load, or of the least disturbed of a few."""
    samples = []
    for _ in range(1 + RETRIES):
        samples.append(_sample(contender, seconds))
        if samples[-1][1] <= QUIET:
            break
    return min(samples, key=lambda sample: sample[1])


def _sample(contender: Contender, seconds: float) -> tuple[float, float]:
    gc.collect()
    gc.disable()  # a collection in one side's sample would be charged to it alone
    try:
        with contender.setting():
            contender.step()  # brings its own data back into the caches
            with foreign_load() as foreign:
                start, calls, elapsed = time.perf_counter(), 0, 0.0
                while elapsed < seconds or calls < 2:
                    contender.step()
                    calls += 1
                    elapsed = time.perf_counter() - start
    finally:
        gc.enable()
    return calls * contender.images / elapsed, foreign[0]


@contextmanager
def foreign_load() -> Iterator[list[float]]:
    """Context whose value becomes [share of the machine that other processes used in it].

    Time stolen by the hypervisor counts as theirs.
    """
    result = [0.0]
    wall, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    yield result
    wall = time.perf_counter() - wall
    foreign = (_busy_seconds() - busy) - (_own_seconds() - own)
    # the kernel counts in ticks of 10 ms: a short block cannot tell load from rounding
    result[0] = max(0.0, foreign - 0.02) / max(wall * (psutil.cpu_count() or 1), 1e-9)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _own_seconds() -> float:
    """Return the CPU seconds of this process, its live children and the children it has waited for."""
    me = psutil.Process()
    times = me.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child_times = child.cpu_times()
            total += child_times.user + child_times.system
    return float(total)


@contextmanager
def products(kind: str) -> Iterator[None]:
    """Context that sets how float32 products are computed on the CPU; "none" is torch's default."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = kind
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def stock(precision: str = "float32") -> Iterator[None]:
    """Context in which a peer is measured: torch's defaults, with bfloat16 autocast for "bf16"."""
    with products("none"), autocast(precision):
        yield


@contextmanager
def tuned(precision: str = "float32") -> Iterator[None]:
    """Context in which ours is measured, with what `vitrail.device.fast_float32` sets."""
    from vitrail.device import fast_float32

    with products("none"), autocast(precision), fast_float32():
        yield


def autocast(precision: str) -> AbstractContextManager[object]:
    """Return bfloat16 autocast on the CPU for "bf16", an empty context for "float32"."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()


@cache
def ceiling(size: int, *, repeats: int = 5) -> dict[str, float]:
    """Return the GFLOP/s of torch's fastest matrix products: float32 by both routes, bfloat16 and int8.

    They are measured once in a process, so that a table and the description of its machine have the same.
    """
    cases = {
        "float32, torch's default": (torch.float32, stock, torch.mm),
        "float32": (torch.float32, tuned, torch.mm),
        "bf16": (torch.bfloat16, stock, torch.mm),
        "int8": (torch.int8, stock, torch._int_mm),
    }
    best = dict.fromkeys(cases, 0.0)
    for (name, (dtype, setting, product)), turn in itertools.product(cases.items(), range(repeats + 1)):
        if 0 < best[name] < 2 * size**3 / 1e9:
            continue  # not all processors have fast products of each type: more than a second is measured once
        a, b = (torch.randn(size, size).mul(30).clamp(-127, 127).to(dtype) for _ in range(2))
        with setting():
            start = time.perf_counter()
            product(a, b)
            elapsed = time.perf_counter() - start
        if turn or elapsed > 1:  # the first one prepares
            best[name] = max(best[name], 2 * size**3 / elapsed / 1e9)
    best["float32"] = max(best["float32"], best["float32, torch's default"])
    return {name: round(value, 1) for name, value in best.items()}
