"""Counts and times of a server, in the text format that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable

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

disable_created_metrics()  # nobody asks when each count began, and it doubles the number of time series


class Metrics:
    """Everything that one server counts. Servers in one process count apart."""

    def __init__(self, inside: Callable[[], float], ready: Callable[[], bool]) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("vitrail_requests_total", "Requests answered.", ("path", "status"), registry=registry)
        self.images = Counter("vitrail_images_total", "Images answered.", ("model",), registry=registry)
        self.refused = Counter("vitrail_refused_total", "Requests and images refused.", ("reason",), registry=registry)
        self.seconds = Histogram(
            "vitrail_request_seconds", "Time of a POST request in seconds.", buckets=SECONDS, registry=registry
        )
        self.batches = Histogram("vitrail_batch_images", "Images computed together.", buckets=SIZES, registry=registry)
        Gauge(
            "vitrail_images_inside", "Images and unread bodies in the queue or computed.", registry=registry
        ).set_function(inside)
        Gauge("vitrail_ready", "1 while the server accepts requests.", registry=registry).set_function(ready)

    @property
    def images_answered(self) -> int:
        """Number of images answered by all models."""
        return int(sum(sample.value for family in self.images.collect() for sample in family.samples))

    def text(self) -> str:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry).decode()
