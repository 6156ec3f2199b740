"""DINOv2 and Gram anchoring against their formulas in NumPy in float64, and what must not depend on what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from masked_cases import TRUE, Images, batch, vit
from test_sinkhorn import divided

from vitrail.durations import Percent, Steps
from vitrail.errors import UsageError
from vitrail.model.build import create
from vitrail.objective.base import Moment
from vitrail.objective.dinov2 import DINOv2Objective, gram_losses, koleo_losses
from vitrail.objective.masks import one_crop_masked
from vitrail.objective.settings import DINOv2
from vitrail.training.step import backward

TINY = DINOv2(
    outputs=24, hidden=32, bottleneck=12, local_crops=3, local_size=0.5, freeze_last_layer=Steps(0), gram_weight=2.0
)
EACH = [TINY, replace(TINY, patch_head="shared"), replace(TINY, centring="mean")]


def make(config: DINOv2 = TINY, **changes: Any) -> DINOv2Objective:
    """With a teacher and an anchor that are not the student, and centres."""
    ours = DINOv2Objective(vit(**changes), config, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for value in (*ours.parameters(), ours.centre, ours.patch_centre):
            value.add_(0.05 * torch.randn_like(value))
    return ours.train()


def log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def koleo(features: np.ndarray) -> float:
    """Mean over the points of minus the logarithm of the distance to the nearest other one (Sablayrolles et al.)."""
    points, found = unit(features), 0.0
    for one in range(len(points)):
        found -= np.log(min(np.linalg.norm(points[one] - points[two]) for two in range(len(points)) if two != one))
    return found / len(points)


def seen(ours: DINOv2Objective, network: Any, crop: Any, mask: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The class token and the patches of one crop, with [mask] embeddings at a mask."""
    patches = network.patches(crop[None]).clone()
    if mask is not None:
        patches[0, mask] = ours.mask
    tokens = network.encode(network.place(patches, (4, 4)), (4, 4))[0]
    return tokens[0], tokens[1:]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("config", EACH, ids=["separate", "shared", "mean"])
