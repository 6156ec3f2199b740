"""`vitrail serve`: a web page and an HTTP interface for networks."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vitrail.config import plain
from vitrail.device import Precision, choose_device
from vitrail.errors import UsageError
from vitrail.exports.kinds import EngineName
from vitrail.ranges import Count, InputSize, Range, Seconds, Share, checked
from vitrail.server.hang_ups import HangUps
from vitrail.server.logs import LogFormat, log_as_json
from vitrail.verbs.flags.compute import Compute
from vitrail.version import install_extra
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.server.served_model import ServedModel

logger = logging.getLogger("vitrail")  # `log` is a setting


@one_line
@dataclass(frozen=True)
class ServedRequests:
    """Address, models, number of images, and format of the log of a server that has ended."""

    url: str
    models: list[str]
    images: int
    log: LogFormat = "text"


@checked
def serve(
    *models: str | Path,
    host: str = "127.0.0.1",
    port: Annotated[int, Range(0, 65535)] = 8000,
    allow_host: tuple[str, ...] = (),
    allow_origin: tuple[str, ...] = (),
    root_path: str = "",
    forwarded_allow_ips: tuple[str, ...] = (),
    keep_alive: Annotated[int, Range(0, 3600)] = 5,
    reject: Share | None = None,
    calibrate: bool = True,
    image_size: InputSize | None = None,
    batch_size: Count | None = None,
    queue: Count | None = None,
    max_mb: Annotated[float, Range(0, 1e6, above=True)] = 10.0,
    max_megapixels: Annotated[float, Range(0, 1e6, above=True)] | None = None,
    deadline: Seconds = 30.0,
    drain: Annotated[int, Range(1, 10**6)] = 20,
    log: LogFormat = "text",
    device: str | None = None,
    precision: Precision = "auto",
    engine: EngineName = "auto",
) -> ServedRequests:
    """Serve networks until Ctrl-C or SIGTERM: a page on which images can be dropped, and an HTTP interface.

    The function returns after Ctrl-C; SIGTERM ends the process. In both cases open requests are finished first. SIGHUP
    loads the models again without losing a request.

    The page shows the results of several networks next to each other. Without --host, only this machine can connect.
    The server has no password, so open it to other machines only if everybody there may use it.

    Args:
        models: Run folders (their best models), model folders, weight files, or names on the hub, or programs that
            `vitrail export` wrote for ONNX Runtime or OpenVINO, which then compute.
        host: Address to listen at; 0.0.0.0 means every address of this machine.
        port: Port to listen at; 0 chooses a free one.
        allow_host: Another name by which clients reach the server, such as that of a proxy. May be repeated.
        allow_origin: Origin of another web page that may use the server from a browser, such as https://app.example;
            "*" allows every page that a browser on a machine with access opens. May be repeated.
        root_path: Prefix of all addresses behind a proxy, such as /vit.
        forwarded_allow_ips: Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto headers are
            believed, such as 127.0.0.1. May be repeated.
        keep_alive: Seconds until an idle connection is closed; 0 closes it after each response.
        reject: Smallest probability of the best class. An image with a lower one is "none of these" (default: every
            image gets a class).
        calibrate: Divide the network's outputs by the temperature of its card, if it has one.
        batch_size: Maximum number of images that are computed together (default: 8 on a CPU, 64 on an accelerator).
        queue: Maximum number of images that wait or are computed. Beyond it, clients get status 429 and try again
            later. A request has at most 32 images, and at most this number (default: 64, or four batches).
        max_mb: Maximum size of a request in megabytes.
        max_megapixels: Maximum size of an image in millions of pixels (default: 134). Reading an image takes at most 16
            bytes per pixel, 2.1 GB for the default. Up to four images are read at once on a CPU; beside an
            accelerator one on each core, as far as half of the free memory holds them.
        deadline: Maximum time for a response in seconds.
        drain: Seconds to finish open requests after Ctrl-C or SIGTERM.
        log: Format of the log on standard error, which has a line for each request: text, or one JSON object per line.
    """
    if log == "json":
        log_as_json()
    if not models:
        raise UsageError("no model is given. Name at least one: vitrail serve MODEL ...")
    compute = Compute(image_size, device=device, precision=precision, engine=engine)
    with HangUps() as hang_ups:
        try:
            from vitrail.server.app import create_app
            from vitrail.server.process import serve_until_signal, take_port
            from vitrail.server.service import Service
        except ImportError as error:
            needed = f"the server needs {error.name}, which is not installed"
            raise UsageError(f"{needed}: {install_extra('serve')}") from error
        from vitrail.data.images.decode import MAX_PIXELS
        from vitrail.device import available_cores, fast_float32, free_memory
        from vitrail.server.clients import Clients, Hosts
        from vitrail.server.limits import Limits, sized

        clients = Clients(Hosts(host, allow_host), allow_origin, root_path, forwarded_allow_ips, keep_alive)
        pixels = MAX_PIXELS if max_megapixels is None else int(max_megapixels * 1e6)
        cpu = choose_device("cpu")
        decoders, batch, why = sized(compute.place().type, available_cores(), free_memory(cpu), pixels)
        batch = batch if batch_size is None else batch_size
        queue = max(Limits.queue, 4 * batch) if queue is None else queue
        logger.info("batches of %d images, %d decoded at once: %s", batch, decoders, why)
        images = min(Limits.images, queue)  # a request with more would never find enough places
        limits = Limits(
            int(max_mb * 1e6),
            images,
            pixels,
            queue=queue,
            batch=batch,
            deadline=deadline,
            drain=drain,
            decoders=decoders,
        )
        load = partial(load_served, models, compute, reject, calibrate=calibrate)
        with take_port(host, port) as listening:
            serving = Service(load(), limits, load)
            app = create_app(serving, clients)
            url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}{clients.root_path}"
            logger.info("%s at %s/ (Ctrl-C ends it)", ", ".join(serving.models), url)
            with fast_float32():
                serve_until_signal(app, serving, listening, clients, hang_ups)
            return ServedRequests(url, list(serving.models), serving.metrics.images_answered, log)


def load_served(
    models: tuple[str | Path, ...], compute: Compute, reject: float | None = None, *, calibrate: bool = True
) -> list[ServedModel]:
    """Load the networks under distinct names. Raises WeightsError, UsageError.

    reject: Smallest probability of the best class. calibrate: Use the temperatures of their cards.
    """
    from vitrail.server.served_model import ServedModel
    from vitrail.verbs.network import explained_rejection, load_runnable, network_labels

    place, served = compute.place(), []
    for name, source in zip(network_labels(models), models, strict=True):
        network = load_runnable(source, compute, calibrate=calibrate)
        if reject is not None:
            explained_rejection(network.card, source, reject)
        served.append(ServedModel(name, network, place, compute.precision, compute.engine, reject))
    return served


def show(result: ServedRequests) -> str:
    """Return the result as text for a terminal, or as a line of the JSON log."""
    if result.log == "json":
        return json.dumps(plain(result), ensure_ascii=False)
    return f"{result.url}: {result.images} image{'s' * (result.images != 1)} answered"
