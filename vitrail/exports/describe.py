"""The description of an exported program, so that others can use it: input, preprocessing, output, classes, origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vitrail.data.images.ops import covering
from vitrail.data.settings import Preprocess
from vitrail.errors import ExportError
from vitrail.exports.kinds import INPUT, KINDS
from vitrail.version import __version__
from vitrail.weights.card import Card

FORMAT = "vitrail-export"
VERSION = 1


def describe(card: Card, to: str, output: str, precision: str, width: int, checksum: str) -> dict[str, Any]:
    """Return the description of a program as JSON values.

    `width` is the number of outputs per image. `checksum` is the SHA-256 of the model's tensors.
    """
    how = card.preprocess
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
            "type": "uint8",
            "shape": ["batch", card.config.channels, *how.image_size],
            "meaning": "RGB, 0 to 255, prepared as in preprocess; normalised inside",
        },
        "preprocess": steps(how),
        "output": {"name": output, "type": "float32", "shape": ["batch", width]},
        "class_names": names,
        **own,
        "made_by": made,
        "card": {name: value for name, value in values.items() if name != "reference"},
    }


def steps(how: Preprocess) -> dict[str, Any]:
    """Return a preprocessing as a resize and a centre crop, with sizes in pixels (height, width).

    Resize "cover" scales to the smallest image that covers `size` and preserves the aspect ratio. Resize "squash"
    scales to exactly `size`.
    """
    if how.resize == "squash":
        mode, size = "squash", how.image_size
    else:
        mode, size = "cover", covering(how)
    return {
        "resize": mode,
        "size": list(size),
        "interpolation": how.interpolation,
        "antialias": True,
        "crop": list(how.image_size),
    }


def card_in(about: Mapping[str, Any]) -> Card:
    """Return the model card that is part of a description. Raises ExportError if `describe` did not write it."""
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise ExportError(
            f"this program was not exported by this version of vitrail: its description has format "
            f"{about.get('format')!r}, version {about.get('version')!r}, not {FORMAT!r}, version {VERSION}. Export the "
            "model again (vitrail export)"
        )
    own = {name: about[name] for name in ("class_names", "source", "licence", "metrics", "provenance")}
    return Card.from_dict({**about["card"], **own})
