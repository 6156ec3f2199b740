"""A network whose classes are added to, merged, removed or replaced by their names (`Run.classes`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from sklearn.datasets import load_digits
from tiny_runs import still_run

import vitrail
from vitrail.config import from_yaml, to_yaml
from vitrail.data.settings import Data, Preprocess
from vitrail.durations import Epochs, Steps
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.metric import Metric
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.objective.distillation import DistillationObjective
from vitrail.objective.settings import Distill, Regression
from vitrail.training.assemble import Setup, set_up
from vitrail.training.classes import splits_of
from vitrail.training.loop import fit
from vitrail.training.new_rows import fit_rows
from vitrail.training.python_objects import PythonObjects
from vitrail.training.run import Model, Optim, Run
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CONFIG = ViTConfig(width=32, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), pool="gap")


def digits(place: Path, classes: str, *, each: int = 40, test: str = "") -> Path:
    """Write the digits of these classes, each a figure of `classes`, and of `test` the next ones of each class."""
    data = load_digits()
    pixels = np.repeat((data.images * 15.9).astype(np.uint8)[..., None], 3, axis=3)
    rows = {
        "train": [row for one in classes for row in np.flatnonzero(data.target == int(one))[:each]],
        "test": [row for one in test for row in np.flatnonzero(data.target == int(one))[each : each + 40]],
    }
    names = np.array(NAMES)[data.target]
    arrays = {f"{part}_{split}": array[of] for split, of in rows.items() if of
              for part, array in (("x", pixels), ("y", names))}  # fmt: skip
    np.savez(place, **arrays)
    return place


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network for the digits 0 to 5, with weights as they are drawn, and a classifier that is not zero."""
    torch.manual_seed(0)
    model = build(CONFIG.changed(classes=6))
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.normal_(model.head.bias, mean=3.0)
    place = tmp_path_factory.mktemp("base") / "base"
    save_model(place, model, Card(model.config, NAMES[:6]))
    return place


def run_of(weights: Path, data: Path, *classes: str, **changes: object) -> Run:
    images = Data(path=str(data), holdout=0.2)
    return still_run(data.parent, images, weights, **{"classes": classes, "batch_size": 16, **changes})


def started(run: Run) -> Setup:
    return set_up(run, PythonObjects().splits(run))


def test_known_classes_keep_their_rows_and_new_ones_change_no_prediction(base: Path, tmp_path: Path) -> None:
    """A new row, the mean of all, is never the best, and is nowhere far from the others, whatever their level is."""
    before = vitrail.load(base)
    with started(run_of(base, digits(tmp_path / "d.npz", "5678"), "add")) as setup:
        model = setup.objective.model
        assert setup.splits.class_names == [*NAMES[:6], "eight", "seven", "six"]
        assert torch.equal(model.head.weight[:6], before.head.weight)
        assert torch.equal(model.head.bias[:6], before.head.bias)
        images = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8)
        with torch.no_grad():
            old, now = before(images), model.eval()(images)
        assert torch.equal(now[:, :6], old)
        assert torch.equal(now.argmax(1), old.argmax(1))
        torch.testing.assert_close(now[:, 6:], old.mean(1, keepdim=True).expand(-1, 3))
        assert {setup.splits.train[row].label for row in range(len(setup.splits.train))} == {5, 6, 7, 8}
        assert setup.run.teacher == str(base)  # the images of 0 to 4 are missing
        assert isinstance(setup.objective, DistillationObjective)


def test_with_images_of_all_classes_there_is_no_teacher(base: Path, tmp_path: Path) -> None:
    with started(run_of(base, digits(tmp_path / "d.npz", "0123456"), "add")) as setup:
        assert setup.run.teacher is None and setup.objective.compared is None
    with started(run_of(base, tmp_path / "d.npz", "add", distill=Distill(weight=0.0))) as setup:
        assert setup.run.teacher is None


