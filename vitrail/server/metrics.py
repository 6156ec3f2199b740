"""Counts and times in the text format that Prometheus reads. Torch-free; no client library.

Everything is touched from the event loop alone, so nothing is locked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Counter:
    """A number that only grows, one for each combination of labels."""

    def __init__(self, name: str, about: str, labels: Sequence[str] = ()) -> None:
        self.name, self.about, self.labels = name, about, tuple(labels)
        self.values: dict[tuple[str, ...], float] = defaultdict(float)
        if not labels:
            self.values[()] = 0.0

    def add(self, *labels: str, by: float = 1) -> None:
        """Add `by` to the number of these labels."""
        self.values[labels] += by

    def lines(self) -> Iterator[str]:
        """Yield what Prometheus reads."""
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} counter"
        for values, number in sorted(self.values.items()):
            yield f"{self.name}{_braces(self.labels, values)} {number:g}"


class Gauge:
    """A number that is looked up when it is asked for."""

    def __init__(self, name: str, about: str, read: Callable[[], float]) -> None:
        self.name, self.about, self.read = name, about, read

    def lines(self) -> Iterator[str]:
        """Yield what Prometheus reads."""
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} gauge"
        yield f"{self.name} {self.read():g}"


class Histogram:
    """How often a value was at most each of some bounds."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self.bounds = name, about, tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self) -> Iterator[str]:
        """Yield what Prometheus reads: counts of values up to each bound."""
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} histogram"
        below = 0
        for bound, count in zip([f"{bound:g}" for bound in self.bounds] + ["+Inf"], self.counts, strict=True):
            below += count
            yield f'{self.name}_bucket{{le="{bound}"}} {below}'
        yield f"{self.name}_sum {self.total:g}"
        yield f"{self.name}_count {below}"


class Metrics:
    """All that is counted in one server."""

    def __init__(self, inside: Callable[[], float], ready: Callable[[], bool]) -> None:
        self.requests = Counter("vitrail_requests_total", "Requests answered.", ("path", "status"))
        self.images = Counter("vitrail_images_total", "Images answered.", ("model",))
        self.refused = Counter("vitrail_refused_total", "Requests and images refused.", ("reason",))
        self.seconds = Histogram("vitrail_request_seconds", "Time of a POST, in seconds.", SECONDS)
        self.batches = Histogram("vitrail_batch_images", "Images computed together.", SIZES)
        self.gauges = (
            Gauge("vitrail_images_inside", "Images and unread bodies inside.", inside),
            Gauge("vitrail_ready", "1 where requests are taken.", lambda: float(ready())),
        )

    def text(self) -> str:
        """Return everything in Prometheus's text format."""
        parts = (self.requests, self.images, self.refused, self.seconds, self.batches, *self.gauges)
        return "".join(f"{line}\n" for part in parts for line in part.lines())


def _braces(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
