"""A model as a program for another runtime: written beside its place, read back by that runtime, compared, let in."""

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
from vitrail.exports.parity import BATCHES, Parity, compare, made_up, real_images
from vitrail.exports.trace import trace, width
from vitrail.model.resnet.network import ResNet
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.replacing import beside, take_place
from vitrail.weights.save import card_of
from vitrail.weights.store import WEIGHTS, checksum

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Exported:
    """What was written, and how far it is from the network."""

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
    """Write `model`, float32 on the CPU, as a program into `folder`, with a card.json that says how it is used.

    The program takes uint8 images [batch, channels, height, width] of the card's size, any number of them. It is
    read back by its own runtime and compared with the model on `images` (files, folders, patterns), or on made-up
    ones, before it takes its place: otherwise nothing is left. Files that are there already are replaced only with
    `overwrite`.

    Raises UsageError for an impossible wish or a package that is not installed; ExportError where the network cannot
    be expressed, the numbers differ, or the folder is taken or cannot be written; DataError for unusable `images`.
    """
    folder = Path(folder).expanduser()
    card = card_of(model)
    check(card, folder, to, output, precision, overwrite)
    kind, back = KINDS[to], runtime(to)
    seen, real = _images(images, card)
    try:
        with beside(folder) as temporary:
            temporary.mkdir()
            dtype = DTYPES[precision if precision in kind.traced else "float32"]
            traced = trace(model, card.preprocess.image_size, output, dtype)
            about = describe(card, to, output, precision, width(traced), checksum(model.state_dict()))
            back.write(traced, temporary / kind.file, about)
            name = kind.packages[-1]
            ran_by = f"{name} {version(name)}"
            opened = back.read(temporary / kind.file)
            parity = compare(opened.run, model, seen, output, precision, runtime=ran_by, real=real)
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
    """Refuse what cannot be done before anything is computed. Raises UsageError and ExportError."""
    for name, value, valid in (
        ("to", to, tuple(KINDS)),
        ("output", output, get_args(Output)),
        ("precision", precision, tuple(DTYPES)),
    ):
        if value not in valid:
            raise UsageError(f"{name} is {value!r}.{did_you_mean(value, valid)} Valid: {', '.join(valid)}")
    if precision not in KINDS[to].precisions:
        raise UsageError(
            f"{to} programs cannot be {precision}, because their runtime does not compute with it on a CPU, so that "
            f"nothing could be compared; valid: {', '.join(KINDS[to].precisions)}"
        )
    if output != "features" and not card.config.classes:
        raise UsageError(f"this model has no classifier, so it gives no {output}: export it with output features")
    if folder.suffix in {Path(kind.file).suffix for kind in KINDS.values()}:
        raise UsageError(
            f"{folder} looks like a file; give a folder, in which the program is {KINDS[to].file}, beside {CARD}"
        )
    if folder.is_file():
        raise ExportError(f"{folder} is a file: give a folder for the program and its {CARD}")
    if (folder / WEIGHTS).exists():  # its card is of the same name
        raise ExportError(f"{folder} holds a model: give the program a folder of its own")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ExportError(
            f"{folder} is there already: choose another place, or replace it with overwrite (--overwrite)"
        )


def _images(paths: Sequence[str | Path], card: Card) -> tuple[np.ndarray, int]:
    """The user's images, and how many; filled up with made-up ones where they are too few for the batches."""
    if not paths:
        return made_up(card), 0
    real = real_images(paths, card)
    return np.concatenate([real, made_up(card)[: max(sum(BATCHES) - len(real), 0)]]), len(real)


def _finish(temporary: Path, program: str, about: dict[str, Any], parity: Parity) -> dict[str, int]:
    """Write the card, and return the size of each file, the program first and the card last."""
    files = sorted((file for file in temporary.iterdir()), key=lambda file: (file.name != program, file.name))
    sizes = {file.name: file.stat().st_size for file in files}
    listed = {file.name: {"bytes": sizes[file.name], "sha256": _sha256(file)} for file in files}
    text = json.dumps({**about, "files": listed, "parity": asdict(parity)}, indent=1, ensure_ascii=False)
    (temporary / CARD).write_text(text + "\n", encoding="utf-8")
    return {**sizes, CARD: (temporary / CARD).stat().st_size}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
