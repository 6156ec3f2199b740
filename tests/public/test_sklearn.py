"""`vitrail.sklearn.ViTClassifier`: scikit-learn's checks, its classifiers on the same features, all forms of images."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from random_inputs import MANY
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import vitrail
from vitrail.data.settings import Bands, Preprocess
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.knn import TEMPERATURE
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.sklearn import ViTClassifier
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=2)
SETTINGS: dict[str, Any] = dict(device="cpu", precision="float32", workers=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sklearn") / "model"
    torch.manual_seed(0)
    save_model(folder, ViT(CONFIG), Card(CONFIG, ["a", "b"], Preprocess((16, 16), resize="squash")))
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[str]]:
    """Reddish and bluish photos of one size, and their classes."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    paths, names = [], []
    for number in range(24):
        picture = rng.integers(0, 120, (20, 24, 3), np.uint8)
        picture[:, :, 2 * (number % 2)] += 100
        paths.append(folder / f"{number}.png")
        names.append(["red", "blue"][number % 2])
        Image.fromarray(picture).save(paths[-1])
    return paths, names


LONG = [ViTClassifier(l2=1e-2)] if MANY else []


@parametrize_with_checks([ViTClassifier(), ViTClassifier(probe="knn", k=5), *LONG])
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_every_form_of_image_is_the_same(model: Path, photos: tuple[list[Path], list[str]]) -> None:
    paths, names = photos
    opened = [Image.open(path) for path in paths]
    arrays = [np.asarray(image) for image in opened]
    forms: list[Any] = [paths, [str(path) for path in paths], np.array([str(path) for path in paths]), opened, arrays]
    fitted = ViTClassifier(model, **SETTINGS).fit(paths[:16], names[:16])
    assert fitted.score(paths[16:], names[16:]) == 1.0 and fitted.classes_.tolist() == ["blue", "red"]
    expected = fitted.predict_proba(paths)
    for form in [*forms, np.stack(arrays)]:
        np.testing.assert_array_equal(fitted.predict_proba(form), expected)
    # `transform` and `vitrail.embed` give what takes the place of images
    features = fitted.transform(paths)
    np.testing.assert_array_equal(fitted.predict_proba(features), expected)
    vitrail.embed(model, *paths, out=paths[0].with_name("f.npz"), **SETTINGS)
    with np.load(paths[0].with_name("f.npz")) as file:
        order = [file["ids"].tolist().index(str(path)) for path in paths]
        np.testing.assert_array_equal(file["features"][order], features)


def test_a_grey_array_is_read_as_a_grey_file(model: Path, tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (20, 24), np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    fitted = ViTClassifier(model, l2=1.0, **SETTINGS).fit([grey, 255 - grey], [0, 1])
    np.testing.assert_array_equal(fitted.transform([grey]), fitted.transform([tmp_path / "grey.png"]))


def test_pictures_are_read_as_their_files(model: Path, tmp_path: Path) -> None:
    """Turned by EXIF, with transparency, and with 16 bits."""
    rng, exif = np.random.default_rng(0), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(tmp_path / "turned.jpg", exif=exif)
    Image.fromarray(rng.integers(0, 256, (20, 24, 4), np.uint8)).save(tmp_path / "clear.png")
    Image.fromarray(rng.integers(0, 65536, (20, 24), np.uint16)).save(tmp_path / "deep.png")
    files = sorted(tmp_path.iterdir())
    fitted = ViTClassifier(model, l2=1.0, **SETTINGS).fit(files, [0, 1, 0])
    np.testing.assert_array_equal(fitted.transform([Image.open(file) for file in files]), fitted.transform(files))


def blobs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 40)
    return (rng.normal(size=(120, 8)) + rng.normal(size=(3, 8))[labels]).astype(np.float32), labels


def test_linear_is_logistic_regression() -> None:
    features, labels = blobs()
    ours = ViTClassifier(l2=0.05).fit(features, labels)
    scaled = StandardScaler().fit_transform(features)
    theirs = LogisticRegression(C=1 / (len(labels) * 0.05), tol=1e-8, max_iter=10_000).fit(scaled, labels)
    np.testing.assert_allclose(
        ours.predict_proba(features), theirs.predict_proba(scaled), atol=1e-3
    )  # both stop at a gradient of 1e-4


