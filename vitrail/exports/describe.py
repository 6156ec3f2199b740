"""The description of an exported program, so that others can use it: input, preprocessing, output, classes, origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch

from vitrail.config import plain
from vitrail.data.images.ops import CROPPED, covering
from vitrail.data.settings import GREY, Preprocess
from vitrail.errors import ExportError
from vitrail.exports.kinds import INPUT, KINDS, OutputName
from vitrail.version import __version__
from vitrail.weights.card import Card
from vitrail.words import shown

FORMAT = "vitrail-export"
VERSION = 1


def describe(
    card: Card, to: str, output: str, precision: str, width: int, checksum: str, step: int = 0
) -> dict[str, Any]:
    """Return the description of a program as JSON values.

    `width` is the number of outputs per image. `checksum` is the SHA-256 of the model's tensors. `step` is the number
    of pixels that must divide height and width; 0 for a program that takes one size only.
    """
    preprocess = card.preprocess
    size = ["height", "width"] if step else list(preprocess.image_size)
    meaning = "RGB, 0 to 255, prepared as in preprocess; normalised inside"
    if preprocess.bands is not None:
        meaning = "(value - mean) / std of each band, with the statistics in preprocess, then prepared as in preprocess"
    if step:
        meaning += f"; height and width may be any multiples of {step}, and preprocess gives one such size"
    values = card.to_dict()
    names = values.pop("class_names") if output != "features" else []
    own = {name: values.pop(name) for name in ("source", "licence", "metrics", "provenance")}
    made = {"vitrail": __version__, "torch": torch.__version__, "weights_sha256": checksum}
    return {
        "format": FORMAT,
        "version": VERSION,
        "program": {"kind": to, "file": KINDS[to].file, "precision": precision},
        "input": {
            "name": INPUT,
            "type": card.input_type,
            "shape": ["batch", card.config.channels, *size],
            "meaning": meaning,
        },
        "preprocess": steps(preprocess),
        "output": {"name": output, "type": "float32", "shape": ["batch", width]},
        "class_names": names,
        **own,
        "made_by": made,
        "card": {name: value for name, value in values.items() if name != "reference"},
    }


def steps(preprocess: Preprocess) -> dict[str, Any]:
    """Return a preprocessing as a resize and a centre crop, with sizes in pixels (height, width).

    Resize "cover" scales to the smallest image that covers `size` and preserves the aspect ratio. Resize "squash"
    scales to exactly `size`. Resize "pad" scales to the largest image that fits into `size`, preserves the aspect
    ratio, and surrounds the image with "fill". Images of other bands than RGB have their statistics under "bands".
    """
    mode = {"small": "cover", "squash-crop": "squash"}.get(preprocess.resize, preprocess.resize)
    size = covering(preprocess) if preprocess.resize in CROPPED else preprocess.image_size
    fill = {"fill": list(preprocess.fill or GREY)} if mode == "pad" else {}
    bands = {} if preprocess.bands is None else {"bands": plain(preprocess.bands)}
    return {
        **bands,
        "resize": mode,
        "size": list(size),
        "interpolation": preprocess.interpolation,
        "antialias": True,
        **fill,
        "crop": list(preprocess.image_size),
    }


def card_in(about: Mapping[str, Any]) -> Card:
    """Return the model card that is part of a description. Raises ExportError if `describe` did not write it."""
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
        case {"name": str(name), "shape": [_, int()]}:
            return name in get_args(OutputName)
    return False
