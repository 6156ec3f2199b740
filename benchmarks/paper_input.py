"""The input side of a large run, simulated: an object store that is slow at times, requests, decoding, devices.

Times are simulated, order and sharing are the real code's: `order.Runs` says which images a process shows, the
loader's own constants how far ahead it asks. All processes step together, so each step waits for the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtri

from vitrail.data.loading import loader
from vitrail.data.loading.order import Order

TOGETHER = 64
"""Neighbours shown together."""


@dataclass(frozen=True)
class Store:
    """How long a request takes: a log-normal latency, a transfer, and now and then a stall."""

    median: float = 0.1
    """Seconds to the first byte."""
    p99: float = 0.5
    stalls: float = 0.0
    """Share of the requests that take `stall` seconds in place of their latency."""
    stall: float = 5.0
    bandwidth: float = 85e6
    """Bytes/s of one request."""

    def slowest(self, uniform: np.ndarray, stalled: np.ndarray, requests: int, size: float) -> np.ndarray:
        """Seconds that the slowest of so many simultaneous requests takes, as a function of two uniform numbers.

        The maximum of n draws has the distribution function to the power of n.
        """
        spread = np.log(self.p99 / self.median) / ndtri(0.99)
        latency = self.median * np.exp(spread * ndtri(uniform ** (1 / requests)))
        hit = stalled < -np.expm1(requests * np.log1p(-self.stalls))
        return np.where(hit, np.maximum(latency, self.stall), latency) + size / self.bandwidth


@dataclass(frozen=True)
class Feed:
    """One process's loader, and the step it feeds."""

    step: float
    """Seconds of a step when it does not wait."""
    processes: int
    batch: int
    """Images of a process per step."""
    together: int
    image_bytes: float
    decode: float
    """Images/s of a process: of all its threads."""
    on_the_way: int = loader._ON_THE_WAY
    """Images asked for ahead of decoding."""
    asking: int = loader._ASKING
    """Batches asked for at once."""
    ready: int = loader._BATCHES_AHEAD
    """Batches being decoded or ready."""

    @property
    def depth(self) -> int:
        """Batches asked for ahead of decoding, as the loader counts them."""
        return -(-self.on_the_way // self.batch)


def waiting(feed: Feed, store: Store, steps: int, seed: int = 0) -> float:
    """Return the share of the time that devices wait for images, over so many steps after the first."""
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
    """Return the fewest images on the way, a power of two times the batch, with which devices wait at most that share
    of the time; None where no number up to 128 batches is enough. Enough threads ask."""
    for batches in (2**power for power in range(8)):
        deep = replace(feed, on_the_way=batches * feed.batch, asking=max(feed.asking, batches))
        if waiting(deep, store, steps) <= most:
            return batches * feed.batch
    return None


def shares(images: int, batch: int, processes: int, together: int, per_shard: int, batches: int) -> dict[str, Any]:
    """Say how evenly the order of an epoch divides images, requests and shards among processes, over some batches."""
    orders = [
        Order(images, batch // processes, shuffle=True, drop_last=True, rank=rank, world=processes, together=together)
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
    """The shard of each request: neighbours in a shard are one."""
    begins = np.concatenate([[True], (np.diff(images) != 1) | (np.diff(images // per_shard) != 0)])
    return np.asarray(images[begins] // per_shard)
