"""`vitrail export --precision int8`: programs in int8, and the accuracy that they must keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import NAMES

import vitrail
from vitrail import cli
from vitrail.data.settings import Data, Preprocess
from vitrail.errors import DataError, ExportError, UsageError
from vitrail.exports import int8, openvino
from vitrail.exports.engine import Engine
from vitrail.exports.int8 import Samples, draw_samples
from vitrail.exports.kinds import runtime
from vitrail.exports.write import export_model
from vitrail.weights.card import Card
from vitrail.weights.save import save

pytest.importorskip("nncf")
KINDS = {"onnx": "model.onnx", "openvino": "model.xml"}
SIDE = 16
Program = Callable[[str, bool], tuple[Path, Any]]
"""Kind of program, and whether the processor has AMX -> its folder, and what the export says."""


def network(classes: list[str] = NAMES, stem: str = "linear", **more: Any) -> Any:
    torch.manual_seed(0)
    shape = dict(width=64, depth=2, heads=2, mlp_dim=128, image_size=SIDE, classes=len(classes))
    model: Any = vitrail.create("Ti/4", **shape, stem=stem, **more)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.0 if name.endswith("bias") else 0.2)
    model.card = Card(model.config, list(classes), Preprocess((SIDE, SIDE), "squash"))
    return model.eval()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that the network itself has labelled, so that float32 has 100 %; every third is for training."""
    folder = tmp_path_factory.mktemp("labelled")
    rng, model = np.random.default_rng(0), network()
    colours = rng.integers(0, 256, (150, 1, 1, 3)) + rng.integers(-80, 80, (150, SIDE, SIDE, 3))
    pixels = colours.clip(0, 255).astype(np.uint8)
    with torch.no_grad():
        labels = model(torch.from_numpy(pixels).permute(0, 3, 1, 2)).argmax(1).tolist()
    for number, label in enumerate(labels):
        place = folder / ("test" if number % 3 else "train") / NAMES[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number]).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def program(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """int8 programs of the network, whatever they lose. Each is written once."""

    @cache
    def written(to: Any, amx: bool) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("int8") / "p"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(openvino, "has_amx", lambda: amx)
            return folder, export_model(network(), folder, to, precision="int8", calibrate=data, max_drop=100)

    return written


def held_out(data: Path) -> tuple[np.ndarray, list[str]]:
    """The images that accuracy should be measured on, read without vitrail, and their classes."""
    files = sorted((data / "test").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files]).transpose(0, 3, 1, 2)
    return pixels, [file.parent.name for file in files]


