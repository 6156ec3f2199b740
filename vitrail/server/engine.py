"""From uploads to answers: decode on a few threads, compute in batches, give up at the deadline.

Readiness is here too: `ready` once every network has answered an image, and no longer from the moment that the
server is told to end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from vitrail.errors import UsageError
from vitrail.server.batching import Batcher
from vitrail.server.limits import Gate, Limits, Refused
from vitrail.server.metrics import Metrics
from vitrail.server.served import Look, Prepared, Served
from vitrail.server.upload import Upload, left, read_uploads

log = logging.getLogger("vitrail")

DECODERS = 4
"""Images decoded at once, at most: the largest take a gigabyte each while they are."""


@dataclass(frozen=True)
class Outcome:
    """What became of one file: `value` of the network, or why there is none."""

    name: str
    value: Any = None
    refused: Refused | None = None
    prepared: Prepared | None = None
    """The image as the network took it, where there is a value."""


class Engine:
    """The networks and the queue before them; lives on one event loop, between `start` and `stop`."""

    def __init__(self, models: list[Served], limits: Limits) -> None:
        self.models = {model.name: model for model in models}
        self.first = models[0]
        self.limits, self.gate = limits, Gate(limits.queue)
        self.metrics = Metrics(lambda: self.gate.inside, lambda: self.ready)
        self.warm, self.draining = False, False
        self.failure: str | None = None
        self._batcher: Batcher | None = None
        self._warming: asyncio.Task[None] | None = None
        self._decoders = ThreadPoolExecutor(min(DECODERS, os.cpu_count() or 1), "vitrail-decode")

    @property
    def ready(self) -> bool:
        """Are requests taken?"""
        return self.warm and not self.draining

    @property
    def batcher(self) -> Batcher:
        """The queue. Raises RuntimeError before `start`."""
        if self._batcher is None:
            raise RuntimeError("the engine has not been started")
        return self._batcher

    def start(self) -> None:
        """Begin to work; `ready` follows when all networks are warm."""
        self._batcher = Batcher(self.limits.batch, self._answered)
        self._batcher.start()
        self._warming = asyncio.get_running_loop().create_task(self._warm(), name="vitrail-warm")

    async def stop(self) -> None:
        """End, after what is being computed."""
        self.draining = True
        if self._warming is not None:
            self._warming.cancel()
        await self.batcher.stop()
        await asyncio.to_thread(self._decoders.shutdown, wait=True, cancel_futures=True)

    async def _warm(self) -> None:
        try:
            for model in self.models.values():
                await self.batcher.submit(_warm, model)
        except Exception as error:  # whatever a network raises: the server stays up to say so
            self.failure = f"{type(error).__name__}: {error}"
            log.error("the server cannot get ready: %s", self.failure)
            return
        self.warm = True

    def _answered(self, images: int, seconds: float) -> None:
        self.gate.answered(images, seconds)
        self.metrics.batches.observe(images)

    def model(self, name: str | None) -> Served:
        """Return a network by its name, or the first. Raises Refused 404."""
        if name is None:
            return self.first
        if name not in self.models:
            raise Refused(404, "no-model", f"no model is called {name!r}; there are {', '.join(self.models)}")
        return self.models[name]

    @asynccontextmanager
    async def admitted(self, request: Request) -> AsyncIterator[list[Upload]]:
        """Let a request in, with its files, for as long as the block takes.

        Raises Refused 503 where the server is not ready, 429 where it is full, and what reading the body raises.
        The places in the queue are taken before the body is read, so that bodies are bounded too.
        """
        if not self.ready:
            why = "shutting down" if self.draining else self.failure or "the networks are not ready yet"
            raise Refused(503, "not-ready", why, None if self.failure else 1)
        with self.gate.hold() as held:
            uploads = await read_uploads(request, self.limits)
            held.grow(len(uploads) - 1)
            yield uploads

    async def within_deadline(self, request: Request, work: Awaitable[Any]) -> Any:
        """Return what `work` gives. Raises Refused 504 at the deadline and 499 when the client leaves, and drops it."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_gone(request))
        try:
            waited = {task, gone}
            await asyncio.wait(waited, timeout=self.limits.deadline, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise left()
            raise Refused(504, "deadline", f"no answer within {self.limits.deadline:g} seconds")
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def answer(
        self, model: Served, uploads: list[Upload], compute: Callable[[list[Prepared]], list[Any]]
    ) -> list[Outcome]:
        """Return what `compute`, a method of `model`, makes of each file; one that is bad fails alone."""
        outcomes = await asyncio.gather(*(self._one(model, upload, compute) for upload in uploads))
        self.metrics.images.add(model.name, by=sum(one.refused is None for one in outcomes))
        for one in outcomes:
            if one.refused is not None:
                self.metrics.refused.add(one.refused.reason)
        return outcomes

    async def _one(self, model: Served, upload: Upload, compute: Callable[[list[Any]], list[Any]]) -> Outcome:
        try:
            prepared = await self.prepare(model, upload)
            return Outcome(upload.name, await self.batcher.submit(compute, prepared), prepared=prepared)
        except Refused as refused:
            return Outcome(upload.name, refused=refused)
        except Exception as error:
            return Outcome(upload.name, refused=_failed(error))

    async def look(self, model: Served, upload: Upload, what: Look) -> dict[str, Any]:
        """Return where a network looks in one file. Raises Refused 422 for what this network does not have."""
        prepared = await self.prepare(model, upload)
        try:
            found: dict[str, Any] = await self.batcher.submit(model.look, (prepared, what))
        except UsageError as error:
            raise Refused(422, "not-there", str(error)) from error
        except Refused:
            raise
        except Exception as error:
            raise _failed(error) from error
        self.metrics.images.add(model.name)
        return found

    async def prepare(self, model: Served, upload: Upload) -> Prepared:
        """Decode and prepare a file on a thread of its own. Raises Refused."""
        if upload.refused is not None:
            raise upload.refused
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoders, model.prepare, upload.data, self.limits.pixels)


def _warm(models: list[Served]) -> list[None]:
    for model in models:
        model.warm()
    return [None] * len(models)


def _failed(error: Exception) -> Refused:
    """What a client is told of a failure inside: no more than that; the log has the rest."""
    log.error("failed on an image: %s: %s", type(error).__name__, error)
    return Refused(500, "failed", "the network failed on this image")


async def _gone(request: Request) -> None:
    """Return when the client has left; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def seconds_since(began: float) -> float:
    """Return the time since `began` (time.perf_counter) in seconds, to a tenth of a millisecond."""
    return round(time.perf_counter() - began, 4)
