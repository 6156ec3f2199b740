"""Export a model to another runtime: write the program, run it in that runtime, compare, then put it in its place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from vitrail.errors import ExportError, UsageError, did_you_mean
from vitrail.exports.describe import describe
from vitrail.exports.kinds import CARD, KINDS, Output, Precision, To, runtime
from vitrail.exports.network import outputs_per_image, trace
from vitrail.exports.parity import BATCHES, Parity, compare, real_images, synthetic_images
from vitrail.files import beside, take_place
from vitrail.model.resnet.network import ResNet
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.save import card_of
from vitrail.weights.store import WEIGHTS, checksum

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Exported:
    """The files that were written, and how far the program's outputs are from the network's."""

    folder: Path
    to: To
    precision: Precision
    output: Output
    input_shape: list[Any]
    output_shape: list[Any]
    files: dict[str, int]
    """Name -> bytes; the program comes first."""
    parity: Parity

    def __str__(self) -> str:
        images, numbers = (", ".join(map(str, shape)) for shape in (self.input_shape, self.output_shape))
        total = sum(self.files.values()) / 1e6
        return (
            f"wrote {', '.join(self.files)} into {self.folder}: {self.to}, {self.precision}, {total:,.1f} MB\n"
            f"uint8 images [{images}] -> float32 {self.output} [{numbers}]\n"
            f"parity: {self.parity}"
        )


def export_model(
    model: ViT | ResNet,
    folder: Path | str,
    to: To = "onnx",
    *,
    output: Output = "logits",
    precision: Precision = "float32",
    images: Sequence[str | Path] = (),
    overwrite: bool = False,
) -> Exported:
    """Write `model`, float32 on the CPU, as a program into `folder`, with a card.json that describes how to use it.

    The program takes uint8 images [batch, channels, height, width] of the card's size, in batches of any size. Its
    runtime runs it on `images` (files, folders, patterns), or on synthetic images, and its outputs are compared with
    the model's. Only if they agree is the program put into `folder`; otherwise nothing remains. Existing files are
    replaced only with `overwrite`.

    Raises UsageError for invalid arguments or a package that is not installed; ExportError if the network cannot be
    expressed, the outputs differ, or the folder is taken or cannot be written; DataError for unusable `images`.
    """
    folder = Path(folder).expanduser()
    card = card_of(model)
    check(card, folder, to, output, precision, overwrite)
    kind, module = KINDS[to], runtime(to)
    compared, real = _images(images, card)
    try:
        with beside(folder) as temporary:
            temporary.mkdir()
            dtype = DTYPES[precision if precision in kind.traced else "float32"]
            traced = trace(model, card.preprocess.image_size, output, dtype)
            about = describe(card, to, output, precision, outputs_per_image(traced), checksum(model.state_dict()))
            module.write(traced, temporary / kind.file, about)
            name = kind.packages[-1]
            opened = module.read(temporary / kind.file)
            parity = compare(
                opened.run, model, compared, output, precision, runtime=f"{name} {version(name)}", real=real
            )
            if not parity.passed:
                raise ExportError(
                    f"the {to} program computes something else than the network, so nothing was written to {folder}: "
                    f"{parity}"
                )
            files = _finish(temporary, kind.file, about, parity)
            take_place(temporary, folder)
    except OSError as error:
        raise ExportError(f"cannot write {folder}: {error.strerror or error}") from error
    return Exported(folder, to, precision, output, about["input"]["shape"], about["output"]["shape"], files, parity)


def check(card: Card, folder: Path, to: str, output: str, precision: str, overwrite: bool) -> None:
    """Check all arguments of an export before anything is computed. Raises UsageError and ExportError."""
    for name, value, valid in (
        ("to", to, tuple(KINDS)),
        ("output", output, get_args(Output)),
        ("precision", precision, tuple(DTYPES)),
    ):
        if value not in valid:
            raise UsageError(f"{name} is {value!r}.{did_you_mean(value, valid)} Valid: {', '.join(valid)}")
    if precision not in KINDS[to].precisions:
        raise UsageError(
            f"{to} programs cannot be {precision}, because their runtime does not support it on a CPU and the outputs "
            f"could not be compared; valid: {', '.join(KINDS[to].precisions)}"
        )
    if output != "features" and not card.config.classes:
        raise UsageError(f"this model has no classifier, so it has no {output}: export it with output features")
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
            f"{folder} is there already: choose another folder, or replace its files with overwrite (--overwrite)"
        )


def _images(paths: Sequence[str | Path], card: Card) -> tuple[np.ndarray, int]:
    """The user's images, completed with synthetic ones up to the first batches' sizes, and the number of the user's."""
    if not paths:
        return synthetic_images(card), 0
    real = real_images(paths, card)
    return np.concatenate([real, synthetic_images(card)[: max(sum(BATCHES) - len(real), 0)]]), len(real)


def _finish(temporary: Path, program: str, about: dict[str, Any], parity: Parity) -> dict[str, int]:
    """Write the card and return the size of each file in bytes, the program first and the card last."""
    files = sorted(temporary.iterdir(), key=lambda file: (file.name != program, file.name))
    sizes = {file.name: file.stat().st_size for file in files}
    listed = {file.name: {"bytes": sizes[file.name], "sha256": _sha256(file)} for file in files}
    text = json.dumps({**about, "files": listed, "parity": asdict(parity)}, indent=1, ensure_ascii=False)
    (temporary / CARD).write_text(text + "\n", encoding="utf-8")
    return {**sizes, CARD: (temporary / CARD).stat().st_size}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
