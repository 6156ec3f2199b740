"""The loss of pixels is torch's own of the enlarged logits of the whole batch, however the batch is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import confusion_matrix, jaccard_score
from torch import nn

from vitrail.data.loading.loader import Batch
from vitrail.data.settings import IGNORED
from vitrail.evaluation.pixel_scores import PREDICTED, RIGHT, TRUE, PixelResults, pixel_classes
from vitrail.model.build import build, freeze
from vitrail.model.variants import ViTConfig
from vitrail.objective.base import RunFacts
from vitrail.objective.segmentation import SegmentationObjective
from vitrail.objective.settings import Segmentation
from vitrail.training.step import backward

CLASSES, SIZE = 5, (16, 24)


def network(kind: str, seed: int = 0) -> nn.Module:
    """A small network whose head does not begin at zero."""
    torch.manual_seed(seed)
    config = ViTConfig(
        width=16,
        depth=3,
        heads=2,
        mlp_dim=32,
        patch=8,
        image_size=SIZE,
        classes=CLASSES,
        pool="gap",
        segmentation=kind,  # type: ignore[arg-type]
    )
    model = build(config)
    nn.init.normal_(model.head.linear.weight)  # type: ignore[union-attr, arg-type]
    return model


def batch(images: int = 6) -> Batch:
    random = np.random.default_rng(0)
    masks = random.integers(0, CLASSES, (images, *SIZE)).astype(np.uint8)
    masks[random.random(masks.shape) < 0.3] = IGNORED
    masks[0] = IGNORED  # an image of which no pixel counts
    masks[1, :2] = IGNORED
    pixels = torch.from_numpy(random.integers(0, 256, (images, 3, *SIZE), np.uint8))
    return Batch(pixels, torch.from_numpy(masks), torch.arange(images))


def objective(model: nn.Module) -> SegmentationObjective:
    made = Segmentation().build(model, RunFacts(classes=CLASSES))
    assert isinstance(made, SegmentationObjective)
    return made


@pytest.mark.parametrize("parts", [1, 2, 6])
@pytest.mark.parametrize("kind", ["linear", "layers"])
def test_loss_and_gradient_are_those_of_torch_over_the_whole_batch(kind: str, parts: int) -> None:
    model, given = network(kind), batch()
    logits = F.interpolate(model(given.images), SIZE, mode="bilinear", align_corners=False)
    expected = F.cross_entropy(logits, given.labels.long(), ignore_index=IGNORED)
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    sums = backward(objective(model), given, step=0, parts=parts, autocast=False)
    assert sums.loss == pytest.approx(expected.item(), rel=1e-5)
    counted = given.labels != IGNORED
    right = (logits.argmax(1) == given.labels)[counted].double().mean().item()
    assert sums.metrics["pixel_accuracy"] / sums.count == pytest.approx(right, rel=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "layers"])
def test_a_frozen_copy_computes_the_same_maps(kind: str) -> None:
    model, images = network(kind).eval(), batch().images
    with torch.inference_mode():
        expected = model(images)
        assert expected.shape == (6, CLASSES, *((2, 3) if kind == "linear" else (8, 12)))
        torch.testing.assert_close(freeze(model)(images), expected, rtol=1e-4, atol=1e-5)
        larger = model(torch.zeros(1, 3, 32, 24, dtype=torch.uint8))
    assert larger.shape[-2:] == ((4, 3) if kind == "linear" else (16, 12))


def results(truth: np.ndarray, predicted: np.ndarray) -> PixelResults:
    """The results of images [N, H, W] whose true and predicted classes these are."""
    pixels = np.zeros((len(truth), 3, CLASSES), np.int64)
    for row, (true, found) in enumerate(zip(truth, predicted, strict=True)):
        counts = true != IGNORED
        for k in range(CLASSES):
            pixels[row, RIGHT, k] = ((true == k) & (found == k)).sum()
            pixels[row, TRUE, k] = (true == k).sum()
            pixels[row, PREDICTED, k] = ((found == k) & counts).sum()
    return PixelResults(list("abcde"), np.arange(len(truth)), pixels, np.zeros(len(truth)))


def test_scores_are_those_of_scikit_learn() -> None:
    random = np.random.default_rng(1)
    truth = random.integers(0, 4, (5, 9, 7)).astype(np.uint8)  # the last class occurs nowhere
    truth[random.random(truth.shape) < 0.2] = IGNORED
    predicted = random.integers(0, 4, truth.shape).astype(np.uint8)
    found, counted = results(truth, predicted), truth != IGNORED
    expected = jaccard_score(truth[counted], predicted[counted], average=None)
    np.testing.assert_allclose(found.iou[:4], expected)
    assert np.isnan(found.iou[4]) and found.miou == pytest.approx(expected.mean())
    matrix = confusion_matrix(truth[counted], predicted[counted])
    assert found.pixel_accuracy == pytest.approx(np.trace(matrix) / matrix.sum())
    assert found.largest_share == pytest.approx(matrix.sum(1).max() / matrix.sum())


def test_pixels_have_the_class_of_the_logits_that_torch_enlarges() -> None:
    logits = torch.randn(CLASSES, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(logits[None], (31, 45), mode="bilinear", align_corners=False)[0].argmax(0)
    assert np.array_equal(pixel_classes(logits, 31, 45), expected.numpy())