@pytest.mark.export
@pytest.mark.parametrize(("to", "amx"), [("onnx", False), ("openvino", False), ("openvino", True)])
def test_the_accuracy_that_is_reported_is_that_of_the_program(
    to: Any, amx: bool, data: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino, "has_amx", lambda: amx)
    model = network()
    folder, done = program(to, amx)
    found = done.quantised
    assert found is not None and found.int8_layers == found.layers - 1 >= 8  # all but the classifier
    counts = np.array([len([*folder.iterdir()]) for folder in (data / "train").iterdir()])
    left = int((counts - np.clip(np.rint(counts / 10), 1, counts - 1)).sum())  # a tenth of each class is held out
    assert counts.sum() == 50 and (found.calibrated, found.held_out, found.float_top1) == (left, 100, 1.0)
    engine = Engine(folder / KINDS[to])
    pixels, classes = held_out(data)
    outputs = torch.cat([engine(torch.from_numpy(image[None])) for image in pixels])
    right = [NAMES[best] == name for best, name in zip(outputs.argmax(1).tolist(), classes, strict=True)]
    assert found.top1 == found.agreement == pytest.approx(np.mean(right)) and found.top1 > 0.8
    with torch.no_grad():
        exact = model(torch.from_numpy(pixels))
    error = float((outputs - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1  # int8, neither float32 nor noise
    about = json.loads((folder / "card.json").read_text())
    assert about["program"]["precision"] == "int8" and about["quantised"]["top1"] == found.top1
    assert f"top-1 is {found.top1:.2%} (float32 100.00%)" in str(done)


@pytest.mark.export
def test_the_weights_are_stored_in_int8(program: Program) -> None:
    onnx = pytest.importorskip("onnx")
    stored = onnx.load(program("onnx", False)[0] / "model.onnx").graph.initializer
    products = [parameter for parameter in network().parameters() if parameter.dim() in (2, 4)]
    *rounded, classifier = sorted(products, key=torch.numel, reverse=True)
    assert classifier.shape == (len(NAMES), 64) and len(rounded) >= 8
    sizes = [np.prod(tensor.dims) for tensor in stored if tensor.data_type == onnx.TensorProto.INT8]
    in_int8 = sum(size for size in sizes if size > 1024)  # the others are zero points
    assert in_int8 == sum(parameter.numel() for parameter in rounded)


@pytest.mark.export
@pytest.mark.parametrize("amx", [False, True])
def test_with_amx_attention_stays_out_of_int8_and_ranges_are_symmetric(amx: bool, program: Program) -> None:
    nodes = openvino.read_network(program("openvino", amx)[0] / "model.xml").get_ordered_ops()
    factors = [{_source(node, 0), _source(node, 1)} for node in nodes if node.get_type_name() == "MatMul"]
    attention = [kinds for kinds in factors if "Constant" not in kinds]  # products without weights
    assert len(attention) == 2 * 2 and any("FakeQuantize" in kinds for kinds in attention) == (not amx)
    rounded = [node for node in nodes if node.get_type_name() == "FakeQuantize"]
    ends = np.array([[node.input_value(number).get_node().data.min() for number in (1, 2)] for node in rounded])
    signed = ends[(ends < 0).any(axis=1)]
    assert len(signed) > 4 and np.allclose(signed[:, 0], -signed[:, 1], rtol=0.02) == amx


def _source(node: Any, number: int) -> str:
    """What a factor of a product comes from, before it is dequantised or gets another shape."""
    passed = ("Convert", "Multiply", "Reshape", "Slice", "Squeeze", "Transpose")
    node = node.input_value(number).get_node()
    while node.get_type_name() in passed:
        node = node.input_value(0).get_node()
    return str(node.get_type_name())


@pytest.mark.nightly("test_a_program_that_loses_too_much_is_not_written: the same search with a stand-in for NNCF")
@pytest.mark.export
def test_layers_return_to_float32_until_accuracy_is_kept(data: Path, program: Program, tmp_path: Path) -> None:
    free = program("openvino", openvino.has_amx())[1].quantised
    assert free is not None and free.drop > 0  # so that there is something to restore
    limit = free.drop / 2
    kept = export_model(network(), tmp_path, "openvino", precision="int8", calibrate=data, max_drop=limit).quantised
    assert kept is not None and kept.drop <= limit and 0 < kept.int8_layers < kept.layers


@pytest.fixture(scope="module")
def exact_and_changed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """ONNX programs of a network, and of it with noise in one product."""
    exact, changed = network(stem="early"), network(stem="early")
    weight = changed.blocks[-1].mlps[0].mlp.fc1.weight
    with torch.no_grad():
        weight.add_(0.6 * weight.std() * torch.randn_like(weight))  # more than NNCF's ranges cut off the images
    folder = tmp_path_factory.mktemp("pair")
    return [export_model(model, folder / str(i)).folder / "model.onnx" for i, model in enumerate((exact, changed))]


@pytest.mark.export
@pytest.mark.parametrize("to", [pytest.param("onnx", marks=pytest.mark.nightly("the same in OpenVINO")), "openvino"])
def test_the_layer_that_adds_most_to_the_error_returns_first(
    to: Any, data: Path, exact_and_changed: list[Path]
) -> None:
    module: Any = runtime(to)
    networks = [module.read_network(path) for path in exact_and_changed]  # OpenVINO reads ONNX programs, too
    names = module.products(networks[0])
    given = Samples([(image[None], 0) for image in held_out(data)[0][:8]], [])
    in_int8 = int8._in_int8(module, networks[1], given, module.scheme(networks[1]), [])
    assert int8._by_error(module, networks[0], in_int8, given, names)[0] == names[-3]  # before fc2 and head


@pytest.mark.export
def test_a_program_that_loses_too_much_is_not_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[str]] = []
    monkeypatch.setattr(int8, "_in_int8", lambda module, network, given, scheme, kept: tried.append(kept) or network)
    with pytest.raises(ExportError, match=r"at most -1 are allowed, so nothing was written.*--max-drop"):
        export_model(network(), tmp_path / "p", "openvino", precision="int8", calibrate=data, max_drop=-1)
    assert [*tmp_path.iterdir()] == []
    assert [len(kept) for kept in tried] == [1, 2, 3, 5, 9]  # the classifier, and twice as many each time


@pytest.mark.export
def test_a_command_prints_the_loss_and_predicts_with_the_program(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(network(), tmp_path / "model")
    words = ["export", tmp_path / "model", "--to", "openvino", "--precision", "int8", "--calibrate", data]
    assert cli.main([str(word) for word in (*words, "--max-drop", 100, "--out", tmp_path / "p")]) == 0
    out, err = capfd.readouterr()  # of the process: NNCF has much to say
    assert "int8: calibrated on" in out and len(out.splitlines()) == 5 and err == ""
    assert cli.main(["predict", str(tmp_path / "p"), str(next((data / "test").rglob("*.png")))]) == 0


def divided(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch, **reading: Any) -> tuple[set[str], set[str]]:
    """The ids of the images on which an export calibrates, and of those on which it measures."""
    found: list[set[str]] = []

    def some(source: Any, most: int, card: Card) -> list[Any]:
        found.append({source.id(index) for index in range(len(source))})
        if len(found) == 2:
            raise ExportError("both are known")
        return []

    monkeypatch.setattr(int8, "_some", some)
    with pytest.raises(ExportError, match="both are known"):
        vitrail.export(run, precision="int8", calibrate=folder, out=run / "program", **reading)
    return found[0], found[1]


@pytest.mark.train
def test_a_run_is_measured_on_what_it_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(48):
        place = tmp_path / "photos" / "ab"[number % 2] / f"p{number // 4:02}_{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (5 * number, 0, 0)).save(place)
    tiny: Any = dict(model="Ti/4", vit={"width": 8, "depth": 1, "heads": 1}, image_size=8, batch_size=8, device="cpu")
    split: Any = dict(group="name: (p[0-9]+)_", holdout=0.25)
    tiny |= dict(data=split, seed=3, duration="1 step", out=str(tmp_path / "runs"), workers=0)
    run = vitrail.train(tmp_path / "photos", **tiny).folder
    held = {*json.loads((run / "split.json").read_text())["ids"]}
    caplog.clear()
    calibrated, measured = divided(tmp_path / "photos", run, monkeypatch)
    assert measured == held and not calibrated & held and len(calibrated) == 48 - len(held)
    for number in range(48, 60):  # other images would be drawn now
        Image.new("RGB", (8, 8), (4 * number, 9, 0)).save(tmp_path / "photos" / "ab"[number % 2] / f"p{number}_.png")
    grown, measured = divided(tmp_path / "photos", run, monkeypatch)
    assert measured == held and len(grown) == 60 - len(held)
    assert "may have learned" not in caplog.text and "may be training images" not in caplog.text
    divided(tmp_path / "photos", run, monkeypatch, holdout=0.5)  # it learned some of these
    assert "may be training images" in caplog.text


def test_without_held_out_images_the_test_split_is_measured_or_there_is_an_error(data: Path) -> None:
    card = network().card
    found = draw_samples(Data(str(data), holdout=0.0), card)
    assert (len(found.calibration), len(found.held_out)) == (50, 100)
    with pytest.raises(DataError, match=r"no images are held out.*Set data.holdout to a share above 0"):
        draw_samples(Data(str(data / "train"), holdout=0.0), card)


def test_what_int8_needs(tmp_path: Path) -> None:
    model = network()
    with pytest.raises(UsageError, match="--calibrate DATA"):
        export_model(model, tmp_path / "p", "onnx", precision="int8")
    with pytest.raises(UsageError, match="remove --calibrate"):
        export_model(model, tmp_path / "p", "onnx", calibrate="digits")
    with pytest.raises(UsageError, match="features have none"):
        export_model(model, tmp_path / "p", "onnx", output="features", precision="int8", calibrate="digits")
    with pytest.raises(UsageError, match="programs for program in int8; valid: float32, float16, bf16"):
        export_model(model, tmp_path / "p", "program", precision="int8", calibrate="digits")
    with pytest.raises(DataError, match="not among the 5 known ones"):
        draw_samples("digits", model.card)  # of other classes
    assert [*tmp_path.iterdir()] == []


@pytest.mark.export
@pytest.mark.parametrize("to", KINDS)
def test_both_classifiers_of_a_distilled_network_stay_out_of_int8(to: Any, data: Path, tmp_path: Path) -> None:
    quantised = export_model(
        network(distilled=True), tmp_path / to, to, precision="int8", calibrate=data, max_drop=100
    ).quantised
    assert quantised is not None and quantised.layers - quantised.int8_layers == 2
