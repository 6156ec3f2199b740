"""Test-time augmentation: the views of torchvision, the mean of their probabilities, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from torch import Tensor
from torchvision.transforms import v2

import vitrail
from vitrail.data.images.ops import VIEWS, eval_transform, views
from vitrail.data.settings import Preprocess
from vitrail.durations import Steps
from vitrail.errors import UsageError
from vitrail.evaluation.confidence import averaged
from vitrail.recipes.small import smoke

CROPPED = Preprocess(image_size=(8, 12), crop=0.5, resize="small")


def stacked(kind: Any, image: np.ndarray, preprocess: Preprocess = CROPPED) -> list[np.ndarray]:
    """The views of an image."""
    seen = views(kind, preprocess, eval_transform(preprocess))(image, np.random.default_rng(0))
    return np.split(seen, VIEWS[kind])


def test_ten_crops_are_those_of_torchvision() -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 40, 3), dtype=np.uint8)  # 16 x 24 is covered: not resized
    theirs = v2.TenCrop((8, 12))(torch.from_numpy(image).permute(2, 0, 1))
    expected = [crop.permute(1, 2, 0).numpy().tobytes() for crop in theirs]  # of the mirrored image in another order
    assert sorted(view.tobytes() for view in stacked("crops", image)) == sorted(expected)


def test_flip_is_the_image_and_its_mirror_image() -> None:
    image = np.random.default_rng(0).integers(0, 256, (30, 31, 3), dtype=np.uint8)
    one, other = stacked("flip", image)
    np.testing.assert_array_equal(one, eval_transform(CROPPED)(image, np.random.default_rng(0)))
    np.testing.assert_array_equal(other, one[:, ::-1])


@pytest.mark.parametrize(
    ("preprocess", "why"),
    [
        (Preprocess(resize="squash"), "images are resized to its size"),
        (Preprocess(resize="pad"), "images are padded to its size"),
        (Preprocess(crop=1.0), "its crop is 1"),
    ],
)
def test_crops_of_the_whole_image_are_refused(preprocess: Preprocess, why: str) -> None:
    with pytest.raises(UsageError, match=f"sees the whole image .{why}.. Use --tta flip"):
        views("crops", preprocess, eval_transform(preprocess))


@pytest.mark.parametrize("several", [False, True])
def test_probabilities_are_averaged_after_the_temperature(several: bool) -> None:
    logits = 300 * np.random.default_rng(0).normal(size=(4, 3, 5))  # [images, views, classes]; many underflow
    seen: list[int] = []

    def predict(images: Tensor) -> Tensor:
        seen.append(len(images))
        return images[:, :, 0, 0]

    images = torch.tensor(logits, dtype=torch.float32).permute(0, 2, 1)[..., None]  # one row of a channel per class
    found = averaged(predict, 3, 2.0, several=several)(images)
    assert torch.isfinite(found).all() and seen == [4, 4, 4]  # batches of the usual size
    one = (lambda z: expit(z)) if several else (lambda z: softmax(z, axis=2))
    expected = one(logits.astype(np.float32) / 2.0).mean(axis=1)
    shares = found.sigmoid() if several else found.softmax(dim=1)
    np.testing.assert_allclose(shares.numpy(), expected, atol=1e-6)


@pytest.mark.train
def test_evaluate_averages_both_views_of_digits_and_warns(tmp_path: Path) -> None:
    run = replace(smoke(), out=str(tmp_path), workers=0, device="cpu", precision="float32", duration=Steps(2))
    folder = vitrail.fit(run).folder
    how: dict[str, Any] = dict(device="cpu", precision="float32", engine="torch", workers=0)
    found = vitrail.evaluate(folder, tta="flip", **how)
    model = vitrail.load(folder)
    from vitrail.data.sources.open import open_data

    test: Any = open_data(run.data, seed=run.seed).test
    pixels = torch.from_numpy(np.stack([np.asarray(test[i].image) for i in range(len(test))])).permute(0, 3, 1, 2)
    with torch.no_grad():
        both = [model(one).double().numpy() / model.card.temperature for one in (pixels, pixels.flip(-1))]
    shares = np.mean([softmax(one, axis=1) for one in both], axis=0)
    assert found.results.nll == pytest.approx(-np.log(shares[range(len(test)), test.labels]).mean(), rel=1e-4)
    assert found.results.top1 == pytest.approx((shares.argmax(1) == test.labels).mean(), abs=0.003)
    said = " ".join(found.notes)
    assert "2 views of each image" in said and "images/s" in said and "trained without mirrored images" in said
    with pytest.raises(UsageError, match="images are resized to its size"):
        vitrail.evaluate(folder, tta="crops", **how)
    with pytest.raises(UsageError, match="prescribes what is seen"):
        vitrail.evaluate(folder, tmp_path, protocol="imagenet", tta="crops", **how)
