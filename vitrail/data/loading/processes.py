"""Processes that read images into memory which the training process shares, so that they need none of its time.

Python runs one thread of a process at a time (its global interpreter lock), and decoding in threads holds the lock for
a sixth to almost half of the time. On any number of cores threads therefore deliver no more images than two to six
cores could, and take the lock from the thread that trains. Each process has a lock of its own.

Every process is forked from a server (`multiprocessing`'s "forkserver") that has imported torch once, and not from the
training process, whose threads and CUDA context a fork would break. It gets a copy of the `ImageReader`; large arrays
in it are shared by all. The memory has no name in the file system: the system frees it with the last process that uses
it, however that ends, and a small /dev/shm, as containers have, is no limit.

A thread of the training process waits for each process. It passes on what the process reports, and the loader treats it
as it treats a thread that reads images itself.
"""

from __future__ import annotations

import io
import math
import mmap
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from multiprocessing import heap, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from vitrail.data.item import IndexedSource
from vitrail.data.loading.reading import BatchPart, Fetched, FetchedImages, ImageReader, Read, Wanted
from vitrail.device import SIGKILL, first_line
from vitrail.errors import DataError, DecodeError, UsageError, VitrailError

NAME = "vitrail-loading"
"""How the names of the processes begin."""
START_TIMEOUT = 120.0
"""Seconds in which a process must be able to read."""
PORTABLE = 1
"""cudaHostRegisterPortable: the memory is locked for every CUDA device."""
ALIGNED = 4096
"""Bytes of a page: where an array in shared memory begins."""


