"""The process of a command: standard output that reports every failed write, standard error that raises nothing, and
signals after which no half of a result is left."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from vitrail.errors import WriteError


class Terminated(BaseException):
    """SIGTERM or SIGHUP. It ends a command as Ctrl-C does, so that temporary files are removed.

    It is no KeyboardInterrupt, which the server takes for its normal end.
    """

    def __init__(self, number: int) -> None:
        super().__init__("terminated")
        self.number, self.exit_code = number, 128 + number


@contextmanager
def terminating() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise Terminated, except where somebody else handles or ignores them.

    Outside the main thread Python delivers no signals, and this context does nothing.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    ours = threading.current_thread() is threading.main_thread()
    named = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP
    numbers = [number for number in named if signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in numbers if ours else ():
            signal.signal(number, end)
        yield
    finally:
        for number in numbers if ours else ():
            signal.signal(number, signal.SIG_DFL)


class Output(io.FileIO):
    """Standard output. What cannot be written is a WriteError."""

    def write(self, data: Any) -> int:
        """Write and return the number of bytes. Raises BrokenPipeError if the reader went away."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise WriteError(f"cannot write to standard output: {error.strerror}. Repeat the command") from error


class Log(io.FileIO):
    """Standard error. A full disk, or a reader that went away, loses lines and raises nothing."""

    def write(self, data: Any) -> int:
        """Write and return the number of bytes; those that cannot be written count as written."""
        with suppress(OSError):
            return super().write(data)
        return len(data)


def prepare_streams() -> None:
    """Prepare standard output and standard error for any text. The caller of the process may have closed them."""
    # writing to the first of these fails, as to a closed file
    sys.stdout = _prepared(sys.stdout, Output, os.O_RDONLY)
    sys.stderr = _prepared(sys.stderr, Log, os.O_WRONLY)


def _prepared(stream: Any, kind: type[io.FileIO], closed: int) -> Any:
    """Return a stream that writes with `kind`; a stream that is None writes to the null device opened as `closed`."""
    console = sys.platform == "win32" and stream is not None and stream.isatty()  # takes text of its own, not bytes
    if not console and (stream is None or type(stream) is io.TextIOWrapper):  # not the stream of a test or a notebook
        descriptor = os.open(os.devnull, closed) if stream is None else stream.fileno()
        encoding, lines = ("utf-8", False) if stream is None else (stream.encoding, stream.line_buffering)
        raw = io.BufferedWriter(kind(descriptor, "w", closefd=False))
        stream = io.TextIOWrapper(raw, encoding, line_buffering=lines, write_through=kind is Log)
    if isinstance(stream, io.TextIOWrapper):  # a class name must not end a run in a terminal without UTF-8
        stream.reconfigure(errors="backslashreplace")
    return stream


def settle_output() -> None:
    """Write what is left of standard output, or else discard it, so that the interpreter can end without an error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
