from __future__ import annotations

import re

from vitrail.server.metrics import Metrics

LINE = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\[\\"n])*",?)+\})? [-+0-9.e]+(inf)?')  # Prometheus's text format


def test_every_line_is_one_that_prometheus_reads() -> None:
    metrics = Metrics(lambda: 3, lambda: 1, lambda: True)
    metrics.requests.labels("/v1/predict", "200").inc()
    metrics.images.labels('a"b\\c\nd').inc(2)
    metrics.seconds.observe(0.02)
    lines = metrics.text().splitlines()
    assert all(line.startswith(("# HELP ", "# TYPE ")) or LINE.fullmatch(line) for line in lines)
    assert 'vitrail_requests_total{path="/v1/predict",status="200"} 1.0' in lines
    assert 'vitrail_images_total{model="a\\"b\\\\c\\nd"} 2.0' in lines
    assert "vitrail_images_inside 3.0" in lines and "vitrail_ready 1.0" in lines


def test_a_histogram_counts_what_is_at_most_a_bound() -> None:
    metrics = Metrics(lambda: 0, lambda: 0, lambda: False)
    for value in (1, 2, 3, 4, 100):
        metrics.batches.observe(value)
    lines = [line for line in metrics.text().splitlines() if line.startswith("vitrail_batch_images")]
    counts = dict(line.rsplit(" ", 1) for line in lines)
    assert counts['vitrail_batch_images_bucket{le="1.0"}'] == "1.0"
    assert counts['vitrail_batch_images_bucket{le="2.0"}'] == "2.0"
    assert counts['vitrail_batch_images_bucket{le="4.0"}'] == counts['vitrail_batch_images_bucket{le="64.0"}'] == "4.0"
    assert counts['vitrail_batch_images_bucket{le="+Inf"}'] == counts["vitrail_batch_images_count"] == "5.0"
    assert counts["vitrail_batch_images_sum"] == "110.0"


def test_servers_count_apart_and_only_what_they_declare() -> None:
    first, second = (Metrics(lambda: 0, lambda: 0, lambda: True) for _ in range(2))
    first.images.labels("a").inc(3)
    first.images.labels("b").inc()
    assert (first.images_answered, second.images_answered) == (4, 0)
    assert "_created" not in first.text()
