"""Threads that work ahead and return their results in order.

Decoders release the interpreter lock; `processes.py` is for training that needs the lock almost alone. The threads are
daemons, so that a thread stuck in a read cannot keep the process alive. That is why
`concurrent.futures.ThreadPoolExecutor` is not used: it waits for its threads at exit.

`LostImages` notices that the disk stops giving images, because their folder is removed, renamed or unmounted.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, TypeVar

from vitrail.data.item import IndexedSource
from vitrail.errors import DataError, UsageError

T = TypeVar("T")
R = TypeVar("R")
QueuedCall = tuple["Future[Any]", Callable[..., Any], Any]

TIMEOUT = 120.0
"""Seconds after which a read counts as stuck."""


class ThreadPool:
    """A fixed number of threads; `close` ends each after its current task.

    Raises UsageError for a negative number of threads.
    """

    def __init__(self, count: int) -> None:
        if count < 0:
            raise UsageError(f"workers is {count}; it must be at least 0 (0: no threads)")
        self._tasks: queue.SimpleQueue[QueuedCall | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=_work, args=(self._tasks,), daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, self._tasks, count)

    @property
    def size(self) -> int:
        """Number of threads."""
        return len(self._threads)

    def submit(self, function: Callable[[T], R], argument: T) -> Future[R]:
        """Queue one call."""
        future: Future[R] = Future()
        self._tasks.put((future, function, argument))
        return future

    def close(self, patience: float = 5.0) -> None:
        """End the threads and wait, up to `patience` seconds, until they are gone; may be called twice."""
        self._end()
        for thread in self._threads:
            thread.join(patience)


@contextmanager
def threads(count: int) -> Iterator[ThreadPool | None]:
    """Context with a pool of `count` threads, closed at the end; None for 0 threads."""
    pool = ThreadPool(count) if count else None
    try:
        yield pool
    finally:
        if pool is not None:
            pool.close()


def _stop(tasks: queue.SimpleQueue[QueuedCall | None], count: int) -> None:
    try:
        while True:  # tasks that have not begun are cancelled
            if task := tasks.get_nowait():
                task[0].cancel()
    except queue.Empty:
        pass
    for _ in range(count):
        tasks.put(None)


def _work(tasks: queue.SimpleQueue[QueuedCall | None]) -> None:
    while task := tasks.get():
        _run(*task)
        del task  # else an idle thread would keep the last result alive and, through it, the pool


def _run(future: Future[Any], function: Callable[..., Any], argument: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(argument))
    except BaseException as error:
        future.set_exception(error)


def ordered(
    pool: ThreadPool | None,
    function: Callable[[T], R],
    arguments: Iterable[T],
    *,
    ahead: int,
    timeout: float | None = None,
    hung: Callable[[T], Exception | None] | None = None,
) -> Generator[R]:
    """Yield `function(argument)` for each argument, in order, with up to `ahead` calls in the pool.

    Without a pool the calls are made here, one at a time. An exception of a call is raised in its place. If a result
    takes more than `timeout` seconds (None: `TIMEOUT`), the error from `hung(argument)` is raised. If it returns None,
    the wait begins again. Ending the iteration early cancels the calls that have not begun.
    """
    if pool is None:
        yield from map(function, arguments)
        return
    timeout = TIMEOUT if timeout is None else timeout
    with closing(queued(pool, function, arguments, ahead - 1)) as calls:
        for argument, future in calls:
            while not wait([future], timeout).done:
                if hung is not None and (error := hung(argument)) is not None:
                    future.cancel()
                    raise error
            result = future.result()
            del argument, future  # while the caller works with the result, nothing else refers to it
            yield result


def queued(
    pool: ThreadPool, function: Callable[[T], R], arguments: Iterable[T], count: int
) -> Generator[tuple[T, Future[R]]]:
    """Yield each argument with its queued call, after the calls of the next `count` arguments are queued, too.

    Ending the iteration early cancels the calls that have not begun.
    """
    waiting: deque[tuple[T, Future[R]]] = deque()
    try:
        for argument in arguments:
            waiting.append((argument, pool.submit(function, argument)))
            if len(waiting) > count:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for _, future in waiting:
            future.cancel()


def stuck(name: str, timeout: float | None = None) -> DataError:
    """Return the error that names an image whose read takes more than `timeout` seconds (None: `TIMEOUT`)."""
    return DataError(
        f"reading {name} has taken more than {TIMEOUT if timeout is None else timeout:g} s: the disk or network does "
        "not respond. Check it and try again"
    )


def each_image(
    pool: ThreadPool | None, function: Callable[[IndexedSource, int], R], source: IndexedSource, indices: Iterable[int]
) -> Generator[R]:
    """Yield `function(source, index)` for each index, in order, with some calls ahead in the pool.

    Raises DataError, which names the image, for a read that takes more than `TIMEOUT` seconds.
    """
    ahead = 1 if pool is None else 8 * pool.size
    return ordered(pool, partial(function, source), indices, ahead=ahead, hung=lambda index: stuck(source.id(index)))


MOST_LOST = 100
"""Number of consecutive images that the disk may refuse."""


class LostImages:
    """Counts consecutive images that cannot be read from the disk, so that no result records them as damaged.

    Images that are read but cannot be decoded do not count.
    """

    def __init__(self, count: int) -> None:
        self._most = min(MOST_LOST, count)
        self._consecutive = 0

    def see(self, image: str, reason: str | None) -> None:
        """Count an image, with the reason of its `DecodeError` or None.

        Raises DataError after `MOST_LOST` such images in sequence, or if none of fewer images can be read.
        """
        self._consecutive = self._consecutive + 1 if reason == "unreadable" else 0
        if self._consecutive == self._most:
            raise DataError(
                f"{self._most} consecutive images cannot be read from the disk; the last is {image}. Check that the "
                "folder is still there and may be read, then run the same command again"
            )
