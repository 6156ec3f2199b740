"""`vitrail serve`: a page and an HTTP interface for networks, on this machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import UsageError

log = logging.getLogger("vitrail")


@dataclass(frozen=True)
class Service:
    """What a server did while it was up."""

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
) -> Service:
    """Serve networks: a page to drop images on, and an HTTP interface, until Ctrl-C or SIGTERM.

    Returns after Ctrl-C; SIGTERM ends the process. Either way requests inside are answered first.

    Several networks are shown side by side. Only this machine is answered unless --host says otherwise; there
    is no password, so give a wider one only where everybody may ask.

    Args:
        models: Run folders (their best models), model folders, weight files, or names on the hub.
        host: Address to listen at; 0.0.0.0 is every one of this machine.
        port: Port to listen at; 0 takes a free one.
        allow_host: Another name the server is asked for by, such as that of a proxy; may be repeated.
        image_size: Serve at another resolution, in pixels.
        batch_size: Images computed together, at most.
        queue: Images inside at once, at most; beyond that clients are told to come back (429).
        max_mb: Largest request, in megabytes.
        max_megapixels: Largest image, in millions of pixels; left out: 134.
        deadline: Seconds for an answer.
        drain: Seconds that requests inside have to be answered after Ctrl-C or SIGTERM.
        device: cpu, cuda, cuda:1 or mps; left out: the best there is.
        precision: auto, bf16 or float32.
    """
    if not models:
        raise UsageError("serve what? vitrail serve MODEL ...")
    for name, value in dict(batch_size=batch_size, queue=queue, max_mb=max_mb, deadline=deadline, drain=drain).items():
        if value <= 0:
            raise UsageError(f"{name} is {value}; it must be above 0")
    if precision not in ("auto", "bf16", "float32"):
        raise UsageError(f"no precision is called {precision!r}: auto, bf16 or float32")
    try:
        from vitrail.server.app import create_app
        from vitrail.server.engine import Engine
        from vitrail.server.running import run, take_port
    except ImportError as error:
        raise UsageError(f"the server needs {error.name}: pip install 'vitrail[serve]'") from error
    from vitrail.data.images.decode import MAX_PIXELS
    from vitrail.server.guard import Hosts
    from vitrail.server.limits import Limits

    pixels = MAX_PIXELS if max_megapixels is None else int(max_megapixels * 1e6)
    limits = Limits(int(max_mb * 1e6), pixels=pixels, queue=queue, batch=batch_size, deadline=deadline, drain=drain)
    with take_port(host, port) as listening:
        engine = Engine(load_served(models, image_size, device, precision), limits)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        log.info("%s at %s/ (Ctrl-C ends it)", ", ".join(engine.models), url)
        run(create_app(engine, Hosts(host, allow_host)), engine, listening)
        return Service(url, list(engine.models), int(sum(engine.metrics.images.values.values())))


def load_served(
    models: tuple[str | Path, ...], image_size: int | None, device: str | None, precision: Any
) -> list[Any]:
    """Load the networks under names that tell them apart. Raises WeightsError, UsageError."""
    from vitrail.model.attention import fast_math
    from vitrail.server.served import Served
    from vitrail.training.resolve import choose_device
    from vitrail.verbs.inspect.material import labelled
    from vitrail.verbs.network.classifier import load_classifier

    fast_math()
    place = choose_device(device)
    names = labelled(models)
    return [
        Served(name, load_classifier(source, image_size), place, precision)
        for name, source in zip(names, models, strict=True)
    ]


def show(result: Service) -> str:
    """Return what was done as text."""
    return f"{result.url}: {result.images} image{'s' * (result.images != 1)} answered"


def as_json(result: Service) -> Any:
    """Return the result as JSON values."""
    return {"url": result.url, "models": result.models, "images": result.images}
