from __future__ import annotations

import csv
import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail import cli
from vitrail.data.check import check, stats
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def save(path: Path, number: int, size: tuple[int, int] = (20, 10), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two splits of good images, then one fault of every kind."""
    root = tmp_path / "photos"
    for number in range(8):
        save(root / "train" / "ab"[number % 2] / f"{number}.png", number)
        save(root / "val" / "ab"[number % 2] / f"{number}.png", 100 + number)
    save(root / "train/a/gray.jpg", 50, mode="L")
    save(root / "train/a/cmyk.jpg", 51, mode="CMYK")
    save(root / "train/a/tiny.png", 52, (5, 20))
    save(root / "train/b/strip.png", 53, (400, 10))
    (root / "train/a/empty.jpg").write_bytes(b"")
    (root / "train/b/page.jpg").write_bytes(b"<!DOCTYPE html><html></html>")
    whole = save(root / "train/b/cut.jpg", 54, (200, 200)).read_bytes()
    (root / "train/b/cut.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "train/b/gone.png").symlink_to("nowhere")
    shutil.copy(root / "train/a/0.png", root / "val/a/leak.png")
    shutil.copy(root / "train/b/1.png", root / "train/b/again.png")
    shutil.copy(root / "train/a/2.png", root / "train/b/otherwise.png")
    return root


def contents(root: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_scan_finds_every_fault_and_changes_nothing(photos: Path, tmp_path: Path, workers: int) -> None:
    before = contents(photos)
    progress: list[tuple[int, int]] = []
    report = check(photos, workers=workers, progress=lambda *done: progress.append(done))
    assert contents(photos) == before
    assert progress == [(done, 26) for done in range(1, 27)]
    assert {(bad.split, bad.id, bad.reason) for bad in report.bad} == {
        ("train", "a/empty.jpg", "empty"),
        ("train", "b/page.jpg", "not-an-image"),
        ("train", "b/cut.jpg", "truncated"),
    }
    assert report.bad_share == 3 / 26
    groups = {frozenset((copy.split, copy.id) for copy in group) for group in report.duplicates}
    leak = frozenset({("train", "a/0.png"), ("val", "a/leak.png")})
    assert groups == {
        leak,
        frozenset({("train", "b/1.png"), ("train", "b/again.png")}),
        frozenset({("train", "a/2.png"), ("train", "b/otherwise.png")}),
    }
    assert [frozenset(copy[:2] for copy in group) for group in report.leaks] == [leak]
    text = "\n".join(report.warnings)
    for part in (
        "3 images (11.54%)",
        "1 images are in more than one split",
        "3 images are exact copies",
        "1 images occur with different labels",
        "1 images have a side below 8",
        "1 images are more than 8",
    ):
        assert part in text
    report.write_csv(tmp_path / "bad.csv")
    with open(tmp_path / "bad.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 + 1 + 3
    assert {(row["split"], row["id"], row["reason"]) for row in rows} >= {
        ("train", "b/cut.jpg", "truncated"),
        ("", "b/gone.png", "left-out"),
        ("val", "a/leak.png", "duplicate"),
    }
    assert next(row["detail"] for row in rows if row["id"] == "a/leak.png") == "of train:a/0.png"


def test_counts_sizes_and_modes(photos: Path) -> None:
    report = check(photos)
    train, val = report.stats.splits
    assert (train.name, train.count, train.classes) == ("train", 17, {"a": 8, "b": 9})
    assert (val.count, val.classes) == (9, {"a": 5, "b": 4})
    assert report.stats.count == 26
    assert report.stats.formats == {"PNG": 21, "JPEG": 2}
    assert report.stats.modes == {"RGB": 21, "L": 1, "CMYK": 1}
    assert report.stats.heights == (10, 10, 20) and report.stats.widths == (5, 20, 400)
    assert train.bytes == sum(path.stat().st_size for path in (photos / "train").rglob("*") if path.is_file())


def test_stats_agree_with_the_scan_without_decoding(photos: Path) -> None:
    quick, full = stats(photos), check(photos).stats
    assert (quick.splits, quick.fingerprint, quick.class_names) == (full.splits, full.fingerprint, full.class_names)
    assert quick.heights[0] == full.heights[0] and quick.kind == "folder"
    assert quick.formats["PNG"] == full.formats["PNG"]


def test_a_class_without_a_readable_image_and_imbalance_are_warned_of(tmp_path: Path) -> None:
    for number in range(20):
        save(tmp_path / "many" / f"{number}.png", number)
    save(tmp_path / "few" / "0.png", 99)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    report = check(tmp_path)
    assert report.stats.splits[0].imbalance == 20
    text = "\n".join(report.warnings)
    assert "no image of class 'none'" in text and "20 times" in text
    assert "no image of class 'few'" not in text
    assert f"vitrail train {tmp_path} --metric.name balanced_accuracy" in text and "split ''" not in text


def test_a_class_of_held_out_images_alone_is_said(tmp_path: Path) -> None:
    for number, place in enumerate(("train/a", "train/b", "test/a", "test/b", "test/c", "test/c", "other/d")):
        save(tmp_path / place / f"{number}.png", number)
    text = "\n".join(check(tmp_path).warnings)
    assert "split 'test' has images of classes that no training image has: 'c'" in text and "'a'" not in text


def test_settings_without_effect_are_said(tmp_path: Path) -> None:
    for number in range(8):
        save(tmp_path / "ab"[number % 2] / f"{number}.png", number)
    asked = dict(image_column="z", label_column="x", label_columns=("a", "b"), label_separator="x", ignore=(0,))
    data = Data(str(tmp_path), holdout=0, validation="subset", group="folder", **asked)
    lines = [f"data.{name} has no effect on images of this kind (folder)" for name in asked]
    for said in (check(data).warnings, stats(data).findings.warnings, open_data(data).report.warnings):
        assert {*lines} <= {*said}
    training = [line for line in open_data(data).report.warnings if line not in lines]
    assert training == [
        "data.validation 'subset' has no effect without data.subset",
        "data.group has no effect: no image is held out (data.holdout, data.validation)",
    ]
    assert not open_data(Data(str(tmp_path), ignore=[255])).report.warnings  # type: ignore[arg-type]


def test_good_data_say_nothing(tmp_path: Path) -> None:
    for number in range(6):
        save(tmp_path / "ab"[number % 2] / f"{number}.png", number)
    report = check(tmp_path)
    assert not report.warnings and not report.bad and not report.duplicates
    assert list(report.rows()) == [("split", "id", "reason", "detail")]


def test_arrays_are_compared_by_their_pixels() -> None:
    report = check("digits")
    assert report.stats.formats == {"array": 1797} and report.stats.heights == (8, 8, 8)
    from sklearn.datasets import load_digits

    images = load_digits().images.reshape(1797, -1)
    assert sum(len(group) - 1 for group in report.duplicates) == 1797 - len(np.unique(images, axis=0))


def test_nothing_to_check(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        check(tmp_path / "nothing")


def test_the_awkward_images_give_reasons_or_pictures(shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("awkward", "plain"):
        (tmp_path / "d" / name).symlink_to(shared_data / ("awkward-images" if name == "awkward" else "imagenet-val20"))
    report = check(tmp_path / "d", workers=2)
    reasons = {bad.id.split("/")[1]: bad.reason for bad in report.bad}
    assert all(bad.id.startswith("awkward/") for bad in report.bad)
    assert reasons["truncated_jpeg.jpg"] == "truncated" and reasons["65536-uint32-limit.png"] == "too-many-pixels"


@pytest.mark.nightly(
    "test_check.py::test_a_scan_finds_every_fault_and_changes_nothing, test_arrays_are_compared_by_their_pixels"
)
@pytest.mark.full_size
def test_cifar100_shares_ten_images_between_its_splits(shared_data: Path) -> None:
    report = check(shared_data / "cifar100", workers=2)
    assert not report.bad
    assert sum(sum(copy.split == "test" for copy in group) for group in report.leaks) == 10


@pytest.mark.parametrize(("broken", "code"), [(1, 0), (2, 1)])
def test_data_without_a_readable_image_are_a_failure(
    broken: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        if number < broken:
            (tmp_path / name / "x.png").write_bytes(b"no image")
        else:
            Image.new("RGB", (8, 8)).save(tmp_path / name / "x.png")
    assert cli.main(["data", "check", str(tmp_path)]) == code
    assert "bad: a/x.png: not an image" in capsys.readouterr().out
