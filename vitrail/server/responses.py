"""Types of the API's responses. FastAPI writes its OpenAPI description from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitrail.server.limits import STATUSES
from vitrail.server.upload import FORM


@dataclass
class Problem:
    """Why there is no result: a short stable word, a sentence, and the seconds until it is worth to try again."""

    reason: str
    message: str
    retry_after: int | None = None


@dataclass
class ImagePrediction:
    """What is predicted for one image. `problem` says why there is nothing.

    `labels` are the predicted labels of a model that predicts several, or none; null for a model that predicts one
    class. `rejected` says whether the best class is less probable than `vitrail serve --reject` asks for, so that the
    image is none of the classes; null without it. For a model that predicts the class of each pixel, `mask` is a PNG of
    the image's size in a data URI, whose palette indices are numbers of classes, and a probability in `top` is the
    share of the pixels, beside the `colour` of the class in the PNG; null for other models. For a model that predicts
    numbers, `numbers` are these by name. For a model that gives several answers, `answers` are these by name, each with
    `class`, `probability` and `top`, with `labels` and `top`, or with `numbers`. `top` is empty for both. `crop`, if
    requested, is exactly the image that the network saw, as a PNG in a data URI.
    """

    name: str
    top: list[dict[str, Any]]
    problem: Problem | None = None
    crop: str | None = None
    labels: list[dict[str, Any]] | None = None
    rejected: bool | None = None
    mask: str | None = None
    numbers: dict[str, float] | None = None
    answers: dict[str, dict[str, Any]] | None = None


@dataclass
class _Answer:
    """The beginning of every response: the name and the tensors of the network, and the version of vitrail."""

    model: str
    weights_sha256: str
    version: str


@dataclass
class Prediction(_Answer):
    """The best classes of each image with probabilities, best first. Images are in the order of the request.

    `weights_sha256` and `version` name the network's tensors and the version of vitrail that answered.
    """

    images: list[ImagePrediction]
    seconds: float


@dataclass
class ImageFeatures:
    """The features of one image. `problem` says why there are none."""

    name: str
    features: list[float]
    problem: Problem | None = None


@dataclass
class Embedding(_Answer):
    """The features of each image: the input of the classifier. Images are in the order of the request."""

    width: int
    images: list[ImageFeatures]
    seconds: float


@dataclass
class Attention(_Answer):
    """Where the network looks in one image. Maps are lists of rows over the grid of patches.

    `rollout` is the share of each patch in the classifier's input, through all layers. `attention` is that of one
    layer and head (null: the mean of all heads): attention of the given patch, or of the classifier's input.
    `positions` is the similarity of all positions to that of the patch. `crop` is exactly the image that the network
    saw, as a PNG in a data URI. `seen` is its place in the original picture, in pixels; `picture` is that picture's
    height and width.
    """

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


@dataclass
class ModelDescription:
    """A served network: its classes, its card without folders, and which layers, heads and patches it has.

    `weights_sha256` is the SHA-256 of its tensors, as in every response. `several_labels` says whether it predicts
    several labels for an image, or none. `reject` is the smallest probability of the best class, if there is one.
    """

    name: str
    weights_sha256: str
    class_names: list[str]
    several_labels: bool
    reject: float | None
    parameters: int
    image_size: list[int]
    attention: bool
    layers: int
    heads: int
    grid: list[int]
    card: dict[str, Any]


@dataclass
class RequestLimits:
    """The largest request: bytes of its body, pixels of an image, and images."""

    body: int
    pixels: int
    images: int


@dataclass
class Models:
    """The served networks, the limits of requests, and the version of vitrail."""

    models: list[ModelDescription]
    limits: RequestLimits
    version: str


IMAGE_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "image/*": {"schema": {"type": "string", "format": "binary"}},
        FORM: {
            "schema": {
                "type": "object",
                "required": ["image"],
                "properties": {"image": {"type": "array", "items": {"type": "string", "format": "binary"}}},
            }
        },
    },
}
"""The body of a POST request for OpenAPI. `vitrail.server.upload` reads it, not FastAPI."""


@dataclass
class Refusal:
    """The body of every error response."""

    error: Problem
    request_id: str | None


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": Refusal} for status, text in STATUSES.items() if status != 499
}
"""The error responses of a POST request for OpenAPI."""
