"""Programs for phones take one image at a time, and compute what the network computes; Core ML's are only written."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import NAMES, Programs, made

import vitrail
from vitrail import cli
from vitrail.data.settings import Preprocess
from vitrail.errors import ExportError, UsageError
from vitrail.exports.kinds import KINDS
from vitrail.exports.write import export_model
from vitrail.weights.save import save

PHONES = ("executorch", "litert", "coreml")
RUN = PHONES[:2]


def needed(to: str) -> None:
    for package in KINDS[to].packages:
        pytest.importorskip(package, reason=f"the extra {to} is not installed")


def pictures(model: Any, count: int, seed: int = 1) -> np.ndarray:
    shape = (count, model.config.channels, *model.card.preprocess.image_size)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def by_itself(file: Path, image: np.ndarray) -> np.ndarray:
    """What a program computes for one image, by its runtime as anybody would use it."""
    if file.suffix == ".pte":
        from executorch.runtime import Runtime

        method = Runtime.get().load_program(file).load_method("forward")
        return method.execute([torch.from_numpy(image)])[0].numpy().copy()
    from ai_edge_litert.interpreter import Interpreter

    signature = Interpreter(str(file)).get_signature_runner()
    return signature(images=image)["logits"]


@pytest.mark.export
@pytest.mark.parametrize("to", RUN)
@pytest.mark.parametrize("name", ["plain", "DINOv3"])
def test_a_program_computes_what_the_network_does(name: str, to: str, programs: Programs) -> None:
    needed(to)
    model, result = made(name), programs(name, to)
    height, width = model.config.image_size
    assert list(result.files) == [KINDS[to].file, "card.json"]
    assert (result.input_shape, result.output_shape) == ([1, 3, height, width], [1, 5])
    assert result.parity.agreement == 1 and result.parity.relative <= 1e-4 and result.parity.images == 4
    images = pictures(model, 3)
    with torch.no_grad():
        wanted = model(torch.from_numpy(images)).numpy()
    found = np.concatenate([by_itself(result.folder / KINDS[to].file, image[None]) for image in images])
    assert found.shape == wanted.shape and np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.export
@pytest.mark.parametrize("to", RUN)
def test_it_takes_the_place_of_the_network(
    to: str, programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed(to)
    model, result = made(), programs("plain", to)
    file = result.folder / KINDS[to].file
    images = torch.from_numpy(pictures(model, 5))
    engine = vitrail.load(file, kind=vitrail.Engine)
    with torch.no_grad():
        torch.testing.assert_close(engine(images), model(images), rtol=1e-4, atol=1e-4)
        pixels = images.to(memory_format=torch.channels_last)  # as decoded images lie in memory
        torch.testing.assert_close(engine(pixels), model(images), rtol=1e-4, atol=1e-4)
    assert engine.card.class_names == NAMES
    Image.fromarray(pictures(model, 1)[0].transpose(1, 2, 0)).save(tmp_path / "a.png")
    assert cli.main(["predict", str(file), str(tmp_path / "a.png")]) == 0
    assert any(name in capsys.readouterr().out for name in NAMES)


@pytest.mark.export
@pytest.mark.parametrize("to", RUN)
def test_numbers_that_differ(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of a network whose classifier's bias is another one."""
    needed(to)
    from vitrail.exports import write

    model, other = made(depth=1), made(depth=1)
    with torch.no_grad():
        other.head.bias += 1.0
    trace = write.trace
    monkeypatch.setattr(write, "trace", lambda _model, *given, **more: trace(other, *given, **more))
    with pytest.raises(ExportError, match=f"outputs of the {to} program differ from the network's"):
        export_model(model, tmp_path / "out", to)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.export
