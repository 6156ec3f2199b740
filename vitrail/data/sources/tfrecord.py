"""TFRecord files without TensorFlow: their records, checked, and the `tf.train.Example` in each.

A record is its length (8 bytes), the masked CRC-32C of that, the data, and the masked CRC-32C of those. An Example is
a map from names to lists of bytes, floats or integers, in the protocol buffers' wire format. Sizes in a file are
believed only as far as the file is long, so a hostile one is refused, not allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from vitrail.data.sources.crc32c import crc32c, masked
from vitrail.errors import DataError

_LENGTH, _CHECK = 8, 4  # bytes
_AROUND = _LENGTH + 2 * _CHECK
_BLOCK = 8 << 20  # bytes read at a time: the most of a file that is in memory, unless a record is larger
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
    """Yield the records of a file in their order; each block is checked before its first record is yielded.

    Raises DataError, naming file and record, for a checksum that is wrong, or a file that ends within a record.
    """
    length = path.stat().st_size
    position = number = 0
    with open(path, "rb") as file:
        while position < length:
            block = _read_block(file, path, position, length, number)
            spans, used = _spans(block, path, position, number)
            _check(block, spans, path, number)
            for begin, end in spans:
                yield Record(position + begin, block[begin:end])
            position, number = position + used, number + len(spans)


def _read_block(file: BinaryIO, path: Path, position: int, length: int, number: int) -> memoryview:
    """Read the next records whole: at least one, more where they are small."""
    file.seek(position)
    block = file.read(min(_BLOCK, length - position))
    needed = _AROUND
    if len(block) >= _LENGTH + _CHECK:
        needed += _length(block, 0, path, number)
    if position + needed > length:
        raise DataError(
            f"{path} ends within record {number}: it needs {needed:,} bytes from byte {position:,} on, and "
            f"{length - position:,} are there. Copy or prepare the file again"
        )
    if len(block) < needed:
        block += file.read(needed - len(block))
    return memoryview(block)


def _length(block: bytes | memoryview, begin: int, path: Path, number: int) -> int:
    """Return the length of the record that begins at `begin`, if its own checksum is right."""
    field = bytes(block[begin : begin + _LENGTH])
    (check,) = struct.unpack_from("<I", block, begin + _LENGTH)
    if int(masked(crc32c([field]))[0]) != check:
        raise _damaged(path, number, "length")
    return int.from_bytes(field, "little")


def _spans(block: memoryview, path: Path, position: int, number: int) -> tuple[list[tuple[int, int]], int]:
    """Return begin and end of the data of every whole record of a block, and how much of the block that is."""
    spans, begin = [], 0
    while begin + _LENGTH + _CHECK <= len(block):
        size = int.from_bytes(block[begin : begin + _LENGTH], "little")
        if begin + _AROUND + size > len(block):  # goes on in the next block, where its length is checked
            break
        spans.append((begin + _LENGTH + _CHECK, begin + _LENGTH + _CHECK + size))
        begin += _AROUND + size
    if not spans:  # the caller has read the first record whole
        raise _damaged(path, number, "length")
    return spans, begin


def _check(block: memoryview, spans: list[tuple[int, int]], path: Path, number: int) -> None:
    lengths = [block[begin - _LENGTH - _CHECK : begin - _CHECK] for begin, _ in spans]
    data = [block[begin:end] for begin, end in spans]
    stored = np.array(
        [struct.unpack_from("<I", block, at)[0] for begin, end in spans for at in (begin - _CHECK, end)],
        dtype=np.uint32,
    )
    wrong_length = masked(crc32c(lengths)) != stored[::2]
    wrong_data = masked(crc32c(data)) != stored[1::2]
    if (wrong := np.flatnonzero(wrong_length | wrong_data)).size:
        first = int(wrong[0])
        raise _damaged(path, number + first, "length" if wrong_length[first] else "data")


def _damaged(path: Path, number: int, what: str) -> DataError:
    return DataError(
        f"{path}, record {number} (from 0): the checksum of its {what} is wrong: the file is damaged, or no TFRecord "
        "file. Copy or prepare it again"
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
