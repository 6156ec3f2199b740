"""`vitrail export`, and `vitrail predict` with what it wrote."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import ROOT, blocks, refused, shell_commands
from PIL import Image, ImageFilter
from scipy.special import softmax

import vitrail
from vitrail import cli
from vitrail.data.settings import Preprocess
from vitrail.errors import ExportError, UsageError, WeightsError
from vitrail.exports import onnx as onnx_export
from vitrail.exports.kinds import Opened
from vitrail.tasks.predict import predict_files
from vitrail.weights.card import Card
from vitrail.weights.confidence import Confidence
from vitrail.weights.save import save

onnxruntime = pytest.importorskip("onnxruntime")
PAGE = ROOT / "docs" / "export.md"
NAMES = ["aster", "daisy", "iris", "rose"]
TEMPERATURE = 4.0


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a folder as a run leaves it."""
    torch.manual_seed(0)
    model: Any = vitrail.create("Ti/8", width=32, depth=1, heads=2, mlp_dim=32, image_size=(16, 24), classes=4)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.0 if name.endswith("bias") else 0.5)  # classes that depend on the image
    model.card = Card(
        model.config,
        NAMES,
        Preprocess((16, 24), crop=0.8),
        confidence=Confidence(temperature=TEMPERATURE),
    )
    folder = tmp_path_factory.mktemp("runs") / "flowers"
    save(model, folder / "model" / "best")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve smooth pictures of many shapes, in two folders."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(12):
        height, width = rng.integers(20, 90, 2)
        blotches = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        (folder / "ab"[number % 2]).mkdir(exist_ok=True)
        blotches.filter(ImageFilter.GaussianBlur(4)).save(folder / "ab"[number % 2] / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def program(run_folder: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "flowers-onnx"
    vitrail.export(run_folder, photos, out=folder)
    return folder


def run(*argv: object) -> int:
    return cli.main([str(word) for word in argv])


@pytest.mark.export
def test_the_verb_names_its_folder_and_tells_the_parity(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("export", run_folder) == 0
    out, err = capfd.readouterr()  # of the process: the libraries below have much to say
    assert "wrote model.onnx, card.json into flowers-onnx" in out and "uint8 images [batch, 3, 16, 24]" in out
    assert "parity: onnxruntime" in out and "(allowed 0.0001)" in out and len(out.splitlines()) == 5
    assert "ONNX opset 20, needs onnxruntime>=1.21\n" in out and "temperature 4 before" in out
    assert err == ""
    assert run("export", run_folder) == 1
    assert "flowers-onnx exists already" in capfd.readouterr().err
    assert run("export", run_folder, "--to", "program", "--image-size", "32", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["folder"] == "flowers-program"
    assert found["input_shape"] == ["batch", 3, 32, 32] and found["parity"]["relative"] < 1e-4


@pytest.mark.export
def test_a_program_of_another_size_keeps_the_temperature_as_predict_does(
    run_folder: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = vitrail.export(run_folder, to="onnx", out=tmp_path / "out", image_size=32)
    assert made.temperature == TEMPERATURE
    assert "the temperature of its probabilities" in caplog.text and "another size" in caplog.text
    of_program = vitrail.predict(made.folder, photos).rows
    network = vitrail.load(run_folder, image_size=32)
    paths = [row.path for row in of_program]
    for row, wanted in zip(of_program, predict_files(network, paths, precision="float32"), strict=True):
        assert row.classes == wanted.classes
        np.testing.assert_allclose(row.probabilities, wanted.probabilities, atol=1e-4)


@pytest.mark.export
def test_weights_of_another_library(run_folder: Path, tmp_path: Path) -> None:
    save(vitrail.load(run_folder), tmp_path / "vit", "timm")
    made = vitrail.export(tmp_path / "vit", to="program", out=tmp_path / "out")
    assert json.loads((made.folder / "card.json").read_text())["source"] == "timm"


@pytest.fixture(scope="module")
def openvino_program(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vitrail.export(run_folder, to="openvino", out=tmp_path_factory.mktemp("exported") / "openvino").folder


@pytest.mark.export
@pytest.mark.parametrize("to", ["program", "openvino_program"])
def test_predict_asks_a_program(
    to: str, run_folder: Path, photos: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = request.getfixturevalue(to)
    wanted = {row.path: row for row in vitrail.predict(run_folder, photos, precision="float32").rows}
    assert len({row.classes[0] for row in wanted.values()}) > 1
    for source in (folder, next(file for file in folder.iterdir() if file.suffix in (".onnx", ".xml"))):
        found = vitrail.predict(source, photos)
        assert {row.path: row.classes for row in found.rows} == {path: row.classes for path, row in wanted.items()}
        for row in found.rows:
            np.testing.assert_allclose(row.probabilities, wanted[row.path].probabilities, atol=1e-4)
    assert run("predict", folder, photos, "--precision", "bf16") == 2
    assert "the precision and the runtime of its export" in capsys.readouterr().err


@pytest.mark.export
def test_python_loads_a_program_in_place_of_the_network(run_folder: Path, program: Path, photos: Path) -> None:
    model = vitrail.load(run_folder, kind=vitrail.ViT)
    images = torch.randint(0, 256, (3, 3, 16, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for engine in (vitrail.load(program), vitrail.load(program / "model.onnx", kind=vitrail.Engine)):
        assert isinstance(engine, vitrail.Engine) and engine.card.class_names == NAMES
        assert engine.config == model.config and program.name in repr(engine)
        with torch.no_grad():
            torch.testing.assert_close(engine(images), model(images), atol=1e-4, rtol=1e-4)
    with pytest.raises(UsageError, match="computes logits, not features: vitrail export MODEL --output features"):
        engine.features(images)
    with pytest.raises(UsageError, match="takes uint8 images from 0 to 255, and these are"):
        engine(images.float())
    with pytest.raises(ExportError, match="does not run it"):
        engine(images[:, :, :8])
    with pytest.raises(UsageError, match="cannot be changed: remove classes, image_size"):
        vitrail.load(program, classes=3, image_size=32)
    with pytest.raises(WeightsError, match="is an exported program, and kind is ViT"):
        vitrail.load(program, kind=vitrail.ViT)
    with pytest.raises(WeightsError, match=r"holds an exported program \(model.onnx\), and here the weights"):
        vitrail.finetune(photos, weights=program)
    with pytest.raises(WeightsError, match="holds no program"):
        vitrail.load(run_folder, kind=vitrail.Engine)
    with pytest.raises(UsageError, match=r"valid: vitrail.ViT, vitrail.ResNet, vitrail.Engine"):
        vitrail.load(run_folder, kind=torch.nn.Linear)


@pytest.mark.export
def test_evaluate_and_embed_ask_a_program(
    run_folder: Path, program: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(photos.rglob("*.png"))
    rows = ["path,label", *(f"{file},{NAMES[number % 4]}" for number, file in enumerate(files))]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    found = [
        vitrail.evaluate(run_folder, tmp_path / "labels.csv", precision="float32", device="cpu"),
        vitrail.evaluate(program, tmp_path / "labels.csv"),
    ]
    ours, theirs = (one.results for one in found)
    assert ours.top.tolist() == theirs.top.tolist() and ours.count == 12
    np.testing.assert_allclose(ours.probability, theirs.probability, atol=1e-4)
    assert run("evaluate", program, tmp_path / "labels.csv", "--image-size", "32") == 2
    assert "Remove --image-size\n" in capsys.readouterr().err  # and no flag that was not given
    features = vitrail.export(run_folder, out=tmp_path / "features", output="features").folder
    vitrail.embed(features, photos, out=tmp_path / "theirs.npz")
    vitrail.embed(run_folder, photos, out=tmp_path / "ours.npz", precision="float32", device="cpu")
    first, second = (np.load(tmp_path / name)["features"] for name in ("ours.npz", "theirs.npz"))
    np.testing.assert_allclose(first, second, atol=1e-4 * np.abs(first).max())
    assert run("embed", program, photos, "--out", tmp_path / "x.npz") == 1
    assert "computes logits, not features" in capsys.readouterr().err
    assert run("embed", features, photos, "--out", tmp_path / "x.npz", "--tokens") == 2
    assert "is an exported program, which computes no tokens" in capsys.readouterr().err


@pytest.mark.export
def test_predict_with_a_program_goes_on_where_it_was_and_fills_folders(
    program: Path, photos: Path, tmp_path: Path
) -> None:
    alone = vitrail.predict(program, photos)
    for out in (tmp_path / "a.csv", tmp_path / "folder"):
        first = vitrail.predict(program, photos, out=out)
        assert first.out == str(out) if out.suffix else first.state.complete
    import pyarrow.parquet as pq

    (part,) = (tmp_path / "folder").glob("*.parquet")
    assert [row.classes for row in alone.rows] == pq.read_table(part).column("classes").to_pylist()


@pytest.mark.export
def test_programs_that_predict_does_not_run(
    program: Path, openvino_program: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(program, tmp_path / "p")
    (tmp_path / "p" / "model.onnx").rename(tmp_path / "p" / "model.pt2")
    with pytest.raises(ExportError, match="can hold code"):
        vitrail.predict(tmp_path / "p", photos)
    (tmp_path / "broken.onnx").write_bytes(b"no program")
    with pytest.raises(ExportError, match=r"broken\.onnx: ONNX Runtime [\d.]+ does not run it: "):
        vitrail.predict(tmp_path / "broken.onnx", photos)
    shutil.copytree(openvino_program, tmp_path / "openvino")
    file = tmp_path / "openvino/model.xml"
    file.write_text(re.sub(r'type="(Add|MatMul)"', 'type="Lost"', file.read_text()))
    with pytest.raises(ExportError, match=r"model\.xml: OpenVINO \S+ does not read it: (?!Exception from).*Lost"):
        vitrail.predict(tmp_path / "openvino", photos)
    opened = onnx_export.read(program / "model.onnx")
    for about, message in (
        ({}, "was not exported by this version of vitrail: its description has format None"),
        (told(opened.about, "features"), "computes features, not classes"),
    ):
        monkeypatch.setattr(onnx_export, "read", lambda path, device, about=about: Opened(opened.run, about))
        with pytest.raises(ExportError, match=message):
            vitrail.predict(program, photos)


def told(about: dict[str, Any], output: str) -> dict[str, Any]:
    return {**about, "output": {**about["output"], "name": output}}


@pytest.mark.export
def test_probabilities_are_predicted_as_they_are(program: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = vitrail.predict(program, photos).rows
    opened = onnx_export.read(program / "model.onnx")
    shares = Opened(
        lambda images: softmax(opened.run(images) / TEMPERATURE, axis=1), told(opened.about, "probabilities")
    )
    monkeypatch.setattr(onnx_export, "read", lambda path, device: shares)
    for ours, theirs in zip(vitrail.predict(program, photos).rows, wanted, strict=True):
        assert ours.classes == theirs.classes
        np.testing.assert_allclose(ours.probabilities, theirs.probabilities, atol=1e-5)


def test_a_model_folder_is_no_place_for_a_program(run_folder: Path) -> None:
    folder = run_folder / "model" / "best"
    with pytest.raises(ExportError, match="holds a model"):
        vitrail.export(run_folder, out=folder, overwrite=True)
    assert vitrail.load(folder)


def run_the_page(program: Path, files: list[str]) -> list[tuple[str, float]]:
    """What the example of the page prints for each file, without vitrail and torch: the best class, its probability."""
    *_, example = (block.text for block in blocks(PAGE) if block.language == "python")
    script = f"""
import sys
sys.modules["torch"] = sys.modules["vitrail"] = None
for file in {files!r}:
    exec({example!r}.replace("flowers-onnx/", {str(program)!r} + "/").replace('"rose.jpg"', repr(file)), {{}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    return list(zip(words[::2], map(float, words[1::2]), strict=True))


def close_to_predict(found: list[tuple[str, float]], rows: Any, allowed: float) -> bool:
    """Whether all classes are those of `predict`, and all probabilities closer than `allowed`."""
    return len(found) == len(rows) > 0 and all(
        name == row.classes[0] and abs(probability - row.probabilities[0]) < allowed
        for (name, probability), row in zip(found, rows, strict=True)
    )


@pytest.mark.export
def test_the_example_of_the_page_needs_neither_vitrail_nor_torch(
    program: Path, run_folder: Path, photos: Path, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1, 101, 3), dtype=np.uint8)
    strip = Image.fromarray(pixels).resize((505, 5))  # longer than 8 to 1, and its middle between two pixels
    strip.save(tmp_path / "strip.png")
    rows = vitrail.predict(run_folder, photos, tmp_path, precision="float32", device="cpu").rows
    found = run_the_page(program, [str(row.path) for row in rows])
    assert close_to_predict(found, rows, 5e-3)  # Pillow and torch round a few of so few pixels differently


@pytest.mark.export
def test_the_example_of_the_page_resizes_bicubically(run_folder: Path, photos: Path, tmp_path: Path) -> None:
    network: Any = vitrail.load(run_folder)
    preprocess = replace(network.card.preprocess, interpolation="bicubic")
    network.card = replace(network.card, preprocess=preprocess)
    vitrail.save(network, tmp_path / "bicubic")
    vitrail.export(tmp_path / "bicubic", out=tmp_path / "program", to="onnx")
    rows = vitrail.predict(tmp_path / "bicubic", photos, precision="float32", device="cpu").rows
    plain = vitrail.predict(run_folder, photos, precision="float32", device="cpu").rows
    assert any(one.probabilities != other.probabilities for one, other in zip(rows, plain, strict=True))
    found = run_the_page(tmp_path / "program", [str(row.path) for row in rows])
    assert close_to_predict(found, rows, 5e-3)


@pytest.mark.export
def test_the_example_of_the_page_keeps_the_shapes_of_images(tmp_path: Path) -> None:
    photographs, random = tmp_path / "shapes", np.random.default_rng(0)
    for number, shape in enumerate([(60, 90), (90, 60), (64, 64), (40, 130), (300, 30)] * 4):
        place = photographs / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8)).save(place)
    small: dict[str, Any] = dict(model="Ti/8", vit={"depth": 1}, image_size=48, preprocess={"resize": "native"})
    quick: dict[str, Any] = dict(duration="2 steps", batch_size=4, device="cpu", workers=0)
    folder = vitrail.train(photographs, out=str(tmp_path / "runs"), **small, **quick).folder
    vitrail.export(folder, out=tmp_path / "program", to="onnx")
    rows = vitrail.predict(folder, photographs, precision="float32", device="cpu").rows
    found = run_the_page(tmp_path / "program", [str(row.path) for row in rows])
    assert close_to_predict(found, rows, 5e-3)  # images of noise, whose rounding differs most


@pytest.mark.export
def test_the_example_of_the_page_reads_odd_images_as_predict_does(
    program: Path, run_folder: Path, shared_data: Path
) -> None:
    folder = shared_data / "awkward-images"
    if not folder.is_dir():
        pytest.skip(f"no odd images at {folder}")
    rows = vitrail.predict(run_folder, folder, precision="float32", device="cpu").rows
    found = run_the_page(program, [str(row.path) for row in rows])
    assert len(rows) > 40 and close_to_predict(found, rows, 1e-3)


def test_the_commands_of_the_page_are_accepted() -> None:
    texts = [block.text for block in blocks(PAGE) if block.language == "bash"]
    commands = [words for text in texts for words in shell_commands(text) if words[0] == "vitrail"]
    assert len(commands) == 16 and not any(refused(words) for words in commands)


@pytest.mark.export
def test_a_program_that_computes_something_else_on_another_machine(
    program: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(program, tmp_path / "copy")
    about = json.loads((copy / "card.json").read_text())
    here = about["origin"]["processor"]

    def predict(**changed: object) -> tuple[int, str]:
        (copy / "card.json").write_text(json.dumps({**about, "origin": {**about["origin"], **changed}}))
        return cli.main(["predict", str(copy), str(photos)]), capsys.readouterr().err

    assert predict(processor="Another CPU")[0] == 0
    other = [value + 0.5 for value in about["origin"]["outputs"]]
    assert predict(outputs=other)[0] == 0  # nothing is computed twice on the machine that checked it
    for changed in ({"processor": "Another CPU"}, {"runtime": "onnxruntime 1.0"}):
        code, said = predict(outputs=other, **changed)
        said = " ".join(said.split())
        assert code == 1 and "computes something else on this machine" in said and f"this is {here}" in said
        assert f"exported on {changed.get('processor', here)}" in said and "allowed 0.0001" in said
    for wrong in ({"outputs": "none"}, {"outputs": [1.0, 2.0], "processor": "Another CPU"}, {"place": 1}):
        assert predict(**wrong)[0] == 1


@pytest.mark.export
def test_settings_of_int8_have_no_effect_without_it(
    run_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=r"only int8 programs may lose accuracy.*max-drop"):
        vitrail.export(run_folder, to="program", out=tmp_path / "out", max_drop=7)
    vitrail.export(run_folder, to="program", out=tmp_path / "out", holdout=0.3)
    assert "data.holdout has no effect in this command" in caplog.text
