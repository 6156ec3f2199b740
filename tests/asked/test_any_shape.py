"""`--preprocess.resize native`: the run, the network, the files and the answers that come out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.config import from_yaml
from vitrail.data.images.native import Patches
from vitrail.data.images.ops import shown_transform
from vitrail.data.sources.open import open_split
from vitrail.errors import UsageError
from vitrail.inspection.pictures import Pictures, stack
from vitrail.recipes.asked import Asked
from vitrail.recipes.decide import decide as choose_run
from vitrail.recipes.known import Known
from vitrail.server.served_model import AttentionQuery, ServedModel
from vitrail.training.decide import Decision, decide
from vitrail.training.facts import Facts
from vitrail.training.run import Run

SHAPES = ((96, 60), (60, 96), (96, 96), (40, 130))
NATIVE = {"preprocess": {"resize": "native"}, "model": "Ti/16", "vit": {"depth": 1}, "image_size": 64}
QUICK: dict[str, Any] = dict(batch_size=4, duration="2 steps", device="cpu", workers=0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 photographs of noise of two classes, in four shapes."""
    folder, random = tmp_path_factory.mktemp("shapes"), np.random.default_rng(0)
    for number in range(24):
        place = folder / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(exist_ok=True)
        pixels = random.integers(0, 128, (*SHAPES[number // 2 % len(SHAPES)], 3)) + 100 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(place)
    return folder


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    return vitrail.train(photos, out=str(tmp_path_factory.mktemp("runs")), **NATIVE, **QUICK).folder


def decided(photos: Path, recipe: str | None = None, **settings: Any) -> tuple[Decision, str]:
    choice = choose_run(Asked(photos, recipe, settings={**NATIVE, **settings}), Known())
    splits = Known().splits_of(choice.run)
    return decide(choice.run, Facts.of(choice.run, splits.train, splits.class_names)), str(choice)


@pytest.mark.train
def test_from_the_command_to_the_answers(trained: Path, photos: Path) -> None:
    run = from_yaml(trained / "config.yaml", Run())
    assert run.preprocess is not None and (run.preprocess.resize, run.preprocess.patch) == ("native", 16)
    network: Any = vitrail.load(trained)
    assert network.config.native and network.card.preprocess == run.preprocess
    with Image.open(trained / "batch.png") as shown:
        assert shown.width > shown.height  # a row of pictures, not of strips
    files = sorted(photos.glob("a/*"))[:4]
    found = vitrail.predict(trained, files, precision="float32", device="cpu")
    answers = {Path(row.path).name: row for row in found.rows}
    for file in files:  # as an ordinary image of the size that its shape gets
        with Image.open(file) as opened:
            size = Patches(16, 16).size(opened.height, opened.width)
        prepared = shown_transform(network.card.preprocess)(np.asarray(Image.open(file)), np.random.default_rng(0))
        assert prepared.shape[:2] == size
        with torch.no_grad():
            logits = network(torch.from_numpy(prepared.copy()).permute(2, 0, 1)[None])[0]
        expected = (logits / network.card.temperature).softmax(0).max()
        assert answers[file.name].probabilities[0] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.train
def test_what_is_looked_into_is_the_picture(trained: Path, photos: Path) -> None:
    network: Any = vitrail.load(trained)
    pictures = Pictures(open_split(photos, None), shown_transform(network.card.preprocess), 4)
    shapes = {tuple(stack(batch).shape[2:]) for batch in pictures}
    assert shapes == {Patches(16, 16).size(*shape) for shape in SHAPES}
    served = ServedModel("shapes", network, "cpu", "float32", "torch")
    image = served.prepare(next(photos.glob("a/*.png")).read_bytes(), 10**6)
    assert image.shown.shape[:2] in shapes and image.pixels.shape == (17 * 16, 16, 3)
    grid = [image.shown.shape[0] // 16, image.shown.shape[1] // 16]
    for patch in (None, (grid[0] - 1, grid[1] - 1)):
        (looked,) = served.look([(image, AttentionQuery(patch=patch))])
        assert not isinstance(looked, Exception) and looked["grid"] == grid


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(augment={"mixup": 0.2}), "--augment.mixup 0.2 does not go with --preprocess.resize native"),
        (dict(progressive={"start": 0.5}), "--progressive.start 0.5 does not go with"),
        (dict(objective={"kind": "mae"}), "--objective.kind mae does not go with"),
        (dict(preprocess={"resize": "native", "patch": 8}), "--preprocess.patch 8, not the network's 16, does not go"),
        (dict(vit={"stem": "early"}), "need the stem linear, and this network has early"),
        (dict(model="R50x1", vit={}), "needs a Vision Transformer of vitrail that takes strips"),
        (dict(model="Ti/2", image_size=32), "need patches of 4 pixels or more"),
        (dict(augment={"crop": "random"}), "augment.crop random cuts one size out of all images"),
        (dict(augment_on="device"), "--augment-on device is for"),
    ],
)
def test_what_needs_images_of_one_shape_is_refused(photos: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        decision, _ = decided(photos, **settings)
        from vitrail.data.images.ops import train_transform

        train_transform(decision.run.augment, decision.preprocess)


@pytest.mark.parametrize(
    "recipe", [None, "deit3/vit-s16-imagenet", "three-things/vit-s16-300", "augreg/vit-b16-imagenet21k"]
)
def test_what_a_recipe_sets_for_one_shape_falls_away(photos: Path, recipe: str | None) -> None:
    decision, why = decided(photos, recipe, batch_size=4)
    run = decision.run
    assert (run.augment.mixup, run.augment.cutmix, run.progressive.start) == (0, 0, 1)
    assert "images keep their shapes, and it needs those of one" in why
    again = decide(run, Facts.of(run, Known().splits_of(run).train, ["a", "b"]))
    assert again.run == run and again.config == decision.config


@pytest.mark.train
def test_weights_for_any_shape_with_what_needs_one_shape_name_the_way_out(photos: Path, trained: Path) -> None:
    wanted: dict[str, Any] = {"device": "cpu", "duration": "1 step", "augment": {"mixup": 0.2}}
    card = vitrail.load(trained).card
    for asked, reason in (
        ({}, f"mixup 0.2 needs images of one shape, and {trained} keeps .* Give them one with .*squash"),
        ({"preprocess": {"resize": "native"}}, "mixup 0.2 does not go with --preprocess.resize native"),
        ({"preprocess": {"resize": "squash"}}, ""),
    ):
        run = choose_run(Asked(photos, weights=trained, settings={**wanted, **asked}), Known(), tunes=True).run
        facts = replace(Facts.of(run, Known().splits_of(run).train, ["a", "b"]), card=card)
        with pytest.raises(UsageError, match=reason) if reason else nullcontext():
            assert decide(run, facts).preprocess.resize == "squash"


@pytest.mark.train
def test_weights_for_any_shape_are_tuned_so_and_others_on_request(photos: Path, trained: Path) -> None:
    wanted = {"device": "cpu", "duration": "1 step"}
    for asked, resize in (({}, "native"), ({"preprocess": {"resize": "squash"}}, "squash")):
        run = choose_run(Asked(photos, weights=trained, settings={**wanted, **asked}), Known(), tunes=True).run
        card = vitrail.load(trained).card
        facts = Facts.of(run, Known().splits_of(run).train, ["a", "b"])
        decision = decide(run, replace(facts, card=card))
        assert decision.preprocess.resize == resize and decision.config.native == (resize == "native")  # type: ignore[union-attr]
