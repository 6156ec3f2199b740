"""Compiled programs: AOTInductor turns a network into a library for one kind of device, which torch loads and runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.device import to_device
from vitrail.errors import ExportError
from vitrail.exports.kinds import CARD, Opened, errors_only, reason
from vitrail.files import json_text
from vitrail.torch_private import aoti_compile_and_package, aoti_load_package

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def write(traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Compile a traced network for the device of its tensors, and write it to `path` with `about` in its metadata.

    Raises ExportError with the compiler's reason, such as that there is none.
    """
    with TemporaryDirectory(dir=path.parent) as folder:
        package = Path(folder) / "model.pt2"  # torch asks for this suffix
        try:
            with errors_only("torch"):
                described = {"aot_inductor.metadata": {CARD: json_text(about)}}
                aoti_compile_and_package(traced, package_path=str(package), inductor_configs=described)
        except Exception as error:  # the compilers of C++ and Triton may raise anything
            raise ExportError(f"AOTInductor cannot compile this network: {reason(error)}") from error
        package.replace(path)


def read(path: Path, device: str = "cpu") -> Opened:
    """Load `path`, a file from a trusted origin, because it holds native code. Raises ExportError if torch rejects it.

    It computes on the kind of device for which it was compiled.
    """
    try:
        compiled: Any = aoti_load_package(io.BytesIO(path.read_bytes()))
        about = json.loads(compiled.get_metadata()[CARD])
    except Exception as error:  # torch has no common class for what is wrong with a package
        raise ExportError(f"torch {torch.__version__} does not load it: {reason(error)}") from error
    place = torch.device(about["program"]["device"])
    if place.type != torch.device(device).type:
        raise ExportError(f"it was compiled for {place.type}, and the device is {device}. Export the model again")

    @torch.inference_mode()
    def compute(images: Tensor) -> Tensor:
        outputs: Tensor = compiled(to_device(images, place))
        return outputs

    def run(images: np.ndarray) -> np.ndarray:
        return compute(torch.from_numpy(images)).cpu().numpy()

    return Opened(run, about, compute)
