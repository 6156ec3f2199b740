"""`vitrail export`: write a network as a program that runs without vitrail, and check that it computes the same."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.exports.kinds import Output, Precision, To

if TYPE_CHECKING:
    from vitrail.exports.write import Exported


def export(
    model: str | Path,
    *images: str | Path,
    to: To = "onnx",
    out: str | Path | None = None,
    image_size: int | None = None,
    output: Output = "logits",
    precision: Precision = "float32",
    overwrite: bool = False,
) -> Exported:
    """Write a network as a program for another runtime. The program reads uint8 images and knows its classes.

    The runtime reads the program back, and its outputs must equal those of the network; otherwise the program is
    deleted. The card.json next to it holds the preprocessing, the class names and the largest difference of the
    outputs.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        images: Files, folders and patterns of images on which outputs are compared (default: synthetic images).
        to: Runtime: ONNX Runtime, OpenVINO, or 'program' for PyTorch's exported program.
        out: Folder to write (default: a folder here, named after the model and the runtime).
        image_size: Side of the square input in pixels. Position embeddings are resampled (default: the network's
            own size).
        output: Output of the program; 'features' are the input of the classifier.
        precision: Number format: float32; float16 for onnx and program, in openvino for storage only; bf16 for
            program.
        overwrite: Replace an existing folder.
    """
    from vitrail.exports.write import export_model
    from vitrail.verbs.network.classifier import load_network

    folder = f"{Path(model).resolve().name.partition('.')[0]}-{to}" if out is None else out
    network = load_network(model, image_size)
    return export_model(network, folder, to, output=output, precision=precision, images=images, overwrite=overwrite)


def show(result: Exported) -> str:
    """Return the files that were written and their parity as text."""
    return str(result)


def as_json(result: Exported) -> Any:
    """Return the files that were written and their parity as JSON values."""
    return asdict(result) | {"folder": str(result.folder)}
