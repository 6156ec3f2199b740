"""Learning from a teacher: its losses, what it sees, and runs that have one."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from vitrail.data.labels.numbers import TargetScale
from vitrail.data.settings import Augment, Bands, Data, Preprocess
from vitrail.durations import Epochs, Percent
from vitrail.errors import CheckpointError, UsageError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.objective.base import RunFacts
from vitrail.objective.distillation import DistillationObjective, Teacher
from vitrail.objective.settings import MAE, Distill, Supervised
from vitrail.training import loop
from vitrail.training import step as stepping
from vitrail.training.checkpoints import checkpoint
from vitrail.training.guard import Interrupted
from vitrail.training.run import Average, Model, Run
from vitrail.training.step import backward
from vitrail.weights.card import Card
from vitrail.weights.load import load, read_card, weights_fingerprint
from vitrail.weights.save import save

SIDE, CLASSES = 8, 10
TINY: dict[str, Any] = dict(depth=1, heads=2, mlp_dim=32, patch=4, classes=CLASSES)
STUDENT = ViTConfig.of(**TINY, width=16, image_size=(SIDE, SIDE))
TEACHER = ViTConfig.of(**TINY, width=24, image_size=(16, 16), mean=(0.2, 0.3, 0.4), std=(0.5, 0.4, 0.3))


def network(config: ViTConfig, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model: Any = build(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.0 if parameter.ndim > 1 else 0.5, std=0.2)
    return model.eval()


@dataclass
class Images:
    images: Tensor
    labels: Tensor
    index: Tensor


def batch(count: int = 6) -> Images:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    return Images(pixels, torch.arange(count) % CLASSES, torch.arange(count))


def objective(student: Any, teacher: Any, distill: Distill, columns: Any = None, **task: Any) -> DistillationObjective:
    task = {"augment": Augment(), "classes": CLASSES, **task}
    return DistillationObjective(
        student, Supervised(), RunFacts(**task), distill, Teacher(teacher, "abc", columns)
    ).train()


# losses, against torch's own


def seen(teacher: Any, images: Tensor) -> Tensor:
    """The teacher's logits for images of its own size, normalised here with its own statistics."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (TEACHER.mean, TEACHER.std))
    return teacher((images.float() / 255 - mean) / std)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_logits_learn_from_a_teacher_of_the_same_size(kind: Any) -> None:
    student, teacher = network(STUDENT), network(replace(TEACHER, image_size=(SIDE, SIDE)), 1)
    made = objective(student, teacher, Distill(kind=kind, weight=0.3, temperature=2.0))
    images, labels = batch().images, batch().labels
    loss, count, _ = made(batch(), step=0)
    with torch.no_grad():
        logits, known = student(images), seen(teacher, images)
    if kind == "soft":
        pair = (F.log_softmax(logits / 2, -1), F.softmax(known / 2, -1))
        term = 4 * F.kl_div(*pair, reduction="sum")
    else:
        term = F.cross_entropy(logits, known.argmax(-1), reduction="sum")
        assert (known.argmax(-1) != labels).any()
    expected = 0.7 * F.cross_entropy(logits, labels, reduction="sum") + 0.3 * term
    assert count == 6
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-4, atol=1e-4)
    # nothing of the teacher is trained or saved
    assert made.state_dict().keys() == {f"model.{name}" for name in student.state_dict()}
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_distillation_token_learns_from_the_teacher_and_the_class_token_from_labels() -> None:
    student, teacher = network(STUDENT.changed(distilled=True)), network(replace(TEACHER, image_size=(SIDE, SIDE)), 1)
    made = objective(student, teacher, Distill(kind="hard"))
    features = student.features(batch().images)
    own, pupil = student.head(features[:, :16]), student.head_dist(features[:, 16:])
    target = seen(teacher, batch().images).argmax(-1)
    # DeiT, Eq. 3
    expected = (
        F.cross_entropy(own, batch().labels, reduction="sum") / 2 + F.cross_entropy(pupil, target, reduction="sum") / 2
    )
    torch.testing.assert_close(made(batch(), step=0)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("distance", ["cosine", "mse"])
def test_features_of_another_width_are_projected(distance: Any) -> None:
    student, teacher = network(STUDENT), network(replace(TEACHER, image_size=(SIDE, SIDE)), 1)
    made = objective(student, teacher, Distill(kind="features", features=distance, weight=1.0))
    assert made.state_dict().keys() - {"projection.weight", "projection.bias"} == {
        f"model.{n}" for n in student.state_dict()
    }
    assert made.projection is not None and made.projection.weight.shape == (24, 16)
    projected = student.features(batch().images) @ made.projection.weight.T + made.projection.bias
    known = teacher.features(batch().images)
    if distance == "cosine":
        expected = (1 - F.normalize(projected, dim=-1).mul(F.normalize(known, dim=-1)).sum(-1)).sum()
    else:
        a, b = ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, correction=0) for x in (projected, known))
        expected = (a - b).square().mean(-1).sum()
    loss = made(batch(), step=0)[0]
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    loss.backward()
    assert made.projection.weight.grad is not None and student.stem.weight.grad.any()


