"""`vitrail serve`: a web page and an HTTP interface for networks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vitrail.device import Precision
from vitrail.errors import UsageError
from vitrail.exports.kinds import EngineName
from vitrail.ranges import Count, InputSize, Range, Seconds, Share, checked
from vitrail.verbs.flags.compute import Compute
from vitrail.version import install_extra
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.server.served_model import ServedModel

log = logging.getLogger("vitrail")


@one_line
@dataclass(frozen=True)
class ServedRequests:
    """Address, models and number of images of a server that has ended."""

    url: str
    models: list[str]
    images: int


@checked
def serve(
    *models: str | Path,
    host: str = "127.0.0.1",
    port: Annotated[int, Range(0, 65535)] = 8000,
    allow_host: tuple[str, ...] = (),
    reject: Share | None = None,
    calibrate: bool = True,
    image_size: InputSize | None = None,
    batch_size: Count = 8,
    queue: Count = 64,
    max_mb: Annotated[float, Range(0, 1e6, above=True)] = 10.0,
    max_megapixels: Annotated[float, Range(0, 1e6, above=True)] | None = None,
    deadline: Seconds = 30.0,
    drain: Annotated[int, Range(1, 10**6)] = 20,
    device: str | None = None,
    precision: Precision = "auto",
    engine: EngineName = "auto",
) -> ServedRequests:
    """Serve networks until Ctrl-C or SIGTERM: a page on which images can be dropped, and an HTTP interface.

    The function returns after Ctrl-C; SIGTERM ends the process. In both cases open requests are finished first.

    The page shows the results of several networks next to each other. Without --host, only this machine can connect.
    The server has no password, so open it to other machines only if everybody there may use it.

    Args:
        models: Run folders (their best models), model folders, weight files, or names on the hub, or programs that
            `vitrail export` wrote for ONNX Runtime or OpenVINO, which then compute.
        host: Address to listen at; 0.0.0.0 means every address of this machine.
        port: Port to listen at; 0 chooses a free one.
        allow_host: Another name by which clients reach the server, such as that of a proxy. May be repeated.
        reject: Smallest probability of the best class. An image with a lower one is "none of these" (default: every
            image gets a class).
        calibrate: Divide the network's outputs by the temperature of its card, if it has one.
        batch_size: Maximum number of images that are computed together.
        queue: Maximum number of images that wait or are computed. Beyond it, clients get status 429 and try again
            later.
        max_mb: Maximum size of a request in megabytes.
        max_megapixels: Maximum size of an image in millions of pixels (default: 134). Reading an image takes at most 16
            bytes per pixel, 2.1 GB for the default, and up to four images are read at once.
        deadline: Maximum time for a response in seconds.
        drain: Seconds to finish open requests after Ctrl-C or SIGTERM.
    """
    if not models:
        raise UsageError("no model is given. Name at least one: vitrail serve MODEL ...")
    compute = Compute(image_size, batch_size, device=device, precision=precision, engine=engine)
    try:
        from vitrail.server.app import create_app
        from vitrail.server.process import run, take_port
        from vitrail.server.service import Service
    except ImportError as error:
        needed = f"the server needs {error.name}, which is not installed"
        raise UsageError(f"{needed}: {install_extra('serve')}") from error
    from vitrail.data.images.decode import MAX_PIXELS
    from vitrail.device import fast_float32
    from vitrail.server.guard import Hosts
    from vitrail.server.limits import Limits

    pixels = MAX_PIXELS if max_megapixels is None else int(max_megapixels * 1e6)
    limits = Limits(int(max_mb * 1e6), pixels=pixels, queue=queue, batch=batch_size, deadline=deadline, drain=drain)
    with take_port(host, port) as listening:
        serving = Service(load_served(models, compute, reject, calibrate=calibrate), limits)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        log.info("%s at %s/ (Ctrl-C ends it)", ", ".join(serving.models), url)
        with fast_float32():
            run(create_app(serving, Hosts(host, allow_host)), serving, listening)
        return ServedRequests(url, list(serving.models), serving.metrics.images_answered)


def load_served(
    models: tuple[str | Path, ...], compute: Compute, reject: float | None = None, *, calibrate: bool = True
) -> list[ServedModel]:
    """Load the networks under distinct names. Raises WeightsError, UsageError.

    reject: Smallest probability of the best class. calibrate: Use the temperatures of their cards.
    """
    from vitrail.server.served_model import ServedModel
    from vitrail.verbs.inspect.inputs import network_labels
    from vitrail.verbs.network.classifier import explained_rejection, load_runnable

    place, served = compute.place(), []
    for name, source in zip(network_labels(models), models, strict=True):
        network = load_runnable(source, compute, calibrate=calibrate)
        if reject is not None:
            explained_rejection(network.card, source, reject)
        served.append(ServedModel(name, network, place, compute.precision, compute.engine, reject))
    return served


def show(result: ServedRequests) -> str:
    """Return the result as text for a terminal."""
    return f"{result.url}: {result.images} image{'s' * (result.images != 1)} answered"
