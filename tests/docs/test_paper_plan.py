"""docs/paper-plan.md says what was computed, and the computing and the simulation are right where that can be told."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import paper_plan, paper_text, record
from benchmarks.paper_input import Feed, Store, needed, shares, waiting

PLAN = json.loads((record.RESULTS / "paper_plan.json").read_text())
FEED = Feed(step=1.0, processes=2, batch=64, together=64, image_bytes=0.0, decode=1e9)
EVEN = Store(median=0.5, p99=0.5)
"""Every request takes half a second."""


def test_the_document_is_what_the_results_say() -> None:
    assert paper_text.DOCUMENT.read_text() == paper_text.document(PLAN), "run python -m benchmarks.paper_plan"


@pytest.mark.full_size
def test_what_is_computed_is_still_so() -> None:
    for name, value in json.loads(json.dumps(paper_plan.computed())).items():
        assert PLAN[name] == value, f"{name}: run python -m benchmarks.paper_plan"


def test_the_compute_is_table_6s_and_the_published_days_are_possible() -> None:
    found = paper_plan.computed()
    assert found["exaflops"] == pytest.approx(4262, rel=0.01)  # Table 6, without our classifier
    assert 0.3 < found["table2"]["utilisation"] < 0.45  # Table 2's days on a TPU v3 of 61.5 TFLOP/s a core
    run = found["times"]["0.4"]["run"]
    assert run["steps"] == 303_000_000 // 4096 * 14
    assert run["days"] == pytest.approx(found["exaflops"] * 1e18 / (32 * 989e12 * 0.4) / 86_400, rel=1e-4)
    assert run["usd"] == pytest.approx(run["days"] * 24 * 32 * 2.7)


def test_memory_and_communication_in_closed_form() -> None:
    found = paper_plan.computed()
    width, depth, mlp, patches = 1280, 32, 5120, 256
    block = 4 * width**2 + 4 * width + 2 * width * mlp + mlp + width + 4 * width
    stem = 14 * 14 * 3 * width + width + width + (patches + 1) * width
    head = 2 * width + width * width + width + width * 18_291 + 18_291
    count = stem + depth * block + head
    held = found["memory"]
    assert held["parameters"] == count
    assert held["weights"] + held["gradients"] + held["moments"] == 16 * count
    rows = held["rows"]
    assert rows["whole, kept"]["state"] == (16 + 2 + 4) * count
    assert rows["sharded, kept"]["state"] == (16 / 32 + 2) * count + 12 * block
    for row in rows.values():
        local = held["local_batch"] // row["pieces"]
        assert local * row["activations"] / held["local_batch"] + row["state"] <= 0.9 * held["device"]
    sent = [row["bytes"] for row in found["communication"].values()]
    assert sent == pytest.approx([31 / 32 * size * count for size in (8, 12, 4)])


def test_blocks_recomputed_keep_their_inputs_and_one_block() -> None:
    config = replace(paper_plan.config_of("S/16"), depth=1)
    one = paper_plan.memory(config, 32, paper_plan.Cluster())
    two = paper_plan.memory(replace(config, depth=2), 32, paper_plan.Cluster())
    stream = 4 * 197 * 384  # float32: what the residual stream holds between two blocks
    assert one["image_recomputed"] == one["image"] + stream
    assert two["image_recomputed"] - one["image_recomputed"] == stream


def test_devices_that_are_given_enough_do_not_wait() -> None:
    assert waiting(FEED, Store(median=1e-9, p99=1e-9), 200) == 0
    assert waiting(FEED, EVEN, 200) == 0  # 4 batches in half a second, where one a second is shown
    assert needed(FEED, EVEN, 200) == FEED.batch


@pytest.mark.parametrize(
    ("feed", "store", "period"),
    [
        (replace(FEED, decode=32.0), EVEN, 2.0),  # 64 images at 32 a second
        (replace(FEED, step=0.01, on_the_way=6400, asking=4), EVEN, 0.5 / 4),  # four batches asked for at once
        (replace(FEED, step=0.01, on_the_way=64, asking=99), EVEN, 0.5 / (1 + FEED.ready)),  # asked for so far ahead
        (replace(FEED, step=0.01, asking=1, image_bytes=1e6), replace(EVEN, bandwidth=64e6), 0.5 + 1.0),
    ],
)
def test_what_is_slowest_sets_the_pace(feed: Feed, store: Store, period: float) -> None:
    assert waiting(feed, store, 4000) == pytest.approx(1 - feed.step / period, abs=0.01)


def test_the_slowest_of_many_requests_is_drawn_as_many_are() -> None:
    random = np.random.default_rng(1)
    store, count = Store(median=0.1, p99=0.5), 32
    spread = np.log(5) / 2.3263478740408408  # the normal distribution's 99 %
    many = (0.1 * np.exp(spread * random.standard_normal((20_000, count)))).max(1)
    at_once = store.slowest(random.random(20_000), np.ones(20_000), count, 0.0)
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(at_once, share) == pytest.approx(np.quantile(many, share), rel=0.05)
    stalling = replace(store, stalls=0.01).slowest(np.full(20_000, 0.5), random.random(20_000), count, 0.0)
    assert np.mean(stalling >= 5.0) == pytest.approx(1 - 0.99**count, abs=0.01)


def test_a_simulation_is_a_function_of_its_seed() -> None:
    feed, store = replace(FEED, step=0.2), Store(stalls=0.01)
    assert waiting(feed, store, 300) == waiting(feed, store, 300) != waiting(feed, store, 300, seed=1)
    assert waiting(replace(feed, processes=16), store, 300) > waiting(feed, store, 300)  # all wait for the slowest


def test_an_order_divides_images_and_requests_evenly() -> None:
    found = shares(100_000, batch=256, processes=4, together=16, per_shard=1000, batches=8)
    assert found["images_of_a_process"] == [64] and found["batches_of_a_process"] == [100_000 // 256]
    assert found["twice"] == 0
    low, high = found["requests_of_a_process"]
    assert 4 <= low <= high <= 8  # four runs each, of which one in sixty crosses into the next shard
    assert 1 <= found["requests_to_one_shard_at_once"] <= 16
    single = shares(100_000, batch=256, processes=4, together=1, per_shard=1000, batches=2)
    assert single["requests_of_a_process"][1] <= 64 and single["requests_of_a_process"][0] > 56
