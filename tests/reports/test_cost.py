"""What a run cost: FLOPs by hand, with images that grow; energy as logged; unknown where it is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import Page, answers, run_folder

from vitrail.data.settings import Data
from vitrail.durations import Epochs, Percent
from vitrail.model.variants import ViTConfig
from vitrail.objective.settings import MAE, BEiT, Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer
from vitrail.reports.cost import cost_of
from vitrail.reports.page import render
from vitrail.reports.run_record import RunRecord, read_run
from vitrail.training.run import Progressive, Run

CONFIG = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=2, image_size=(8, 8), classes=10)
CLASSES = [str(i) for i in range(10)]
RUN = Run(data=Data("digits"), model="Ti/2", batch_size=16, duration=Epochs(3))


def by_hand(tokens: int) -> int:
    """MACs of CONFIG for so many patches: the stem, two layers with the class token, the head."""
    n, d, m = tokens + 1, 16, 32
    layer = n * d * 3 * d + 2 * n * n * d + n * d * d + 2 * n * d * m
    return tokens * 12 * d + 2 * layer + d * 10


def section(record: RunRecord, config: ViTConfig) -> str:
    return render("report/cost.html", cost=cost_of(record, config))


def contents(folder: Path, run: Run = RUN) -> RunRecord:
    return read_run(run_folder(folder, Data("digits"), answers(CLASSES, 20), run=run))


def test_flops_are_those_of_the_images_seen(tmp_path: Path) -> None:
    found = cost_of(contents(tmp_path / "a"), CONFIG)
    assert (found.steps, found.images, found.seconds, found.joules) == (60, 960, 75.2, None)
    assert found.flops == 960 * 3 * 2 * by_hand(16)
    assert found.rate == pytest.approx(found.flops / 75.2)


def test_small_images_cost_less(tmp_path: Path) -> None:
    """From half the side to the whole at half of the run: 2, then 3, then 4 patches a side, and 30 steps of 4."""
    run = replace(RUN, progressive=Progressive(start=0.5, until=Percent(50)))
    found = cost_of(contents(tmp_path / "a", run), CONFIG)
    # 8 px x (0.5 + 0.5 step / 30), rounded down to even: 4 px in steps 0-14, 6 px in 15-29
    assert found.flops == 16 * 6 * (15 * by_hand(4) + 15 * by_hand(9) + 30 * by_hand(16))


def test_with_a_time_limit_images_grow_by_the_clock(tmp_path: Path) -> None:
    """A minute for 60 steps of 2 s: as above, twice as fast. Killed after step 10, it went on 1,000 s later."""
    run = replace(RUN, progressive=Progressive(start=0.5, until=Percent(50)), time_limit=1.0)
    have = contents(tmp_path / "a", run)
    have.metrics[:] = [line for line in have.metrics if line["step"] <= 30]
    for line in have.metrics:
        line["time"] = 5_000 + 2 * line["step"] + 1_000 * (line["step"] > 10)
    have.facts.update(resumed=[{"step": 10}], result={"steps": 30, "seconds": 60.0})
    assert cost_of(have, CONFIG).flops == 16 * 6 * (8 * by_hand(4) + 7 * by_hand(9) + 15 * by_hand(16))


def test_an_objective_costs_what_it_asks_for(tmp_path: Path) -> None:
    """A masked autoencoder's layers see 4 of 16 patches; nobody knows what a lost tokenizer took."""
    light = MAE(decoder_width=8, decoder_depth=1, decoder_heads=2)
    found = cost_of(contents(tmp_path / "a", replace(RUN, objective=light)), CONFIG)
    n, d, m, e, every = 5, 16, 32, 8, 17
    encoder = 16 * 12 * d + 2 * (n * d * 3 * d + 2 * n * n * d + n * d * d + 2 * n * d * m)
    decoder = n * d * e + every * e * 4 * e + 2 * every**2 * e + 2 * every * e * 4 * e + 16 * e * 12
    assert found.flops == 960 * 3 * 2 * (encoder + decoder)
    ImageTokenizer(Tokenizer(codes=4, width=2, depth=0, features=3), 2).save(tmp_path / "tokens")
    kept = contents(tmp_path / "b", replace(RUN, objective=BEiT(tokenizer=str(tmp_path / "tokens"), ratio=0.25)))
    whole = by_hand(16) - d * 10 + 4 * d * 4
    codes = 16 * (12 * 2 + 2 * 3 + 3 * 4)
    assert cost_of(kept, CONFIG).flops == 960 * 2 * (3 * whole + codes)
    (tmp_path / "tokens" / "tokenizer.safetensors").unlink()
    assert cost_of(kept, CONFIG).flops is None


def test_energy_is_summed_where_every_line_knows_it(tmp_path: Path) -> None:
    have = contents(tmp_path / "a")
    lines = [line for line in have.metrics if line["kind"] == "train"]
    for line in lines:
        line["joules"] = 120.0
    found = cost_of(have, CONFIG)
    assert found.joules == 60 * 120
    text = Page(section(have, CONFIG)).text
    assert "2 Wh" in text and "RAPL" in text and "unknown" not in text
    lines[7]["joules"] = None  # not finite, or of a sitting on another machine
    assert cost_of(have, CONFIG).joules is None
    assert "unknown" in Page(section(have, CONFIG)).text


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    have = contents(tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text(json.dumps({}), encoding="utf-8")
    killed = read_run(tmp_path / "a")
    found = cost_of(killed, CONFIG)
    assert (found.steps, found.seconds, found.rate) == (60, None, None) and found.flops
    assert cost_of(have, None).flops is None
    assert cost_of(replace(have, run=None), CONFIG).images is None
    (tmp_path / "a" / "metrics.jsonl").write_text("", encoding="utf-8")
    assert section(read_run(tmp_path / "a"), CONFIG).strip() == ""


def test_a_part_that_learned_has_an_upper_bound(tmp_path: Path) -> None:
    have = contents(tmp_path / "a", replace(RUN, weights="x", tune="head"))
    text = re.sub(r"\s+", " ", Page(section(have, CONFIG)).text)
    assert text.count("at most") == 2 and "cost less than that" in text


def test_costs_beside_each_other(tmp_path: Path) -> None:
    found = [cost_of(contents(tmp_path / name), config) for name, config in (("a", CONFIG), ("b", None))]
    page = Page(render("comparison/costs.html", labels=["a", "b"], costs=found))
    assert page.tags["tr"] == 3 and "960" in page.text and page.text.count("unknown") == 4  # 2 energies, FLOPs, rate
