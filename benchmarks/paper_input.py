"""Simulate the input side of a large run: an object store that is sometimes slow, requests, decoding, devices.

Times are simulated. Order and distribution come from the real code: `order.Runs` chooses the images of a process, and
the loader's own constants say how far ahead it requests. All processes step together, so each step waits for the
slowest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtri

from vitrail.data.loading import loader
from vitrail.data.loading.order import EpochOrder

TOGETHER = 64
"""Number of neighbours that are shown together."""


@dataclass(frozen=True)
class Store:
    """Time of a request: a log-normal latency, a transfer, and occasionally a stall."""

    median: float = 0.1
    """Seconds to the first byte."""
    p99: float = 0.5
    stalls: float = 0.0
    """Share of the requests that take `stall` seconds instead of their latency."""
    stall: float = 5.0
    bandwidth: float = 85e6
    """Bytes/s of one request."""

    def slowest(self, uniform: np.ndarray, stalled: np.ndarray, requests: int, size: float) -> np.ndarray:
        """Return the seconds of the slowest of `requests` simultaneous requests, as a function of two uniform numbers.

        The maximum of n draws has the n-th power of the distribution function.
        """
        spread = np.log(self.p99 / self.median) / ndtri(0.99)
        latency = self.median * np.exp(spread * ndtri(uniform ** (1 / requests)))
        hit = stalled < -np.expm1(requests * np.log1p(-self.stalls))
        return np.where(hit, np.maximum(latency, self.stall), latency) + size / self.bandwidth


@dataclass(frozen=True)
class Feed:
    """Loader of one process, and the step that it supplies."""

    step: float
    """Seconds of a step that does not wait."""
    processes: int
    batch: int
    """Images per process and step."""
    together: int
    image_bytes: float
    decode: float
    """Decoded images/s of a process, all its threads together."""
    on_the_way: int = loader._ON_THE_WAY
    """Images requested ahead of decoding."""
    asking: int = loader._ASKING
    """Batches requested at the same time."""
    ready: int = loader._BATCHES_AHEAD
    """Batches that are being decoded or ready."""

    @property
    def depth(self) -> int:
        """Return the batches requested ahead of decoding, as the loader counts them."""
        return -(-self.on_the_way // self.batch)


def waiting(feed: Feed, store: Store, steps: int, seed: int = 0) -> float:
    """Return the share of the time that devices wait for images, over `steps` steps after the first."""
    random = np.random.default_rng(seed)
    shape = (steps, feed.processes)
    requests = -(-feed.batch // feed.together)
    fetch = store.slowest(random.random(shape), random.random(shape), requests, feed.together * feed.image_bytes)
    ahead, decoding = feed.depth + feed.ready, feed.batch / feed.decode
    free = np.zeros((feed.asking, feed.processes))  # when each asking thread is done
    decoded = np.zeros(feed.processes)
    begins = np.zeros(steps)
    waited = 0.0
    for number in range(steps):
        asked = begins[number - ahead] if number >= ahead else 0.0
        thread = free.argmin(0)
        start = np.maximum(asked, free.min(0))
        there = start + fetch[number]
        free[thread, np.arange(feed.processes)] = there
        room = begins[number - feed.ready] if number >= feed.ready else 0.0
        decoded = np.maximum(np.maximum(room, there), decoded) + decoding
        due = begins[number - 1] + feed.step if number else 0.0
        begins[number] = max(due, decoded.max())
        waited += begins[number] - due if number else 0.0
    return float(waited / (begins[-1] - begins[0]))


def needed(feed: Feed, store: Store, steps: int, most: float = 0.001) -> int | None:
    """Return the smallest number of requested images with which devices wait at most that share of the time.

    The numbers tried are the batch times powers of two, with enough requesting threads. None: 128 batches are not
    enough.
    """
    for batches in (2**power for power in range(8)):
        deep = replace(feed, on_the_way=batches * feed.batch, asking=max(feed.asking, batches))
        if waiting(deep, store, steps) <= most:
            return batches * feed.batch
    return None


def shares(images: int, batch: int, processes: int, together: int, per_shard: int, batches: int) -> dict[str, Any]:
    """Return how evenly an epoch's order divides images, requests and shards among processes, over some batches."""
    orders = [
        EpochOrder(
            images, batch // processes, shuffle=True, drop_last=True, rank=rank, world=processes, together=together
        )
        for rank in range(processes)
    ]
    permutation = orders[0].permutation(0, 0)
    shown, requests, at_once = [], [], []
    for number in range(batches):
        places = [np.array([o.image(permutation, p)[0] for p in o.positions(number).tolist()]) for o in orders]
        shown += places
        pieces = [_pieces(np.sort(place), per_shard) for place in places]
        requests += [len(piece) for piece in pieces]
        at_once.append(int(np.unique(np.concatenate(pieces), return_counts=True)[1].max()))
    everything = np.concatenate(shown)
    return {
        "batches": batches,
        "images_of_a_process": sorted({len(place) for place in shown}),
        "twice": int(len(everything) - len(np.unique(everything))),
        "requests_of_a_process": [min(requests), max(requests)],
        "requests_to_one_shard_at_once": max(at_once),
        "batches_of_a_process": sorted({len(order) for order in orders}),
    }


def _pieces(images: np.ndarray, per_shard: int) -> np.ndarray:
    """Return the shard of each request. Neighbours in a shard are one request."""
    begins = np.concatenate([[True], (np.diff(images) != 1) | (np.diff(images // per_shard) != 0)])
    return np.asarray(images[begins] // per_shard)
