"""Counts and times of a server, in the text format that Prometheus reads.

Predicted classes are counted by name, so that a drift of the images can be seen. A network may have 21,000 classes, and
each value of a label is a time series of its own: the classes that are predicted first get one, the others share one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

MEDIA_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
COUNTED, SORTED = 1_000, 100
"""Classes of one model that have a count of their own, and a histogram of their own (13 time series each)."""
OTHERS, NONE = "(others)", "(none)"
"""Names of all further classes, and of no class: below --reject, or no label."""

disable_created_metrics()  # nobody asks when each count began, and it doubles the number of time series


class Metrics:
    """Everything that one server counts. Servers in one process count apart."""

    def __init__(self, inside: Callable[[], float], arriving: Callable[[], float], ready: Callable[[], bool]) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("vitrail_requests_total", "Requests answered.", ("path", "status"), registry=registry)
        self.images = Counter("vitrail_images_total", "Images answered.", ("model",), registry=registry)
        self.refused = Counter("vitrail_refused_total", "Requests and images refused.", ("reason",), registry=registry)
        self.seconds = Histogram(
            "vitrail_request_seconds", "Time of a POST request in seconds.", buckets=SECONDS, registry=registry
        )
        self.batches = Histogram("vitrail_batch_images", "Images computed together.", buckets=SIZES, registry=registry)
        self.classes = Counter(
            "vitrail_predicted_total", "Images by predicted class.", ("model", "class"), registry=registry
        )
        best = "Probability of the best class."
        self.confidence = Histogram("vitrail_confidence", best, ("model", "class"), buckets=SHARES, registry=registry)
        self.reloads = Counter("vitrail_reloads_total", "Reloads of the models.", ("result",), registry=registry)
        self._named: dict[tuple[str, int], set[str]] = {}
        Gauge("vitrail_images_inside", "Images in the queue or computed.", registry=registry).set_function(inside)
        Gauge("vitrail_bodies_arriving", "Requests whose body is arriving.", registry=registry).set_function(arriving)
        Gauge("vitrail_ready", "1 while the server accepts requests.", registry=registry).set_function(ready)

    def predicted(self, model: str, best: str, share: float, classes: Sequence[str]) -> None:
        """Count an image: its predicted classes (one, several labels, or none), and its best class with its share."""
        for name in classes or (NONE,):
            self.classes.labels(model, self._label(model, name, COUNTED)).inc()
        self.confidence.labels(model, self._label(model, best, SORTED)).observe(share)

    def _label(self, model: str, name: str, most: int) -> str:
        """Return the name of a class if it is among the first `most` of a model, else OTHERS."""
        named = self._named.setdefault((model, most), set())
        if name not in named:
            if len(named) >= most:
                return OTHERS
            named.add(name)
        return name

    @property
    def images_answered(self) -> int:
        """Number of images answered by all models."""
        return int(sum(sample.value for family in self.images.collect() for sample in family.samples))

    def text(self) -> str:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry).decode()
