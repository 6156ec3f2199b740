"""DINO against its definition in NumPy, torch's weight norm, closed forms of its averages, and what must not happen."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from device_work import told
from dino_cases import BALANCED, TINY, make, taught
from masked_cases import TRUE, Images, batch, vit
from torch import Tensor

from vitrail.durations import Percent, Steps
from vitrail.errors import UsageError
from vitrail.model.build import create
from vitrail.objective.base import Moment
from vitrail.objective.dino import DINOObjective, Projection, WeightNormed
from vitrail.objective.settings import DINO
from vitrail.training.step import backward


def log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_the_loss_is_its_definition_crop_by_crop() -> None:
    ours = make()
    ours.at(Moment(done=0.25, total=100, per_epoch=10))
    prepared = ours.prepare(batch(5), step=2)
    loss, count, metrics = ours.loss(prepared)
    near, far = ours.crops(prepared)
    assert near.shape == (5, 2, 3, 32, 32) and far.shape == (5, 3, 3, 16, 16)
    warm = 0.04 + 0.03 * 25 / (30 * 10)  # a quarter of 100 steps, of 30 epochs of 10 steps
    total = agreed = entropy = 0.0
    with torch.no_grad():
        for image in range(5):
            shown = [*near[image], *far[image]]
            student = [ours.head(ours.model.features(crop[None]))[0].numpy().astype(np.float64) for crop in shown]
            teacher = [
                ours.teacher_head(ours.teacher.features(crop[None]))[0].numpy().astype(np.float64) for crop in shown[:2]
            ]
            pairs = []
            for g, answer in enumerate(teacher):
                target = np.exp(log_softmax((answer - ours.centre.numpy()) / warm))
                entropy -= float((target * np.log(target)).sum()) / 2 / np.log(24)
                for v, said in enumerate(student):
                    if v != g:
                        pairs.append(-(target * log_softmax(said / 0.1)).sum())
                        agreed += float(target.argmax() == said.argmax()) / 8
            assert len(pairs) == 8
            total += np.mean(pairs)
    assert count == 5
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)
    assert float(metrics["agreement"]) == pytest.approx(agreed, abs=1e-5)
    assert float(metrics["entropy"]) == pytest.approx(entropy, rel=1e-4)


def test_answers_and_loss_are_not_rounded_to_bfloat16() -> None:
    """Which keeps three digits: after division by 0.04, cosines would be known to a tenth."""
    ours = make()
    prepared = ours.prepare(batch(4), step=2)
    near, far = ours.crops(prepared)
    with torch.no_grad():
        exact = ours.loss(prepared)[0]
        answers, centre = (ours._taught(near), ours.centre)
        with torch.autocast("cpu", torch.bfloat16):
            loss, rounded, said = ours.loss(prepared)[0], ours._taught(near), ours._learned(near, far)
    for value in (loss, rounded, said):
        assert value.dtype == torch.float32
        assert (value != value.to(torch.bfloat16).float()).float().mean() > 0.9
    torch.testing.assert_close(rounded, answers, rtol=0, atol=0.03)
    assert float(loss) == pytest.approx(float(exact), rel=0.05) and centre.dtype == torch.float32


def test_the_last_layer_is_torchs_weight_norm() -> None:
    torch.manual_seed(0)
    ours = WeightNormed(6, 10, learns_gain=True).double()
    with torch.no_grad():
        ours.gain.uniform_(0.5, 2)
    theirs = torch.nn.Linear(6, 10, bias=False).double()
    torch.nn.utils.parametrizations.weight_norm(theirs)
    parameters = theirs.parametrizations.weight  # type: ignore[union-attr]
    with torch.no_grad():
        parameters.original0.copy_(ours.gain[:, None])
        parameters.original1.copy_(ours.weight)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    for layer in (ours, theirs):
        layer(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, parameters.original1.grad)
    assert ours.gain.grad is not None
    torch.testing.assert_close(ours.gain.grad[:, None], parameters.original0.grad)
    assert not WeightNormed(6, 10, learns_gain=False).gain.requires_grad
    assert not Projection(4, TINY).last.gain.requires_grad
    head = Projection(4, replace(TINY, norm_last_layer=False))
    assert head.last.gain.requires_grad
    assert head(torch.randn(7, 4)).abs().max() <= 1 + 1e-5  # cosines


@pytest.mark.parametrize("parts", [1, 3])
def test_centre_and_teacher_move_once_in_a_step_by_the_whole_batch(parts: int) -> None:
    ours = make()
    moment = Moment(done=0.3, total=10)
    ours.at(moment)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    mean = taught(ours, ours.prepare(batch(7), step=1)).double().mean(0)
    backward(ours, batch(7), step=1, parts=parts, autocast=False)
    assert torch.equal(ours.centre, before["centre"])  # not before the step is done
    with torch.no_grad():
        for parameter in (*ours.model.parameters(), *ours.head.parameters()):
            parameter.add_(0.1)
    ours.after_step(TRUE)
    torch.testing.assert_close(ours.centre.double(), 0.9 * before["centre"].double() + 0.1 * mean, rtol=0, atol=1e-6)
    momentum = 1 - 0.004 * (1 + math.cos(0.3 * math.pi)) / 2
    for student, teacher in (("model.", "teacher."), ("head.", "teacher_head.")):
        for name in before:
            if name.startswith(student):
                where = teacher + name.removeprefix(student)
                moved = ours.state_dict()[name].double()
                expected = momentum * before[where].double() + (1 - momentum) * moved
                torch.testing.assert_close(ours.state_dict()[where].double(), expected, rtol=0, atol=1e-6)
    centre = ours.centre.clone()
    ours.after_step(TRUE)  # no answers since
    assert torch.equal(ours.centre, centre)


@pytest.mark.parametrize("config", [TINY, BALANCED])
def test_a_device_that_decides_moves_the_same_teacher(config: DINO) -> None:
    here, there, skipped = (make(config=config, stem="hmlp") for _ in range(3))
    before = {name: value.clone() for name, value in skipped.state_dict().items() if name.startswith("teacher")}
    for ours, finite in ((here, TRUE), (there, told(True)), (skipped, told(False))):
        backward(ours, batch(6), step=1, parts=2, autocast=False)
        with torch.no_grad():
            for parameter in (*ours.model.parameters(), *ours.head.parameters()):
                parameter.add_(0.1 * finite)  # a step that is not finite changes no weights
        assert ours._total is not None
        ours._total = ours._total / (1.0 if finite else 0.0)
        ours.after_step(finite)
    for name, value in there.state_dict().items():
        torch.testing.assert_close(value, here.state_dict()[name], rtol=1e-6, atol=1e-6)
    assert torch.equal(skipped.centre, make(config=config, stem="hmlp").centre)
    learned = [name for name in before if "running" not in name and "tracked" not in name]  # restored by the step
    assert all(torch.equal(skipped.state_dict()[name], before[name]) for name in learned) and len(learned) > 20


@pytest.mark.parametrize("config", [TINY, BALANCED])
def test_a_step_that_begins_again_counts_its_answers_once(config: DINO) -> None:
    """As after running out of memory, with half of the micro-batches done."""
    once, again = make(config=config), make(config=config)
    backward(once, batch(6), step=1, parts=1, autocast=False)
    again.loss(again.before_step(again.prepare(batch(6), step=1), 2).split(2)[0])
    backward(again, batch(6), step=1, parts=2, autocast=False)
    for ours in (once, again):
        ours.after_step(TRUE)
    torch.testing.assert_close(once.centre, again.centre, rtol=0, atol=1e-7)


def test_what_is_not_training_leaves_the_centre_alone() -> None:
    ours = make().eval()
    before = ours.centre.clone()
    ours(batch(4), step=-1)
    ours.after_step(TRUE)
    assert torch.equal(ours.centre, before)


def test_nothing_learns_but_the_student() -> None:
    ours = make()
    ours(batch(4), step=0)[0].backward()
    for part in (ours.teacher, ours.teacher_head):
        assert not any(parameter.requires_grad or parameter.grad is not None for parameter in part.parameters())
    names = [name for name, parameter in ours.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert names == []
    assert ours.evaluated is ours.teacher
    assert {name.split(".")[0] for name in ours.state_dict()} == {"model", "head", "teacher", "teacher_head", "centre"}


def gradients(parts: int, config: DINO) -> dict[str, Tensor]:
    ours = make(config=config)
    backward(ours, batch(7), step=1, parts=parts, autocast=False)
    return {name: value.grad for name, value in ours.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("config", [TINY, BALANCED])
def test_micro_batches_give_the_gradient_of_the_whole(config: DINO) -> None:
    whole, cut = gradients(1, config), gradients(3, config)
    assert whole.keys() == cut.keys() and len(whole) > 10
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=1e-6 * max(float(value.abs().max()), 1.0))


def test_the_last_layer_is_frozen_at_first() -> None:
    ours = make(config=replace(TINY, freeze_last_layer=Percent(10), norm_last_layer=False))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    before, gain = (parameter.detach().clone() for parameter in (ours.head.last.weight, ours.head.last.gain))
    for step in range(2):
        ours.at(Moment(done=0.09 + 0.01 * step, total=100))
        backward(ours, batch(3), step=step, parts=1, autocast=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert torch.equal(ours.head.last.weight, before) == (step == 0)
        assert torch.equal(ours.head.last.gain, gain) == (step == 0)


def test_schedules_are_the_papers() -> None:
    ours = make(config=replace(TINY, temperature_warmup=Percent(50)))
    for done, temperature, momentum in ((0.0, 0.04, 0.996), (0.25, 0.055, None), (0.5, 0.07, 0.998), (1.0, 0.07, 1.0)):
        ours.at(Moment(done=done, total=1000))
        assert ours.temperature == pytest.approx(temperature)
        assert momentum is None or ours.momentum == pytest.approx(momentum)
    assert make(config=replace(TINY, temperature_warmup=Steps(0))).temperature == 0.07


def test_a_teacher_drops_nothing_and_takes_running_statistics() -> None:
    ours = make(stem="hmlp", dropout=0.5)
    prepared = ours.prepare(batch(4), step=0)
    first, second = (ours._taught(ours.crops(prepared)[0]) for _ in range(2))
    assert torch.equal(first, second)
    ours(prepared, step=0)
    ours.after_step(TRUE)
    norms = [
        tuple(m.running_mean for m in part.modules() if isinstance(m, torch.nn.BatchNorm2d))
        for part in (ours.model, ours.teacher)
    ]
    assert norms[0] and all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*norms, strict=True))


def coloured(count: int = 8) -> Images:
    """Images that differ: each of one colour, with a little noise."""
    rng = torch.Generator().manual_seed(0)
    colours = torch.randint(0, 230, (count, 3, 1, 1), generator=rng)
    noise = torch.randint(0, 25, (count, 3, 32, 32), generator=rng)
    return Images((colours + noise).to(torch.uint8), torch.zeros(count, dtype=torch.int64), torch.arange(count))


def collapse(config: DINO, steps: int = 40) -> tuple[float, float]:
    """Train on a few images; return the entropy of each answer and of their mean, as shares of the largest."""
    torch.manual_seed(0)
    ours = DINOObjective(vit(depth=1), replace(config, local_crops=1), 0).train()
    optimizer = torch.optim.AdamW([p for p in ours.parameters() if p.requires_grad], lr=3e-3)
    for step in range(steps):
        ours.at(Moment(done=step / steps, total=steps))
        backward(ours, coloured(), step=step, parts=1, autocast=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ours.after_step(TRUE)
    prepared = ours.prepare(coloured(), step=-1)
    target = ((taught(ours, prepared) - ours.centre) / ours.temperature).softmax(-1).double()
    each = torch.special.entr(target).sum(-1).mean()
    mean = torch.special.entr(target.mean(0)).sum()
    return float(each) / math.log(config.outputs), float(mean) / math.log(config.outputs)


@pytest.mark.train
def test_sharpening_and_centring_keep_answers_from_collapsing() -> None:
    """Section 5.3: without centring one output wins, without sharpening all outputs are alike."""
    still = dict(jitter=0.0, blur=0.0, temperature_warmup=Steps(0), teacher_momentum=0.9)
    quick = replace(TINY, teacher_temperature=(0.04, 0.04), **still)  # type: ignore[arg-type]
    each, mean = collapse(quick)
    assert each < 0.9 and mean > each + 0.05  # sharp, and not the same for all
    each, _ = collapse(replace(quick, teacher_temperature=(1.0, 1.0)))
    assert each > 0.99
    _, mean = collapse(replace(quick, centre_momentum=1.0))
    assert mean < 0.1
    each, mean = collapse(replace(quick, centring="sinkhorn"))
    assert each < 0.9 and mean > each + 0.05


def test_sizes_of_crops_follow_network_patch_and_images() -> None:
    ours = make(config=replace(TINY, local_size=96 / 224))
    for side, large, small in ((32, 32, 16), (64, 32, 16), (16, 16, 8)):  # as it is, a larger view, growing images
        near, far = ours.crops(ours.prepare(batch(2, side), step=0))
        assert near.shape[-2:] == (large, large) and far.shape[-2:] == (small, small)
    fast = make(config=replace(TINY, global_size=0.5, local_size=0.5))
    near, far = fast.crops(fast.prepare(batch(2, 32), step=0))
    assert near.shape[-2:] == (16, 16) and far.shape[-2:] == (8, 8)
    alone = make(config=replace(TINY, local_crops=0))
    loss, _, _ = alone(batch(2), step=0)
    assert alone.crops(alone.prepare(batch(2), step=0))[1].shape[1] == 0 and loss > 0


def test_networks_of_every_kind_can_learn_so() -> None:
    ours = DINOObjective(create("R50x1", units=(1, 1, 1, 1), width=8, image_size=(32, 32), classes=0), TINY, 0)
    loss, count, _ = ours(batch(3), step=0)
    loss.backward()
    assert count == 3 and bool(loss.isfinite())
    assert len(ours.eval().show(ours.prepare(batch(3), step=0))) == 6
    for changes in (dict(pool="gap"), dict(positions="sincos"), dict(positions="relative_bias"), dict(pool="map")):
        loss, _, _ = make(**changes)(batch(2), step=0)
        assert bool(loss.isfinite())


def test_the_pictures_are_what_the_networks_see() -> None:
    ours = make().eval()
    prepared = ours.prepare(batch(3), step=0)
    pictures = ours.show(prepared)
    titles = list(pictures)
    assert titles[0] == "input" and titles[-2:] == ["prediction", "target"]
    assert {tuple(picture.shape) for picture in pictures.values()} == {(3, 3, 128, 128)}
    assert all(picture.dtype == torch.uint8 for picture in pictures.values())
    near, _ = ours.pictures(prepared)
    large = near[:, 0].round().clamp(0, 255).to(torch.uint8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert torch.equal(pictures["global crop 1"], large)
    outline = (pictures["input"] != prepared.images.repeat_interleave(4, 2).repeat_interleave(4, 3)).any(1)
    assert 0.05 < outline.float().mean() < 0.6
    # the teacher's strongest output has the first bar, and no bar is higher than those before it
    blue = torch.tensor([30, 90, 160], dtype=torch.uint8)[:, None, None]
    heights = (pictures["target"] == blue).all(1).sum(1)[:, 4::10].float()[:, :12]
    assert (heights[:, 1:] <= heights[:, :-1]).all() and (heights[:, 0] > 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(outputs=1), r"objective\.outputs is 1; it must be from 2 to 1,048,576"),
        (dict(view=0.5), r"objective\.view is 0\.5"),
        (dict(global_scale=(0.5, 0.4)), r"objective\.global_scale is \(0\.5, 0\.4\)"),
        (dict(teacher_temperature=(0.0, 0.04)), r"objective\.teacher_temperature"),
        (dict(local_size=1.5), r"objective\.local_size"),
        (dict(global_size=0.0), r"objective\.global_size"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DINOObjective(vit(), replace(TINY, **change), 0)


def test_the_teacher_begins_as_the_student() -> None:
    model = vit()
    ours = DINOObjective(deepcopy(model), TINY, 0)
    for name, value in model.state_dict().items():
        assert torch.equal(ours.teacher.state_dict()[name], value)
    loss, count, _ = ours.eval()(batch(4), step=0)
    assert 0 < float(loss.detach()) / count < 2 * math.log(24)
