"""What the API answers, as types: FastAPI writes its OpenAPI description from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Problem = dict[str, str]
"""{"reason": short stable word, "message": sentence}."""


@dataclass
class Predicted:
    """One image; `problem` in place of classes where it could not be answered.

    `crop`, where it was asked for, is exactly what the network saw, as a PNG in a data address.
    """

    name: str
    top: list[dict[str, Any]]
    problem: Problem | None = None
    crop: str | None = None


@dataclass
class Prediction:
    """Images in the order in which they were sent; each has its best classes, best first, with probabilities."""

    model: str
    images: list[Predicted]
    seconds: float


@dataclass
class Embedded:
    """One image; `problem` in place of features where it could not be answered."""

    name: str
    features: list[float]
    problem: Problem | None = None


@dataclass
class Embedding:
    """Images in the order in which they were sent; features are what the classifier sees."""

    model: str
    width: int
    images: list[Embedded]
    seconds: float


@dataclass
class Attention:
    """Where the network looks in one image. Maps are lists of rows over the grid of patches.

    `rollout` is the share of each patch in what the classifier reads, through all layers; `attention` that of one
    layer and head (null: the mean of all), of the patch asked for, or without one of what the classifier reads;
    `positions` is how alike the positions are to that of the patch. `crop` is exactly what the network saw, as a
    PNG in a data address; `seen` is where that is in the picture of height and width `picture`, in its pixels.
    """

    model: str
    grid: list[int]
    rollout: list[list[float]]
    layer: int
    head: int | None
    patch: list[int] | None
    attention: list[list[float]]
    positions: list[list[float]] | None
    positions_about: str | None
    crop: str
    picture: list[int]
    seen: dict[str, float]
    seconds: float


IMAGE_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "image/*": {"schema": {"type": "string", "format": "binary"}},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["image"],
                "properties": {"image": {"type": "array", "items": {"type": "string", "format": "binary"}}},
            }
        },
    },
}
"""The body of a POST, in OpenAPI's terms: it is read by `vitrail.server.upload`, not by FastAPI."""

_PROBLEM = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["reason", "message"],
            "properties": {"reason": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}


def problems() -> dict[int | str, dict[str, Any]]:
    """Return the refusals of a POST, in OpenAPI's terms."""
    about = {
        400: "Malformed request, or foreign Host header",
        403: "Sent by a page of another origin",
        404: "No model of that name",
        408: "The body did not arrive in time",
        413: "Too many bytes or images",
        415: "Not an image",
        422: "An image that cannot be decoded or has too many pixels, or a wrong query value",
        429: "Busy; Retry-After says for how long",
        500: "The network failed on this image",
        503: "Not ready, or shutting down",
        504: "No answer before the deadline",
    }
    content = {"application/json": {"schema": _PROBLEM}}
    return {status: {"description": text, "content": content} for status, text in about.items()}
