"""Programs for other runtimes compute what the network computes, and say how they are used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import ALL, NAMES, Programs, made

import vitrail
from vitrail.data.settings import Data
from vitrail.errors import DataError, ExportError, UsageError
from vitrail.exports.network import Exportable
from vitrail.exports.write import export_model
from vitrail.version import __version__
from vitrail.weights.save import save

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}


def pictures(model: Any, count: int, seed: int = 1) -> np.ndarray:
    shape = (count, model.config.channels, *model.card.preprocess.image_size)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@torch.no_grad()
def expected(model: Any, images: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(images)).numpy()


def opened(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    """The program of a folder, by its runtime as anybody would use it."""
    if (folder / "model.onnx").exists():
        session = onnxruntime.InferenceSession(folder / "model.onnx")
        return lambda images: session.run(None, {"images": images})[0]
    if (folder / "model.xml").exists():
        compiled = openvino.Core().compile_model(folder / "model.xml", "CPU", FLOAT32)
        return lambda images: compiled(images)[0]
    module = torch.export.load(folder / "model.pt2").module()
    return lambda images: module(torch.from_numpy(images)).detach().numpy()


def close(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-4) -> bool:
    return found.shape == wanted.shape and np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("name", ALL)
def test_what_is_traced_computes_what_the_network_does(name: str) -> None:
    model = made(name)
    images = torch.from_numpy(pictures(model, 3))
    with torch.no_grad():
        logits = model(images)
        wanted = {"logits": logits, "probabilities": logits.softmax(1), "features": model.features(images)}
        for (output, numbers), any_size in product(wanted.items(), (False, True)):
            traced = Exportable(model, model.config.image_size, output, torch.float32, any_size=any_size)
            assert close(traced(images).numpy(), numbers.numpy())


BY_NIGHT = {"hybrid, swiglu", "axial, levit", "AxialResNet"}


@pytest.mark.export
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly("test_what_is_traced_computes_what_the_network_does"))
        if name in BY_NIGHT
        else name
        for name in ALL
    ],
)
def test_every_kind_of_network_in_onnx_runtime_and_openvino(name: str, programs: Programs) -> None:
    model, result = made(name), programs(name)
    assert list(result.files) == ["model.onnx", "card.json"] and result.parity.agreement == 1
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(result.folder / "model.onnx"), "CPU", FLOAT32)
    run = opened(result.folder)
    for count in (1, 2, 5):  # any batch
        images = pictures(model, count)
        assert close(run(images), expected(model, images))
        assert close(compiled(images)[0], expected(model, images))


@pytest.mark.export
def test_openvino(programs: Programs) -> None:
    model, result = made(), programs("plain", "openvino")
    assert list(result.files) == ["model.xml", "model.bin", "card.json"]
    run = opened(result.folder)
    for count in (1, 5):
        images = pictures(model, count)
        assert close(run(images), expected(model, images))
    network = openvino.Core().read_model(result.folder / "model.xml")
    assert [port.get_names() for port in (*network.inputs, *network.outputs)] == [{"images"}, {"logits"}]
    info = {key: network.get_rt_info(["vitrail", key]).astype(str) for key in ("class_names", "program")}
    assert json.loads(info["class_names"]) == NAMES
    inside, root = json.loads(info["program"]), ElementTree.parse(result.folder / "model.xml").getroot()
    assert str(inside["ir_version"]) == root.get("version") and inside["needs"] == result.needs
    assert result.needs == "openvino>=2023.1" and f"\nneeds {result.needs}\n" in str(result)  # measured


@pytest.mark.export
@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("BEiT", "onnx"),
        ("BiT", "program"),
        *(
            pytest.param(name, to, marks=pytest.mark.nightly("the other two, and tests/model/test_open_sizes.py"))
            for name, to in (("plain", "openvino"), ("distilled, parallel", "onnx"))
        ),
    ],
)
def test_a_program_for_images_of_any_size(name: str, to: Any, tmp_path: Path) -> None:
    model = made(name, depth=1) if name == "plain" else made(name)
    result = export_model(model, tmp_path / "m", to, any_size=True)
    assert result.input_shape == ["batch", 3, "height", "width"] and result.parity.sizes == 2
    step, (height, width) = getattr(model.config, "patch", 1), model.config.image_size
    run = opened(tmp_path / "m")
    for shape in ((2, 3, height, width + 3 * step), (1, 3, height + 4 * step, width)):
        images = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
        assert close(run(images), expected(model, images))


@pytest.mark.export
def test_an_exported_program_of_torch(programs: Programs) -> None:
    model, result = made("distilled, parallel"), programs("distilled, parallel", "program")
    run = opened(result.folder)
    for count in (1, 5):
        images = pictures(model, count)
        assert close(run(images), expected(model, images))
    inside = {"card.json": ""}
    torch.export.load(result.folder / "model.pt2", extra_files=inside)
    assert json.loads(inside["card.json"])["class_names"] == NAMES


@pytest.mark.export
def test_a_program_says_how_it_is_used(programs: Programs) -> None:
    plain = programs()
    card = json.loads((plain.folder / "card.json").read_text())
    inside = onnxruntime.InferenceSession(plain.folder / "model.onnx").get_modelmeta().custom_metadata_map
    assert {key: json.loads(text) for key, text in inside.items()}.items() <= card.items()
    assert card["class_names"] == NAMES and card["licence"] == "mit"
    assert card["input"]["shape"] == ["batch", 3, 12, 16] == plain.input_shape
    assert card["output"].items() >= {"name": "logits", "type": "float32", "shape": ["batch", 5]}.items()
    assert (card["output"]["function"], card["output"]["temperature"]) == ("softmax", 1.0)
    assert card["preprocess"]["size"] == [15, 20] and card["preprocess"]["crop"] == [12, 16]  # 12 / 0.8, 16 / 0.8
    assert card["made_by"]["vitrail"] == __version__ and len(card["made_by"]["weights_sha256"]) == 64
    assert card["parity"]["relative"] == plain.parity.relative <= card["parity"]["tolerance"] == 1e-4
    assert card["files"]["model.onnx"]["bytes"] == (plain.folder / "model.onnx").stat().st_size
    session = onnxruntime.InferenceSession(plain.folder / "model.onnx")
    (image,) = session.get_inputs()
    assert (image.name, image.type, image.shape[1:]) == ("images", "tensor(uint8)", [3, 12, 16])
    assert isinstance(image.shape[0], str)  # a name: any batch


@pytest.mark.export
def test_the_opset_is_that_which_is_named(programs: Programs, tmp_path: Path) -> None:
    first, small = made(), made(depth=1)
    older = export_model(small, tmp_path / "m", opset=18)
    images = pictures(first, 2)
    for model, result, opset in ((first, programs(), 20), (small, older, 18)):
        program = onnx.load(result.folder / "model.onnx")
        assert [(found.domain, found.version) for found in program.opset_import] == [("", opset)]
        inside = json.loads(next(entry.value for entry in program.metadata_props if entry.key == "program"))
        assert (inside["opset"], inside["ir_version"]) == (opset, program.ir_version)
        assert inside["needs"] == result.needs == "onnxruntime>=1.21" and f"ONNX opset {opset}, needs" in str(result)
        assert close(opened(result.folder)(images), expected(model, images))


@pytest.mark.export
def test_average_pooling_of_opset_18_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"average pooling wrongly in opset 18\. Choose opset 19"):
        export_model(made("AxialResNet"), tmp_path / "m", opset=18)
    assert not list(tmp_path.iterdir())


def test_an_opset_that_no_program_can_have(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"opset is 17; valid: 18, 19, 20, 21, 22, 23 \(default: 20\)"):
        export_model(made(), tmp_path / "m", opset=17)
    with pytest.raises(UsageError, match="only programs for onnx and web have one: remove it, or export to onnx"):
        export_model(made(), tmp_path / "m", "openvino", opset=18)
    assert not list(tmp_path.iterdir())


@pytest.mark.export
def test_the_other_outputs(tmp_path: Path) -> None:
    model = made("hybrid, swiglu")
    images = pictures(model, 3)
    shares = export_model(model, tmp_path / "p", "program", output="probabilities")
    assert shares.output_shape == ["batch", 5]
    wanted = torch.from_numpy(expected(model, images)).softmax(1).numpy()
    assert close(opened(tmp_path / "p")(images), wanted)
    features = export_model(model, tmp_path / "f", "program", output="features")
    assert features.output_shape == ["batch", 8] and features.parity.agreement is None
    with torch.no_grad():
        assert close(opened(tmp_path / "f")(images), model.features(torch.from_numpy(images)).numpy())


@pytest.mark.export
def test_without_a_classifier_there_are_features_only(tmp_path: Path) -> None:
    model = made(classes=0)
    with pytest.raises(UsageError, match=r"no classifier.*output features"):
        export_model(model, tmp_path / "m", "program")
    for to, how in (("web", {}), ("onnx", {"precision": "int8", "calibrate": Data("photos")})):
        with pytest.raises(UsageError, match="needs one: vitrail finetune DIR --from MODEL"):  # and no features
            export_model(model, tmp_path / "m", to, **how)
    assert export_model(model, tmp_path / "m", "program", output="features").output_shape == ["batch", 16]


@pytest.mark.export
@pytest.mark.parametrize(
    ("to", "precision", "tolerance"),
    [
        ("onnx", "float16", 2e-2),
        ("openvino", "bf16", 1e-1),
        *(
            pytest.param(*case, marks=pytest.mark.nightly("the same types and runtimes in the other pairs"))
            for case in (("openvino", "float16", 2e-2), ("program", "bf16", 1e-1))
        ),
    ],
)
def test_smaller_weights_have_a_tolerance_of_their_own(
    to: Any, precision: Any, tolerance: float, tmp_path: Path
) -> None:
    model = made(width=64, heads=4, depth=1, mlp_dim=2048)
    half = export_model(model, tmp_path / "half", to, precision=precision)
    assert 1e-5 < half.parity.relative < tolerance == half.parity.tolerance
    weights = half.files["model.bin" if to == "openvino" else next(iter(half.files))]
    assert weights < 0.6 * 4 * sum(parameter.numel() for parameter in model.parameters())


def test_what_a_runtime_cannot_compute_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="programs for onnx in bf16; valid: float32, float16"):
        export_model(made(), tmp_path / "m", "onnx", precision="bf16")


@pytest.mark.export
def test_a_large_network_keeps_its_weights_in_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.onnx._internal.exporter import _onnx_program

    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 1000)  # ONNX files end at 2 GB
    model = made(depth=1)
    result = export_model(model, tmp_path / "m")
    assert list(result.files) == ["model.onnx", "model.onnx.data", "card.json"]
    images = pictures(model, 2)
    assert close(opened(tmp_path / "m")(images), expected(model, images))


@pytest.mark.export
def test_the_size_is_that_of_the_card(tmp_path: Path) -> None:
    """Not that which positions were learned for, where the two differ."""
    from dataclasses import replace

    from vitrail.data.settings import Preprocess

    for name, size in (("plain", (20, 8)), ("BiT", (24, 48))):
        model = made(name)
        model.card = replace(model.card, preprocess=Preprocess(size))
        assert export_model(model, tmp_path / name, "program").input_shape == ["batch", 3, *size]
        images = pictures(model, 2)
        assert close(opened(tmp_path / name)(images), expected(model, images))
    model = made()
    model.card = replace(model.card, preprocess=Preprocess((18, 16)))
    with pytest.raises(UsageError, match="sides divisible by 4"):
        export_model(model, tmp_path / "m")


@pytest.mark.export
def test_images_of_yours(tmp_path: Path, shared_data: Path) -> None:
    photos = sorted(shared_data.rglob("*.jpg"))[:2]
    result = export_model(made(), tmp_path / "m", "program", images=photos)
    assert (result.parity.images, result.parity.real) == (4, 2)  # filled up, for both batch sizes
    assert "2 of yours" in str(result.parity)
    with pytest.raises(DataError, match="nothing"):
        export_model(made(), tmp_path / "n", images=[tmp_path / "none.jpg"])


@pytest.mark.export
def test_what_is_there_is_kept(programs: Programs, tmp_path: Path) -> None:
    first = programs("distilled, parallel", "program")
    folder = shutil.copytree(first.folder, tmp_path / "m")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(ExportError, match=r"exists already.*--overwrite"):
        export_model(made("BEiT"), folder, "program")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    (folder / "notes.txt").write_text("mine")
    again = export_model(made("BEiT"), folder, "program", overwrite=True)
    assert again.files["card.json"] != first.files["card.json"]
    assert sorted(file.name for file in folder.iterdir()) == ["card.json", "model.pt2", "notes.txt"]
    assert sorted(tmp_path.iterdir()) == [folder]


def test_impossible_wishes(tmp_path: Path) -> None:
    model = made()
    with pytest.raises(UsageError, match="Did you mean 'onnx'"):
        export_model(model, tmp_path / "m", "onxx")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Valid: logits"):
        export_model(model, tmp_path / "m", output="classes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="looks like a file; give a folder"):
        export_model(model, tmp_path / "model.onnx")
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="is a file"):
        export_model(model, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.export
def test_a_network_of_one_channel_is_described_as_one(tmp_path: Path) -> None:
    """Nothing says how an image becomes its channels, so no page and no verb has images for it."""
    model = made(channels=1)
    export_model(model, tmp_path / "one", "onnx")
    about = json.loads((tmp_path / "one" / "card.json").read_text())
    assert about["input"]["meaning"].startswith("1 channel, 0 to 255") and "picture" not in about["preprocess"]
    with pytest.raises(UsageError, match="other bands"):
        export_model(model, tmp_path / "page", "web")
    Image.new("RGB", (20, 20)).save(tmp_path / "photo.png")
    save(model, tmp_path / "network")
    for place in ("one", "network"):
        with pytest.raises(UsageError, match=r"takes images of 1 channel.*--data.channels 1"):
            vitrail.predict(tmp_path / place, tmp_path / "photo.png")