class Shared:
    """Memory that several processes use; it can be sent to a process that starts."""

    def __init__(self, size: int) -> None:
        # of the system's main memory; the usual way is limited to the size of /dev/shm
        if sys.platform != "win32" and hasattr(os, "memfd_create"):
            handle = os.memfd_create(NAME)
            os.ftruncate(handle, size)
            self._arena = heap.Arena(size, handle)
            weakref.finalize(self, os.close, handle)
        else:
            self._arena = heap.Arena(size)

    @cached_property
    def bytes(self) -> np.ndarray:
        """The memory, uint8 [size]."""
        return np.frombuffer(self._arena.buffer, np.uint8)

    def array(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Return the memory as an array."""
        return self.bytes[: np.dtype(dtype).itemsize * math.prod(shape)].view(dtype).reshape(shape)

    def pin(self, device: torch.device) -> None:
        """Lock the memory while arrays of it are in use: a CUDA device then copies from it in the background.

        For other devices nothing happens.
        """
        if device.type != "cuda":
            return
        runtime: Any = torch.cuda.cudart()
        address = self.bytes.ctypes.data
        with torch.cuda.device(device):  # else every process of a machine would take memory of its first device
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, self.bytes.nbytes, PORTABLE)))
        weakref.finalize(self.bytes, runtime.cudaHostUnregister, address).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_arena": self._arena}


class Ring:
    """Shared memory for some batches: slots of [batch_size, *shape] each."""

    def __init__(self, count: int, batch_size: int, reader: ImageReader) -> None:
        self.dtype, self.shape = np.dtype(reader.pixels.dtype), (count, batch_size, *reader.shape)
        self.memory = Shared(self.dtype.itemsize * math.prod(self.shape))
        self._free = deque(range(count))
        self._read_by_device = deque[tuple[int, torch.cuda.Event]]()
        self._device: torch.device | None = None

    def pin(self, device: torch.device) -> None:
        """Let a CUDA device copy from the slots in the background; for other devices nothing happens."""
        self._device = device if device.type == "cuda" else None
        self.memory.pin(device)

    @cached_property
    def slots(self) -> np.ndarray:
        """The memory, [count, batch_size, *shape]."""
        return self.memory.array(self.dtype, self.shape)

    def take(self, count: int) -> tuple[np.ndarray, int]:
        """Return memory for a batch of `count` images and the number of its slot.

        The slot is free again when nothing refers to the array, and the CUDA device has done what its current stream
        had to do at that moment. If none is free, because the caller keeps the batches, the array is private memory and
        the number -1.
        """
        while self._read_by_device and self._read_by_device[0][1].query():
            self._free.append(self._read_by_device.popleft()[0])
        try:
            slot = self._free.popleft()
        except IndexError:
            return np.empty((count, *self.shape[2:]), self.dtype), -1
        images = self.slots[slot, :count]
        # the callback must not refer to the ring, whose memory it would keep
        left = self._free.append if self._device is None else partial(_left, self._read_by_device, self._device)
        weakref.finalize(images, left, slot).atexit = False
        return images, slot

    def __getstate__(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": self.shape, "memory": self.memory}


def _left(read_by_device: deque[tuple[int, torch.cuda.Event]], device: torch.device, slot: int) -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    read_by_device.append((slot, event))


class ReaderProcesses:
    """Processes that each have a copy of `reader` and fill slots of `ring`; `close` ends them at once.

    Raises UsageError if the reader cannot be sent to a process.
    """

    def __init__(self, count: int, reader: ImageReader, ring: Ring) -> None:
        self._source = reader.source
        self._workers: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker | Exception] = queue.SimpleQueue()
        self._closing = threading.Event()
        # before `multiprocessing` waits for its processes at the exit of the interpreter
        self._end = util.Finalize(self, _kill, (self._closing, self._workers), exitpriority=10)
        progress = Shared(16 * count)
        self._progress = progress.array(np.int64, (count, 2))
        self._progress[:] = -1, 0
        self._began = time.monotonic()
        arguments = (Packed.of(reader), ring, progress)
        starting = (count, arguments, self._closing, self._workers, self._idle)
        # in the background, because importing torch takes seconds
        self._starting = threading.Thread(target=_start, args=starting, daemon=True)
        self._starting.start()

    @property
    def starting(self) -> bool:
        """Whether some processes cannot read yet, because they import and open what they need."""
        return time.monotonic() - self._began < START_TIMEOUT and not self._progress[:, 1].all()

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes that have started."""
        return [worker.process.pid or 0 for worker in self._workers]

    def read(self, part: BatchPart, wanted: list[Wanted], fetched: Fetched | None) -> list[Read | DecodeError]:
        """Fill the slots of the wanted images in the next idle process; see `ImageReader.read`.

        Raises what the reader raises, and DataError if the process dies.
        """
        images: FetchedImages | None = None
        if fetched is not None:
            part.progress[:] = wanted[0].index, 1
            indices, name = {image.index for image in wanted}, self._source.id(wanted[0].index)
            try:
                images = {index: image for index, image in fetched().items() if index in indices}
            except VitrailError:
                raise
            except Exception as error:
                raise DataError(f"image {name} could not be read: {error!r}") from error
        worker = self._idle.get()
        if isinstance(worker, Exception):
            self._idle.put(worker)
            raise worker
        part.progress, slots = self._progress[worker.number], part.slots
        try:
            worker.connection.send((slots.number, len(slots.images), part.epoch, wanted, images))
            reply = worker.connection.recv()
        except (EOFError, OSError):
            dead = self._dead(worker)
            self._idle.put(dead)
            raise dead from None
        self._idle.put(worker)
        if isinstance(reply, Exception):
            raise reply
        read, pixels = reply
        if pixels is not None:
            slots.images[[image.slot for image in wanted]] = pixels
        return read  # type: ignore[no-any-return]

    def _dead(self, worker: Worker) -> DataError:
        """Return the error for a process that ended by itself."""
        if self._closing.is_set():
            return DataError("the loader is closed")
        worker.process.join(5)
        code, index = worker.process.exitcode or 0, int(self._progress[worker.number, 0])
        where = "before it read an image" if index < 0 else f"while it read image {self._source.id(index)}"
        if code == -SIGKILL:
            return DataError(
                f"a loading process was killed (SIGKILL) {where}. The system kills processes when the memory runs "
                "out; its log (dmesg) or that of the job says so. Use fewer processes (--workers N), or threads "
                "(--worker-kind threads)"
            )
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return DataError(
            f"a loading process ended ({how}) {where}. Its own message, if there is one, stands above. "
            "--worker-kind threads reads the images in this process"
        )

    def close(self) -> None:
        """End the processes and wait until they are gone; may be called twice."""
        self._end()
        self._starting.join()
        self._idle.put(DataError("the loader is closed"))  # for threads that wait for a process
        for worker in self._workers:
            worker.process.join()


class Worker:
    """One process and the connection to it."""

    def __init__(self, number: int, arguments: tuple[Packed, Ring, Shared]) -> None:
        context = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
        self.number = number  # its row in the progress
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, number, *arguments), name=f"{NAME}-{number}", daemon=True
        )
        with theirs, _main_left_alone(arguments[0].pickled):
            self.process.start()


def _start(
    count: int,
    arguments: tuple[Packed, Ring, Shared],
    closing: threading.Event,
    workers: list[Worker],
    idle: queue.SimpleQueue[Worker | Exception],
) -> None:
    """Start the processes, one after the other."""
    with suppress(ImportError):  # Windows has no fork server
        from multiprocessing import forkserver

        forkserver.set_forkserver_preload(["torch", __name__])
    for number in range(count):
        if closing.is_set():
            return
        try:
            worker = Worker(number, arguments)
        except Exception as error:
            idle.put(DataError(f"a loading process cannot be started: {error}. Use --worker-kind threads"))
            return
        workers.append(worker)
        idle.put(worker)
        if closing.is_set():
            worker.process.kill()


