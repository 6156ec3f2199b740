"""Export a model to another runtime: write the program, run it in that runtime, compare, then put it in its place."""

from __future__ import annotations

import copy
import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from vitrail.disk import writing
from vitrail.errors import ExportError, UsageError, did_you_mean
from vitrail.exports.describe import describe_export
from vitrail.exports.int8 import OwnInt8, Quantisable, Quantised, ToCalibrate, draw_samples, quantise
from vitrail.exports.kinds import CARD, FIRST_RUNTIME, KINDS, ONNX, OPSET, OutputName, ProgramPrecision, To, runtime
from vitrail.exports.network import outputs_per_image, step_of_size, trace
from vitrail.exports.parity import (
    Parity,
    compare_outputs,
    images_of_another_size,
    images_to_compare,
    origin_here,
    runtime_version,
)
from vitrail.exports.web import page_of
from vitrail.files import beside, check_writable, json_text, sha256, take_place
from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.rebuild import card_of, present_card
from vitrail.weights.store import WEIGHTS, checksum
from vitrail.words import one_line, shown

log = logging.getLogger("vitrail")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bf16": torch.bfloat16}
MAX_DROP = 0.5
"""Largest loss of top-1 accuracy of an int8 program, in points."""

NOT_RUN = "not compared, because only macOS and iOS run Core ML: compare it there with what `vitrail predict` says here"


@one_line
@dataclass(frozen=True)
class Exported:
    """The files that were written, and the difference between the program's outputs and the network's."""

    folder: Path
    to: To
    precision: ProgramPrecision
    output: OutputName
    input_type: str
    input_shape: list[Any]
    output_shape: list[Any]
    files: dict[str, int]
    """Name -> bytes; the program comes first."""
    parity: Parity | None
    """That of an int8 program is its float32 program's; None for a kind that does not run here."""
    quantised: Quantised | None = None
    """What int8 changed."""
    temperature: float = 1.0
    """By what the outputs are divided before they become probabilities; 1 if the program does so itself."""
    opset: int | None = None
    """Version of ONNX's operators; None for another kind of program."""
    needs: str = ""
    """The package that runs it and its first version, as pip writes it: onnxruntime>=1.19."""

    def __str__(self) -> str:
        images, numbers = (", ".join(map(str, shape)) for shape in (self.input_shape, self.output_shape))
        total = sum(self.files.values()) / 1e6
        lines = [
            f"wrote {', '.join(self.files)} into {self.folder}: {self.to}, {self.precision}, {total:,.1f} MB",
            f"{self.input_type} images [{images}] -> float32 {self.output} [{numbers}]",
            f"{'' if self.opset is None else f'ONNX opset {self.opset}, '}needs {self.needs}",
            f"parity{' before int8' if self.quantised else ''}: {self.parity or NOT_RUN}",
        ]
        if self.temperature != 1:
            lines.append(
                f"divide the logits by the temperature {self.temperature:.6g} before they become probabilities. A "
                "program with the output probabilities does so itself"
            )
        lines += [str(self.quantised)] if self.quantised else []
        if self.to == "web":
            folder = shlex.quote(str(self.folder))
            lines.append(f"to try it: python -m http.server -b 127.0.0.1 -d {folder}, then open http://127.0.0.1:8000")
        return "\n".join(lines)


