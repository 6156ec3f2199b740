"""The kinds of program that a model can be exported to, and the packages that each needs. Torch-free."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol

from vitrail.errors import ExportError, UsageError
from vitrail.files import parse_json, read_json_object
from vitrail.ranges import Range
from vitrail.version import install_extra
from vitrail.words import shown

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from torch.export import ExportedProgram

To = Literal["onnx", "openvino", "program", "aoti", "web", "executorch", "litert", "coreml"]
ProgramPrecision = Literal["float32", "float16", "bf16", "int8"]
"""Type in which a program stores its weights, or computes."""
EngineName = Literal["auto", "torch", "compiled", "graphs", "openvino", "onnx", "aoti"]
"""What computes a network's outputs."""
RuntimeName = Literal["openvino", "onnx", "aoti"]
Installed = Literal["torch", "compiled", "graphs", "openvino", "onnx", "aoti"]
"""An engine by its own name."""
OutputName = Literal["logits", "probabilities", "features"]
RunProgram = Callable[["np.ndarray"], "np.ndarray"]
"""images [batch, channels, height, width] -> float32 [batch, outputs], computed by the program's runtime"""
OPSET = 20
"""Default version of ONNX's operators in a program for ONNX Runtime."""
FIRST_RUNTIME = {18: "1.21", 19: "1.21", 20: "1.21", 21: "1.21", 22: "1.21", 23: "1.23"}
"""Valid version of ONNX's operators -> first ONNX Runtime that computes the programs of every network as vitrail does.

Earlier ones know operators up to version 21, but 1.18 ends the process, and 1.20 averages the tokens of an AxialResNet
wrongly (docs/export.md)."""
Opset = Annotated[int, Range(min(FIRST_RUNTIME), max(FIRST_RUNTIME))]
ONNX_IR = 10
"""Version of the format of ONNX files."""
INPUT = "images"
"""Name of the input of every program."""
CARD = "card.json"
"""File beside a program that describes how to use it."""


class Opened(NamedTuple):
    """A program that was opened."""

    run: RunProgram
    about: dict[str, Any]
    """Its description (`vitrail.exports.describe`); empty if it has none."""
    compute: Callable[[Tensor], Tensor] | None = None
    """The same for tensors on any device, without a copy to the CPU, if the runtime has it."""


class Scheme(NamedTuple):
    """Which operations are quantised to int8 on this runtime and processor."""

    left_out: list[str]
    """Names of the products that are computed faster in another type."""
    symmetric: bool
    """Whether the ranges of activations have zero in the middle. Else they are as narrow as possible."""


