"""`vitrail export`: write a network as a program that runs without vitrail, and check that it computes the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vitrail.data.settings import SPLIT
from vitrail.device import choose_device
from vitrail.exports.kinds import Opset, OutputName, ProgramPrecision, To
from vitrail.ranges import InputSize, NotNegative, checked
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.verbs.flags.reading import READ, read_settings, warn_of_unused

if TYPE_CHECKING:
    from vitrail.data.roles import Splits
    from vitrail.exports.int8 import ToCalibrate
    from vitrail.exports.write import Exported

log = logging.getLogger("vitrail")


@checked
def export(
    model: str | Path,
    *images: str | Path,
    to: To = "onnx",
    out: str | Path | None = None,
    image_size: InputSize | None = None,
    output: OutputName = "logits",
    precision: ProgramPrecision = "float32",
    calibrate: str | Path | None = None,
    max_drop: NotNegative = 0.5,
    any_size: bool = False,
    opset: Opset | None = None,
    device: str = "cpu",
    vendor: bool = False,
    vendor_from: str | Path | None = None,
    overwrite: bool = False,
    **reading: Unpack[DataKeywords],
) -> Exported:
    """Write a network as a program for another runtime. The program reads images and knows its classes.

    The runtime reads the program back, and its outputs must equal those of the network; otherwise the program is
    deleted. Only programs for Core ML are not run, because it is a part of Apple's systems. The card.json next to a
    program holds the preprocessing, the class names and the largest difference of the outputs.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        images: Files, folders and patterns of images on which outputs are compared (default: synthetic images).
        to: Runtime: ONNX Runtime, OpenVINO, 'program' for PyTorch's exported program, 'aoti' for a library that
            AOTInductor compiles for one kind of device, 'web' for a page that classifies images in the browser, or
            for phones 'executorch', 'litert' (TensorFlow Lite) and 'coreml', which takes one image at a time.
        out: Folder to write (default: a folder here, named after the model and the runtime).
        output: Output of the program; 'features' are the input of the classifier.
        precision: Number format: float32; float16 for onnx, program and aoti, in openvino for storage only; bf16 for
            openvino, program and aoti; int8 for onnx, openvino, web and litert; float16 for coreml.
        device: Device that an aoti program is compiled for, and on which any program is run and compared: cpu, cuda or
            cuda:1.
        calibrate: Labelled images, in any form that `vitrail train` takes, such as the data set that the network was
            trained on, whose settings it then keeps. int8 takes its ranges from training images (litert does without),
            and its accuracy is measured on held-out ones.
        max_drop: Largest loss of top-1 accuracy with int8, in points. Layers that cost most stay out of int8 if
            necessary; a larger loss is an error.
        any_size: Take images of any height and width that the patch divides; positions are resampled inside the
            program (default: only images of the network's size).
        opset: Version of ONNX's operators, for runtimes that do not know the default (default: 20). The output
            names the first ONNX Runtime that knows it.
        vendor: Put the runtime of a web page into the folder, too, so that the page works without the internet; it is
            downloaded from the npm registry (default: the page loads it from a public CDN).
        vendor_from: The same from a local copy of the npm package onnxruntime-web, a tarball or a folder.
        overwrite: Replace an existing folder.
    """
    from vitrail.exports.write import export_model
    from vitrail.verbs.network import load_network, warn_of_classifier

    folder = f"{Path(model).resolve().name.partition('.')[0]}-{to}" if out is None else out
    if calibrate is None:
        warn_of_unused(reading, ())
    given = None if calibrate is None else _to_calibrate(model, calibrate, reading)
    network = load_network(model, image_size)
    if output != "features":
        warn_of_classifier(network, model)
    return export_model(
        network,
        folder,
        to,
        output=output,
        precision=precision,
        images=images,
        calibrate=given,
        max_drop=max_drop,
        any_size=any_size,
        opset=opset,
        device=choose_device(device),
        vendor=vendor,
        vendor_from=vendor_from,
        overwrite=overwrite,
    )


def _to_calibrate(model: str | Path, data: str | Path, reading: Mapping[str, Any]) -> ToCalibrate:
    """Return the data set to calibrate on. That of the run `model` is divided as in its training."""
    from vitrail.verbs.network import run_of

    run = run_of(model)
    used = (*READ, *SPLIT)
    if run is None or not run.data.path or Path(data).expanduser().resolve() != Path(run.data.path).resolve():
        return read_settings(reading, data, used=used)
    settings = read_settings(reading, run.data.path, run.data, used)

    def divided() -> Splits:
        from vitrail.verbs.network import run_splits

        splits, notes = run_splits(model, run, settings)
        for line in [*splits.report.warnings, *notes]:
            log.warning("%s", line)
        return splits

    return divided


def show(result: Exported) -> str:
    """Return the files that were written and their parity as text."""
    return str(result)