def _kill(closing: threading.Event, workers: list[Worker]) -> None:
    closing.set()
    for worker in workers:
        worker.process.kill()


_preparing = threading.Lock()


@contextmanager
def _main_left_alone(payload: bytes) -> Iterator[None]:
    """Context in which a process starts without the main module of this program, unless the payload needs it.

    A script that is imported again, and has no `if __name__ == "__main__"`, would train again in each process.
    """
    needed = b"__main__" in payload

    def prepared(name: str) -> dict[str, Any]:
        data = usual(name)
        if name.startswith(NAME) and not needed:
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    with _preparing:
        usual = spawn.get_preparation_data
        spawn.get_preparation_data = prepared
        try:
            yield
        finally:
            spawn.get_preparation_data = usual


def obstacle(source: IndexedSource, transform: object) -> str:
    """Return why a source and a transform cannot be used in another process; "" if they can."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=lambda buffer: None).dump((source, transform))
    except Exception as error:
        return f"the images or their transform cannot be sent to another process ({first_line(error)})"
    return "the script that runs defines their classes" if b"__main__" in stream.getvalue() else ""


class _Pickler(pickle.Pickler):
    """Pickles memory-mapped arrays as the place in their file."""

    def reducer_override(self, array: Any) -> Any:
        if not isinstance(array, np.memmap) or array.filename is None:
            return NotImplemented
        mapping: Any = array._mmap  # type: ignore[attr-defined]
        begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # of the mapping in the file
        offset = begin + array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
        return _mapped, (str(array.filename), array.dtype, array.shape, array.strides, offset)


def _mapped(file: str, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> np.ndarray:
    return np.ndarray(shape, dtype, np.memmap(file, np.uint8, "r"), offset, strides)


@dataclass(frozen=True)
class Packed:
    """A pickled object whose large arrays lie in shared memory."""

    pickled: bytes
    memory: Shared
    ends: list[tuple[int, int]]
    """Where each array begins and ends in the memory."""

    @classmethod
    def of(cls, reader: ImageReader) -> Packed:
        """Return the packed reader. Raises UsageError if it cannot be pickled."""
        stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        try:
            _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(reader)
        except Exception as error:
            raise UsageError(
                f"{obstacle(reader.source, reader.transform)}, as --worker-kind processes does. Define their functions "
                "and classes at the top of a module, or use --worker-kind threads"
            ) from error
        contents = [buffer.raw() for buffer in buffers]
        ends = list(accumulate(-(-content.nbytes // ALIGNED) * ALIGNED for content in contents))
        memory = Shared(max([1, *ends]))
        places = [(begin, begin + content.nbytes) for begin, content in zip([0, *ends], contents, strict=False)]
        for (begin, end), content in zip(places, contents, strict=True):
            memory.bytes[begin:end] = content
        return cls(stream.getvalue(), memory, places)

    def reader(self) -> ImageReader:
        """Return the reader, whose arrays cannot be changed. Raises whatever its classes raise."""
        shared = self.memory.bytes.data.toreadonly()
        return pickle.loads(self.pickled, buffers=[shared[begin:end] for begin, end in self.ends])  # type: ignore[no-any-return]


def _serve(connection: Connection, number: int, packed: Packed, ring: Ring, progress: Shared) -> None:
    """Read images for the other end of the connection until it closes."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # sent to the whole group: the training process ends this one
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    mine = progress.bytes[16 * number : 16 * number + 16].view(np.int64)
    reader: ImageReader | Exception
    try:
        reader = packed.reader()
    except Exception as error:
        reader = UsageError(
            f"a loading process cannot read the images as this process does: {error!r}. Use --worker-kind threads"
        )
    mine[1] = 1  # ready
    with suppress(EOFError, OSError):
        while True:
            connection.send(_reply(reader, ring, mine, *connection.recv()))


def _reply(
    reader: ImageReader | Exception,
    ring: Ring,
    progress: np.ndarray,
    number: int,
    count: int,
    epoch: int,
    wanted: list[Wanted],
    fetched: FetchedImages | None,
) -> Any:
    """Return what `ImageReader.read` does and the pixels, None if they are in a slot of the ring; or the error."""
    if isinstance(reader, Exception):
        return reader
    images = ring.slots[number] if number >= 0 else np.empty((count, *ring.shape[2:]), ring.dtype)
    try:
        read = reader.read(epoch, wanted, images, progress, None if fetched is None else lambda: fetched)
        return read, None if number >= 0 else images[[image.slot for image in wanted]]
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = DataError(repr(error))
        error.add_note(f"In the loading process:\n{traceback.format_exc()}")
        return error


def _end_with_parent() -> None:
    """End this process when the training process has ended, even in a read that hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
