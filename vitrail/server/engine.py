"""From uploads to results: decode on a few threads, compute in batches, stop at the deadline.

The engine also knows whether the server is ready: once every network has processed one image, and until the server is
told to end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from vitrail.device import available_cores
from vitrail.errors import UsageError
from vitrail.server.batching import Batcher
from vitrail.server.limits import Gate, Limits, Refused
from vitrail.server.metrics import Metrics
from vitrail.server.served_model import AttentionQuery, PreparedImage, ServedModel
from vitrail.server.upload import Upload, disconnected, read_uploads

log = logging.getLogger("vitrail")

DECODERS = 4
"""Maximum number of images decoded at once. The largest need a gigabyte each."""


@dataclass(frozen=True)
class Outcome:
    """The result of one file: the network's `value`, or why there is none."""

    name: str
    value: Any = None
    refused: Refused | None = None
    prepared: PreparedImage | None = None
    """The image as the network saw it, if there is a value."""


class Engine:
    """The networks and their queue. It runs on one event loop, between `start` and `stop`."""

    def __init__(self, models: list[ServedModel], limits: Limits) -> None:
        self.models = {model.name: model for model in models}
        self.first = models[0]
        self.limits, self.gate = limits, Gate(limits.queue)
        self.metrics = Metrics(lambda: self.gate.inside, lambda: self.ready)
        self.warm, self.draining = False, False
        self.failure: str | None = None
        self._batcher: Batcher | None = None
        self._warming: asyncio.Task[None] | None = None
        self._decoders = ThreadPoolExecutor(min(DECODERS, available_cores()), "vitrail-decode")

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.warm and not self.draining

    @property
    def batcher(self) -> Batcher:
        """The queue. Raises RuntimeError before `start`."""
        if self._batcher is None:
            raise RuntimeError("the engine has not been started")
        return self._batcher

    def start(self) -> None:
        """Start working. `ready` becomes true when all networks are warm."""
        self._batcher = Batcher(self.limits.batch, self._answered)
        self._batcher.start()
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

    @asynccontextmanager
    async def admitted(self, request: Request) -> AsyncIterator[list[Upload]]:
        """Admit a request to the queue and yield its files.

        Raises Refused 503 if the server is not ready, 429 if the queue is full, and the refusals of reading the body.
        Places in the queue are reserved before the body is read, which limits the memory of bodies, too.
        """
        if not self.ready:
            why = "the server is shutting down" if self.draining else self.failure or "the networks are not ready yet"
            raise Refused(503, "not-ready", why, None if self.failure else 1)
        with self.gate.hold() as held:
            uploads = await read_uploads(request, self.limits)
            held.grow(len(uploads) - 1)
            yield uploads

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

    async def answer(
        self, model: ServedModel, uploads: list[Upload], compute: Callable[[list[PreparedImage]], list[Any]]
    ) -> list[Outcome]:
        """Return the result of `compute`, a method of `model`, for each file; a bad file fails alone."""
        outcomes = await asyncio.gather(*(self._one(model, upload, compute) for upload in uploads))
        self.metrics.images.labels(model.name).inc(sum(one.refused is None for one in outcomes))
        for one in outcomes:
            if one.refused is not None:
                self.metrics.refused.labels(one.refused.reason).inc()
        return outcomes

    async def _one(self, model: ServedModel, upload: Upload, compute: Callable[[list[Any]], list[Any]]) -> Outcome:
        try:
            prepared = await self.prepare(model, upload)
            return Outcome(upload.name, await self.batcher.submit(compute, prepared), prepared=prepared)
        except Refused as refused:
            return Outcome(upload.name, refused=refused)
        except Exception as error:
            return Outcome(upload.name, refused=_failed(error))

    async def look(self, model: ServedModel, upload: Upload, what: AttentionQuery) -> dict[str, Any]:
        """Return where a network looks in one image. Raises Refused 422 if it has no such layer, head or patch."""
        prepared = await self.prepare(model, upload)
        try:
            found: dict[str, Any] = await self.batcher.submit(model.look, (prepared, what))
        except UsageError as error:
            raise Refused(422, "not-there", str(error)) from error
        except Refused:
            raise
        except Exception as error:
            raise _failed(error) from error
        self.metrics.images.labels(model.name).inc()
        return found

    async def prepare(self, model: ServedModel, upload: Upload) -> PreparedImage:
        """Decode and prepare a file on another thread. Raises Refused."""
        if upload.refused is not None:
            raise upload.refused
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoders, model.prepare, upload.data, self.limits.pixels)


def _warm(models: list[ServedModel]) -> list[None]:
    for model in models:
        model.warm()
    return [None] * len(models)


def _failed(error: Exception) -> Refused:
    """Return what a client learns about an internal failure. The log has the details."""
    log.error("failed on an image: %s: %s", type(error).__name__, error)
    return Refused(500, "failed", "the network failed on this image")


async def _client_left(request: Request) -> None:
    """Return when the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def seconds_since(began: float) -> float:
    """Return the time since `began` (time.perf_counter) in seconds, to a tenth of a millisecond."""
    return round(time.perf_counter() - began, 4)
