"""The error of everything that writes a file: what the disk or its permissions prevented, in words."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.errors import VitrailError, WriteError


@contextmanager
def writing(path: Path, error: type[VitrailError] = WriteError, *, task: str = "", advice: str = "") -> Iterator[None]:
    """Context of work that writes `path`: raise `error` with path and reason if the disk or its permissions prevent it.

    Every writer uses it, so that all say the same: "cannot `task`: reason. `advice`" (default: "write PATH", and advice
    that follows from the reason). Errors of files elsewhere, which the work reads, stay as they are. An address of
    another file system is refused before the work.
    """
    refuse_address(path, error)
    try:
        yield
    except WriteError as problem:
        if error is WriteError:
            raise
        raise error(_message(problem, path, task, advice) if task or advice else str(problem)) from problem
    except VitrailError:
        raise
    except Exception as problem:
        if (found := _os_error(problem)) is None or not _concerns(found, path):
            raise
        raised = error(_message(found, path, task, advice))
        if isinstance(raised, WriteError):
            raised.errno, raised.strerror = found.errno, found.strerror
        raise raised from problem


_ADDRESS = re.compile(r"([a-z][a-z0-9+.:-]*[a-z0-9+.-]:)/+", re.IGNORECASE)
"""Start of an address, whose second slash a `Path` has removed. One letter is a drive of Windows."""


def refuse_address(path: str | Path, error: type[VitrailError] = WriteError) -> None:
    """Raise `error` if `path` is an address such as s3://bucket/photos, which would become a folder named "s3:".

    So is a name with bytes that are not UTF-8: the libraries that write weights, tables and exports refuse it, some of
    them only at the end of the work.
    """
    if (address := _ADDRESS.match(str(path))) is not None:
        given = f"{address[1]}//{str(path)[address.end() :]}"
        raise error(
            f"cannot write {given}: this is an address, and only files and folders of this machine are written. "
            "Give a path of this machine, and copy the result from there"
        )
    if not is_utf8(path):
        raise error(f"cannot write {path}: the name holds bytes that are not UTF-8. Choose another name")


def is_utf8(path: str | Path) -> bool:
    """Return whether the bytes of a path are UTF-8."""
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _message(problem: OSError, path: Path, task: str, advice: str) -> str:
    reason = _reason(problem, path)
    advice = advice or ADVICE.get(problem.errno or 0, "")
    return f"cannot {task or f'write {path}'}: {reason}" + (f". {advice}" if advice else "")


def _os_error(problem: BaseException | None) -> OSError | None:
    """Return the error of the system that `problem` is or comes from; None if it does not come from one.

    torch hides it behind an error of its own, and safetensors names its number in the text. A lack of memory is no
    error of the disk.
    """
    if isinstance(problem, MemoryError) or getattr(problem, "errno", None) == errno.ENOMEM:
        return None
    if problem is None or isinstance(problem, OSError):
        return problem
    if number := re.search(r"\(os error (\d+)\)", str(problem)):
        return OSError(int(number[1]), os.strerror(int(number[1])))
    return _os_error(problem.__cause__ or problem.__context__)


def _concerns(problem: OSError, path: Path) -> bool:
    """Return whether an error may come from writing `path`: it names no other file."""
    if not isinstance(problem.filename, str | bytes):
        return True
    named = Path(os.fsdecode(problem.filename)).absolute()
    for place in (path.absolute(), Path(os.path.realpath(path))):
        if named.is_relative_to(place) or place.is_relative_to(named) or named.parent == place.parent:
            return True
        if named.is_relative_to(place.parent) and named.relative_to(place.parent).parts[0].startswith("."):
            return True  # in a temporary folder beside it
    return False


ELSEWHERE = "Choose a place that can be written"
ADVICE = {
    errno.ENOSPC: "Free some space, or choose another place",
    errno.EDQUOT: "Free some space, or choose another place",
    errno.EEXIST: "Choose another place",
    errno.ENOTDIR: "Choose another place",
    errno.EFBIG: "The file system or a limit (ulimit -f) allows no larger file",
    errno.EROFS: ELSEWHERE,
    errno.EACCES: ELSEWHERE,
    errno.EPERM: ELSEWHERE,
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.EISDIR: "Give the name of a file",
    errno.ENOENT: "Its folder has been removed or renamed",
    errno.EIO: "The disk is faulty or was removed. Choose another place",
}
"""What to do about an error of the system."""


def _reason(problem: OSError, path: Path) -> str:
    """Return the reason of an error in words, with the numbers and the names that explain it."""
    if problem.errno is None:
        return str(problem)
    reason = os.strerror(problem.errno)
    there = [place for place in (path.absolute(), *path.absolute().parents) if os.path.exists(place)]
    if problem.errno == errno.ENOSPC:
        return f"{reason} ({shutil.disk_usage(there[0]).free:,} bytes free in {there[0]})"
    if problem.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{next((place for place in there if not os.path.isdir(place)), path)} is a file, not a folder"
    return reason
