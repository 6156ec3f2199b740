"""TFRecord files without TensorFlow: their records, checked, and the `tf.train.Example` in each.

Ours, because TensorFlow is a dependency of gigabytes and no small library reports where each image lies in the file.
A record is its length (8 bytes), the masked CRC-32C of the length, the data, and the masked CRC-32C of the data. An
Example maps names to lists of bytes, floats or integers, in the protocol buffers' wire format. A size in a file is
trusted only up to the file's length, so a hostile size is refused and not allocated.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.errors import DataError
from vitrail.files import regular_descriptor

_LENGTH, _CHECK = 8, 4  # bytes
_HEADER = _LENGTH + _CHECK
_MASK_DELTA = 0xA282EAD8  # of the file format, against checksums of checksums
_BLOCK = 8 << 20  # bytes read from the disk at a time
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5  # wire types
BYTES, FLOATS, INTEGERS = 1, 2, 3
"""The kinds of a feature's list: their field numbers in the message `Feature`."""


class Record(NamedTuple):
    """One record of a file."""

    offset: int
    """Where its data begin in the file."""
    data: memoryview


class Feature(NamedTuple):
    """One named list of an Example."""

    kind: int
    """BYTES, FLOATS or INTEGERS; 0 for an empty one without a kind."""
    spans: list[tuple[int, int]]
    """BYTES: begin and end of each value in the data that were parsed."""
    numbers: np.ndarray
    """FLOATS: float32 [N]; INTEGERS: int64 [N]; else empty."""


def records(path: Path) -> Iterator[Record]:
    """Yield the records of a file in their order; each is checked before it is yielded.

    Raises DataError, naming file and record, for a wrong checksum, or a file that ends within a record.
    """
    position = 0
    with open(regular_descriptor(path), "rb", buffering=_BLOCK) as file:
        length = os.fstat(file.fileno()).st_size
        for number in count():
            if position >= length:
                return
            header, size = file.read(_HEADER), 0
            if len(header) == _HEADER:
                _check(header[:_LENGTH], header[_LENGTH:], f"{path}, record {number}", "length")
                size = int.from_bytes(header[:_LENGTH], "little")
            needed = _HEADER + size + _CHECK
            if position + needed > length:
                raise DataError(
                    f"{path} ends within record {number}: it needs {needed:,} bytes from byte {position:,} on, and "
                    f"{length - position:,} are there. Copy or prepare the file again"
                )
            data = file.read(size)
            _check(data, file.read(_CHECK), f"{path}, record {number}", "data")
            yield Record(position + _HEADER, memoryview(data))
            position += needed


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data` as TFRecord files store it: rotated by 15 bits, plus a constant."""
    import google_crc32c  # of the extra train; this module is imported to open any folder

    checksum = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _check(data: bytes, stored: bytes, where: str, what: str) -> None:
    if masked_crc32c(data) != int.from_bytes(stored, "little"):
        raise DataError(
            f"{where} (from 0): the checksum of its {what} is wrong. The file is damaged, or is not a TFRecord file. "
            "Copy or prepare it again"
        )


def example(data: bytes | memoryview, wanted: Collection[str] | None = None) -> dict[str, Feature]:
    """Return the features of a serialised `tf.train.Example`, or those that are `wanted`.

    Raises DataError where the bytes are not one.
    """
    buffer, found = memoryview(data), dict[str, Feature]()
    for number, features in _messages(buffer, 0, len(buffer)):
        for entry_number, entry in _messages(buffer, *features) if number == 1 else ():
            if entry_number == 1:
                name, value = _entry(buffer, *entry)
                if wanted is None or name in wanted:
                    found[name] = _feature(buffer, *value)
    return found


def _entry(buffer: memoryview, begin: int, end: int) -> tuple[str, tuple[int, int]]:
    """Return the key of a map's entry, and where its value is."""
    parts = dict(_messages(buffer, begin, end))
    key = parts.get(1, (begin, begin))
    try:
        return bytes(buffer[key[0] : key[1]]).decode(), parts.get(2, (begin, begin))
    except UnicodeDecodeError as error:
        raise _no_example("a name that is not UTF-8") from error


def _feature(buffer: memoryview, begin: int, end: int) -> Feature:
    kind, spans, numbers = 0, list[tuple[int, int]](), list[np.ndarray]()
    for number, content in _messages(buffer, begin, end):
        if number not in (BYTES, FLOATS, INTEGERS):
            continue
        if number != kind:  # one of three: the last one counts
            kind, spans, numbers = number, [], []
        for field, wire, start, stop in _fields(buffer, *content):
            if field != 1:
                continue
            if kind == BYTES and wire == _DELIMITED:
                spans.append((start, stop))
            elif kind == FLOATS and wire in (_DELIMITED, _FIXED32):
                numbers.append(_floats(buffer, start, stop))
            elif kind == INTEGERS and wire in (_DELIMITED, _VARINT):
                numbers.append(_integers(buffer, start, stop))
            else:
                raise _no_example(f"a value of wire type {wire} in a list of kind {kind}")
    dtype = np.float32 if kind == FLOATS else np.int64
    return Feature(kind, spans, np.concatenate(numbers) if numbers else np.zeros(0, dtype))


def _floats(buffer: memoryview, begin: int, end: int) -> np.ndarray:
    if (end - begin) % 4:
        raise _no_example("floats that are not 4 bytes each")
    return np.frombuffer(buffer[begin:end], dtype="<f4").astype(np.float32)


def _integers(buffer: memoryview, begin: int, end: int) -> np.ndarray:
    values = []
    while begin < end:
        value, begin = _varint(buffer, begin, end)
        values.append(value - (1 << 64) if value >> 63 else value)
    return np.array(values, dtype=np.int64)


def _messages(buffer: memoryview, begin: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (field number, (begin, end)) of the fields with a length: messages, text and bytes."""
    for number, wire, start, stop in _fields(buffer, begin, end):
        if wire == _DELIMITED:
            yield number, (start, stop)


def _fields(buffer: memoryview, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, begin and end of the value) of every field of a message."""
    while begin < end:
        tag, begin = _varint(buffer, begin, end)
        wire = tag & 7
        if wire == _VARINT:
            stop = _varint(buffer, begin, end)[1]
        elif wire == _DELIMITED:
            size, begin = _varint(buffer, begin, end)
            stop = begin + size
        elif wire in (_FIXED64, _FIXED32):
            stop = begin + (8 if wire == _FIXED64 else 4)
        else:
            raise _no_example(f"a field of wire type {wire}")
        if stop > end:
            raise _no_example("a value that is longer than what holds it")
        yield tag >> 3, wire, begin, stop
        begin = stop


def _varint(buffer: memoryview, begin: int, end: int) -> tuple[int, int]:
    """Return the number of variable length at `begin`, modulo 2^64, and where it ends."""
    if begin < end and buffer[begin] < 0x80:  # most of them are one byte
        return buffer[begin], begin + 1
    value = shift = 0
    for place in range(begin, min(end, begin + 10)):
        byte = buffer[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, place + 1
        shift += 7
    raise _no_example("a number that does not end")


def _no_example(what: str) -> DataError:
    return DataError(f"not a tf.train.Example: {what}")