# what the teacher sees


def test_the_teacher_sees_the_student_s_pixels_at_its_own_size_after_mixing() -> None:
    student, teacher = network(STUDENT), network(TEACHER, 1)
    made = objective(student, teacher, Distill(), augment=Augment(mixup=0.5), seed=3)
    inputs: list[Tensor] = []
    for model in (student, teacher):
        model.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        original = model.features
        model.features = lambda images, original=original: (inputs.append(images), original(images))[1]
    prepared = made.prepare(batch(), step=5)
    assert not torch.equal(prepared.images, batch().images)  # mixed
    made.loss(made.before_step(prepared, 1))
    mine = next(images for images in inputs if images.shape[-1] == SIDE)
    theirs = next(images for images in inputs if images.shape[-1] == 16)
    assert torch.equal(mine, prepared.images) and theirs.dtype == torch.uint8
    # the same image, enlarged: its means over 2 x 2 cells are near its pixels, which are noise
    near = F.avg_pool2d(theirs.float(), 2).flatten(), mine.float().flatten()
    assert torch.corrcoef(torch.stack(near))[0, 1] > 0.97


def test_the_gradient_does_not_depend_on_micro_batches_and_the_teacher_is_asked_once() -> None:
    def gradient(parts: int) -> tuple[Tensor, int]:
        student, teacher = network(STUDENT), network(TEACHER, 1)
        made, asked = objective(student, teacher, Distill()), []
        teacher.register_forward_pre_hook(lambda _, args: asked.append(len(args[0])))
        backward(made, batch(), step=0, parts=parts, autocast=False)
        assert student.head.weight.grad is not None
        return student.head.weight.grad, sum(asked)

    (whole, once), (cut, also) = gradient(1), gradient(3)
    assert once == also == 6
    torch.testing.assert_close(whole, cut, rtol=1e-4, atol=1e-6)


def test_classes_in_another_order_are_matched_by_name() -> None:
    teacher = network(replace(TEACHER, image_size=(SIDE, SIDE)), 1)
    columns = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    moved = Teacher(teacher, "", [[place] for place in columns])(batch().images, features=False)
    with torch.no_grad():
        assert torch.equal(moved, teacher(batch().images)[:, columns])


def test_a_teacher_may_know_parts_of_a_class_and_not_all_classes() -> None:
    teacher = network(replace(TEACHER, image_size=(SIDE, SIDE)), 1)
    known = Teacher(teacher, "", [[3], [], [0, 5, 9], [], [2, 1]])
    taught = known(batch().images, features=False)
    with torch.no_grad():
        shares = teacher(batch().images).softmax(1)
    wanted = torch.stack([shares[:, 3], shares[:, [0, 5, 9]].sum(1), shares[:, [2, 1]].sum(1)], 1)
    torch.testing.assert_close(taught.softmax(1), wanted / wanted.sum(1, keepdim=True))
    assert known.outputs == 3 and known.known is not None and known.known.tolist() == [0, 2, 4]


# runs


def teacher_in(folder: Path, config: ViTConfig = TEACHER, seed: int = 1, names: list[str] | None = None) -> Path:
    model = network(config, seed)
    names = [str(digit) for digit in range(config.classes)] if names is None else names
    model.card = Card(config, names)
    return save(model, folder, overwrite=True).path


def tiny(out: Path, **changes: Any) -> Run:
    """Two epochs of four steps on handwritten digits."""
    run = Run(
        out=str(out),
        data=Data(path="digits", subset=70, holdout=0.1),
        model="Ti/4",
        vit=Model(width=16, depth=1, heads=2, mlp_dim=32),
        augment=Augment(crop="pad", pad=1, mixup=0.5),
        average=Average(kind="ema", decay=0.9),
        teacher=str(out / "teacher"),
        duration=Epochs(2),
        evaluate_every=Percent(50),
        checkpoint_every=Percent(50),
        batch_size=16,
        precision="float32",
        workers=0,
        device="cpu",
    )
    return replace(run, **changes)


def interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start a run, send it SIGTERM within step 2, and return its folder."""
    original = stepping.seed_step

    def seed_step(seed: int, at: int, rank: int) -> None:
        if at == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        original(seed, at, rank)

    with monkeypatch.context() as patch:
        patch.setattr(stepping, "seed_step", seed_step)
        with pytest.raises(Interrupted):
            loop.fit(run)
    return max(Path(run.out).glob("train-*"), key=lambda path: int(path.name.split("-")[1]))


@pytest.mark.train
def test_a_run_with_a_teacher_is_resumed_to_the_bit_and_only_with_this_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = teacher_in(tmp_path / "teacher")
    run = tiny(tmp_path, distill=Distill(kind="features"))
    whole = loop.fit(run).folder
    folder = interrupted(run, monkeypatch)
    other = teacher_in(tmp_path / "other", seed=2)
    with pytest.raises(CheckpointError, match=r"teacher: '[0-9a-f]{16}' there, '[0-9a-f]{16}' here"):
        loop.fit(replace(run, teacher=str(other)), resume=folder)
    with pytest.raises(CheckpointError, match=r"distill.weight: 0.5 there, 0.9 here"):
        loop.fit(replace(run, distill=Distill(kind="features", weight=0.9)), resume=folder)
    moved = (tmp_path / "teacher").rename(tmp_path / "moved")  # the same weights in another place
    loop.fit(replace(run, teacher=str(moved)), resume=folder)
    for name in ("model", "state"):
        paths = [checkpoint.latest_valid(each / "checkpoints") for each in (whole, folder)]
        expected, found = (load_file(path / f"{name}.safetensors") for path in paths if path is not None)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert read_card(whole).provenance["teacher_hash"] == weights_fingerprint(moved)
    assert read_card(whole).provenance["teacher"] == teacher.name  # a card names no folders
    assert load(whole).config.width == 16
    assert "features, weight 0.5, 16 x 16 px" in json.loads((whole / "run.json").read_text())["decisions"]["teacher"]


@pytest.mark.train
@pytest.mark.parametrize("kind", ["soft", "features"])
def test_without_augmentation_the_teacher_sees_each_image_once_and_the_student_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """The batch has all images, so that the teacher's numbers do not depend on what else is in its batch."""
    asked: list[int] = []
    original = Teacher.__call__

    def ask(self: Teacher, images: Tensor, *, features: bool) -> Tensor:
        asked.append(len(images))
        return original(self, images, features=features)

    monkeypatch.setattr(Teacher, "__call__", ask)
    teacher_in(tmp_path / "teacher")
    fixed = Augment(crop="center", flip=False)
    run = tiny(tmp_path, augment=fixed, batch_size=70, accumulate=1, duration=Epochs(3), distill=Distill(kind=kind))
    weights = []
    for cache in ("kept", "kept", "nowhere"):
        monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / cache))
        if cache == "nowhere":  # a file in place of the folder
            (tmp_path / cache).write_text("")
        folder = loop.fit(run).folder
        path = checkpoint.latest_valid(folder / "checkpoints")
        assert path is not None
        weights.append(load_file(path / "model.safetensors"))
    images = json.loads((folder / "run.json").read_text())["data"]["images"]["train"]
    assert asked == [images] * 4  # once, never, and in each of three epochs
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in weights[0])
    kept = f"outputs are kept in {tmp_path / 'nowhere' / 'teachers'}"
    assert kept in json.loads((folder / "run.json").read_text())["decisions"]["teacher"]


def test_teachers_that_cannot_teach_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    place = tmp_path / "teacher"
    teacher_in(place, names=[*"012345678", "ten"])
    message = "has 10 classes, and the data have 10 others: 'ten' is only in the teacher, '9' is only in the data"
    with pytest.raises(UsageError, match=message):
        loop.fit(tiny(tmp_path))
    teacher_in(place, replace(TEACHER, classes=3), names=[])
    with pytest.raises(UsageError, match=r"has 3 classes, and the data have 10. Give a teacher for the classes"):
        loop.fit(tiny(tmp_path))
    teacher_in(place, replace(TEACHER, channels=1, mean=(0.5,), std=(0.5,)))
    with pytest.raises(UsageError, match="takes images of 1 channels, and these have 3"):
        loop.fit(tiny(tmp_path))
    banded = network(TEACHER)
    bands = Bands("16", mean=(1.0, 2.0, 3.0), std=(1.0, 1.0, 1.0), low=(0.0, 0.0, 0.0), high=(9.0, 9.0, 9.0))
    banded.card = Card(TEACHER, [str(digit) for digit in range(CLASSES)], Preprocess((16, 16), bands=bands))
    save(banded, place, overwrite=True)
    with pytest.raises(UsageError, match="reads other bands or normalises them by other statistics than this run"):
        loop.fit(tiny(tmp_path))
    several = network(TEACHER)
    several.card = Card(TEACHER, [str(digit) for digit in range(CLASSES)], thresholds=[0.5] * CLASSES)
    save(several, place, overwrite=True)
    with pytest.raises(UsageError, match=r"soft needs one label for each image, .* use distill.kind features"):
        loop.fit(tiny(tmp_path))
    scale = TargetScale((0.0,) * CLASSES, (1.0,) * CLASSES)
    others = {"numbers": network(TEACHER), "segmentation": network(TEACHER.changed(segmentation="linear"))}
    for task, other in others.items():
        about = {"scale": scale} if task == "numbers" else {}
        other.card = Card(other.config, [str(digit) for digit in range(CLASSES)], **about)
        save(other, place, overwrite=True)
        for kind in ("soft", "hard"):
            with pytest.raises(UsageError, match=f"teacher, which predicts {task}. Otherwise use distill.kind feat"):
                loop.fit(tiny(tmp_path, distill=Distill(kind=kind)))
    with pytest.raises(UsageError, match=r"objective mae has no labels .*: leave out teacher"):
        loop.fit(tiny(tmp_path, objective=MAE(), augment=Augment()))
    with pytest.raises(UsageError, match="there is none: name it with --teacher MODEL"):
        loop.fit(tiny(tmp_path, teacher=None, distill=Distill(weight=0.9)))
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
