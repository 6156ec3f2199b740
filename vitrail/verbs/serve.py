"""`vitrail serve`: a web page and an HTTP interface for networks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import UsageError

log = logging.getLogger("vitrail")


@dataclass(frozen=True)
class ServedRequests:
    """Address, models and number of images of a server that has ended."""

    url: str
    models: list[str]
    images: int


def serve(
    *models: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_host: tuple[str, ...] = (),
    image_size: int | None = None,
    batch_size: int = 8,
    queue: int = 64,
    max_mb: float = 10.0,
    max_megapixels: float | None = None,
    deadline: float = 30.0,
    drain: int = 20,
    device: str | None = None,
    precision: Literal["auto", "bf16", "float32"] = "auto",
) -> ServedRequests:
    """Serve networks until Ctrl-C or SIGTERM: a page on which images can be dropped, and an HTTP interface.

    The function returns after Ctrl-C; SIGTERM ends the process. In both cases open requests are finished first.

    The page shows the results of several networks next to each other. Without --host, only this machine can connect.
    The server has no password, so open it to other machines only if everybody there may use it.

    Args:
        models: Run folders (their best models), model folders, weight files, or names on the hub.
        host: Address to listen at; 0.0.0.0 means every address of this machine.
        port: Port to listen at; 0 chooses a free one.
        allow_host: Another name by which clients reach the server, such as that of a proxy. May be repeated.
        image_size: Side of the square input in pixels. Position embeddings are resampled (default: the network's
            own size).
        batch_size: Maximum number of images that are computed together.
        queue: Maximum number of images that wait or are computed. Beyond it, clients get status 429 and try again
            later.
        max_mb: Maximum size of a request in megabytes.
        max_megapixels: Maximum size of an image in millions of pixels (default: 134).
        deadline: Maximum time for a response in seconds.
        drain: Seconds to finish open requests after Ctrl-C or SIGTERM.
        device: Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available).
        precision: Number format of the computation. 'auto' chooses bf16 if the device is fast at it.
    """
    if not models:
        raise UsageError("no model is given. Name at least one: vitrail serve MODEL ...")
    for name, value in dict(batch_size=batch_size, queue=queue, max_mb=max_mb, deadline=deadline, drain=drain).items():
        if value <= 0:
            raise UsageError(f"{name} is {value}; it must be above 0")
    if precision not in ("auto", "bf16", "float32"):
        raise UsageError(f"no precision is called {precision!r}: auto, bf16 or float32")
    try:
        from vitrail.server.app import create_app
        from vitrail.server.engine import Engine
        from vitrail.server.process import run, take_port
    except ImportError as error:
        raise UsageError(
            f"the server needs {error.name}, which is not installed: pip install 'vitrail[serve]'"
        ) from error
    from vitrail.data.images.decode import MAX_PIXELS
    from vitrail.device import fast_float32
    from vitrail.server.guard import Hosts
    from vitrail.server.limits import Limits

    pixels = MAX_PIXELS if max_megapixels is None else int(max_megapixels * 1e6)
    limits = Limits(int(max_mb * 1e6), pixels=pixels, queue=queue, batch=batch_size, deadline=deadline, drain=drain)
    with take_port(host, port) as listening:
        engine = Engine(load_served(models, image_size, device, precision), limits)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        log.info("%s at %s/ (Ctrl-C ends it)", ", ".join(engine.models), url)
        with fast_float32():
            run(create_app(engine, Hosts(host, allow_host)), engine, listening)
        return ServedRequests(url, list(engine.models), engine.metrics.images_answered)


def load_served(
    models: tuple[str | Path, ...], image_size: int | None, device: str | None, precision: Any
) -> list[Any]:
    """Load the networks under distinct names. Raises WeightsError, UsageError."""
    from vitrail.device import choose_device
    from vitrail.server.served_model import ServedModel
    from vitrail.verbs.inspect.inputs import network_labels
    from vitrail.verbs.network.classifier import load_classifier

    place = choose_device(device)
    names = network_labels(models)
    return [
        ServedModel(name, load_classifier(source, image_size), place, precision)
        for name, source in zip(names, models, strict=True)
    ]


def show(result: ServedRequests) -> str:
    """Return the result as text for a terminal."""
    return f"{result.url}: {result.images} image{'s' * (result.images != 1)} answered"


def as_json(result: ServedRequests) -> Any:
    """Return the result as JSON values."""
    return {"url": result.url, "models": result.models, "images": result.images}
