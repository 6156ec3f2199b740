"""The batches of a run as its steps take them: resized and, on a CUDA device, prepared there one step ahead.

On a CPU a step loads, resizes and prepares its own batch, because no processor is left to do it meanwhile. On a CUDA
device a thread does it while the device computes the step before. The thread draws the random numbers, copies from
pinned memory on a stream of its own, and resizes and mixes there. So a step waits neither for a copy nor for a draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import torch

from vitrail.data.loading.loader import Batch, Loader
from vitrail.data.loading.prefetch import ThreadPool
from vitrail.device import out_of_memory, to_device
from vitrail.objective.base import ImageBatch, Objective, Prepared
from vitrail.training.batches import CPU, Sizes, endless
from vitrail.training.checkpoints.state import RunStatus
from vitrail.training.timetable import Timetable

Fed = tuple[Batch, ImageBatch | Prepared]
"""A batch as it was loaded, and as a step takes it."""
Copied = tuple[Batch, ImageBatch | Prepared, torch.cuda.Event]
"""Both, and the event after the last copy."""


class Feed:
    """Yields what the steps of a run take (`batches`). `close` ends its thread."""

    def __init__(self, objective: Objective, loader: Loader, resize: Sizes, timetable: Timetable) -> None:
        self.objective, self.loader, self.resize, self.timetable = objective, loader, resize, timetable
        self.device = next(objective.parameters()).device
        self._pool = ThreadPool(1) if self.device.type == "cuda" else None
        self._waited = 0.0

    @property
    def wait_seconds(self) -> float:
        """Seconds that steps have waited for their batches."""
        return self.loader.wait_seconds if self._pool is None else self._waited

    def batches(self, status: RunStatus, *, max_bad: float, report: Callable[[str, str], None]) -> Iterator[Fed]:
        """Yield the batches from the step of `status` on; for `max_bad` and `report` see `endless`.

        With a time limit the size of images follows the time at which a step takes its batch, or on a CUDA device the
        step before.
        """
        step, pool = status.step, self._pool
        if pool is None:
            for number, loaded in enumerate(endless(self.loader, step, max_bad=max_bad, report=report), step):
                yield loaded, self.resize(loaded, self.timetable.growth(number, status.elapsed))
            return
        bad: list[tuple[str, str]] = []  # reported with the batch, in the thread of the steps
        loading = endless(self.loader, step, max_bad=max_bad, report=lambda *found: bad.append(found))
        copies, steps = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)

        def begin(step: int) -> Future[Copied]:
            growth = self.timetable.growth(step, status.elapsed)  # asked in this thread: equal in all processes
            return pool.submit(self._prepared, (loading, copies, step, growth))

        coming = begin(step)
        while True:
            began = time.perf_counter()
            loaded, batch, done = coming.result()
            self._waited += time.perf_counter() - began
            for found in bad:
                report(*found)
            bad.clear()
            step += 1
            coming = begin(step)
            if isinstance(batch, Prepared):
                steps.wait_event(done)
                for tensor in batch.columns():
                    if tensor.is_cuda:
                        tensor.record_stream(steps)  # else its memory would be the next batch's while steps read it
            yield loaded, batch

    def _prepared(self, task: tuple[Iterator[Batch], torch.cuda.Stream, int, float]) -> Copied:
        """Load a batch and prepare it on the device.

        If memory runs out on the device, the batch is only resized, on the CPU. The step prepares it, and then handles
        that error.
        """
        loading, copies, step, growth = task
        loaded, batch, done = next(loading), None, torch.cuda.Event()
        with torch.cuda.stream(copies):
            try:
                whole = loaded
                if self.resize.start < 1 and growth < 1 and loaded.plan is None:
                    whole = replace(loaded, images=to_device(loaded.images, self.device))
                batch = self.objective.prepare(self.resize(whole, growth), step=step)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            done.record(copies)
        return loaded, self.resize(loaded, growth, CPU) if batch is None else batch, done

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.close()
