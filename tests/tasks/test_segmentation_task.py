"""A run on images with masks, from the folder to the answers of every verb."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import run_folder
from tiny_runs import assert_same_bits, interrupted
from torch import nn

from vitrail import evaluate, fit, load, predict, save
from vitrail.data.images.masked import nearest
from vitrail.data.loading.pack import pack_data
from vitrail.data.settings import IGNORED, Augment, Data, Preparation, Preprocess
from vitrail.data.sources.open import open_data
from vitrail.durations import Epochs, Steps
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.metric import Metric
from vitrail.evaluation.pixel_scores import PixelResults, pixel_classes
from vitrail.exports.parity import OUTPUTS, origin_here
from vitrail.model.build import build
from vitrail.model.own_part import OwnPart
from vitrail.model.variants import ViTConfig
from vitrail.objective.settings import DINO, Distill, Regression, Segmentation, Supervised
from vitrail.reports.compare import write_comparison
from vitrail.reports.page import write_report
from vitrail.training.assemble import set_up
from vitrail.training.python_objects import PythonObjects
from vitrail.training.result import Result
from vitrail.training.run import Model, Optim, Run
from vitrail.verbs.average import average
from vitrail.verbs.network import settings_of
from vitrail.weights.card import Card

COLOURS = np.array([(30, 60, 200), (40, 160, 60), (200, 60, 40)], np.uint8)
NAMES = ["sky", "grass", "barn"]
CONFIG = ViTConfig(
    **dict(width=16, depth=1, heads=2, mlp_dim=32, patch=8, image_size=(32, 32), classes=3, segmentation="linear")
)


def scenes(root: Path, count: int = 24, size: tuple[int, int] = (36, 48)) -> Path:
    """Pictures of three colours in areas, with noise, a border that does not count, and masks with a palette."""
    random = np.random.default_rng(0)
    for split, images in (("train", count), ("val", 6), ("test", 5)):
        for number in range(images):
            mask = nearest(random.integers(0, 3, (3, 4)).astype(np.uint8), *size)
            picture = np.clip(COLOURS[mask] + random.normal(0, 12, (*size, 3)), 0, 255).astype(np.uint8)
            mask[0] = IGNORED
            for folder in ("images", "masks"):
                (root / folder / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(root / "images" / split / f"{number}.png")
            Image.fromarray(mask).save(root / "masks" / split / f"{number}.png")
    (root / "classes.txt").write_text("\n".join(NAMES) + "\n")
    return root


def untrained(folder: Path, seed: int = 0, config: ViTConfig = CONFIG) -> str:
    """A network of random weights."""
    torch.manual_seed(seed)
    model: Any = build(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.card = Card(config, NAMES, Preprocess((32, 32), resize="squash"))
    save(model, folder)
    return str(folder)


def settings(data: Path, out: Path) -> Run:
    return Run(
        name="s",
        out=str(out),
        data=Data(path=str(data)),
        model="Ti/16",
        vit=Model(width=32, depth=2, heads=2, mlp_dim=64, patch=8, segmentation="layers"),
        image_size=32,
        optim=Optim(lr=4e-3),
        augment=Augment(crop="inception", scale=(0.5, 1.0), mixup=0.2, cutmix=1.0),
        duration=Epochs(10),
        evaluate_every=Epochs(5),
        batch_size=8,
        workers=0,
        device="cpu",
        precision="float32",
        track=(),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(settings(data, tmp_path_factory.mktemp("runs")))


@pytest.mark.train
def test_it_learns_and_every_verb_says_the_same(trained: Result, data: Path, tmp_path: Path) -> None:
    assert trained.best["miou"] > 0.6 and trained.test is not None and trained.test["miou"] > 0.6
    model = load(trained.folder)
    assert model.card is not None and (model.card.task, model.card.class_names) == ("segmentation", NAMES)
    assert model.card.confidence is None and model.config.segmentation == "layers"
    recorded = json.loads((Path(trained.folder) / "run.json").read_text())["decisions"]
    assert "mixup and cutmix" in recorded["augment"] and recorded["objective.kind"].startswith("segmentation")
    found = evaluate(str(trained.folder), str(data), split="val")
    assert found.results.metrics()["miou"] == pytest.approx(trained.best["miou"], abs=1e-3)
    written = predict(str(trained.folder), str(data / "images" / "val"), out=str(tmp_path / "masks"))
    assert "6 images" in written.summary
    right = count = 0
    for number in range(6):
        with Image.open(tmp_path / "masks" / f"{number}.png") as picture:
            assert picture.mode == "P" and picture.size == (48, 36)
            mask = np.asarray(picture)
        true = np.asarray(Image.open(data / "masks" / "val" / f"{number}.png"))
        right, count = right + int((mask == true)[true != IGNORED].sum()), count + int((true != IGNORED).sum())
    assert right / count == pytest.approx(found.results.metrics()["pixel_accuracy"], abs=1e-6)
    assert (tmp_path / "masks" / "classes.txt").read_text().split() == NAMES
    rows = predict(str(trained.folder), str(data / "images" / "val")).rows
    assert rows[0].numbers is not None and sum(rows[0].numbers.values()) == pytest.approx(1, abs=1e-4)
    page = write_report(trained.folder).read_text()
    assert "Masks and predictions" in page and "mIoU" in page and "barn" in page


@pytest.mark.train
def test_tiles_are_put_together(trained: Result, data: Path, tmp_path: Path) -> None:
    """Tiles without overlap that cut an image of 64 x 96 exactly are six images of their own."""
    picture = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    (tmp_path / "images").mkdir()
    Image.fromarray(picture).save(tmp_path / "images" / "large.png")
    predict(str(trained.folder), str(tmp_path / "images"), out=str(tmp_path / "tiled"), tiles=32)
    mask = np.asarray(Image.open(tmp_path / "tiled" / "large.png"))
    model = load(trained.folder)
    for top in (0, 32):
        for left in (0, 32, 64):
            tile = np.ascontiguousarray(picture[top : top + 32, left : left + 32])
            with torch.inference_mode():
                expected = pixel_classes(model(torch.from_numpy(tile).permute(2, 0, 1)[None])[0], 32, 32)
            assert (mask[top : top + 32, left : left + 32] == expected).mean() > 0.99
    predict(str(trained.folder), str(tmp_path / "images"), out=str(tmp_path / "over"), tiles=32, overlap=8)
    assert np.asarray(Image.open(tmp_path / "over" / "large.png")).shape == (64, 96)


@pytest.mark.train
def test_a_resumed_run_is_an_uninterrupted_one(data: Path, tmp_path: Path) -> None:
    run = replace(settings(data, tmp_path), duration=Steps(6), evaluate_every=Steps(3), checkpoint_every=Steps(2))
    whole = fit(replace(run, name="whole")).folder
    stopped = interrupted(replace(run, name="half"), 4)
    assert_same_bits(whole, fit(replace(run, name="half"), resume=stopped).folder)


class OwnHead(OwnPart):
    """A classifier of one's own."""


