"""Batches that come one step ahead: the same batches, copied from pinned memory, and every event in its order.

There is no GPU here. Streams and events are replaced by what writes down when they are used; tensors are CPU tensors,
or fake ones on a CUDA device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_work import DeviceWork
from PIL import Image
from torch import Tensor

from vitrail.data.loading.loader import Batch
from vitrail.data.loading.prefetch import ThreadPool
from vitrail.data.settings import Augment
from vitrail.errors import DataError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.objective.base import Prepared
from vitrail.objective.settings import Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.torch_private import FakeTensorMode
from vitrail.training import batches as batching
from vitrail.training.batches import Sizes
from vitrail.training.checkpoints.state import RunStatus
from vitrail.training.feed import Feed
from vitrail.training.run import Progressive

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=5)
EPOCH = 4


class FewBatches:
    """A loader of `EPOCH` batches; those in `bad` name an image that cannot be read, and the one in `broken` fails."""

    wait_seconds = 0.0

    def __init__(self, bad: tuple[int, ...] = (), broken: int = -1) -> None:
        self.bad: list[tuple[str, str]] = []
        self.bad_index: list[int] = []
        self.share = 100
        self.source = SimpleNamespace(labels=np.arange(100) % 5, class_names=list("abcde"))
        self._bad, self._broken = bad, broken
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return EPOCH

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for number in range(start, EPOCH):
            step = EPOCH * epoch + number
            if step == self._broken:
                raise DataError("the disk is gone")
            if step in self._bad:
                self.bad.append((f"{step}.jpg", "truncated"))
                self.bad_index.append(step)
            self.loaded.append(step)
            rng = torch.Generator().manual_seed(step)
            images = torch.randint(0, 256, (6, 16, 16, 3), generator=rng, dtype=torch.uint8).permute(0, 3, 1, 2)
            yield Batch(images, torch.arange(6) % 5, torch.arange(6) + step)


def feed(loader: Any, start: float = 1.0) -> Feed:
    torch.manual_seed(0)
    objective = SupervisedObjective(build(CONFIG), Supervised(), Augment(mixup=0.5, cutmix=0.5), 5, 0)
    timetable: Any = SimpleNamespace(growth=lambda step, elapsed: min(step / 6, 1.0))
    return Feed(objective, loader, Sizes(Progressive(start), CONFIG), timetable)


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to streams and events, in order."""
    happened: list[str] = []

    class Event:
        def record(self, stream: Any) -> None:
            happened.append(f"copied on {stream.name}")

    @contextmanager
    def stream(used: Any) -> Iterator[None]:
        happened.append(f"begin {used.name}")
        yield

    current = SimpleNamespace(name="steps", wait_event=lambda event: happened.append("steps wait"))
    for name, value in {
        "Event": Event,
        "stream": stream,
        "Stream": lambda device: SimpleNamespace(name="copies"),
        "current_stream": lambda device: current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return happened


def ahead(found: Feed) -> Feed:
    """Let a feed on the CPU work as on a CUDA device."""
    found._pool = ThreadPool(1)
    return found


def nothing(image: str, reason: str) -> None:
    """Report no unreadable image."""


def taken(found: Feed, count: int, step: int = 0) -> list[Prepared]:
    pairs = list(islice(found.batches(RunStatus(step), max_bad=1.0, report=nothing), count))
    found.close()
    return [
        batch if isinstance(batch, Prepared) else found.objective.prepare(batch, step=step + number)
        for number, (_, batch) in enumerate(pairs)
    ]


@pytest.mark.parametrize("start", [1.0, 0.5])
@pytest.mark.parametrize("step", [0, 3])
def test_batches_that_come_ahead_are_the_same(diary: list[str], start: float, step: int) -> None:
    """Also from the step on at which a run is resumed, across epochs, and while images grow."""
    now, early = feed(FewBatches(), start), ahead(feed(FewBatches(), start))
    first, second = taken(now, 7, step), taken(early, 7, step)
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.columns(), theirs.columns(), strict=True))
    assert len({batch.images.shape for batch in first}) == (1 if start == 1 else 3 if step == 0 else 2)


