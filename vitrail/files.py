"""Files: durable writing, atomic replacement, locks, and reading JSON without trusting its content."""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO, TypedDict
from uuid import uuid4

from vitrail.disk import writing
from vitrail.errors import LONGEST_NAME, VitrailError, WriteError
from vitrail.words import as_text, listing

LOCK = ".lock"
"""File in a folder that is locked while a process writes there."""
_NONBLOCKING: int = getattr(os, "O_NONBLOCK", 0)
"""Flag of `os.open`: a pipe does not wait for its writer. Windows has no such pipes."""
_BINARY: int = getattr(os, "O_BINARY", 0)
"""Flag of `os.open`: Windows changes no ends of lines."""
_SEEKING = threading.Lock()
RUNS = "runs"
"""Folder in which training makes the folders of runs, if no other one is named."""


class Written(TypedDict):
    """What was written into a file: its size and hash."""

    bytes: int
    sha256: str


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Write a file, wait until it is on the disk, and return its size and hash, taken from the bytes in memory."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def state_of(path: Path) -> str:
    """Return place, size and date of a file, which change when it does. A file that is not there has no date."""
    try:
        found = path.stat()
    except OSError:
        return str(path)
    return f"{path.absolute()}\0{found.st_size}\0{found.st_mtime_ns}"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Windows flushes only what is open for writing, and opens no folders.
    """
    if sys.platform == "win32" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network shares do not support it
            raise
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, error: type[VitrailError] = WriteError, *, folders: bool = True) -> Iterator[Path]:
    """Replace `path` atomically: yield a temporary file to write, which takes its place unless there is an error.

    Missing `folders` above it are made. A link stays, and its file is replaced. A device or a pipe is written directly.
    Raises `error` if it cannot be written; then neither a part of it nor the temporary file is left.
    """
    if _is_stream(path):
        with writing(path, error):
            yield path
        return
    target = Path(os.path.realpath(path)) if os.path.islink(path) else path
    temporary = _sibling(target, f".tmp-{uuid4().hex}")
    with writing(path, error), _made(target.parent) if folders else nullcontext():
        try:
            _refuse(target)
            temporary.touch()
            # as the umask says; safetensors makes files that only their owner can read
            mode = (target if os.path.exists(target) else temporary).stat().st_mode
            yield temporary
            temporary.chmod(mode)
            sync(temporary)
            os.replace(temporary, target)
            sync(target.parent)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def refuse_other_files(folder: Path, ours: Callable[[str], bool], error: type[VitrailError]) -> None:
    """Raise `error` if `folder` is a file or holds a name that is not `ours`, so that nothing is written among it."""
    if folder.exists() and not folder.is_dir():
        raise error(f"{folder} is a file, and a folder is needed. Choose a new folder")
    others = sorted(path.name for path in folder.iterdir() if not ours(path.name)) if folder.is_dir() else []
    if others:
        raise error(
            f"{folder} holds other files ({listing(others, 3, quoted=False)}), and nothing is written among them. "
            "Choose a new folder"
        )


def write_once(path: Path, text: str, error: type[VitrailError] = WriteError) -> bool:
    """Write a UTF-8 file that does not exist, whole or not at all, and return whether this call has written it.

    A file that is there stays, also one of this moment: of several processes one writes, and all of them read the same.
    Raises `error` if it cannot be written.
    """
    with writing(path, error), beside(path) as temporary:
        temporary.write_text(text, "utf-8")
        sync(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            os.replace(temporary, path)
        sync(path.parent)
        return True


@contextmanager
def replacing_text(path: Path, error: type[VitrailError] = WriteError, errors: str = "strict") -> Iterator[TextIO]:
    """Replace a UTF-8 text atomically, as `replacing` does: yield a file to write. Lines end as they are written."""
    with replacing(path, error) as temporary, open(temporary, "w", encoding="utf-8", newline="", errors=errors) as file:
        yield file


def check_writable(path: Path, error: type[VitrailError] = WriteError, *, folder: bool = False) -> None:
    """Raise `error` if a file cannot be written at `path` (a `folder`: in it), before work that would be lost.

    A temporary file is written there; nothing of it remains.
    """
    if folder:
        with writing(path, error), _made(path):
            probe = _sibling(path / "checked", f".tmp-{uuid4().hex}")
            probe.touch()
            probe.unlink()
    elif not _is_stream(path):
        with writing(path, error), beside(path) as temporary:
            with suppress(FileNotFoundError):
                path.lstat()  # a name that is too long
            _refuse(path)
            temporary.touch()


def _is_stream(path: Path) -> bool:
    """Return whether `path` is a device, a pipe, or a link such as /dev/stdout, which nothing can replace."""
    folder = os.path.realpath(path.parent)
    special = os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
    return special or folder == "/dev" or folder.startswith("/proc/")


def _refuse(path: Path) -> None:
    """Raise OSError for a folder, and for a file that may not be written although its folder may."""
    with suppress(FileNotFoundError):
        os.close(os.open(path, os.O_WRONLY))


def _sibling(path: Path, ending: str) -> Path:
    """Return the path of a hidden file next to `path`, with a name as long as a file system accepts."""
    return path.with_name(f".{os.fsdecode(os.fsencode(path.name)[: 255 - len(ending) - 1])}{ending}")


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder and those above it. Afterwards those that are still empty are removed again."""
    missing = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for place in missing:
            with suppress(OSError):  # not empty
                place.rmdir()


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file or folder next to `path`, with the same suffix, for use with `take_place`.

    Afterwards the temporary file or folder is removed, and so are folders made for it that are still empty.
    """
    temporary = _sibling(path.with_name(path.stem or path.name), f".saving-{uuid4().hex}{path.suffix}")
    with _made(path.parent):
        try:
            yield temporary
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def take_place(temporary: Path, path: Path) -> None:
    """Move a temporary file or folder to `path`; in an existing folder only files of the same names are replaced."""
    for file in temporary.iterdir() if temporary.is_dir() else (temporary,):
        sync(file)
    if temporary.is_dir() and path.is_dir():
        for file in temporary.iterdir():
            if file.is_dir() and (old := path / file.name).is_dir():  # a folder replaces an empty folder only
                shutil.rmtree(old)
            os.replace(file, path / file.name)
    else:
        os.replace(temporary, path)
    sync(path.parent)


@contextmanager
def locked_folder(folder: Path, error: type[VitrailError]) -> Iterator[None]:
    """Make a folder, and lock it as long as the context lasts, however the process ends.

    Raises `error` if another process has locked it, or if it cannot be made.
    """
    with writing(folder, error):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, error, f"another process is writing {folder}: wait for it, or choose another folder"):
        yield


@contextmanager
def locked(path: Path, error: type[VitrailError], busy: str | None, *, keep: bool = False) -> Iterator[None]:
    """Lock the file `path`, which is made if it is missing, as long as the context lasts, however the process ends.

    busy: Message of the `error` that is raised if another process has locked it; None: wait for it. keep: Whether the
    file stays. Raises `error` also if the file cannot be made. On a network share without locks nothing is locked.
    """
    from filelock import FileLock, Timeout  # slow: --help does without

    # another thread may free it
    lock = FileLock(path, timeout=-1 if busy is None else 0, thread_local=False)
    try:
        with writing(path, error):
            try:
                lock.acquire()
            except Timeout:
                raise error(busy or "") from None
            except NotImplementedError:
                pass
            except OSError as problem:
                if problem.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
        yield
    finally:
        if not keep and lock.is_locked:
            with suppress(OSError):  # Windows removes no open file
                path.unlink()
        lock.release()


def open_regular(path: str | bytes | Path) -> BufferedReader:
    """Open a file for reading. Raises OSError for a folder, a pipe or a device, which may never end."""
    return os.fdopen(regular_descriptor(path), "rb")


def regular_descriptor(path: str | bytes | Path) -> int:
    """Return the descriptor of a file opened for reading. Raises OSError as `open_regular` does."""
    descriptor = os.open(path, os.O_RDONLY | _NONBLOCKING | _BINARY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fsdecode(path))
    return descriptor


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return bytes at a position of a file. Windows has no `pread`: there the file's position moves under a lock."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


LARGEST_JSON = 64 << 20
"""Maximum size in bytes of a JSON file."""
DEEPEST_JSON = 100
"""Maximum nesting of JSON, because values are copied recursively."""


def read_bytes(path: Path, most: int = LARGEST_JSON) -> bytes:
    """Return the content of a regular file. Raises OSError, also for more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def read_text(path: Path, error: type[VitrailError]) -> str:
    """Return the text of a UTF-8 file of at most `LARGEST_JSON` bytes. Raises `error` if it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8")
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text: {problem.reason} at byte {problem.start}") from problem


def text_of(path: Path, most: int = 1 << 20) -> str:
    """Return the text of a configuration, which may be a pipe.

    Raises OSError, also for more than `most` bytes, and UnicodeDecodeError.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"it has more than {most:,} bytes, which no configuration has")
    return content.decode("utf-8")


