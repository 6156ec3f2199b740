"""Masks among photographs are recognised, and the text names what cures it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data_set
from vitrail.errors import DataError


def write(root: Path, *names: str, mask: bool = False) -> None:
    """Photographs of random colours, or masks of two values."""
    rng = np.random.default_rng(0)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 2 if mask else 256, (24, 24) if mask else (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / name)


def warnings(data: Data) -> list[str]:
    return [line for line in open_data_set(data).findings.warnings if "masks" in line]


def test_masks_beside_photographs(tmp_path: Path) -> None:
    for kind in ("crack", "free"):
        write(tmp_path, *(f"{kind}/Imgs/{number}.jpg" for number in range(3)))
        write(tmp_path, *(f"{kind}/Imgs/{number}.png" for number in range(3)), mask=True)
    (line,) = warnings(Data(str(tmp_path)))
    assert line.startswith("12 of 12 images") and "crack/Imgs/0.jpg and .png" in line
    assert line.endswith("add --data.include '*.jpg'")
    cured = open_data_set(Data(str(tmp_path), include=("*.jpg",)))
    assert len(cured.splits[""]) == 6 and not cured.findings.warnings


def test_photographs_that_are_no_jpegs_are_the_larger_files(tmp_path: Path) -> None:
    write(tmp_path, "a/1.png", "b/1.png")
    write(tmp_path, "a/1.gif", "b/1.gif", mask=True)
    assert warnings(Data(str(tmp_path)))[0].endswith("add --data.include '*.png'")


def test_a_few_equal_names_are_no_masks(tmp_path: Path) -> None:
    write(tmp_path, *(f"{kind}/{number}.jpg" for kind in "ab" for number in range(10)), "a/3.png")
    assert warnings(Data(str(tmp_path))) == []


def test_one_level_too_high(tmp_path: Path) -> None:
    """The layout of the Oxford pets: photographs, and their masks in two folders."""
    names = [f"{kind}_{number}" for kind in ("Bengal", "beagle") for number in range(3)]
    write(tmp_path, *(f"images/{name}.jpg" for name in names))
    write(
        tmp_path,
        *(f"{folder}/{name}.png" for folder in ("trimaps", "annotations/trimaps") for name in names),
        mask=True,
    )
    with pytest.raises(DataError) as error:
        open_data_set(Data(str(tmp_path)))
    said = str(error.value)
    assert "trimaps/" in said and "annotations/" in said and "are masks" in said
    assert f"{tmp_path / 'images'}. " in said and r"--data.label-from 'name: ^(.+)_[0-9]+\.'" in said
    by_name = dict(label_from=r"name: ^(.+)_[0-9]+\.")
    with pytest.raises(DataError, match=r"out: --data\.exclude annotations --data\.exclude trimaps"):
        open_data_set(Data(str(tmp_path), **by_name))
    cured = open_data_set(Data(str(tmp_path), exclude=("annotations", "trimaps"), **by_name))
    assert len(cured.splits[""]) == 6 and cured.splits[""].class_names == ["Bengal", "beagle"]
    assert open_data_set(Data(str(tmp_path / "images"), **by_name)).splits[""].class_names == ["Bengal", "beagle"]


def test_people_with_masks_are_photographs(tmp_path: Path) -> None:
    write(tmp_path, *(f"{kind}/{number}.jpg" for kind in ("mask", "without_mask") for number in range(3)))
    assert open_data_set(Data(str(tmp_path))).splits[""].class_names == ["mask", "without_mask"]


def test_a_folder_of_masks_without_photographs_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, *(f"{kind}/{number}.png" for kind in ("labels", "cats") for number in range(3, 6)), mask=True)
    write(tmp_path, "dogs/9.png")
    found = open_data_set(Data(str(tmp_path), exclude=("cats",)))
    assert found.splits[""].class_names == ["dogs", "labels"]  # no name of a photograph is among the masks
