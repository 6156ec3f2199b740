"""Another system, as vitrail sees it: VITRAIL_PRETENDS=win32 or darwin, with this folder in PYTHONPATH.

Every process of Python that inherits both imports this module at its start. Modules and functions that the other system
lacks are then missing in vitrail's own modules, and only there: its libraries are those of this system. Below the
current folder no name can be made that Windows refuses, and vitrail opens no text with the encoding of the system.
"""

from __future__ import annotations

import builtins
import os
import re
import signal
import sys
import types
import warnings
from typing import Any

SYSTEM = os.environ.get("VITRAIL_PRETENDS", "")
MODULES = {
    "win32": {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"},
    "darwin": {"spwd"},
}
"""System -> modules of Python's library that it lacks, by its documentation."""
MISSING: dict[str, dict[str, set[str]]] = {
    "win32": {
        "os": {
            *("chown", "chroot", "fork", "forkpty", "getegid", "geteuid", "getgid", "getloadavg", "getpgid", "getuid"),
            *("killpg", "memfd_create", "mkfifo", "nice", "posix_fadvise", "posix_fallocate", "pread", "pwrite"),
            *("register_at_fork", "sched_getaffinity", "sched_setaffinity", "sendfile", "setsid", "statvfs", "sysconf"),
            *("uname", "wait", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "WNOHANG"),
        },
        "signal": {"SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGUSR1", "SIGUSR2", "alarm", "setitimer"},
        "socket": {"AF_UNIX"},
        "mmap": {"MAP_PRIVATE", "MAP_SHARED", "PROT_READ"},
        "time": {"clock_gettime", "tzset"},
    },
    "darwin": {
        "os": {"memfd_create", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_setaffinity"},
        "signal": {"SIGRTMIN", "sigtimedwait", "sigwaitinfo"},
    },
}
"""System -> module -> its names that are missing there."""
REFUSED = re.compile(r'[<>:"|?*\\\x00-\x1f]|[. ]$|^(con|prn|aux|nul|(com|lpt)\d)(\.|$)', re.IGNORECASE)
"""What no name of a file or folder of Windows contains."""
CREATING = {"os.link": 1, "os.mkdir": 0, "os.rename": 1, "os.symlink": 1}
"""Event of Python's audit -> place of the path that is made."""


def opened(path: Any, flags: int, mode: int = 0o777) -> int:
    """`os.open` of Windows, which opens no folders."""
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return os.open(path, flags, mode)


def synced(descriptor: int) -> None:
    """`os.fsync` of Windows, which flushes only what is open for writing."""
    import fcntl

    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(9, "Bad file descriptor")
    os.fsync(descriptor)


def renamed(source: Any, target: Any) -> None:
    """`os.rename` of Windows, which replaces nothing."""
    if os.path.lexists(target):
        raise FileExistsError(17, "File exists", source, None, target)
    os.rename(source, target)


CHANGED: dict[str, dict[str, dict[str, Any]]] = {
    "win32": {
        "os": {
            **{"name": "nt", "open": opened, "fsync": synced, "rename": renamed, "O_BINARY": 0},
            "kill": lambda pid, number: os.kill(pid, signal.SIGKILL),  # ends it at once
        },
        "sys": {"platform": "win32"},
        "signal": {"CTRL_BREAK_EVENT": signal.SIGUSR1, "SIGBREAK": signal.SIGUSR1},
        "subprocess": {"CREATE_NEW_PROCESS_GROUP": 0},
    },
    "darwin": {"sys": {"platform": "darwin"}},
}
"""System -> module -> its names that are something else there."""


class Elsewhere(types.ModuleType):
    """A module of Python's library as it is on the other system."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        if name in MISSING[SYSTEM].get(self.__name__, ()):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on {SYSTEM}")
        changed = CHANGED[SYSTEM].get(self.__name__, {})
        return changed[name] if name in changed else getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise OSError where a file or folder gets a name that Windows refuses."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
    if not writes and event not in CREATING:
        return
    path = arguments[CREATING.get(event, 0)]
    if isinstance(path, str | bytes):
        below = os.path.relpath(os.path.realpath(os.fsdecode(path)))
        if below.split("/")[0] not in ("..", ".") and any(map(REFUSED.search, below.split("/"))):
            raise OSError(22, "Windows refuses this name", path)


if SYSTEM:
    really_import, modules = builtins.__import__, dict[str, Elsewhere]()

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        """Import for vitrail what the other system has, and for others what this one has."""
        spec = (globals or {}).get("__spec__")
        if level or not getattr(spec, "name", "").startswith("vitrail"):
            return really_import(name, globals, locals, fromlist, level)
        if name in MODULES[SYSTEM]:
            raise ModuleNotFoundError(f"No module named {name!r} on {SYSTEM}", name=name)
        found = really_import(name, globals, locals, fromlist, level)
        if name in MISSING[SYSTEM] or name in CHANGED[SYSTEM]:
            return modules.setdefault(name, Elsewhere(found))
        return found

    builtins.__import__ = imported
    warnings.filterwarnings("ignore", category=EncodingWarning)
    warnings.filterwarnings("error", category=EncodingWarning, module=r"vitrail(\.|_|$)")
    sys.addaudithook(refuse)
