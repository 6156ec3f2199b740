from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vitrail.training import time_limit
from vitrail.training.run import Run
from vitrail.training.time_limit import LEAST_PAUSE, ThreadCount

CPU = torch.device("cpu")


class Machine:
    """Seconds of a step with one thread and with four, and the share of a core that a thread gets."""

    def __init__(self) -> None:
        self.now, self.share = 0.0, 1.0
        self.seconds = {1: 1.0, 4: 0.3}
        self.threads = 4
        self.used: list[int] = []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = Machine()
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(time_limit, "core_share", lambda: found.share)
    monkeypatch.setattr(torch, "get_num_threads", lambda: found.threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(found, "threads", count))
    yield found


def steps(machine: Machine, count: ThreadCount, number: int) -> list[int]:
    used = []
    for _ in range(number):
        with count:
            used.append(machine.threads)
            machine.now += machine.seconds[machine.threads]
    return used


def test_the_faster_number_of_threads_is_found_and_found_again(machine: Machine) -> None:
    told: list[str] = []
    count = ThreadCount(4, told.append)
    assert set(steps(machine, count, 12)) == {1, 4} and count.threads == 4
    assert told == ["threads: 4 instead of 1, because a step takes 0.3 s instead of 1 s"]
    assert set(steps(machine, count, 10)) == {4}
    machine.seconds[4] = 8.0  # others take the cores
    used = steps(machine, count, 60)
    assert count.threads == 1 and used.count(4) < 15 and set(used[-40:]) == {1}
    assert machine.now < 4 * 60


def test_one_thread_stays_where_others_keep_the_cores_busy(machine: Machine) -> None:
    machine.share = 0.4
    count = ThreadCount(4, lambda told: pytest.fail(told))
    assert set(steps(machine, count, 50)) == {1}
    machine.share = 1.0  # they are done
    count = ThreadCount(4, lambda told: None)
    steps(machine, count, int(LEAST_PAUSE) + 12)
    assert count.threads == 4


def test_a_hopeless_way_costs_one_step(machine: Machine) -> None:
    machine.seconds[4] = 20.0
    count = ThreadCount(4, lambda told: pytest.fail(told))
    assert steps(machine, count, 20).count(4) == 1


def test_only_a_run_with_a_time_limit_on_a_cpu_chooses(machine: Machine) -> None:
    def choice(device: torch.device = CPU, **changes: object) -> ThreadCount | None:
        return ThreadCount.of(Run(**changes), device, print)  # type: ignore[arg-type]

    assert choice() is None and choice(torch.device("meta"), time_limit=1.0) is None
    assert machine.threads == 4  # untouched
    assert choice(time_limit=1.0) is not None
    assert choice(time_limit=1.0) is None  # now there is one thread