def test_labels_are_learned_among_the_classes_with_images_and_the_others_from_the_teacher(
    base: Path, tmp_path: Path
) -> None:
    """The loss is the formula of Li and Hoiem, from logits: the new classes apart, the old ones as the network had."""
    run = run_of(base, digits(tmp_path / "d.npz", "678"), "add", distill=Distill(weight=0.25, temperature=2.0))
    with started(run) as setup:
        objective, loader = setup.objective, setup.loader
        torch.nn.init.normal_(objective.model.head.weight)
        batch = next(iter(loader.epoch(0)))
        prepared = objective.prepare(batch, step=0)
        with torch.no_grad():
            found, count, _ = objective.loss(objective.before_step(prepared, 1))
            logits, theirs = objective.model(prepared.images), vitrail.load(base)(prepared.images)
    new = logits[:, 6:].log_softmax(1)
    labels = -new[range(count), prepared.labels - 6]
    wanted, ours = (theirs / 2).softmax(1), (logits[:, :6] / 2).softmax(1)
    teacher = 4 * (wanted * (wanted.log() - ours.log())).sum(1)
    torch.testing.assert_close(found, (0.75 * labels + 0.25 * teacher).sum(), rtol=1e-4, atol=1e-4)


def test_a_merged_class_is_nearly_the_sum_of_its_parts(base: Path, tmp_path: Path) -> None:
    """And nearer than the mean of the rows, which is what it begins with."""
    run = run_of(base, digits(tmp_path / "d.npz", "0123456"[:6]), "merge", "one=line", "three=five")
    before = vitrail.load(base)
    with started(run) as setup:
        model, splits = setup.objective.model, setup.splits
        assert splits.class_names == ["zero", "line", "two", "five", "four"]
        pixels = np.stack([np.asarray(splits.train[row].image) for row in range(len(splits.train))])
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        with torch.no_grad():
            old, mean = before(images), model.eval()(images)
            wanted = torch.stack([old[:, of].logsumexp(1) for of in ([0], [1], [2], [3, 5], [4])], 1)
            fit_rows(setup)
            now = model(images)
    assert torch.equal(now[:, [0, 1, 2, 4]], old[:, [0, 1, 2, 4]])
    assert (wanted - mean)[:, 3].min() >= -1e-5  # the tangent lies below
    assert (wanted - now)[:, 3].square().mean() < 0.1 * (wanted - mean)[:, 3].square().mean()
    assert set(splits.train.labels.tolist()) == {0, 1, 2, 3, 4}
    assert (splits.train.labels == 3).sum() > 60  # images of three, and of five


def test_a_teacher_need_not_know_all_classes_that_are_merged(base: Path, tmp_path: Path) -> None:
    known = CONFIG.changed(classes=2)
    save_model(tmp_path / "teacher", build(known), Card(known, ["two", "one"]))
    run = run_of(base, digits(tmp_path / "d.npz", "012345"), "merge", "one=line", "five=line")
    with started(replace(run, teacher=str(tmp_path / "teacher"))) as setup:
        assert setup.splits.class_names == ["zero", "line", "two", "three", "four"]
        assert setup.objective._teacher[0].columns == [[], [1], [0], [], []]


def test_removed_classes_and_their_images_are_gone(base: Path, tmp_path: Path) -> None:
    before, data = vitrail.load(base), digits(tmp_path / "d.npz", "0235")
    for words, kept in ((("remove",), [0, 2, 3, 5]), (("remove", "five", "one"), [0, 2, 3, 4])):
        with started(run_of(base, data, *words)) as setup:
            assert setup.splits.class_names == [NAMES[one] for one in kept]
            assert torch.equal(setup.objective.model.head.weight, before.head.weight[kept])
            assert torch.equal(setup.objective.model.head.bias, before.head.bias[kept])
            count = len(setup.splits.train) + len(setup.splits.validation or ())
            assert count == 40 * len(set(kept) & {0, 2, 3, 5})


def test_replace_is_the_default(base: Path, tmp_path: Path) -> None:
    data = digits(tmp_path / "d.npz", "4567")
    with started(run_of(base, data, "replace")) as setup:
        assert not setup.objective.model.head.weight.any() and len(setup.splits.class_names) == 4
    assert Run().classes == ("replace",)


def test_validation_images_may_be_of_classes_without_training_images(base: Path, tmp_path: Path) -> None:
    data = digits(tmp_path / "d.npz", "67", test="0167")
    run = run_of(base, data, "add")
    run = replace(run, data=replace(run.data, validation="test"))
    with started(run) as setup:
        assert setup.splits.validation is not None
        assert np.bincount(setup.splits.validation.labels).tolist() == [40, 40, 0, 0, 0, 0, 40, 40]