def test_int8_is_measured_and_refused_if_it_loses_more(tmp_path: Path) -> None:
    """Labels are those of the network itself, so that float32 has 100 %; its margins are so small that int8 errs."""
    needed("litert")
    model = made()
    for number, pixels in enumerate(pictures(model, 60)):
        with torch.no_grad():
            best = NAMES[int(model(torch.from_numpy(pixels[None])).argmax())]
        place = tmp_path / "data" / ("test" if number % 3 else "train") / best
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.transpose(1, 2, 0)).save(place / f"{number}.png")
    model.card = replace(model.card, preprocess=Preprocess(model.config.image_size, "squash"))
    how: Any = dict(precision="int8", calibrate=tmp_path / "data")
    result = export_model(model, tmp_path / "out", "litert", max_drop=100, **how)
    found = result.quantised
    assert found is not None and (found.calibrated, found.held_out, found.float_top1) == (0, 40, 1.0)
    assert 0 < found.int8_layers <= found.layers
    files = sorted((tmp_path / "data" / "test").rglob("*.png"))
    images = np.stack([np.asarray(Image.open(file)).transpose(2, 0, 1) for file in files])
    outputs = np.concatenate([by_itself(tmp_path / "out" / "model.tflite", image[None]) for image in images])
    right = [NAMES[row.argmax()] == file.parent.name for row, file in zip(outputs, files, strict=True)]
    assert found.top1 == pytest.approx(np.mean(right)) and "rounded by each image's own ranges" in str(result)
    with torch.no_grad():
        exact = model(torch.from_numpy(images)).numpy()
    assert 1e-4 < np.linalg.norm(outputs - exact) / np.linalg.norm(exact) < 0.1  # int8, neither float32 nor noise
    with pytest.raises(ExportError, match=r"int8 loses .* at most -1 are allowed"):
        export_model(model, tmp_path / "worse", "litert", max_drop=-1, **how)
    assert not (tmp_path / "worse").exists()


@pytest.mark.export
def test_a_program_for_core_ml_is_written_and_not_run(tmp_path: Path) -> None:
    needed("coreml")
    import coremltools

    model = made()
    for precision in ("float32", "float16"):
        result = export_model(model, tmp_path / "m", "coreml", precision=precision, overwrite=True)  # type: ignore[arg-type]
        assert result.parity is None and "parity: not compared" in str(result)
        assert json.loads((tmp_path / "m" / "card.json").read_text())["parity"] is None
        program = coremltools.models.MLModel(str(tmp_path / "m" / "model.mlpackage"), skip_model_load=True)
        described = program.get_spec().description
        image = described.input[0].type.imageType
        assert (described.input[0].name, described.output[0].name) == ("images", "logits")
        assert (image.height, image.width) == model.config.image_size and image.colorSpace == image.RGB
        assert json.loads(program.user_defined_metadata["class_names"]) == NAMES
        weights = sum(parameter.numel() for parameter in model.parameters())
        stored = sum(size for name, size in result.files.items() if name.endswith("weight.bin"))
        assert 0.7 < stored / (weights * (4 if precision == "float32" else 2)) < 1.6


def test_186_what_no_program_for_phones_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(made(), tmp_path / "saved")
    for to in PHONES:
        with pytest.raises(UsageError, match=f"a program for {to} takes images of one size: leave out any_size"):
            export_model(made(), tmp_path / "out", to, any_size=True)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=f"does not write programs for {to} in bf16; valid: float32"):
            export_model(made(), tmp_path / "out", to, precision="bf16")  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, KINDS[to].packages[0], None)
        assert cli.main(["export", str(tmp_path / "saved"), "--to", to, "--out", str(tmp_path / "out")]) == 2
        assert f"(vitrail's extra {to})" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.export
@pytest.mark.parametrize("to", RUN)
def test_187_a_program_that_is_damaged_or_alone(to: str, programs: Programs, tmp_path: Path) -> None:
    needed(to)
    folder = shutil.copytree(programs("plain", to).folder, tmp_path / "p")
    file = folder / KINDS[to].file
    whole = file.read_bytes()
    for part in (b"", whole[:100], bytes(len(whole))):
        file.write_bytes(part)
        with pytest.raises(ExportError, match=f"{file.name}: .* does not read it"):
            vitrail.load(folder)
    file.write_bytes(whole)
    (folder / "card.json").unlink()
    with pytest.raises(ExportError, match=f"{file.name}: .*card.json"):
        vitrail.load(file)


def test_187_a_program_for_core_ml_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "model.mlpackage").mkdir()
    (tmp_path / "card.json").write_text("{}")
    for source in (tmp_path, tmp_path / "model.mlpackage"):
        with pytest.raises(ExportError, match=r"model\.mlpackage is a program for Core ML, which runs on macOS"):
            vitrail.load(source)
