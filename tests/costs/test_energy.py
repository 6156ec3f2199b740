"""Energy from made-up counters: what counts, what wraps around, what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vitrail.costs.energy import EnergyMeter, gpu_powers


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def zone(root: Path, number: str, name: str, microjoules: int, largest: int = 262_143_000_000) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{largest}\n")
    return folder / "energy_uj"


def test_packages_and_memory_count_once(tmp_path: Path) -> None:
    files = [
        zone(tmp_path, "0", "package-0", 5_000_000),
        zone(tmp_path, "0:0", "core", 1_000_000),  # part of the package
        zone(tmp_path, "0:1", "dram", 0),
        zone(tmp_path, "1", "package-1", 7_000_000),
        zone(tmp_path, "2", "psys", 9_000_000),  # everything, once more
    ]
    (tmp_path / "intel-rapl").mkdir()  # the control type itself
    meter = EnergyMeter(powercap=tmp_path, clock=Clock())
    for file, more in zip(files, (3_000_000, 900_000, 500_000, 250_000, 9_000_000), strict=True):
        file.write_text(f"{int(file.read_text()) + more}\n")
    assert meter.numbers() == {"joules": pytest.approx(3.75)}
    assert meter.numbers() == {"joules": 0.0}  # since the last call


def test_a_counter_that_starts_again(tmp_path: Path) -> None:
    clock, file = Clock(), zone(tmp_path, "0", "package-0", 9_000_000, largest=10_000_000)
    meter = EnergyMeter(powercap=tmp_path, clock=clock)
    for value in (2_000_000, 1_000_000):  # 3 J on, and then 9 J on, each past the end
        clock.now += 2
        file.write_text(str(value))
        meter.sample()
    assert meter.numbers()["joules"] == pytest.approx(12)


def test_looks_are_a_second_apart(tmp_path: Path) -> None:
    clock, file = Clock(), zone(tmp_path, "0", "package-0", 0)
    meter = EnergyMeter(powercap=tmp_path, clock=clock)
    file.unlink()  # a look would find nothing, and the file is back before the next
    clock.now += 0.5
    meter.sample()
    file.write_text("4000000")
    assert meter.numbers()["joules"] == 4


def test_power_is_summed_over_time() -> None:
    clock = Clock()
    meter = EnergyMeter([lambda: 100 + 10 * (clock.now - 100), lambda: 50.0], Path("/nowhere"), clock)
    for _ in range(4):
        clock.now += 2.5
        meter.sample()
    assert meter.numbers()["joules"] == pytest.approx(10 * (150 + 50))  # a mean of 150 W, and 50 W, for 10 s


def test_a_gpu_that_stops_telling_stops_nothing() -> None:
    clock, calls = Clock(), []

    def fails() -> float:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("driver")
        return 80.0

    meter = EnergyMeter([fails], Path("/nowhere"), clock)
    clock.now += 2
    meter.sample()
    meter.sample()
    assert not meter.measures and meter.numbers() == {} and len(calls) == 2


def test_where_nothing_can_be_read(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 5).write_text("not a number")  # as good as refused
    meter = EnergyMeter(powercap=tmp_path)
    meter.sample()
    assert not meter.measures and meter.numbers() == {}
    assert EnergyMeter(powercap=tmp_path / "gone").numbers() == {}
    assert gpu_powers(torch.device("cpu")) == []