def test_the_four_losses_are_their_formulas(config: DINOv2, parts: int) -> None:
    ours = make(config)
    prepared = ours.prepare(batch(5), step=2)
    near, far = ours.crops(prepared)
    masks = prepared.targets[:, :2, 13:] > 0
    assert masks.shape == (5, 2, 16) and (masks.sum(2) > 0).sum(1).tolist() == [1] * 5
    own, its = ours.patch_head or ours.head, ours.teacher_patch_head or ours.teacher_head
    with torch.no_grad():
        student = [[seen(ours, ours.model, near[i, g], masks[i, g]) for g in range(2)] for i in range(5)]
        teacher = [[seen(ours, ours.teacher, near[i, g]) for g in range(2)] for i in range(5)]
        anchor = [[seen(ours, ours.anchor, near[i, g])[1] for g in range(2)] for i in range(5)]
        said = torch.stack([ours.teacher_head(token[None])[0] for pair in teacher for token, _ in pair])
        hidden = [its(teacher[i][g][1][masks[i, g]]) for i in range(5) for g in range(2)]
        guesses = [own(student[i][g][1][masks[i, g]]).double().numpy() / 0.1 for i in range(5) for g in range(2)]
        heads = [
            [ours.head(token[None])[0] for token, _ in student[i]] + [*ours.head(ours.model.features(far[i]))]
            for i in range(5)
        ]
    if config.centring == "sinkhorn":
        target, of_patches = divided(said, 0.04), divided(torch.cat(hidden), 0.04)
    else:
        target = np.exp(log_softmax((said - ours.centre).double().numpy() / 0.04))
        of_patches = np.exp(log_softmax((torch.cat(hidden) - ours.patch_centre).double().numpy() / 0.04))
    pairs = [
        -(target[2 * i + g] * log_softmax(heads[i][crop].double().numpy() / 0.1)).sum()
        for i in range(5)
        for g in range(2)
        for crop in range(5)
        if crop != g
    ]
    rows = np.split(of_patches, np.cumsum([len(each) for each in hidden])[:-1])
    ibot = sum(-(t * log_softmax(s)).sum() / len(t) for t, s in zip(rows, guesses, strict=True) if len(t)) / (2 * 5)
    spread = sum(koleo(np.stack([student[i][g][0].double().numpy() for i in range(5)])) for g in range(2))
    gram = 0.0
    for i, g in ((i, g) for i in range(5) for g in range(2)):
        one, two = (unit(tokens.double().numpy()) for tokens in (student[i][g][1], anchor[i][g]))
        gram += np.mean((one @ one.T - two @ two.T) ** 2) / 10

    before = ours.patch_centre.clone()
    outcome = backward(ours, batch(5), step=2, parts=parts, autocast=False)
    expected = {"DINO loss": np.mean(pairs), "iBOT loss": ibot, "KoLeo loss": spread, "Gram loss": gram}
    found = {name: outcome.metrics[name] / 5 for name in expected}
    assert found == pytest.approx(expected, rel=2e-4)
    total = sum(expected.values()) - 0.9 * expected["KoLeo loss"] + expected["Gram loss"]
    assert outcome.loss == pytest.approx(total, rel=2e-4)

    ours.after_step(TRUE)
    moved = before + 10 * (ours.patch_centre - before)  # the momentum is 0.9
    if config.centring == "mean":
        torch.testing.assert_close(moved, torch.cat(hidden).mean(0), rtol=0, atol=1e-5)
    else:  # that of this step's targets
        running = ((torch.cat(hidden) - moved) / 0.04).softmax(-1)
        torch.testing.assert_close(running.double(), torch.from_numpy(of_patches), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("config", "stem"),
    [*((config, "linear") for config in EACH), (TINY, "hmlp")],
    ids=["separate", "shared", "mean", "BatchNorm"],
)
def test_micro_batches_give_the_gradient_of_the_whole(config: DINOv2, stem: str) -> None:
    """The nearest image may be in another micro-batch."""
    found = []
    for parts in (1, 3):
        ours = make(replace(config, koleo_weight=1.0), stem=stem)
        backward(ours, batch(7), step=1, parts=parts, autocast=False)
        found.append({name: each.grad for name, each in ours.named_parameters() if each.grad is not None})
    whole, cut = found
    assert whole.keys() == cut.keys() and {"mask", "head.last.weight"} <= whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=2e-6 * max(float(value.abs().max()), 1.0))


def test_an_evaluation_does_not_depend_on_what_is_evaluated_together() -> None:
    ours, data = make().eval(), batch(4)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    whole, _, metrics = ours(data, step=-1)
    ones = (Images(*(part[n : n + 1] for part in (data.images, data.labels, data.index))) for n in range(4))
    single = sum(float(ours(one, step=-1)[0].detach()) for one in ones)
    assert float(whole.detach()) == pytest.approx(single, rel=1e-4) and "KoLeo loss" not in metrics
    ours.after_step(TRUE)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_teacher_student_and_anchor_begin_as_the_weights() -> None:
    model = vit()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    ours = DINOv2Objective(model, TINY, 0)
    assert ours.anchor is not None
    for network in (ours.model, ours.teacher, ours.anchor):
        assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    prepared = ours.prepare(batch(3), step=0)
    near, _ = ours.crops(prepared)
    same = ours._encoded(ours.model, near)[1]
    assert float(gram_losses(same, ours._encoded(ours.anchor, near)[1]).abs().max().detach()) < 1e-10
    backward(ours.train(), batch(3), step=0, parts=1, autocast=False)
    for part in (ours.teacher, ours.teacher_head, ours.teacher_patch_head, ours.anchor):
        assert part is not None and not any(each.requires_grad or each.grad is not None for each in part.parameters())
    assert all(each.grad is not None for each in ours.parameters() if each.requires_grad)


