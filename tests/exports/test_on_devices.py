"""Engines for GPUs, as far as a CPU can show them: AOTInductor compiled here, ONNX Runtime's providers by a stub."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import made

from vitrail.errors import ExportError, UsageError
from vitrail.exports.engine import Engine
from vitrail.exports.engines import Engines, engine_predictor
from vitrail.exports.write import export_model
from vitrail.model.build import build
from vitrail.model.variants import variant

ort = pytest.importorskip("onnxruntime")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TENSORRT, ON_CUDA, ON_CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"


def images_for(model: Any, count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, *model.config.image_size), dtype=torch.uint8)


@pytest.mark.export
@pytest.mark.nightly("test_an_exported_program_of_torch, whose graph AOTInductor compiles")
def test_a_compiled_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    model = made("plain")
    done = export_model(model, tmp_path / "program", "aoti")
    assert done.parity.passed and done.files["model.aoti"] > 0
    with pytest.raises(ExportError, match="can hold code"):  # such a file may be from anywhere
        Engine(tmp_path / "program" / "model.aoti")
    program = Engine(tmp_path / "program" / "model.aoti", "logits", trusted=True)
    for count in (1, 2, 7):
        images = images_for(model, count)
        with torch.inference_mode():
            expected = model(images)
        assert torch.allclose(program(images), expected, rtol=1e-4, atol=1e-4)
    again = pickle.loads(pickle.dumps(program))
    assert torch.equal(again(images), program(images))
    with pytest.raises(ExportError, match="compiled for cpu, and the device is cuda"):
        Engine(program.path, "logits", "cuda", trusted=True)
    # as an engine: written into the cache once, and opened from there
    engine = engine_predictor(model, CPU, "float32", engine="aoti")
    assert torch.allclose(engine(images), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr("vitrail.exports.write.export_model", None)
    assert torch.equal(engine_predictor(model, CPU, "float32", engine="aoti")(images), engine(images))


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], list[int]]]:
    """The providers of each session of a stub of ONNX Runtime, and the batches that it was given."""
    made: list[tuple[list[Any], list[int]]] = []

    class Session:
        def __init__(self, program: Any, options: Any, providers: list[Any]) -> None:
            self.batches: list[int] = []
            made.append((providers, self.batches))

        def get_modelmeta(self) -> Any:
            return SimpleNamespace(custom_metadata_map={"format": '"x"', "program": '{"precision": "float16"}'})

        def run(self, _: None, arguments: dict[str, np.ndarray]) -> list[np.ndarray]:
            (images,) = arguments.values()
            self.batches.append(len(images))
            return [images.reshape(len(images), -1)[:, :2]]

    monkeypatch.setattr(ort, "InferenceSession", Session)
    return made


@pytest.mark.parametrize(
    ("installed", "used"),
    [([TENSORRT, ON_CUDA, ON_CPU], [TENSORRT, ON_CUDA, ON_CPU]), ([ON_CPU, ON_CUDA], [ON_CUDA, ON_CPU])],
)
def test_onnx_runtime_takes_the_fastest_provider_that_is_installed(
    installed: list[str], used: list[str], sessions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.exports import onnx

    monkeypatch.setattr(ort, "get_available_providers", lambda: installed)
    opened = onnx.read(tmp_path / "model.onnx", "cuda:1")
    chosen, batches = sessions[-1]
    assert [one if isinstance(one, str) else one[0] for one in chosen] == used
    settings = dict(one for one in chosen if not isinstance(one, str))
    assert all(options["device_id"] == 1 for options in settings.values())
    if TENSORRT in installed:  # what it builds is stored beside the program, in the program's own precision
        assert settings[TENSORRT]["trt_engine_cache_path"] == str(tmp_path)
        assert settings[TENSORRT]["trt_fp16_enable"] is True
    for count in (1, 2, 3, 5, 8, 9):
        images = np.arange(count * 4, dtype=np.float32).reshape(count, 4)
        assert np.array_equal(opened.run(images), images[:, :2])
    assert batches == [1, 2, 4, 8, 8, 16]  # few sizes, for each of which TensorRT builds an engine


def test_onnx_runtime_without_a_provider_for_gpus(sessions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.exports import onnx

    monkeypatch.setattr(ort, "get_available_providers", lambda: [ON_CPU])
    with pytest.raises(UsageError, match="Install onnxruntime-gpu"):
        onnx.read(Path("model.onnx"), "cuda")
    onnx.read(Path("model.onnx"))
    assert sessions[-1] == ([ON_CPU], [])


def test_what_a_gpu_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime has no bfloat16: on a GPU float16 takes its place, on a CPU float32 has to be asked for."""
    model = made("plain")
    assert [Engines(model, "bf16", CUDA).stored(name) for name in ("onnx", "aoti")] == ["float16", "bf16"]
    assert Engines(model, "float32", CUDA).stored("onnx") == "float32"
    with pytest.raises(UsageError, match="add --precision float32"):
        Engines(model, "bf16", CPU).stored("onnx")
    with pytest.raises(UsageError, match="openvino computes on a CPU"):
        engine_predictor(model, CUDA, engine="openvino")


@pytest.mark.parametrize(
    ("name", "images", "expected"),
    [("B/16", 1_000, "torch"), ("B/16", 5_000_000, "compiled"), ("R50x1", 100_000_000, "torch")],
)
def test_a_gpu_compiles_for_many_images(
    name: str, images: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        network = build(variant(name))
    caplog.set_level("INFO", logger="vitrail")
    assert Engines(network, "float32", CUDA).chosen(lambda: images) == expected
    assert ("engine compiled: at least 9 min" in caplog.text) == (expected == "compiled")
