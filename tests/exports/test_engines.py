"""Engines: what computes a network on a CPU, and how the fastest is found."""

from __future__ import annotations

import json
import logging
import multiprocessing
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import server
from PIL import Image
from small_models import Programs, made

import vitrail
from vitrail import cli
from vitrail.errors import ExportError, UsageError
from vitrail.exports import engines as module
from vitrail.exports.engine import Engine
from vitrail.exports.engines import Engines, TimedEngine, engine_predictor
from vitrail.exports.kinds import RuntimeName
from vitrail.server.served_model import AttentionQuery, ServedModel
from vitrail.weights.save import save

pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def some_images(model: Any, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, *model.config.image_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def seeded(engines: Engines, programs: Programs, *names: RuntimeName) -> Engines:
    """Engines of the plain network, with programs in their cache that were written for it before."""
    for name in names:
        place = engines.folder / f"{name}-logits"
        if not place.exists():
            shutil.copytree(programs("plain", name).folder, place)
    return engines


@pytest.mark.export
@pytest.mark.parametrize(("engine", "name", "features"), [("openvino", "plain", True), ("onnx", "BiT", False)])
def test_every_engine_computes_the_network(engine: Any, name: str, features: bool) -> None:
    """Of the four pairs these write programs: what such a program computes is that of test_export."""
    model = made(name)
    images = some_images(model)
    with torch.no_grad():
        found = engine_predictor(model, CPU, "float32", engine=engine, features=features)(images)
        assert close(found, model.features(images) if features else model(images))


@pytest.mark.export
@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_an_engine_is_opened_anew_where_it_is_unpickled(programs: Programs, kind: str) -> None:
    model, engine = made(), vitrail.load(programs("plain", kind).folder, kind=vitrail.Engine)
    images = some_images(model)
    with torch.no_grad():
        assert close(engine(images), model(images))
    other = pickle.loads(pickle.dumps(engine))
    assert other.path == engine.path and torch.equal(other(images), engine(images))


@pytest.mark.export
def test_a_program_is_written_once_for_each_network(caplog: pytest.LogCaptureFixture) -> None:
    model = made(depth=1)
    with caplog.at_level(logging.INFO, logger="vitrail"):
        first, again = (Engines(model, "float32").program("openvino").path for _ in range(2))
    assert first == again and caplog.text.count("writing a program for openvino, once") == 1
    assert first.is_relative_to(Engines(model, "float32").folder)
    with torch.no_grad():
        model.head.bias += 1
    assert not first.is_relative_to(Engines(model, "float32").folder)


def row(engine: Any, speed: float) -> TimedEngine:
    return TimedEngine(engine, "float32", speed, 1.0, 1, 0.0)


@pytest.mark.export
def test_auto_takes_the_fastest_that_was_measured(programs: Programs, caplog: pytest.LogCaptureFixture) -> None:
    model = made()
    found = Engines(model, "float32")
    assert found.fastest() == "torch" and not (found.folder.parent).exists()  # nothing is written by looking
    assert not isinstance(engine_predictor(model, CPU, "float32"), Engine)
    seeded(found, programs, "openvino")
    for speed, chosen in ((102.0, "torch"), (110.0, "openvino"), (90.0, "torch")):
        found.remember([row("torch", 100.0), row("openvino", speed)])
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="vitrail"):
            assert found.fastest() == chosen
        assert f"engine {chosen}: " in caplog.text and "torch" in caplog.text
    found.remember([row("torch", 100.0), row("openvino", 200.0)])
    assert isinstance(engine_predictor(model, CPU, "float32"), Engine)
    other = made()
    with torch.no_grad():
        other.head.bias += 1
    assert Engines(other, "float32").fastest() == "torch"  # another network was not measured


@pytest.mark.export
def test_an_engine_that_is_gone_is_not_chosen(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    found = seeded(Engines(made(), "float32"), programs, "onnx")
    found.remember([row("torch", 1.0), row("onnx", 9.0)])
    folder, versions = found.folder, module._version
    monkeypatch.setattr(module, "_version", lambda name: "" if name == "onnxruntime" else versions(name))
    gone = Engines(made(), "float32")
    assert gone.names() == ["torch", "openvino"] and gone.fastest() == "torch"
    assert gone.folder != folder  # other versions are other programs


def test_auto_computes_with_torch_if_its_choice_cannot_be_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ExportError("the disk is full")

    model, found = made(), Engines(made(), "float32")
    monkeypatch.setattr(Engines, "program", fails)
    found.remember([row("torch", 1.0), row("onnx", 9.0)])
    images = some_images(model)
    with torch.no_grad():
        assert close(engine_predictor(model, CPU, "float32")(images), model(images))
    assert "engine torch, because the engine onnx cannot be used" in caplog.text
    (found.folder / module.MEASURED).write_text('{"engines": [{"speed": 1}]}')
    assert found.fastest() == "torch" and "is not used" in caplog.text


def test_what_an_engine_cannot_do() -> None:
    model = made()
    with pytest.raises(UsageError, match="onnx does not compute in bf16: add --precision float32"):
        engine_predictor(model, CPU, "bf16", engine="onnx")
    with pytest.raises(UsageError, match="openvino computes on a CPU"):
        engine_predictor(model, torch.device("meta"), "float32", engine="openvino")
    with pytest.raises(UsageError, match="no engine is called 'tensorrt'"):
        vitrail.predict("m", "x.jpg", engine="tensorrt")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="computes no tokens"):
        vitrail.embed("m", "x.jpg", out="x.npz", tokens=True, engine="onnx")


