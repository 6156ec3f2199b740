"""Bytes that no one wrote: whatever a reader is given, it answers, or raises an error of ours."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from changes import changed, changes
from hypothesis import example, given
from hypothesis import strategies as st
from random_inputs import QUIETLY
from real_images import SHARED
from safetensors.torch import save

from vitrail.config import from_yaml, to_yaml
from vitrail.data.images.decode import decode
from vitrail.data.images.pixels import EIGHT_BIT_RGB
from vitrail.data.images.stored import read_stored, stored
from vitrail.data.images.tiles import Tiling, open_image, read_tile
from vitrail.data.sources.open import open_path
from vitrail.errors import DecodeError, UsageError, VitrailError
from vitrail.training.run import Run
from vitrail.weights.archive import open_archive

pytestmark = pytest.mark.fuzz


def weight_files() -> dict[str, bytes]:
    """A small file of each kind."""
    tensors = {"head.weight": torch.arange(12.0).reshape(3, 4), "head.bias": torch.zeros(3, dtype=torch.bfloat16)}
    files = {"a.safetensors": save(tensors)}
    stream = io.BytesIO()
    torch.save({"state_dict": tensors, "epoch": 3}, stream)
    files["a.pth"] = stream.getvalue()
    stream = io.BytesIO()
    torch.save(tensors, stream, _use_new_zipfile_serialization=False)
    files["old.pth"] = stream.getvalue()
    for name, write in (("a.npz", np.savez), ("packed.npz", np.savez_compressed)):
        stream = io.BytesIO()
        write(stream, **{"head/kernel": np.ones((3, 4), np.float32), "head/bias": np.arange(3)})
        files[name] = stream.getvalue()
    return files


def data_files() -> dict[str, bytes]:
    """Arrays and a table as data."""
    files = {}
    for name, write in (("a.npz", np.savez), ("packed.npz", np.savez_compressed)):
        stream = io.BytesIO()
        write(stream, images=np.zeros((4, 5, 5), np.uint8), labels=np.arange(4) % 2)
        files[name] = stream.getvalue()
    return files


WEIGHTS, DATA = weight_files(), data_files()


@QUIETLY
@given(name=st.sampled_from(sorted(WEIGHTS)), how=changes)
def test_43_changed_weight_files(tmp_path_factory: pytest.TempPathFactory, name: str, how: list) -> None:
    file = tmp_path_factory.getbasetemp() / f"fuzz-{name}"
    file.write_bytes(changed(WEIGHTS[name], how))
    try:
        with open_archive(file) as archive:
            tensors = [archive[key] for key in archive]
    except VitrailError:
        return
    assert sum(tensor.nbytes for tensor in tensors) < 10_000


@QUIETLY
@given(name=st.sampled_from(sorted(DATA)), how=changes)
def test_44_changed_arrays_of_data(tmp_path_factory: pytest.TempPathFactory, name: str, how: list) -> None:
    file = tmp_path_factory.getbasetemp() / f"fuzz-data-{name}"
    file.write_bytes(changed(DATA[name], how))
    try:
        found = open_path(str(file))
        for source in found.splits.values():
            assert len(source) <= 1000 and all(source[i].image.shape[2] == 3 for i in range(len(source)))
    except VitrailError:
        pass


@QUIETLY
@given(text=st.text(max_size=200))
@example(text="subset: .nan")
@example(text="? [a, b]\n: 1")
@example(text="!!python/object/apply:os.system [echo]")
@example(text="optim: {lr: 1e999}\nbatch_size: 9" + "9" * 5000)
def test_06_any_table_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.csv"
    file.write_bytes(("path,label\n" + text).encode("utf-8", "surrogatepass"))
    with pytest.raises(VitrailError):
        open_path(str(file))  # none of the images is there


@QUIETLY
@given(how=changes)
def test_20_changed_configurations(how: list) -> None:
    text = changed(to_yaml(Run()).encode(), how).decode("utf-8", "replace")
    try:
        assert isinstance(from_yaml(text, Run()), Run)
    except UsageError as error:
        assert str(error)


@QUIETLY
@given(text=st.text(alphabet="abclrdatoptim.path: \n-[]{}&*!|>'\"#%@,?0123456789eE_~", max_size=80))
@example(text="a: &x [*x, *x]")
@example(text="data: {path: !!binary aGFsbG8=}")
@example(text="!!python/object/apply:os.system [echo]")
@example(text="batch_size: 9" + "9" * 5000)
@example(text="seed: 1_0")
@example(text="[" * 3000)
@example(text="duration: 1e999 epochs")
def test_20_any_configuration(text: str) -> None:
    try:
        assert isinstance(from_yaml(text, Run()), Run)
    except UsageError as error:
        assert str(error)


def pictures() -> list[Path]:
    """Small real files of every format, awkward ones among them; none where they are absent."""
    folder = SHARED / "awkward-images"
    return sorted(file for file in folder.glob("*") if file.is_file() and file.stat().st_size < 40_000)


@pytest.mark.filterwarnings("ignore")
@QUIETLY
@given(data=st.data())
def test_08_changed_photographs(data: st.DataObject) -> None:
    files = pictures()
    if not files:
        pytest.skip("no real images")
    file = data.draw(st.sampled_from(files))
    content = changed(file.read_bytes(), data.draw(changes))
    try:
        image = decode(content, max_pixels=2_000_000)
    except DecodeError as error:
        assert error.reason in {"empty", "not-an-image", "truncated", "corrupt", "too-many-pixels", "unsupported"}
    else:
        assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
        assert 0 < image.shape[0] * image.shape[1] <= 2_000_000


def band_files() -> list[bytes]:
    """Arrays and TIFF files of four bands with 16 bits."""
    values = np.arange(240, dtype=np.uint16).reshape(5, 12, 4)
    files = []
    for write in (np.save, np.savez, np.savez_compressed):
        stream = io.BytesIO()
        write(stream, values)
        files.append(stream.getvalue())
    for compression in (None, "zlib", "lzw"):
        stream = io.BytesIO()
        with tifffile.TiffWriter(stream) as writer:
            for band in np.moveaxis(values, 2, 0):
                writer.write(band, photometric="minisblack", compression=compression)
        files.append(stream.getvalue())
    return files


BANDS = band_files()


@pytest.mark.filterwarnings("ignore")
@QUIETLY
@given(data=st.data())
def test_120_changed_bands(data: st.DataObject) -> None:
    file = data.draw(st.sampled_from([*BANDS, *(file.read_bytes() for file in pictures())]))
    content = changed(file, data.draw(changes))
    try:
        found = stored(content, 2_000_000)
        assert found.bits is not None
        image = read_stored(content, found.size()[2], found.bits, 2_000_000)
    except DecodeError as error:
        assert error.reason in {"empty", "not-an-image", "truncated", "corrupt", "too-many-pixels", "unsupported"}
    else:
        assert image.shape == found.size() and image.dtype == found.dtype


def tiled_files() -> list[bytes]:
    """TIFF files of tiles, of compressed strips and of plain strips."""
    values = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    files = []
    for options in ({"tile": (16, 16), "compression": "deflate"}, {"rowsperstrip": 9, "compression": "lzw"}, {}):
        stream = io.BytesIO()
        tifffile.imwrite(stream, values, photometric="rgb", **options)
        files.append(stream.getvalue())
    return files


TILED = tiled_files()


@pytest.mark.filterwarnings("ignore")
@QUIETLY
@given(data=st.data())
def test_124_changed_tiles(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.tif"
    file.write_bytes(changed(data.draw(st.sampled_from(TILED)), data.draw(changes)))
    try:
        image = open_image(file, EIGHT_BIT_RGB, 16)
        box = next(Tiling(16, 16).boxes(image.height, image.width))
        assert read_tile(image, box, Tiling(16, 16)).shape == (16, 16, 3)
    except DecodeError as error:
        assert error.reason in {"empty", "not-an-image", "truncated", "corrupt", "too-many-pixels", "unsupported"}
