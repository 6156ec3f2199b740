"""Packed shards of images of many bands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from vitrail.data.images.bands import layouts
from vitrail.data.images.stored import read_stored
from vitrail.data.loading.pack import pack_data
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_path
from vitrail.errors import DataError, DecodeError
from vitrail.verbs.data.check import pack

RNG = np.random.default_rng(0)
VALUES = [RNG.integers(60_000, 65_536, (9, 12, 5)).astype(np.uint16) for _ in range(4)]


def arrays(root: Path) -> Path:
    for number, values in enumerate(VALUES):
        place = root / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / f"{number}.npy", values)
    return root


def packed(folder: Path, bands: int, bits: str) -> list[np.ndarray]:
    source = open_path(str(folder)).splits[""]
    return [read_stored(source[number].image, bands, bits) for number in range(len(source))]  # type: ignore[arg-type]


ORDER = (0, 2, 1, 3)  # class a holds the images 0 and 2


def test_arrays_keep_bands_and_bits(tmp_path: Path) -> None:
    pack_data(str(arrays(tmp_path / "in")), tmp_path / "out")
    source = open_path(str(tmp_path / "out")).splits[""]
    assert [(one.channels, one.bits, one.picture) for one in layouts(source)] == [(5, "16", False)] * 4
    assert source.class_names == ["a", "b"] and source.labels.tolist() == [0, 0, 1, 1]
    for found, number in zip(packed(tmp_path / "out", 5, "16"), ORDER, strict=True):
        assert found.dtype == np.uint16 and np.array_equal(found, VALUES[number])


def test_larger_images_are_shrunk_as_pillow_shrinks_each_band(tmp_path: Path) -> None:
    pack(arrays(tmp_path / "in"), tmp_path / "out", short_side=3)
    for found, number in zip(packed(tmp_path / "out", 5, "16"), ORDER, strict=True):
        expected = [
            np.asarray(Image.fromarray(band.astype(np.float32)).resize((4, 3), Image.Resampling.BILINEAR))
            for band in np.moveaxis(VALUES[number], 2, 0)
        ]
        assert found.shape == (3, 4, 5) and np.abs(found - np.stack(expected, axis=2)).max() <= 0.51


def test_tiff_keeps_its_bands_where_the_flags_ask_for_them(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "in" / name).mkdir(parents=True)
        tifffile.imwrite(tmp_path / "in" / name / "1.tif", VALUES[0][..., :3], photometric="rgb")
    pack(tmp_path / "in", tmp_path / "deep", bits="16")
    assert np.array_equal(packed(tmp_path / "deep", 3, "16")[0], VALUES[0][..., :3])
    pack(tmp_path / "in", tmp_path / "rgb")
    source = open_path(str(tmp_path / "rgb")).splits[""]
    assert source[0].image[:2] == b"\xff\xd8"
    with pytest.raises(DataError, match=r"shards of another pack \(bands None instead of \[3, '16'\]\)"):
        pack_data(Data(path=str(tmp_path / "in"), channels=3, bits="16"), tmp_path / "rgb")


def test_floats_and_what_is_left_out(tmp_path: Path) -> None:
    floats = [(values / 3).astype(np.float32) for values in VALUES]
    floats[2][0, 0, 1] = np.nan
    for number, values in enumerate([*floats, VALUES[0], floats[0][..., :4]]):
        place = tmp_path / "in" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / f"{number}.npy", values)
    result = pack_data(str(tmp_path / "in"), tmp_path / "out")[""]
    assert [(bad.id, bad.reason) for bad in result.bad] == [
        ("a/2.npy", "not-finite"), ("a/4.npy", "wrong-depth"), ("b/5.npy", "wrong-bands")]  # fmt: skip
    kept = packed(tmp_path / "out", 5, "32f")
    assert all(np.array_equal(one, floats[number]) for one, number in zip(kept, (0, 1, 3), strict=True))


def test_a_damaged_array_in_a_shard_has_a_reason(tmp_path: Path) -> None:
    pack_data(str(arrays(tmp_path / "in")), tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("*.tar")
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"'descr'", b"'descx'", 1))
    source = open_path(str(tmp_path / "out")).splits[""]
    with pytest.raises(DecodeError) as error:
        _ = source[0].image
    assert error.value.reason == "corrupt"
