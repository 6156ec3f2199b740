"""From uploads to results: decode on a few threads, compute in batches, stop at the deadline.

The service also knows whether the server is ready: from the time that every network has processed one image, until the
server receives a signal to end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from vitrail.device import available_cores
from vitrail.errors import UsageError
from vitrail.server.batching import Batcher
from vitrail.server.limits import Gate, Limits, Refused
from vitrail.server.metrics import Metrics
from vitrail.server.served_model import PreparedImage, ServedModel
from vitrail.server.upload import Upload, disconnected, read_uploads

log = logging.getLogger("vitrail")

DECODERS = 4
"""Maximum number of images decoded at once. The largest need up to two gigabytes each."""


@dataclass(frozen=True)
class FileResult:
    """The result of one file: the network's `value`, or why there is none."""

    name: str
    value: Any = None
    refused: Refused | None = None
    prepared: PreparedImage | None = None
    """The image as the network saw it, if there is a value."""


class Service:
    """The networks and their queue. It runs on one event loop, between `start` and `stop`."""

    def __init__(self, models: list[ServedModel], limits: Limits) -> None:
        self.models = {model.name: model for model in models}
        self.first = models[0]
        self.limits, self.gate = limits, Gate(limits.queue)
        self.metrics = Metrics(lambda: self.gate.inside, lambda: self.ready)
        self.warm, self.draining = False, False
        self.failure: str | None = None
        self.batcher = Batcher(limits.batch, self._answered)
        self._warming: asyncio.Task[None] | None = None
        self._decoders = ThreadPoolExecutor(min(DECODERS, available_cores()), "vitrail-decode")

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.warm and not self.draining

    def start(self) -> None:
        """Start working. `ready` becomes true when all networks are warm."""
        self.batcher.start()
        self._warming = asyncio.get_running_loop().create_task(self._warm(), name="vitrail-warm")

    async def stop(self) -> None:
        """Finish the current batch and stop."""
        self.draining = True
        if self._warming is not None:
            self._warming.cancel()
        await self.batcher.stop()
        await asyncio.to_thread(self._decoders.shutdown, wait=True, cancel_futures=True)

    async def _warm(self) -> None:
        try:
            for model in self.models.values():
                await self.batcher.submit(_warm, model)
        except Exception as error:  # the server stays up to report whatever a network raises
            self.failure = f"{type(error).__name__}: {error}"
            log.error("the server cannot become ready: %s", self.failure)
            return
        self.warm = True
        log.info("ready")

    def _answered(self, images: int, seconds: float) -> None:
        self.gate.answered(images, seconds)
        self.metrics.batches.observe(images)

    def model(self, name: str | None) -> ServedModel:
        """Return a network by its name, or the first. Raises Refused 404."""
        if name is None:
            return self.first
        if name not in self.models:
            raise Refused(404, "no-model", f"no model is called {name!r}; the models are {', '.join(self.models)}")
        return self.models[name]

    async def process(
        self, request: Request, model: ServedModel, compute: Callable[[list[Any]], list[Any]], *query: Any
    ) -> list[FileResult]:
        """Return the result of `compute`, a method of `model`, for each file of a request; a bad file fails alone.

        `compute` receives prepared images. With a `query` it receives pairs of an image and the query, and the request
        must have a single image.

        Raises Refused 503 if the server is not ready, 429 if the queue is full, and the refusals of `read_uploads` and
        `within_deadline`. A place in the queue is reserved before the body is read, which limits the memory of bodies.
        """
        if not self.ready:
            why = "the server is shutting down" if self.draining else self.failure or "the networks are not ready yet"
            raise Refused(503, "not-ready", why, None if self.failure else 1)
        with self.gate.hold() as reserve:
            uploads = await read_uploads(request, self.limits)
            if query and len(uploads) != 1:
                message = f"attention needs exactly one image per request, and this one has {len(uploads)}"
                raise Refused(413, "too-many-images", message)
            reserve(len(uploads) - 1)
            outcomes: list[FileResult] = await self.within_deadline(
                request, asyncio.gather(*(self._one(model, upload, compute, *query) for upload in uploads))
            )
        self.metrics.images.labels(model.name).inc(sum(one.refused is None for one in outcomes))
        for one in outcomes:
            if one.refused is not None:
                self.metrics.refused.labels(one.refused.reason).inc()
        return outcomes

    async def within_deadline(self, request: Request, work: Awaitable[Any]) -> Any:
        """Return the result of `work`, or drop it: Refused 504 at the deadline, 499 when the client leaves."""
        task = asyncio.ensure_future(work)
        client_left = asyncio.ensure_future(_client_left(request))
        try:
            await asyncio.wait({task, client_left}, timeout=self.limits.deadline, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if client_left.done():
                raise disconnected()
            raise Refused(504, "deadline", f"the result was not ready within {self.limits.deadline:g} seconds")
        finally:
            task.cancel()
            client_left.cancel()
            await asyncio.gather(task, client_left, return_exceptions=True)

    async def _one(
        self, model: ServedModel, upload: Upload, compute: Callable[[list[Any]], list[Any]], *query: Any
    ) -> FileResult:
        loop = asyncio.get_running_loop()
        try:
            if upload.refused is not None:
                raise upload.refused
            prepared = await loop.run_in_executor(self._decoders, model.prepare, upload.data, self.limits.pixels)
            value = await self.batcher.submit(compute, (prepared, *query) if query else prepared)
            return FileResult(upload.name, value, prepared=prepared)
        except Refused as refused:
            return FileResult(upload.name, refused=refused)
        except UsageError as error:  # the network has no such layer, head or patch
            return FileResult(upload.name, refused=Refused(422, "not-there", str(error)))
        except Exception as error:
            log.error("failed on an image: %s: %s", type(error).__name__, error)
            return FileResult(upload.name, refused=Refused(500, "failed", "the network failed on this image"))


def _warm(models: list[ServedModel]) -> list[None]:
    for model in models:
        model.warm()
    return [None] * len(models)


async def _client_left(request: Request) -> None:
    """Return when the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def seconds_since(began: float) -> float:
    """Return the time since `began` (time.perf_counter) in seconds, to a tenth of a millisecond."""
    return round(time.perf_counter() - began, 4)
