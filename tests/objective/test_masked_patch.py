from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from masked_cases import batch, images, vit
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.vit import ViT
from vitrail.objective.masked_patch import MaskedPatchObjective, mean_colours
from vitrail.objective.masks import erase
from vitrail.objective.settings import MaskedPatch


def objective(model: ViT | None = None, **settings: Any) -> MaskedPatchObjective:
    return MaskedPatchObjective(model or vit(), MaskedPatch(**settings), seed=3)


def trained(found: MaskedPatchObjective) -> MaskedPatchObjective:
    """With a classifier that is not zero."""
    torch.manual_seed(1)
    nn.init.normal_(found.predict.weight, std=0.5)
    return found


@pytest.mark.parametrize("target", ["colour", "small"])
def test_a_zero_classifier_is_as_good_as_guessing(target: str) -> None:
    loss, count, metrics = objective(target=target)(batch(), step=0)
    assert count == 4
    assert float(loss.detach()) / count == pytest.approx(math.log(512), rel=1e-6)
    assert set(metrics) == {"colour"}


def test_zero_pixels_are_off_by_the_mean_square() -> None:
    found = objective(target="pixels")
    prepared = found.prepare(batch(), step=0)
    loss, _, _ = found.loss(prepared)
    expected = 0.0
    for image, (places, _) in zip(prepared.images.numpy(), prepared.targets.numpy(), strict=True):
        patches = image.reshape(3, 4, 8, 4, 8).transpose(1, 3, 2, 4, 0).reshape(16, -1)[places]
        expected += np.square(patches / 127.5 - 1).mean()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("target", ["colour", "small"])
def test_the_loss_is_minus_the_log_probability_of_the_true_colours(target: str) -> None:
    found = trained(objective(target=target)).eval()
    prepared = found.prepare(batch(), step=2)
    loss, _, metrics = found.loss(prepared)
    across = 4 if target == "small" else 1
    logits = found.outputs(prepared).detach().double().numpy().reshape(4, 8, across**2, 512)
    colours = mean_colours(prepared.images, 8, across).numpy()
    total = right = 0.0
    for image in range(4):
        wanted = colours[image][prepared.targets[image, 0].numpy()]
        z = logits[image]
        log = z - np.log(np.exp(z).sum(-1, keepdims=True))
        total -= np.take_along_axis(log, wanted[..., None], -1).mean()
        right += (z.argmax(-1) == wanted).mean()
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)
    assert float(metrics["colour"]) == pytest.approx(right)


def test_masked_pixels_do_not_reach_the_prediction_and_others_do() -> None:
    found = trained(objective(mask=1.0, other=0.0)).eval()
    prepared = found.prepare(batch(), step=0)
    before = found.outputs(prepared)
    hidden = torch.zeros(4, 16, dtype=torch.bool).scatter(1, prepared.targets[:, 0], True)
    noise = images(4, seed=9)
    for patches, same in ((hidden, True), (~hidden, False)):
        pixels = patches.view(4, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
        changed = torch.where(pixels, noise, prepared.images)
        after = found.outputs(type(prepared)(changed, prepared.labels, prepared.index, prepared.targets))
        assert torch.allclose(before, after, atol=1e-5) == same


def test_the_gradient_does_not_depend_on_how_the_batch_is_cut() -> None:
    def gradients(parts: int) -> list[Tensor]:
        found = trained(objective())
        for part in found.prepare(batch(6), step=4).split(parts):
            found(part, step=4)[0].backward()
        return [parameter.grad for parameter in found.parameters() if parameter.grad is not None]

    whole, cut = gradients(1), gradients(3)
    assert len(whole) == len(cut) > 10
    for ours, theirs in zip(whole, cut, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.train
def test_it_learns_the_colours_of_plain_images() -> None:
    plain = batch(8)
    corners = torch.cartesian_prod(*3 * [torch.tensor([0, 255], dtype=torch.uint8)])  # black, blue, ..., white
    plain.images[:] = corners[..., None, None]
    found = objective()
    optimizer = torch.optim.AdamW(found.parameters(), lr=1e-2)
    for step in range(60):
        loss, count, metrics = found(plain, step=step)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    assert float(metrics["colour"]) / count > 0.9  # guessing among 8 is right for 0.125


@pytest.mark.parametrize("target", ["colour", "small", "pixels"])
def test_what_it_shows(target: str) -> None:
    found = objective(target=target, mask=1.0, other=0.0).eval()
    prepared = found.prepare(batch(), step=0)
    seen = found.show(prepared)
    hidden = torch.zeros(4, 16, dtype=torch.bool).scatter(1, prepared.targets[:, 0], True)
    pixels = hidden.view(4, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3).expand(-1, 3, -1, -1)
    assert set(seen["mask"][pixels].tolist()) == {104, 216}
    for picture in seen.values():
        assert picture.dtype == torch.uint8
        assert torch.equal(picture[~pixels], prepared.images[~pixels])
    if target != "pixels":
        across = 4 if target == "small" else 1
        ours, theirs = (mean_colours(each, 8, across)[hidden] for each in (seen["target"], prepared.images))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("stem", ["linear", "hmlp"])
def test_masking_before_the_stem_is_masking_after_it(stem: str, norm: str) -> None:
    model = vit(stem=stem, stem_norm=norm)
    model.train(norm == "layer")  # LayerNorm: always; BatchNorm: with its running statistics
    hidden = torch.rand(4, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    whole = images()
    after, before = model.patches(whole), model.patches(erase(whole, hidden, 8))
    torch.testing.assert_close(after[~hidden], before[~hidden], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after[hidden], before[hidden], atol=1e-2)


@pytest.mark.parametrize("stem", ["levit", "early"])
def test_convolutional_stems_mix_patches_and_are_refused(stem: str) -> None:
    model = vit(stem=stem, stem_norm="layer")
    hidden = torch.zeros(1, 16, dtype=torch.bool)
    hidden[0, 5] = True
    whole = images(1)
    after, before = model.patches(whole), model.patches(erase(whole, hidden, 8))
    assert not torch.allclose(after[~hidden], before[~hidden], atol=1e-3)  # the reason
    with pytest.raises(UsageError, match="mask-after-stem"):
        MaskedPatchObjective(model, MaskedPatch(), 0)
    loss, _, _ = MaskedPatchObjective(model, MaskedPatch(mask_after_stem=True), 0)(batch(), step=0)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("changes", [{}, {"pool": "gap"}, {"positions": "2d", "registers": 2}, {"stem": "hmlp"}])
def test_the_two_steps_of_embedding_are_the_networks_own(changes: dict[str, Any]) -> None:
    model = vit(**changes).eval()
    whole = images()
    assert torch.equal(model.place(model.patches(whole), (4, 4)), model.embed(whole))


def test_refusals() -> None:
    with pytest.raises(UsageError, match=r"objective\.corrupt is 0"):
        objective(corrupt=0.0)
    with pytest.raises(UsageError, match="together at most 1"):
        objective(mask=0.9, other=0.2)
    with pytest.raises(UsageError, match="4 x 4"):
        MaskedPatchObjective(vit(patch=2, image_size=(8, 8)), MaskedPatch(target="small"), 0)
    with pytest.raises(UsageError, match="Vision Transformer"):
        MaskedPatchObjective(nn.Linear(2, 2), MaskedPatch(), 0)
    with pytest.raises(UsageError, match="axial"):
        MaskedPatchObjective(vit(block="axial", pool="gap"), MaskedPatch(), 0)
