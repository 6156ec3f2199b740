"""The linear segmentation probe: scores against scikit-learn, upsampling against torch, and masks that are linear."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score

from vitrail.data.settings import IGNORED
from vitrail.training.pixel_head import fit_tokens
from vitrail.transfer.segmentation import PixelScores, TokenClassifier, confusions, predict_pixels

STEPS = 100


def test_scores_are_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 5, (3, 20, 30)).astype(np.uint8)
    predicted = np.where(rng.random(truth.shape) < 0.6, truth, rng.integers(0, 4, truth.shape)).astype(np.uint8)
    truth[rng.random(truth.shape) < 0.1] = IGNORED
    parts = [confusions(*pair, 6) for pair in zip(truth, predicted, strict=True)]  # class 5 is nowhere
    scores = PixelScores([*"abcdef"], np.sum(parts, axis=0))
    counted = truth != IGNORED
    pair = truth[counted], predicted[counted]
    assert (scores.confusion == confusion_matrix(*pair, labels=range(6))).all()
    iou = jaccard_score(*pair, labels=range(5), average=None)
    np.testing.assert_allclose(scores.iou[:5], iou)
    assert np.isnan(scores.iou[5]) and scores.miou == pytest.approx(iou.mean())
    assert scores.pixel_accuracy == pytest.approx(accuracy_score(*pair))
    assert scores.largest_share == pytest.approx(np.bincount(pair[0]).max() / len(pair[0]))


def test_a_class_that_is_only_predicted_has_an_iou_of_zero() -> None:
    truth, predicted = np.zeros((2, 2), np.uint8), np.array([[0, 0], [0, 1]], np.uint8)
    np.testing.assert_array_equal(PixelScores("ab", confusions(truth, predicted, 2)).iou, [0.75, 0])


@pytest.mark.parametrize("size", [(7, 9), (3, 4), (2, 5), (64, 31)])
def test_predictions_are_those_of_logits_that_torch_upsamples(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = TokenClassifier(8, 5).eval()
    torch.nn.init.normal_(model.linear.weight)
    tokens = torch.randn(3, 4, 8)
    with torch.no_grad():
        logits = F.interpolate(model(tokens[None]), size, mode="bilinear", align_corners=False)
    for at_a_time in (1, 1 << 24):
        monkeypatch.setattr("vitrail.evaluation.pixel_scores._LOGITS", at_a_time)
        assert (predict_pixels(model, tokens, *size) == logits[0].argmax(dim=0).numpy()).all()


def fitted(tokens: np.ndarray, truth: np.ndarray, seed: int) -> TokenClassifier:
    model = TokenClassifier(tokens.shape[-1], 3, seed)
    fit_tokens(model, tokens, truth, steps=STEPS, seed=seed)
    return model


def linear_masks(images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N, 6, 6, 8], and masks [N, 12, 12] whose class is the largest of three linear functions of a token."""
    directions = np.linalg.qr(np.random.default_rng(9).normal(size=(8, 8)))[0][:3]
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, 3, (images, 6, 6))
    tokens = rng.normal(size=(images, 6, 6, 8)) * 0.3 + 3 * directions[classes] + 50
    return tokens.astype(np.float32), classes.astype(np.uint8).repeat(2, 1).repeat(2, 2)


@pytest.mark.train
def test_a_mask_that_is_a_linear_function_of_tokens_is_recovered() -> None:
    tokens, truth = linear_masks(32, 0)
    hidden = truth.copy()
    hidden[:, :4] = IGNORED
    hidden[0] = IGNORED
    model = fitted(tokens, hidden, 1)
    asked, expected = linear_masks(8, 1)
    with torch.inference_mode():
        found = model(torch.from_numpy(asked)).argmax(dim=1).numpy()
    assert (found == expected[:, ::2, ::2]).all()
    again = fitted(tokens, hidden, 1)
    assert all(
        torch.equal(*pair) for pair in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )
    shuffled = fitted(np.random.default_rng(0).permutation(tokens.reshape(-1, 8)).reshape(tokens.shape), hidden, 0)
    with torch.inference_mode():
        guessed = shuffled(torch.from_numpy(asked)).argmax(dim=1).numpy()
    assert (guessed == expected[:, ::2, ::2]).mean() < 0.6
