"""`vitrail plan`: it times real steps on real images, and what it prints can be run and does what it says."""

from __future__ import annotations

import json
import shlex
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import refused
from painted import paint
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.data.settings import Bands, Preprocess
from vitrail.data.sources import open as opening
from vitrail.data.sources.open import open_data
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.training.batches import training_loader
from vitrail.training.decide import decide
from vitrail.training.facts import Facts
from vitrail.training.timetable import Timetable
from vitrail.transfer import timing
from vitrail.transfer.timing import Rehearsal, Speeds
from vitrail.verbs.train.train import Preview
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

Captured = pytest.CaptureFixture[str]
WAYS = ["few-shot", "linear probe", "attention-only", "full fine-tuning", "from scratch"]
VIT = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=8, image_size=(16, 16), classes=3)
QUICK = ("--seconds", "0.2", "--quiet")


def saved(folder: Path, config: ViTConfig | ResNetConfig = VIT) -> str:
    save_model(folder, build(config), Card(config, preprocess=Preprocess(config.image_size)))
    return str(folder)


def drawn(folder: Path, each: int, classes: int = 3, side: int = 20) -> str:
    """Class folders of pictures, each class a brightness of its own."""
    rng = np.random.default_rng(0)
    for number in range(classes):
        (folder / f"kind {number}").mkdir(parents=True)
        for i in range(each):
            pixels = rng.integers(0, 60, (side, side, 3), dtype=np.uint8) + np.uint8(60 * number)
            Image.fromarray(pixels).save(folder / f"kind {number}" / f"{i}.png")
    return str(folder)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, if there were any, would go here."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture(autouse=True)
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take the same times everywhere; what measures them has tests in tests/transfer/test_plan.py."""
    if "shared_data" in request.fixturenames:
        return
    times = Speeds((0.001,) * 3, 0.001, 0.0005, 0.01, 0.02, 0.02, start=0.1)
    monkeypatch.setattr(
        Rehearsal,
        "speeds",
        lambda self, *_: replace(times, images=times.images[: 3 if self.setup.run.progressive.start < 1 else 1]),
    )


def as_json(argv: list[str], capsys: Captured) -> dict[str, Any]:
    assert cli.main(["plan", *argv, *QUICK, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def steps(run: Any) -> int:
    """The steps that training would do."""
    splits = open_data(run.data, seed=run.seed)
    decision = decide(run, Facts.of(run, splits.train, splits.class_names))
    with closing(training_loader(decision.run, splits.train)) as loader:
        return Timetable(decision.run, len(loader)).total


@pytest.mark.full_size
def test_real_photographs(shared_data: Path, tmp_path: Path, capsys: Captured) -> None:
    photos, weights = str(shared_data / "flowers12"), saved(tmp_path / "weights")
    found = as_json([photos, "--from", weights], capsys)
    assert [option["name"] for option in found["options"]] == WAYS
    assert found["data"]["images"] == {"train": 648, "validation": 72, "test": 240}
    assert (found["data"]["classes"], found["data"]["median_size"]) == (12, [224, 224])
    assert found["data"]["fewest"][1] == found["data"]["most"][1] == 54
    assert found["machine"]["free_memory_bytes"] > 0
    assert found["recommended"] == "full fine-tuning"
    assert [option["name"] for option in found["options"] if option["recommended"]] == ["full fine-tuning"]
    assert sorted(option["expected"] for option in found["options"]) == [1, 2, 3, 4, 5]
    assert found["command"] == f"vitrail finetune {photos} --from {weights} --tune all"
    assert "648 training images of 12 classes (54 per class)" in found["why"]
    for option in found["options"]:
        assert refused(shlex.split(option["command"])) == ""
        assert option["seconds"] > 0 and option["memory_bytes"] > 0 and option["images_per_second"] > 0
        assert option["seconds"] == pytest.approx(sum(option["parts"].values()), abs=0.01)
        assert option["share"] == 1
    by_name = {option["name"]: option for option in found["options"]}
    tuned = vitrail.finetune(photos, weights=weights, print_config=True)
    assert isinstance(tuned, Preview)
    assert by_name["attention-only"]["steps"] == by_name["full fine-tuning"]["steps"] == steps(tuned.run) > 500
    assert by_name["attention-only"]["memory_bytes"] < by_name["full fine-tuning"]["memory_bytes"]
    preview = vitrail.train(photos, print_config=True)
    assert isinstance(preview, Preview)
    assert by_name["from scratch"]["steps"] == steps(preview.run)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.full_size
def test_the_probes_look_at_as_many_images(tmp_path: Path, capsys: Captured) -> None:
    photos, weights = drawn(tmp_path / "my photos", each=12), saved(tmp_path / "the weights")
    found = as_json([photos, "--from", weights], capsys)
    assert found["data"]["images"]["train"] == 33  # of 12 of each, 11 are left to train on
    commands = {option["name"]: shlex.split(option["command"])[1:] for option in found["options"]}
    for name in ("few-shot", "linear probe"):
        assert cli.main([*commands[name], "--json", "--quiet"]) == 0
        images = json.loads(capsys.readouterr().out)["train_images"]
        why = next(option["why"] for option in found["options"] if option["name"] == name)
        assert f"features of {images} images" in why


@pytest.mark.train
def test_training_does_as_many_steps(tmp_path: Path, capsys: Captured) -> None:
    photos = drawn(tmp_path / "my photos", each=6)
    option = as_json([photos], capsys)["options"][-1]
    assert option["name"] == "from scratch"
    assert cli.main([*shlex.split(option["command"])[1:], "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == option["steps"] > 0


@pytest.mark.full_size
def test_data_are_opened_once(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes split the data in another way than training does, and each method decides on a run of its own."""
    photos, opened, find = drawn(tmp_path / "photos", each=6), [], opening.open_path

    def counting(path: str, *columns: Any, **options: Any) -> Any:
        opened.append(path)
        return find(path, *columns, **options)

    monkeypatch.setattr(opening, "open_path", counting)
    found = as_json([photos, "--from", saved(tmp_path / "weights")], capsys)
    assert [option["name"] for option in found["options"]] == WAYS
    assert opened == [photos]


