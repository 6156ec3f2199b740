"""What a test needs says what kind it is: marks, a budget of processor time for each, and a list of who exceeds it.

A test without a mark needs nothing but this process: `pytest` runs those, `pytest -m everything` all but the nightly
ones, `pytest -m "everything or nightly"` all.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Generator
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest

KINDS = {  # what such a test needs, and how many seconds of processor time one may take
    "browser": ("a browser that opens the server's page", 10),
    "kill": ("processes that a signal ends in the middle of their work", 10),
    "export": ("the compiler of torch, ONNX Runtime or OpenVINO", 10),
    "processes": ("other processes: torchrun, workers, a new interpreter", 6),
    "train": ("a training run, or many steps", 3),
    "fuzz": ("many random inputs (VITRAIL_TEST_EXAMPLES sets how many)", 3),
    "full_size": ("networks or data of the size that people use", 5),
}
UNMARKED = 0.5  # seconds, as above
SHOWN = 40  # tests over their budget that the summary names
BEFORE = pytest.StashKey[float]()  # processor seconds when a test began
_started: list[str] = []  # programs that the running test started


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known, and listen for processes that start."""
    for kind, (need, budget) in KINDS.items():
        config.addinivalue_line("markers", f"{kind}: needs {need}; at most {budget} s of processor time")
    config.addinivalue_line("markers", "nightly(by_day): takes longer than a change should wait; what guards it by day")
    config.addinivalue_line("markers", "everything: every test that is not nightly has this mark")
    platform.platform()  # it starts `uname -p`, once in a process
    popen, start = subprocess.Popen.__init__, BaseProcess.start

    @functools.wraps(popen)
    def noted(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        _started.append(str(args))
        popen(self, args, *rest, **options)

    @functools.wraps(start)
    def noted_too(self: Any) -> None:
        if getattr(self, "_start_method", "fork") != "fork":  # a fork takes milliseconds
            _started.append(f"the process {self.name}")
        start(self)

    subprocess.Popen.__init__ = noted  # type: ignore[method-assign]
    BaseProcess.start = noted_too  # type: ignore[method-assign]


def budget(kind: str) -> float:
    """Return the seconds of processor time that a test of this kind may take."""
    return KINDS[kind][1] if kind else UNMARKED


def kind_of(item: pytest.Item) -> str:
    """Return the first kind of a test, "" if it has none."""
    return next((kind for kind in KINDS if item.get_closest_marker(kind)), "")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of a change, so that `-m everything` takes the place of the choice in pyproject.toml."""
    for item in items:
        nightly = item.get_closest_marker("nightly")
        if nightly is None:
            item.add_marker("everything")
        elif not nightly.args:
            raise pytest.UsageError(f"{item.nodeid}: nightly(by_day) needs what guards the same by day")


def processor_seconds(children: bool) -> float:
    """Return what this process and the children it waited for have used; with `children`, those that live, too."""
    times = os.times()
    used = times.user + times.system + times.children_user + times.children_system
    if children:
        for process in psutil.Process().children(recursive=True):
            try:
                used += sum(process.cpu_times()[:4])
            except psutil.Error:  # it ended meanwhile; its parent has its time
                continue
    return used


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Measure a test together with its fixtures."""
    item.stash[BEFORE] = processor_seconds(children=bool(kind_of(item)))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test without a mark that starts a process: `pytest` would no longer be fast. References may, once."""
    _started.clear()
    result = yield
    if _started and not kind_of(item):
        pytest.fail(f"it starts {_started[0]}: mark it with what it needs, one of {', '.join(KINDS)}", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Give the last report of a test the time that it took; a worker sends it to the process that prints."""
    report = yield
    if call.when == "teardown":
        spent = processor_seconds(children=bool(kind_of(item))) - item.stash[BEFORE]
        report.user_properties = [("kind", kind_of(item)), ("processor_seconds", spent)]
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the time of each kind, and the tests that took more than their kind allows."""
    spent: dict[str, list[tuple[float, str]]] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        facts = dict(getattr(report, "user_properties", ()))
        if "processor_seconds" in facts:
            spent.setdefault(facts["kind"], []).append((facts["processor_seconds"], report.nodeid))
    if not spent:
        return
    terminalreporter.section("processor seconds by kind")
    for kind, tests in sorted(spent.items()):
        seconds = sum(took for took, _ in tests)
        terminalreporter.write_line(f"{kind or 'without a mark':16}{len(tests):6} tests {seconds:7.0f} s")
    over = [(took, kind, test) for kind, tests in spent.items() for took, test in tests if took > budget(kind)]
    for took, kind, test in sorted(over, reverse=True)[:SHOWN]:
        terminalreporter.write_line(f"{took:6.1f} s of {budget(kind):g} s: {test}")
    if len(over) > SHOWN:
        terminalreporter.write_line(f"and {len(over) - SHOWN} more over their budget")
