from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitrail.errors import DataError
from vitrail.evaluation.feature_files import load_features, save_features

NAMES = ["a", "b", "c"]


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    whole = {
        "train_features": rng.normal(size=(6, 4)).astype(np.float32),
        "train_labels": np.array([0, 1, 2, 0, 1, 2]),
        "test_features": rng.normal(size=(3, 4)).astype(np.float32),
        "test_labels": np.array([2, 0, -1]),
        "class_names": np.array(NAMES),
    } | changes
    return {name: array for name, array in whole.items() if array is not None}


def test_features_survive_the_disk(tmp_path: Path) -> None:
    written = arrays(train_ids=np.array(["x"] * 6))
    save_features(tmp_path / "new" / "f.npz", written)
    train, test = load_features(tmp_path / "new" / "f.npz")
    for part, split in ((train, "train"), (test, "test")):
        np.testing.assert_array_equal(part.features, written[f"{split}_features"])
        np.testing.assert_array_equal(part.labels, written[f"{split}_labels"])
        np.testing.assert_array_equal(part.index, np.arange(len(part)))
        assert part.class_names == NAMES
    assert os.listdir(tmp_path / "new") == ["f.npz"]


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_features_from_anywhere(write: Any, tmp_path: Path) -> None:
    """Other types, Fortran order, compressed, without names: the numbers are the same."""
    made = arrays(class_names=None)
    other = {
        "train_features": np.asfortranarray(made["train_features"].astype(np.float16)),
        "train_labels": made["train_labels"].astype(np.uint8),
        "test_features": made["test_features"].astype(np.float64),
        "test_labels": made["test_labels"].astype(np.int8),
    }
    write(tmp_path / "f.npz", **other)
    train, test = load_features(tmp_path / "f.npz")
    np.testing.assert_array_equal(train.features, made["train_features"].astype(np.float16))
    np.testing.assert_array_equal(test.features, made["test_features"])
    assert train.features.dtype == test.features.dtype == np.float32 and train.labels.dtype == np.int64
    assert train.class_names == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(test_labels=None),
            r"lacks test_labels: it holds class_names, test_features, .*It must hold train_features",
        ),
        (dict(train_features=np.zeros(6)), r"train_features is float64 of shape \(6,\); it must be numbers"),
        (dict(train_features=np.zeros((6, 0))), "with at least one image and at least one feature"),
        (dict(test_features=np.array([["x"] * 4] * 3)), "test_features is <U1"),
        (dict(test_features=np.zeros((3, 5))), "f.npz: training images have 4 features and test images 5"),
        (dict(test_features=np.zeros((2, 4))), "test_features has 2 rows and test_labels 3"),
        (dict(train_labels=np.zeros(6)), "train_labels is float64"),
        (dict(train_labels=np.eye(6, dtype=int)), r"train_labels is int64 of shape \(6, 6\); it must be integers"),
        (dict(test_labels=np.array([0, -2, 1])), "test_labels holds -2"),
        (dict(test_labels=np.array([0, 3, 1])), "label 3 has no name: class_names holds 3"),
        (dict(test_labels=np.array([-1, -1, -1])), "none of the 3 test images has a known class"),
        (dict(class_names=np.arange(3)), "class_names is int64"),
        (dict(train_features=np.full((6, 4), np.nan)), "f.npz: the features of training image 0 are not finite"),
        (dict(test_features=np.full((3, 4), 1e300)), "test image 0 are not finite"),
        (dict(train_labels=np.array([None] * 6)), "'train_labels' holds Python objects, which could run code"),
    ],
)
def test_wrong_arrays_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with np.errstate(over="ignore"):
        np.savez(tmp_path / "f.npz", **arrays(**changes))
        with pytest.raises(DataError, match=message):
            load_features(tmp_path / "f.npz")


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "f.npz"
    with pytest.raises(DataError, match=r"f.npz cannot be read: truncated, damaged or not an .npz"):
        load_features(path)
    save_features(path, arrays())
    whole = path.read_bytes()
    for keep in (0, 10, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:keep])
        with pytest.raises(DataError, match=r"f.npz cannot be read"):
            load_features(path)
    flipped = bytearray(whole)
    flipped[200] ^= 255  # inside the first array: the checksum knows
    path.write_bytes(flipped)
    with pytest.raises(DataError, match=r"f.npz"):
        load_features(path)


def test_a_header_that_claims_more_than_there_is(tmp_path: Path) -> None:
    """NumPy would allocate what it claims."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**9, 1000)})
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as archive:
        for name, array in arrays().items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array)
            archive.writestr(f"{name}.npy", header.getvalue() if name == "train_features" else content.getvalue())
    with pytest.raises(
        DataError, match=r"claims float32 of shape \(1000000000, 1000\), 4,000,000,000,000 bytes, but 0"
    ):
        load_features(tmp_path / "f.npz")


def test_a_file_that_cannot_be_written_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "f.npz").mkdir()
    with pytest.raises(DataError, match="cannot write"):
        save_features(tmp_path / "f.npz", arrays())
    assert os.listdir(tmp_path) == ["f.npz"]