@pytest.mark.train
def test_few_images_and_the_weights_in_the_box(tmp_path: Path, capsys: Captured) -> None:
    photos = drawn(tmp_path / "photos", each=5)
    found = as_json([photos, "--from", saved(tmp_path / "weights")], capsys)
    assert found["recommended"] == "full fine-tuning"
    alone = as_json([photos], capsys)
    assert [option["name"] for option in alone["options"]] == WAYS
    commands = {option["name"]: option["command"] for option in alone["options"]}
    assert (
        commands["full fine-tuning"] == f"vitrail finetune {photos} --tune all"
    )  # whose default are the weights in the box
    assert commands["linear probe"] == f"vitrail probe linear vitrail/tiny {photos}"


@pytest.mark.full_size
def test_little_time_is_kept_by_the_command(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Rehearsal,
        "speeds",
        lambda self, seconds, answers=None: Speeds((1.0,) * 3, 0.0, 0.0, 0.0, 0.0, 0.0, start=5.0),
    )
    photos = drawn(tmp_path / "photos", each=40)  # 36 of each to train on, 30 passes over them, a second per image
    slow = as_json([photos], capsys)["options"][-1]
    opening = slow["parts"]["start"] - timing.TRAIN - 5
    assert (slow["steps"], slow["parts"]["steps"]) == (30, 30 * 108)
    found = as_json([photos, "--time-limit", "10"], capsys)
    option = found["options"][-1]
    left = 600 - timing.TRAIN - 5 - opening - 12  # 12 images to choose by are pictured in the report
    limit = float(option["command"].partition("--time-limit ")[2])
    assert limit == 10  # it counts the whole command
    assert refused(shlex.split(option["command"])) == ""
    assert option["share"] == pytest.approx(left / (30 * 108), abs=2 / (30 * 108))
    assert option["seconds"] == pytest.approx(600, abs=2)
    assert option["steps"] == round(30 * option["share"])
    assert "--time-limit" not in as_json([photos, "--time-limit", "90"], capsys)["options"][-1]["command"]