def names_near(path: Path) -> str:
    """Return sentences about what there is in place of a missing `path`: the nearest name, and some others.

    They come from the folder of `path`, or from `runs` for a name alone or a folder that is missing, too: most missing
    paths are mistyped runs. "" if there is nothing.
    """
    folder = path.parent if path.parent != Path() and path.parent.is_dir() else Path(RUNS)
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return ""
    wrong = path.name[:LONGEST_NAME]
    meant = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    near = difflib.get_close_matches(wrong, names, n=len(names) or 1, cutoff=0.0)
    question = f" Did you mean {folder / meant[0]}?" if meant else ""
    return f"{question} {folder} holds {listing(near, 5, quoted=False)}." if near else ""


def read_json(path: Path, error: type[VitrailError]) -> Any:
    """Return the JSON value in a file. Raises `error` for a file that is too large, unreadable or not JSON."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_JSON:
                raise error(f"{path} has {size:,} bytes; a JSON file may have at most {LARGEST_JSON:,}")
            return parse_json(file.read().decode("utf-8-sig"))
    except (OSError, ValueError) as problem:
        raise error(f"{path} cannot be read: {problem}") from problem


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON, too long, or nested too deeply."""
    if len(text) > LARGEST_JSON:
        raise ValueError(f"the JSON has {len(text):,} characters; at most {LARGEST_JSON:,} are read")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"the JSON is nested deeper than {DEEPEST_JSON} levels") from None
    level = [value]
    for _ in range(DEEPEST_JSON):
        level = [item for inner in level for item in _items(inner) if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"the JSON is nested deeper than {DEEPEST_JSON} levels")


def _items(value: Any) -> Iterable[Any]:
    """Return the values in a JSON object or array; nothing for other values."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_json_object(path: Path, error: type[VitrailError]) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `error` as `read_json` does, and for a value that is not an object."""
    content = read_json(path, error)
    if not isinstance(content, dict):
        raise error(f"{path} should hold a JSON object, not a {type(content).__name__}")
    return content


def json_text(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON that UTF-8 can hold, from which Python reads file names that are not UTF-8 exactly."""
    text = json.dumps(json_value(value), indent=indent, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def result_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON that any program reads: names that are not UTF-8 are written as `as_text` writes them."""
    return json.dumps(json_value(value, as_text), indent=indent, ensure_ascii=False)


def json_value(value: Any, text: Callable[[str], str] = str) -> Any:
    """Return `value` as JSON values: text for paths, null for numbers that are not finite. `text` changes all text."""
    if isinstance(value, Mapping):
        return {text(str(key)): json_value(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item, text) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else text(str(value))
