"""`vitrail weights convert | info | verify | push`, and foreign weights in every verb that takes some."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image
from references import draw, once
from torch import nn

import vitrail
from vitrail import cli
from vitrail.data.images.ops import eval_transform
from vitrail.data.settings import Preprocess
from vitrail.errors import DataError, UsageError, WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.verbs import weights as verbs
from vitrail.weights.card import Card
from vitrail.weights.save import FORMATS, save

CONFIG = ViTConfig.of(width=64, depth=2, heads=1, mlp_dim=32, patch=8, image_size=(16, 16), classes=2, gelu="tanh")


def made(config: ViTConfig = CONFIG, **card: Any) -> Any:
    torch.manual_seed(0)
    model: Any = build(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    preprocess = Preprocess(config.image_size, resize="squash")
    model.card = Card(config, **{"class_names": ["blue", "red"], "preprocess": preprocess, **card})
    return model.eval()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours") / "m"
    save(made(licence="mit", metrics={"top1": 0.5}), folder)
    return folder


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of another library, which name no classes."""
    path = tmp_path_factory.mktemp("google") / "vit.npz"
    save(made(), path, "google")
    return path


@pytest.fixture(scope="session")
def photos() -> Path:
    return once("photos-18", lambda place: draw(place / "photos", side=18)) / "photos"


def run(*argv: object) -> int:
    return cli.main([str(word) for word in argv])


# the group's own verbs


