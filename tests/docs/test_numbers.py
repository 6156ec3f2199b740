"""Numbers that must not drift: sizes the papers print, bits that a seed fixes, figures the documents quote."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from gathered import failures

from benchmarks import readme, record
from vitrail.model.build import build, create
from vitrail.model.variants import ViTConfig

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted([*record.RESULTS.glob("*.json"), *record.RESULTS.glob("amx/*.json")])


@pytest.mark.parametrize(
    ("name", "millions", "exact"),
    # millions: the paper's Table 1, whose heads have other sizes; exact: the published checkpoints for 1,000 classes
    [("B/16", 86, 86_567_656), ("L/16", 307, 304_326_632), ("H/14", 632, 632_045_800)],
)
def test_parameters_of_table_1(name: str, millions: int, exact: int) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in create(name, classes=1000).parameters())
    assert count == exact
    assert count / 1e6 == pytest.approx(millions, rel=0.01)


def _parameters(c: ViTConfig) -> int:
    """Section 3.1 counted by hand: patches, class token, positions, 12 D^2 + 13 D per block, norm, head."""
    d = c.width
    stem = c.patch**2 * c.channels * d + d
    tokens = d + (c.grid[0] * c.grid[1] + 1) * d
    block = (3 * d * d + 3 * d) + (d * d + d) + 2 * d * c.mlp_dim + c.mlp_dim + d + 4 * d
    return stem + tokens + c.depth * block + 2 * d + d * c.classes + c.classes


@pytest.mark.parametrize("width", [64, 192])
@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("patch", [2, 8])
def test_parameters_in_closed_form(width: int, depth: int, patch: int) -> None:
    config = ViTConfig(
        width=width, depth=depth, heads=2, mlp_dim=3 * width, patch=patch, image_size=(32, 48), classes=7
    )
    assert sum(p.numel() for p in build(config).parameters()) == _parameters(config)


def _trained(seed: int) -> torch.Tensor:
    """Weights after three optimiser steps of a tiny network, as one vector."""
    from vitrail.training.optim.optimizer import build_optimizer
    from vitrail.training.run import Optim

    torch.manual_seed(seed)
    model = create("Ti/4", width=32, depth=2, heads=2, mlp_dim=64, image_size=(16, 16), classes=5, dropout=0.1)
    optimizer = build_optimizer(model, Optim(lr=1e-2))
    for _ in range(3):
        images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)
        torch.nn.functional.cross_entropy(model(images), torch.randint(0, 5, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    first = _trained(0)
    assert torch.equal(first, _trained(0))
    assert not torch.equal(first, _trained(1))


@pytest.mark.parametrize("document", readme.SECTIONS)
def test_a_document_quotes_the_results(document: str) -> None:
    name, made = readme.SECTIONS[document]
    text = (ROOT / document).read_text()
    assert readme.replaced(text, name, made()) == text, "run python -m benchmarks.readme"


def test_what_is_said_of_learning_without_labels_was_measured() -> None:
    document = json.loads((record.RESULTS / "studies" / "self-supervision.json").read_text())
    means = {f"{row['mean']:.1f}" for rows in document["tables"].values() for row in rows}
    text = (ROOT / "docs" / "without-labels.md").read_text()
    quoted = re.findall(r"\d+\.\d(?= %|,| and)", text)
    assert len(quoted) > 10 and set(quoted) <= means


def test_what_is_said_of_the_three_things_was_measured() -> None:
    tops, ratios = set(), set()
    for path in (record.RESULTS / "studies").glob("*.json"):
        for table, rows in json.loads(path.read_text())["tables"].items():
            tops |= {f"{row['mean']:.1f}" for row in rows if table.startswith("top-1")}
            pairs = [(a, b) for a in rows for b in rows if a["at"] == b["at"] and b["mean"]]
            ratios |= {f"{a['mean'] / b['mean']:.2f}" for a, b in pairs}
    text = (ROOT / "docs" / "three-things.md").read_text()
    said, faster = re.findall(r"\d+\.\d(?= %)", text), re.findall(r"\d\.\d\d(?=x| of )", text)
    assert len(said) > 10 and set(said) <= tops
    assert len(faster) > 4 and set(faster) <= ratios


def test_no_figure_of_speed_stands_outside_the_generated_sections() -> None:
    for document, (name, _) in readme.SECTIONS.items():
        outside = readme.replaced((ROOT / document).read_text(), name, "")
        assert re.findall(r"\d[\d.,]*\s*(?:x faster|times (?:as|faster)|images/s|img/s)", outside) == []


def test_results_say_where_they_come_from() -> None:
    assert failures(RESULTS, says_where_it_comes_from) == []


def says_where_it_comes_from(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["command"].startswith(f"python -m benchmarks.{path.stem}")
    assert "--quick" not in document["command"]
    assert document["machine"]["cpu"] and document["machine"]["versions"]["torch"]


def test_medians_are_those_of_the_rounds() -> None:
    assert failures(RESULTS, has_medians_of_its_rounds) == []


def has_medians_of_its_rounds(path: Path) -> None:
    def rows(value: object) -> list[dict]:
        if isinstance(value, dict):
            return [value] if "rounds" in value else [r for v in value.values() for r in rows(v)]
        return [r for v in value for r in rows(v)] if isinstance(value, list) else []

    for row in rows(json.loads(path.read_text())):
        rates = row["rounds"]
        assert len(rates) >= 5, "a figure that is kept is the median of at least five rounds"
        assert min(rates) - 0.01 <= row["images_per_second"] <= max(rates) + 0.01
        assert row["images_per_second"] == pytest.approx(statistics.median(rates), abs=0.01)


def test_a_readme_table_is_what_the_documents_say(tmp_path: Path) -> None:
    machine = {"cpu": "a cpu", "threads": 2, "versions": {"torch": "9"}}
    summary = {"timm-light": {"mean": 41.5, "deviation": 0.25, "seeds": 3, "parameters": 2_700_000}}
    document = {"machine": machine, "date": "2026-01-01", "minutes": 10, "summary": summary}
    (tmp_path / "learn.json").write_text(json.dumps(document))
    section = readme.section(tmp_path)
    assert "| timm-light | 41.50 % ± 0.25 (3 seeds) | 2.7 M |" in section
    assert "(a cpu, 2 threads, torch 9, 2026-01-01)" in section
    begin, end = readme.BEGIN.format("x"), readme.END.format("x")
    assert readme.replaced(f"a {begin} old {end} b", "x", "new") == f"a {begin}\n\nnew\n\n{end} b"


def test_the_table_of_tuning_is_in_shares_of_tuning_everything() -> None:
    whole = {"name": "all", "kept_bytes_per_image": 100, "peak_bytes": 10, "optimizer_bytes": 8, "stored_bytes": 4}
    part = {name: value / 4 for name, value in whole.items() if name != "name"}
    part |= {"name": "attention", "over_all": {"median": 1.25, "low": 1.0, "high": 1.5}}
    result = {"case": "S/16", "batch": 2, "precision": "bf16", "rows": [whole, part]}
    header, row = readme.tune({"results": [result]})
    assert len(header) == len(row)
    assert row == ("S/16, batch 2, bf16: attention", "1.25x (1.00 to 1.50)", "0.25", "0.25", "0.25", "0.25")


def test_batches_that_fit_in_closed_form() -> None:
    """B/16 at 224 px: nine tenths of a memory hold, beside the images, for each of 86,567,656 parameters 4 bytes, two
    moments of 4, a copy of 2, and for those of one of 12 blocks a gradient of 4."""
    document = json.loads((record.RESULTS / "memory.json").read_text())
    row = next(row for row in document["rows"] if (row["network"], row["side"]) == ("B/16", 224))
    assert row["parameters"] == 86_567_656
    for size, batch in zip(document["sizes"], row["batches"], strict=True):
        room = 0.9 * size * 2**30 - (12 + 2 + 4 / 12) * row["parameters"]
        assert batch * row["activations"] <= room < (batch + 1) * row["activations"]
    for row in document["measured"]:
        assert row["peak"] == pytest.approx(row["computed"], rel=0.03)


def test_the_table_of_serving_has_both_servers_and_their_ratio() -> None:
    columns = ("images_per_second", "p50", "p95", "p99")
    rows = [{"name": name, **dict.fromkeys(columns, value)} for name, value in (("vitrail", 20.0), ("LitServe", 10.0))]
    over = {column: {"median": 2.0, "low": 1.5, "high": 2.5} for column in columns}
    header, *found = readme.serve({"clients": 64, "rows": rows, "ours_over_peer": over})
    assert "64 clients" in header[0] and {len(row) for row in found} == {len(header)}
    assert found[0] == ("vitrail", "20.0", "20.00", "20.00", "20.00")
    assert found[-1][1:] == ("2.00x (1.50 to 2.50)",) * 4
