"""Fixtures every test can use."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each core has a test process of its own; torch reads it when imported

import pytest
from hypothesis import HealthCheck, settings
from random_inputs import EXAMPLES
from real_images import SHARED

gc.disable()  # until all tests are collected: what is imported meanwhile stays

pytest_plugins = ["kinds", "references"]

settings.register_profile("vitrail", max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vitrail")  # no test asserts a time: a busy machine is no failure


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Search for garbage among what tests make, not again and again among modules and the list of tests."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Indexes of data sets go to a folder of this session, not to the user's cache."""
    os.environ["VITRAIL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="module")
def freed_memory_goes_back() -> Iterator[None]:
    """What the tests of a file have freed goes back to the system. glibc keeps it, after large networks gigabytes."""
    yield
    if trim := getattr(ctypes.CDLL(None) if os.name == "posix" else None, "malloc_trim", None):
        trim(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real images that tests use where it is present."""
    if not SHARED.is_dir():
        pytest.skip(f"no real images at {SHARED} (set VITRAIL_TEST_DATA to a folder that holds them)")
    return SHARED


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """What a command line run in this process does to vitrail's logger ends with the test."""
    log = logging.getLogger("vitrail")
    before = log.level, list(log.handlers), log.propagate
    yield
    log.level, log.handlers, log.propagate = before


HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """What libraries install for signals is taken away after the test.

    Ray ends the process at SIGTERM. torch's DataLoader handles children that end: every later process that ends would
    interrupt this one, and on processors with AMX, the state that the kernel saves then may not fit on the stack that
    libraries set aside for signals, and the test process dies.
    """
    before = [signal.getsignal(number) for number in HANDLED]
    yield
    for number, handler in zip(HANDLED, before, strict=True):
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler or signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Files are not forced onto the disk in this process. Tests of that count the calls; other processes do wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield


@pytest.fixture(autouse=True, scope="session")
def seeds_note_no_stack() -> Iterator[None]:
    """Without an accelerator, torch would write down the whole stack each time that it is given a seed."""
    with pytest.MonkeyPatch.context() as patch:
        for backend in ("cuda", "xpu", "mtia"):
            patch.setattr(f"torch.{backend}.traceback", SimpleNamespace(format_stack=list))
        yield


AFFORDABLE = "vitrail.training.floor._affordable"


@pytest.fixture(autouse=True, scope="session")
def no_linear_classifier_after_training() -> Iterator[Any]:
    """Training in this process computes no linear classifier, as if there were no time: thousands of runs are tiny."""
    from vitrail.training import floor

    whole = floor._affordable
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AFFORDABLE, lambda *_: 0)
        yield whole


@pytest.fixture(scope="module")
def no_page() -> Iterator[None]:
    """For the fixtures of a module whose tests look at no report.html."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.verbs.train.train.reported", lambda result: result)
        yield


@pytest.fixture(autouse=True)
def no_page_after_training(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, no_linear_classifier_after_training: Any
) -> None:
    """Training by a verb in this process writes no report.html, which takes longer than a run of a few steps.

    Tests that need the page, or the linear classifier, are marked `page`. The fixtures of modules and sessions, and
    other processes, write the page.
    """
    if request.node.get_closest_marker("page") is None:
        monkeypatch.setattr("vitrail.verbs.train.train.reported", lambda result: result)
    else:
        monkeypatch.setattr(AFFORDABLE, no_linear_classifier_after_training)