def test_neighbours_vote_as_in_scikit_learn() -> None:
    features, labels = blobs()

    def weigh(distances: np.ndarray) -> np.ndarray:
        return np.exp((1 - distances) / TEMPERATURE)

    ours = ViTClassifier(probe="knn", k=7).fit(features, labels)
    theirs = KNeighborsClassifier(7, metric="cosine", weights=weigh).fit(features, labels)
    asked = np.random.default_rng(1).normal(size=(50, 8)).astype(np.float32)
    np.testing.assert_allclose(ours.predict_proba(asked), theirs.predict_proba(asked), atol=1e-4)


def test_it_goes_through_a_grid_search_and_a_pickle(model: Path, photos: tuple[list[Path], list[str]]) -> None:
    paths, names = photos
    search = GridSearchCV(ViTClassifier(model, **SETTINGS), {"probe": ["linear", "knn"], "k": [3]}, cv=2)
    best = search.fit(paths, names).best_estimator_
    again = pickle.loads(pickle.dumps(best))
    assert len(pickle.dumps(best)) < 20_000  # the network stays where it is
    np.testing.assert_array_equal(again.predict_proba(paths), best.predict_proba(paths))


def test_arrays_of_many_bands(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    bands = Bands("16", (1000.0,) * 5, (100.0,) * 5, (0.0,) * 5, (65535.0,) * 5)
    config = replace(CONFIG, channels=5)
    network, preprocess = ViT(config), Preprocess((16, 16), resize="squash", bands=bands)
    save_model(tmp_path / "model", network, Card(config, ["a", "b"], preprocess))
    images = rng.integers(900, 1100, (24, 16, 16, 5)).astype(np.uint16)
    images[::2, ..., 4] += 300
    names = ["high", "low"] * 12
    fitted = ViTClassifier(tmp_path / "model", l2=1e-3, **SETTINGS).fit(images, names)
    np.save(tmp_path / "0.npy", images[0])
    mixed = [tmp_path / "0.npy", images[0], np.moveaxis(images[1], 2, 0)]
    assert fitted.predict(mixed).tolist() == ["high", "high", "low"]
    with torch.no_grad():
        expected = network.features(torch.from_numpy((images.astype(np.float32) - 1000) / 100).permute(0, 3, 1, 2))
    np.testing.assert_allclose(fitted.transform(images), expected.numpy(), atol=1e-5)
    for wrong, reason in (
        (images[..., :3], "the image has 3 bands, and 5 are"),
        (images.astype(np.uint8), "uint8, and"),
    ):
        with pytest.raises(DataError, match=f"image 0 cannot be read: .*{reason}"):
            fitted.predict(wrong)
    with pytest.raises(DataError, match="image 1 cannot be read: wrong-bands"):
        fitted.predict([images[0], images[1, ..., :4]])


def test_what_is_refused(model: Path, photos: tuple[list[Path], list[str]], tmp_path: Path) -> None:
    paths, names = photos
    (tmp_path / "broken.png").write_bytes(b"no picture")
    fitted = ViTClassifier(model, l2=1.0, **SETTINGS).fit(paths, names)
    with pytest.raises(DataError, match=r"broken.png cannot be read: not-an-image"):
        fitted.predict([paths[0], tmp_path / "broken.png"])
    with pytest.raises(DataError, match=r"image 0 is float64 of shape \(4, 4, 3\); an array must be uint8"):
        fitted.predict([np.zeros((4, 4, 3))])
    with pytest.raises(UsageError, match="weights is None"):
        ViTClassifier().fit(paths, names)
    with pytest.raises(UsageError, match="Valid: linear, knn"):
        ViTClassifier(model, probe="tree").fit(paths, names)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="l2 above 0"):
        ViTClassifier(model, l2=0.0).fit(paths, names)
    with pytest.raises(ValueError, match="have one class, red"):
        ViTClassifier(model, **SETTINGS).fit(paths, ["red"] * len(paths))