@pytest.mark.export
def test_bench_measures_and_the_verbs_use_it(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(made(), tmp_path / "model")
    engines = seeded(Engines(vitrail.load(tmp_path / "model"), "float32"), programs, "onnx", "openvino")
    started = server()  # its processes need a tenth of the time of new interpreters
    photos = tmp_path / "photos"
    for number, name in enumerate(("ant", "bee") * 4):
        (photos / name).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / name / f"{number}.png")
    words = ["bench", tmp_path / "model", "--engines", "--precision", "float32", "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda _: started)
        assert run(*words, "--seconds", 0.03, "--out", tmp_path / "b") == 0
        assert "will be used (--engine auto)" in " ".join(capsys.readouterr().out.split())
        assert run(*words[:2], *words[3:], "--engine", "onnx", "--seconds", 0.03, "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert [row["engine"] for row in alone["engines"]] == ["onnx"] and alone["used"] is None
    assert run(*words, "--engine", "onnx") == 2 and "give one of them" in capsys.readouterr().err
    assert run(*words[:2], "--precision", "bf16", "--device", "cpu", "--engine", "onnx") == 2
    assert "does not compute in bf16; there are torch, openvino" in capsys.readouterr().err
    rows = json.loads((tmp_path / "b" / "engines.json").read_text())["engines"]
    assert {row["engine"] for row in rows} == {"torch", "openvino", "onnx"}
    assert all(row["images_per_second"] > 0 and row["latency_ms"] > 0 and row["memory_bytes"] > 2**26 for row in rows)
    assert max(row["difference"] for row in rows) < 1e-4 and (tmp_path / "b" / "engines.png").stat().st_size > 5000
    fastest = engines.measurements()
    engines.remember([replace(row, images_per_second=9e9 if row.engine == "openvino" else 1.0) for row in fastest])
    common = dict(device="cpu", precision="float32")
    for verb, said in (("auto", "engine openvino"), ("torch", "")):
        assert run("predict", tmp_path / "model", photos, "--precision", "float32", "--engine", verb, "-v") == 0
        assert said in capsys.readouterr().err
    ours = [vitrail.evaluate(tmp_path / "model", photos, engine=name, **common) for name in ("torch", "onnx", "auto")]
    assert [found.results.top.tolist() for found in ours] == [ours[0].results.top.tolist()] * 3
    for name in ("torch", "openvino"):
        vitrail.embed(tmp_path / "model", photos, out=tmp_path / f"{name}.npz", engine=name, **common)
    first, second = (np.load(tmp_path / f"{name}.npz") for name in ("torch", "openvino"))
    key = next(key for key in first.files if key.endswith("features"))
    assert np.abs(first[key] - second[key]).max() <= 1e-4 * np.abs(first[key]).max()


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.mark.export
def test_a_server_answers_by_an_engine(programs: Programs, tmp_path: Path) -> None:
    answers, model = [], made()
    seeded(Engines(model, "float32"), programs, "onnx")
    for engine in ("torch", "onnx"):
        served = ServedModel("m", model, "cpu", "float32", engine)  # type: ignore[arg-type]
        data = (tmp_path / "a.png").open("wb")
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(data, "PNG")
        data.close()
        answers.append(served.rank([served.prepare((tmp_path / "a.png").read_bytes(), 10**6)])[0])
    assert isinstance(served.predict, Engine)
    assert np.allclose(answers[0].shares, answers[1].shares, atol=1e-5)
    # the program itself
    program = ServedModel("p", served.predict, "cpu")
    image = program.prepare((tmp_path / "a.png").read_bytes(), 10**6)
    assert np.allclose(program.rank([image])[0].shares, answers[1].shares, atol=1e-5)
    (refused,) = program.look([(image, AttentionQuery())])
    assert isinstance(refused, UsageError) and "shows no attention" in str(refused)
    with pytest.raises(UsageError, match="not features"):
        program.features([image])
    assert program.description.parameters == served.description.parameters > 1000
    assert program.description.attention is False


@pytest.mark.export
def test_engines_use_as_many_threads_as_torch(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime
    import openvino

    found: list[Any] = []
    session, compile_model = onnxruntime.InferenceSession, openvino.Core.compile_model
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda program, options, **more: (
            found.append(options.intra_op_num_threads) or session(program, options, **more)
        ),
    )
    monkeypatch.setattr(
        openvino.Core,
        "compile_model",
        lambda core, network, device, settings: (
            found.append(settings["INFERENCE_NUM_THREADS"]) or compile_model(core, network, device, settings)
        ),
    )
    engines = seeded(Engines(made(), "float32"), programs, "onnx", "openvino")
    for name in ("onnx", "openvino"):
        engines.program(name)  # type: ignore[arg-type]
    assert len(found) == 2 and set(found) == {3}
