"""`vitrail evaluate` on ImageNet's test sets, its calibration and groups, and what it writes."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.data.benchmarks.imagenet_labels import part, wnids
from vitrail.data.settings import Preprocess
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.calibration import calibration
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.tasks.catalog import load_results
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=1000)
PREPROCESS = Preprocess(image_size=(16, 16), resize="squash")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of ImageNet's classes with random weights, its outputs in an order of their own."""
    torch.manual_seed(0)
    model = ViT(CONFIG)
    torch.nn.init.normal_(model.head.weight, std=2)  # type: ignore[union-attr]
    order = np.random.default_rng(0).permutation(1000)
    folder = tmp_path_factory.mktemp("model") / "shuffled"
    save_model(folder, model, Card(CONFIG, [wnids()[k] for k in order], PREPROCESS))
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """imagenet-r/ with three pictures of each of five classes, of the size the network takes, and a broken one."""
    root = tmp_path_factory.mktemp("data") / "imagenet-r"
    rng = np.random.default_rng(1)
    for number in part("r")[::40]:
        (root / wnids()[number]).mkdir(parents=True)
        for i in range(3):
            noise = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / wnids()[number] / f"{i}.png")
    (root / wnids()[part("r")[40]] / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing more")
    return root


def logits(network: Path, pictures: Path) -> tuple[np.ndarray, list[str], list[str]]:
    """Outputs for every readable picture, the outputs' names, and the pictures' classes."""
    model: Any = vitrail.load(network)
    files = sorted(path for path in pictures.glob("*/*.png") if path.name != "broken.png")
    images = torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files])
    with torch.no_grad():
        return model(images).numpy(), model.card.class_names, [file.parent.name for file in files]


def test_a_protocol_finds_its_classes_whatever_their_order(network: Path, pictures: Path) -> None:
    scores, names, true = logits(network, pictures)
    wanted = [wnids()[number] for number in part("r")]
    among = scores[:, [names.index(name) for name in wanted]]
    labels = np.array([wanted.index(name) for name in true])
    place = np.argsort(-among, axis=1)
    share = np.exp(among.astype(float)) / np.exp(among.astype(float)).sum(1, keepdims=True)
    result = vitrail.evaluate(network, pictures, protocol="r", precision="float32", batch_size=4)
    assert result.results.count == 15
    assert result.results.top1 == np.mean(place[:, 0] == labels)
    assert result.results.top5 == pytest.approx(np.mean((place[:, :5] == labels[:, None]).any(1)))
    assert result.results.nll == pytest.approx(-np.log(share[np.arange(15), labels]).mean(), rel=1e-4)
    brier = np.square(share - np.eye(200)[labels]).sum(1).mean()
    assert calibration(result.results).brier == pytest.approx(brier, rel=1e-4)
    assert result.data == f"ImageNet-R ({pictures})"
    assert result.notes == ["16 images instead of 30,000: the result is not comparable with others on ImageNet-R"]
    assert [id_ for id_, _ in result.results.bad] == [f"{wnids()[part('r')[40]]}/broken.png"]


def test_a_network_without_names_has_the_usual_order(network: Path, pictures: Path, tmp_path: Path) -> None:
    model: Any = vitrail.load(network)
    order = torch.tensor([model.card.class_names.index(name) for name in wnids()])
    with torch.no_grad():
        model.head.weight.copy_(model.head.weight[order].clone())
        model.head.bias.copy_(model.head.bias[order].clone())
    save_model(tmp_path / "plain", model, replace(model.card, class_names=[]))
    named, plain = (vitrail.evaluate(one, pictures, protocol="r") for one in (network, tmp_path / "plain"))
    np.testing.assert_allclose(plain.results.loss, named.results.loss, rtol=1e-5)
    assert "does not name its outputs: they are taken to be in ImageNet's order" in plain.notes[0]
    assert not any("taken to be" in note for note in named.notes)


def test_another_image_size_resamples_the_positions(network: Path, pictures: Path) -> None:
    usual, larger = (vitrail.evaluate(network, pictures, protocol="r", image_size=size) for size in (None, 24))
    assert larger.results.count == usual.results.count
    assert not np.allclose(larger.results.loss, usual.results.loss, rtol=1e-3)
    with pytest.raises(UsageError, match="17"):
        vitrail.evaluate(network, pictures, protocol="r", image_size=17)


