"""Fault 47: a network that cannot be expressed, numbers that differ, no room. Nothing is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Programs, made
from torch import Tensor

from vitrail import cli
from vitrail.errors import ExportError
from vitrail.exports import onnx as onnx_export
from vitrail.exports.write import export_model
from vitrail.model.build import create
from vitrail.model.head import ClassToken
from vitrail.version import install_extra
from vitrail.weights.save import save

onnx = pytest.importorskip("onnx")


def network(**changes: Any) -> Any:
    torch.manual_seed(0)
    values = dict(width=16, depth=1, heads=2, mlp_dim=32, image_size=(8, 8), classes=3)
    model = create("Ti/4", **{**values, **changes})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    save(network(), tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.export
def test_47_an_operator_that_onnx_does_not_have(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = ClassToken.forward
    monkeypatch.setattr(ClassToken, "forward", lambda *given: torch.special.bessel_j0(pool(*given)))
    before = left(tmp_path)
    assert cli.main(["export", str(model_folder), "--out", str(tmp_path / "new" / "deep" / "out")]) == 1
    error = capsys.readouterr().err
    assert "ONNX cannot express this network" in error and "bessel_j0" in error and "Traceback" not in error
    assert left(tmp_path) == before


@pytest.mark.export
def test_47_a_network_that_decides_by_what_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(_: ClassToken, tokens: Tensor, prefix: int) -> Tensor:
        return tokens[:, 0] if tokens.sum() > 0 else tokens[:, 1]

    monkeypatch.setattr(ClassToken, "forward", forward)
    monkeypatch.setattr(ClassToken, "__init__", lambda self, tokens=1: torch.nn.Module.__init__(self))
    monkeypatch.setattr(ClassToken, "reads", None, raising=False)
    with pytest.raises(ExportError, match=r"torch\.export cannot trace this network: .*data-dependent"):
        export_model(network(), tmp_path / "out")
    assert left(tmp_path) == []


@pytest.mark.export
def test_47_numbers_that_differ(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program whose classifier's weights are 1 % larger in the file."""
    plain = programs().folder  # made before exporting is patched

    def tampered(traced: Any, path: Path, about: dict[str, Any]) -> None:
        model = onnx.load(plain / "model.onnx")
        (weight,) = (tensor for tensor in model.graph.initializer if list(tensor.dims) in ([5, 16], [16, 5]))
        values = onnx.numpy_helper.to_array(weight)
        weight.CopyFrom(onnx.numpy_helper.from_array((values * np.float32(1.01)).astype(np.float32), weight.name))
        onnx.save(model, path)

    save(made(), tmp_path / "saved")
    out = shutil.copytree(programs("distilled, parallel", "program").folder, tmp_path / "out")
    good = {path: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(onnx_export, "write", tampered)
    for argv in (["--out", str(out), "--overwrite"], ["--out", f"{out}-2", "--to", "openvino"]):
        assert cli.main(["export", str(tmp_path / "saved"), *argv]) == 1
        error = capsys.readouterr().err
        assert "differ from the network's" in error and "allowed 0.0001" in error
        assert not Path(f"{out}-2").exists()
        assert {path: path.read_bytes() for path in out.iterdir()} == good


@pytest.mark.export
def test_47_a_program_that_its_runtime_refuses(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = programs().folder  # made before exporting is patched

    def from_the_future(traced: Any, path: Path, about: dict[str, Any]) -> None:
        model = onnx.load(plain / "model.onnx")
        model.opset_import[0].version = 999
        onnx.save(model, path)

    monkeypatch.setattr(onnx_export, "write", from_the_future)
    with pytest.raises(ExportError, match=r"ONNX Runtime [\d.]+ does not run it: (?s:.)*[Oo]pset 999"):
        export_model(made(), tmp_path / "out")
    assert left(tmp_path) == []


@pytest.mark.export
def test_161_an_opset_that_torch_does_not_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = torch.onnx.export

    def without_conversion(*given: Any, opset_version: int, **more: Any) -> Any:
        return export(*given, opset_version=20, **more)  # as torch does, with a line in its log

    monkeypatch.setattr(torch.onnx, "export", without_conversion)
    with pytest.raises(ExportError, match=r"torch cannot write this network with opset 21, only with 20"):
        export_model(network(), tmp_path / "out", opset=21)
    assert left(tmp_path) == []


@pytest.mark.export
@pytest.mark.parametrize("to", ["onnx", "program"])
def test_47_a_full_disk(to: Any, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("this test mounts a file system, which this user may not")
    try:
        with pytest.raises(ExportError, match=r"cannot write .*(No space left|disk)"):
            export_model(network(width=64), disk / "out", to)
        assert left(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_47_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_keywords: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "mkdir", refuse)  # who runs the tests may be allowed to write anywhere
    with pytest.raises(ExportError, match=f"cannot write {tmp_path / 'out'}: Permission denied"):
        export_model(network(), tmp_path / "out")


def test_47_a_package_that_is_not_installed(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package, to in (("onnxruntime", "onnx"), ("openvino", "openvino"), ("onnxscript", "openvino")):
        monkeypatch.setitem(sys.modules, package, None)
        assert cli.main(["export", str(model_folder), "--to", to, "--out", str(tmp_path / "out")]) == 2
        assert f"needs {package}: {install_extra('engines')}" in capsys.readouterr().err
        monkeypatch.undo()
    assert not (tmp_path / "out").exists()