@pytest.mark.train
def test_a_resnet_has_no_attention_to_tune(tmp_path: Path, capsys: Captured) -> None:
    config = ResNetConfig(units=(1, 1, 1, 1), width=8, image_size=(32, 32), classes=3)
    found = as_json([drawn(tmp_path / "photos", each=4), "--from", saved(tmp_path / "resnet", config)], capsys)
    assert [option["name"] for option in found["options"]] == [name for name in WAYS if name != "attention-only"]
    limited = ["finetune", str(tmp_path / "photos"), "--from", str(tmp_path / "resnet"), "--time-limit", "10s"]
    assert cli.main([*limited, "--dry-run"]) == 0  # whose speed is measured before anything is decided


@pytest.mark.train
def test_a_size_is_passed_on(tmp_path: Path, capsys: Captured) -> None:
    photos, weights = drawn(tmp_path / "photos", each=4), saved(tmp_path / "weights")
    found = as_json([photos, "--from", weights, "--image-size", "24"], capsys)
    for option in found["options"]:
        assert option["command"].endswith("--image-size 24")
        assert refused(shlex.split(option["command"])) == ""
        assert "24 x 24 px" in option["why"] or not option["steps"]


@pytest.mark.train
def test_larger_images_of_the_same_classes(tmp_path: Path) -> None:
    photos = drawn(tmp_path / "photos", each=5)
    config, names = VIT, ["kind 0", "kind 1", "kind 2"]
    save_model(tmp_path / "weights", build(config), Card(config, names, Preprocess(config.image_size)))
    found = vitrail.plan(photos, weights=tmp_path / "weights", image_size=32, seconds=0.2)
    assert found.recommended.name == "attention-only"  # follow-up, Table 5
    assert "Table 5" in found.source


@pytest.mark.train
def test_what_is_shown(tmp_path: Path, capsys: Captured) -> None:
    photos = drawn(tmp_path / "photos", each=5)
    for number in range(3):
        (Path(photos) / "kind 1" / f"{number}.png").unlink()
    (Path(photos) / "kind 1" / "notes.txt").touch()
    assert cli.main(["plan", photos, "--from", saved(tmp_path / "weights"), *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert photos in lines[0] and "3 classes" in lines[0] and "20 x 20 px" in lines[0]
    assert "of kind 1 to" in lines[0] and " to 1)" in lines[0]
    assert "free" in lines[1] and lines[2].startswith("note") and "ignored 1" in lines[2]
    assert [line for line in lines if line.startswith("> full fine-tuning")]
    commands = [line.partition("vitrail ") for line in lines if "  vitrail " in line]
    assert len(commands) == len(WAYS)
    assert all(refused(["vitrail", *shlex.split(words)]) == "" for _, _, words in commands)
    assert lines[-2].startswith("recommended: full fine-tuning. ")


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["{photos}", "--from", "{nothing}"], 1, "there is nothing at"),
        (["{photos}", "--from", "{photos}/kind 0/0.png"], 1, "0.png"),
        (["{nothing}"], 1, "no data at"),
        (["{photos}", "--from", "{weights}", "--image-size", "20"], 2, "20"),
        (["{photos}", "--time-limit", "0"], 2, "time-limit is 0"),
        (["{photos}", "--seconds", "-1"], 2, "seconds is -1"),
        (["{photos}", "--time-limits", "3"], 2, "Did you mean '--time-limit'?"),
    ],
)
def test_what_cannot_be_planned(argv: list[str], code: int, said: str, tmp_path: Path, capsys: Captured) -> None:
    places = {
        "photos": drawn(tmp_path / "photos", each=2),
        "weights": saved(tmp_path / "weights"),
        "nothing": str(tmp_path / "nothing here"),
    }
    assert cli.main(["plan", *(word.format(**places) for word in argv)]) == code
    out, err = capsys.readouterr()
    assert out == "" and said in err and "Traceback" not in err


