"""The description of an exported program, so that others can use it: input, preprocessing, output, classes, origin."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, get_args

import torch

from vitrail.config import plain
from vitrail.data.images.geometry import MAX_ASPECT
from vitrail.data.images.ops import CROPPED, covering
from vitrail.data.images.pillow import BACKGROUND
from vitrail.data.settings import GREY, Preprocess
from vitrail.errors import ExportError
from vitrail.exports.kinds import FIRST_RUNTIME, INPUT, KINDS, ONNX, ONNX_IR, OutputName
from vitrail.tasks.catalog import task_of
from vitrail.version import __version__
from vitrail.weights.card import Card
from vitrail.words import counted, shown, without_folders

FORMAT = "vitrail-export"
VERSION = 1
PICTURE = {
    "channels": "RGB; gray is repeated three times, palettes are resolved, Lab is converted to sRGB (D50 white)",
    "cmyk": "R = (255 - C)(255 - K) / 255, likewise G and B; the inversion of JPEGs is undone",
    "colour_profile": "not applied",
    "frame": "the first",
    "orientation": "applied: of EXIF, else of XMP",
    "deep": "of samples of more than 8 bits, the upper 8 of the bits that the file declares",
    "background": list(BACKGROUND),
    "transparency": "drawn on the background",
}
"""How a file becomes the picture that is then resized (`vitrail.data.images.decode`)."""


def describe_export(
    card: Card,
    to: str,
    output: str,
    precision: str,
    width: int,
    checksum: str,
    *,
    opset: int,
    step: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the description of a program as JSON values.

    `opset` is the version of ONNX's operators in a program for ONNX Runtime.

    `width` is the number of outputs per image. `checksum` is the SHA-256 of the model's tensors. `step` is the number
    of pixels that must divide height and width; 0 for a program that takes one size only. `device` is the kind of
    device for which an AOTInductor program is compiled.
    """
    preprocess = card.preprocess
    size = ["height", "width"] if step else list(preprocess.size)
    batch = 1 if KINDS[to].single else "batch"
    maps = ["rows", "columns"] if card.task == "segmentation" and output != "features" else []
    rgb = card.config.channels == 3
    meaning = "RGB, 0 to 255, prepared as in preprocess; normalised inside"
    if preprocess.bands is not None:
        meaning = "(value - mean) / std of each band, with the statistics in preprocess, then prepared as in preprocess"
    elif not rgb:
        meaning = f"{counted(card.config.channels, 'channel')}, 0 to 255, prepared as in preprocess; normalised inside"
    if step:
        meaning += f"; height and width may be any multiples of {step}, and preprocess gives one such size"
    values = card.to_dict()
    names = values.pop("class_names") if output != "features" else []
    own = {name: values.pop(name) for name in ("source", "licence", "metrics", "provenance")}
    own["provenance"] = without_folders(own["provenance"])
    kind = {"device": device} if to == "aoti" else {}
    made = {"vitrail": __version__, "torch": torch.__version__, "weights_sha256": checksum}
    return {
        "format": FORMAT,
        "version": VERSION,
        "program": {"kind": to, "file": KINDS[to].file, "precision": precision, **kind, **needs(to, opset)},
        "input": {
            "name": INPUT,
            "type": card.input_type,
            "shape": [batch, card.config.channels, *size],
            "meaning": meaning,
        },
        "preprocess": {name: value for name, value in steps(preprocess).items() if name != "picture" or rgb},
        "output": {"name": output, "type": "float32", "shape": [batch, width, *maps], **meaning_of(output, card)},
        "class_names": names,
        **own,
        "made_by": made,
        "card": {name: value for name, value in values.items() if name != "reference"},
    }


def needs(to: str, opset: int) -> dict[str, Any]:
    """Return the versions in a program's format, and under "needs" the package that runs it, as pip writes it.

    Those of OpenVINO are known when it has converted the program (`vitrail.exports.openvino`).
    """
    if KINDS[to].file == ONNX.file:
        return {"opset": opset, "ir_version": ONNX_IR, "needs": f"onnxruntime>={FIRST_RUNTIME[opset]}"}
    if to == "aoti":  # a library fits the torch that compiled it
        return {"needs": f"torch=={torch.__version__.partition('+')[0]}"}
    if to == "program":
        return {"needs": f"torch>={torch.__version__.partition('+')[0]}"}  # torch reads what earlier versions wrote
    if not KINDS[to].runs:
        return {"needs": "macOS 13 or iOS 16"}
    if KINDS[to].single:
        name = KINDS[to].packages[-1]
        return {"needs": f"{name.replace('_', '-')}>={version(name)}"}  # none older was tried
    return {}


def meaning_of(output: str, card: Card) -> dict[str, Any]:
    """Return what the outputs mean, and by which temperature logits are divided before they become probabilities."""
    if output == "features":
        return {"meaning": "the input of the classifier"}
    return task_of(card).meaning(card, inside=output == "probabilities")


def steps(preprocess: Preprocess) -> dict[str, Any]:
    """Return a preprocessing as a resize and a centre crop, with sizes in pixels (height, width).

    Resize "cover" scales to the smallest image that covers `size` and preserves the aspect ratio; of an image whose
    long side is more than "longest" times its short side, only this middle part. Resize "squash"
    scales to exactly `size`. Resize "pad" scales to the largest image that fits into `size`, preserves the aspect
    ratio, and surrounds the image with "fill". Resize "native" makes strips (`vitrail.strip`) of the size "crop" from
    patches of "patch" pixels. Images of other bands than RGB have their statistics under "bands";
    for RGB images "picture" says how a file becomes one.
    """
    mode = {"small": "cover", "squash-crop": "squash"}.get(preprocess.resize, preprocess.resize)
    size = covering(preprocess) if preprocess.resize in CROPPED else preprocess.image_size
    fill = {"fill": list(preprocess.fill or GREY)} if mode == "pad" else {}
    patch = {"patch": preprocess.patch} if mode == "native" else {}
    longest = {"longest": MAX_ASPECT} if mode == "cover" else {}
    read = {"picture": PICTURE} if preprocess.bands is None else {"bands": plain(preprocess.bands)}
    return {
        **read,
        **longest,
        "resize": mode,
        "size": list(size),
        "interpolation": preprocess.interpolation,
        "antialias": True,
        **fill,
        **patch,
        "crop": list(preprocess.size),
    }


def card_in(about: Mapping[str, Any]) -> Card:
    """Return the model card that is part of a description. Raises ExportError if `describe_export` did not write it."""
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise ExportError(
            f"this program was not exported by this version of vitrail: its description has format "
            f"{shown(about.get('format'))}, version {shown(about.get('version'))}, not {FORMAT!r}, version {VERSION}. "
            "Export the model again (vitrail export)"
        )
    wanted = ("class_names", "source", "licence", "metrics", "provenance")
    if lacking := sorted({*wanted, "card", "output"} - about.keys()):
        raise ExportError(f"the program's description lacks {lacking[0]!r}. Export the model again (vitrail export)")
    card, output = about["card"], about["output"]
    if not isinstance(card, Mapping) or not _is_output(output):
        raise ExportError(
            f"the program's description has the card {shown(card)} and the output {shown(output)}. Export the model "
            "again (vitrail export)"
        )
    return Card.from_dict({**card, **{name: about[name] for name in wanted}})


def _is_output(value: Any) -> bool:
    match value:
        case {"name": str(name), "shape": [_, int(), *_]}:
            return name in get_args(OutputName)
    return False
