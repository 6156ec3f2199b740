"""`vitrail export`: a network as a program that runs without vitrail, proven to compute the same."""

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
    """Write a network as a program for another runtime, which takes uint8 images and knows its classes.

    The program is read back by its runtime and must compute what the network computes, or nothing is left of it.
    Beside it, card.json says how images are prepared, what the classes are called and how far the numbers differ.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        images: Files, folders and patterns to compare on; left out: made-up images.
        to: onnx, openvino, or program (PyTorch's exported program).
        out: The folder to write; left out: named after the model and the kind, in this one.
        image_size: Export for another resolution, in pixels.
        output: logits, probabilities, or features (what the classifier sees).
        precision: float32; float16 (onnx, program; in openvino for storage only); bf16 (program).
        overwrite: Replace what is there.
    """
    from vitrail.exports.write import export_model
    from vitrail.verbs.network.classifier import load_network

    folder = f"{Path(model).resolve().name.partition('.')[0]}-{to}" if out is None else out
    network = load_network(model, image_size)
    return export_model(network, folder, to, output=output, precision=precision, images=images, overwrite=overwrite)


def show(result: Exported) -> str:
    """Return what was written, and its parity, as text."""
    return str(result)


def as_json(result: Exported) -> Any:
    """Return the same as JSON values."""
    return asdict(result) | {"folder": str(result.folder)}