def export_model(
    model: ViT | ResNet,
    folder: Path | str,
    to: To = "onnx",
    *,
    output: OutputName = "logits",
    precision: ProgramPrecision = "float32",
    images: Sequence[str | Path] = (),
    calibrate: ToCalibrate | None = None,
    max_drop: float = MAX_DROP,
    any_size: bool = False,
    opset: int | None = None,
    device: torch.device | str = "cpu",
    vendor: bool = False,
    vendor_from: str | Path | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write `model`, float32 on the CPU, as a program into `folder`, with a card.json that describes how to use it.

    The program takes images [batch, channels, height, width] of the card's size, in batches of any size; with
    `any_size` of any height and width that the patch divides. Its runtime runs it on `images` (files, folders,
    patterns), or on synthetic images, and with `any_size` on images of another size, too. Its outputs are compared with
    the model's. Only if they agree is the program put into `folder`; otherwise nothing remains. Existing files are
    replaced only with `overwrite`.

    int8 programs are calibrated on training images of the data set `calibrate`, and are kept only if they lose at most
    `max_drop` points of top-1 accuracy on held-out images (`vitrail.exports.int8`).

    opset: Version of ONNX's operators in a program for ONNX Runtime (default: 20). device: Where the program is run
    and compared, and for which AOTInductor compiles it. vendor: Put the runtime of a web page beside it, downloaded, or
    from `vendor_from`, a tarball or a folder of its npm package.

    Raises UsageError for invalid arguments or a package that is not installed; ExportError if the network cannot be
    expressed, the outputs differ, or the folder is taken or cannot be written; DataError for unusable `images`.
    """
    folder = Path(folder).expanduser()
    card = card_of(model)
    card, gone = present_card(model, card, resized=True)
    if gone:
        log.warning("not in the program's card: %s", gone)
    model = copy.copy(model)  # the tensors are shared, and the caller's model keeps its card
    model.card = card
    check_export(card, folder, to, output, precision, overwrite)
    if any_size and card.preprocess.resize == "native":
        raise UsageError("a program of this network takes images of any shape already: leave out any_size")
    if any_size and KINDS[to].single:
        raise UsageError(f"a program for {to} takes images of one size: leave out any_size, or export to onnx")
    check_opset(opset, to)
    check_calibration(precision, output, card, calibrate, max_drop)
    page = page_of(card, output, to, vendor, vendor_from)
    kind, module = KINDS[to], runtime(to)
    given = None if calibrate is None else draw_samples(calibrate, card)
    stored = "float32" if given else precision
    compared, real = images_to_compare(images, card)
    with writing(folder, ExportError), beside(folder) as temporary:
        temporary.mkdir()
        dtype = DTYPES[stored if stored in kind.traced else "float32"]
        size = card.preprocess.size
        place = torch.device(device if to == "aoti" else "cpu")
        there = model if place.type == "cpu" else copy.deepcopy(model).to(place)
        traced = trace(there, size, output, dtype, any_size=any_size, single=kind.single, attention=kind.attention)
        step = step_of_size(model) if any_size else 0
        width, digest = outputs_per_image(traced), checksum(model.state_dict())
        options: dict[str, Any] = {"opset": opset or OPSET, "step": step, "device": place.type}
        about = describe_export(card, to, output, stored, width, digest, **options)
        if page is not None:
            about["program"]["runtime"] = page.about()
        module.write(traced, temporary / kind.file, about)
        parity = quantised = None
        if kind.runs:
            opened = module.read(temporary / kind.file, str(device))
            ran = runtime_version(to, str(device))
            parity = compare_outputs(opened.run, model, compared, output, stored, runtime=ran, real=real)
            if any_size and parity.passed:
                other = images_of_another_size(card, step)
                parity = parity.and_(compare_outputs(opened.run, model, other, output, stored, runtime=ran))
            if not parity.passed:
                raise ExportError(
                    f"the outputs of the {to} program differ from the network's, so nothing was written to {folder}: "
                    f"{parity}"
                )
            if given is not None:
                about["program"]["precision"] = precision
                assert isinstance(module, Quantisable | OwnInt8)  # the kinds that have int8
                quantised = quantise(module, temporary / kind.file, about, given, max_drop)
                about["quantised"] = asdict(quantised)
                opened = module.read(temporary / kind.file, str(device))
            about["origin"] = asdict(origin_here(opened.run, to, card, str(device)))
        if page is not None:
            page.write(temporary)
        files = _finish(temporary, kind.file, about, parity)
        take_place(temporary, folder)
    taken, program = about["input"], about["program"]
    signature = (taken["type"], taken["shape"], about["output"]["shape"])
    temperature = card.temperature if output == "logits" else 1.0
    versions = (program.get("opset"), program["needs"])
    return Exported(folder, to, precision, output, *signature, files, parity, quantised, temperature, *versions)


def check_export(card: Card, folder: Path, to: str, output: str, precision: str, overwrite: bool) -> None:
    """Check all arguments of an export before anything is computed. Raises UsageError and ExportError."""
    for name, value, valid in (
        ("to", to, tuple(KINDS)),
        ("output", output, get_args(OutputName)),
        ("precision", precision, get_args(ProgramPrecision)),
    ):
        if value not in valid:
            raise UsageError(f"{name} is {value!r}.{did_you_mean(value, valid)} Valid: {', '.join(valid)}")
    if precision not in KINDS[to].precisions:
        raise UsageError(
            f"vitrail does not write programs for {to} in {precision}; valid: {', '.join(KINDS[to].precisions)}. "
            "Choose one of these, or another runtime"
        )
    if output != "features" and not card.config.classes:
        if to == "web" or precision == "int8":
            what = "a web page" if to == "web" else "precision int8"
            raise UsageError(f"this model has no classifier, and {what} needs one: vitrail finetune DIR --from MODEL")
        raise UsageError(f"this model has no classifier, so it has no {output}. Export it with output features")
    if card.task == "segmentation" and (to == "web" or precision == "int8"):
        raise UsageError(
            f"{'a web page' if to == 'web' else 'precision int8'} is for networks that predict classes of images. "
            "Export a network for the class of each pixel to onnx or another program, in float32 or half precision"
        )
    if folder.suffix in {Path(kind.file).suffix for kind in KINDS.values()}:
        raise UsageError(
            f"{folder} looks like a file; give a folder: the program becomes {KINDS[to].file} in it, beside {CARD}"
        )
    if folder.is_file():
        raise ExportError(f"{folder} is a file: give a folder for the program and its {CARD}")
    if (folder / WEIGHTS).exists():  # its card has the same name as the program's
        raise ExportError(f"{folder} holds a model: choose another folder for the program")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ExportError(
            f"{folder} exists already and is not empty. Choose another folder, or replace its files with overwrite "
            "(--overwrite)."
        )
    check_writable(folder, ExportError, folder=True)


def check_opset(opset: int | None, to: str) -> None:
    """Raise UsageError for an opset that torch cannot write, and for one of a program that has none."""
    if opset is not None and KINDS[to].file != ONNX.file:
        raise UsageError(f"opset is {opset}, and only programs for onnx and web have one: remove it, or export to onnx")
    if opset not in (None, *FIRST_RUNTIME):
        raise UsageError(f"opset is {shown(opset)}; valid: {', '.join(map(str, FIRST_RUNTIME))} (default: {OPSET})")


def check_calibration(
    precision: str, output: str, card: Card, calibrate: ToCalibrate | None, max_drop: float = MAX_DROP
) -> None:
    """Raise UsageError unless int8, and only int8, comes with images to calibrate on and an accuracy to measure."""
    if precision == "int8" and calibrate is None:
        raise UsageError(
            "int8 needs images to calibrate on, of the classes of the network: --calibrate DATA, such as the data set "
            "that it was trained on"
        )
    if precision == "int8" and output == "features":
        raise UsageError("int8 is kept only if accuracy is, and features have none. Export logits or probabilities")
    if precision == "int8" and card.answers:
        raise UsageError("int8 is kept only if the accuracy of classes is, and this network gives several answers")
    if precision != "int8" and calibrate is not None:
        raise UsageError(f"only int8 programs are calibrated, and precision is {precision}: remove --calibrate")
    if precision != "int8" and max_drop != MAX_DROP:
        raise UsageError(f"only int8 programs may lose accuracy, and precision is {precision}: remove --max-drop")


def _finish(temporary: Path, program: str, about: dict[str, Any], parity: Parity | None) -> dict[str, int]:
    """Write the card and return the size of each file in bytes, the program first and the card last."""
    names = {str(file.relative_to(temporary)): file for file in temporary.rglob("*") if file.is_file()}
    sizes = {name: names[name].stat().st_size for name in sorted(names, key=lambda name: (name != program, name))}
    listed = {name: {"bytes": size, "sha256": sha256(names[name])} for name, size in sizes.items()}
    text = json_text({**about, "files": listed, "parity": parity and asdict(parity)}, indent=1)
    (temporary / CARD).write_text(text + "\n", encoding="utf-8")
    return {**sizes, CARD: (temporary / CARD).stat().st_size}