def test_convert_writes_a_file_that_opens_elsewhere(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "vit.npz"
    assert run("weights", "convert", ours, target, "--format", "google") == 0
    out = capsys.readouterr().out
    assert str(target) in out and "relative error" in out and "it does not hold the names of 2 classes" in out
    with np.load(target, allow_pickle=False) as file:
        assert file["head/kernel"].shape == (64, 2)
    assert run("weights", "convert", ours, target, "--format", "google") == 1
    assert "already exists" in capsys.readouterr().err
    assert run("weights", "convert", ours, target, "--format", "google", "--overwrite", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["saved"]["format"] == "google" and values["report"]["format"] == "vitrail"
    assert values["saved"]["error"] < 1e-5


def test_convert_there_and_back(ours: Path, google: Path, tmp_path: Path) -> None:
    result = verbs.convert(google, tmp_path / "back")
    assert (result.report.format, result.saved.format) == ("google", "vitrail")
    images = torch.randn(1, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(vitrail.load(tmp_path / "back")(images), vitrail.load(ours)(images))


def test_convert_puts_blocks_side_by_side_and_back(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("weights", "convert", ours, tmp_path / "parallel", "--branches", "2") == 0
    parallel: Any = vitrail.load(tmp_path / "parallel")
    assert (parallel.config.depth, parallel.config.branches) == (1, 2)
    assert (parallel.card.class_names, parallel.card.licence) == (["blue", "red"], "mit")
    assert parallel.card.metrics == {} and parallel.card.source.endswith("its 2 blocks 1 x 2")  # another function
    assert run("weights", "convert", tmp_path / "parallel", tmp_path / "row", "--branches", "1") == 0
    before, after = (vitrail.load(folder).state_dict() for folder in (ours, tmp_path / "row"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    capsys.readouterr()
    assert run("weights", "convert", ours, tmp_path / "none", "--branches", "3") == 2
    assert "valid: 1, 2" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_convert_refuses_what_a_format_cannot_say(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("weights", "convert", ours, tmp_path / "m.pth", "--format", "torchvision") == 1
    assert "tanh" in capsys.readouterr().err
    assert run("weights", "convert", ours, tmp_path / "m", "--format", "tim") == 2
    assert "timm" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_info_shows_what_weights_are(ours: Path, google: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("weights", "info", ours) == 0
    out = " ".join(capsys.readouterr().out.split())
    count = sum(parameter.numel() for parameter in build(CONFIG).parameters())
    for part in ("width 64, depth 2, 1 head,", f"{count:,}", "blue, red", "mit", "top1 0.5", "squash", "gelu tanh"):
        assert part in out
    assert "blocks.0" not in out
    assert run("weights", "info", google) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "google" in out and "no names" in out and "not known" in out


def test_info_lists_the_tensors(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = vitrail.load(ours)
    assert run("weights", "info", ours, "--tensors", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["card"]["class_names"] == ["blue", "red"]
    rows = {row["name"]: row for row in values["tensors"]}
    assert rows.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert rows[name]["shape"] == list(tensor.shape)
        assert rows[name]["largest"] == pytest.approx(float(tensor.abs().max()), rel=1e-6)
        assert rows[name]["mean"] == pytest.approx(float(tensor.double().mean()), abs=1e-9)
    assert run("weights", "info", ours, "--tensors") == 0
    assert "head.weight" in capsys.readouterr().out


def test_verify_says_how_far_off_it_is(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("weights", "verify", ours) == 0
    assert "logits compared with the card: relative error" in capsys.readouterr().out
    assert run("weights", "verify", ours, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["verified"] is True and values["reference"]["logits"] < 1e-6

    from vitrail.weights.store import save_model

    model: Any = vitrail.load(ours)
    with torch.no_grad():
        model.norm.bias[0] += 1
    save_model(tmp_path / "m", model, model.card)
    assert run("weights", "verify", tmp_path / "m") == 1
    err = capsys.readouterr().err
    assert "does not compute the expected outputs" in err and "Traceback" not in err


def test_verify_of_weights_that_cannot_be_compared(google: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("weights", "verify", google) == 0
    assert "not verified" in capsys.readouterr().out
    assert run("weights", "verify", google, "--json") == 0
    assert json.loads(capsys.readouterr().out)["verified"] is None


def test_push_can_be_tried(ours: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.weights import publish

    monkeypatch.setattr(publish, "push", lambda *_, **__: pytest.fail("uploaded something"))
    assert run("weights", "push", ours, "owner/name", "--dry-run", "--licence", "apache-2.0") == 0
    out = capsys.readouterr().out
    assert "would push to owner/name" in out and "model.safetensors" in out and "license: apache-2.0" in out
    assert run("weights", "push", ours, "owner/name", "--dry-run", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["url"] is None and set(values["files"]) == {"README.md", "card.json", "model.safetensors"}
    with pytest.raises(UsageError, match="owner/name"):
        verbs.push(ours, "name-alone", dry_run=True)


def test_push_uploads(ours: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.weights import publish

    asked: list[tuple[Any, ...]] = []

    def upload(folder: str, repository: str, *, private: bool) -> str:
        asked.append((sorted(path.name for path in Path(folder).iterdir()), repository, private))
        return f"https://hub/{repository}"

    monkeypatch.setattr(publish, "push", upload)
    assert run("weights", "push", ours, "owner/name", "--private") == 0
    assert asked == [(["README.md", "card.json", "model.safetensors"], "owner/name", True)]
    assert "pushed to https://hub/owner/name" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["info", "verify"])
def test_what_is_not_there_is_told(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("weights", verb, tmp_path / "nowhere") == 1
    assert "nowhere" in capsys.readouterr().err
    (tmp_path / "text.npz").write_text("these are no weights")
    assert run("weights", verb, tmp_path / "text.npz") == 1
    assert "text.npz" in capsys.readouterr().err


def test_the_group_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("weights") == 2
    assert "Valid: info, convert, average, verify, push" in capsys.readouterr().err
    assert run("weights", "covnert", "a", "b") == 2
    assert "Did you mean 'convert'?" in capsys.readouterr().err


# foreign weights in the other verbs


def test_predict_with_foreign_weights(google: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("predict", google, photos / "red" / "0.png", "--top", "1", "--precision", "float32") == 0
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    model = vitrail.load(google)
    pixels = eval_transform(model.card.preprocess)(
        np.array(Image.open(photos / "red" / "0.png")), np.random.default_rng(0)
    )
    with torch.inference_mode():
        expected = model(torch.from_numpy(pixels).permute(2, 0, 1)[None]).softmax(1)[0]
    assert float(row["probability"]) == pytest.approx(float(expected.max()), abs=1e-4)
    assert row["class"] == str(int(expected.argmax()))


def test_evaluate_with_weights_that_name_no_classes_takes_the_images_order(
    google: Path, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = vitrail.evaluate(google, photos)
    assert found.results.class_names == ["blue", "red"]
    assert "does not name its outputs" in caplog.text and "'blue' to 'red'" in caplog.text
    assert found.results.count == 24


def test_evaluate_with_another_number_of_classes_is_refused(google: Path, photos: Path, tmp_path: Path) -> None:
    many = tmp_path / "many"
    for name in ("blue", "red", "teal"):
        (many / name).mkdir(parents=True)
        (many / name / "0.png").write_bytes((photos / "red" / "0.png").read_bytes())
    with pytest.raises(DataError, match="2 outputs without names and the images have 3 classes"):
        vitrail.evaluate(google, many)


def test_a_network_without_a_classifier_answers_nothing(photos: Path, tmp_path: Path) -> None:
    save(made(replace(CONFIG, classes=0), class_names=[]), tmp_path / "vit.npz", "google")
    for ask in (vitrail.evaluate, vitrail.predict):
        with pytest.raises(WeightsError, match=r"has no classifier.*vitrail finetune DIR --from"):
            ask(tmp_path / "vit.npz", photos)


@pytest.mark.train
def test_finetune_from_foreign_weights(google: Path, photos: Path, tmp_path: Path) -> None:
    settings = dict(duration="3 steps", batch_size=8, image_size=24, out=str(tmp_path / "runs"))
    result = vitrail.finetune(photos, weights=google, **settings)
    model: Any = vitrail.load(result.folder)
    assert model.card.class_names == ["blue", "red"]
    origin = model.config.origin
    assert (model.config.image_size, origin.gelu, origin.resize_mode) == ((24, 24), "tanh", "official")
    decided = json.loads((result.folder / "run.json").read_text())
    assert "vit.npz (google)" in json.dumps(decided)


@pytest.mark.train
def test_finetune_from_distilled_and_pre_logits_weights(photos: Path, tmp_path: Path) -> None:
    """A new head leaves what only the old head used behind."""
    save(made(replace(CONFIG, pre_logits=8)), tmp_path / "pre.npz", "google")
    save(made(CONFIG.changed(gelu="erf", distilled=True)), tmp_path / "dist.pth", "deit")
    for name in ("pre.npz", "dist.pth"):
        settings = dict(duration="2 steps", batch_size=8, out=str(tmp_path / "runs"))
        result = vitrail.finetune(photos, weights=tmp_path / name, **settings)
        model: Any = vitrail.load(result.folder)
        assert model.config.pre_logits is None
        assert model.config.origin.distilled == (name == "dist.pth")


def test_finetune_from_what_is_not_there_is_told_at_once(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="nowhere"):
        vitrail.finetune(photos, weights=tmp_path / "nowhere", out=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_the_flag_knows_every_format() -> None:
    assert sorted(get_args(verbs.FormatName)) == sorted(FORMATS)
