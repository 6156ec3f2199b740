"""Threads that work ahead, with results in order.

Threads suffice because decoders release the interpreter lock. They are daemons, so that a thread stuck in a read
cannot keep the process alive."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from vitrail.errors import DataError

T = TypeVar("T")
R = TypeVar("R")
Task = tuple["Future[Any]", Callable[..., Any], Any]

TIMEOUT = 120.0
"""Seconds after which a read counts as stuck."""


class Pool:
    """A fixed number of threads; `close` ends each after its current task."""

    def __init__(self, count: int) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
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
def threads(count: int) -> Iterator[Pool | None]:
    """Context with a pool of `count` threads, closed at the end; None for 0 threads."""
    pool = Pool(count) if count else None
    try:
        yield pool
    finally:
        if pool is not None:
            pool.close()


def _stop(tasks: queue.SimpleQueue[Task | None], count: int) -> None:
    try:
        while True:  # what nobody started is not wanted any more
            if task := tasks.get_nowait():
                task[0].cancel()
    except queue.Empty:
        pass
    for _ in range(count):
        tasks.put(None)


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while task := tasks.get():
        _run(*task)
        del task  # an idle thread must keep neither the last result alive nor, through it, the pool


def _run(future: Future[Any], function: Callable[..., Any], argument: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(argument))
    except BaseException as error:
        future.set_exception(error)


def ordered(
    pool: Pool | None,
    function: Callable[[T], R],
    arguments: Iterable[T],
    *,
    ahead: int,
    timeout: float | None = None,
    hung: Callable[[T], Exception | None] | None = None,
) -> Generator[R]:
    """Yield `function(argument)` for each argument, in order, with up to `ahead` calls in the pool.

    Without a pool the calls are made here, one at a time. An exception of a call is raised in its place. A
    result that has not come after `timeout` seconds of waiting (None: `TIMEOUT`) raises what `hung(argument)`
    returns; None means to wait as long again. Ending the iteration early cancels what has not begun."""
    timeout = TIMEOUT if timeout is None else timeout
    if pool is None:
        yield from map(function, arguments)
        return
    waiting: deque[tuple[T, Future[R]]] = deque()
    source = iter(arguments)
    try:
        while True:
            while len(waiting) < ahead:
                following = next(source, _END)
                if following is _END:
                    break
                waiting.append((following, pool.submit(function, following)))
            if not waiting:
                return
            argument, future = waiting.popleft()
            while not wait([future], timeout).done:
                if hung is not None and (error := hung(argument)) is not None:
                    future.cancel()
                    raise error
            result = future.result()
            del argument, future  # while the caller works with the result, it is the caller's alone
            yield result
    finally:
        for _, future in waiting:
            future.cancel()


def ahead(pool: Pool, function: Callable[[T], R], arguments: Iterable[T], count: int) -> Generator[tuple[T, Future[R]]]:
    """Yield each argument with the call that was queued for it, once those of the `count` that follow are queued too.

    Ending the iteration early cancels what has not begun."""
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


def stuck(name: str) -> DataError:
    """Return the error that names an image whose read has not come back within `TIMEOUT`."""
    return DataError(
        f"reading {name} has taken more than {TIMEOUT:g} s: the disk or network does not respond. "
        "Check it and try again"
    )


_END: Any = object()