def test_everything_on_the_command_line(
    network: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = tmp_path / "groups.csv"
    present = [wnids()[number] for number in part("r")[::40]]
    lines = [f"{name},{'odd' if i % 2 else 'even'}\n" for i, name in enumerate(present)]
    groups.write_text("".join(["class,group\n", *lines]))
    out = tmp_path / "evaluation"
    command = ["evaluate", str(network), str(pictures), "--protocol", "r", "--groups", str(groups), "--out", str(out)]
    assert cli.main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "evaluation.json").read_text())
    assert sum(row["images"] for row in printed["calibration"]) == printed["count"] == 15
    assert [(group["name"], group["classes"], group["count"]) for group in printed["groups"]] == [
        ("even", 3, 9),
        ("odd", 2, 6),
    ]
    found = load_results(out / "answers.npz", [row["name"] for row in printed["classes"]])
    assert calibration(found).ece == printed["ece"]
    assert found.brier.mean() == printed["brier"]
    with open(out / "calibration.csv", newline="", encoding="utf-8") as file:
        assert sum(int(row["images"]) for row in csv.DictReader(file)) == 15
    with open(out / "classes.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200 and sum(int(row["right"]) for row in rows) == round(15 * printed["top1"])
    with Image.open(out / "reliability.png") as image:
        assert image.format == "PNG"

    assert cli.main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"ECE {printed['ece']:.2%}" in shown and f"Brier score {printed['brier']:.4f}" in shown
    assert "top-1 class mean" not in shown and "top-5 class mean" in shown and f"top-5 {printed['top5']:.2%}" in shown
    assert "not comparable with others on ImageNet-R" in shown
    assert "classes in no group: 195, such as" in shown
    assert "broken.png" in shown


NAMES = ["fox [kit]", "end [/b]", "a:dog:b", "[red]", "plain"]


def test_class_names_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, classes=len(NAMES))
    save_model(tmp_path / "model", ViT(config), Card(config, NAMES, PREPROCESS))
    images = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
    labels = np.array(NAMES)[np.arange(20) % len(NAMES)]
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    Image.fromarray(images[0]).save(tmp_path / "image.png")
    for command in (
        ["evaluate", "model", "data.npz"],
        ["predict", "model", "image.png"],
        ["data", "stats", "data.npz"],
    ):
        words = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in command]
        assert cli.main(words) == 0
        shown = capsys.readouterr().out
        assert "top-5" not in shown  # of five classes, it is always 100 %
        expected = NAMES if command[0] != "data" else [f"4 ({name})" for name in (min(NAMES), max(NAMES))]
        assert [name for name in expected if name not in shown] == []


def test_answers_alone_go_to_a_file(network: Path, pictures: Path, tmp_path: Path) -> None:
    vitrail.evaluate(network, pictures, protocol="r", out=tmp_path / "new" / "answers.npz")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["answers.npz"]
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot write .*taken"):
        vitrail.evaluate(network, pictures, protocol="r", out=tmp_path / "taken")


def test_what_is_missing_is_an_error_with_an_address(
    network: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(network), str(tmp_path / "none"), "--protocol", "v2"]) == 1
    said = capsys.readouterr().err
    assert "https://huggingface.co/datasets/vaishaal/ImageNetV2" in said and "Traceback" not in said
    assert cli.main(["evaluate", str(network), str(tmp_path), "--protocol", "w2"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"protocol": "r", "data": None},
            r"its folder, without --split and settings of data: vitrail evaluate .* DIR",
        ),
        ({"protocol": "r", "split": "val"}, "without --split"),
        ({"labels": "real.json"}, "--labels needs a --protocol that has labels"),
        ({"protocol": "rr"}, "no protocol is called 'rr'"),
    ],
)
def test_flags_that_contradict_are_refused(network: Path, pictures: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        vitrail.evaluate(network, **{"data": pictures, **options})


def test_a_network_of_other_classes_is_refused(pictures: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, classes=10)
    save_model(tmp_path / "ten", ViT(config), Card(config, [], PREPROCESS))
    with pytest.raises(DataError, match="has 10 classes, but the protocol needs the 1,000"):
        vitrail.evaluate(tmp_path / "ten", pictures, protocol="r")


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """The class of the folder is that of the network, JSON holds it with an escape; ids of bad files lead to them."""
    names, config = [os.fsdecode(b"caf\xe9"), "plain"], replace(CONFIG, classes=2)
    save_model(tmp_path / "model", ViT(config), Card(config, names, PREPROCESS))
    for name in names:
        (tmp_path / "d" / "test" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "d" / "test" / name / f"{names[0]}.png")
    (tmp_path / "d" / "train").symlink_to(tmp_path / "d" / "test")
    (tmp_path / "d" / "test" / "plain" / "bad.png").write_bytes(b"none")
    vitrail.evaluate(tmp_path / "model", tmp_path / "d", out=tmp_path / "out", device="cpu")
    numbers = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert [bad["id"] for bad in numbers["bad"]] == ["test/plain/bad.png"]
    assert "caf\\xe9" in json.dumps(numbers, ensure_ascii=False).replace("\\\\", "\\")
