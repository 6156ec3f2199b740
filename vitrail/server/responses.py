"""Types of the API's responses. FastAPI writes its OpenAPI description from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Problem = dict[str, str]
"""{"reason": a short stable word, "message": a sentence}."""


@dataclass
class ImagePrediction:
    """The classes of one image. `problem` says why there are none.

    `crop`, if requested, is exactly the image that the network saw, as a PNG in a data URI.
    """

    name: str
    top: list[dict[str, Any]]
    problem: Problem | None = None
    crop: str | None = None


@dataclass
class Prediction:
    """The best classes of each image with probabilities, best first. Images are in the order of the request."""

    model: str
    images: list[ImagePrediction]
    seconds: float


@dataclass
class ImageFeatures:
    """The features of one image. `problem` says why there are none."""

    name: str
    features: list[float]
    problem: Problem | None = None


@dataclass
class Embedding:
    """The features of each image: the input of the classifier. Images are in the order of the request."""

    model: str
    width: int
    images: list[ImageFeatures]
    seconds: float


@dataclass
class Attention:
    """Where the network looks in one image. Maps are lists of rows over the grid of patches.

    `rollout` is the share of each patch in the classifier's input, through all layers. `attention` is that of one
    layer and head (null: the mean of all heads): attention of the given patch, or of the classifier's input.
    `positions` is the similarity of all positions to that of the patch. `crop` is exactly the image that the network
    saw, as a PNG in a data URI. `seen` is its place in the original picture, in pixels; `picture` is that picture's
    height and width.
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
"""The body of a POST request for OpenAPI. `vitrail.server.upload` reads it, not FastAPI."""

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
    """Return the error responses of a POST request for OpenAPI."""
    about = {
        400: "Malformed request, or a Host header that is not allowed",
        403: "The request comes from a page of another origin",
        404: "There is no model with this name",
        408: "The body did not arrive in time",
        413: "The request has too many bytes or images",
        415: "The body is not an image",
        422: "The image cannot be decoded or has too many pixels, or a query value is wrong",
        429: "The queue is full; Retry-After says when to try again",
        500: "The network failed on this image",
        503: "The server is not ready, or is shutting down",
        504: "The result was not ready before the deadline",
    }
    content = {"application/json": {"schema": _PROBLEM}}
    return {status: {"description": text, "content": content} for status, text in about.items()}
