"""Energy used during a run, on machines that report it: processors through RAPL, NVIDIA's GPUs through NVML.

RAPL (Linux, Intel and AMD) counts the microjoules of each processor package, and of its memory if it has a counter, in
files under /sys/class/powercap. Many systems let only root read them. NVML reports a GPU's power in milliwatts, through
torch if the package `nvidia-ml-py` is installed; it is integrated over time. Both include all other programs on the
machine, and exclude fans, disks and the power supply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")
EVERY = 1.0
"""Minimum seconds between two readings. Counters start again after minutes at full load, so read them often."""

ReadWatts = Callable[[], float]
"""Function that returns the present power in watts."""


class EnergyMeter:
    """Sums up energy. Call `sample` often, and `numbers` for the sum since the last call or the creation.

    `gpus` are sources of watts (`gpu_powers`). If nothing can be read, `numbers` is empty.
    """

    def __init__(
        self, gpus: Iterable[ReadWatts] = (), powercap: Path = POWERCAP, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._counters = _counters(powercap)
        self._gpus = list(gpus)
        self._watts = self._power()
        self._then = clock()
        self._joules = 0.0

    @property
    def measures(self) -> bool:
        """Whether any energy can be read."""
        return bool(self._counters or self._gpus)

    def sample(self) -> None:
        """Read the counters, unless the last reading was less than `EVERY` seconds ago."""
        if self.measures and self._clock() - self._then >= EVERY:
            self._read()

    def numbers(self) -> dict[str, float]:
        """Return the joules since the last call: {"joules": ...}, or {} if nothing can be read."""
        if not self.measures:
            return {}
        self._read()
        joules, self._joules = self._joules, 0.0
        return {"joules": round(joules, 3)}

    def _read(self) -> None:
        now = self._clock()
        self._joules += sum(counter.since() for counter in self._counters)
        watts = self._power()
        self._joules += 0.5 * (self._watts + watts) * (now - self._then)
        self._watts, self._then = watts, now

    def _power(self) -> float:
        """Return the watts of all GPUs. A GPU that stops reporting is not asked again."""
        total = 0.0
        for gpu in list(self._gpus):
            try:
                total += gpu()
            except Exception:  # a driver's own errors, of many classes, must never stop a run
                self._gpus.remove(gpu)
        return total


def gpu_powers(device: torch.device, everyone: bool = False) -> list[ReadWatts]:
    """Return the sources of watts of `device`, or with `everyone` of all GPUs that this process sees.

    The list is empty without an NVIDIA GPU or without NVML.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return []
    own = torch.cuda.current_device() if device.index is None else device.index
    numbers: Iterable[int] = range(torch.cuda.device_count()) if everyone else (own,)
    sources: list[ReadWatts] = []
    for number in numbers:

        def watts(number: int = number) -> float:
            return torch.cuda.power_draw(number) / 1000

        try:
            watts()
        except Exception:  # no NVML, or a GPU that does not report its power
            continue
        sources.append(watts)
    return sources


class _Counter:
    """A RAPL counter in a folder. Raises OSError or ValueError if it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "energy_uj"
        self.last = _joules(self.file)
        self.wraps_at = _joules(folder / "max_energy_range_uj")

    def since(self) -> float:
        """Return the joules since the last call, or 0 if the file cannot be read at the moment."""
        try:
            now = _joules(self.file)
        except (OSError, ValueError):
            return 0.0
        used = now - self.last if now >= self.last else now + self.wraps_at - self.last
        self.last = now
        return used


def _joules(path: Path) -> float:
    return int(path.read_text(encoding="ascii")) / 1e6


def _counters(powercap: Path) -> list[_Counter]:
    """Return the counters of packages and memory. Cores are part of a package, and `psys` repeats everything."""
    counters = []
    for folder in sorted(powercap.glob("intel-rapl:*")):  # AMD's counters have the same name
        try:
            name = (folder / "name").read_text(encoding="ascii").strip()
            if name.startswith("package") or name == "dram":
                counters.append(_Counter(folder))
        except (OSError, ValueError):
            continue
    return counters