def test_masks_are_planned_without_probes(tmp_path: Path, capsys: Captured) -> None:
    """What needs one label for each image is left out, and it is said what the order was measured on."""
    data = paint(tmp_path / "data", {"train": 12, "val": 4})
    assert cli.main(["plan", str(data), "--image-size", "32", "--seconds", "0.2", "--json"]) == 0
    written = capsys.readouterr()
    found = json.loads(written.out)
    assert sorted(option["name"] for option in found["options"]) == sorted(WAYS[2:])
    assert found["data"]["kind"] == "masks" and "they need one label for each image" in " ".join(written.err.split())
    assert "measured on classes of whole images" in found["why"] and "probe" not in found["why"]


def table(folder: Path, header: str, cells: list[str]) -> str:
    """A table of pictures, with the given cells behind the name of each."""
    drawn(folder / "photos", each=len(cells), classes=1)
    lines = [f"photos/kind 0/{i}.png,{cell}" for i, cell in enumerate(cells)]
    (folder / "table.csv").write_text("\n".join([f"path,{header}", *lines]))
    return str(folder / "table.csv")


@pytest.mark.train
def test_labels_are_counted_and_numbers_are_no_classes(tmp_path: Path, capsys: Captured) -> None:
    cells = ["red|big,1.5", "red|big,2.5", "red|big,0.5", "red|big,3"] * 3
    path = table(tmp_path, "labels,weight", cells)
    weights = ["--from", saved(tmp_path / "weights"), "--data.holdout", "0"]
    for more in (["--data.label-column", "labels"], ["--data.answers", "labels", "weight"]):
        found = as_json([path, *weights, *more, "--data.label-separator", "|"], capsys)
        assert found["data"]["classes"] == 2 and found["data"]["fewest"][1] == found["data"]["most"][1] == 12
        assert "12 training images of 2 classes (12 per class)" in found["why"]
        assert "measured on classes of whole images" in found["why"] and "linear probe" not in found["why"]
    numbers = ["--data.label-column", "weight", "--data.labels-per-image", "numbers"]
    found = as_json([path, *weights, *numbers], capsys)
    assert found["data"]["classes"] == 0 and "12 training images with numbers: " in found["why"]
    for option in found["options"]:
        assert "--objective.kind regression" in option["command"]
        assert refused(shlex.split(option["command"])) == ""


@pytest.mark.train
def test_images_with_bands(tmp_path: Path, capsys: Captured) -> None:
    """Weights for RGB have no features of them; a network with such bands has, but not as the protocol reads images."""
    for name in ("a", "b"):
        (tmp_path / "bands" / name).mkdir(parents=True)
        for i in range(4):
            np.save(tmp_path / "bands" / name / f"{i}.npy", np.full((16, 16, 4), 900 * i, np.uint16))
    photos, four = str(tmp_path / "bands"), str(tmp_path / "four")
    asked = ["--data.channels", "4", "--data.bits", "16"]
    assert cli.main(["plan", photos, "--from", saved(tmp_path / "rgb"), *asked, "--seconds", "0.2", "--json"]) == 0
    written = capsys.readouterr()
    assert sorted(option["name"] for option in json.loads(written.out)["options"]) == sorted(WAYS[2:])
    said = " ".join(written.err.split())
    assert "few-shot and linear probe are left out" in said and "no effect" not in said
    config = replace(VIT, channels=4)
    bands = Bands("16", (1.0,) * 4, (1.0,) * 4, (0.0,) * 4, (3000.0,) * 4)
    save_model(tmp_path / "four", build(config), Card(config, preprocess=Preprocess(VIT.image_size, bands=bands)))
    found = as_json([photos, "--from", four], capsys)
    assert [option["name"] for option in found["options"]] == WAYS
    assert found["options"][0]["command"] == f"vitrail probe fewshot {four} {photos} --prepare model"
    assert cli.main(["probe", "fewshot", four, photos, "--quiet"]) == 2
    assert "four has 4 bands of 16 bits. --prepare model prepares" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["probe", "fewshot", four, photos, "--prepare", "model", "--quiet"]) == 0