def test_the_anchor_becomes_the_teacher_of_a_step_once_also_after_a_resume() -> None:
    config = replace(TINY, gram_refresh=Steps(3), gram_start=Percent(20))
    ours = make(config)
    assert ours.anchor is not None
    anchor, teacher = (dict(network.named_parameters()) for network in (ours.anchor, ours.teacher))
    first = {name: value.clone() for name, value in anchor.items()}

    def moment(step: int) -> Moment:
        return Moment(done=step / 20, total=20, step=float(step))

    for step in range(6):
        ours.at(moment(step))
        with torch.no_grad():
            for value in teacher.values():
                value.fill_(float(step))  # as a step moves it
        expected = first if step < 3 else {name: torch.full_like(value, 2.0) for name, value in first.items()}
        assert all(torch.equal(value, expected[name]) for name, value in anchor.items()), step
        _, _, metrics = ours(batch(2), step=step)
        assert ("Gram loss" in metrics) == (step >= 4)  # a fifth of 20 steps
    resumed = make(config)
    resumed.load_state_dict(ours.state_dict())
    resumed.at(moment(5))
    kept = dict(resumed.anchor.named_parameters())  # type: ignore[union-attr]
    assert all(torch.equal(value, kept[name]) for name, value in anchor.items())
    resumed.at(moment(6))
    assert all(bool((value == 5).all()) for value in kept.values())


def test_equal_images_do_not_push_each_other_anywhere() -> None:
    features = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, -1.0]])[:, None].requires_grad_()
    losses = koleo_losses(features)
    (gradient,) = torch.autograd.grad(losses.sum(), features)
    assert bool(losses.isfinite().all()) and float(gradient.abs().max()) < 10
    assert torch.equal(gradient[1], torch.zeros(1, 2)) and float(losses.detach().max()) == pytest.approx(9.21, abs=0.01)


def test_masks_are_of_one_crop_and_of_shares_between_the_two() -> None:
    masks = one_crop_masked(3, 7, range(400), (8, 8), (0.1, 0.5))
    counts = masks.sum(2)
    assert (counts.min(1) == 0).all() and counts.max(1).min() >= 6 and counts.max() <= 32
    assert abs((counts[:, 0] > 0).mean() - 0.5) < 0.1 and abs(counts.max(1).mean() / 64 - 0.3) < 0.03
    again = one_crop_masked(3, 7, [17], (8, 8), (0.1, 0.5))
    assert (again[0] == masks[17]).all()


def test_networks_of_every_kind_learn_so() -> None:
    for changes in (dict(pool="gap"), dict(pool="gap", final_norm="pooled"), dict(stem="early"), dict(registers=2)):
        loss, _, _ = make(**changes)(batch(2), step=0)
        loss.backward()
        assert bool(loss.isfinite()), changes
    shown = make().eval().show(make().prepare(batch(2), step=0))
    assert {tuple(each.shape) for each in shown.values()} == {(2, 3, 128, 128)}
    hatched = [(shown[f"global crop {number}"][0] == 216).all(0).float().mean() for number in (1, 2)]
    assert sorted(float(share) > 0.01 for share in hatched) == [False, True]


def test_187_what_cannot_be_masked_or_has_no_common_head_is_refused() -> None:
    with pytest.raises(UsageError, match="objective dinov2 masks patches, so it needs a Vision Transformer"):
        DINOv2Objective(create("R50x1", units=(1, 1, 1, 1), width=8, image_size=(32, 32), classes=0), TINY, 0)
    with pytest.raises(UsageError, match=r"objective\.patch_head shared: the network has 32 features .* use separate"):
        make(replace(TINY, patch_head="shared"), pool="cls+gap")
    with pytest.raises(UsageError, match=r"objective\.mask_shares is \(0\.5, 0\.4\)"):
        replace(TINY, mask_shares=(0.5, 0.4))
