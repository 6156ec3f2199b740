"""Addresses on other file systems ("s3://bucket/photos", "https://host/train-{0000..0099}.tar"), through fsspec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitrail.errors import DataError
from vitrail.version import install_extra

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(://|::)", re.IGNORECASE)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")
_STATE = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems call the mark of a file's contents; the first there is counts."""


def is_address(path: str) -> bool:
    """Does `path` name a file system, such as s3://, gs://, https:// or memory://?"""
    return _SCHEME.match(path) is not None


def locate(address: str) -> tuple[Any, str]:
    """Return (file system, path in it). Raises DataError where the system is unknown or its package is missing."""
    import fsspec

    scheme = address.split("::")[0].split("://")[0]
    try:
        return fsspec.core.url_to_fs(address)  # type: ignore[no-any-return]
    except ImportError as error:
        raise DataError(
            f"{address}: reading {scheme}:// needs a package that is not installed ({error}). For S3, GCS and HTTP: "
            f"{install_extra('remote')}"
        ) from error
    except ValueError as error:
        raise DataError(f"{address} cannot be opened: {error}") from error


def expand(pattern: str) -> list[str]:
    """Return the addresses that "{0000..0099}" and "{train,val}" in `pattern` stand for, in order.

    A range counts up, with as many digits as its first number has; this is webdataset's notation. Raises DataError
    for a range that counts down.
    """
    if found := _RANGE.search(pattern):
        first, last = found[1], found[2]
        if int(last) < int(first):
            raise DataError(f"{pattern}: the range {found[0]} counts down")
        parts = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    elif found := _CHOICE.search(pattern):
        parts = found[1].split(",")
    else:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    # a range within a choice stands there once for each of its numbers: every address counts once
    return list(dict.fromkeys(address for part in parts for address in expand(f"{before}{part}{after}")))


def look(system: Any, path: str) -> tuple[int, str]:
    """Return (bytes, a mark of the contents that changes when they do) of a file. Raises DataError."""
    with explained(system, path):
        facts = system.info(path)
    size = facts.get("size")
    if facts.get("type") == "directory" or size is None:
        raise DataError(f"{address_of(system, path)} is no file with a known size")
    return int(size), next((str(facts[name]) for name in _STATE if facts.get(name) is not None), "")


def address_of(system: Any, path: str) -> str:
    """Return the address of a path, for messages."""
    return str(system.unstrip_protocol(path))


@contextmanager
def explained(system: Any, path: str) -> Iterator[None]:
    """Context in which whatever a file system raises becomes a DataError that names the address."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is nothing at {address_of(system, path)}") from error
    except Exception as error:  # each of two dozen libraries has its own
        raise DataError(f"{address_of(system, path)} cannot be read: {error or type(error).__name__}") from error
