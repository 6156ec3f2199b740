"""The measurements of the follow-up's lessons: what stems cost is the paper's, and a stopped measurement goes on."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lesson_stems, lesson_tuning
from benchmarks.cells import Cells


def options(**changes: Any) -> Namespace:
    values = dict(
        seeds=[0, 1], arms=["supervised", "masked"], stem_epochs=3, masked_epochs=4, fewer=[], lrs=[1e-3, 4e-3]
    )
    values |= dict(sizes=[32], data=["digits"], epochs=5, weights=Path("runs/x"), rounds=2)
    return Namespace(**(values | changes))


@pytest.mark.slow
def test_stems_cost_what_the_paper_says() -> None:
    """Section 5: 17.73 GFLOPs for B/16 with hMLP, under 1 % more than with the linear stem."""
    costs = {stem.name: lesson_stems.gflops(lesson_stems.paper_network(stem)) for stem in lesson_stems.STEMS}
    assert round(costs["hMLP, BN"], 2) == 17.73
    assert round(costs["linear"], 2) == 17.58  # of which it is less than 1 % more
    assert all(0 < costs[name] / costs["linear"] - 1 < 0.01 for name in ("hMLP, BN", "hMLP, LN"))
    block = (197 * 12 * 768**2 + 2 * 197**2 * 768 + 2 * 5 * 197 * 768) / 1e9
    assert costs["linear, a block more"] - costs["linear"] == pytest.approx(block, rel=1e-9)
    assert lesson_stems.PAPER_GFLOPS == 17.73


def test_a_stopped_measurement_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    log, asked = tmp_path / "log.jsonl", []

    def cell(name: str, cells: Cells) -> Any:
        return cells.get(lambda: asked.append(name) or {"value": name}, name=name, epochs=1)

    first = Cells(log)
    assert [cell("a", first), cell("b", first), cell("a", first)] == [{"value": "a"}, {"value": "b"}, {"value": "a"}]
    spent = Cells(log, minutes=0)
    assert cell("a", spent) == {"value": "a"} and cell("c", spent) is None and spent.missing == 1
    again = Cells(log)
    assert cell("c", again) == {"value": "c"} and again.missing == 0
    assert asked == ["a", "b", "c"]
    assert again.get(lambda: {"value": "new"}, name="a", epochs=1.0) == {"value": "a"}  # a default, and the same typed
    assert again.get(lambda: {"value": "other"}, name="a", epochs=2) == {"value": "other"}  # other settings


def test_a_cell_of_runs_that_is_stopped_gets_its_folder_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places: list[Path] = []

    def stopped(place: Path) -> dict[str, Any]:
        places.append(place)
        (place / "checkpoint").touch()
        raise KeyboardInterrupt

    def finished(place: Path) -> dict[str, Any]:
        places.append(place)
        return {"found": (place / "checkpoint").exists()}

    log = tmp_path / "log.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Cells(log).train(stopped, seed=0)
    assert Cells(log).train(finished, seed=1) == {"found": False}
    assert Cells(tmp_path / "other.jsonl").train(finished, seed=0) == {"found": False}
    assert Cells(log).train(finished, seed=0) == {"found": True}
    assert places[0] == places[-1] and len(set(places)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "other.jsonl"]


def test_the_rate_is_chosen_on_held_out_images_and_every_seed_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def finetuned(part: str, data: str, size: int, lr: float, seed: int, options: Namespace) -> dict[str, Any]:
        runs.append((part, lr, seed))
        better = (lr == 4e-3) == (part == "head")  # on held-out images; on the test images it is the other way round
        return {"validation": 80.0 + better, "test": 70.0 + seed - 5 * better, "stored_bytes": len(part)}

    def costs(size: int, options: Namespace) -> dict[str, Any]:
        taken = {"step_ms": 1.0, "faster": {"median": 1.0}, "peak_bytes": 1, "learning": 1}
        return {part: taken for part in ("all", "attention", "ffn", "head")}

    monkeypatch.setattr(lesson_tuning, "finetuned", finetuned)
    monkeypatch.setattr(lesson_tuning, "costs", costs)
    rows = lesson_tuning.measure(Cells(tmp_path / "log"), options())
    assert {row["part"]: row["lr"] for row in rows} == {"all": 1e-3, "attention": 1e-3, "ffn": 1e-3, "head": 4e-3}
    assert all(row["seeds"] == [65.0, 66.0] and row["mean"] == 65.5 for row in rows)
    assert len(runs) == len(set(runs)) == 4 * 3  # two rates with the first seed, the better one with the second
    lesson_tuning.show(rows)
    lesson_tuning.draw(rows, tmp_path / "tuning.png")
    assert (tmp_path / "tuning.png").stat().st_size > 5000


def test_masked_pre_training_hides_patches_behind_stems_that_mix_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[list[str]] = []

    def verb(words: list[str]) -> Any:
        said.append(words)
        return {"folder": "runs/masked-1", "test": {"top1": 0.5}, "seconds": 1.0}

    monkeypatch.setattr(lesson_stems, "vitrail_verb", verb)
    stems = {stem.name: stem for stem in lesson_stems.STEMS}
    chosen = options(cifar=Path("cifar"))
    assert lesson_stems.pretrained(stems["LeViT"], 3, tmp_path, chosen)["test"] == 50.0
    assert lesson_stems.pretrained(stems["hMLP, LN"], 3, tmp_path, chosen)["test"] == 50.0
    (mixing, after, alone, _) = said
    assert "--objective.mask-after-stem" in mixing and "--objective.mask-after-stem" not in alone
    assert alone[0] == "train" and {"--vit.stem=hmlp", "--vit.stem_norm=layer", "--seed=3"} <= set(alone)
    assert after[0] == "finetune" and "--from=runs/masked-1" in after


@pytest.mark.slow
def test_stems_are_compared_by_seeds_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def arm(stem: lesson_stems.Stem, seed: int, folder: Path, options: Namespace) -> dict[str, Any]:
        return {"test": len(stem.name) + 2.0 * seed}

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(lesson_stems, "ARMS", {"supervised": arm, "masked": arm})
    rows = lesson_stems.measure(Cells(tmp_path / "log"), options())
    assert rows[0]["supervised"] == {"mean": 7.0, "deviation": round(2**0.5, 2), "seeds": [6.0, 8.0]}
    assert [row["stem"] for row in rows if "masked" not in row] == ["linear, a block more"]
    lesson_stems.show(rows)
    lesson_stems.draw(rows, tmp_path / "stems.png")
    assert (tmp_path / "stems.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="GFLOPs"):
        lesson_stems.check_paper([{**row, "gflops": row["gflops"] + 0.01} for row in rows])