class Runtime(Protocol):
    """The functions that the module of each kind has."""

    def write(self, traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
        """Write a traced network and its description to `path`, further files beside it."""

    def read(self, path: Path, device: str = "cpu") -> Opened:
        """Open the program at `path` on a device. Raises ExportError if the runtime rejects it."""


@dataclass(frozen=True)
class ProgramKind:
    """One kind of program."""

    file: str
    """Name of its file."""
    packages: tuple[str, ...]
    """Packages needed to write it and to read it; the last one runs it."""
    precisions: tuple[ProgramPrecision, ...]
    """Types that its weights can have. Its runtime supports them on a CPU, where outputs are compared."""
    traced: tuple[ProgramPrecision, ...]
    """Precisions in which the network itself is traced. In the other precisions only the weights are stored."""
    attention: Literal["fused", "explicit"]
    """How attention is traced (`vitrail.model.fast.attention`). ONNX has no operator for the fused one: torch would
    write it with more transpositions than the explicit one has."""
    module: str = ""
    """Kind whose module writes and reads it; "" for its own."""
    single: bool = False
    """Whether it takes one image of one size at a time, as on phones, whose runtimes plan their memory in advance."""
    runs: bool = True
    """Whether it is run and compared. The runtime of Core ML is a part of macOS and iOS."""


ONNX = ProgramKind(
    "model.onnx",
    ("onnx", "onnxscript", "onnxruntime"),
    ("float32", "float16", "int8"),
    ("float32", "float16"),
    "explicit",
)
PHONE = ProgramKind("model.pte", ("executorch",), ("float32",), ("float32",), "fused", single=True)
KINDS: dict[str, ProgramKind] = {
    "onnx": ONNX,
    "openvino": ProgramKind(
        "model.xml",
        ("onnx", "onnxscript", "openvino"),
        ("float32", "float16", "bf16", "int8"),
        ("float32",),
        "explicit",
    ),
    "program": ProgramKind(
        "model.pt2", ("torch",), ("float32", "float16", "bf16"), ("float32", "float16", "bf16"), "fused"
    ),
    "aoti": ProgramKind(
        "model.aoti", ("torch",), ("float32", "float16", "bf16"), ("float32", "float16", "bf16"), "fused"
    ),
    "web": replace(ONNX, precisions=("float32", "int8"), module="onnx"),
    "executorch": PHONE,
    "litert": replace(
        PHONE,
        file="model.tflite",
        packages=("litert_torch", "ai_edge_litert"),
        precisions=("float32", "int8"),
        attention="explicit",
    ),
    "coreml": replace(
        PHONE, file="model.mlpackage", packages=("coremltools",), precisions=("float32", "float16"), runs=False
    ),
}


def runtime(to: str, *, writing: bool = True) -> Runtime:
    """Return the module of a kind. Raises UsageError, naming the extra, if a package it needs is not installed.

    Running a program needs only the last of its packages.
    """
    for package in KINDS[to].packages if writing else KINDS[to].packages[-1:]:
        try:
            with without_chatter() if KINDS[to].single else nullcontext():
                importlib.import_module(package)
        except ImportError as error:
            what = f"{'writing' if writing else 'running'} programs for {to} needs {error.name or package}"
            own = ", best in an environment of its own: some of these packages exclude each other" * KINDS[to].single
            raise UsageError(f"{what}: {install_extra(to if KINDS[to].single else 'engines')}{own}") from error
    return importlib.import_module(f"vitrail.exports.{KINDS[to].module or to}")  # type: ignore[return-value]


def find_program(source: str | Path) -> Path | None:
    """Return the file of the program at `source`, a file or a folder; None if there is no program.

    Raises ExportError for one that does not run here.
    """
    path = Path(source).expanduser()
    files = [path]
    if path.is_dir() and (path / CARD).is_file():
        files += [path / kind.file for kind in KINDS.values()]
    kinds = {Path(kind.file).suffix: kind for kind in KINDS.values()}
    for file in files:
        if file.suffix in kinds and not kinds[file.suffix].runs and file.is_dir():
            raise ExportError(f"{file} is a program for Core ML, which runs on macOS and iOS. Use the network itself")
        if file.suffix in kinds and file.is_file():
            return file
    return None


def parse_description(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the description in a program's metadata, whose values are JSON. Raises ExportError naming a wrong one."""
    about = {}
    for key, text in texts.items():
        try:
            about[key] = parse_json(text)
        except ValueError as error:
            raise ExportError(f"it has an unusable description: {shown(key)}: {error}") from error
    return about


def description_beside(path: Path) -> dict[str, Any]:
    """Return the description in the card beside a program whose format has no place for it; empty without a card."""
    card = path.with_name(CARD)
    return read_json_object(card, ExportError) if card.is_file() else {}


def one_at_a_time(run: RunProgram) -> RunProgram:
    """Return a program for one image as a program for any number of them, whatever their order in memory is.

    ExecuTorch would read images that lie pixel by pixel, as they are decoded, in the wrong order. Each program has one
    place for its image, so threads wait for each other.
    """
    lock = Lock()

    def each(images: np.ndarray) -> np.ndarray:
        import numpy as np

        with lock:
            return np.concatenate([run(np.ascontiguousarray(image[None])) for image in images])

    return each


def reason(error: BaseException) -> str:
    """Return the first line that says something, of the innermost message that is not empty.

    OpenVINO's messages begin with lines that only say where: "Exception from src/core/src/node.cpp:68:".
    """
    texts = [type(error).__name__]
    cause: BaseException | None = error
    while cause is not None:
        lines = [line for line in map(str.strip, str(cause).splitlines()) if line]
        texts += [line for line in lines if not line.endswith(":")][:1] or lines[:1]
        cause = cause.__cause__
    return texts[-1]


@contextmanager
def without_chatter() -> Iterator[None]:
    """Hide what packages print to the process's stderr, native code included. What is wrong they raise."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


@contextmanager
def errors_only(*names: str) -> Iterator[None]:
    """Let these loggers log errors only. What they would warn about is measured."""
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