class OfClasses(Metric):
    """A metric of one's own, which needs a class of each image."""

    def value(self, found: Any) -> float:
        return float(found.class_accuracy.min())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(objective=Regression()), "labels_per_image|masks"),
        (dict(preprocess=Preparation(resize="pad")), "squash"),
        (
            dict(teacher="vitrail/tiny", distill=Distill("features")),
            r"a teacher needs objective\.kind supervised, not segmentation",
        ),
        (
            dict(objective=Supervised(smoothing=0.1, class_weights="balanced")),
            "objective supervised with these settings",
        ),
        (
            dict(vit=Model(width=32, depth=2, heads=2, mlp_dim=64, patch=8, head=OwnHead())),
            r"vit\.head .*:OwnHead is for",
        ),
        (
            dict(metric=OfClasses()),
            r"OfClasses is not for segmentation: 'PixelResults' object has no attribute 'class_accuracy'.*miou.*pixels",
        ),
        (dict(knn=5), "knn.*does not work with masks"),
        (dict(model="R50x1", vit=Model()), "Vision Transformer"),
        (dict(augment=Augment(also=("torchvision.transforms.v2:RandomHorizontalFlip(0.5)",))), "where it moves"),
    ],
)
def test_187_what_does_not_go_with_masks_is_refused(data: Path, tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises((UsageError, DataError), match=message):
        fit(replace(settings(data, tmp_path), **changes))


def test_what_is_asked_for_is_not_dropped(data: Path, tmp_path: Path) -> None:
    run = replace(settings(data, tmp_path), objective=Supervised(smoothing=0.1), accumulate=1)
    splits = open_data(run.data)
    asked = PythonObjects(asked={"objective.smoothing": "--objective.smoothing"})
    with pytest.raises(UsageError, match=r"--objective\.smoothing asks for 0\.1.*segmentation: the labels are masks"):
        set_up(run, splits, objects=asked)
    default = PythonObjects(asked={"objective.loss": "--objective.loss"})  # softmax: nothing is lost
    with set_up(run, splits, objects=default) as setup:
        assert "of which none is smoothed" in setup.why["objective.kind"]
    with pytest.raises(UsageError, match=r"objective is a function, .*which is for classes and sets of labels"):
        set_up(run, splits, objects=PythonObjects(objective=nn.functional.cross_entropy))


def test_a_head_that_is_kept_keeps_its_queries(data: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, segmentation="queries", queries=5, query_blocks=1)
    run = replace(settings(data, tmp_path), weights=untrained(tmp_path / "model", config=config), keep_head=True)
    run = replace(run, model=None, image_size=None)
    with pytest.raises(UsageError, match=r"with 5 queries, and vit\.queries is 7"):
        fit(replace(run, vit=Model(queries=7)))


def test_no_mask_is_rejected(tmp_path: Path) -> None:
    images = scenes(tmp_path / "scenes", 1) / "images" / "test"
    with pytest.raises(UsageError, match="whose pixels have each their own class"):
        predict(untrained(tmp_path / "model"), str(images), out=str(tmp_path / "masks"), reject=0.9)
    assert not (tmp_path / "masks").exists()


def test_188_masks_are_asked_for_where_there_are_none(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("RGB", (32, 32), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    run = settings(tmp_path, tmp_path.parent / "runs")
    with pytest.raises(UsageError, match=r"vit\.segmentation layers is for images with masks"):
        fit(run)
    with pytest.raises(UsageError, match="objective segmentation needs images with masks"):
        fit(replace(run, objective=Segmentation(), vit=Model()))


@pytest.mark.train
def test_without_labels_the_images_of_masks_train(data: Path, tmp_path: Path) -> None:
    run = replace(settings(data, tmp_path), objective=DINO(outputs=64, hidden=32, bottleneck=16), duration=Steps(1))
    run = replace(run, vit=replace(run.vit, segmentation=None), augment=Augment(crop="inception"))
    assert fit(run).steps == 1


@pytest.mark.train
def test_189_masks_do_not_take_the_place_of_images_or_of_other_files(
    trained: Result, data: Path, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    Image.new("RGB", (32, 32)).save(images / "a.png")
    with pytest.raises(DataError, match="within the data set"):
        predict(str(trained.folder), str(images), out=str(images))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="holds other files"):
        predict(str(trained.folder), str(images), out=str(tmp_path / "other"))
    Image.new("RGB", (32, 32)).save(images / "a.jpg")
    with pytest.raises(UsageError, match="the same mask"):
        predict(str(trained.folder), str(images), out=str(tmp_path / "new"))


def test_masks_that_are_labels_stay_as_they_are(tmp_path: Path) -> None:
    model, root = untrained(tmp_path / "model"), scenes(tmp_path / "scenes", 1)
    images, labels = root / "images" / "test", root / "masks" / "test"
    shutil.copytree(labels, tmp_path / "others")
    before = {path: path.read_bytes() for folder in (labels, tmp_path / "others") for path in folder.iterdir()}
    for out in (labels, root / "masks" / "other"):
        with pytest.raises(UsageError, match=r"is, or lies in, .*masks, whose masks may be the labels of these images"):
            predict(model, str(images), out=str(out))
    for classes in ("", "sky\ngrass\n"):
        (tmp_path / "others" / "classes.txt").write_text(classes) if classes else None
        with pytest.raises(UsageError, match=r"holds masks, and no classes\.txt of this network"):
            predict(model, str(images), out=str(tmp_path / "others"))
    assert {path: path.read_bytes() for path in before} == before and not (root / "masks" / "other").exists()
    predict(model, str(images), out=str(root / "annotations"))  # nothing was there
    with pytest.raises(UsageError, match="may be the labels"):  # and now it may have been corrected by hand
        predict(model, str(images), out=str(root / "annotations"))


def test_of_a_folder_with_masks_the_images_are_predicted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, root = untrained(tmp_path / "model"), scenes(tmp_path / "scenes", 1)
    images = sorted(str(path) for path in (root / "images").rglob("*.png"))
    predict(model, str(root), out=str(tmp_path / "masks"))
    assert (
        sorted(path.parent.name for path in (tmp_path / "masks").rglob("*.png"))
        == ["test"] * 5 + ["train"] + ["val"] * 6
    )
    assert f"those in {root / 'images'} are predicted" in caplog.text
    assert sorted(row.path for row in predict(model, str(root)).rows) == images
    assert len(predict(model, str(root), include=("*/val/*",)).rows) == 6


def test_a_folder_of_predicted_masks_is_written_anew(tmp_path: Path) -> None:
    model, images = untrained(tmp_path / "model"), scenes(tmp_path / "scenes", 1) / "images" / "test"
    whole = (images / "4.png").read_bytes()
    (images / "4.png").write_bytes(b"none")
    predict(model, str(images), out=str(tmp_path / "masks"))
    assert (tmp_path / "masks" / "errors.csv").exists() and not (tmp_path / "masks" / "4.png").exists()
    (images / "4.png").write_bytes(whole)
    predict(model, str(images), out=str(tmp_path / "masks"))
    names = ["0.png", "1.png", "2.png", "3.png", "4.png", "classes.txt"]
    assert sorted(path.name for path in (tmp_path / "masks").iterdir()) == names


def test_values_that_do_not_count_are_those_of_the_run_on_other_images() -> None:
    card, run = Card(CONFIG, NAMES), Run(data=Data("scenes", ignore=(254,)))
    assert settings_of(run, card, "elsewhere", {}).ignore == settings_of(run, card, None, {}).ignore == (254,)
    assert settings_of(run, card, "elsewhere", {"ignore": [0]}).ignore == (0,)


def test_the_mean_of_networks_is_measured(tmp_path: Path) -> None:
    root = scenes(tmp_path / "scenes", 1)
    models = [untrained(tmp_path / name, seed) for seed, name in enumerate(("a", "b"))]
    found = average(*models, out=tmp_path / "mean", on=root, device="cpu", workers=0)
    assert found.results is not None and found.confidence is None
    expected = evaluate(str(tmp_path / "mean"), str(root), split="val", device="cpu").results.metrics()
    assert found.results.metrics() == pytest.approx(expected)


def test_runs_are_compared_on_test_images(tmp_path: Path) -> None:
    pixels = np.array([[[3, 1, 0], [4, 2, 0], [3, 3, 0]]])
    found, test = PixelResults(NAMES, np.arange(1), pixels, np.ones(1)), {"miou": 0.4321, "count": 5}
    for name in ("a", "b"):
        run_folder(tmp_path / name, Data("scenes"), found, config=CONFIG, result={"test": test})
    write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html")
    assert "mIoU 43.2\N{NO-BREAK SPACE}% of 5" in (tmp_path / "page.html").read_text()


def test_masks_are_not_packed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="data pack stores no masks"):
        pack_data(str(scenes(tmp_path / "scenes", 1)), tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_shares_of_a_tile_are_those_of_the_image_in_it(tmp_path: Path) -> None:
    """Of an image that is smaller than a tile, the rest of the tile is filled, and does not count."""
    model, photo = untrained(tmp_path / "model", seed=4), tmp_path / "photos" / "small.png"
    photo.parent.mkdir()
    pixels = np.zeros((12, 20, 3), np.uint8)
    pixels[:, 10:] = 255
    Image.fromarray(pixels).save(photo)
    predict(model, str(photo.parent), out=str(tmp_path / "masks"), tiles=32)
    counts = np.bincount(np.asarray(Image.open(tmp_path / "masks" / "small.png")).ravel(), minlength=3)
    (row,) = predict(model, str(photo), tiles=32).rows
    assert row.numbers is not None and counts.sum() == 12 * 20
    assert list(row.numbers.values()) == pytest.approx((counts / counts.sum()).tolist(), abs=1e-5)


def test_a_program_records_outputs_not_classes(tmp_path: Path) -> None:
    record = origin_here(lambda images: np.ones((1, 3, 32, 32), np.float32), "onnx", Card(CONFIG, NAMES))
    assert record.outputs == [1.0] * OUTPUTS