def test_a_batch_is_prepared_while_the_step_before_runs(diary: list[str]) -> None:
    loader = FewBatches()
    found = ahead(feed(loader))
    fed = found.batches(RunStatus(), max_bad=1.0, report=nothing)
    for step in range(5):
        _, batch = next(fed)
        assert isinstance(batch, Prepared)
        until = time.monotonic() + 10
        while step + 1 not in loader.loaded and time.monotonic() < until:
            time.sleep(0.001)
        assert loader.loaded == list(range(step + 2))  # one, and no more
    found.close()
    assert diary.count("steps wait") == 5
    assert diary[:2] == ["begin copies", "copied on copies"] and diary.index("steps wait") > 1
    assert 0 < found.wait_seconds < 10


def test_what_fails_fails_in_its_step_and_is_said_by_the_thread_of_the_steps(diary: list[str]) -> None:
    said: list[tuple[str, bool]] = []
    found = ahead(feed(FewBatches(bad=(2,), broken=3)))
    fed = found.batches(
        RunStatus(),
        max_bad=1.0,
        report=lambda image, reason: said.append((image, threading.current_thread() is threading.main_thread())),
    )
    next(fed), next(fed)
    time.sleep(0.05)
    assert not said
    next(fed)
    assert said == [("2.jpg", True)]
    with pytest.raises(DataError, match="the disk is gone"):
        next(fed)
    found.close()


def test_a_batch_that_does_not_fit_is_left_to_its_step(diary: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The step finds that memory is short, and cuts the batch."""
    found = ahead(feed(FewBatches(), start=0.5))

    def failing(batch: Any, *, step: int) -> Prepared:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(found.objective, "prepare", failing)
    (loaded, batch), _ = islice(found.batches(RunStatus(), max_bad=1.0, report=nothing), 2)
    found.close()
    assert isinstance(batch, Batch) and batch.images.shape[-1] == 8 and batch.images.dtype == torch.uint8
    assert torch.equal(loaded.index, batch.index)
    broken = ahead(feed(FewBatches()))
    monkeypatch.setattr(broken.objective, "prepare", lambda batch, *, step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(broken.batches(RunStatus(), max_bad=1.0, report=nothing))
    broken.close()


class Now:
    """A pool without a thread, because the modes of torch hold for one thread."""

    def submit(self, function: Any, argument: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(argument))
        return future

    def close(self) -> None:
        """Nothing to end."""


@pytest.mark.train
@pytest.mark.parametrize("start", [1.0, 0.5])
def test_copies_are_pinned_and_nobody_waits(diary: list[str], monkeypatch: pytest.MonkeyPatch, start: float) -> None:
    """Every copy reads pinned memory, and the stream of the steps owns what it reads."""
    recorded: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    found = feed(FewBatches(), start)
    found.device, found._pool = torch.device("cuda"), Now()  # type: ignore[assignment]
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "cuda"))
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    with FakeTensorMode(allow_non_fake_inputs=True), DeviceWork("cuda") as work:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        found.objective.to("cuda")
        torch.__future__.set_overwrite_module_params_on_conversion(before)
        work.waits.clear()
        fed = found.batches(RunStatus(), max_bad=1.0, report=nothing)
        pairs = list(islice(fed, 4))
    assert work.found() == {}
    assert work.launches["_to_copy"] >= 2 * 4 and work.launches["_upsample_bilinear2d_aa"] == (0 if start == 1 else 5)
    for _, batch in pairs:
        assert isinstance(batch, Prepared) and batch.index.device.type == "cpu"
        for tensor in (batch.images, batch.labels, batch.targets):
            assert tensor.device.type == "cuda" and any(tensor is seen for seen in recorded)
    assert pairs[0][1].images.shape[-1] == (16 if start == 1 else 8)
    assert pairs[0][1].images.dtype == torch.uint8


def test_images_that_are_resized_as_floats_are_pillow_s() -> None:
    """As on a CUDA device, where torch resizes no uint8."""
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 48, 3), dtype=np.uint8)

    class Cuda(Tensor):
        device = property(lambda tensor: torch.device("cuda"))  # type: ignore[assignment]

    batch = torch.from_numpy(images).permute(0, 3, 1, 2)
    small = batching.shrunk(batch.as_subclass(Cuda), (20, 28)).as_subclass(Tensor)
    assert small.dtype == torch.uint8 and small.shape == (3, 3, 20, 28)
    for ours, theirs in zip(small, images, strict=True):
        expected = np.asarray(Image.fromarray(theirs).resize((28, 20), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(ours.permute(1, 2, 0).numpy() - expected).max() <= 1
