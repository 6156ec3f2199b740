"""Dynamic batching: images that arrive while one batch is computed form the next batch.

An image that arrives alone is computed at once. All models share one thread, so they never compete for the same cores.
If a batch fails, its images are computed one by one, and only those that fail alone are failures. An image whose client
has left, or whose deadline has passed, is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("vitrail")

BatchFunction = Callable[[list[Any]], Sequence[Any]]
"""Items -> one result each, in the same order. A result may be an Exception, for that item alone."""


@dataclass(eq=False)
class _Waiting:
    compute: BatchFunction
    item: Any
    answer: asyncio.Future[Any]


class Batcher:
    """Passes items to functions, in batches of items for the same function.

    `answered(items, seconds)` is called after every batch. Use: `start`, `submit` any number of times, `stop`.
    """

    def __init__(self, size: int, answered: Callable[[int, float], None]) -> None:
        self.size, self.answered = size, answered
        self.waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "vitrail-compute")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start working on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Finish the current batch, cancel waiting items, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for one in self.waiting:
            one.answer.cancel()
        self.waiting.clear()
        await asyncio.to_thread(self._thread.shutdown)

    async def submit(self, compute: BatchFunction, item: Any) -> Any:
        """Return the result of `compute` for an item, or raise its exception. Cancelling this drops the item."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.append(_Waiting(compute, item, answer))
        self._arrived.set()
        return await answer

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = self._next()
            if not batch:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            began = time.perf_counter()
            items = [one.item for one in batch]
            try:
                results = await loop.run_in_executor(self._thread, compute_isolated, batch[0].compute, items)
            except asyncio.CancelledError:
                for one in batch:
                    one.answer.cancel()
                raise
            self.answered(len(batch), time.perf_counter() - began)
            for one, result in zip(batch, results, strict=True):
                if one.answer.done():
                    continue
                if isinstance(result, Exception):
                    one.answer.set_exception(result)
                else:
                    one.answer.set_result(result)

    def _next(self) -> list[_Waiting]:
        """The oldest item still wanted and others for the same function behind it; the rest keeps its order."""
        batch: list[_Waiting] = []
        others: list[_Waiting] = []
        while self.waiting and len(batch) < self.size:
            one = self.waiting.popleft()
            if one.answer.done():
                continue
            (batch if not batch or one.compute == batch[0].compute else others).append(one)
        self.waiting.extendleft(reversed(others))
        return batch


def compute_isolated(compute: BatchFunction, items: list[Any]) -> list[Any]:
    """Return a result or an exception for each item: one that breaks a batch fails alone."""
    try:
        answers = list(compute(items))
        if len(answers) != len(items):
            raise RuntimeError(f"{len(answers)} answers for {len(items)} items")
        return answers
    except Exception as error:
        if len(items) == 1:
            log.error("an image failed in the network: %s: %s", type(error).__name__, error)
            return [error]
        log.warning("a batch of %d failed (%s): its images are computed one by one", len(items), error)
        return [answer for item in items for answer in compute_isolated(compute, [item])]
