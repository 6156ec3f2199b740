from __future__ import annotations

import re

from vitrail.server.metrics import Counter, Histogram, Metrics

LINE = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\[\\"n])*",?)+\})? [-+0-9.e]+(inf)?')  # Prometheus's text format


def test_every_line_is_one_that_prometheus_reads() -> None:
    metrics = Metrics(lambda: 3, lambda: True)
    metrics.requests.add("/v1/predict", "200")
    metrics.images.add('a"b\\c\nd', by=2)
    metrics.seconds.observe(0.02)
    lines = metrics.text().splitlines()
    assert all(line.startswith(("# HELP ", "# TYPE ")) or LINE.fullmatch(line) for line in lines)
    assert 'vitrail_requests_total{path="/v1/predict",status="200"} 1' in lines
    assert 'vitrail_images_total{model="a\\"b\\\\c\\nd"} 2' in lines
    assert "vitrail_images_inside 3" in lines and "vitrail_ready 1" in lines


def test_a_histogram_counts_what_is_at_most_a_bound() -> None:
    histogram = Histogram("h", "About.", (1, 2))
    for value in (0.5, 1, 1.5, 2, 9):
        histogram.observe(value)
    assert list(histogram.lines())[2:] == [
        'h_bucket{le="1"} 2', 'h_bucket{le="2"} 4', 'h_bucket{le="+Inf"} 5', "h_sum 14", "h_count 5",
    ]  # fmt: skip


def test_a_counter_without_labels_begins_at_0() -> None:
    assert list(Counter("c", "About.").lines())[-1] == "c 0"