def test_a_single_new_class_can_be_added(base: Path, tmp_path: Path) -> None:
    with started(run_of(base, digits(tmp_path / "d.npz", "7"), "add")) as setup:
        told, _ = fit_rows(setup)
        assert "half of the validation images" in told
        assert torch.isfinite(setup.objective.model.head.weight).all()


@pytest.mark.parametrize(
    ("classes", "data", "words"),
    [
        (("grow",), "67", "its first word must be replace, add, merge or remove"),
        (("add", "photos"), "67", "--classes add takes no names"),
        (("merge",), "01", "--classes merge wolf=dog"),
        (("merge", "tow=pair"), "01", "Did you mean 'two'"),
        (("merge", "two=pair", "two=three"), "01", "gets two names"),
        (("merge", "two=pair"), "016", "does not know"),
        (("merge", *(f"{name}=one" for name in NAMES[:6])), "01", "makes one class, 'one', of all 6 classes"),
        (("remove", "tow"), "01", "Did you mean 'two'"),
        (("remove",), "67", "none of the classes"),
        (("remove",), "016", "does not know"),
        (("remove",), "012345", "leaves 6 of the 6 classes"),
        (("remove", "one", "two", "three", "four", "five"), "01", "leaves 1 of the 6 classes"),
    ],
)
def test_classes_that_do_not_go_together_are_refused(
    base: Path, tmp_path: Path, classes: tuple[str, ...], data: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        started(run_of(base, digits(tmp_path / "d.npz", data), *classes))


def test_a_network_whose_classes_have_no_names_is_refused(base: Path, tmp_path: Path) -> None:
    data = digits(tmp_path / "d.npz", "67")
    model = build(CONFIG.changed(classes=6))
    save_model(tmp_path / "nameless", model, Card(model.config))
    several = Card(model.config, NAMES[:6], thresholds=[0.5] * 6)
    save_model(tmp_path / "several", model, several)
    with pytest.raises(UsageError, match="has no class names"):
        started(run_of(tmp_path / "nameless", data, "add"))
    with pytest.raises(UsageError, match="predicts labels"):
        started(run_of(tmp_path / "several", data, "add"))
    with pytest.raises(UsageError, match="Name the weights"):
        started(replace(run_of(base, data, "add"), weights=None, model="smoke/2"))
    for changes in ({"keep_head": True}, {"probe_head": True}):
        with pytest.raises(UsageError, match="begins with their rows"):
            started(run_of(base, data, "add", **changes))


def test_numbers_are_refused(base: Path, tmp_path: Path) -> None:
    rows = [f"{number}.png,{number}" for number in range(20)]
    for row in rows:
        from PIL import Image

        Image.new("L", (8, 8), 10 * int(row.partition(",")[2])).save(tmp_path / row.partition(",")[0])
    (tmp_path / "t.csv").write_text("\n".join(["image,label", *rows]) + "\n")
    with pytest.raises((UsageError, DataError), match="one class for each image"):
        started(run_of(base, tmp_path / "t.csv", "add", objective=Regression()))


def test_words_stand_in_a_file_and_in_python() -> None:
    run = Run(classes=("merge", "wolf=dog", "fox=dog"))
    assert from_yaml(to_yaml(run), Run()) == run
    assert from_yaml("classes: add", Run()).classes == ("add",)
    assert from_yaml("classes: [remove, cat]", Run()).classes == ("remove", "cat")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned the digits 0 to 6."""
    folder = tmp_path_factory.mktemp("trained")
    run = run_of(folder, digits(folder / "old.npz", "0123456", each=100), "replace")
    learns = {"optim": Optim(lr=5e-3), "duration": Epochs(25), "batch_size": 64, "evaluate_every": Epochs(25)}
    network = Model(width=32, depth=2, heads=2, mlp_dim=64, patch=2, pool="gap")
    return fit(replace(run, weights=None, model="S/16", vit=network, **learns)).folder  # type: ignore[arg-type]


@pytest.mark.train
@pytest.mark.parametrize("tune", ["all", "head", "lora"])
def test_old_classes_are_measured_on_the_images_of_their_run_and_stay(trained: Path, tmp_path: Path, tune: str) -> None:
    """Nothing of them is among the new images. config.yaml repeats the run, and evaluate knows all names."""
    run = run_of(trained, digits(tmp_path / "new.npz", "789", each=100, test="0123456789"), "add", tune=tune)
    metric = Metric("balanced_accuracy")
    result = fit(replace(run, optim=Optim(lr=1e-3), duration=Epochs(2), batch_size=32, metric=metric))
    model = vitrail.load(result.folder)
    assert model.card.class_names == [*sorted(NAMES[:7]), "eight", "nine", "seven"]
    assert result.before["old_top1"] > 0.85 and result.before["new_top1"] == 0
    assert result.test is not None and min(result.test["old_top1"], result.test["new_top1"]) > 0.3  # 0 and 1 without
    assert "before" in result.of_classes
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert all("old_top1" in line for line in lines if line["kind"] == "validation")
    again = from_yaml(result.folder / "config.yaml", Run())
    assert again.classes == ("add",) and again.teacher == str(trained)
    if tune == "head":  # the fastest
        assert fit(again).best == result.best
    assert splits_of(again).class_names == model.card.class_names


@pytest.mark.train
def test_old_images_that_are_gone_are_said(trained: Path, tmp_path: Path) -> None:
    """And so are those that have changed since: the held-out images would be others. Those of arrays have no names."""
    run = run_of(trained, digits(tmp_path / "new.npz", "789"), "add")
    images = trained.parent / "old.npz"
    there = images.read_bytes()
    try:
        digits(images, "0123456", each=60)
        with started(run) as setup:
            assert "held out is left in" in setup.why["classes"]
            assert setup.splits.validation is not None and setup.splits.validation.labels.min() == 7
        images.unlink()
        with started(run) as setup:
            assert "is not measured: no validation image shows them, and no data at" in setup.why["classes"]
    finally:
        images.write_bytes(there)


def files(place: Path, arrays: Path) -> Path:
    """Write the images of an .npz as files, in a folder for each class."""
    with np.load(arrays) as found:
        for number, (pixels, name) in enumerate(zip(found["x_train"], found["y_train"], strict=True)):
            (place / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place / name / f"{number}.png")
    return place


@pytest.mark.train
def test_old_images_that_the_weights_may_have_learned_do_not_choose_the_best_model(base: Path, tmp_path: Path) -> None:
    """Those of the weights' own run do, without any that are trained on now."""
    known = files(tmp_path / "known", digits(tmp_path / "old.npz", "0123456", each=10))
    now = files(tmp_path / "now", digits(tmp_path / "both.npz", "0123456789", each=10))
    first = fit(run_of(base, known, "replace", duration=Steps(1)))
    with started(run_of(first.folder, now, "add", seed=5)) as setup:
        splits, earlier = setup.splits, splits_of(from_yaml(first.folder / "config.yaml", Run())).validation
    assert splits.validation is not None and earlier is not None
    seen = {splits.train[row].image for row in range(len(splits.train))}
    free = {earlier[row].image for row in range(len(earlier))} - seen
    labels = splits.validation.labels.tolist()
    held = {splits.validation[row].image: label for row, label in enumerate(labels)}
    of_them = {held[image] for image in free}
    assert {image for image, label in held.items() if label in of_them} == free and not seen & held.keys()
    assert f"{len(free)} validation images" in setup.why["classes"] and len(free) > 0
    with started(run_of(base, now, "add")) as setup:
        assert "favour it" in setup.why["classes"]


@pytest.mark.train
def test_old_images_are_found_by_name_in_a_folder_that_has_grown_and_are_missed_where_they_are_gone(
    base: Path, tmp_path: Path
) -> None:
    """By evaluate and by the next change of classes, which names only classes of which there are images."""
    known = files(tmp_path / "known", digits(tmp_path / "old.npz", "0123456", each=10))
    sets = [files(tmp_path / one, digits(tmp_path / f"{one}.npz", one, each=10)) for one in "78"]
    first = fit(run_of(base, known, "replace", duration=Steps(1))).folder
    second = fit(run_of(first, sets[0], "add", duration=Steps(1))).folder
    held = [len(json.loads((run / "split.json").read_text())["ids"]) for run in (first, second)]
    whole = vitrail.evaluate(second)
    assert whole.results.count == sum(held) == 16 and "by which" in "".join(whole.notes)
    Image.new("RGB", (8, 8)).save(known / "zero" / "later.png")
    grown = vitrail.evaluate(second)
    assert grown.results.metrics() == whole.results.metrics()
    assert f"of the 14 images that {first} held out, 14 are left" in "".join(grown.notes)
    with started(run_of(second, sets[1], "add")) as setup:
        assert np.bincount(setup.splits.validation.labels).tolist() == [2] * 9
        assert "16 validation images, of 8 classes (" in setup.why["classes"]
    known.rename(tmp_path / "elsewhere")
    told = [*vitrail.evaluate(second).notes]
    with started(run_of(second, sets[1], "add")) as setup:
        assert np.bincount(setup.splits.validation.labels).tolist() == [0] * 7 + [2] * 2
        told.append(setup.why["classes"])
        assert "2 validation images, of 'seven', are those by which" in setup.why["classes"]
    assert all("the accuracy on 7 classes (" in one and "is not measured" in one for one in told)


@pytest.mark.train
def test_rows_of_a_table_that_has_changed_are_not_taken_for_those_that_were_held_out(
    base: Path, tmp_path: Path
) -> None:
    """Their ids are their numbers."""
    with np.load(digits(tmp_path / "old.npz", "0123456", each=10)) as found:
        pictures, labels = found["x_train"], found["y_train"].tolist()
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
    images = [(tmp_path / f"{number}.png").read_bytes() for number in range(len(pictures))]
    table = tmp_path / "known.parquet"
    parquet.write_table(pyarrow.table({"image": images, "label": labels}), table)
    first = fit(run_of(base, table, "replace", duration=Steps(1))).folder
    run = run_of(first, digits(tmp_path / "new.npz", "7"), "add")
    with started(run) as setup:
        assert "14 validation images" in setup.why["classes"]
    parquet.write_table(pyarrow.table({"image": images[1:], "label": labels[1:]}), table)
    with started(run) as setup:
        assert "known.parquet has changed since it was trained on" in setup.why["classes"]


def test_images_are_prepared_as_those_of_the_classes_that_are_kept(base: Path, tmp_path: Path) -> None:
    padded = tmp_path / "padded"
    network = vitrail.load(base)
    save_model(padded, network, replace(network.card, preprocess=Preprocess((8, 8), resize="pad", fill=(1, 2, 3))))
    with started(run_of(padded, digits(tmp_path / "d.npz", "5678"), "add")) as setup:
        assert setup.run.preprocess == Preprocess((8, 8), resize="pad", fill=(1, 2, 3))
        assert "pad: that of the weights" in setup.why["preprocess"]
    asked = run_of(padded, tmp_path / "d.npz", "add", preprocess=Preprocess((8, 8), resize="squash"))
    with started(asked) as setup:
        assert setup.run.preprocess.resize == "squash"


def test_weights_that_keep_shapes_say_what_is_possible_without_old_images(tmp_path: Path) -> None:
    """A teacher, which nobody gave, needs images of one shape."""
    config = CONFIG.changed(classes=6, native=True)
    save_model(tmp_path / "native", build(config), Card(config, NAMES[:6], Preprocess((8, 8), resize="native")))
    run = run_of(tmp_path / "native", digits(tmp_path / "d.npz", "67"), "add")
    way_out = r"--classes add, which has .* --preprocess.resize squash. --distill.weight 0 switches"
    with pytest.raises(UsageError, match=way_out):
        started(run)
    with pytest.raises(UsageError, match=r"--classes add, which .*resize native, .* --distill.weight 0 switches"):
        started(replace(run, preprocess=Preprocess((8, 8), resize="native")))
    with started(replace(run, distill=Distill(weight=0.0))) as setup:
        assert setup.run.teacher is None and setup.run.preprocess.resize == "native"
    with started(replace(run, preprocess=Preprocess((8, 8), resize="squash"))) as setup:
        assert setup.run.teacher == run.weights


@pytest.mark.train
def test_a_resumed_run_ends_with_the_same_bits(trained: Path, tmp_path: Path) -> None:
    run = run_of(trained, digits(tmp_path / "new.npz", "789"), "add", optim=Optim(lr=1e-3), duration=Steps(6))
    run = replace(run, checkpoint_every=Steps(3), schedule=replace(run.schedule, shape="constant"))
    whole, part = fit(run), fit(replace(run, duration=Steps(3)))
    resumed = fit(run, resume=part.folder)
    one, other = (vitrail.load(folder / "model" / "last").state_dict() for folder in (whole.folder, resumed.folder))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert resumed.before == whole.before
