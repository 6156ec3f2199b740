"""TFRecord files and Examples, against tensorboard's writer and protobuf."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import example_class, serialised, write_records
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

from vitrail.data.sources import tfds
from vitrail.data.sources.tfds import BYTES, FLOATS, INTEGERS, example, masked_crc32c, records
from vitrail.errors import DataError

# RFC 3720 (iSCSI), B.4, and the check value that every table of checksums gives
PUBLISHED = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


def _unmasked(checksum: int) -> int:
    rotated = (checksum - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def test_crc32c_is_the_published_one() -> None:
    assert [_unmasked(masked_crc32c(data)) for data, _ in PUBLISHED] == [value for _, value in PUBLISHED]


@given(st.lists(st.binary(max_size=1100), min_size=1, max_size=6))
def test_checksums_are_tensorboards(parts: list[bytes]) -> None:
    assert [_unmasked(masked_crc32c(part)) for part in parts] == [pywrap_tensorflow.crc32c(part) for part in parts]
    assert [masked_crc32c(part) for part in parts] == [pywrap_tensorflow.masked_crc32c(part) for part in parts]


def test_one_changed_bit_anywhere_changes_a_long_checksum() -> None:
    data = np.random.default_rng(0).integers(0, 256, 70_000, dtype=np.uint8)
    first = masked_crc32c(data.tobytes())
    for place in (0, 1, 255, 256, 40_000, 69_999):
        data[place] ^= 4
        assert masked_crc32c(data.tobytes()) != first
        data[place] ^= 4
    assert masked_crc32c(data.tobytes()) == first == pywrap_tensorflow.masked_crc32c(data.tobytes())


@pytest.mark.parametrize("block", [16, 100, 8 << 20])
def test_records_are_those_written_whatever_the_block(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    written = [rng.bytes(size) for size in (0, 1, 3, 300, 0, 17, 1000, 5)]
    path = write_records(tmp_path / "a.tfrecord", written)
    monkeypatch.setattr(tfds, "_BLOCK", block)
    found = list(records(path))
    assert [bytes(record.data) for record in found] == written
    whole = path.read_bytes()
    assert [whole[r.offset : r.offset + len(r.data)] for r in found] == written
    assert list(records(write_records(tmp_path / "none.tfrecord", []))) == []


def _damaged(path: Path, change: dict[int, int] | None = None, keep: int | None = None) -> Path:
    data = bytearray(path.read_bytes())
    for place, flip in (change or {}).items():
        data[place] ^= flip
    path.write_bytes(bytes(data[:keep]))
    return path


@pytest.mark.parametrize("block", [40, 8 << 20])
@pytest.mark.parametrize(
    ("change", "keep", "match"),
    [
        ({12: 1}, None, "record 0 .*checksum of its data"),
        ({0: 1}, None, "record 0 .*checksum of its length"),
        ({36 + 12 + 3: 128}, None, "record 1 .*checksum of its data"),
        ({36 + 12 + 20: 1}, None, "record 1 .*checksum of its data"),  # the checksum itself
        ({36 + 6: 64}, None, "record 1 .*checksum of its length"),  # 2^54 bytes: refused, not allocated
        ({36: 1}, None, "record 1 .*checksum of its length"),
        ({36 + 8: 1}, None, "record 1 .*checksum of its length"),  # the checksum of the length
        ({}, -1, "ends within record 2"),
        ({}, 2 * 36 + 5, "ends within record 2"),
        ({}, 2 * 36 + 12, "ends within record 2"),
    ],
)
def test_damage_is_named(
    block: int, change: dict[int, int], keep: int | None, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfds, "_BLOCK", block)
    path = write_records(tmp_path / "a.tfrecord", [b"x" * 20, b"y" * 20, b"z" * 20])
    with pytest.raises(DataError, match=match) as error:
        list(records(_damaged(path, change, keep)))
    assert str(path) in str(error.value)


def test_a_length_that_is_sealed_but_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    header = struct.pack("<Q", 1 << 60)
    check = struct.pack("<I", pywrap_tensorflow.masked_crc32c(header))
    (tmp_path / "a").write_bytes(header + check + b"only a little")
    with pytest.raises(DataError, match="ends within record 0: it needs 1,152,921,504,606,846,992 bytes"):
        list(records(tmp_path / "a"))


INTEGER = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=32, allow_nan=False)
LISTS = st.one_of(*(st.lists(values, max_size=5) for values in (st.binary(max_size=9), INTEGER, FLOAT)))


@given(st.dictionaries(st.text(max_size=6), LISTS, max_size=4), st.booleans())
def test_examples_are_protobufs(features: dict[str, list[bytes] | list[int] | list[float]], packed: bool) -> None:
    data = serialised(features, packed=packed)
    found = example(data)
    theirs = example_class().FromString(data).features.feature
    assert set(found) == set(theirs)
    for name, feature in found.items():
        kind = theirs[name].WhichOneof("kind")
        assert feature.kind == {"bytes_list": BYTES, "float_list": FLOATS, "int64_list": INTEGERS, None: 0}[kind]
        assert [data[begin:end] for begin, end in feature.spans] == list(theirs[name].bytes_list.value)
        numbers = theirs[name].float_list.value if kind == "float_list" else theirs[name].int64_list.value
        assert feature.numbers.tolist() == list(numbers)


def test_only_what_is_wanted_is_parsed() -> None:
    data = serialised({"image": b"abc", "label": 7, "objects/location": [1.5, -2.0]})
    assert set(example(data, {"label"})) == {"label"}
    assert example(data, {"objects/location"})["objects/location"].numbers.tolist() == [1.5, -2.0]


@given(st.binary(max_size=60))
def test_any_bytes_are_an_example_or_refused(data: bytes) -> None:
    try:
        example(data)
    except DataError as error:
        assert "not a tf.train.Example" in str(error)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_example_is_parsed_or_refused(place: int, value: int) -> None:
    data = bytearray(serialised({"image": b"x" * 50, "label": [1, -1], "f": [0.5] * 4}))
    data[place % len(data)] = value
    try:
        for feature in example(bytes(data)).values():
            assert all(0 <= begin <= end <= len(data) for begin, end in feature.spans)
    except DataError as error:
        assert "not a tf.train.Example" in str(error)


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\xff\xff\xff\xff\x7f",  # a message that claims 34 GB
        b"\x0a\x80",  # a length that does not end
        b"\x80" * 11,
        b"\x0b",  # a group, which no Example has
        serialised({"f": [0.5]}).replace(b"\x0a\x04", b"\x0a\x03")[:-1],
    ],
)
def test_hostile_examples_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match=r"not a tf\.train\.Example"):
        example(data)
