"""From uploads to results: decode on a few threads, compute in batches, stop at the deadline.

The service also knows whether the server is ready: from the time that every network has processed one image, until the
server receives a signal to end. It can load its networks anew while it answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from vitrail.errors import UsageError
from vitrail.server.batching import Batcher
from vitrail.server.limits import Bodies, Gate, Limits, Refused
from vitrail.server.logs import current
from vitrail.server.metrics import Metrics
from vitrail.server.served_model import PreparedImage, ServedModel
from vitrail.server.upload import Upload, disconnected, read_uploads
from vitrail.words import shown

log = logging.getLogger("vitrail")

FAILED = 60
"""Seconds after which a client may ask again if a network failed. Only a reload or a restart helps."""


@dataclass(frozen=True)
class FileResult:
    """The result of one file: the network's `value`, or why there is none."""

    name: str
    value: Any = None
    refused: Refused | None = None
    prepared: PreparedImage | None = None
    """The image as the network saw it, if there is a value."""


class Service:
    """The networks and their queue. It runs on one event loop, between `start` and `stop`.

    load: Loads all networks anew, for `reload`.
    """

    def __init__(
        self, models: list[ServedModel], limits: Limits, load: Callable[[], list[ServedModel]] | None = None
    ) -> None:
        self.models = {model.name: model for model in models}
        self.limits, self.gate, self.bodies = limits, Gate(limits.queue), Bodies(limits.bodies)
        self.metrics = Metrics(lambda: self.gate.inside, lambda: self.bodies.arriving, lambda: self.ready)
        self._load, self._reloading, self._again = load, False, False
        self.warm, self.draining = False, False
        self.failure: str | None = None
        self.batcher = Batcher(limits.batch, self._answered)
        self._tasks: set[asyncio.Task[None]] = set()
        self._decoders = ThreadPoolExecutor(limits.decoders, "vitrail-decode")

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.warm and not self.draining

    def start(self) -> None:
        """Start working. `ready` becomes true when all networks are warm."""
        self.batcher.start()
        self._begin(self._warm())

    async def stop(self) -> None:
        """Finish the current batch and stop."""
        self.draining = True
        for task in self._tasks:
            task.cancel()
        await self.batcher.stop()
        await asyncio.to_thread(self._decoders.shutdown, wait=True, cancel_futures=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _warm(self) -> None:
        for name, model in self.models.items():
            try:
                await self.batcher.submit(_warm, model)
            except Exception as error:  # the server stays up to report whatever a network raises
                # the message may name files, which are nobody's business but the operator's
                self.failure = f"{name} fails on a grey image ({type(error).__name__}); the server's log says why"
                log.error("the server cannot become ready: %s: %s: %s", name, type(error).__name__, error)
                return
        self.warm = True
        log.info("ready")

    def reload(self) -> None:
        """Begin to load all networks anew. Requests are answered by the old ones until the new ones are checked.

        If a new network cannot be used, or has other classes, all old ones stay, and the log says why.
        """
        if self.draining or self._load is None:
            return
        if self._reloading:
            self._again = True  # the files may have changed after they were read
            return
        self._reloading = True
        self._begin(self._reload(self._load))

    async def _reload(self, load: Callable[[], list[ServedModel]]) -> None:
        try:
            log.info("loading %s anew", ", ".join(self.models))
            for model in self.models.values():
                model.check_there()
            models = await asyncio.to_thread(load)
            for model in models:
                model.check_replaces(self.models[model.name])
                await self.batcher.submit(_warm, model)
        except Exception as error:  # whatever is wrong with a file, the server goes on
            self.metrics.reloads.labels("failed").inc()
            log.error("the models were not replaced, the previous ones stay: %s", error)
        else:
            self.models = {model.name: model for model in models}
            self.warm, self.failure = True, None
            self.metrics.reloads.labels("done").inc()
            log.info("replaced: %s", ", ".join(f"{one.name} (sha256 {one.weights_sha256})" for one in models))
        finally:
            self._reloading = False
        if self._again:
            self._again = False
            self.reload()

    def _answered(self, images: int, seconds: float) -> None:
        self.gate.answered(images, seconds)
        self.metrics.batches.observe(images)

    def model(self, name: str | None) -> ServedModel:
        """Return a network by its name, or the first. Raises Refused 404."""
        if name is None:
            name = next(iter(self.models))
        if name not in self.models:
            raise Refused(404, "no-model", f"no model is called {shown(name)}; the models are {', '.join(self.models)}")
        if (exchange := current.get()) is not None:
            exchange.model = name
        return self.models[name]

    async def process(
        self, request: Request, model: ServedModel, compute: Callable[[list[Any]], list[Any]], *query: Any
    ) -> list[FileResult]:
        """Return the result of `compute`, a method of `model`, for each file of a request; a bad file fails alone.

        `compute` receives prepared images. With a `query` it receives pairs of an image and the query, and the request
        must have a single image.

        Raises Refused 503 if the server is not ready, 429 if the queue is full, and the refusals of `read_uploads` and
        `within_deadline`. Only images that have arrived have a place in the queue; `Bodies` limits the memory of the
        others.
        """
        if not self.ready:
            raise self.not_ready()
        self.gate.check()
        uploads = await read_uploads(request, self.limits)
        if query and len(uploads) != 1:
            message = f"attention needs exactly one image per request, and this one has {len(uploads)}"
            raise Refused(413, "too-many-images", message)
        with self.gate.hold(len(uploads)):
            outcomes: list[FileResult] = await self.within_deadline(
                request, asyncio.gather(*(self._one(model, upload, compute, *query) for upload in uploads))
            )
        self.metrics.images.labels(model.name).inc(sum(one.refused is None for one in outcomes))
        for one in outcomes:
            if one.refused is not None:
                self.metrics.refused.labels(one.refused.reason).inc()
        return outcomes

    def not_ready(self) -> Refused:
        """Return the refusal while the server is not ready. It says when to try again."""
        if self.draining:
            return Refused(503, "not-ready", "the server is shutting down", self.limits.drain)
        if self.failure is not None:
            return Refused(503, "not-ready", self.failure, FAILED)
        return Refused(503, "not-ready", "the networks are not ready yet", 1)

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
