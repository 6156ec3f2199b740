"""DICOM files of pydicom's own collection, of files made here, and of damaged ones."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from pydicom import Dataset, dcmread
from pydicom.data import get_testdata_file
from pydicom.dataset import FileMetaDataset
from pydicom.pixels import apply_color_lut, apply_modality_lut, pixel_array
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from vitrail import embed, evaluate, fit, predict
from vitrail.data.check import stats
from vitrail.data.image_names import images_among
from vitrail.data.images.decode import decode
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Banded, picture
from vitrail.data.images.stored import read_stored, stored
from vitrail.data.images.tiff_parts import TiffParts
from vitrail.data.images.tiles import open_image
from vitrail.data.settings import Augment, Bands, Data
from vitrail.data.sources.folder import read_folder
from vitrail.durations import Epochs
from vitrail.errors import DataError, DecodeError
from vitrail.training.run import Model, Optim, Run
from vitrail.version import install_extra
from vitrail.weights.load import read_card

NAME = "Secret^Patient"


def real(name: str) -> bytes:
    path = get_testdata_file(name, download=False)
    assert isinstance(path, str)
    return Path(path).read_bytes()


def dataset(values: np.ndarray, **elements: object) -> Dataset:
    """Return a CT image; `values` int16, uint16 or uint8 [H, W] or [H, W, 3]."""
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = CTImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = generate_uid()
    made.PatientName, made.PatientID = NAME, NAME
    made.Rows, made.Columns = values.shape[:2]
    made.SamplesPerPixel = 1 if values.ndim == 2 else 3
    made.PhotometricInterpretation = "MONOCHROME2" if values.ndim == 2 else "RGB"
    made.BitsAllocated = made.BitsStored = 8 * values.itemsize
    made.HighBit = made.BitsStored - 1
    made.PixelRepresentation = int(values.dtype.kind == "i")
    made.PixelData = values.tobytes()
    if values.ndim == 3:
        made.PlanarConfiguration = 0
    for name, value in elements.items():
        setattr(made, name, value)
    return made


def saved(values: np.ndarray, **elements: object) -> bytes:
    file = io.BytesIO()
    dataset(values, **elements).save_as(file, enforce_file_format=True)
    return file.getvalue()


RAMP = np.arange(-8, 8, dtype=np.int16).reshape(2, 8)


@pytest.mark.parametrize("name", ["CT_small.dcm", "693_J2KI.dcm", "J2K_pixelrep_mismatch.dcm", "MR_small_bigendian.dcm",
                                  "examples_overlay.dcm", "liver_1frame.dcm", "rtdose_1frame.dcm",
                                  "JPEGLSNearLossless_16.dcm"])  # fmt: skip
def test_grey_values_are_those_of_the_modality(name: str) -> None:
    data = real(name)
    about = dcmread(io.BytesIO(data))
    expected = apply_modality_lut(pixel_array(about), about)
    found = read_stored(data, 1, "32f")
    assert found.dtype == np.float32 and np.array_equal(found[..., 0], expected.astype(np.float32))
    assert stored(data).size() == (about.Rows, about.Columns, 1)


def test_hounsfield_units() -> None:
    found = read_stored(saved(RAMP, RescaleSlope=2, RescaleIntercept=-1024), 1, "32f")
    assert np.array_equal(found[..., 0], 2 * RAMP.astype(np.float32) - 1024)
    assert found[..., 0].min() == -1040
    enhanced, transformation = Dataset(), Dataset()
    transformation.RescaleSlope, transformation.RescaleIntercept, transformation.RescaleType = 3, 1, "US"
    enhanced.PixelValueTransformationSequence = [transformation]
    assert np.array_equal(
        read_stored(saved(RAMP, SharedFunctionalGroupsSequence=[enhanced]), 1, "32f")[..., 0],
        3 * RAMP.astype(np.float32) + 1,
    )


@pytest.mark.parametrize(
    "compressed", ["MR_small_RLE.dcm", "MR_small_jp2klossless.dcm", "MR_small_jpeg_ls_lossless.dcm"]
)
def test_lossless_compressions_give_the_uncompressed_values(compressed: str) -> None:
    assert np.array_equal(read_stored(real(compressed), 1, "32f"), read_stored(real("MR_small.dcm"), 1, "32f"))


def test_large_is_white_whatever_the_photometric_interpretation() -> None:
    radiograph = Path(get_testdata_file("DICOMDIR", download=False) or "").parent / "77654033" / "CR1" / "6154"
    about = dcmread(radiograph)
    assert about.PhotometricInterpretation == "MONOCHROME1" and about.BitsStored == 12
    expected = (4095 - about.pixel_array.astype(np.float64)) * 0.684 + 200
    assert np.allclose(read_stored(radiograph.read_bytes(), 1, "32f")[..., 0], expected, rtol=1e-6)
    signed = read_stored(saved(RAMP, PhotometricInterpretation="MONOCHROME1"), 1, "32f")
    assert np.array_equal(signed[..., 0], -1 - RAMP.astype(np.float32))  # the ends are -32768 and 32767
    lut = Dataset()
    lut.LUTDescriptor, lut.LUTData, lut.ModalityLUTType = [16, 0, 16], (np.arange(16, dtype="<u2") ** 2).tobytes(), "OD"
    monochrome = {"PhotometricInterpretation": "MONOCHROME1", "BitsStored": 4, "HighBit": 3}
    table = read_stored(saved((RAMP + 8).astype(np.uint16), **monochrome, ModalityLUTSequence=[lut]), 1, "32f")
    assert np.array_equal(table.ravel(), 225 - np.arange(16) ** 2)


@pytest.mark.parametrize("name", ["SC_rgb_small_odd.dcm", "SC_rgb_rle.dcm", "SC_rgb_jpeg_gdcm.dcm",
                                  "SC_ybr_full_422_uncompressed.dcm", "examples_rgb_color.dcm"])  # fmt: skip
def test_colour_with_8_bits_is_a_picture(name: str) -> None:
    data = real(name)
    expected = pixel_array(io.BytesIO(data))
    assert expected.dtype == np.uint8
    for found in (decode(data), read_stored(data, 3, "8"), picture(data)):
        assert np.array_equal(found, expected)
    with pytest.raises(DecodeError) as error:
        decode(data, max_pixels=8)
    assert error.value.reason == "too-many-pixels"


@pytest.mark.processes
@pytest.mark.parametrize("name", ["CT_small.dcm", "SC_rgb_small_odd.dcm"])
def test_too_many_pixels_name_a_command_that_writes_the_same_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scan.dcm").write_bytes(real(name))
    grey = name == "CT_small.dcm"
    kind = Banded(Bands("32f", (0.0,), (1.0,), (0.0,), (1.0,))) if grey else EIGHT_BIT_RGB
    with monkeypatch.context() as patch, pytest.raises(DecodeError, match="only TIFF files are read in parts") as error:
        whole = type(kind).values
        patch.setattr(type(kind), "values", lambda self, data: whole(self, data, 8))
        open_image(tmp_path / "scan.dcm", kind, 16)
    assert error.value.reason == "too-many-pixels" and "vips" not in str(error.value)
    _, _, words = str(error.value).partition("python -c ")
    subprocess.run([sys.executable, "-c", *shlex.split(words)], check=True)
    found = open_image(tmp_path / "scan-tiled.tif", kind, 16)
    assert isinstance(found, TiffParts)
    expected = kind.values(real(name))
    assert np.array_equal(found.values(0, 0, *expected.shape[:2]), expected)


def test_more_bits_and_palettes_are_bands() -> None:
    deep, palette = real("SC_rgb_rle_16bit.dcm"), real("examples_palette.dcm")
    assert np.array_equal(read_stored(deep, 3, "16"), pixel_array(io.BytesIO(deep)))
    about = dcmread(io.BytesIO(palette))
    assert np.array_equal(read_stored(palette, 3, "16"), apply_color_lut(pixel_array(about), about))
    with pytest.raises(DecodeError, match="DICOM image of uint16 values is not 8-bit RGB"):
        decode(deep)


def test_pictures_of_grey_values() -> None:
    ramp = np.repeat(np.arange(101, dtype=np.int16)[:, None], 2, axis=1)
    shown = picture(saved(ramp, RescaleSlope=1, RescaleIntercept=-1024))
    assert (shown[:3] == 0).all() and (shown[98:] == 255).all() and (shown[50] == 128).all()
    with pytest.raises(DecodeError, match="float32 values is not 8-bit RGB"):
        decode(saved(ramp))


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1 and len(old) == len(new)
    return data.replace(old, new)


J2K = real("MR_small_jp2klossless.dcm")
SIZE = b"\xff\x4f\xff\x51\x00\x29\x00\x00\x00\x00\x00\x40"
BROKEN = {
    "cut off": (real("CT_small.dcm")[:20_000], "truncated"),
    "cut off within compressed data": (J2K[:3000], "unsupported"),
    "cut off before its values": (real("CT_small.dcm")[:3000], "unsupported"),
    "a directory of files": (real("DICOMDIR"), "unsupported"),
    "a report without an image": (real("reportsi.dcm"), "unsupported"),
    "several frames": (real("rtdose.dcm"), "unsupported"),
    "a number of frames that is no number": (real("badVR.dcm"), "corrupt"),
    "no size": (real("nested_priv_SQ.dcm"), "corrupt"),
    "no preamble": (real("no_meta.dcm"), "not-an-image"),
    "JPEG of 12 bits": (real("JPEG-lossy.dcm"), "corrupt"),
    "video": (saved(RAMP).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.9\0"), "corrupt"),
    "deflated": (real("image_dfl.dcm"), "unsupported"),
    "colours of printing": (saved(RAMP, PhotometricInterpretation="CMYK"), "unsupported"),
    "compressed data that claim 4 billion pixels": (changed(J2K, SIZE, SIZE[:8] + b"\x7f\xff\xff\xff"), "corrupt"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_have_a_reason(name: str) -> None:
    data, reason = BROKEN[name]
    with pytest.raises(DecodeError) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read_stored(data, 1, "32f")
    assert error.value.reason == reason and len(str(error.value).splitlines()) == 1


def test_a_file_that_is_cut_or_changed_anywhere_gives_values_or_a_reason() -> None:
    rng, whole = np.random.default_rng(0), saved(RAMP, RescaleSlope=2, RescaleIntercept=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(300):
            data = bytearray(whole if turn % 2 else J2K)
            data[rng.integers(128, len(data))] = rng.integers(256)
            try:
                read_stored(bytes(data[: rng.integers(132, 2 * len(data))]), 1, "32f", 2**20)
            except DecodeError as error:
                assert NAME not in str(error)


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pydicom.pixels.decoders.base.JPEG2000LosslessDecoder._available", {})
        with pytest.raises(DecodeError) as error:
            read_stored(J2K, 1, "32f")
        assert f"JPEG 2000 Image Compression (Lossless Only) needs more packages: {install_extra('medical')}" in str(
            error.value
        )
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DecodeError) as error:
        read_stored(J2K, 1, "32f")
    assert str(error.value) == f"DICOM files need the package pydicom: {install_extra('medical')}"
    assert error.value.reason == "unsupported"


def test_names_without_a_suffix(tmp_path: Path) -> None:
    values = saved(RAMP)
    for name in ("a/IM000001", "a/series/1.2.840.10008.5.1", "b/IM000002", "b/notes", "b/DICOMDIR", "b/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"text" if name == "b/notes" else values)
    found = read_folder(tmp_path)
    source = found.splits[""]
    names = [source[number].id for number in range(len(source))]
    assert names == ["a/IM000001", "a/series/1.2.840.10008.5.1", "b/IM000002"]
    counts = stats(str(tmp_path))
    assert counts.formats == {"DICOM": 3} and counts.modes == {"float32 1 bands": 3}
    assert images_among([str(tmp_path / "b" / name) for name in ("IM000002", "x.png")])[0].endswith("x.png")


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write scans [8, 8] whose classes differ by 40 Hounsfield units; the scanners' slopes and signs differ."""
    root, rng = tmp_path_factory.mktemp("scans"), np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 8)):
        for place, name in enumerate(("fat", "muscle")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                units = np.rint(rng.normal(-30 + 60 * place, 5, (8, 8)))
                values = ((units + 1024).astype(np.uint16), 1, -1024) if number % 2 else (units.astype(np.int16), 1, 0)
                file = root / split / name / (f"{number}.dcm" if split == "test" else f"1.2.{number}")
                file.write_bytes(saved(values[0], RescaleSlope=values[1], RescaleIntercept=values[2]))
    return root


@pytest.mark.train
def test_a_run_on_dicom_files(scans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = fit(
        Run(
            name="d",
            out=str(scans.parent / "runs"),
            data=Data(path=str(scans)),
            model="Ti/16",
            vit=Model(width=32, depth=1, heads=2, mlp_dim=64, patch=4),
            optim=Optim(lr=5e-3),
            augment=Augment(crop="center"),
            duration=Epochs(4),
            evaluate_every=Epochs(4),
            batch_size=16,
            workers=0,
            device="cpu",
            precision="float32",
        )
    )
    bands = read_card(trained.folder).preprocess.bands
    assert bands is not None and bands.bits == "32f" and -10 < bands.mean[0] < 10
    assert evaluate(trained.folder, scans).results.correct.all()
    (scans / "cut.dcm").write_bytes(saved(RAMP)[:-9])
    answer = predict(trained.folder, scans / "test", scans / "cut.dcm", precision="float32")
    assert all(row.as_json()["class"] == Path(row.path).parent.name for row in answer.rows) and len(answer.rows) == 16
    assert [row.reason for row in answer.unreadable] == ["truncated"]
    _check_tiles(trained.folder, scans.parent / "maps")
    written = b"".join(file.read_bytes() for file in trained.folder.rglob("*") if file.is_file())
    told = capsys.readouterr()
    assert NAME.encode() not in written and NAME not in told.out + told.err


def _check_tiles(model: Path, maps: Path) -> None:
    """A scan with fat on its left half and muscle on its right: the tiles tell which, and a map is drawn."""
    rng, scan = np.random.default_rng(1), maps.parent / "halves.dcm"
    units = np.rint(rng.normal(0, 5, (16, 24)) + np.where(np.arange(24) < 12, -30, 30)).astype(np.int16)
    scan.write_bytes(saved(units, RescaleSlope=1, RescaleIntercept=0))
    cut = maps.parent / "cut.dcm"
    cut.write_bytes(saved(units)[:-9])
    answer = predict(model, scan, cut, tiles=8, precision="float32")
    boxes = {(row.box.x, row.box.y): row.as_json()["class"] for row in answer.rows}
    assert {place: boxes[place] for place in boxes if place[0] != 8} == {
        (x, y): "fat" if x == 0 else "muscle" for x in (0, 16) for y in (0, 8)
    }
    assert len(boxes) == 6 and [row.reason for row in answer.unreadable] == ["truncated"]
    drawn = predict(model, scan, tiles=8, out=maps, precision="float32").maps
    assert [Path(path).name for path in drawn] == ["halves.map.png"] and (maps / "tiles.csv").is_file()
    embed(model, scan, tiles=8, out=maps.parent / "tiles.npz", precision="float32")
    with np.load(maps.parent / "tiles.npz") as found:
        assert found["features"].shape == (6, 32) and found["boxes"].shape == (6, 4)


@pytest.mark.train
def test_training_without_pydicom_names_the_extra(scans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DataError, match=r"package pydicom: pip install .*extra medical"):
        fit(Run(out=str(scans.parent / "without"), data=Data(path=str(scans)), workers=0, device="cpu"))
